"""The memory of a context: which sequence holds which cells. One class for each kind of memory.

llama.cpp's cells and our table of them always change together: an interrupt or an error of llama.cpp
can come before or after both changes, but never between them. Callers ask the memory to fork, cut, drop
or make room, without having to know its kind. The arguments must be valid, and the caller must hold the
context's lock. Nothing is decoded here: the :class:`~llamabranch.context.runner.Runner` does that, and
records here which cells were written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ..errors import CacheFullError, DecodeError, SnapshotError
from ..native.context import ContextHandle
from ..native.interrupts import uninterrupted
from ..native.library import max_sequences
from ..native.state_layout import StateLayout
from .cell_table import CellTable, Usage
from .checkpoints import Checkpoint, Checkpoints
from .hidden_states import HiddenStates

State = npt.NDArray[np.uint8]
Row = npt.NDArray[np.float32]
Span = tuple[int, int]  # the first and the last position of a sequence

END = 1 << 31  # a position after all others
MOST_WITH_WINDOW = max_sequences() // 2  # sequences, if each needs a shadow to keep its window

_BEGINNING = MOST_WITH_WINDOW - 1  # holds the beginning of a text briefly, otherwise empty
_POINT_STEP, _MOST_POINTS = 512, 16  # of the windows that are saved with a text
_MOVED = max_sequences() - 2  # holds cells while they are moved; otherwise empty
_RECLAIMED_PART = 8  # the prefix cache frees at least 1/8 of the cache when cells are needed


class CellOrder:
    """Keeps the cells of every sequence in the order of its tokens.

    llama.cpp's attention sums over cells in the order of their indices. If a later token is in a
    lower cell than an earlier one, the logits are the same except for rounding, and rounding
    differences can change the sampled token. llama.cpp fills the lowest free cells first, so a hole
    below the cells of a living sequence would break the order.
    An exact context therefore *quarantines* such cells when they become free: it tags them
    with a sequence id that has no other use. They are released when no living sequence has cells above
    them. If the cache is full before that, all sequences are written again in order
    (``compaction.py``). If that is impossible, the cells are freed and the order is lost.

    Args:
        handle, cells: the handle and the cells of the memory.
        seq_id: the sequence id of the tag; if it is negative, no cells are quarantined.
    """

    def __init__(self, handle: ContextHandle, cells: CellTable, seq_id: int) -> None:
        self.is_kept = seq_id >= 0
        self._handle = handle
        self._cells = cells
        self._seq_id = seq_id
        self._lowest: int | None = None  # the write index of the oldest quarantined cell
        self.n_cells = 0
        self.in_order = True  # False once quarantined cells had to be freed below a living sequence

    def quarantine(self, seq_id: int, start: int, end: int) -> None:
        """Quarantine the cells that dropping [start, end) would free below a living sequence."""
        if not self.is_kept:
            return
        cells = self._cells
        end_of_seq = cells.next_position(seq_id)
        high = min(end, end_of_seq)
        start = cells.first_position(seq_id, start)
        if not 0 <= start < high:
            return
        # Within a sequence, later positions were written later.
        newest = cells.newest(but=seq_id)
        if high == end_of_seq and newest <= cells.write_index(seq_id, start):
            return
        low, n_cells = cells.exclusive(seq_id, start, high)
        if low is None:
            return
        write_index = cells.write_index(seq_id, low)
        if high < end_of_seq or newest > write_index:
            self._lowest = write_index if self._lowest is None else min(self._lowest, write_index)
            self.n_cells += n_cells
            self._handle.copy(seq_id, self._seq_id, low, high)

    def release_if_unneeded(self) -> None:
        """Release the quarantined cells if no living sequence has cells above them."""
        if self._lowest is not None and self._cells.newest() < self._lowest:
            self._handle.remove(self._seq_id, 0, -1)
            self._lowest, self.n_cells = None, 0

    def release(self) -> None:
        """Release the quarantined cells below living sequences too; this loses the order."""
        self._handle.remove(self._seq_id, 0, -1)
        self._lowest, self.n_cells, self.in_order = None, 0, False

    def reset(self) -> None:
        """Record that the cache is empty, so that the next cells are in order again."""
        self._lowest, self.n_cells, self.in_order = None, 0, True


class Memory:
    """Attention memory, one cache for all sequences (llama.cpp's unified KV); the base class.

    Args:
        handle: the native context that this memory belongs to; also an attribute.
        state_layout: how llama.cpp serialises the state of a sequence; None if unknown.
        keeps_order: keep the cells of every sequence in the order of its tokens.

    Attributes:
        cells: which sequence holds which cells.
        hidden: the hidden states of its tokens, while a head reads them.
        prefix_seq_ids: the sequences that the prefix cache holds.
        spare_seq_ids: ids from ``n_seq_max`` up, which can hold cells but cannot decode.
        evict: a function that frees at least n cells of the prefix cache, and returns how many it freed.
        protected: a function that returns the cached sequences that may not be freed now.
        compact: a function that writes all sequences again in order and without holes; it returns False
            if that is impossible.
        order: the `CellOrder`, which keeps the cells in order if ``keeps_order``.
        tokens_per_s: how fast the last long batch was decoded; 0 before the first one.
        disorders: how often the order of cells was lost so far.
        can_draft: the end of a sequence can be dropped, so drafts are verified in place.
        forks_copy: a fork copies K/V; otherwise it costs nothing.
        cells_per_sequence: how many cells each sequence has to itself; None = they share all cells.
    """

    can_draft = True
    forks_copy = False
    cells_per_sequence: int | None = None

    def __init__(
        self,
        handle: ContextHandle,
        state_layout: StateLayout | None = None,
        *,
        keeps_order: bool = False,
    ) -> None:
        n_seq_max = handle.n_seq_max
        self.state_layout = state_layout
        self.cells = CellTable(handle.n_ctx, n_seq_max)
        self.next_position = self.cells.next_position
        self.append: Callable[..., None] = self.cells.append
        self.hidden: HiddenStates | None = None
        self.prefix_seq_ids: set[int] = set()
        self.spare_seq_ids = range(n_seq_max, _MOVED)
        self.evict: Callable[[int], int] = lambda _n: 0
        self.protected: Callable[[], Iterable[int]] = tuple
        self.compact: Callable[[], bool] = lambda: False
        # The quarantined cells need a sequence id.
        keeps_order = keeps_order and n_seq_max < max_sequences()
        self.order = CellOrder(handle, self.cells, max_sequences() - 1 if keeps_order else -1)
        self.disorders = 0
        self.tokens_per_s = 0.0
        self.handle = handle

    # -- writing -----------------------------------------------------------------------------------

    def arranged(self, seqs: Sequence[int]) -> list[int] | None:
        """Return the order in which llama.cpp can decode these sequences; None = as they are."""
        return None

    def prepare(self, seq_id: int, n: int) -> None:
        """Prepare to append ``n`` tokens to a sequence in one decode."""

    def record(self, seqs: Sequence[int]) -> None:
        """Record a decoded batch, whose cells were written in its order."""
        cells, clock = self.cells, self.cells.clock
        write_indices: dict[int, list[int]] = {}
        for i, seq_id in enumerate(seqs):
            write_indices.setdefault(seq_id, []).append(clock + i)
        cells.clock += len(seqs)
        for seq_id, written in write_indices.items():
            self.append(seq_id, len(written), written)

    # -- forking and cutting -----------------------------------------------------------------------

    def usable(self, seq_id: int, n: int) -> int:
        """Return how many of a sequence's first ``n`` tokens can be kept or forked without the rest."""
        return n

    def mark(self, seq_id: int, row: Row | None = None) -> None:
        """Note the end of a sequence as a position to return to; ``row`` has the logits there, (V,)."""

    def row(self, seq_id: int) -> Row | None:
        """Return the logits noted at the end of a sequence, if any."""
        return None

    def n_first(self, n: int) -> int:
        """Return how many of the last ``n`` tokens of a prompt to read before ``mark_before_end``."""
        return n

    def mark_before_end(self, seq_id: int) -> None:
        """``mark`` the end of a sequence that still lacks the last few tokens of its prompt."""

    @uninterrupted
    def fork(self, source: int, target: int, n: int = END) -> int:
        """Make ``target`` hold exactly the first ``n`` tokens of ``source``, by default all of them.

        Returns:
            how many tokens ``target`` holds now; 0 if this memory cannot fork that part of a sequence.

        Raises:
            SnapshotError: llama.cpp cannot copy unshared cells. ``target`` is then empty.
        """
        if self.next_position(target):
            self.drop(target, 0)
        n_held = self.next_position(source)
        n = n_held if n >= n_held else self.usable(source, n)
        if n:
            with self._emptied_on_error(target):
                self._fork(source, target, n, n_held)
        return self.next_position(target)

    def _fork(self, source: int, target: int, n: int, n_held: int) -> None:
        """Fork into an empty sequence."""
        self.handle.copy(source, target, 0, n if n < n_held else -1)
        self.cells.copy(source, target, 0, n)

    @contextmanager
    def _emptied_on_error(self, seq_id: int, start: int = 0) -> Iterator[None]:
        """If the block raises anything, drop the sequence's positions from ``start`` on."""
        try:
            yield
        except BaseException:  # cells and table must change together
            self._remove(seq_id, start, END)
            raise

    def distrust(self, seqs: Iterable[int]) -> None:
        """Note that llama.cpp failed while it computed these sequences. The caller cuts them next."""

    @uninterrupted
    def cut(self, seq_id: int, n: int) -> int:
        """Drop all but the first ``n`` tokens of a sequence, also tokens of a failed decode.

        Part of a failed decode may be in llama.cpp's memory but not in the table.

        Returns:
            how many tokens it holds now: fewer than ``n`` if there were fewer, or if this memory had to
            return to an earlier checkpoint; 0 if the whole sequence was dropped.
        """
        if self.usable(seq_id, n) == n and self.drop(seq_id, n):
            return self.next_position(seq_id)
        self.drop(seq_id, 0)
        return 0

    @uninterrupted
    def drop(self, seq_id: int, start: int, end: int = END) -> bool:
        """Drop positions [start, end) of a sequence; return False if this memory cannot do that."""
        self.order.quarantine(seq_id, start, end)
        try:
            is_done = self._remove(seq_id, start, end)
        except BaseException:  # cells and table must change together
            self._remove(seq_id, start, end)
            raise
        self.order.release_if_unneeded()
        return is_done

    def _remove(self, seq_id: int, start: int, end: int) -> bool:
        """Remove positions from llama.cpp's memory and the table. May be repeated after an interrupt."""
        if not self.handle.remove(seq_id, start, -1 if end == END else end):
            return False
        self.cells.remove(seq_id, start, end)
        return True

    @uninterrupted
    def clear(self) -> None:
        """Drop everything, including the prefix cache's cells."""
        try:
            self._clear()
        except BaseException:  # cells and table must change together
            self._clear()
            raise

    def _clear(self) -> None:
        """Clear llama.cpp's memory and the table. May be repeated after an interrupt."""
        self.handle.clear()
        self.cells.clear()
        self.prefix_seq_ids.clear()
        self.order.reset()

    # -- verification ------------------------------------------------------------------------------

    def undoes(self, n: int) -> bool:
        """Return whether the last ``n`` tokens can be dropped after a decode of one sequence."""
        return self.can_draft

    def fit_together(self, lengths: Sequence[int]) -> list[int]:
        """Return how many tokens of each draft can be verified if one decode has several texts.

        Args:
            lengths: tokens of each draft; 0 for a text without a draft.
        """
        return list(lengths)

    def fits(self, n: int, count_free: Callable[[], int]) -> int:
        """Return how many of ``n`` drafted tokens can be verified now.

        Args:
            n: how many fit into one decode.
            count_free: counts the free sequences.
        """
        return n

    # -- room --------------------------------------------------------------------------------------

    def room(self, seq_id: int, n: int) -> int:
        """Return how many of ``n`` more tokens a sequence could hold if it had all other cells."""
        return n

    def has_room(self, n: int, n_needed: int) -> bool:
        """Return whether ``n`` cells are free besides the ``n_needed`` that running sequences need."""
        return n + n_needed <= self.n_free

    def reclaim(self, n: int) -> bool:
        """Free cells for ``n`` tokens; return whether any were freed.

        It frees cells that only the prefix cache uses, and then quarantined cells: by compaction, or,
        if that is impossible, at the price of the order.
        """
        freed = 0
        if self.prefix_seq_ids:
            # Free more than needed, so that compactions are rare.
            n_wanted = max(n - self.n_vacant, self.cells.n_cells // _RECLAIMED_PART)
            freed = self.evict(n_wanted - self.order.n_cells)
        if not self.order.n_cells or (freed and self.n_vacant >= n):
            return freed > 0
        if not self.compact():
            self.order.release()
            self.disorders += 1
        return True

    def full_error(self, n: int) -> CacheFullError:
        """Return the error for ``n`` tokens that do not fit."""
        usage = self.usage()
        return CacheFullError(
            f"the cache is full: {n} tokens need cells, {usage.cells_free} of "
            f"{usage.cells_total} are free ({usage.cells_shared} shared)",
            hint="prune branches, or create the context with a larger n_ctx",
        )

    @property
    def n_vacant(self) -> int:
        """Number of cells that are empty and not quarantined."""
        cells = self.cells
        return cells.n_cells - cells.count(range(cells.n_sequences))[0] - self.order.n_cells

    @property
    def n_free(self) -> int:
        """Number of cells that are unused, or used only by the prefix cache, which may free them."""
        cells, cached = self.cells, self.prefix_seq_ids
        its = {i for i in range(cells.n_seq_max) if i not in cached}
        used, _ = cells.count(its.union(self.protected()))
        return cells.n_cells - used

    @property
    def in_order(self) -> bool:
        """Whether the cells of all sequences are in the order of their tokens."""
        return self.order.in_order

    @property
    def is_placement_exact(self) -> bool:
        """Whether a text's logits are the same, to the bit, whichever cells it has."""
        return self.forks_copy or self.order.is_kept

    # -- the prefix cache --------------------------------------------------------------------------

    def keep(self, seq_id: int) -> None:
        """Count a sequence as part of the prefix cache; its id may be ``n_seq_max`` or more."""
        self.cells.make_sequence(seq_id)
        self.prefix_seq_ids.add(seq_id)

    # -- states ------------------------------------------------------------------------------------

    @uninterrupted
    def set_state(self, seq_id: int, state: State, n_tokens: int) -> bool:
        """Fill an empty sequence with a state of ``n_tokens``; False if too few cells are free.

        Raises:
            SnapshotError: llama.cpp rejects the state. The sequence is then empty.
        """
        try:
            self.handle.set_state(seq_id, state)
            if self.handle.position_range(seq_id)[1] != n_tokens - 1:
                raise SnapshotError("llama.cpp and the snapshot have different positions")
            self.append(seq_id, n_tokens)
        except BaseException as error:
            self._remove(seq_id, 0, END)
            message = error.message if isinstance(error, SnapshotError) else ""
            if "available cells" in message or "not enough cells" in message:
                return False
            raise
        return True

    def points(self, seq_id: int, start: int) -> list[Checkpoint]:
        """Return the states after ``start`` that let a saved copy of a sequence be used in part."""
        return []

    def set_points(self, seq_id: int, points: Iterable[Checkpoint]) -> None:
        """Keep checkpoints of a sequence, if this memory has any."""

    @property
    def can_move(self) -> bool:
        """True if all cells can be copied out and back bit for bit and in the same order."""
        is_known = self.state_layout is not None and self.state_layout.is_cells_only
        is_known = is_known and not self.forks_copy
        return is_known and self.cells.n_seq_max <= _MOVED and self.order.in_order

    @uninterrupted
    def raw_piece(self, seq_id: int, start: int) -> State:
        """Return a copy of a sequence's state; if the memory ``can_move``, from position ``start`` on."""
        if not self.can_move:
            return self.handle.state(seq_id)
        try:
            self.handle.copy(seq_id, _MOVED, start, -1)
            return self.handle.state(_MOVED)
        finally:
            self.handle.remove(_MOVED, 0, -1)

    def piece(self, seq_id: int, start: int) -> State:
        """Return a copy of a sequence's K/V from position ``start`` on, for ``place``.

        Raises:
            SnapshotError: llama.cpp writes it in an unknown format.
        """
        if self.state_layout is None:
            raise SnapshotError("llama.cpp writes K/V in an unknown form")
        return self.state_layout.joined([(self.raw_piece(seq_id, start), start, END)])

    @uninterrupted
    def place(self, seq_id: int, state: State, start: int, n_tokens: int) -> None:
        """Write a ``piece`` of ``n_tokens`` into the next free cells; ``start`` is the sequence's
        end.

        Raises:
            SnapshotError: llama.cpp rejects it. The sequence is as before.
        """
        with self._emptied_on_error(seq_id, start):
            try:
                self.handle.set_state(_MOVED, state)
                self.handle.copy(_MOVED, seq_id, start, -1)
            finally:
                self.handle.remove(_MOVED, 0, -1)
            self.cells.append(seq_id, n_tokens)

    # -- accounts ----------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Return how full the cache is. Cells that only the prefix cache uses count as cached."""
        cells, cached = self.cells, self.prefix_seq_ids
        others = (i for i in range(cells.n_sequences) if i not in cached)
        lengths = {i: n for i in others if (n := cells.length(i))}
        used, shared = cells.count(lengths)
        n_cached = cells.count([*lengths, *cached])[0] - used if cached else 0
        return Usage(
            cells.n_cells, used, shared, lengths, self.order.n_cells, self.in_order, n_cached,
            self.cells_per_sequence,
        )  # fmt: skip

    def audit(self) -> None:
        """Compare the table with llama.cpp's own positions.

        Raises:
            DecodeError: they differ; the message names the sequence. That is a bug in this library.
        """
        for seq_id in range(self.cells.n_sequences):
            own_range = self.cells.first_position(seq_id), self.next_position(seq_id) - 1
            ours, theirs = self._compared(seq_id, own_range, self.handle.position_range(seq_id))
            if ours != theirs:
                raise DecodeError(
                    f"sequence {seq_id} should hold positions {ours}, in llama.cpp it holds {theirs}"
                )

    def _compared(self, seq_id: int, ours: Span, theirs: Span) -> tuple[Span, Span]:
        """Return the ranges of positions that ``audit`` compares: ours, and llama.cpp's."""
        return ours, theirs


class Windowed(Memory):
    """Attention with a sliding window, where all cells are kept so that sequences can be cut.

    In layers with a sliding window, llama.cpp overwrites a cell that only one sequence uses once it has
    left the window, even with ``swa_full``: see ``find_slot`` in llama-kv-cache.cpp. If the sequence is
    then cut, or its beginning is forked, tokens are missing from the window. llama.cpp never overwrites
    a cell that two sequences use, so each sequence has a shadow sequence, which is given the cells
    before they leave the window. This takes no room, because the other layers need these cells anyway.
    But each decode must be a single micro-batch, because the shadow cannot be updated between two.

    Args:
        handle, state_layout: see `Memory`.
        window: the size of the window.
    """

    def __init__(
        self, handle: ContextHandle, state_layout: StateLayout | None, window: int
    ) -> None:
        super().__init__(handle, state_layout)
        # The ids above are shadows.
        self.spare_seq_ids = range(handle.n_seq_max, _BEGINNING)
        self._window = window
        self._shadowed: dict[int, int] = {}  # each shadow holds its sequence up to here
        self.append = self._append

    def _append(self, seq_id: int, n: int, write_indices: Sequence[int] | None = None) -> None:
        self.cells.append(seq_id, n, write_indices)
        self.prepare(seq_id, 0)

    def prepare(self, seq_id: int, n: int) -> None:
        """Give the shadow the cells that leave the window before ``n`` tokens are decoded."""
        end = self.next_position(seq_id)
        # The window moves with each token, or (chunked attention) by its size at once.
        outside = (end + n) // self._window * self._window
        n_shadowed = self._shadowed.get(seq_id, 0)
        if n_shadowed < outside and n_shadowed < end:
            try:
                self.handle.copy(seq_id, _shadow(seq_id), n_shadowed, end)
                self._shadowed[seq_id] = end
            except BaseException:
                self.handle.remove(_shadow(seq_id), n_shadowed, -1)
                self._shadowed[seq_id] = n_shadowed
                raise

    def usable(self, seq_id: int, n: int) -> int:
        """Return ``n`` if the window's cells before token ``n`` are there, otherwise 0.

        After a restore some are missing, because a saved state has only the window at its end.
        """
        first = max(0, self.cells.first_position(seq_id), n - self._window + 1)
        return n if not n or self.handle.position_range(seq_id)[0] <= first else 0

    @uninterrupted
    def points(self, seq_id: int, start: int) -> list[Checkpoint]:
        """Return the windows at several positions of a sequence; a saved state has only the last."""
        points, end = list[Checkpoint](), self.next_position(seq_id)
        step = max(_POINT_STEP, (end - start) // _MOST_POINTS)
        if self.handle.n_seq_max > _BEGINNING:
            return points
        self.cells.make_sequence(_BEGINNING)
        for n in (*range(start + step, end - 1, step), end - 1):
            if n > start and self.usable(seq_id, n) == n:
                try:
                    self.fork(seq_id, _BEGINNING, n)
                    points.append(Checkpoint(n, self.handle.partial_state(_BEGINNING), None))
                finally:
                    self.drop(_BEGINNING, 0)
        return points

    def _fork(self, source: int, target: int, n: int, n_held: int) -> None:
        super()._fork(source, target, n, n_held)
        self.prepare(target, 0)

    def _remove(self, seq_id: int, start: int, end: int) -> bool:
        """Remove positions, also from the shadow."""
        n_shadowed = self._shadowed.get(seq_id, 0)
        if start < n_shadowed:
            self.handle.remove(_shadow(seq_id), start, -1 if end == END else end)
        is_done = super()._remove(seq_id, start, end)
        if start < n_shadowed:
            self._shadowed[seq_id] = min(n_shadowed, self.next_position(seq_id))
        return is_done

    def _clear(self) -> None:
        super()._clear()
        self._shadowed.clear()

    def _compared(self, seq_id: int, ours: Span, theirs: Span) -> tuple[Span, Span]:
        if self.handle.position_range(_shadow(seq_id))[1] >= self._shadowed.get(seq_id, 0):
            raise DecodeError(f"cells that sequence {seq_id} has left are kept")
        if self.usable(seq_id, ours[1] + 1) == ours[1] + 1:
            ours = (theirs[0], ours[1])  # a restored sequence has only the window at its end
        return ours, theirs


class NonUnified(Memory):
    """Attention memory where each sequence has its own share of the cells (llama.cpp's non-unified KV).

    Each sequence is always in order: nothing is quarantined, and nothing moves. A fork copies cells, by
    saving and restoring a state. llama.cpp's own copy between such sequences copies all cells, used or
    not, and not until the next decode.
    """

    forks_copy = True

    def __init__(self, handle: ContextHandle, state_layout: StateLayout | None = None) -> None:
        super().__init__(handle, state_layout)
        self.spare_seq_ids = range(0)  # only the context's own sequences have cells
        self.cells_per_sequence = handle.n_ctx_seq

    def arranged(self, seqs: Sequence[int]) -> list[int] | None:
        """Return the sequences sorted by id, the only order in which llama.cpp computes several."""
        order = sorted(range(len(seqs)), key=seqs.__getitem__)
        return None if order == list(range(len(seqs))) else order

    def _fork(self, source: int, target: int, n: int, n_held: int) -> None:
        self.handle.set_state(target, self.handle.state(source))
        if n < n_held:
            self.handle.remove(target, n, -1)
        self.cells.append(target, n)
        if self.hidden is not None:
            self.hidden.set_all(target, self.hidden.of(source, 0, n))
        if source in self.cells.with_holes:
            self.cells.with_holes.add(target)

    @uninterrupted
    def drop(self, seq_id: int, start: int, end: int = END) -> bool:
        """Drop positions. A hole below the last position is filled by the next tokens, out of order."""
        self.disorders += end < self.next_position(seq_id)
        return super().drop(seq_id, start, end)

    def room(self, seq_id: int, n: int) -> int:
        """Return how many of ``n`` tokens fit into the sequence's cells."""
        return min(n, self.handle.n_ctx_seq - self.next_position(seq_id))

    def has_room(self, n: int, n_needed: int) -> bool:
        """Return True, because other sequences cannot take a new sequence's cells."""
        return True

    def reclaim(self, n: int) -> bool:
        """Return False, because other sequences cannot give cells to this one."""
        return False

    def full_error(self, n: int) -> CacheFullError:
        """Return the error for a sequence that has used all its cells."""
        return CacheFullError(
            f"a sequence is full: each has {self.cells_per_sequence} cells of its own",
            hint="create the context with a larger n_ctx, which is divided among the sequences",
        )

    @property
    def in_order(self) -> bool:
        """Whether no sequence was cut in its middle."""
        return not self.cells.with_holes


class States(Memory):
    """Memory that cannot drop a tail: recurrent, hybrid, or a sliding window that reuses its cells.

    A sequence is kept or forked as a whole, or as it was at one of its checkpoints. Checkpoints are
    taken while it grows, and when ``mark`` is called. Only the context's own sequences have recurrent
    states.

    Args:
        handle, state_layout: see `Memory`.
        max_bytes: the most host memory for checkpoints; 0 = no checkpoints.

    Attributes:
        every: tokens from one checkpoint to the next while a text grows.
        apart: the fewest tokens from one checkpoint to the next.
        before_end: how many tokens before the end of a prompt a checkpoint is taken. The same prompt
            may come again, or one that differs only in the beginning of the answer.
        checkpoints: the checkpoints of all sequences.
    """

    can_draft = False
    every = 256
    apart = 32
    before_end = 16

    def __init__(
        self, handle: ContextHandle, state_layout: StateLayout | None = None, max_bytes: int = 0
    ) -> None:
        super().__init__(handle, state_layout)
        # Ids from ``n_seq_max`` up could have cells, but no states and no room for windows.
        self.spare_seq_ids = range(0)
        self.checkpoints = Checkpoints(max_bytes)
        self.append = self._append if max_bytes else self.cells.append

    def _append(self, seq_id: int, n: int, write_indices: Sequence[int] | None = None) -> None:
        self.cells.append(seq_id, n, write_indices)
        if self.next_position(seq_id) - self.checkpoints.last(seq_id) >= self.every:
            self._take(seq_id, None)

    def mark(self, seq_id: int, row: Row | None = None) -> None:
        """Take a checkpoint, unless there is one a few tokens earlier."""
        n_after = self.next_position(seq_id) - self.checkpoints.last(seq_id)
        if n_after >= self.apart or n_after == self.before_end:
            self._take(seq_id, row)
        elif n_after == 0 and row is not None and self.checkpoints.max_bytes:
            point = self.checkpoints.find(seq_id, self.next_position(seq_id))
            if point is not None and point.row is None:
                point.row = row.copy()
                self.checkpoints.thin()

    def n_first(self, n: int) -> int:
        has_checkpoints = self.checkpoints.max_bytes and n >= self.apart + self.before_end
        return n - self.before_end if has_checkpoints else n

    def mark_before_end(self, seq_id: int) -> None:
        if self.checkpoints.last(seq_id) < self.next_position(seq_id):
            self._take(seq_id, None)

    def _take(self, seq_id: int, row: Row | None) -> None:
        checkpoints, n = self.checkpoints, self.next_position(seq_id)
        if not checkpoints.max_bytes:
            return
        try:
            state = self.handle.partial_state(seq_id)
            point = Checkpoint(n, state, None if row is None else row.copy())
        except MemoryError:
            point = None
        if point is not None and len(state) and point.n_bytes <= checkpoints.max_bytes:
            checkpoints.add(seq_id, point)
        else:  # keep the existing checkpoints, and take no others
            checkpoints.max_bytes = 0

    def points(self, seq_id: int, start: int) -> list[Checkpoint]:
        """Return the checkpoints of a sequence after ``start``."""
        return [point for point in self.checkpoints.of(seq_id) if point.n_tokens > start]

    def set_points(self, seq_id: int, points: Iterable[Checkpoint]) -> None:
        """Add checkpoints to a sequence."""
        self.checkpoints.merge(seq_id, points)

    def row(self, seq_id: int) -> Row | None:
        """Return the logits after the last token, if a checkpoint there kept them."""
        n = self.next_position(seq_id)
        point = self.checkpoints.find(seq_id, n)
        return point.row if point is not None and point.n_tokens == n else None

    def usable(self, seq_id: int, n: int) -> int:
        """Return the sequence's end if it is at most ``n``, else its last checkpoint up to ``n``."""
        end = self.next_position(seq_id)
        if end <= n:
            return end
        point = self.checkpoints.find(seq_id, n)
        return 0 if point is None else point.n_tokens

    def _fork(self, source: int, target: int, n: int, n_held: int) -> None:
        super()._fork(source, target, n_held, n_held)
        self.checkpoints.share(source, target)
        self.cut(target, n)

    @uninterrupted
    def cut(self, seq_id: int, n: int) -> int:
        """Return to the last checkpoint of at most ``n`` tokens, or drop the whole sequence.

        Do nothing if the sequence has at most ``n`` tokens, both here and in llama.cpp.
        """
        end = self.next_position(seq_id)
        if end <= n and self.handle.position_range(seq_id)[1] == end - 1:
            return end
        point = self.checkpoints.find(seq_id, min(n, end))
        if point is not None:
            with self._emptied_on_error(seq_id):
                if self._return_to(seq_id, point):
                    return point.n_tokens
        self.drop(seq_id, 0)
        return 0

    def _return_to(self, seq_id: int, point: Checkpoint) -> bool:
        """Put a state back and drop later tokens; if llama.cpp fails, drop all and return False."""
        try:
            self.handle.set_partial_state(seq_id, point.state)
        except SnapshotError:  # no cells for a window
            return False
        is_done = self._remove(seq_id, point.n_tokens, END)
        return is_done and self.handle.position_range(seq_id)[1] == point.n_tokens - 1

    def _remove(self, seq_id: int, start: int, end: int) -> bool:
        is_done = super()._remove(seq_id, start, end)
        if is_done:
            self.checkpoints.cut(seq_id, start)
        return is_done

    def _clear(self) -> None:
        super()._clear()
        self.checkpoints.clear()

    def fits(self, n: int, count_free: Callable[[], int]) -> int:
        """Return how many tokens can be verified on a fork, which needs a free sequence."""
        return n if n and count_free() else 0

    def _compared(self, seq_id: int, ours: Span, theirs: Span) -> tuple[Span, Span]:
        return (ours[1], ours[1]), (theirs[1], theirs[1])  # a state has only its last position


class RollingBack(States):
    """Recurrent memory with the last few states kept, so the end of the last decode can be undone.

    When llama.cpp decodes a sequence, it keeps the state after each of the last few tokens. This has
    three consequences (llama-memory-recurrent.cpp, llama-batch.cpp):

    - The kept states are from one decode: only its tokens can be undone, and only once.
    - Sequences of different lengths are computed one after the other, in "micro-batches". Each
      micro-batch may move the states of other sequences, and leaves their earlier states behind.
      So only sequences of the last micro-batch can be undone. `arranged` and `fit_together` put the
      drafted sequences there: single tokens come first, and all drafts of a decode are equally
      long.
    - After an undo, only the next decode puts the earlier state in its place. A fork before
      that would copy the wrong state, and forks share one place. So a fork first puts the state
      in place, and nothing is undone after a fork.

    Args:
        handle, state_layout, max_bytes: see `States`.
        n_rollback: how many tokens llama.cpp can undo.
    """

    def __init__(
        self,
        handle: ContextHandle,
        state_layout: StateLayout | None,
        max_bytes: int,
        n_rollback: int,
    ) -> None:
        super().__init__(handle, state_layout, max_bytes)
        self.n_rollback = n_rollback
        self.append = self._append
        self._undoable: dict[int, int] = {}  # tokens of each sequence of the last decode
        self._undone: set[int] = set()  # sequences whose state is not in its place yet
        self._broken: set[int] = set()  # sequences whose last decode failed

    def undoes(self, n: int) -> bool:
        """Return whether llama.cpp keeps that many states."""
        return n <= self.n_rollback

    def fits(self, n: int, count_free: Callable[[], int]) -> int:
        """Return how many tokens can be verified in place: as many as can be undone."""
        return min(n, self.n_rollback)

    def fit_together(self, lengths: Sequence[int]) -> list[int]:
        """Return 0 or the same length for each draft, chosen to verify the most drafted tokens."""

        def drafted(n: int) -> int:
            n_drafted = sum(length >= n for length in lengths)
            fit = len(lengths) + n_drafted * n <= self.handle.n_chunk
            return n_drafted * n if fit else 0

        best = max(range(1, self.n_rollback + 1), key=drafted)
        n = best if drafted(best) else 0
        return [n if length >= n else 0 for length in lengths]

    def arranged(self, seqs: Sequence[int]) -> list[int] | None:
        """Return an order in which single tokens come before drafts; None = no change."""
        counts = Counter(seqs)
        if len(counts) in (1, n_last := len(self._last_computed(counts))) or not n_last:
            return None
        order = sorted(range(len(seqs)), key=lambda i: counts[seqs[i]] > 1)
        return None if order == list(range(len(seqs))) else order

    def record(self, seqs: Sequence[int]) -> None:
        """Record a decoded batch, and how much of it can be undone."""
        super().record(seqs)
        last = self._last_computed(Counter(seqs))
        self._undoable = {seq_id: min(n - 1, self.n_rollback) for seq_id, n in last.items()}

    def _last_computed(self, counts: Mapping[int, int]) -> dict[int, int]:
        """Return the lengths of the drafts that llama.cpp computes last and together.

        If single tokens come first, the other sequences must be short enough that none of their
        tokens are computed with the single ones: llama.cpp does not divide a sequence's last
        ``n_rollback`` + 1 tokens.
        """
        several = {seq_id: n for seq_id, n in counts.items() if n > 1}
        n = max(several.values(), default=0)
        is_whole = len(several) == len(counts) or n <= self.n_rollback + 1
        is_one_length = len(several) * n == sum(several.values())
        return several if is_whole and is_one_length else {}

    def _append(self, seq_id: int, n: int, write_indices: Sequence[int] | None = None) -> None:
        self._undoable.clear()
        self._undone.discard(seq_id)
        super()._append(seq_id, n, write_indices)

    def distrust(self, seqs: Iterable[int]) -> None:
        """Note that these sequences hold states of a failed decode."""
        self._undoable.clear()
        self._broken.update(seqs)

    @uninterrupted
    def cut(self, seq_id: int, n: int) -> int:
        """Undo the end of the last decode; otherwise cut as `States` does."""
        n_undoable, end = self._undoable.pop(seq_id, 0), self.next_position(seq_id)
        if n < end <= n + n_undoable:
            self._undone.add(seq_id)
            if self._remove(seq_id, n, END):
                return n
        if seq_id in self._broken:  # llama.cpp went back to states that it had not computed
            n = min(n, end - 1)
        return super().cut(seq_id, n)

    def _remove(self, seq_id: int, start: int, end: int) -> bool:
        self._undoable.pop(seq_id, None)
        is_done = super()._remove(seq_id, start, end)
        if is_done:
            self._broken.discard(seq_id)
            if not start:
                self._undone.discard(seq_id)
        return is_done

    @uninterrupted
    def fork(self, source: int, target: int, n: int = END) -> int:
        """Put the state in its place, then fork as `States` does."""
        if source in self._undone:
            self.handle.set_partial_state(source, self.handle.partial_state(source))
            self._undone.discard(source)
        self._undoable.pop(source, None)
        return super().fork(source, target, n)

    def _clear(self) -> None:
        super()._clear()
        self._undoable.clear()
        self._undone.clear()
        self._broken.clear()


def _shadow(seq_id: int) -> int:
    """Return the shadow of a sequence, which keeps its cells from being reused."""
    return max_sequences() - 1 - seq_id
