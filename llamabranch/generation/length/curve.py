"""t(n): the seconds of a target decode of n tokens, and how many rows to decode n tokens with.

It need not grow with n: kernels multiply blocks of rows, and what is left of a block row by row, so that
eight rows can take less time than five. The end of such a block is an *edge*: rows that nobody reads fill
a decode up to it where that was measured to be faster.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping

from ...native import forkable_lock

__all__ = ["Curve", "smooth"]

_GAIN = 0.97  # what a padded decode may take of the time of one that is not
_MOST_SHOWN = 33  # sizes
_SLOW = 3.0  # times what was expected
_FEW = 4  # decodes: times of fewer fill no decode, since one slow decode would decide
_EVERY = 16  # decodes after which the edges are looked for again


class Curve:
    """Seconds by number of tokens, each a moving average of the decodes of that size.

    It begins with nothing, or with the times of earlier runs, to which ``measure`` adds. The machine may
    be slower or faster now, and a context grows: all these sizes keep their ratios and follow the pace
    of those that are decoded.

    Args:
        kept: seconds of earlier runs, by number of tokens.
        n_kept: of how many decodes they are the means, where that is known.

    Attributes:
        fills: whether rows that nobody reads may be decoded: only where they change no text.
        n_measured: decodes made to measure them, by number of tokens.
    """

    def __init__(
        self, kept: Mapping[int, float] | None = None, n_kept: Mapping[int, float] | None = None
    ) -> None:
        self.fills = False
        self.n_measured: dict[int, int] = {}
        self._n_learned: dict[int, int] = {}  # decodes of this run's texts
        self._kept = dict(kept or {})  # and those measured
        self._of_profile = frozenset(self._kept)
        self._n_kept = {n: (n_kept or {}).get(n, _FEW) for n in self._kept}
        self._shape = dict(self._kept)  # seconds at the pace of those kept
        self._pace = 1.0
        self._rows: list[int] = []  # to decode n tokens with; made anew when empty
        self._lock = forkable_lock()

    def __bool__(self) -> bool:
        return bool(self._shape)

    @property
    def is_kept(self) -> bool:
        """True if it has times of earlier runs, or measured ones: these decide how decodes are filled."""
        return bool(self._kept)

    @property
    def n_idle(self) -> int:
        """How many decodes were made to measure them."""
        return sum(self.n_measured.values())

    @property
    def n_learned(self) -> int:
        """How many decodes of texts it has learned from."""
        return sum(self._n_learned.values())

    @property
    def n_decodes(self) -> dict[int, int]:
        """All decodes of this run by number of tokens."""
        counts = (self.n_measured, self._n_learned)
        return {n: sum(each.get(n, 0) for each in counts) for each in counts for n in each}

    @property
    def sizes(self) -> list[int]:
        """The numbers of tokens that have a time, ascending."""
        with self._lock:
            return sorted(self._shape)

    def learn(self, n: int, seconds: float, times: int = 1) -> float:
        """Learn from ``times`` decodes of ``n`` tokens.

        Returns:
            the factor by which the pace has changed.
        """
        with self._lock:
            factor, n_all = 1.0, self.n_learned
            n_here = self._n_learned.get(n, 0)
            if n <= max(self._kept, default=0):
                ratio = seconds / (self._pace * _interpolated(self._kept, n))
                weight = max(0.1, 1.0 / (2.0 + n_all))
                factor = 1.0 + weight * (min(2.0, max(0.5, ratio)) - 1.0)
                self._pace *= factor
            n_before = n_here if n in self._kept else None
            old, new = self._shape.get(n, 0.0), seconds / self._pace
            if not old and self._shape:  # a first decode that is slow says little about its size
                new = min(new, _SLOW * _interpolated(self._shape, n))
            self._shape[n] = smooth(old, new, times, n_before)
            self._n_learned[n] = n_here + times
            if n_all // _EVERY != (n_all + times) // _EVERY:
                self._rows = []
            return factor

    def measure(self, n: int, seconds: float, times: int) -> None:
        """Take the time of ``times`` decodes that were made to measure it."""
        with self._lock:
            self._kept[n] = self._shape[n] = seconds / self._pace
            self._n_kept[n] = _FEW
            self.n_measured[n] = times
            self._rows = []

    def of(self, n: int) -> float:
        """Return the seconds of ``n`` tokens: known, between two known ones, or extrapolated."""
        with self._lock:
            return self._of(n)

    def _of(self, n: int) -> float:
        return self._pace * _interpolated(self._shape, n)

    def rows(self, n: int) -> int:
        """Return the number of rows, ``n`` or more, with which ``n`` tokens are decoded fastest.

        More than ``n`` only where both were measured, or known before this run from some decodes: no
        single decode decides.
        """
        if not self.fills:
            return n
        rows = self._rows or self._find_rows()
        return rows[n] if n < len(rows) else n

    def _find_rows(self) -> list[int]:
        with self._lock:
            timed = {n for n in self._kept if self._n_kept.get(n, _FEW) >= _FEW}
            best = largest = max(timed, default=0)
            rows = list(range(largest + 1))
            for n in range(largest, 0, -1):
                if n in timed:
                    if self._of(n) <= self._of(best):
                        best = n
                    elif self._of(best) < _GAIN * self._of(n):
                        rows[n] = best
            self._rows = rows
            return rows

    def filled(self, n: int) -> float:
        """Return the seconds of ``n`` tokens, decoded with as many rows as is fastest."""
        return self.of(self.rows(n))

    def explain(self) -> str:
        """Return v(n) = t(n) / t(1) of all sizes that have a time, whence, and how decodes are filled."""
        sizes, one_s = self.sizes, self.of(1)
        v = ", ".join(f"{n} tokens v = {self.of(n) / one_s:.2f}" for n in sizes[:_MOST_SHOWN])
        filled = [f"{n} to {self.rows(n)}" for n in sizes if self.rows(n) > n]
        sources = {
            "from the profile": self._of_profile,
            "measured while nothing ran": self.n_measured,
            "learned from this run's decodes": self._n_learned,
        }
        told = [f"{name}: {_ranges(its)}" for name, its in sources.items() if its]
        told += ["others: interpolated"] if sizes != [*range(1, sizes[-1] + 1)] else []
        few = [n for n in sizes if self._n_kept.get(n, 0) + self.n_decodes.get(n, 0) < _FEW]
        told += [f"from fewer than {_FEW} decodes: {_ranges(few)}"] if few else []
        told += ["padded: " + ", ".join(filled)] if filled else []
        return "; ".join([f"a target decode of {v}", *told])


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text: "1, 3 to 8"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _interpolated(seconds: Mapping[int, float], n: int) -> float:
    found = seconds.get(n)
    if found is not None:
        return found
    known = sorted(seconds)
    at = bisect.bisect_left(known, n)
    if at == 0:
        return seconds[known[0]]
    low = known[at - 1]
    if at < len(known):
        high = known[at]
        share = (n - low) / (high - low)
        return seconds[low] * (1 - share) + seconds[high] * share
    slope = seconds[low] / 8  # only one size is known: assume that more tokens cost something
    if at > 1:  # the mean of the upper half: a single step is no slope
        before = known[min(at - 2, bisect.bisect_right(known, low / 2))]
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
