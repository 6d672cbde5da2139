"""Benchmarking: interleaved runs, the time of a decode, the best settings for a model pair.

timing.py     samples, interleaved runs, medians, spread, ratios and their confidence intervals
machine.py    the machine that was measured on: processor, load, build
workloads.py  what is timed: generations, the time inside llama.cpp; v(n) and c
pair.py       which draft length and rule is the fastest for a target with its drafter
"""

from ..profile import profile_problem
from .machine import Machine, free_memory_bytes, processor_flags, profile_in_use
from .pair import Cell, PairBench, PairReport, Sweep
from .timing import (
    Interval,
    Maker,
    Sample,
    Series,
    Spread,
    Stopped,
    Work,
    interleave,
)
from .workloads import (
    DecodeClock,
    draft_cost,
    plain,
    seed_of,
    speculative,
    verify_times,
)

__all__ = [
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
    "Work",
    "draft_cost",
    "free_memory_bytes",
    "interleave",
    "plain",
    "processor_flags",
    "profile_in_use",
    "profile_problem",
    "seed_of",
    "speculative",
    "verify_times",
]
