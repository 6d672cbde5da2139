"""What is decoded of one text in a round: its last token, if the cache lacks it, and a draft after it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..context.logits import LogitsRow
from ..context.runner import decode_run
from ..sampling import Sampler
from .text import Text

__all__ = ["Plan"]


class Plan:
    """Drafted tokens that may follow a text: decoded, then kept in part or dropped.

    The caller holds the context's lock, and makes and ends the plan under it.

    Args:
        text: what they follow. Before ``keep`` only its K/V changes.
        drafted: the tokens.

    Attributes:
        tokens: those to decode: the text's last one, if the cache lacks it, and the drafted ones.
        rows: the logits after each of them, valid until the next decode; set by ``decode``, or by the
            caller if a shared decode has computed them in place.
    """

    def __init__(self, text: Text, drafted: Sequence[int]) -> None:
        first = text.lacking()
        self.tokens = [*first, *drafted]
        self.rows: Sequence[LogitsRow] = ()
        self._text = text
        self._n_first = len(first)
        self._fork: int | None = None  # the sequence of a decode that cannot be undone in place

    def decode(self) -> Sequence[LogitsRow]:
        """Decode the tokens by themselves, at once; return their rows. ``keep`` or ``end`` must follow.

        Raises:
            CapacityError, DecodeError: the text is as before.
        """
        text = self._text
        ctx = text.ctx
        text.check_usable()
        if ctx.kv_cache.can_draft or len(self.tokens) == 1:
            expiring = text.expiring_rows()
            self.rows = decode_run(ctx.decoder, self.tokens, text.seq_id, "all", expiring)
            return self.rows
        # This memory cannot drop a tail: they are decoded on a fork.
        self._fork = ctx.sequences.allocate(self, used=(text.seq_id,))
        try:
            ctx.kv_cache.fork(text.seq_id, self._fork)
            self.rows = decode_run(ctx.decoder, self.tokens, self._fork, "all")
        except BaseException:
            self.end()
            raise
        return self.rows

    def end(self) -> None:
        """Release the sequence that is held for it; safe to call at any time."""
        fork, self._fork = self._fork, None
        if fork is not None:
            self._text.ctx.sequences.free(fork)

    def keep(self, n: int, sampler: Sampler | None = None) -> list[str]:
        """Append the first ``n`` drafted tokens to the text, drop the others from memory.

        Args:
            n: how many.
            sampler: one that has accepted them; None = the text's is to accept them.

        Returns:
            the text that each completes.
        """
        text, n_first = self._text, self._n_first
        start, cache = len(text.tokens), text.ctx.kv_cache
        tokens, rows = self.tokens[: n_first + n], self.rows[: n_first + n]
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
            if self._fork is not None:
                row = self._keep_fork(self._fork, tokens, rows)
            elif cache.next_position(text.seq_id) > len(text.tokens):
                text.truncate(len(text.tokens))
            text.set_row(row)
        except BaseException:
            text.forget(start)
            raise
        return completed

    def _keep_fork(self, fork: int, tokens: Sequence[int], rows: Sequence[LogitsRow]) -> LogitsRow:
        """Move the kept tokens into the text's own K/V; return the logits after the last one."""
        text, ctx = self._text, self._text.ctx
        try:
            if ctx.kv_cache.next_position(fork) == len(text.tokens):
                ctx.kv_cache.fork(fork, text.seq_id)
                return rows[-1]
            for row in rows:  # the caller reads them after this decode
                row.detach()
            self.end()
            return decode_run(ctx.decoder, tokens, text.seq_id, "last")[-1]
        finally:
            self.end()
