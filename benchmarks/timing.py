"""Timings and their statistics: interleaved runs, medians, spread, ratios.

The speed of a machine changes during a measurement. Therefore the measured methods take turns. Each
prompt is run by all methods, in alternating order, and ratios are computed within a run.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from llamabranch.speculative import SpeculativeStats

PAUSE_S = 0.01  # between two methods, because the first one's threads still spin for a while


@dataclass(frozen=True)
class Timing:
    """One timed piece of work. ``seconds`` is the measured part, often without the prompt."""

    n_tokens: int
    seconds: float
    tokens: tuple[int, ...] | None = None
    stats: SpeculativeStats | None = None

    @property
    def rate(self) -> float:
        """Tokens a second; nan if there are no tokens."""
        return self.n_tokens / self.seconds if self.n_tokens and self.seconds > 0 else math.nan


Work = Callable[[int], Timing]  # gets the number of an item and processes it
Maker = Callable[[int], Work]  # gets the number of a run at its start, and makes fresh state


@dataclass(frozen=True)
class Spread:
    """A median with the lowest and the highest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of ``values``; nan without values."""
        valid = [value for value in values if not math.isnan(value)] or [math.nan]
        return cls(median(valid), min(valid), max(valid))

    def as_dict(self) -> dict[str, float | None]:
        """Return the values for JSON, with None for nan."""
        return {name: None if math.isnan(x) else x for name, x in vars(self).items()}


@dataclass
class Series:
    """The runs of one method. Each run is a list with the timing of every item."""

    runs: list[list[Timing]] = field(default_factory=list)

    @property
    def timings(self) -> list[Timing]:
        """The timings of all runs."""
        return [timing for run in self.runs for timing in run]

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each run."""
        return [Series([run]).total.rate for run in self.runs]

    @property
    def rate(self) -> Spread:
        """Tokens a second: the median and the spread of the runs."""
        return Spread.of(self.rates)

    def ratio(self, base: Series) -> Spread:
        """Return the speedup over ``base``: the median of the ratios within each run."""
        pairs = zip(self.rates, base.rates, strict=True)
        return Spread.of([own / other for own, other in pairs])

    @property
    def stats(self) -> SpeculativeStats:
        """Counts and times of all runs."""
        total = SpeculativeStats()
        for timing in self.timings:
            if timing.stats is not None:
                total.add(timing.stats)
        return total

    @property
    def total(self) -> Timing:
        """Tokens and seconds of all runs."""
        timings = self.timings
        return Timing(
            sum(timing.n_tokens for timing in timings), sum(timing.seconds for timing in timings)
        )

    def same_texts(self, other: Series) -> tuple[int, int]:
        """Return how many texts have exactly the tokens of ``other``, and how many were compared."""
        texts = ((a.tokens, b.tokens) for a, b in zip(self.timings, other.timings, strict=True))
        pairs = [(a, b) for a, b in texts if a is not None and b is not None]
        return sum(a == b for a, b in pairs), len(pairs)


def interleave(makers: Mapping[str, Maker], *, n_runs: int, n_items: int) -> dict[str, Series]:
    """Time all methods on the same items, in turns, after each has warmed up on item 0.

    A run gives every item to every method. The order of the methods is reversed for every other
    item. Each run starts with fresh state. Its number sets the seeds; that of the warm-up is -1.
    """
    for name, maker in makers.items():
        show_progress(f"warming up: {name}")
        maker(-1)(0)
    series = {name: Series([[] for _ in range(n_runs)]) for name in makers}
    for run in range(n_runs):
        works = {name: maker(run) for name, maker in makers.items()}
        for item in range(n_items):
            show_progress(f"run {run + 1} of {n_runs}, {item + 1} of {n_items}")
            for name in list(works)[:: 1 if (run + item) % 2 == 0 else -1]:
                time.sleep(PAUSE_S)
                series[name].runs[run].append(works[name](item))
    show_progress("")
    return series


def show_progress(text: str) -> None:
    """Show progress on one line of standard error, if that is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
