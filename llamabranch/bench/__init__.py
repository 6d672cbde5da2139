"""Benchmarking: interleaved runs, the time of a decode, the best settings for a model pair.

timing.py     samples, interleaved runs, medians, spread, ratios and their confidence intervals
machine.py    the machine that was measured on: processor, load, build
workloads.py  one timed generation, plain or speculative
costs.py      the time inside llama.cpp; v(n) and c
pair.py       which draft length and rule is the fastest for a target with its drafter
"""

from ..profile import profile_problem
from .costs import CallClock, DecodeClock, draft_cost, verify_costs, verify_times
from .machine import Machine, free_memory_bytes, load_average, processor_flags, profile_in_use
from .pair import Cell, PairBench, PairReport, Sweep
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
    "Sweep",
    "Total",
    "Work",
    "draft_cost",
    "free_memory_bytes",
    "interleave",
    "load_average",
    "median_time",
    "plain",
    "processor_flags",
    "profile_in_use",
    "profile_problem",
    "seed_of",
    "speculative",
    "verify_costs",
    "verify_times",
]
