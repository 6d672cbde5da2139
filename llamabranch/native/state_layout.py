"""Checks the bytes of a saved sequence state (``llama_state_seq_get_data``) before llama.cpp reads them.

llama.cpp does not check the cell counts and positions of a state: a bad position stays in the cache, a
second recurrent cell aborts the process, and a NaN in one sequence's values spreads to all sequences.
We learn the layout from the state that the context itself writes for two tokens. A state can be
restored only if it has the same layout.

The layout is: magic, sequence id, then one part for each cache. A part of cells has the stream count (1),
n, then n times (position, 1, extension, sequence id), then the tensors. A recurrent part has n (1),
position, 0, and the tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from ..errors import SnapshotError

State = npt.NDArray[np.uint8]
# One cache in a state: its kind, its header, the rows of its cells without owners, and the name and the
# bytes of each tensor, (rows, cells, bytes).
_Cache = tuple[str, State, State, "list[tuple[State, State]]"]

_CELLS, _WINDOW, _RECURRENT = "cells", "window", "recurrent"
_COMBINATIONS = (
    (_CELLS,),
    (_CELLS, _WINDOW),
    (_RECURRENT,),
    (_CELLS, _RECURRENT),
    (_CELLS, _WINDOW, _RECURRENT),
)
_EXTENSIONS = (0, 12, 8)  # extra bytes that some models store with each cell

_MAX_TENSORS = 1 << 16

# For each tensor type: the bytes of a block, how many floats it begins with, their size in bytes, and
# the mask of their exponent bits, which are all 1 in infinity and NaN. A quantized block has scales,
# then small integers.
_FLOATS = {
    0: (4, 1, 4, 0x7F800000),
    1: (2, 1, 2, 0x7C00),
    2: (18, 1, 2, 0x7C00),
    3: (20, 2, 2, 0x7C00),
    6: (22, 1, 2, 0x7C00),
    7: (24, 2, 2, 0x7C00),
    8: (34, 1, 2, 0x7C00),
    20: (18, 1, 2, 0x7C00),
    30: (2, 1, 2, 0x7F80),
}
# In types with a wide range, numbers from these powers of two up are rejected, because they soon lead
# to NaN. The limit for cells is lower because sequences share the cache, but still 16 times the largest
# f16 number.
_LIMITS = {_CELLS: 20, _WINDOW: 20, _RECURRENT: 40}
_MANTISSA_BITS = {0: 23, 30: 7}


@dataclass(frozen=True)
class Part:
    """One cache: its tensors in order, each with its type and its bytes per cell."""

    kind: str
    transposed: bool
    n_layer: int
    tensors: tuple[tuple[int, int], ...]

    @property
    def cell_bytes(self) -> int:
        return sum(size for _, size in self.tensors)


@dataclass(frozen=True)
class StateLayout:
    """The layout of a sequence's state. Contexts with the same layout can exchange states."""

    magic: int
    extension: int
    parts: tuple[Part, ...]

    @classmethod
    def learn(cls, state: State, n_tokens: int) -> StateLayout | None:
        """Return the layout of a state of ``n_tokens`` tokens; None if it is unknown."""
        for kinds, extension, has_values in product(_COMBINATIONS, _EXTENSIONS, (True, False)):
            with suppress(SnapshotError):
                return _Reader(state, n_tokens).read(kinds, extension, has_values)
        return None

    @property
    def flash_attention(self) -> bool | None:
        """True if flash attention is on (V is then not transposed); None without attention."""
        return next((not part.transposed for part in self.parts if part.kind != _RECURRENT), None)

    @property
    def needs_cells(self) -> bool:
        """True if every token takes a cell in a cache without a window."""
        return any(part.kind == _CELLS for part in self.parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent state, whatever its length."""
        return sum(part.cell_bytes for part in self.parts if part.kind == _RECURRENT)

    def max_bytes(self, n_tokens: int) -> int:
        """Return the most bytes of a state of ``n_tokens`` tokens; with a sliding window it may be
        smaller.
        """
        total = 8
        for part in self.parts:
            n = 1 if part.kind == _RECURRENT else n_tokens
            overhead = 16 + 12 * len(part.tensors)
            total += overhead + n * (12 + self.extension + part.cell_bytes)
        return total

    @property
    def is_cells_only(self) -> bool:
        """True if the state has only the cells of one cache without a window."""
        return [part.kind for part in self.parts] == [_CELLS]

    @property
    def has_window(self) -> bool:
        """True if the state has only the cells of two caches, one of them with a window."""
        return [part.kind for part in self.parts] == [_CELLS, _WINDOW]

    @property
    def partial(self) -> StateLayout:
        """The layout of the part of a state that cannot be cut: recurrent states and window cells."""
        return replace(self, parts=tuple(part for part in self.parts if part.kind != _CELLS))

    def joined(self, pieces: Sequence[tuple[State, int, int]], rest: State | None = None) -> State:
        """Return one state made of several: from each, the cells at positions [start, end).

        Each cell gets an owner, and any owner will do. llama.cpp writes none for sequence ids from
        n_seq_max up, but restores only cells that have one.

        Args:
            pieces: states of this layout, each with its start and end.
            rest: a ``partial`` state that provides the windows and recurrent states; None = take them
                from the last piece.
        """
        last = pieces[-1][0]
        others = iter(()) if rest is None else self.partial._caches(rest)
        written = [last[:_BEFORE_STREAMS]]
        for caches in zip(*(self._caches(state) for state, _, _ in pieces), strict=True):
            kind, head, cells, tensors = caches[-1]
            if kind != _CELLS:
                kind, head, cells, tensors = caches[-1] if rest is None else next(others)
            if kind == _RECURRENT:
                written.append(head)
                continue
            chosen: list[slice | npt.NDArray[np.intp]] = [slice(0, len(cells))]
            if kind == _CELLS:
                chosen = [
                    _between(cache[2], start, end)
                    for cache, (_, start, end) in zip(caches, pieces, strict=True)
                ]
            sources = caches if kind == _CELLS else [(kind, head, cells, tensors)]
            rows = np.concatenate([c[2][cut] for c, cut in zip(sources, chosen, strict=True)])
            owned = np.zeros((len(rows), rows.shape[1] + 4), dtype=np.uint8)
            owned[:, :-4] = rows
            owned[:, 4] = 1
            written += [_number(1), _number(len(rows)), owned.reshape(-1), head]
            for i, (name, _) in enumerate(tensors):
                parts = [c[3][i][1][:, cut] for c, cut in zip(sources, chosen, strict=True)]
                if len(parts[0]) > 1:  # rows of values, with one number per cell
                    parts = [np.concatenate(parts, axis=1)]
                written += [name, *(part.reshape(-1) for part in parts)]
        return np.concatenate(written)

    def _caches(self, state: State) -> Iterator[_Cache]:
        """Yield the caches of a state, unchecked; a recurrent one is all header."""
        at = _BEFORE_STREAMS
        for part in self.parts:
            if part.kind == _RECURRENT:
                yield part.kind, state[at:], state[:0], []
                continue
            n, size = int(state[at + 4 : at + 8].view(np.uint32)[0]), 8 + self.extension
            at += 8
            stride = size + 4 * bool(n and state[at + 4])  # a cell may have an owner
            cells = state[at : at + n * stride].reshape(n, stride)[:, :size]
            at += n * stride
            head, tensors = state[at : at + 8], list[tuple[State, State]]()
            at += 8
            for i, (_, size) in enumerate(part.tensors):
                name, shape = state[at : at + 12], (1, n, size)
                if part.transposed and i >= part.n_layer:
                    element, width = map(int, name[4:].view(np.uint32))
                    shape = width, n, element
                at += 12 + n * size
                tensors.append((name, state[at - n * size : at].reshape(shape)))
            yield part.kind, head, cells, tensors

    def check(self, state: State, n_tokens: int, start: int = 0) -> None:
        """Raise an error unless ``state`` has this layout and the positions from start to n_tokens - 1.

        It must have each of them once, except that a cache with a sliding window has only the last
        positions.

        Raises:
            SnapshotError: another layout; a missing, repeated or unexpected position; a number that is
                not finite.
        """
        reader = _Reader(state, n_tokens, start)
        kinds = tuple(part.kind for part in self.parts)
        has_values = any(len(p.tensors) > p.n_layer for p in self.parts if p.kind != _RECURRENT)
        if reader.read(kinds, self.extension, has_values) != self:
            raise SnapshotError("the K/V has another layout than this context")
        reader.check_numbers()


def _between(cells: State, start: int, end: int) -> slice | npt.NDArray[np.intp]:
    """Return which cells have positions [start, end), as a slice if possible, which avoids a copy."""
    positions = np.ascontiguousarray(cells[:, :4]).view(np.int32).reshape(-1)
    found = np.flatnonzero((positions >= start) & (positions < end))
    first, n = (int(found[0]), len(found)) if len(found) else (0, 0)
    return slice(first, first + n) if not n or found[-1] == first + n - 1 else found


_BEFORE_STREAMS = 8  # magic, sequence id
_BEFORE_CELLS = 12  # magic, sequence id, number of streams


def without_streams(state: State, seq_id: int, n_streams: int) -> State:
    """Convert a state from a cache with separate sequences to the form of a unified cache.

    In the former, the stream of each other sequence is just a cell count of 0.
    """
    low, high = _BEFORE_CELLS + 4 * seq_id, len(state) - 4 * (n_streams - 1 - seq_id)
    return np.concatenate((state[:_BEFORE_STREAMS], _number(1), state[low:high]))


def with_streams(state: State, n_streams: int) -> State:
    """Undo ``without_streams``. llama.cpp restores cells from any stream into the requested sequence."""
    head, cells = state[:_BEFORE_STREAMS], state[_BEFORE_CELLS:]
    none = np.zeros(4 * (n_streams - 1), dtype=np.uint8)
    return np.concatenate((head, _number(n_streams), cells, none))


def _number(n: int) -> State:
    return np.array([n], dtype=np.uint32).view(np.uint8)


class _Reader:
    """Reads a state from its start; checks every size before using it."""

    def __init__(self, state: State, n_tokens: int, start: int = 0) -> None:
        self._start = start
        self._state = state
        self._bytes = state.data
        self._at = 0
        self._n_tokens = n_tokens
        self._blocks: list[tuple[str, int, int, int]] = []  # part's kind, type, start, end
        self._kind = _CELLS

    def read(self, kinds: tuple[str, ...], extension: int, has_values: bool) -> StateLayout:
        magic, _seq_id = self._numbers("<Ii")
        parts = []
        for kind in kinds:
            self._kind, is_state = kind, kind == _RECURRENT
            parts.append(self._recurrent() if is_state else self._cells(extension, has_values))
        if self._at != len(self._bytes):
            raise SnapshotError("the K/V is longer than its header says")
        return StateLayout(magic, extension, tuple(parts))

    def _skip(self, n: int) -> int:
        start = self._at
        if n < 0 or n > len(self._bytes) - start:
            raise SnapshotError("the K/V is shorter than its header says")
        self._at = start + n
        return start

    def _numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack_from(form, self._bytes, self._skip(struct.calcsize(form)))

    def _cells(self, extension: int, has_values: bool) -> Part:
        n_streams, n = self._numbers("<II")
        if n_streams != 1 or not 0 < n <= self._n_tokens:
            raise SnapshotError(f"the K/V holds {n} cells for {self._n_tokens} tokens")
        size = 12 + extension
        start = self._skip(n * size)
        cells = self._state[start : self._at].reshape(n, size)
        positions = np.sort(np.ascontiguousarray(cells[:, :4]).view(np.int32)[:, 0])
        first = self._start if self._kind == _CELLS else self._n_tokens - n
        if not np.array_equal(positions, np.arange(first, self._n_tokens)):
            raise SnapshotError(
                f"the K/V does not hold the positions {self._start} to {self._n_tokens - 1}"
            )
        if (np.ascontiguousarray(cells[:, 4:8]).view(np.int32) != 1).any():
            raise SnapshotError("a cell of the K/V belongs to several sequences")
        transposed, n_layer = self._numbers("<II")
        if transposed > 1 or n_layer > _MAX_TENSORS:
            raise SnapshotError("the K/V has another layout than this context")
        tensors = list(self._tensors(n_layer, n, False))
        if has_values:
            tensors += self._tensors(n_layer, n, bool(transposed))
        return Part(self._kind, bool(transposed), n_layer, tuple(tensors))

    def _recurrent(self) -> Part:
        n, position, n_sequences, transposed, n_layer = self._numbers("<IiIII")
        if (n, position, n_sequences, transposed) != (1, self._n_tokens - 1, 0, 0):
            raise SnapshotError(
                f"the recurrent state does not belong to a text of {self._n_tokens} tokens"
            )
        # Layers without a recurrent state are omitted and their number is not stored, so read to the
        # end.
        tensors: list[tuple[int, int]] = []
        while self._at < len(self._bytes) and len(tensors) <= _MAX_TENSORS:
            tensors += self._tensors(1, 1, False)
        return Part(_RECURRENT, False, n_layer, tuple(tensors))

    def _tensors(self, count: int, n: int, transposed: bool) -> Iterator[tuple[int, int]]:
        for _ in range(count):
            if transposed:
                kind, element, width = self._numbers("<iII")
                size = element * width
            else:
                kind, size = self._numbers("<iQ")
            start = self._skip(n * size)
            self._blocks.append((self._kind, kind, start, self._at))
            yield kind, size

    def check_numbers(self) -> None:
        """Raise if a tensor has NaN, infinity or huge numbers, which would spread to other sequences."""
        for part, kind, start, end in self._blocks:
            if kind not in _FLOATS:
                continue
            block, n_floats, width, bits = _FLOATS[kind]
            limit = bits
            if kind in _MANTISSA_BITS:
                limit = (127 + _LIMITS[part]) << _MANTISSA_BITS[kind]
            data = self._state[start:end]
            if len(data) % block:
                raise SnapshotError("the K/V has another layout than this context")
            if block != width:
                data = np.ascontiguousarray(data.reshape(-1, block)[:, : n_floats * width])
            numbers: npt.NDArray[np.unsignedinteger] = data.reshape(-1).view(f"u{width}")
            if ((numbers & bits) >= limit).any():
                raise SnapshotError(
                    "the K/V contains a number that is infinite, NaN or far too large"
                )
