"""The hidden states of a context's tokens, kept for a head that drafts with them, or for branches.

One row is kept per cell of the cache, under the cell's write index. So sequences that share cells share
rows, and forking, rewinding or pruning a sequence changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..native import heads
from ..native.context import ContextHandle
from .cell_table import CellTable

Rows = npt.NDArray[np.float32]


class HiddenStates:
    """Rows of hidden states by cell. The caller must hold the target's lock.

    Args:
        handle: the target's native context; extraction is turned on in it.
        cells: which sequence holds which cells.
        layers: the layers whose inputs make up a row, in this order. The number n_layer stands for the
            state before the output norm, the only one that MTP layers read.
        is_read: returns whether a head still reads them; None = only branches read them.

    Raises:
        UnsupportedError: llama.cpp does not give these states for the architecture.
        ConfigError: no such layer.
    """

    def __init__(
        self,
        handle: ContextHandle,
        cells: CellTable,
        layers: Sequence[int],
        is_read: Callable[[], bool] | None,
    ) -> None:
        heads.extract(handle, layers, True)
        n = handle.n_layer
        widths = [handle.n_embd if layer < n else handle.n_embd_out for layer in layers]
        ends = np.cumsum([0, *widths]).tolist()
        # A list, because a file may name a layer twice.
        self._columns = list(zip(layers, map(slice, ends, ends[1:]), strict=False))
        self.width = ends[-1]
        self.is_read = is_read or (lambda: True)
        self.is_for_head = is_read is not None
        self._handle = handle
        self._cells = cells
        self.layers = tuple(layers)
        self._rows: dict[int, Rows] = {}

    def columns(self, layer: int) -> slice:
        """Return which columns of a row belong to ``layer``."""
        return dict(self._columns)[layer]

    def record(self, first: int, n: int) -> None:
        """Keep the rows of the decode of ``n`` tokens that has just succeeded.

        ``first`` is the write index of its first token; the others follow in the order of the batch.
        """
        states = np.empty((n, self.width), dtype=np.float32)
        for layer, columns in self._columns:
            states[:, columns] = heads.extracted_rows(self._handle, layer, n)
        if len(self._rows) > 2 * self._cells.n_cells:
            used = self._cells.write_indices()
            self._rows = {index: row for index, row in self._rows.items() if index in used}
        self._rows.update(zip(range(first, first + n), states, strict=True))

    def of(self, seq_id: int, start: int = 0, end: int | None = None) -> list[Rows | None]:
        """Return the rows of positions [start, end) of a sequence; None for a row that was not kept."""
        index = self._cells.write_index
        end = self._cells.next_position(seq_id) if end is None else end
        return [self._rows.get(index(seq_id, position)) for position in range(start, end)]

    def set_all(self, seq_id: int, rows: Iterable[Rows | None]) -> None:
        """Keep ``rows`` for the first positions of a sequence; rows that are None are skipped."""
        for position, row in enumerate(rows):
            if row is not None:
                self._rows[self._cells.write_index(seq_id, position)] = row
