"""Scores: ``score`` is for the continuation of a text, ``read_alone`` for texts by themselves.

The last token of a text is not decoded. Each row of logits is read as soon as it is computed. Existing
texts do not change, and nothing is left in the cache. In an exact context, the numbers are the same to
the bit, whichever texts are read together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..arguments import choice
from ..context import Context
from ..context.logits import LogitsRow, TokenScore
from ..context.runner import Batch
from ..errors import BranchStateError, ConfigError
from ..generation.text import Text
from ..model import Model, TokenIds, token_list

# Called with the number of a text, the index of a token in it, and the logits before that token. The
# logits are valid until the function returns.
Show = Callable[[int, int, LogitsRow], None]


def continuation(model: Model, text: str | TokenIds) -> list[int]:
    """Return the token ids of a text to score; a string is tokenized by itself.

    Raises:
        ConfigError: there are no tokens. TokenizeError: a bad id, or text that cannot be tokenized.
    """
    tokens = token_list(model.tokenize(text, add_special=False) if isinstance(text, str) else text)
    if not tokens:
        raise ConfigError("nothing to score: no tokens")
    model.check_tokens(tokens)
    return tokens


def perplexity(text: Text, since: str) -> float:
    """Return the perplexity of the generated tokens of a text; see `Branch`."""
    surprisals = _surprisals(text, since)
    if not surprisals:
        raise BranchStateError(
            f"no token was generated since the {since}: there is no perplexity",
            hint="generate or extend first; log_likelihood() is 0 there",
        )
    try:
        return math.exp(math.fsum(surprisals) / len(surprisals))
    except OverflowError:
        return math.inf


def log_likelihood(text: Text, since: str) -> float:
    """Return the log-likelihood of the generated tokens of a text, nats; see `Branch`."""
    try:
        return math.fsum(-surprisal for surprisal in _surprisals(text, since))
    except OverflowError:
        return -math.inf


def _surprisals(text: Text, since: str) -> list[float]:
    choice("since", since, ("fork", "prompt"))
    start = text.at if since == "fork" else 0
    positions = text.generated_positions(max(start, 1))  # nothing predicts the very first token
    surprisals = [text.surprisals[position - text.n_prompt] for position in positions]
    if any(map(math.isnan, surprisals)):
        # Tokens of ``append_unscored`` have NaN, which would make any comparison false.
        raise BranchStateError(
            f"{sum(map(math.isnan, surprisals))} of {len(surprisals)} tokens have no surprisal",
            hint="they were appended without their logits; extend a new branch with them",
        )
    return surprisals


def score(ctx: Context, text: Text, tokens: Sequence[int], top: int) -> list[TokenScore]:
    """Return the scores of tokens that continue a text, with the ``top`` most probable tokens.

    Hold the lock. The tokens are decoded in the text's own sequence, if its memory can drop them
    afterwards.

    Raises:
        CacheFullError: there are more tokens than free cells. SequencesExhaustedError: this memory
            needs a free sequence. BranchStateError, DecodeError: nothing has changed.
    """
    text.check_usable()
    text.settle()
    scores = [text.logits_row().score(tokens[0], ctx.model, top)]

    def show(_number: int, i: int, row: LogitsRow) -> None:
        scores.append(row.score(tokens[i], ctx.model, top))

    n_before, n, cache = len(text.tokens), len(tokens) - 1, ctx.kv_cache
    if n and cache.can_draft:
        ctx.decoder.make_room(min(n, cache.n_free))
        cache.prepare(text.seq_id, n)
        try:
            _decode(ctx, [text.seq_id], [tokens], 1, show)
        finally:
            cache.cut(text.seq_id, n_before)
    elif n:
        seq_id = ctx.sequences.allocate(text)
        try:
            cache.fork(text.seq_id, seq_id)
            _decode(ctx, [seq_id], [tokens], 1, show)
        finally:
            ctx.sequences.free(seq_id)
    return scores


def read_alone(ctx: Context, texts: Sequence[Sequence[int]], first: int, show: Show) -> None:
    """Decode texts, each in a free sequence; pass the logits from token ``first`` on to ``show``.

    Raises:
        CacheFullError, SequencesExhaustedError: not all texts fit at the same time. DecodeError, and
            errors of ``show``: all sequences have been freed.
    """
    with ctx.lock:
        ctx.decoder.make_room(min(sum(map(len, texts)) - len(texts), ctx.kv_cache.n_free))
        seq_ids: list[int] = []
        try:
            for _ in texts:
                seq_ids.append(ctx.sequences.allocate(show))
            _decode(ctx, seq_ids, texts, first, show)
        finally:
            for seq_id in seq_ids:
                ctx.sequences.free(seq_id)


def _decode(
    ctx: Context, seq_ids: Sequence[int], texts: Sequence[Sequence[int]], first: int, show: Show
) -> None:
    """Decode texts without their last tokens; pass the logits from token ``first`` on to ``show``."""
    batch, shown = Batch(), list[tuple[int, int]]()
    for number, (seq_id, tokens) in enumerate(zip(seq_ids, texts, strict=True)):
        batch.add(seq_id, tokens[:-1], first - 1)
        shown += [(number, i) for i in range(first, len(tokens))]

    following = iter(shown)

    def read(_n_decoded: int, rows: list[LogitsRow]) -> None:
        for row in rows:
            number, i = next(following)
            show(number, i, row)

    ctx.decoder.decode(batch, read=read)
