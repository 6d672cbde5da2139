"""Verification: what would a line say along tokens that somebody else proposes?

The speculative round works on this floor: ``verify`` decodes the proposal, a ``TargetDistributions`` turns its logits
into the distributions the line draws from, ``settle`` keeps what stands and drops the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..context import Context
from ..context.logits import LogitsRow
from ..errors import UnsupportedError
from ..sampling import Distribution, Sampler
from .sequence import Line

__all__ = ["TargetDistributions", "VerifiableLine"]


class TargetDistributions:
    """The distributions a line draws from along proposed tokens, made as they are asked for.

    ``parents[i]`` is the token that token i follows, -1 the line's end; parents come first. Asking for
    ``distribution(i)`` means that token i and all before it stand, so the sampler accepts them, in a
    copy where it has a state.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokens: Sequence[int],
        parents: Sequence[int],
        rows: Sequence[LogitsRow],
        position: int,
        seed: int,
    ) -> None:
        self._samplers = {-1: sampler}
        self._tokens = tokens
        self._parents = parents
        self._rows = rows
        self._depths = {-1: position}  # where the token after this one goes
        self._seed = seed

    def sampler(self, i: int) -> Sampler:
        """Return the sampler that has accepted token i and all before it."""
        found = self._samplers.get(i)
        if found is None:
            found = self.sampler(self._parents[i])
            if not found.is_stateless:
                found = found.clone()
                found.accept(self._tokens[i])
            self._samplers[i] = found
        return found

    def distribution(self, i: int) -> Distribution:
        """Return what is drawn from after token i."""
        return self.sampler(i).distribution(self._rows[i].array, self._position(i), self._seed)

    def _position(self, i: int) -> int:
        found = self._depths.get(i)
        if found is None:
            found = self._depths[i] = self._position(self._parents[i]) + 1
        return found


class _Trial:
    """Sequences leased for one verification that must not, or cannot, be undone in place."""

    def __init__(self, ctx: Context, source: int, n: int) -> None:
        self._ctx = ctx
        self._seqs: list[int] = []
        try:
            for _ in range(n):
                self._seqs.append(ctx.lease(self))
                ctx.decoder.share(source, self._seqs[-1])
        except BaseException:
            self.end()
            raise

    @property
    def seqs(self) -> list[int]:
        return self._seqs

    def end(self) -> None:
        while self._seqs:
            self._ctx.return_lease(self._seqs.pop())


def _leaves_below(parents: Sequence[int]) -> list[list[int]]:
    """Return for each token the numbers of the leaves at or below it."""
    inner = set(parents)
    below: list[list[int]] = [[] for _ in parents]
    leaves = [i for i in range(len(parents)) if i not in inner]
    for number, leaf in enumerate(leaves):
        node = leaf
        while node >= 0:
            below[node].append(number)
            node = parents[node]
    return below


