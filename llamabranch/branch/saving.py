"""Saving: a line is copied out of its context and taken up in another."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike

import numpy as np
from typing_extensions import Self

from ..context import Context
from ..context.logits import LogitsRow
from ..errors import SnapshotError, UnsupportedError
from ..native import last_log_lines
from ..sampling import Sampler, SamplingParams
from .kv_compatibility import KVCompatibility
from .snapshot import Snapshot, no_room
from .verification import VerifiableLine

__all__ = ["SavableLine"]


class SavableLine(VerifiableLine):
    """A line that can be copied out of its context and taken up in another."""

    def snapshot(self) -> Snapshot:
        """Return a copy of all that this branch is; see ``restore``. Its children are not in it.

        Raises:
            BranchStateError: pruned. UnsupportedError: this memory cannot be saved.
        """
        with self._lock:
            self._check()
            self._catch_up()
            origin = KVCompatibility.of(self._ctx)
            tokens = np.array(self._tokens, dtype=np.int32)
            logits = self._need_row().array.copy() if self._tokens else np.empty(0, np.float32)
            state = np.empty(0, np.uint8)
            layout = self._decoder.layout
            if self._tokens and layout is not None:
                state = self._decoder.handle.state(self._seq_id)
                try:
                    layout.check(state, len(tokens))
                except SnapshotError as error:
                    raise UnsupportedError(f"this branch cannot be saved: {error}") from error
            arrays = tokens, np.array(self._surprisals, dtype=np.float64), logits, state
            for array in arrays:
                array.flags.writeable = False
            return Snapshot(
                origin,
                self.sampling,
                self._sampler.grammar,
                self._seed,
                self._n_prompt,
                self._finish_reason,
                self.pending,
                *arrays,
                seed_given=self._seed_given,
            )

    def save(self, path: str | PathLike[str]) -> None:
        """Write this branch to a file, all of it or nothing; see ``load``.

        K/V, tokens, settings, grammar, seed, surprisals and logits; not its children. A symbolic link
        is followed, the mode of a file that is replaced is kept.

        Raises:
            BranchStateError: pruned. UnsupportedError: this memory cannot be saved.
            SnapshotError: the file cannot be written, or ``path`` is a pipe, a device or a folder.
        """
        self.snapshot().write(path)

    @classmethod
    def restore(cls, ctx: Context, snapshot: Snapshot) -> Self:
        """Return a root that goes on where the snapshot was taken, here or in another context.

        Where contexts are batch-invariant, with the same text to the bit.

        Raises:
            SnapshotError: it is of another model, K/V type or rope setting, or contradicts itself.
            SequencesExhaustedError, CacheFullError: no room; ``ctx`` is as before.
        """
        return cls._taken_up(ctx, lambda: snapshot)

    @classmethod
    def load(cls, ctx: Context, path: str | PathLike[str]) -> Self:
        """Return the branch that ``save`` wrote, as a root; see ``restore``.

        The file may be anybody's: nothing in it is believed unchecked.

        Raises:
            SnapshotError: no such file, damaged, not to be trusted, or not for this context.
            SequencesExhaustedError, CacheFullError: no room; ``ctx`` is as before.
        """
        return cls._taken_up(ctx, lambda: Snapshot.read(path, ctx))

    @classmethod
    def _taken_up(cls, ctx: Context, get: Callable[[], Snapshot]) -> Self:
        with ctx.lock:
            line = cls(ctx, Sampler(ctx.model, SamplingParams(temperature=0.0)), 0, None)
            try:
                snapshot = get()
                snapshot.check(ctx)
                line._fill(snapshot, snapshot.sampler(ctx))
            except BaseException:
                line._pruned = True
                ctx.return_lease(line._seq_id)
                raise
            return line

    def _fill(self, snapshot: Snapshot, sampler: Sampler) -> None:
        tokens = snapshot.tokens.tolist()
        n = len(tokens)
        if n:
            handle = self._decoder.handle
            self._decoder.make_room(n)
            if not handle.set_state(self._seq_id, snapshot.state):
                reason = "; ".join(last_log_lines()) or "no reason given"
                if "available cells" in reason or "not enough cells" in reason:
                    raise no_room(n, self._ctx)
                raise SnapshotError(f"llama.cpp cannot take the K/V: {reason}")
            if handle.position_range(self._seq_id)[1] != n - 1:
                raise SnapshotError("llama.cpp holds other positions than the snapshot has")
            self._decoder.cells.append(self._seq_id, n)
            row = LogitsRow(snapshot.logits.copy())
            self._set_row(row)
        if self._ctx.capabilities.sliding_window:
            self._whole_from = n
        self._tokens = tokens
        self._n_prompt = snapshot.n_prompt
        self._surprisals = snapshot.surprisals.tolist()
        self._sampler = sampler
        self._seed = snapshot.seed
        self._seed_given = snapshot.seed_given
        self._pending = snapshot.pending
        self._finish_reason = snapshot.finish_reason
