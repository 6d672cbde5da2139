"""A branch copied out of its context: its state, its file, and the checks before restoring it.

The file is treated as untrusted input. The K/V is checked cell by cell before llama.cpp gets it,
because anyone who changes the file can recompute its checksums.
"""

from __future__ import annotations

import json
import stat
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from ..context import Context
from ..context.kv_file import (
    MAX_METADATA_BYTES,
    Arrays,
    KVCompatibility,
    read_arrays,
    read_head,
    write,
)
from ..context.logits import LogitsRow
from ..errors import LlamaBranchError, SnapshotError, UnsupportedError
from ..files import path_of
from ..generation.text import Text
from ..native.library import engine_versions
from ..sampling import Sampler, SamplingParams
from ..sampling.grammar import Grammar

_MAGIC = b"\x89LBRANCH"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A branch copied out of its context: everything needed to continue it elsewhere, bit for bit.

    The arrays are read-only copies: ``tokens`` int32 (n,), ``surprisals`` float64 (n - n_prompt,),
    ``logits`` float32 (V,) or (0,) for an empty branch, and ``state`` uint8, llama.cpp's K/V of the
    sequence. ``appended`` has a pair (start, end) for each text that ``Branch.append`` added after
    generated tokens.
    """

    origin: KVCompatibility
    sampling: SamplingParams
    grammar: Grammar | None
    seed: int
    n_prompt: int
    finish_reason: str | None
    pending: bytes
    tokens: npt.NDArray[np.int32]
    surprisals: npt.NDArray[np.float64]
    logits: npt.NDArray[np.float32]
    state: npt.NDArray[np.uint8]
    appended: tuple[tuple[int, int], ...] = ()

    @property
    def arrays(self) -> Arrays:
        """The arrays as they are in a file."""
        return Arrays(self.tokens, self.surprisals, self.logits, self.state)

    @property
    def n_bytes(self) -> int:
        """The size of the arrays in bytes."""
        return sum(array.nbytes for array in self.arrays)

    def __repr__(self) -> str:
        return f"<Snapshot of {len(self.tokens)} tokens, {self.n_bytes} bytes>"

    # -- files -------------------------------------------------------------------------------------

    def write(self, path: str | PathLike[str]) -> None:
        """Write a file completely or not at all; an existing one is replaced.

        It is written to a temporary file in the same folder and renamed. A symbolic link is followed. An
        existing file keeps its mode; a new file can be read only by its owner, because it contains the
        whole text.

        Raises:
            ConfigError: not a path.
            SnapshotError: it cannot be written, or the path is a pipe, a device or a folder.
        """
        try:
            metadata = json.dumps(self._metadata(), separators=(",", ":")).encode()
        except ValueError as error:  # Python cannot write an integer of more than 4,300 digits
            raise SnapshotError(f"the settings cannot be written: {error}") from error
        if len(metadata) > MAX_METADATA_BYTES:
            raise SnapshotError(
                f"the grammar or the logit bias is too large: {len(metadata)} bytes"
            )
        path = path_of(path)
        try:
            write(path, _MAGIC, metadata, self.arrays)
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            # The message of this error names the temporary file.
            is_missing = isinstance(error, FileNotFoundError)
            why = f"there is no folder {path.parent}" if is_missing else error
            raise SnapshotError(
                f"the snapshot cannot be written: {why}",
                hint="use the path of a regular file in a folder that can be written",
            ) from error

    def _metadata(self) -> dict[str, object]:
        sampling = self.sampling.as_dict()
        if self.sampling.logprobs:
            del sampling["logprobs"]  # it is the default, and version 0.1 cannot read it
        about: dict[str, object] = {
            "engine": engine_versions(),
            "origin": asdict(self.origin),
            "sampling": sampling,
            "grammar": None if self.grammar is None else self.grammar.as_dict(),
            "seed": self.seed,
            "n_prompt": self.n_prompt,
            "finish_reason": self.finish_reason,
            "pending": self.pending.hex(),
        }
        if self.appended:
            about["appended"] = [list(span) for span in self.appended]
        return about

    @classmethod
    def read(cls, path: str | PathLike[str], ctx: Context | None = None) -> Snapshot:
        """Read a file; with ``ctx``, first check that the snapshot fits that context.

        Raises:
            SnapshotError: the file does not exist, is damaged, is not a snapshot, or does not fit
                ``ctx``.
            CacheFullError: ``ctx`` does not have enough free cells.
        """
        path = path_of(path)
        try:
            # A pipe or a device would block or never end.
            if not stat.S_ISREG(path.stat().st_mode):
                raise SnapshotError(f"{path} is not a file")
            with open(path, "rb") as file:
                head, metadata = read_head(file, _MAGIC)
                about = _parse(metadata)
                if ctx is not None:
                    about.origin.check(ctx)
                    if head.n_logits > ctx.n_vocab:
                        raise SnapshotError("the snapshot's logits do not fit the vocabulary")
                    _check_room(ctx, head.n_tokens, head.n_state)
                arrays = read_arrays(file, head)
        except (OSError, ValueError) as error:
            raise SnapshotError(f"the snapshot cannot be read: {error}") from error
        return replace(about, **arrays._asdict())

    # -- trust -------------------------------------------------------------------------------------

    def check(self, ctx: Context, *, trusted: bool = False) -> None:
        """Raise an error unless ``ctx`` can restore this, as far as we can tell without llama.cpp.

        Args:
            trusted: accept K/V that cannot be checked because this llama.cpp writes it in an unknown
                form.

        Raises:
            SnapshotError: a different model or settings, or inconsistent parts.
            UnsupportedError: the K/V cannot be checked, and ``trusted`` is False.
            CacheFullError: not enough free cells.
        """
        self.origin.check(ctx)
        n = len(self.tokens)
        n_vocab = ctx.n_vocab
        _check_room(ctx, n, len(self.state))
        if not 0 <= self.n_prompt <= n or len(self.surprisals) != n - self.n_prompt:
            raise SnapshotError("the snapshot is inconsistent: prompt, tokens and surprisals")
        bounds = [self.n_prompt, *(bound for span in self.appended for bound in span), n]
        if self.appended and (bounds != sorted(bounds) or len({*bounds[:-1]}) < len(bounds) - 1):
            raise SnapshotError("the snapshot is inconsistent: appended text")
        if (self.surprisals == -np.inf).any():  # NaN marks a token without a surprisal
            raise SnapshotError("the snapshot has tokens with a surprisal of -inf")
        if n and (self.tokens.min() < 0 or self.tokens.max() >= n_vocab):
            raise SnapshotError("the snapshot has token ids outside the vocabulary")
        if len(self.logits) != (n_vocab if n else 0) or not (self.logits < np.inf).all():
            raise SnapshotError(
                "the snapshot's logits do not fit the vocabulary, or contain NaN or +inf"
            )
        layout = ctx.kv_cache.state_layout
        if n and layout is None and not trusted:
            raise UnsupportedError(
                "this llama.cpp writes K/V in an unknown form, so it cannot be checked",
                hint="load(path, trusted=True) accepts a file that you know is not forged",
            )
        if n and layout is not None:
            layout.check(self.state, n)
        elif not n and len(self.state):
            raise SnapshotError("the snapshot has K/V but no tokens")


def _check_room(ctx: Context, n_tokens: int, n_state: int) -> None:
    """Raise an error unless ``n_tokens`` fit and can have a state of ``n_state`` bytes."""
    layout = ctx.kv_cache.state_layout
    if layout is None:
        return
    if layout.needs_cells and n_tokens > ctx.usage().cells_free:
        raise ctx.kv_cache.full_error(n_tokens)
    if n_state > layout.max_bytes(n_tokens):
        raise SnapshotError(f"{n_state} bytes of K/V are too many for {n_tokens} tokens")


# -- files -----------------------------------------------------------------------------------------


class _About(Struct):
    """The metadata of a file."""

    origin: KVCompatibility
    sampling: dict[str, object]
    seed: int
    n_prompt: int
    # A character has at most four bytes, so at most three can be pending.
    pending: Annotated[str, Meta(max_length=6)]
    grammar: str | dict[str, str] | None = None
    finish_reason: Literal["stop", "length", "constraint"] | None = None
    appended: list[tuple[int, int]] = []


def _parse(metadata: bytes) -> Snapshot:
    """Return the snapshot that the metadata describes, without its arrays."""
    try:
        about = msgspec.convert(json.loads(metadata), _About)  # names may have lone surrogates
        return Snapshot(
            origin=about.origin,
            sampling=SamplingParams.from_dict(about.sampling),
            grammar=None if about.grammar is None else Grammar.from_dict(about.grammar),
            seed=about.seed,
            n_prompt=about.n_prompt,
            finish_reason=about.finish_reason,
            pending=bytes.fromhex(about.pending),
            tokens=np.empty(0, np.int32),
            surprisals=np.empty(0, np.float64),
            logits=np.empty(0, np.float32),
            state=np.empty(0, np.uint8),
            appended=tuple(about.appended),
        )
    except (msgspec.MsgspecError, ValueError, RecursionError, LlamaBranchError) as error:
        raise SnapshotError(f"the snapshot's metadata is invalid: {error}") from error


# -- in and out of a context -----------------------------------------------------------------------


def capture(sequence: Text, sampling: SamplingParams) -> Snapshot:
    """Return a copy of the sequence's state; ``sampling`` has its settings with the seed in effect.

    Raises:
        BranchStateError: pruned. UnsupportedError: this memory cannot be saved.
    """
    sequence.check_usable()
    sequence.settle()
    origin = KVCompatibility.of(sequence.ctx)
    cache = sequence.ctx.kv_cache
    tokens = np.array(sequence.tokens, dtype=np.int32)
    logits = sequence.logits_row().array.copy() if sequence.tokens else np.empty(0, np.float32)
    state = np.empty(0, np.uint8)
    if sequence.tokens:
        state = cache.handle.state(sequence.seq_id)
        try:
            if cache.state_layout is not None:
                cache.state_layout.check(state, len(tokens))
        except SnapshotError as error:
            raise UnsupportedError(f"this branch cannot be saved: {error}") from error
    arrays = tokens, np.array(sequence.surprisals, dtype=np.float64), logits, state
    for array in arrays:
        array.flags.writeable = False
    return Snapshot(
        origin,
        sampling,
        sequence.sampler.grammar,
        sequence.seed,
        sequence.n_prompt,
        sequence.finish_reason,
        sequence.incomplete,
        *arrays,
        appended=tuple(sequence.appended),
    )


def fill(sequence: Text, snapshot: Snapshot, *, trusted: bool = False) -> None:
    """Restore a snapshot into an empty sequence.

    Raises:
        SnapshotError: it is from another model or setting, or is inconsistent, or its settings or
            grammar do not fit the tokens or the model.
        CacheFullError: not enough free cells.

    After an error, the sequence may contain anything, so release it.
    """
    ctx = sequence.ctx
    snapshot.check(ctx, trusted=trusted)
    tokens = snapshot.tokens.tolist()
    start = snapshot.appended[-1][1] if snapshot.appended else snapshot.n_prompt
    try:
        sampler = Sampler(ctx.model, snapshot.sampling, snapshot.grammar)
        sampler = sampler.replay(tokens[:start], tokens[start:])
    except LlamaBranchError as error:
        raise SnapshotError(f"the snapshot cannot be restored: {error}") from error
    if tokens:
        ctx.decoder.make_room(len(tokens))
        if not ctx.kv_cache.set_state(sequence.seq_id, snapshot.state, len(tokens)):
            raise ctx.kv_cache.full_error(len(tokens))
    sequence.restore(
        tokens, snapshot.n_prompt, snapshot.appended, snapshot.surprisals.tolist(),
        snapshot.pending, sampler, snapshot.seed,
    )  # fmt: skip
    sequence.set_row(LogitsRow(snapshot.logits.copy()) if tokens else None)
    sequence.finish_reason = snapshot.finish_reason
