"""Samples, interleaved runs, medians, spread and ratios; knows nothing of models.

A machine changes speed while it is measured. So rivals are never timed one after another: each prompt is
given to all of them in turn, in one order and then in the other, and ratios are taken within a run.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import DecodeInterruptedError
from ..speculative import SpeculativeStats

__all__ = [
    "Maker",
    "Sample",
    "Series",
    "Spread",
    "Stopped",
    "Total",
    "Work",
    "interleave",
    "median_time",
]

PAUSE_S = 0.01  # between rivals: the other's threads spin for a moment after their last decode


class Stopped(Exception):
    """Raised by a work that was asked to stop: what it did does not count."""


@dataclass(frozen=True)
class Sample:
    """One timed piece of work; ``seconds`` leave out what is said not to count."""

    n_tokens: int
    seconds: float
    tokens: tuple[int, ...] | None = None
    stats: SpeculativeStats | None = None


Work = Callable[[int], Sample]  # does the work for the item of that number
Maker = Callable[[int], Work]  # called at the start of the run of that number: fresh state


@dataclass(frozen=True)
class Spread:
    """A median with the extremes it was taken from."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of ``values``, nan where there are none."""
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls(math.nan, math.nan, math.nan)
        return cls(statistics.median(known), min(known), max(known))

    def as_dict(self) -> dict[str, float | None]:
        """Return it for JSON."""
        values = {"median": self.median, "low": self.low, "high": self.high}
        return {name: None if math.isnan(x) else x for name, x in values.items()}


@dataclass
class Total:
    """What one run of one rival came to."""

    n_tokens: int = 0
    seconds: float = 0.0
    texts: list[tuple[int, ...] | None] = field(default_factory=list)
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)

    def add(self, sample: Sample) -> None:
        """Count a sample in."""
        self.n_tokens += sample.n_tokens
        self.seconds += sample.seconds
        self.texts.append(sample.tokens)
        if sample.stats is not None:
            self.stats.add(sample.stats)

    @property
    def rate(self) -> float:
        """Tokens a second, nan before there are any."""
        return self.n_tokens / self.seconds if self.seconds > 0 else math.nan


@dataclass
class Series:
    """The runs of one rival."""

    runs: list[Total] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each run."""
        return [run.rate for run in self.runs]

    @property
    def rate(self) -> Spread:
        """Tokens a second: median of the runs."""
        return Spread.of(self.rates)

    def ratio(self, base: Series) -> Spread:
        """Return how much faster this is than ``base``: the median of the ratios within each run."""
        pairs = zip(self.rates, base.rates, strict=True)
        return Spread.of([mine / theirs for mine, theirs in pairs])

    @property
    def stats(self) -> SpeculativeStats:
        """Counts and times of all runs."""
        total = SpeculativeStats()
        for run in self.runs:
            total.add(run.stats)
        return total

    @property
    def seconds(self) -> float:
        """Seconds of all runs."""
        return sum(run.seconds for run in self.runs)

    @property
    def n_tokens(self) -> int:
        """Tokens of all runs."""
        return sum(run.n_tokens for run in self.runs)

    @property
    def step_s(self) -> float:
        """Seconds a token, nan before there is one."""
        return self.seconds / self.n_tokens if self.n_tokens else math.nan

    def same_texts(self, other: Series) -> tuple[int, int]:
        """Return how many texts are token for token those of ``other``, and how many were compared."""
        same = compared = 0
        for mine, theirs in zip(self.runs, other.runs, strict=True):
            for a, b in zip(mine.texts, theirs.texts, strict=True):
                if a is not None and b is not None:
                    compared += 1
                    same += a == b
        return same, compared


def tell(text: str) -> None:
    """Write what is being done over the last such line, if standard error is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


def interleave(
    makers: Mapping[str, Maker],
    *,
    n_runs: int,
    n_items: int,
    pause_s: float = PAUSE_S,
    warm_up: bool = True,
    progress: Callable[[str], None] = tell,
) -> dict[str, Series]:
    """Time all rivals on the same items, turn by turn.

    Each first warms up on item 0, untimed and with a state of its own. A run gives every item to every
    rival, in order and, for every other item, in reverse. Each run starts with fresh state. Where a
    work is ``Stopped``, or its decode interrupted, what is returned holds the items all rivals did.
    """
    series = {name: Series() for name in makers}
    try:
        for name, maker in makers.items() if warm_up else ():
            progress(f"warming up: {name}")
            maker(-1)(0)
        for run in range(n_runs):
            works = {name: maker(run) for name, maker in makers.items()}
            totals = {name: Total() for name in makers}
            for item in range(n_items):
                progress(f"run {run + 1} of {n_runs}, {item + 1} of {n_items}")
                order = list(works) if (run + item) % 2 == 0 else list(reversed(works))
                samples = {}
                for name in order:
                    time.sleep(pause_s)
                    samples[name] = works[name](item)
                for name, total in totals.items():
                    total.add(samples[name])
                    if item == 0:
                        series[name].runs.append(total)
    except (Stopped, DecodeInterruptedError):
        pass
    progress("")
    return series


def median_time(work: Callable[[], object], n: int, warm_up: int = 3) -> Spread:
    """Return the seconds ``work()`` takes, of ``n`` calls after ``warm_up`` untimed ones."""
    for _ in range(warm_up):
        work()
    seconds = []
    for _ in range(n):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return Spread.of(seconds)
