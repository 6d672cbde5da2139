"""Which sequence uses which cells of the K/V cache, kept in Python and checked against llama.cpp.

A fork shares the cells of its prefix, so a set of sequences uses fewer cells than the sum of their
lengths. Cells are written in *runs*: one sequence's uninterrupted appends. A sequence refers to slices
of runs: its own, and those it inherited from the sequence it was forked from. A cell is free when no
sequence refers to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a context's cache is, in cells (one cell holds one token's K and V).

    ``cells_shared`` are used by two or more sequences. ``sequences`` gives the tokens of each
    sequence that is not empty. ``cells_reserved`` are free but not reused for now, because a later
    token of some sequence could then get a cell below its earlier tokens. ``in_order`` is False if some
    had to be reused anyway. ``cells_cached`` are used by the prefix cache alone. They count as free,
    because the cache drops them when they are needed. With non-unified KV (``kv_unified=False``),
    ``cells_per_sequence`` is the number of cells that each sequence has to itself; no cell is shared or
    reserved.
    """

    cells_total: int
    cells_used: int
    cells_shared: int
    sequences: dict[int, int]
    cells_reserved: int = 0
    in_order: bool = True
    cells_cached: int = 0
    cells_per_sequence: int | None = None

    @property
    def cells_free(self) -> int:
        """Cells that are unused, or used only by the prefix cache."""
        return self.cells_total - self.cells_used


class _Run:
    """Cells that one sequence wrote one after another. A cell's write index is the number of cells
    written before it.

    ``users`` are the sequences that refer to at least one of the cells: only a few, even with hundreds
    of cached prefixes.
    """

    __slots__ = ("owner", "users", "write_indices")

    def __init__(self, owner: int, write_indices: list[int]) -> None:
        self.owner = owner
        self.users = {owner}
        self.write_indices = write_indices


@dataclass(slots=True)
class _Slice:
    run: _Run
    low: int
    high: int
    position: int  # of the first cell

    @property
    def end(self) -> int:
        return self.position + self.high - self.low

    @property
    def newest(self) -> int:
        return self.run.write_indices[self.high - 1]


_position = attrgetter("position")


@dataclass(slots=True)
class _Sequence:
    next_position: int = 0
    slices: list[_Slice] = field(default_factory=list)


