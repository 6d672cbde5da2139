"""Files with the K/V of texts, and what else K/V depends on besides the tokens.

A file has a fixed header, metadata as JSON, and raw arrays; two SHA-256 checksums cover all of it. It is
written completely or not at all, and read as untrusted input: sizes are checked before anything is
allocated.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import SnapshotError, UsageError
from ..files import atomic_write
from ..model import Model
from .memory import Memory
from .params import ContextParams

_VERSION, _WITH_HIDDEN = 1, 2  # before 0.5 a file could end with hidden states, which are skipped
# Magic, version, then the counts of metadata bytes, tokens, surprisals, logits, hidden states per token
# and K/V bytes, then the SHA-256 of the arrays. The header is followed by the SHA-256 of itself and the
# metadata.
HEADER = struct.Struct("<8sIIIIIIQ32s")
_DIGEST_BYTES = 32
MAX_METADATA_BYTES = 16 << 20
_MAX_TOKENS = 1 << 30
_FORMS = ("<i4", "<f8", "<f4", "u1")


class Arrays(NamedTuple):
    """The arrays of a file: tokens, their surprisals, the last row of logits, the K/V."""

    tokens: npt.NDArray[np.int32]
    surprisals: npt.NDArray[np.float64]
    logits: npt.NDArray[np.float32]
    state: npt.NDArray[np.uint8]


class HasKV(Protocol):
    """A context."""

    model: Model
    kv_cache: Memory
    kv_type: str
    params: ContextParams
    n_ctx_seq: int


@dataclass(frozen=True, kw_only=True)
class KVCompatibility:
    """Everything that the K/V of a sequence depends on, besides its tokens."""

    fingerprint: str
    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    kv_type: str
    flash_attention: bool | None = None
    rope: str
    model: str | None = None  # its file's name, for messages

    @classmethod
    def of(cls, ctx: HasKV) -> KVCompatibility:
        """Return the values of a context.

        Raises:
            SnapshotError: the model's file is missing, or is not the one that was loaded.
        """
        layout = ctx.kv_cache.state_layout
        model = ctx.model
        try:
            fingerprint = model.fingerprint
        except UsageError as error:
            raise SnapshotError(
                f"the model cannot be identified: {error}", hint=error.hint
            ) from error
        return cls(
            fingerprint=fingerprint,
            architecture=model.architecture,
            n_layer=model.n_layer,
            n_embd=model.n_embd,
            n_vocab=model.n_vocab,
            kv_type=ctx.kv_type,
            flash_attention=None if layout is None else layout.flash_attention,
            rope=_rope(ctx),
            model=model.path.name,
        )

    def check(self, ctx: HasKV) -> None:
        """Raise SnapshotError unless ``ctx`` computes the same K/V."""
        ours = asdict(KVCompatibility.of(ctx))
        if ctx.model.is_of(self.fingerprint):  # versions before 0.4 wrote another fingerprint
            ours["fingerprint"] = self.fingerprint
        for name, theirs in asdict(self).items():
            if name != "model" and theirs != ours[name]:
                setting = name if name in ("kv_type", "flash_attention", "rope") else None
                if name == "fingerprint":
                    name, theirs = "model", self.model or "its name was not saved"
                raise SnapshotError(
                    f"the snapshot is from another {name}: {theirs!s:.80}, this context has {ours[name]}",
                    setting=setting,
                    hint="create the context with the model and settings it was saved with",
                )


def _rope(ctx: HasKV) -> str:
    """Return the RoPE settings, which have already been applied to the stored keys."""
    options = ctx.params.native()  # in llama.cpp's numbers
    parts = [f"{k}={v:g}" for k, v in options.items() if k.startswith(("rope_", "yarn_"))]
    scaling = f"{ctx.model.architecture}.rope.scaling."
    trained = ctx.model.metadata.get(f"{scaling}original_context_length", "")
    if trained.isdigit() and ctx.model.metadata.get(f"{scaling}type") != "yarn":
        parts.append(f"long={ctx.n_ctx_seq > int(trained)}")  # LongRoPE has two sets of factors
    return " ".join(parts)


class Head(NamedTuple):
    """The header of a file."""

    magic: bytes
    version: int
    n_metadata: int
    n_tokens: int
    n_surprisals: int
    n_logits: int
    width: int
    n_state: int
    digest: bytes

    @property
    def n_bytes(self) -> tuple[int, ...]:
        """The size of each array in bytes."""
        n = self.n_tokens
        return 4 * n, 8 * self.n_surprisals, 4 * self.n_logits, self.n_state, 4 * n * self.width


def read_head(file: BinaryIO, magic: bytes) -> tuple[Head, bytes]:
    """Return the header of a file, checked, and its metadata.

    Raises:
        SnapshotError: the file is damaged, or ``magic`` says another kind.
    """
    raw = file.read(HEADER.size)
    if len(raw) < HEADER.size or not raw.startswith(magic):
        raise SnapshotError("not a snapshot: its first bytes are not a snapshot header")
    head = Head(*HEADER.unpack(raw))
    if head.version not in (_VERSION, _WITH_HIDDEN):
        raise SnapshotError(
            f"the snapshot has format {head.version}, this library reads {_VERSION} and {_WITH_HIDDEN}"
        )
    n_before = HEADER.size + _DIGEST_BYTES + head.n_metadata
    if (
        (head.width > 0) != (head.version == _WITH_HIDDEN)
        or head.n_metadata > MAX_METADATA_BYTES
        or head.n_tokens > _MAX_TOKENS
        or head.n_surprisals > head.n_tokens
        or os.fstat(file.fileno()).st_size != n_before + sum(head.n_bytes)
    ):
        raise SnapshotError("the snapshot is damaged: its size does not match its header")
    expected, metadata = file.read(_DIGEST_BYTES), file.read(head.n_metadata)
    if hashlib.sha256(raw + metadata).digest() != expected:
        raise SnapshotError("the snapshot is damaged: its checksum differs")
    return head, metadata


def read_arrays(file: BinaryIO, head: Head) -> Arrays:
    """Return the arrays that follow the metadata.

    Raises:
        SnapshotError: they are damaged.
    """
    body = memoryview(file.read(sum(head.n_bytes)))
    if len(body) != sum(head.n_bytes) or hashlib.sha256(body).digest() != head.digest:
        raise SnapshotError("the snapshot is damaged: its checksum differs")
    ends = accumulate(head.n_bytes)
    return Arrays(
        *(
            np.frombuffer(body[end - n : end], form)
            for form, n, end in zip(_FORMS, head.n_bytes, ends, strict=False)
        )
    )


def write(path: Path, magic: bytes, metadata: bytes, arrays: Arrays) -> None:
    """Write a file that only its owner can read, completely or not at all; OSError if it cannot be."""
    body: list[memoryview[int]] = [
        np.ascontiguousarray(array, form).view(np.uint8).data
        for array, form in zip(arrays, _FORMS, strict=True)
    ]
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    n_tokens, n_surprisals, n_logits, n_state = (len(array) for array in arrays)
    header = HEADER.pack(
        magic,
        _VERSION,
        len(metadata),
        n_tokens,
        n_surprisals,
        n_logits,
        0,
        n_state,
        digest.digest(),
    )
    with atomic_write(path, 0o600) as file:
        file.write(header + hashlib.sha256(header + metadata).digest() + metadata)
        for part in body:
            file.write(part)
