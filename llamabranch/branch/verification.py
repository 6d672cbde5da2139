"""Verification: proposed tokens are decoded after a sequence's end, and the accepted ones are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..context import Context
from ..context.logits import LogitsRow, note_measures
from ..context.runner import decode_run
from ..errors import UnsupportedError
from ..native import acceptance
from ..sampling import Distribution, Sampler
from .sequence import TokenSequence

__all__ = ["TargetDistributions", "Verification"]


class TargetDistributions:
    """The distributions that a sequence draws from along proposed tokens, computed on request.

    ``parents[i]`` is the token that token i follows, -1 the sequence's end; parents come first.
    ``distribution(i)`` assumes that token i and all tokens before it are accepted: a copy of a sampler
    with state accepts them.
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
        self._depths = {-1: position}  # position of the token after this one
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
        """Return the distribution of the token after token i."""
        return self.sampler(i).distribution(self._rows[i].array, self._position(i), self._seed)

    def draw(self, i: int) -> int:
        """Return the token that plain decoding draws after token i."""
        sampler = self.sampler(i)
        wanted = sampler.params.logprobs
        return self._rows[i].draw(sampler, self._seed, self._position(i), measured=wanted)

    def accepted(self, rule: str, sources: Sequence[Distribution]) -> tuple[int, int] | None:
        """Apply a rule to the tokens after the first, a chain, in one call of the compiled core.

        Args:
            rule: "seeded", "token" or "block".
            sources: the distribution that each token was drawn from; empty = none was drawn at random.

        Returns:
            how many are accepted, and the token that follows them; None: Python has to decide.
        """
        sampler, rows = self._samplers[-1], self._rows
        compiled = sampler.row_sampler
        if compiled is None or not acceptance.available:
            return None
        drafted, first, size = self._tokens[1:], rows[0].address, rows[0].array.nbytes
        if any(row.address != first + i * size for i, row in enumerate(rows)):
            return None  # they are no longer, or were never, one array
        if sources and len(sources) != len(drafted):
            return None
        arrays = [(source.ids, source.logweights) for source in sources]
        if not all(map(_suits_core, arrays)):
            return None
        found = acceptance.accept_rows(
            compiled,
            first,
            drafted,
            arrays,
            rule,
            seed=self._seed,
            position=self._position(0),
            measured=sampler.params.logprobs,
        )
        if found is None:
            return None
        note_measures(rows, found.measures)
        return found.n_accepted, found.token

    def _position(self, i: int) -> int:
        found = self._depths.get(i)
        if found is None:
            found = self._depths[i] = self._position(self._parents[i]) + 1
        return found


def _suits_core(source: tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]) -> bool:
    ids, weights = source
    return (
        ids.dtype == np.int32
        and weights.dtype == np.float64
        and ids.flags.c_contiguous
        and weights.flags.c_contiguous
    )


class _Trial:
    """Sequences leased for one verification that cannot be decoded and undone in place."""

    def __init__(self, ctx: Context, source: int, n: int) -> None:
        self._ctx = ctx
        self.seqs: list[int] = []
        try:
            for _ in range(n):
                self.seqs.append(ctx.sequences.lease(self, used=(source,)))
                ctx.kv_cache.fork(source, self.seqs[-1])
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        while self.seqs:
            self._ctx.sequences.give_back(self.seqs.pop())


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


