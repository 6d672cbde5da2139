"""Rating given tokens after sequences, many continuations in shared decodes.

The tokens are decoded in place, or on leased sequences that share the cells before them, and dropped
again. Each row of logits is read as soon as it is computed; none is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..context import Context
from ..context.batch import Batch
from ..context.logits import LogitsRow, TokenScore
from ..errors import ConfigError, SequencesExhaustedError
from ..model import Model, TokenIds, token_list
from .sequence import TokenSequence

__all__ = ["continuation", "score_all"]


def continuation(model: Model, text: str | TokenIds) -> list[int]:
    """Return the token ids of a text to rate: those given, or of a text tokenized by itself.

    Raises:
        ConfigError: none. TokenizeError: a bad id, or text that cannot be tokenized.
    """
    tokens = token_list(model.tokenize(text, add_special=False) if isinstance(text, str) else text)
    if not tokens:
        raise ConfigError("nothing to score: no tokens")
    model.check_tokens(tokens)
    return tokens


class _Continuation:
    """Tokens to rate after a sequence, and their ratings so far."""

    def __init__(self, sequence: TokenSequence, tokens: list[int]) -> None:
        self.sequence = sequence
        self.tokens = tokens
        self.scores: list[TokenScore] = []
        self.seq_id = -1  # where it is decoded

    @property
    def n_left(self) -> int:
        """How many of its tokens must be decoded: the last one need not."""
        return len(self.tokens) - 1

    def lease(self, used: Collection[int]) -> None:
        """Lease a sequence, but none of ``used``, and give it the cells before the tokens.

        Raises:
            SequencesExhaustedError: none is free.
        """
        sequence, ctx = self.sequence, self.sequence.ctx
        seq_id = ctx.sequences.lease(self, used=used)
        try:
            ctx.kv_cache.fork(sequence.seq_id, seq_id, sequence.position)
        except BaseException:
            ctx.sequences.give_back(seq_id)
            raise
        self.seq_id = seq_id

    def end(self) -> None:
        """Drop what was decoded; safe to call at any time."""
        seq_id, self.seq_id = self.seq_id, -1
        sequence = self.sequence
        if seq_id < 0:
            return
        if seq_id != sequence.seq_id:
            sequence.ctx.sequences.give_back(seq_id)
        elif sequence.ctx.kv_cache.next_position(seq_id) > sequence.position:
            sequence.truncate(sequence.position)


def score_all(
    ctx: Context, work: Sequence[tuple[TokenSequence, list[int]]], top: int
) -> list[list[TokenScore]]:
    """Rate the tokens after each sequence, which does not change; the caller holds the lock.

    Raises:
        SequencesExhaustedError: this memory needs a free sequence. CacheFullError, DecodeError: as in a
            decode.
    """
    items = [_Continuation(sequence, tokens) for sequence, tokens in work]
    for sequence in {id(item.sequence): item.sequence for item in items}.values():
        row = sequence.logits_row()
        sequence.catch_up()
        for item in items:
            if item.sequence is sequence:
                item.scores.append(row.score(item.tokens[0], sequence.ctx.model, top))
    waiting = [item for item in items if item.n_left]
    while waiting:
        group: list[_Continuation] = []
        try:
            _begin(ctx, waiting, group)
            _decode(ctx, group, top)
        finally:
            for item in group:
                item.end()
        waiting = waiting[len(group) :]
    return [item.scores for item in items]


def _begin(ctx: Context, waiting: list[_Continuation], group: list[_Continuation]) -> None:
    """Give sequences to as many continuations as there are sequences and cells for."""
    free = ctx.kv_cache.n_free
    n_tokens = 0
    for item in waiting:
        n_tokens += item.n_left
        if n_tokens > free and item is not waiting[0]:
            break
    ctx.decoder.make_room(min(n_tokens, free))
    in_place: set[int] = set()
    used = {item.sequence.seq_id for item in waiting}
    n_tokens = 0
    for item in waiting:
        n_tokens += item.n_left
        if n_tokens > free and group:
            break
        own = item.sequence.seq_id
        if ctx.kv_cache.can_draft and own not in in_place:
            in_place.add(own)
            item.seq_id = own
        else:
            try:
                item.lease(used)
            except SequencesExhaustedError:
                if group:
                    break
                raise
        group.append(item)


def _decode(ctx: Context, group: list[_Continuation], top: int) -> None:
    """Decode the tokens of a group but for the last of each, and rate those that follow."""
    batch = Batch()
    following: list[tuple[_Continuation, int]] = []
    for item in group:
        batch.add(item.seq_id, item.tokens[:-1], "all")
        following += [(item, token) for token in item.tokens[1:]]

    def read(first: int, rows: list[LogitsRow]) -> None:
        for row, (item, token) in zip(rows, following[first : first + len(rows)], strict=True):
            item.scores.append(row.score(token, ctx.model, top))

    batch.decode(ctx.decoder, read=read)
