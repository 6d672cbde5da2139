"""The file of a snapshot: a fixed header, metadata as JSON, and raw arrays.

Two SHA-256 checksums cover all of it. It is written completely or not at all, and read as untrusted
input: sizes are checked before anything is allocated. ``snapshot.py`` interprets the parts.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Callable
from os import PathLike
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import SnapshotError
from ..files import atomic_write, path_of

__all__ = ["DIGEST_BYTES", "HEADER", "Arrays", "Sizes", "read_file", "write_file"]

_MAGIC = b"\x89LBRANCH"
# A file without hidden states is of version 1, which has no others.
_VERSION, _WITH_HIDDEN = 1, 2
# Magic, version, bytes of metadata, tokens, surprisals, logits, numbers in a row of hidden states, bytes
# of K/V, SHA-256 of the arrays; after it the SHA-256 of this header and the metadata.
HEADER = struct.Struct("<8sIIIIIIQ32s")
DIGEST_BYTES = 32
_MAX_METADATA_BYTES = 16 << 20
_MAX_TOKENS = 1 << 30

T = TypeVar("T")


class Arrays(NamedTuple):
    """The raw parts: ids, nats, logits, llama.cpp's K/V of the sequence, a row for each token or none."""

    tokens: npt.NDArray[np.int32]
    surprisals: npt.NDArray[np.float64]
    logits: npt.NDArray[np.float32]
    state: npt.NDArray[np.uint8]
    hidden: npt.NDArray[np.float32]


class Sizes(NamedTuple):
    """How many entries the arrays of a file have, and numbers a row of hidden states."""

    n_tokens: int
    n_surprisals: int
    n_logits: int
    n_state: int
    width: int


def write_file(path: str | PathLike[str], metadata: bytes, arrays: Arrays) -> None:
    """Write a file, as `Snapshot.write` promises; raise its errors."""
    if len(metadata) > _MAX_METADATA_BYTES:
        raise SnapshotError(f"the grammar or the logit bias is too large: {len(metadata)} bytes")
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(_raw(array))
    header = HEADER.pack(
        _MAGIC, _WITH_HIDDEN if arrays.hidden.size else _VERSION, len(metadata), len(arrays.tokens),
        len(arrays.surprisals), len(arrays.logits), arrays.hidden.shape[1], len(arrays.state),
        digest.digest(),
    )  # fmt: skip
    path = path_of(path)
    try:
        with atomic_write(path, 0o600) as file:
            file.write(header)
            file.write(hashlib.sha256(header + metadata).digest())
            file.write(metadata)
            for array in arrays:
                file.write(_raw(array))
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        is_missing = isinstance(error, FileNotFoundError)  # which names the temporary file
        why = f"there is no folder {path.parent}" if is_missing else error
        raise SnapshotError(
            f"the snapshot cannot be written: {why}",
            hint="give the path of a regular file, in a folder that can be written",
        ) from error


def read_file(
    path: str | PathLike[str], understand: Callable[[bytes, Sizes], T]
) -> tuple[T, Arrays]:
    """Read a file; ``understand`` gets metadata and sizes before the arrays are read.

    Returns:
        what ``understand`` returned, and the arrays.

    Raises:
        ConfigError: not a path. SnapshotError: no such file, damaged, or not a snapshot.
    """
    path = path_of(path)
    try:
        # A pipe or a device would block or never end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise SnapshotError(f"{path} is not a file")
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
            if len(header) < HEADER.size or not header.startswith(_MAGIC):
                raise SnapshotError("not a snapshot: its first bytes are not a snapshot header")
            _, version, n_metadata, n_tokens, n_surprisals, n_logits, width, n_state, digest = (
                HEADER.unpack(header)
            )
            if version not in (_VERSION, _WITH_HIDDEN):
                raise SnapshotError(
                    f"the snapshot has format {version}, this library reads {_VERSION} and {_WITH_HIDDEN}"
                )
            n_body = 4 * n_tokens * (1 + width) + 8 * n_surprisals + 4 * n_logits + n_state
            size = os.fstat(file.fileno()).st_size
            if (
                (width > 0) != (version == _WITH_HIDDEN)
                or n_metadata > _MAX_METADATA_BYTES
                or n_tokens > _MAX_TOKENS
                or n_surprisals > n_tokens
                or size != HEADER.size + DIGEST_BYTES + n_metadata + n_body
            ):
                raise SnapshotError("the snapshot is damaged: its size does not match its header")
            expected = file.read(DIGEST_BYTES)
            metadata = file.read(n_metadata)
            if hashlib.sha256(header + metadata).digest() != expected:
                raise SnapshotError("the snapshot is damaged: its checksum differs")
            understood = understand(
                metadata, Sizes(n_tokens, n_surprisals, n_logits, n_state, width)
            )
            body = memoryview(file.read(n_body))
    except (OSError, ValueError) as error:
        raise SnapshotError(f"the snapshot cannot be read: {error}") from error
    if len(body) != n_body or hashlib.sha256(body).digest() != digest:
        raise SnapshotError("the snapshot is damaged: its checksum differs")
    ends = np.cumsum([4 * n_tokens, 8 * n_surprisals, 4 * n_logits, n_state])
    arrays = Arrays(
        tokens=np.frombuffer(body[: ends[0]], "<i4"),
        surprisals=np.frombuffer(body[ends[0] : ends[1]], "<f8"),
        logits=np.frombuffer(body[ends[1] : ends[2]], "<f4"),
        state=np.frombuffer(body[ends[2] : ends[3]], np.uint8),
        hidden=np.frombuffer(body[ends[3] :], "<f4").reshape(n_tokens if width else 0, width),
    )
    return understood, arrays


def _raw(array: npt.NDArray[np.generic]) -> memoryview:
    """Return the array's bytes, little-endian whatever the machine."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).view(np.uint8).data
