"""The K/V cache: which sequence holds which cells, changed in llama.cpp and in the ledger together.

Everything here expects valid arguments and a caller that holds the context's lock. It does not decode:
the :class:`~llamabranch.context.decoder.Decoder` decodes and records here what was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..errors import DecodeError, SnapshotError
from ..native import ContextHandle, StateLayout, last_log_lines, max_sequences
from .cell_ledger import CellLedger, Usage
from .cell_order import CellOrder
from .hidden_states import HiddenStates

__all__ = ["END", "MOST_WITH_WINDOW", "MOVED", "KVCache"]

State = npt.NDArray[np.uint8]

END = 1 << 31  # a position after all others
MOVED = max_sequences() - 2  # holds the cells that are being moved, and nothing at other times
MOST_WITH_WINDOW = max_sequences() // 2  # sequences whose window can be kept: each has a twin


class KVCache:
    """Cells of many sequences: shared by all of them, or, without ``kv_unified``, some for each of them.

    In its own cells a sequence is always in order: nothing is reserved, and nothing moves. What would be
    shared is copied there, through the states of sequences: llama.cpp's own copy between sequences with
    cells of their own takes all cells, used or not, and does so only at the next decode.

    Args:
        handle: the native context whose memory it is.
        n_seq_max: how many sequences there are.
        can_truncate: whether this memory can drop the tail of a sequence.
        keeps_order: whether the cells of every sequence are kept in the order of its tokens, where
            sequences share cells.
        window: size of a sliding window whose cells must all stay; 0 if there is none.
        state_layout: how llama.cpp serialises the state of a sequence; None if that is not known.
    """

    def __init__(
        self,
        handle: ContextHandle,
        n_seq_max: int,
        *,
        can_truncate: bool = True,
        keeps_order: bool = False,
        window: int = 0,
        state_layout: StateLayout | None = None,
    ) -> None:
        self.can_truncate = can_truncate
        self.state_layout = state_layout
        self.ledger = CellLedger(handle.n_ctx, n_seq_max)
        self.next_position = self.ledger.next_position
        self.first_position = self.ledger.first_position
        self._window = window
        self._held: dict[int, int] = {}  # up to which position the twin of a sequence has its cells
        self.append = self._append_and_hold if window else self.ledger.append
        self.prefix_seq_ids: set[int] = set()  # the sequences of the prefix cache
        self.hidden: HiddenStates | None = None  # of its tokens, while a head reads them
        self._handle = handle
        self.is_unified = handle.kv_unified
        self.n_cells_seq = handle.n_ctx_seq
        self._with_holes: set[int] = set()  # sequences with own cells, cut in their middle
        self.order: CellOrder | None = None
        # The reserved cells need a sequence id.
        if keeps_order and self.is_unified and n_seq_max < max_sequences():
            self.order = CellOrder(handle, self.ledger, max_sequences() - 1)

    # -- what was written --------------------------------------------------------------------------

    def record(self, seqs: Sequence[int]) -> None:
        """Record a decoded batch; its cells were written in the order of the batch."""
        ledger, clock = self.ledger, self.ledger.clock
        write_indices: dict[int, list[int]] = {}
        for i, seq_id in enumerate(seqs):
            write_indices.setdefault(seq_id, []).append(clock + i)
        ledger.clock += len(seqs)
        for seq_id, written in write_indices.items():
            self.append(seq_id, len(written), written)

    def adopt(
        self, leaves: Sequence[int], leaf: int, target: int, nodes: Sequence[int], n_nodes: int
    ) -> None:
        """Give ``target`` the path ``nodes`` of the tree just decoded, which ``leaf`` holds.

        The tree had ``n_nodes`` tokens; those off the path still belong to the other ``leaves``.
        """
        ledger = self.ledger
        start = ledger.next_position(target)
        first = ledger.clock
        ledger.clock += n_nodes
        if self.order is not None and n_nodes > len(nodes):
            self.order.reserve_tree(leaves, start, first, n_nodes - len(nodes))
        try:
            self._handle.remove(target, -1, -1)
            self._handle.copy(leaf, target, 0, start + len(nodes))
            self.append(target, len(nodes), [first + node for node in nodes])
        except BaseException:
            self._handle.remove(target, -1, -1)
            self._handle.copy(leaf, target, 0, start)
            self._remove(target, start, END)
            raise

    # -- sharing and dropping ----------------------------------------------------------------------

    def share(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """Make ``target`` refer to the cells of ``source``, without copying any K/V.

        Without a unified cache the K/V is copied into the cells of ``target``; ``start`` is 0 there.

        Raises:
            SnapshotError: llama.cpp cannot copy it. ``target`` is empty then.
        """
        if self.first_position(target) >= 0:
            self.drop(target, 0)
        if not self.is_unified:
            self._copy(source, target, self.next_position(source) if end == -1 else end)
            return
        try:
            self._handle.copy(source, target, start, end)
            self.ledger.copy(source, target, start, END if end == -1 else end)
            self.hold_window(target)
        except BaseException:
            self._remove(target, 0, END)
            raise

    def _copy(self, source: int, target: int, end: int) -> None:
        """Copy the K/V of ``source`` before position ``end`` into the cells of the empty ``target``."""
        n = self.next_position(source)
        end = min(end, n)
        if end <= 0:
            return
        try:
            self._restore(target, self._handle.state(source))
            if end < n:
                self._handle.remove(target, end, -1)
            self.ledger.append(target, end)
            if self.hidden is not None:
                self.hidden.set_all(target, self.hidden.of(source, 0, end))
            if source in self._with_holes:
                self._with_holes.add(target)
        except BaseException:
            self._handle.remove(target, 0, -1)
            self.ledger.remove(target, 0, END)
            raise

    def _restore(self, seq_id: int, state: State) -> None:
        if not self._handle.set_state(seq_id, state):
            raise _refusal()

    def drop(self, seq_id: int, start: int, end: int = END) -> bool:
        """Drop positions [start, end) of a sequence; False if this memory cannot."""
        if self.order is not None:
            self.order.reserve(seq_id, start, end)
        elif not self.is_unified:
            self._note_holes(seq_id, start, end)
        try:
            if not self._remove(seq_id, start, end):
                return False
        except BaseException:  # cache and ledger must change together
            self._remove(seq_id, start, end)
            raise
        if self.order is not None:
            self.order.release_if_unneeded()
        return True

    def _remove(self, seq_id: int, start: int, end: int) -> bool:
        """Remove positions from llama.cpp's memory and the ledger; may be repeated if interrupted."""
        stop = -1 if end == END else end
        if not self._handle.remove(seq_id, start, stop):
            return False
        held = self._held.get(seq_id, 0)
        if start < held:
            self._handle.remove(_twin(seq_id), start, stop)
        self.ledger.remove(seq_id, start, end)
        if start < held:
            self._held[seq_id] = min(held, self.next_position(seq_id))
        return True

    def _note_holes(self, seq_id: int, start: int, end: int) -> None:
        """Note whether a sequence with own cells has free ones below its last, which are filled next."""
        if start <= max(0, self.first_position(seq_id)) and end >= self.next_position(seq_id):
            self._with_holes.discard(seq_id)
        elif end < self.next_position(seq_id):
            self._with_holes.add(seq_id)

    def cut(self, seq_id: int, start: int) -> bool:
        """Drop a failed decode from the end of a sequence; False if the whole sequence was dropped.

        Part of it may be in llama.cpp's memory and not in the ledger.
        """
        if not self.can_truncate and self._handle.position_range(seq_id)[1] == start - 1:
            return True  # nothing was written
        if self.can_cut(seq_id, start) and self.drop(seq_id, start):
            return True
        self.drop(seq_id, 0)
        return start == 0

    def can_cut(self, seq_id: int, n: int) -> bool:
        """Return whether a sequence can go on from its first ``n`` tokens, the others dropped.

        With a sliding window, not if cells of the window before them are missing: the state of a
        sequence, from which a snapshot is restored, has only those of the window at its end.
        """
        if not self._window or not n:
            return self.can_truncate
        first = max(0, self.first_position(seq_id), n - self._window + 1)
        return self._handle.position_range(seq_id)[0] <= first

    def clear(self) -> None:
        """Drop everything; what the prefix cache keeps too."""
        self._handle.clear()
        self.ledger.clear()
        self.prefix_seq_ids.clear()
        self._with_holes.clear()
        self._held.clear()
        if self.order is not None:
            self.order.reset()

    # -- sliding windows ---------------------------------------------------------------------------

    # In layers with a sliding window llama.cpp writes new tokens into cells that one sequence alone
    # owns and that lie outside its window, also with ``swa_full``: ``find_slot`` of llama-kv-cache.cpp.
    # A sequence cut there, or a fork of its beginning, would attend to a window with tokens missing.
    # A cell of two sequences is not reused, so each sequence has a twin, which owns the same cells before
    # they leave the window. It takes no room: in the other layers these cells are needed anyway. A
    # decode must be one micro-batch then, since nothing can be done between two of them.

    def _append_and_hold(
        self, seq_id: int, n: int, write_indices: Sequence[int] | None = None
    ) -> None:
        self.ledger.append(seq_id, n, write_indices)
        self.hold_window(seq_id)

    def hold_window(self, seq_id: int, n_more: int = 0) -> bool:
        """Keep the cells that leave the window of a sequence before ``n_more`` tokens are decoded.

        Returns:
            False if some that leave it are not decoded yet, so that it is needed again before.
        """
        if not self._window:
            return True
        end = self.next_position(seq_id)
        # The window moves with each token, or (chunked attention) by its size at once.
        outside = (end + n_more) // self._window * self._window
        held = self._held.get(seq_id, 0)
        if held < outside and held < end:
            try:
                self._handle.copy(seq_id, _twin(seq_id), held, end)
                self._held[seq_id] = end
            except BaseException:
                self._handle.remove(_twin(seq_id), held, -1)
                self._held[seq_id] = held
                raise
        return outside <= end

    # -- states ------------------------------------------------------------------------------------

    def state(self, seq_id: int) -> State:
        """Return the K/V of a sequence as llama.cpp writes it, uint8 (n,), a copy."""
        return self._handle.state(seq_id)

    def set_state(self, seq_id: int, state: State, n_tokens: int) -> bool:
        """Fill an empty sequence with the state of ``n_tokens``; False if there are no cells for it.

        Raises:
            SnapshotError: llama.cpp refuses it. The sequence may then hold anything: drop it.
        """
        if not self._handle.set_state(seq_id, state):
            refusal = _refusal()
            if "available cells" in str(refusal) or "not enough cells" in str(refusal):
                return False
            raise refusal
        if self._handle.position_range(seq_id)[1] != n_tokens - 1:
            raise SnapshotError("llama.cpp holds other positions than the snapshot has")
        self.append(seq_id, n_tokens)
        return True

    # -- moving cells ------------------------------------------------------------------------------

    def keep(self, seq_id: int) -> None:
        """Count a sequence as one of the prefix cache, which may be beyond those of the context."""
        self.ledger.make_sequence(seq_id)
        self.prefix_seq_ids.add(seq_id)

    @property
    def n_seq_ids(self) -> int:
        """How many sequences there can be, those of the prefix cache included."""
        return MOST_WITH_WINDOW if self._window else MOVED

    @property
    def can_copy(self) -> bool:
        """True if cells can be copied out and back, bit for bit."""
        layout = self.state_layout
        has_id = self.ledger.n_seq_max <= MOVED or not self.is_unified
        return has_id and layout is not None and layout.is_cells_only

    @property
    def can_move(self) -> bool:
        """True if all cells can be copied out and back so that their order is kept."""
        return self.can_copy and self.order is not None and self.order.in_order

    def piece(self, seq_id: int, start: int) -> State:
        """Return the K/V of a sequence from position ``start`` on, for ``place``; a copy.

        Raises:
            SnapshotError: llama.cpp writes it in an unknown form.
        """
        if self.state_layout is None:
            raise SnapshotError("llama.cpp writes K/V in an unknown form")
        if not self.is_unified:  # nothing is shared, so only whole sequences are asked for
            return self._handle.state(seq_id)
        self._handle.copy(seq_id, MOVED, start, -1)
        try:
            return self.state_layout.with_owner(self._handle.state(MOVED))
        finally:
            self._handle.remove(MOVED, 0, -1)

    def place(self, seq_id: int, state: State, start: int, n_tokens: int) -> None:
        """Write a ``piece`` of ``n_tokens`` into the next free cells, at ``start``, the sequence's end.

        Raises:
            SnapshotError: llama.cpp refuses it.
        """
        if self.is_unified:
            self._restore(MOVED, state)
            self._handle.copy(MOVED, seq_id, start, -1)
            self._handle.remove(MOVED, 0, -1)
        else:
            self._restore(seq_id, state)
        self.ledger.append(seq_id, n_tokens)

    # -- accounts ----------------------------------------------------------------------------------

    @property
    def n_vacant(self) -> int:
        """Number of cells that hold nothing and are not reserved."""
        ledger = self.ledger
        return ledger.n_cells - ledger.n_used(range(ledger.n_sequences)) - self.n_reserved

    @property
    def n_used(self) -> int:
        """Number of cells that hold something, or are reserved."""
        return self.ledger.n_cells - self.n_vacant

    @property
    def n_free(self) -> int:
        """Number of cells that no sequence uses, or only the prefix cache."""
        ledger, prefix_seq_ids = self.ledger, self.prefix_seq_ids
        seqs = range(ledger.n_seq_max)
        return ledger.n_cells - ledger.n_used(s for s in seqs if s not in prefix_seq_ids)

    @property
    def n_reserved(self) -> int:
        """Number of cells that hold nothing, but are not reused yet so that cells stay in order."""
        return 0 if self.order is None else self.order.n_cells

    def release_reserved(self) -> bool:
        """Free the reserved cells although sequences have cells above them: order is lost."""
        if self.order is None or not self.order.n_cells:
            return False
        self.order.release()
        return True

    def usage(self) -> Usage:
        """Return how full the cache is."""
        usage = self.ledger.usage(self.prefix_seq_ids)
        if not self.is_unified:
            in_order = not self._with_holes
            return replace(usage, in_order=in_order, cells_per_sequence=self.n_cells_seq)
        if self.order is None:
            return usage
        return replace(usage, cells_reserved=self.n_reserved, in_order=self.order.in_order)

    def audit(self, *, ends_only: bool) -> None:
        """Compare the ledger with llama.cpp's own positions.

        Args:
            ends_only: compare last positions only, for memory that does not keep the first ones.

        Raises:
            DecodeError: they differ; the message names the sequence. That is a bug in this library.
        """
        for seq_id in range(self.ledger.n_sequences):
            ours = self.first_position(seq_id), self.next_position(seq_id) - 1
            theirs = self._handle.position_range(seq_id)
            if ends_only:
                ours, theirs = (ours[1], ours[1]), (theirs[1], theirs[1])
            elif self._window:
                if self.can_cut(seq_id, ours[1] + 1):
                    ours = (theirs[0], ours[1])  # a restored one has the window at its end only
                if self._handle.position_range(_twin(seq_id))[1] >= self._held.get(seq_id, 0):
                    raise DecodeError(f"cells that sequence {seq_id} has left are kept")
            if ours != theirs:
                raise DecodeError(
                    f"sequence {seq_id} should hold positions {ours}, in llama.cpp it holds {theirs}"
                )


def _refusal() -> SnapshotError:
    """Return the error for a state that llama.cpp has just refused, with the reason it has logged."""
    reason = "; ".join(last_log_lines()) or "no reason given"
    return SnapshotError(f"llama.cpp cannot take the K/V: {reason}")


def _twin(seq_id: int) -> int:
    """Return the sequence that keeps the cells of another one from being reused."""
    return max_sequences() - 1 - seq_id
