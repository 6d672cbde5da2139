"""What is decoded of one text in a round: its last token, if the cache lacks it, and a draft after it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..context.logits import LogitsRow
from ..context.runner import decode_run
from ..errors import UnsupportedError
from ..sampling import Sampler
from .text import Text

__all__ = ["Plan"]


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


class Plan:
    """Drafted tokens that may follow a text: decoded, then kept in part or dropped.

    The caller holds the context's lock, and makes and ends the plan under it.

    Args:
        text: what they follow. Before ``keep`` only its K/V changes.
        drafted: the tokens.
        parents: ``parents[i]``, below i, is the number of the token that token i follows, -1 the text's
            end; None for a chain.

    Attributes:
        tokens: those to decode: the text's last one, if the cache lacks it, and the drafted ones.
        rows: the logits after each of them, valid until the next decode; set by ``decode``, or by the
            caller if a shared decode has computed them in place.
    """

    def __init__(
        self, text: Text, drafted: Sequence[int], parents: Sequence[int] | None = None
    ) -> None:
        first = text.lacking()
        self.tokens = [*first, *drafted]
        self.rows: Sequence[LogitsRow] = ()
        self._text = text
        self._n_first = len(first)
        self._parents: Sequence[int] | None = parents
        if parents is not None and first:
            self._parents = [-1, *(parent + 1 for parent in parents)]
        self._held: list[int] = []  # sequences of a decode that cannot be undone in place
        self._below: list[list[int]] = []

    def decode(self) -> Sequence[LogitsRow]:
        """Decode the tokens by themselves, at once; return their rows. ``keep`` or ``end`` must follow.

        Raises:
            UnsupportedError: a tree over recurrent memory, which has no cells to share.
            CapacityError, DecodeError: the text is as before.
        """
        text = self._text
        ctx = text.ctx
        text.check_usable()
        try:
            if self._parents is not None:
                self.rows = self._decode_tree(self._parents)
            elif ctx.kv_cache.can_draft or len(self.tokens) == 1:
                expiring = text.expiring_rows()
                self.rows = decode_run(ctx.decoder, self.tokens, text.seq_id, "all", expiring)
            else:  # this memory cannot drop a tail: they are decoded on a fork
                (fork,) = self._hold(1)
                self.rows = decode_run(ctx.decoder, self.tokens, fork, "all")
        except BaseException:
            self.end()
            raise
        return self.rows

    def _hold(self, n: int) -> list[int]:
        """Return forks of the text's sequence, which are held until ``end``."""
        ctx, source = self._text.ctx, self._text.seq_id
        for _ in range(n):
            self._held.append(ctx.sequences.allocate(self, used=(source,)))
            ctx.kv_cache.fork(source, self._held[-1])
        return self._held

    def _decode_tree(self, parents: Sequence[int]) -> list[LogitsRow]:
        """Compute each token once, tagged with the sequences of all leaves below it.

        SpecInfer, Miao et al. 2023, 2305.09781.
        """
        ctx = self._text.ctx
        lacking = ctx.kv_cache.tree_needs
        if lacking:
            raise UnsupportedError(f"a token tree needs {lacking}", hint="draft with width 1")
        self._below = _leaves_below(parents)
        seqs = self._hold(1 + max(max(leaves) for leaves in self._below))
        positions = {-1: self._text.n_cached - 1}
        for i, parent in enumerate(parents):
            positions[i] = positions[parent] + 1
        members = [[seqs[leaf] for leaf in leaves] for leaves in self._below]
        return ctx.decoder.decode(
            self.tokens,
            [group[0] for group in members],
            [True] * len(members),
            positions=[positions[i] for i in range(len(members))],
            members=members,
        )

    def end(self) -> None:
        """Release the sequences that are held for it; safe to call at any time."""
        while self._held:
            self._text.ctx.sequences.free(self._held.pop())

    def keep(self, path: Sequence[int], sampler: Sampler | None = None) -> list[str]:
        """Append the drafted tokens numbered ``path`` to the text, drop the others from memory.

        Args:
            path: the numbers, in order.
            sampler: one that has accepted them; None = the text's is to accept them.

        Returns:
            the text that each completes.
        """
        text, n_first = self._text, self._n_first
        start, cache = len(text.tokens), text.ctx.kv_cache
        kept = [*range(n_first), *(n_first + i for i in path)]
        rows = [self.rows[i] for i in kept]
        tokens = [self.tokens[i] for i in kept]
        if sampler is None:
            sampler = text.sampler.after(tokens[n_first:])
        scored, completed = sampler.params.logprobs, []
        try:
            row = rows[0] if n_first else None
            for token, after in zip(tokens[n_first:], rows[n_first:], strict=True):
                surprisal = -row.logprob(token) if row is not None and scored else math.nan
                completed.append(text.append_accepted(token, surprisal))
                row = after
            text.use_sampler(sampler)
            if self._held:
                row = self._keep_held(kept, tokens, rows)
            elif cache.next_position(text.seq_id) > len(text.tokens):
                text.truncate(len(text.tokens))
            text.set_row(row)
        except BaseException:
            text.forget(start)
            raise
        return completed

    def _keep_held(
        self, kept: Sequence[int], tokens: Sequence[int], rows: Sequence[LogitsRow]
    ) -> LogitsRow:
        """Move the kept tokens from the held sequences into the text's own K/V."""
        text, cache, held = self._text, self._text.ctx.kv_cache, self._held
        try:
            if self._parents is not None:  # a leaf below the last node holds all of its path
                leaf = held[self._below[kept[-1]][0]]
                cache.adopt(held, leaf, text.seq_id, kept, len(self._parents))
            elif cache.next_position(held[0]) == len(text.tokens):
                cache.fork(held[0], text.seq_id)
            else:
                for row in rows:  # the caller reads them after this decode
                    row.detach()
                self.end()
                return decode_run(text.ctx.decoder, tokens, text.seq_id, "last")[-1]
        finally:
            self.end()
        return rows[-1]
