"""t(n): the seconds of a target decode of n tokens, measured while generations run."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

__all__ = ["TargetTimes", "smooth"]


class TargetTimes:
    """Seconds by number of tokens, each a moving average of the decodes of that size.

    It begins with nothing, or with the times of earlier runs. The machine may be slower or faster
    now: sizes that were not measured in this run have their earlier time multiplied by the pace of those
    that were.

    Attributes:
        n_measured: decodes of this run by number of tokens.
    """

    def __init__(self) -> None:
        self.n_measured: dict[int, int] = {}
        self._measured: dict[int, float] = {}
        self._kept: dict[int, float] = {}  # seconds of earlier runs
        self._pace = 1.0  # seconds of this run over those
        self._seconds: dict[int, float] = {}  # both together

    def __bool__(self) -> bool:
        return bool(self._seconds)

    def has(self, n: int) -> bool:
        """Return whether decodes of exactly ``n`` tokens have a time."""
        return n in self._seconds

    @property
    def largest(self) -> int:
        """The largest number of tokens that has a time."""
        return max(self._seconds)

    def start_from(self, seconds: Mapping[int, float]) -> None:
        """Begin with the times of earlier runs; call it before anything is learned."""
        self._kept = dict(seconds)
        self._seconds = dict(seconds)

    def learn(self, n: int, seconds: float, times: int = 1) -> float:
        """Learn from ``times`` decodes of ``n`` tokens.

        Returns:
            the factor by which the pace has changed.
        """
        old, n_before, factor = self._measured.get(n, 0.0), None, 1.0
        if self._kept:
            ratio = seconds / (self._pace * _interpolated(self._kept, n))
            weight = max(0.1, 1.0 / (2.0 + sum(self.n_measured.values())))
            factor = 1.0 + weight * (min(2.0, max(0.5, ratio)) - 1.0)
            self._pace *= factor
            if n in self._kept:
                n_before = self.n_measured.get(n, 0)
                old = old or self._pace * self._kept[n]
        self._measured[n] = smooth(old, seconds, times, n_before)
        self.n_measured[n] = self.n_measured.get(n, 0) + times
        paced = {size: self._pace * kept for size, kept in self._kept.items()}
        self._seconds = {**paced, **self._measured}
        return factor

    def of(self, n: int) -> float:
        """Return the seconds of ``n`` tokens: known, between two known ones, or extrapolated."""
        return self._seconds[n] if n in self._seconds else _interpolated(self._seconds, n)


def _interpolated(seconds: Mapping[int, float], n: int) -> float:
    known = sorted(seconds)
    at = bisect.bisect_left(known, n)
    if at == 0 or (at < len(known) and known[at] == n):
        return seconds[known[at]]
    low = known[at - 1]
    if at < len(known):
        high = known[at]
        share = (n - low) / (high - low)
        return seconds[low] * (1 - share) + seconds[high] * share
    slope = seconds[low] / 8  # only one size is known: assume that more tokens cost something
    if at > 1:
        before = known[at - 2]
        slope = max(0.0, (seconds[low] - seconds[before]) / (low - before))
    return seconds[low] + slope * (n - low)


def smooth(old: float, new: float, times: int = 1, n_before: int | None = None) -> float:
    """Return the moving average after ``times`` observations of ``new``; one outlier moves it little.

    Args:
        n_before: if the average began with a value of an earlier run, the observations since: that value
            counts as one of them.
    """
    if old == 0.0:
        return new
    rate = 1.0 - 0.9**times
    if n_before is not None:
        rate = max(rate, times / (n_before + times + 1.0))
    return old + rate * ((min(new, 2.0 * old) if n_before != 0 else new) - old)