class Verification:
    """Tokens proposed to follow a sequence; decoded, then accepted in part, or abandoned.

    Args:
        sequence: whose end they follow. Before ``accept`` only its K/V changes.
        tokens: the proposal.
        parents: ``parents[i]``, below i, is the token that token i follows, -1 the sequence's end; None
            for a chain.
        rows: the logits after each token, if a shared decode has computed them in place; else
            ``decode`` comes next.

    Attributes:
        rows: the logits after each token, valid until the next decode.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        rows: Sequence[LogitsRow] = (),
    ) -> None:
        self.rows = rows
        self._sequence = sequence
        self._tokens = tokens
        self._is_tree = parents is not None
        self._parents = range(-1, len(tokens) - 1) if parents is None else parents
        self._trial: _Trial | None = None
        self._below: list[list[int]] = []
        self._targets: TargetDistributions | None = None

    @property
    def targets(self) -> TargetDistributions:
        """The distributions that the sequence draws from along the tokens."""
        if self._targets is None:
            seq = self._sequence
            self._targets = TargetDistributions(
                seq.sampler, self._tokens, self._parents, self.rows, len(seq.tokens), seq.seed
            )
        return self._targets

    def decode(self) -> Sequence[LogitsRow]:
        """Decode the tokens in one decode of the target; return their rows.

        ``accept`` or ``abandon`` must follow.

        Raises:
            UnsupportedError: a tree over recurrent memory, which has no cells to share.
            CapacityError, DecodeError: the sequence is as before.
        """
        seq = self._sequence
        with seq.ctx.lock:
            seq.check_usable()
            if self._is_tree:
                self.rows = self._decode_tree()
            elif seq.ctx.kv_cache.can_draft or len(self._tokens) == 1:
                self.rows = seq.decode_run(self._tokens, "all", seq.expiring_rows())
            else:
                # This memory cannot drop a tail, so the verification runs on a fork.
                seq.catch_up()
                with_fork = self._begin_trial(1)
                try:
                    self.rows = decode_run(seq.ctx.decoder, self._tokens, with_fork.seqs[0], "all")
                except BaseException:
                    self.abandon()
                    raise
            self._targets = None
            return self.rows

    def _begin_trial(self, n: int) -> _Trial:
        self._trial = _Trial(self._sequence.ctx, self._sequence.seq_id, n)
        return self._trial

    def _decode_tree(self) -> list[LogitsRow]:
        """Compute each token once, tagged with the sequences of all leaves below it.

        SpecInfer, Miao et al. 2023, 2305.09781.
        """
        seq = self._sequence
        lacking = seq.ctx.kv_cache.tree_needs
        if lacking:
            raise UnsupportedError(f"a token tree needs {lacking}", hint="draft with width 1")
        self._below = _leaves_below(self._parents)
        trial = self._begin_trial(1 + max(max(leaves) for leaves in self._below))
        try:
            depths = {-1: len(seq.tokens) - 1}
            for i, parent in enumerate(self._parents):
                depths[i] = depths[parent] + 1
            members = [[trial.seqs[leaf] for leaf in leaves] for leaves in self._below]
            return seq.ctx.decoder.decode(
                self._tokens,
                [group[0] for group in members],
                [True] * len(members),
                positions=[depths[i] for i in range(len(members))],
                members=members,
            )
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Release the sequences that the verification leased; safe to call at any time."""
        with self._sequence.ctx.lock:
            trial, self._trial = self._trial, None
            if trial is not None:
                trial.end()

    def accept(self, path: Sequence[int], surprisal: float = math.nan) -> list[str]:
        """Append the tokens numbered ``path``, drop the others from memory.

        Args:
            path: the numbers of the tokens, in order.
            surprisal: that of the first of them, nats; the row it was drawn from may be overwritten.

        Returns:
            the text that each completed.
        """
        seq = self._sequence
        with seq.ctx.lock:
            start = len(seq.tokens)
            texts = []
            if self._targets is not None:
                sampler = self._targets.sampler(path[-1])
            else:
                sampler = seq.sampler.after(self._tokens[i] for i in path)
            kept_rows = [self.rows[i] for i in path]
            scored = seq.sampler.params.logprobs
            try:
                row = None
                for i, after in zip(path, kept_rows, strict=True):
                    token = self._tokens[i]
                    if row is not None:
                        surprisal = -row.logprob(token) if scored else math.nan
                    texts.append(seq.append_accepted(token, surprisal))
                    row = after
                seq.use_sampler(sampler)
                if self._trial is not None:
                    row = self._accept_trial(self._trial, path, kept_rows)
                elif seq.ctx.kv_cache.next_position(seq.seq_id) > len(seq.tokens):
                    seq.truncate(len(seq.tokens))
                seq.set_row(row)
            except BaseException:
                seq.forget(start)
                raise
            return texts

    def _accept_trial(
        self, trial: _Trial, path: Sequence[int], rows: Sequence[LogitsRow]
    ) -> LogitsRow:
        """Move the accepted tokens from the trial sequences into the sequence's own K/V."""
        self._trial = None
        seq, cache = self._sequence, self._sequence.ctx.kv_cache
        try:
            if self._is_tree:  # a leaf below the last node holds all of its path
                leaf = trial.seqs[self._below[path[-1]][0]]
                cache.adopt(trial.seqs, leaf, seq.seq_id, path, len(self._parents))
            elif cache.next_position(trial.seqs[0]) == len(seq.tokens):
                cache.fork(trial.seqs[0], seq.seq_id)
            else:
                for row in rows:  # the caller reads them after this decode
                    row.detach()
                trial.end()
                kept = [self._tokens[i] for i in path]
                return decode_run(seq.ctx.decoder, kept, seq.seq_id, "last")[-1]
        finally:
            trial.end()
        return rows[-1]
