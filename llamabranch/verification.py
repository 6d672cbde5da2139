"""Verification: what would a line say along tokens that somebody else proposes?

The speculative round works on this floor: ``verify`` decodes the proposal, a ``Judge`` turns its logits
into the distributions the line draws from, ``settle`` keeps what stands and drops the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .context import Context
from .distribution import Distribution
from .line import Line
from .rows import LogitsRow
from .sampling import Sampler

__all__ = ["Judge", "VerifiableLine"]


class Judge:
    """The target's distributions along a line of drafted tokens, made one after another.

    ``distribution(i)`` follows the first i + 1 of ``tokens``; asking for it means that these stand, so
    the sampler accepts them, in a copy where it has a state.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokens: Sequence[int],
        rows: Sequence[LogitsRow],
        position: int,
        seed: int,
    ) -> None:
        self._samplers = [sampler]
        self._tokens = tokens
        self._rows = rows
        self._position = position
        self._seed = seed

    def sampler(self, i: int) -> Sampler:
        """Return the sampler that has accepted the first i + 1 tokens."""
        first = self._samplers[0]
        if first.is_stateless:
            return first
        while len(self._samplers) < i + 2:
            twin = self._samplers[-1].clone()
            twin.accept(self._tokens[len(self._samplers) - 1])
            self._samplers.append(twin)
        return self._samplers[i + 1]

    def distribution(self, i: int) -> Distribution:
        """Return what is drawn from after the first i + 1 tokens."""
        return self.sampler(i).distribution(self._rows[i].array, self._position + i, self._seed)


class _Trial:
    """A sequence leased for one verification."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.seq_id = ctx.lease(self)

    def end(self) -> None:
        self._ctx.return_lease(self.seq_id)


class VerifiableLine(Line):
    """A line that can be checked against a proposal."""

    _trial: _Trial | None = None

    def verify(self, tokens: Sequence[int]) -> list[LogitsRow]:
        """Decode ``tokens`` after this branch's end and return a row for each, valid until ``settle``.

        Only the memory moves; ``settle`` must follow, and says how many of them stay.

        Raises:
            CapacityError, DecodeError: the branch is as before.
        """
        with self._lock:
            self._check()
            if self._ctx.capabilities.can_truncate or len(tokens) == 1:
                return self.decode_run(tokens, "all")
            # A tail that cannot be dropped is not written: the verification runs on a fork.
            trial = _Trial(self._ctx)
            try:
                self._decoder.share(self._seq_id, trial.seq_id)
                rows = self._decoder.decode_run(tokens, trial.seq_id, "all")
            except BaseException:
                trial.end()
                raise
            self._trial = trial
            return rows

    def judge(self, tokens: Sequence[int], rows: Sequence[LogitsRow]) -> Judge:
        """Return what this branch's sampler makes of ``rows``, token by token."""
        return Judge(self._sampler, tokens, rows, len(self._tokens) + 1, self._seed)

    def settle(self, kept: Sequence[int], rows: Sequence[LogitsRow], sampler: Sampler) -> list[str]:
        """Take the first ``len(kept)`` of the verified tokens and drop the others from memory.

        ``rows`` are theirs; ``sampler`` has accepted them. Returns what text each completed.
        """
        with self._lock:
            row = self._row
            end = len(self._tokens) + len(kept)
            texts = []
            for token, after in zip(kept, rows, strict=False):
                texts.append(self._append(token, math.nan if row is None else -row.logprob(token)))
                row = after
            self._sampler = sampler
            if self._trial is not None:
                row = self._settle_trial(self._trial, kept, row)
            elif self._decoder.cells.next_position(self._seq_id) > end:
                self._truncate(end)
            self._set_row(row)
            return texts

    def _settle_trial(
        self, trial: _Trial, kept: Sequence[int], row: LogitsRow | None
    ) -> LogitsRow | None:
        """Take over the fork if all of it stands, else forget it and decode what stands again."""
        self._trial = None
        whole = self._decoder.cells.next_position(trial.seq_id) == len(self._tokens)
        if whole:
            self._decoder.drop(self._seq_id, 0)
            self._decoder.share(trial.seq_id, self._seq_id)
        trial.end()
        if not whole and kept:
            row = self._decoder.decode_run(kept, self._seq_id, "last")[-1]
        return row

    def follow(self, tokens: Sequence[int]) -> None:
        """Take ``tokens`` as the next ones, whatever they are, in as few decodes as possible.

        For drafters, which follow another line: no surprisal is computed for them.
        """
        if not tokens:
            return
        with self._lock:
            self._check()
            row = self.decode_run(tokens, "last", self.given_up())[-1]
            sampler = self._sampler
            for token in tokens:
                if not sampler.is_stateless:
                    sampler.accept(token)
                self._append(token, math.nan)
            self._set_row(row)
