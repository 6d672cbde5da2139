"""Checkpoints: states of sequences at earlier positions, in host memory.

A recurrent state has one position, and llama.cpp cannot move it back. A copy taken at an earlier
position can be put back, and only the tokens after it are decoded again. Forks share checkpoints.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import attrgetter

import numpy as np
import numpy.typing as npt

_position = attrgetter("n_tokens")


@dataclass(eq=False)
class Checkpoint:
    """The state of a sequence after its first ``n_tokens``.

    Attributes:
        n_tokens: the position at which the sequence continues from it.
        state: the state as llama.cpp writes it, without attention cells, uint8 (n,).
        row: the logits after the last of these tokens, float32 (V,); None if they were not kept.
    """

    n_tokens: int
    state: npt.NDArray[np.uint8]
    row: npt.NDArray[np.float32] | None

    @property
    def n_bytes(self) -> int:
        """The bytes of memory it takes."""
        return self.state.nbytes + (0 if self.row is None else self.row.nbytes)


class Checkpoints:
    """The checkpoints of all sequences of a context, limited to ``max_bytes``.

    At the limit, it drops the checkpoint that leaves the smallest gap, compared to its distance from
    the end of the text. So checkpoints are dense near the end of a text and sparse near its beginning.

    Attributes:
        max_bytes: the most host memory, in bytes; 0 = no checkpoints.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._of: dict[int, list[Checkpoint]] = {}  # the checkpoints of each sequence, by position

    @property
    def n_bytes(self) -> int:
        """The memory of all checkpoints, in bytes; a shared checkpoint counts once."""
        return sum(point.n_bytes for point in set(chain.from_iterable(self._of.values())))

    def last(self, seq_id: int) -> int:
        """Return the position of a sequence's last checkpoint, 0 if it has none."""
        points = self._of.get(seq_id)
        return points[-1].n_tokens if points else 0

    def find(self, seq_id: int, n: int) -> Checkpoint | None:
        """Return a sequence's last checkpoint that has at most ``n`` tokens."""
        points = self._of.get(seq_id, [])
        at = bisect_right(points, n, key=_position)
        return points[at - 1] if at else None

    def add(self, seq_id: int, point: Checkpoint) -> None:
        """Add a sequence's newest checkpoint. Without room for all, drop one, possibly the new one."""
        self._of.setdefault(seq_id, []).append(point)
        self.thin()

    def of(self, seq_id: int) -> list[Checkpoint]:
        """Return a sequence's checkpoints, in order."""
        return [*self._of.get(seq_id, ())]

    def merge(self, seq_id: int, points: Iterable[Checkpoint]) -> None:
        """Add checkpoints of a sequence at any positions, as ``add`` does."""
        merged = {point.n_tokens: point for point in (*points, *self.of(seq_id))}
        if merged:
            self._of[seq_id] = sorted(merged.values(), key=_position)
        self.thin()

    def share(self, source: int, target: int) -> None:
        """Share the checkpoints of ``source`` with ``target``, which has none."""
        points = self._of.get(source)
        if points:
            self._of[target] = [*points]

    def cut(self, seq_id: int, n: int) -> None:
        """Drop a sequence's checkpoints with more than ``n`` tokens; all of them for 0."""
        points = self._of.get(seq_id)
        while points and (points[-1].n_tokens > n or not n):
            points.pop()
        if points == []:
            del self._of[seq_id]

    def clear(self) -> None:
        """Drop all checkpoints."""
        self._of.clear()

    def thin(self) -> None:
        """Drop checkpoints until the rest fit into ``max_bytes``."""
        while self.n_bytes > self.max_bytes:
            dropped = self._least()
            for seq_id, points in list(self._of.items()):
                if dropped in points:
                    points.remove(dropped)
                    if not points:
                        del self._of[seq_id]

    def _least(self) -> Checkpoint:
        """Return the checkpoint to drop next; the last of a text only if there are no others."""
        best, least = None, float("inf")
        for points in self._of.values():
            end, before = points[-1].n_tokens, 0
            for point, after in pairwise(points):
                missed = (after.n_tokens - before) / (end - point.n_tokens)
                if missed < least:
                    best, least = point, missed
                before = point.n_tokens
        return next(iter(self._of.values()))[-1] if best is None else best
