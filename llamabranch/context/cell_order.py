"""Keeping the cells of every sequence in the order of its tokens.

llama.cpp's attention sums over cells in the order of their indices. A sequence whose later token is in a
lower cell than an earlier one gets the same logits except for rounding, and rounding differences can
change the sampled token. llama.cpp fills the lowest free cells first, so a hole below the cells of a
living sequence is what would break the order.
In a batch-invariant context such cells are therefore *quarantined* when they become free: tagged with a
sequence id that is never used otherwise. They are released when no living sequence has cells above them,
or when the cache is full: then all sequences are decoded again, in order (``compaction.py``). Where that
is impossible, the cells are freed and the order is no longer guaranteed.
"""

from __future__ import annotations

from ..native import ContextHandle
from .cell_table import CellTable

__all__ = ["CellOrder"]


class CellOrder:
    """Cells that hold nothing any more but must not be reused yet."""

    def __init__(self, handle: ContextHandle, cells: CellTable, seq_id: int) -> None:
        self._handle = handle
        self._cells = cells
        self._seq_id = seq_id
        self._lowest: int | None = None  # the write index of the oldest quarantined cell
        self.n_cells = 0
        self.in_order = True  # False once quarantined cells had to be freed below a living sequence

    def quarantine(self, seq_id: int, start: int, end: int) -> None:
        """Quarantine the cells that a drop of [start, end) would free below a living sequence."""
        cells = self._cells
        end_of_seq = cells.next_position(seq_id)
        high = min(end, end_of_seq)
        start = cells.first_position(seq_id, start)
        if not 0 <= start < high:
            return
        # Of a sequence's cells those of later positions were written later.
        newest = cells.newest(but=seq_id)
        if high == end_of_seq and newest <= cells.write_index(seq_id, start):
            return
        low, n_cells = cells.exclusive(seq_id, start, high)
        if low is None:
            return
        write_index = cells.write_index(seq_id, low)
        if high < end_of_seq or newest > write_index:
            self._handle.copy(seq_id, self._seq_id, low, high)
            self._lowest = write_index if self._lowest is None else min(self._lowest, write_index)
            self.n_cells += n_cells

    def release_if_unneeded(self) -> None:
        """Release the quarantined cells if no living sequence has cells above them."""
        if self._lowest is None:
            return
        cells = self._cells
        if cells.newest() < self._lowest:
            self._handle.remove(self._seq_id, 0, -1)
            self._forget()

    def release(self) -> None:
        """Release the quarantined cells although sequences have cells above them: order is lost."""
        self._handle.remove(self._seq_id, 0, -1)
        self._forget()
        self.in_order = False

    def _forget(self) -> None:
        """Record that nothing is quarantined."""
        self._lowest, self.n_cells = None, 0

    def reset(self) -> None:
        """Record that the cache is empty: whatever is written next is in order."""
        self._forget()
        self.in_order = True
