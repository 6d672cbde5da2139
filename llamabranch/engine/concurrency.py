"""How many texts are continued in one decode: as many as give the highest throughput, as measured.

In a unified cache the attention of every token runs over the cells of all texts, so a step over n texts
with L cells each takes about

    a + b n + c n L + m n (n L)

a: reading the weights; b: computing a token; c: attention to a cell of its own; m: skipping a cell of
another text. A token's time a / n + b + c L + m n L is least at n = sqrt(a / (m L)). The four numbers
are fitted to the times of decodes; now and then a decode of fewer texts, and times with fewer texts in
the cache, tell them apart. Until then all texts run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np

__all__ = ["Concurrency"]

_N_KEPT = 96  # decodes
_EVERY = 4  # decodes of which one is kept
_FIT_EVERY = 8  # kept decodes between two fits
_LEAST = 24  # kept decodes before the first
_PROBE_EVERY = 32  # decodes between two probes; later, when much is known, eight times as many
_N_PROBED = 3  # decodes of a probe: the first of a size builds llama.cpp's graph, and is not kept
_N_EARLY = 512  # decodes
_LEAST_CELLS = 1024  # with fewer, attention to other texts costs little: nothing is tried
_GAIN = 1.25  # what the best number must bring to replace the present one
_SLOW = 1.1  # times the fitted time
_VARIED = 1.5  # what was measured must differ by such a factor


class Concurrency:
    """Learns the times of decodes, and how many texts of a length to continue together.

    Attributes:
        limit: that number; None while it is not known, or as many as can be.
        typical: how many tokens the texts so far had, smoothed.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self._seen: deque[tuple[int, int, int, float]] = deque(maxlen=_N_KEPT)
        self._n_kept = 0
        self._n_fitted = 0  # how many were kept at the last fit
        self._n_decodes = 0
        self._n_before = 0  # texts in the last decode
        self._times = (math.nan,) * 4  # a, b, c and m
        self.typical = math.inf

    def learn(
        self, n_texts: int, n_cells: int, count_used: Callable[[], int], seconds: float
    ) -> None:
        """Note a decode of one token of each of ``n_texts`` texts.

        Args:
            n_texts: how many.
            n_cells: the cells of those texts together.
            count_used: counts the cells that are in use, also those of other texts.
            seconds: how long it took.
        """
        if n_cells < _LEAST_CELLS // 4:  # less than the smallest probe has
            return
        is_new, self._n_before = n_texts != self._n_before, n_texts
        is_probe = self._probe_part() > 1
        self._n_decodes += 1
        if not is_new and (is_probe or self._n_decodes % _EVERY == 0):
            self._seen.append((n_texts, n_cells, count_used(), seconds))
            self._n_kept += 1

    def _probe_part(self) -> int:
        """Return which part of the texts the next decode continues, as 1 over this number."""
        period = _PROBE_EVERY if self._n_decodes < _N_EARLY else 8 * _PROBE_EVERY
        left = period - self._n_decodes % period
        return 4 if left <= _N_PROBED else 2 if left <= 2 * _N_PROBED else 1

    def n_probed(self, n_running: int, n_cells: int) -> int:
        """Return how many of the running texts, which have ``n_cells``, the next decode continues."""
        if n_running < 4 or n_cells < _LEAST_CELLS:
            return n_running
        return max(1, n_running // self._probe_part())

    def note_end(self, n_tokens: int) -> None:
        """Note that a text has ended after so many tokens."""
        known = self.typical
        self.typical = n_tokens if known == math.inf else 0.9 * known + 0.1 * n_tokens

    @property
    def has_news(self) -> bool:
        """True if enough has been learned since the last fit for another one."""
        return self._n_kept >= max(_LEAST, self._n_fitted + _FIT_EVERY)

    def update(self, length: float, most: int) -> None:
        """Set ``limit`` for texts of ``length`` cells on average, of which ``most`` can run at all."""
        if self.has_news:
            self._n_fitted = self._n_kept
            self._times = self._fit()
        fixed, computed, attended, skipped = self._times
        if not fixed > 0 or not skipped > 0:
            return

        def token_s(n: int) -> float:
            return fixed / n + computed + attended * length + skipped * n * length

        best = min(max(1, round(math.sqrt(fixed / (skipped * length)))), most)
        now = self.limit or most
        if token_s(now) > _GAIN * token_s(best):
            self.limit = None if best == most else best

    def _fit(self) -> tuple[float, float, float, float]:
        """Return a, b, c and m; nan where the times do not tell them apart."""
        n, cells, used, seconds = (np.array(x, dtype=float) for x in zip(*self._seen, strict=True))
        unknown = (math.nan,) * 4
        # Attention to own cells and to those of others are told apart by numbers of texts in the cache.
        for varied in (n, n * used / np.maximum(cells, 1)):
            low, high = np.quantile(varied, [0.1, 0.9])
            if high < _VARIED * low:
                return unknown
        columns = np.stack([np.ones_like(n), n, cells, n * used], axis=1)
        scale = np.abs(columns).max(axis=0)
        columns = columns / scale / seconds[:, None]  # so that relative errors count
        kept = np.ones(len(n), dtype=bool)
        found = np.zeros(4)
        for _ in range(3):  # decodes that something else held up are left out
            found, _, rank, _ = np.linalg.lstsq(columns[kept], np.ones(kept.sum()), rcond=None)
            if rank < 4:
                return unknown
            ratio = 1 / np.maximum(columns @ found, 1e-9)  # of the time taken to the fitted one
            kept = ratio <= max(_SLOW, float(np.quantile(ratio, 0.5)))
        a, b, c, m = (float(x) for x in found / scale)
        return a, max(0.0, b), max(0.0, c), m
