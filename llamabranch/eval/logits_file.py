"""llama.cpp's files of log-probabilities, which ``llama-perplexity --kl-divergence-base`` writes and
reads.

The format, all numbers little-endian: the bytes ``_logits_``; int32 tokens a chunk, size of the
vocabulary, number of chunks; int32 the tokens of all chunks, as they were before BOS replaced any; then
for each scored token a row of uint16: the float32 scale and the float32 smallest log-probability (four
numbers of 16 bits), a code for each token of the vocabulary, and a zero where that is an odd number. A
log-probability is scale times code plus the smallest one, which is at most 16 below the largest.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from ..errors import ConfigError
from ..files import path_of

_MAGIC = b"_logits_"
_HEAD = len(_MAGIC) + 12  # bytes before the tokens
_RANGE = np.float32(16.0)  # nats that a row reaches below its largest log-probability
_LARGEST = np.float32(65535.0)

Codes = npt.NDArray[np.uint16]


def encode(logits: npt.NDArray[np.float32], out: Codes) -> None:
    """Write a row of logits, float32 (V,), as codes into ``out``, with llama.cpp's arithmetic."""
    n = len(logits)
    largest = np.float32(logits.max())
    smallest = max(np.float32(logits.min()), largest - _RANGE)
    total = float(np.exp(logits - largest).sum(dtype=np.float64))
    log_total = np.float32(np.log(total))
    scale = np.float32((largest - smallest) / _LARGEST)
    out[:4].view(np.float32)[:] = scale, np.float32(smallest - largest) - log_total
    out[4:] = 0
    if scale:
        steps = np.rint((np.float32(1) / scale) * (logits - smallest))
        out[4 : 4 + n] = np.where(logits > smallest, steps, 0)


def _open(path: Path, mode: str, purpose: str) -> IO[bytes]:
    try:
        return path.open(mode)
    except OSError as error:
        raise ConfigError(f"cannot {purpose} {path}: {error.strerror or error}") from None


class LogitsFile:
    """A file of log-probabilities that is open for reading, or for writing.

    Attributes:
        path: the file.
        window: tokens a chunk.
        n_vocab: size of the vocabulary.
        chunks: the tokens of each chunk.
        first: the index of the first token of a chunk whose logits are in the file.
        n_rows: of a chunk: its tokens from ``first`` on are scored, but for the first of them.
    """

    def __init__(
        self, path: Path, file: IO[bytes], window: int, n_vocab: int, chunks: Sequence[list[int]]
    ) -> None:
        self.path, self._file = path, file
        self.window, self.n_vocab, self.chunks = window, n_vocab, chunks
        self.first = window // 2
        self.n_rows = window - 1 - self.first
        self._width = 2 * ((n_vocab + 1) // 2) + 4

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file for reading.

        Raises:
            ConfigError: it cannot be read, is of another kind, or shorter than it tells.
        """
        path = path_of(path)
        with ExitStack() as stack:  # closes the file if it is refused
            file = stack.enter_context(_open(path, "rb", "read"))
            head = file.read(_HEAD)
            if len(head) < _HEAD or not head.startswith(_MAGIC):
                raise ConfigError(
                    f"{path} is no file of log-probabilities",
                    hint="`llamabranch eval --perplexity TEXT --save-logits FILE` writes one",
                )
            window, n_vocab, n_chunks = struct.unpack("<3i", head[len(_MAGIC) :])
            if window < 4 or n_vocab < 1 or n_chunks < 1:
                raise ConfigError(
                    f"{path} is damaged: {n_chunks} chunks of {window} tokens, a vocabulary of {n_vocab}"
                )
            found = cls(path, file, window, n_vocab, [])
            size, needed = path.stat().st_size, found.size(n_chunks)
            if size < needed:
                raise ConfigError(
                    f"{path} is incomplete: {size:,} of {needed:,} bytes",
                    hint="write it again, or go on with --resume",
                )
            tokens = np.frombuffer(file.read(4 * window * n_chunks), dtype="<i4")
            found.chunks = tokens.reshape(n_chunks, window).tolist()
            stack.pop_all()
        return found

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        n_vocab: int,
        chunks: Sequence[list[int]],
        n_done: int = 0,
    ) -> Self:
        """Open a file for writing, or one that was begun, after its first ``n_done`` chunks.

        Raises:
            ConfigError: it cannot be written; or what is there does not begin in the same way.
        """
        path, window = path_of(path), len(chunks[0])
        tokens = np.asarray(chunks, dtype="<i4").tobytes()
        header = _MAGIC + struct.pack("<3i", window, n_vocab, len(chunks)) + tokens
        with ExitStack() as stack:
            file = stack.enter_context(_open(path, "r+b" if n_done else "wb", "write"))
            found = cls(path, file, window, n_vocab, chunks)
            if not n_done:
                file.write(header)
            elif file.read(len(header)) != header or path.stat().st_size < found._at(n_done):
                message = f"{path} was begun with another text, window or number of chunks"
                raise ConfigError(message, hint="begin anew")
            else:
                file.truncate(found._at(n_done))
            stack.pop_all()
        return found

    def size(self, n_chunks: int) -> int:
        """Return how many bytes the file has with ``n_chunks``."""
        return _HEAD + n_chunks * (4 * self.window + 2 * self._width * self.n_rows)

    def _at(self, chunk: int, row: int = 0) -> int:
        """Return where a row begins."""
        n_rows = chunk * self.n_rows + row
        return _HEAD + 4 * self.window * len(self.chunks) + 2 * self._width * n_rows

    def write(self, chunk: int, i: int, logits: npt.NDArray[np.float32]) -> None:
        """Write the logits after token ``i`` of a chunk. Raises OSError if the disk is full."""
        codes = np.empty(self._width, dtype="<u2")
        encode(logits, codes)
        self._file.seek(self._at(chunk, i - self.first))
        self._file.write(codes.tobytes())

    def read(self, chunk: int, i: int) -> tuple[np.float32, np.float32, Codes]:
        """Return what follows token ``i`` of a chunk: its scale, smallest log-probability and codes,
        uint16 (V,)."""
        self._file.seek(self._at(chunk, i - self.first))
        data = self._file.read(2 * self._width)
        if len(data) < 2 * self._width:
            raise ConfigError(f"{self.path} has become shorter while it was read")
        scale, smallest = np.frombuffer(data, dtype="<f4", count=2)
        return scale, smallest, np.frombuffer(data, dtype="<u2", offset=8, count=self.n_vocab)

    def close(self) -> None:
        """Close the file, as leaving a ``with`` block does."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
