"""Decoding into a shared cache: the one place where tokens go in and logits come out.

Everything here expects right arguments and the context's lock; :class:`~llamabranch.context.Context`
checks what users pass, branches only pass what they know to be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..errors import CacheFullError, DecodeError, DecodeInterruptedError
from ..native import ContextHandle, StateLayout
from .cell_ledger import CellLedger
from .cell_order import CellOrder
from .logits import LogitsRow
from .params import warn_of_length
from .threads import ThreadWatch

__all__ = ["Decoder"]

_INTERRUPTED = 2
_END = 1 << 31
_WATCHED = ThreadWatch.EVERY - 1


class Decoder:
    """A native context with its ledger of cells and the rows of logits that are still needed."""

    def __init__(self, handle: ContextHandle, n_seq_max: int) -> None:
        self.handle = handle
        self.cells = CellLedger(handle.n_ctx, n_seq_max)
        self.n_decodes = 0
        self.can_truncate = True  # learned when the context opens
        self.cell_order: CellOrder | None = None  # where order among cells matters
        self.compact: Callable[[], bool] = lambda: False  # write all sequences anew, if that can be
        self.layout: StateLayout | None = None  # learned when the context opens
        self.n_trained = (
            _END  # positions the model was trained for; no limit once that was warned of
        )
        self.watch: ThreadWatch | None = (
            None  # times every few decodes, where several threads compute
        )
        self._live: list[LogitsRow] = []

    def close(self) -> None:
        """Save the rows that are still needed, then free the native context."""
        self._protect_rows(0, ())
        self.handle.close()

    def _protect_rows(self, n_outputs: int, replaced: Iterable[LogitsRow]) -> None:
        """Copy what somebody still needs before the next decode overwrites the buffer."""
        live = self._live
        if not live:
            return
        if n_outputs > self.handle.row_capacity:  # the buffer will move: every old row is lost
            replaced = ()
        for row in live:
            if row.users > sum(1 for r in replaced if r is row):
                row.keep()
        self._live = []

    def advance(self, seq_id: int, token: int, replaced: LogitsRow | None) -> LogitsRow:
        """Decode one token at the end of ``seq_id``; return its row. The hot path."""
        handle = self.handle
        handle.ptr  # noqa: B018  (raises ClosedError)
        position = self.cells.next_position(seq_id)
        if position >= self.n_trained:
            self._leave_trained()
        self._protect_rows(1, () if replaced is None else (replaced,))
        handle.tokens[0] = token
        handle.positions[0] = position
        handle.seqs[0] = seq_id
        handle.wants_logits[0] = 1
        try:
            code = handle.decode(1) if self.n_decodes & _WATCHED else self._watched(1)
            if code == 1 and self._make_room(() if replaced is None else (replaced,)):
                return self.advance(seq_id, token, replaced)
            if code == 0:
                self.cells.append(seq_id, 1)
                self.n_decodes += 1
                row = LogitsRow(handle.rows(1)[0])
                self._live = [row]
                if replaced is not None:
                    replaced.lose()
                return row
        except BaseException:  # Ctrl-C arrives when the call returns
            self._undo({seq_id: position}, () if replaced is None else (replaced,))
            raise
        raise self._failure(code, {seq_id: position}, 1, () if replaced is None else (replaced,))

    def decode(
        self,
        tokens: Sequence[int],
        seqs: Sequence[int],
        wants_logits: Sequence[bool],
        replaced: Iterable[LogitsRow] = (),
    ) -> list[LogitsRow]:
        """Decode at most n_batch tokens, each at the end of its sequence; return the rows wanted."""
        handle = self.handle
        handle.ptr  # noqa: B018  (raises ClosedError)
        n = len(tokens)
        ends: dict[int, int] = {}
        positions = []
        for seq_id in seqs:
            at = ends.get(seq_id)
            if at is None:
                at = self.cells.next_position(seq_id)
            positions.append(at)
            ends[seq_id] = at + 1
        if max(ends.values()) > self.n_trained:
            self._leave_trained()
        n_outputs = sum(wants_logits)
        self._protect_rows(n_outputs, replaced)
        handle.tokens[:n] = tokens
        handle.positions[:n] = positions
        handle.seqs[:n] = seqs
        handle.wants_logits[:n] = wants_logits
        starts = {seq_id: self.cells.next_position(seq_id) for seq_id in ends}
        try:
            code = handle.decode(n) if self.n_decodes & _WATCHED else self._watched(n)
            if code == 1 and self._make_room(replaced):
                return self.decode(tokens, seqs, wants_logits, replaced)
            if code == 0:
                self._record(seqs)
                rows = self._read(n_outputs)
                for row in replaced:
                    row.lose()
                return rows
        except BaseException:  # Ctrl-C arrives when the call returns
            self._undo(starts, replaced)
            raise
        raise self._failure(code, starts, n, replaced)

    def _leave_trained(self) -> None:
        trained, self.n_trained = self.n_trained, _END
        warn_of_length("a sequence gets", trained, self.handle.n_ctx)

    def _watched(self, n: int) -> int:
        watch = self.watch
        return self.handle.decode(n) if watch is None else watch.decode(n)

    def _read(self, n_outputs: int) -> list[LogitsRow]:
        """Return the rows of the decode that has just succeeded."""
        self.n_decodes += 1
        if n_outputs == 0:
            return []
        rows = [LogitsRow(array) for array in self.handle.rows(n_outputs)[:n_outputs]]
        self._live = list(rows)
        return rows

    def _record(self, seqs: Sequence[int]) -> None:
        """Tell the ledger of a batch; cells are written in the order of the batch."""
        cells, clock = self.cells, self.cells.clock
        write_indices: dict[int, list[int]] = {}
        for i, seq_id in enumerate(seqs):
            write_indices.setdefault(seq_id, []).append(clock + i)
        cells.clock += len(seqs)
        for seq_id, written in write_indices.items():
            cells.append(seq_id, len(written), written)

    def _make_room(self, replaced: Iterable[LogitsRow]) -> bool:
        """Free what is parked, if anything is; True if the decode may be tried again."""
        if self.cell_order is None or not self.cell_order.n_cells:
            return False
        for row in replaced:
            row.keep()
        if not self.compact():
            self.cell_order.free()
        return True

    def decode_tree(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        members: Sequence[Sequence[int]],
    ) -> list[LogitsRow]:
        """Decode tokens that belong to several sequences each; return all their rows.

        The ledger is not told: ``adopt`` what stays, drop the other sequences.
        """
        handle = self.handle
        handle.ptr  # noqa: B018  (raises ClosedError)
        n = len(tokens)
        if max(positions) >= self.n_trained:
            self._leave_trained()
        self._protect_rows(n, ())
        handle.tokens[:n] = tokens
        handle.positions[:n] = positions
        handle.wants_logits[:n] = 1
        starts = {seq: self.cells.next_position(seq) for group in members for seq in group}
        try:
            code = handle.decode_tree(n, members)
            if code == 0:
                return self._read(n)
        except BaseException:
            self._undo(starts, ())
            raise
        raise self._failure(code, starts, n, ())

    def adopt(
        self, leaves: Sequence[int], leaf: int, target: int, nodes: Sequence[int], n_nodes: int
    ) -> None:
        """Give ``target`` the path ``nodes`` of the tree just decoded, which ``leaf`` holds.

        The tree had ``n_nodes`` tokens; what is not on the path is left to the other ``leaves``.
        """
        start = self.cells.next_position(target)
        first = self.cells.clock
        self.cells.clock += n_nodes
        if self.cell_order is not None and n_nodes > len(nodes):
            self.cell_order.take_tree(leaves, start, first, n_nodes - len(nodes))
        try:
            self.handle.remove(target, -1, -1)
            self.handle.copy(leaf, target, 0, start + len(nodes))
            self.cells.append(target, len(nodes), [first + node for node in nodes])
        except BaseException:
            self.handle.remove(target, -1, -1)
            self.handle.copy(leaf, target, 0, start)
            self.cells.remove(target, start, _END)
            raise

    def _failure(
        self, code: int, starts: dict[int, int], n: int, replaced: Iterable[LogitsRow]
    ) -> DecodeError | CacheFullError:
        """Put the memory back as it was before the batch; return what llama.cpp's ``code`` means."""
        if code in (1, -1):  # nothing was touched, the rows that were given up still stand
            self._live = [row for row in replaced if row.users > 0]
            if code == -1:
                return DecodeError("llama.cpp refused the batch as inconsistent", code=code)
            usage = self.cells.usage()
            return CacheFullError(
                f"the cache is full: {n} tokens need cells, {usage.cells_free} of "
                f"{usage.cells_total} are free ({usage.cells_shared} shared)",
                hint="prune branches, or open the context with a larger n_ctx",
            )
        if code == _INTERRUPTED:
            self.handle.resume()
        elif code == -2:
            self.handle.forget_rows()
        emptied = self._undo(starts, replaced)
        state = "the sequences of the batch stand where they stood"
        if emptied:
            state = f"this memory cannot drop a tail: sequences {emptied} are empty now"
        if code == _INTERRUPTED:
            return DecodeInterruptedError(
                f"the decode was interrupted; {state}", code=code, memory_changed=True
            )
        reason = "llama.cpp could not " + ("allocate what it needs" if code == -2 else "compute")
        return DecodeError(f"{reason} (code {code}); {state}", code=code, memory_changed=True)

    def _undo(self, starts: dict[int, int], replaced: Iterable[LogitsRow]) -> list[int]:
        """Cut every sequence of a failed batch back; return those that had to be emptied."""
        emptied = [seq_id for seq_id, start in starts.items() if not self.cut(seq_id, start)]
        for row in replaced:
            row.lose()
        return emptied

    def decode_run(
        self,
        tokens: Sequence[int],
        seq_id: int,
        logits: str,
        replaced: Iterable[LogitsRow] = (),
    ) -> list[LogitsRow]:
        """Decode any number of tokens of one sequence in chunks; all of them or none."""
        start = self.cells.next_position(seq_id)
        want_all = logits == "all"
        size = self.handle.n_chunk
        if want_all:
            size = min(size, self.handle.n_outputs_max)
        if len(tokens) > size:
            replaced = ()  # a later chunk may fail when an earlier one has overwritten the row
            self.make_room(len(tokens))
        rows: list[LogitsRow] = []
        try:
            for low in range(0, len(tokens), size):
                for row in rows:  # the next chunk overwrites the buffer
                    row.keep()
                chunk = tokens[low : low + size]
                wants = [want_all] * len(chunk)
                wants[-1] |= logits == "last" and low + size >= len(tokens)
                rows += self.decode(chunk, [seq_id] * len(chunk), wants, replaced)
        except BaseException:
            if self.cells.next_position(seq_id) > start:
                self.cut(seq_id, start)
            raise
        return rows

    def make_room(self, n: int) -> None:
        """Free what is parked if ``n`` cells would not be free otherwise."""
        parked = 0 if self.cell_order is None else self.cell_order.n_cells
        if parked and self.cells.usage().cells_free - parked < n:
            self._make_room(())

    def cut(self, seq_id: int, start: int) -> bool:
        """Drop what was begun at the end of a sequence; False if all of it had to go.

        Some of it may be in llama.cpp's memory and not in the ledger.
        """
        if not self.can_truncate and self.handle.position_range(seq_id)[1] == start - 1:
            return True  # nothing was written
        if self.can_truncate and self.drop(seq_id, start):
            return True
        self.drop(seq_id, 0)
        return start == 0

    def drop(self, seq_id: int, start: int, end: int = _END) -> bool:
        """Drop positions [start, end) of a sequence; False if this memory cannot."""
        if self.cell_order is not None:
            self.cell_order.take(seq_id, start, end)
        stop = -1 if end == _END else end
        try:
            if not self.handle.remove(seq_id, start, stop):
                return False
            self.cells.remove(seq_id, start, end)
        except BaseException:  # nothing may come between the two
            if self.handle.remove(seq_id, start, stop):
                self.cells.remove(seq_id, start, end)
            raise
        if self.cell_order is not None:
            self.cell_order.free_if_unneeded()
        return True

    def clear(self) -> None:
        """Drop everything."""
        self.handle.clear()
        self.cells.clear()
        if self.cell_order is not None:
            self.cell_order.begin_anew()

    def share(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """Make ``target`` hold what ``source`` holds, without copying any K/V."""
        if self.cells.first_position(target) >= 0:
            self.drop(target, 0)
        try:
            self.handle.copy(source, target, start, end)
            self.cells.copy(source, target, start, _END if end == -1 else end)
        except BaseException:
            self.handle.remove(target, 0, -1)
            self.cells.remove(target, 0, _END)
            raise
