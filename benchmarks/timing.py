"""Timings of work in runs: rates, and ratios within a run.

The speed of a machine changes during a measurement. Therefore the measured methods take turns, and ratios
are computed within a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from llamabranch.bench.speed import Spread
from llamabranch.speculative import SpeculativeStats

__all__ = ["Maker", "Series", "Timing", "Work"]


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
