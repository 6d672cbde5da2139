"""Measuring speed: rivals turn by turn, what a decode costs, what drafting brings to a pair.

timing.py     samples, interleaved runs, medians, spread, ratios and their intervals
machine.py    the processor, its load, the build: what figures were taken on
workloads.py  one timed generation, plain or speculative
costs.py      clocks around llama.cpp's own part; v(n) and c
pair.py       a target with its drafter: which length and rule is the fastest
plotting.py   curves as PNG files
"""

from .costs import CallClock, DecodeClock, draft_cost, verify_costs, verify_times
from .machine import Machine, load_average
from .pair import Cell, PairBench, PairReport
from .plotting import Curve, save_plot
from .timing import (
    Interval,
    Maker,
    Sample,
    Series,
    Spread,
    Stopped,
    Total,
    Work,
    interleave,
    median_time,
)
from .workloads import plain, seed_of, speculative

__all__ = [
    "CallClock",
    "Cell",
    "Curve",
    "DecodeClock",
    "Interval",
    "Machine",
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
    "load_average",
    "median_time",
    "plain",
    "save_plot",
    "seed_of",
    "speculative",
    "verify_costs",
    "verify_times",
]