class CellTable:
    """The cells of every sequence; it follows the decodes, copies and removals of the unified cache.

    A table may have more than a context's ``n_seq_max`` sequences. The others belong to the prefix
    cache, which never decodes them.

    Attributes:
        with_holes: sequences that may lack positions below their last one.
    """

    def __init__(self, n_cells: int, n_seq_max: int) -> None:
        self.n_cells = n_cells
        self.n_seq_max = n_seq_max
        # How many cells were written so far. A cell written later has a higher index, unless it filled
        # a hole.
        self.clock = 0
        self._sequences = [_Sequence() for _ in range(n_seq_max)]
        self.with_holes: set[int] = set()

    @property
    def n_sequences(self) -> int:
        """Return the number of sequences, including the prefix cache's."""
        return len(self._sequences)

    def make_sequence(self, seq_id: int) -> None:
        """Add the sequence ``seq_id`` if it does not exist yet."""
        while len(self._sequences) <= seq_id:
            self._sequences.append(_Sequence())

    def next_position(self, seq_id: int) -> int:
        """Return where the next token of ``seq_id`` goes: its largest position + 1, 0 if empty."""
        return self._sequences[seq_id].next_position

    def first_position(self, seq_id: int, start: int = 0) -> int:
        """Return the smallest position of ``seq_id`` at or after ``start``, or -1."""
        smallest = -1
        for s in reversed(self._sequences[seq_id].slices):
            if s.end <= start:
                break
            smallest = max(s.position, start)
        return smallest

    def length(self, seq_id: int) -> int:
        """Return how many cells ``seq_id`` refers to."""
        return sum(s.high - s.low for s in self._sequences[seq_id].slices)

    def append(self, seq_id: int, n: int, write_indices: Sequence[int] | None = None) -> None:
        """Record ``n`` new tokens at the end of ``seq_id``, by default with the next write indices."""
        if write_indices is None:
            write_indices = range(self.clock, self.clock + n)
            self.clock += n
        if not n:
            return
        sequence = self._sequences[seq_id]
        if sequence.slices:
            last = sequence.slices[-1]
            run = last.run
            if run.owner == seq_id and len(run.write_indices) == last.high:
                run.write_indices.extend(write_indices)
                last.high += n
                sequence.next_position += n
                return
        run = _Run(seq_id, list(write_indices))
        sequence.slices.append(_Slice(run, 0, n, sequence.next_position))
        sequence.next_position += n

    def newest(self, *, but: int = -1) -> int:
        """Return the write index of the newest last cell of all sequences except ``but``, or -1."""
        others = (s.slices[-1] for i, s in enumerate(self._sequences) if i != but and s.slices)
        return max((last.newest for last in others), default=-1)

    def exclusive(self, seq_id: int, start: int, end: int) -> tuple[int | None, int]:
        """Return the first position in [start, end) that only this sequence has, and how many it has."""
        end = min(end, self.next_position(seq_id))
        if self.with_holes:
            others = self.write_indices(but=seq_id)
            slices = self._sequences[seq_id].slices
            alone = [
                s.position + i - s.low
                for s in slices
                for i in range(s.low, s.high)
                if start <= s.position + i - s.low < end and s.run.write_indices[i] not in others
            ]
            return min(alone, default=None), len(alone)
        start = max(start, self._n_shared(seq_id, start))
        return (start, end - start) if start < end else (None, 0)

    def _n_shared(self, seq_id: int, start: int) -> int:
        """Return how many of a sequence's first tokens are shared; 0 if not more than ``start``.

        No sequence may have holes. Then two sequences that share a cell also share all cells before it,
        because a fork takes a whole prefix, and new tokens go to the end.
        """
        for s in reversed(self._sequences[seq_id].slices):
            if s.end <= start:
                break
            shared = s.low
            for i in s.run.users:
                other = self._sequences[i].slices
                if i != seq_id:
                    at = bisect_right(other, s.position, key=_position) - 1
                    if at >= 0 and (t := other[at]).run is s.run:
                        shared = max(shared, min(t.high, s.high))
            if shared > s.low:
                return s.position + shared - s.low
        return 0

    def write_index(self, seq_id: int, position: int) -> int:
        """Return the write index of the cell at ``position``."""
        for s in reversed(self._sequences[seq_id].slices):
            if s.position <= position < s.end:
                return s.run.write_indices[s.low + position - s.position]
        raise KeyError(position)

    def write_indices(self, *, but: int = -1) -> set[int]:
        """Return the write indices of all cells in use by sequences other than ``but``."""
        indices: set[int] = set()
        for i, sequence in enumerate(self._sequences):
            for s in sequence.slices if i != but else ():
                indices.update(s.run.write_indices[s.low : s.high])
        return indices

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let the empty ``target`` refer to the cells of ``source`` in positions [start, end)."""
        slices = []
        for s in self._sequences[source].slices:
            low, high = max(s.position, start), min(s.end, end)
            if low < high:
                slices.append(
                    _Slice(s.run, s.low + low - s.position, s.low + high - s.position, low)
                )
                s.run.users.add(target)
        self._sequences[target] = _Sequence(slices[-1].end if slices else 0, slices)
        if slices and (source in self.with_holes or slices[0].position > 0):
            self.with_holes.add(target)

    def remove(self, seq_id: int, start: int, end: int) -> None:
        """Record that ``seq_id`` no longer holds positions in [start, end)."""
        sequence = self._sequences[seq_id]
        slices = []
        for s in sequence.slices:
            if s.end <= start or s.position >= end:
                slices.append(s)
                continue
            if s.position < start:
                slices.append(_Slice(s.run, s.low, s.low + start - s.position, s.position))
            if s.end > end:
                slices.append(_Slice(s.run, s.low + end - s.position, s.high, end))
        still = {s.run for s in slices}
        for s in sequence.slices:
            if s.run not in still:
                s.run.users.discard(seq_id)
        if not slices:
            self.with_holes.discard(seq_id)
        elif end < sequence.next_position:
            self.with_holes.add(seq_id)
        sequence.slices = slices
        sequence.next_position = slices[-1].end if slices else 0
        if slices and slices[-1].run.owner == seq_id:
            # Cells that no sequence refers to are deleted, so that appends continue the same run.
            run, high = slices[-1].run, slices[-1].high
            for user in run.users:
                for s in self._sequences[user].slices:
                    if s.run is run and s.high > high:
                        return
            del run.write_indices[high:]

    def clear(self) -> None:
        """Record that every sequence is empty."""
        self._sequences = [_Sequence() for _ in range(self.n_seq_max)]
        self.with_holes.clear()

    def count(self, seqs: Iterable[int]) -> tuple[int, int]:
        """Return how many cells these sequences use, and how many cells two or more share."""
        edges: dict[_Run, list[tuple[int, int]]] = {}
        for seq_id in seqs:
            for s in self._sequences[seq_id].slices:
                edges.setdefault(s.run, []).extend(((s.low, 1), (s.high, -1)))
        used = shared = 0
        for steps in edges.values():
            depth = previous = 0
            for at, change in sorted(steps):
                used += (at - previous) * (depth > 0)
                shared += (at - previous) * (depth > 1)
                depth += change
                previous = at
        return used, shared