class VerifiableLine(Line):
    """A line that can be checked against a proposal."""

    _trial: _Trial | None = None
    _below: list[list[int]]
    _parents: Sequence[int]

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
            self._catch_up()
            trial = _Trial(self._ctx, self._seq_id, 1)
            try:
                rows = self._decoder.decode_run(tokens, trial.seqs[0], "all")
            except BaseException:
                trial.end()
                raise
            self._trial = trial
            return rows

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> list[LogitsRow]:
        """Decode a tree of tokens after this branch's end in one decode; return a row for each.

        ``parents[i]`` comes before i, -1 is this branch's end. Each token is computed once and tagged
        with the sequences of all leaves below it (SpecInfer, Miao et al. 2023, 2305.09781).
        ``settle`` must follow.

        Raises:
            UnsupportedError: recurrent memory, which has no cells to share.
            CapacityError, DecodeError: the branch is as before.
        """
        with self._lock:
            self._check()
            if not self._ctx.capabilities.can_truncate:
                raise UnsupportedError("a token tree needs memory whose tail can be dropped")
            below = _leaves_below(parents)
            n_leaves = 1 + max(max(leaves) for leaves in below)
            trial = _Trial(self._ctx, self._seq_id, n_leaves)
            try:
                depths = {-1: len(self._tokens) - 1}
                for i, parent in enumerate(parents):
                    depths[i] = depths[parent] + 1
                rows = self._decoder.decode_tree(
                    tokens,
                    [depths[i] for i in range(len(tokens))],
                    [[trial.seqs[leaf] for leaf in leaves] for leaves in below],
                )
            except BaseException:
                trial.end()
                raise
            self._trial, self._below, self._parents = trial, below, parents
            return rows

    def abandon(self) -> None:
        """Give up a verification that no ``settle`` will follow; what it holds is returned."""
        with self._lock:
            trial, self._trial = self._trial, None
            if trial is not None:
                trial.end()

    def judge(
        self,
        tokens: Sequence[int],
        rows: Sequence[LogitsRow],
        parents: Sequence[int] | None = None,
    ) -> TargetDistributions:
        """Return what this branch's sampler makes of ``rows``; without ``parents``, of a chain."""
        if parents is None:
            parents = range(-1, len(tokens) - 1)
        return TargetDistributions(
            self._sampler, tokens, parents, rows, len(self._tokens), self._seed
        )

    def settle(
        self,
        kept: Sequence[int],
        rows: Sequence[LogitsRow],
        sampler: Sampler,
        node: int | None = None,
    ) -> list[str]:
        """Take the ``kept`` of the verified tokens and drop the others from memory.

        ``rows`` are theirs; ``sampler`` has accepted them; of a tree, ``node`` is the last of them.
        Returns what text each completed.
        """
        with self._lock:
            row = self._row
            start = len(self._tokens)
            end = start + len(kept)
            texts = []
            try:
                for token, after in zip(kept, rows, strict=False):
                    # The engine's decode has overwritten the row its pending token was drawn from.
                    surprisal = math.nan if row is None or row.lost else -row.logprob(token)
                    texts.append(self._append(token, surprisal))
                    row = after
                self._sampler = sampler
                if self._trial is not None:
                    row = self._settle_trial(self._trial, kept, rows, node)
                elif self._decoder.cells.next_position(self._seq_id) > end:
                    self._truncate(end)
                self._set_row(row)
            except BaseException:
                self._forget(start)
                raise
            return texts

    def _path(self, node: int) -> list[int]:
        path = []
        while node >= 0:
            path.append(node)
            node = self._parents[node]
        return path[::-1]

    def _settle_trial(
        self, trial: _Trial, kept: Sequence[int], rows: Sequence[LogitsRow], node: int | None
    ) -> LogitsRow:
        """Bring this line's own sequence to where the trial proved it may go."""
        self._trial = None
        decoder, end = self._decoder, len(self._tokens)
        try:
            if node is not None:  # a leaf below the node holds all of its path
                leaf = trial.seqs[self._below[node][0]]
                path = self._path(node)
                decoder.adopt(trial.seqs, leaf, self._seq_id, path, len(self._parents))
            elif decoder.cells.next_position(trial.seqs[0]) == end:
                decoder.share(trial.seqs[0], self._seq_id)
            else:
                for row in rows:  # the caller reads them after this decode
                    row.keep()
                trial.end()
                return decoder.decode_run(kept, self._seq_id, "last")[-1]
        finally:
            trial.end()
        return rows[-1]

    def follow(self, tokens: Sequence[int]) -> None:
        """Take ``tokens`` as the next ones, whatever they are, in as few decodes as possible.

        For drafters, which follow another line: no surprisal is computed for them.
        """
        if not tokens:
            return
        with self._lock:
            self._check()
            self._catch_up()
            if len(tokens) == 1 and self._row is not None and not self._row.lost:
                row = self._decoder.advance(self._seq_id, tokens[0], self._row)
            else:
                row = self.decode_run(tokens, "last", self.expiring_rows())[-1]
            self.append_unscored(tokens, row)

    def append_unscored(self, tokens: Sequence[int], row: LogitsRow | None) -> None:
        """Take decoded tokens, whatever they are; ``row`` follows them, if it was kept."""
        n = len(self._tokens)
        try:
            if not self._sampler.is_stateless:
                for token in tokens:
                    self._sampler.accept(token)
            self._tokens += tokens
            self._surprisals += [math.nan] * len(tokens)
            self._pending = None
            self._finish_reason = None
            self._set_row(row)
        except BaseException:
            self._forget(n)
            raise

    def borrow(self, source: Line, n: int) -> None:
        """Take the first ``n`` tokens of ``source`` as this empty line's prompt, sharing its cells."""
        with self._lock:
            self._decoder.share(source.seq_id, self._seq_id, 0, n)
            self.append_prompt(source.tokens[:n], None)
