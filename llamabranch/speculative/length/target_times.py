"""t(n): the seconds of a target decode of n tokens, measured while generations run."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

__all__ = ["TargetTimes", "smooth"]


class TargetTimes:
    """Seconds by number of tokens, each a moving average of the decodes of that size.

    It begins with nothing, or with the times of earlier runs. The machine may be slower or faster
    now: until a size is measured in this run, its time moves along with those that are.

    Attributes:
        n_measured: decodes of this run by number of tokens.
    """

    def __init__(self) -> None:
        self.n_measured: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        self._from_earlier: frozenset[int] = frozenset()  # sizes that began with a time
        self._kept: set[int] = set()  # of these, those that have not been measured in this run

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
        self._seconds = dict(seconds)
        self._from_earlier = frozenset(seconds)
        self._kept = set(seconds)

    def learn(self, n: int, seconds: float, times: int = 1) -> float:
        """Learn from ``times`` decodes of ``n`` tokens.

        Returns:
            the factor by which the times of earlier runs were corrected.
        """
        factor = 1.0
        if self._kept:
            ratio = min(2.0, max(0.5, seconds / self._interpolated(n)))
            weight = max(0.1, 1.0 / (2.0 + sum(self.n_measured.values())))
            factor = 1.0 + weight * (ratio - 1.0)
            for size in self._kept:
                self._seconds[size] *= factor
            self._kept.discard(n)
        n_before = self.n_measured.get(n, 0) if n in self._from_earlier else None
        self._seconds[n] = smooth(self._seconds.get(n, 0.0), seconds, times, n_before)
        self.n_measured[n] = self.n_measured.get(n, 0) + times
        return factor

    def of(self, n: int) -> float:
        """Return the seconds of ``n`` tokens: measured, between two measured ones, or extrapolated."""
        return self._seconds[n] if n in self._seconds else self._interpolated(n)

    def _interpolated(self, n: int) -> float:
        seconds, known = self._seconds, sorted(self._seconds)
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
