"""Measuring speed: rivals turn by turn, what a decode costs, what drafting brings to a pair.

timing.py     samples, interleaved runs, medians, spread, ratios
workloads.py  one timed generation, plain or speculative
costs.py      clocks around llama.cpp's own part; v(n) and c
pair.py       a target with its drafter: which length and rule is the fastest
plotting.py   curves as PNG files
"""

from .costs import CallClock, DecodeClock, draft_cost, verify_costs
from .pair import Cell, PairBench, PairReport
from .plotting import Curve, save_plot
from .timing import Maker, Sample, Series, Spread, Stopped, Total, Work, interleave, median_time
from .workloads import plain, seed_of, speculative

__all__ = [
    "CallClock",
    "Cell",
    "Curve",
    "DecodeClock",
    "Maker",
    "PairBench",
    "PairReport",
    "Sample",
    "Series",
    "Spread",
    "Stopped",
    "Total",
    "Work",
    "draft_cost",
    "interleave",
    "median_time",
    "plain",
    "save_plot",
    "seed_of",
    "speculative",
    "verify_costs",
]
