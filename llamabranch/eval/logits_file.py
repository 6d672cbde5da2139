"""llama.cpp's files of log-probabilities, which ``llama-perplexity --kl-divergence-base`` writes and
reads.

The format, with all numbers little-endian: the bytes ``_logits_``; int32 tokens per chunk, size of the
vocabulary, number of chunks; int32 the tokens of all chunks, before BOS replaced any; then for each
scored token a row of uint16. A row has the float32 scale and the float32 smallest log-probability
(together four numbers of 16 bits), a code for each token of the vocabulary, and a zero if their number is
odd. A log-probability is code x scale + the smallest log-probability, which is at most 16 nats below the
largest.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from ..errors import ConfigError
from ..files import path_of

_HEAD = struct.Struct("<8s3i")  # before the tokens
_MAGIC = b"_logits_"
_RANGE = np.float32(16.0)  # nats that a row reaches below its largest log-probability
_LARGEST = np.float32(65535.0)


class Coded(NamedTuple):
    """A row of a file: two float32, and the codes of the vocabulary, uint16 (V,)."""

    scale: np.float32
    smallest: np.float32
    codes: npt.NDArray[np.uint16]


def encode(logits: npt.NDArray[np.float32]) -> Coded:
    """Return a row of logits, float32 (V,), as codes, with llama.cpp's arithmetic."""
    largest = np.float32(logits.max())
    smallest = max(np.float32(logits.min()), largest - _RANGE)
    total = float(np.exp(logits - largest).sum(dtype=np.float64))
    scale = np.float32((largest - smallest) / _LARGEST)
    codes = np.zeros(len(logits), dtype="<u2")
    if scale:
        steps = np.rint((np.float32(1) / scale) * (logits - smallest))
        codes[:] = np.where(logits > smallest, steps, 0)
    return Coded(scale, np.float32(smallest - largest) - np.float32(np.log(total)), codes)


class LogitsFile(AbstractContextManager["LogitsFile"]):
    """A file of log-probabilities, open for reading or for writing; the end of ``with`` closes it.

    Attributes:
        path: the file.
        window: tokens per chunk.
        n_vocab: size of the vocabulary.
        chunks: the tokens of each chunk.
    """

    def __init__(
        self, path: Path, file: IO[bytes], window: int, n_vocab: int, chunks: Sequence[list[int]]
    ) -> None:
        self.path, self._file = path, file
        self.window, self.n_vocab, self.chunks = window, n_vocab, chunks
        self._row_bytes = 8 + 4 * ((n_vocab + 1) // 2)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file for reading.

        Raises:
            ConfigError: it cannot be read, is of another kind, or is shorter than its header says.
        """
        path = path_of(path)
        file = _open(path, "rb", "read")
        try:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or not head.startswith(_MAGIC):
                raise ConfigError(
                    f"{path} is not a file of log-probabilities",
                    hint="`llamabranch eval --perplexity TEXT --save-logits FILE` writes one",
                )
            _, window, n_vocab, n_chunks = _HEAD.unpack(head)
            if window < 4 or n_vocab < 1 or n_chunks < 1:
                raise ConfigError(
                    f"{path} is damaged: {n_chunks} chunks of {window} tokens, a vocabulary of {n_vocab}"
                )
            n_rows = n_chunks * (window - 1 - window // 2)
            size, needed = path.stat().st_size, _row_at(window, n_vocab, n_chunks, n_rows)
            if size < needed:
                message = f"{path} is incomplete: {size:,} of {needed:,} bytes"
                raise ConfigError(message, hint="write it again")
            tokens = np.frombuffer(file.read(4 * window * n_chunks), dtype="<i4")
        except BaseException:
            file.close()
            raise
        return cls(path, file, window, n_vocab, tokens.reshape(n_chunks, window).tolist())

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], n_vocab: int, chunks: Sequence[list[int]]
    ) -> Self:
        """Open a file for writing. Raises ConfigError if that is not possible."""
        path = path_of(path)
        file = _open(path, "wb", "write")
        try:
            file.write(_HEAD.pack(_MAGIC, len(chunks[0]), n_vocab, len(chunks)))
            file.write(np.asarray(chunks, dtype="<i4").tobytes())
        except BaseException:
            file.close()
            raise
        return cls(path, file, len(chunks[0]), n_vocab, chunks)

    def _at(self, chunk: int, i: int) -> int:
        """Return where the row after token ``i`` of a chunk begins; only the second half has rows."""
        first = self.window // 2
        n_rows = chunk * (self.window - 1 - first) + i - first
        return _row_at(self.window, self.n_vocab, len(self.chunks), n_rows)

    def write(self, chunk: int, i: int, logits: npt.NDArray[np.float32]) -> None:
        """Write the logits after token ``i`` of a chunk. Raises OSError if the disk is full."""
        data = b"".join(part.tobytes() for part in encode(logits))
        self._file.seek(self._at(chunk, i))
        self._file.write(data.ljust(self._row_bytes, b"\0"))

    def read(self, chunk: int, i: int) -> Coded:
        """Return the row after token ``i`` of a chunk."""
        self._file.seek(self._at(chunk, i))
        data = self._file.read(self._row_bytes)
        if len(data) < self._row_bytes:
            raise ConfigError(f"{self.path} has become shorter while it was read")
        scale, smallest = np.frombuffer(data, dtype="<f4", count=2)
        return Coded(scale, smallest, np.frombuffer(data, "<u2", count=self.n_vocab, offset=8))

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _row_at(window: int, n_vocab: int, n_chunks: int, n_rows: int) -> int:
    """Return where the row after the first ``n_rows`` begins."""
    return _HEAD.size + 4 * window * n_chunks + n_rows * (8 + 4 * ((n_vocab + 1) // 2))


def _open(path: Path, mode: str, purpose: str) -> IO[bytes]:
    try:
        return path.open(mode)
    except OSError as error:
        raise ConfigError(f"cannot {purpose} {path}: {error.strerror or error}") from None
