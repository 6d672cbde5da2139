"""Scores of texts: ``score``, and ``read`` for callers that need the rows of logits themselves.

The last token of a text is not decoded. Each row is read as soon as it is computed. Existing texts do
not change, and nothing is left in the cache. In an exact context the numbers do not depend, to the bit,
on what is read together.
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

__all__ = ["continuation", "log_likelihood", "perplexity", "read", "score"]

# Called with the number of a text, the index of one of its tokens, and the logits before that token,
# which are valid until it returns.
Visit = Callable[[int, int, LogitsRow], None]


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
    start = text.fork_position if since == "fork" else 0
    positions = text.generated_positions(max(start, 1))  # nothing predicts the very first token
    surprisals = [text.surprisals[position - text.n_prompt] for position in positions]
    if any(map(math.isnan, surprisals)):
        # Tokens of ``append_unscored`` have NaN, which would make any comparison false.
        raise BranchStateError(
            f"{sum(map(math.isnan, surprisals))} of {len(surprisals)} tokens have no surprisal",
            hint="they were appended without their logits; extend a new branch with them",
        )
    return surprisals


def score(text: Text, tokens: Sequence[int], *, top: int = 0) -> list[TokenScore]:
    """Return the scores of tokens that could follow a text, with the ``top`` most probable ones.

    Hold the lock.

    Raises:
        CacheFullError: too few cells. SequencesExhaustedError: this memory needs a free sequence.
        BranchStateError: the text is empty or pruned. DecodeError: nothing has changed.
    """
    ctx, memory, model = text.ctx, text.ctx.kv_cache, text.ctx.model
    text.check_usable()
    text.settle()
    scores = [text.logits_row().score(tokens[0], model, top)]
    if len(tokens) == 1:
        return scores

    def visit(_number: int, i: int, row: LogitsRow) -> None:
        scores.append(row.score(tokens[i], model, top))

    batch, seq_id, start = Batch(), text.seq_id, len(text.tokens)
    _make_room(ctx, len(tokens) - 1)
    if memory.can_draft:
        memory.prepare(seq_id, len(tokens) - 1)
    else:
        seq_id = ctx.sequences.allocate(batch)
    try:
        if seq_id != text.seq_id:
            memory.fork(text.seq_id, seq_id)
        batch.add(seq_id, tokens[:-1], "all")
        _decode(ctx, batch, [(0, i) for i in range(1, len(tokens))], visit)
    finally:
        if seq_id == text.seq_id:
            memory.cut(seq_id, start)
        else:
            ctx.sequences.free(seq_id)
    return scores


def read(ctx: Context, texts: Sequence[Sequence[int]], first: int, visit: Visit) -> None:
    """Read texts together, and call ``visit`` for the tokens of each from the index ``first`` on.

    Args:
        ctx: a context with room for them, and a free sequence for each.
        texts: valid ids.
        first: at least 1, because nothing predicts the first token.
        visit: called in the order of each text.

    Raises:
        CacheFullError, SequencesExhaustedError, DecodeError, and errors of ``visit``: all sequences are
            returned.
    """
    batch, seq_ids = Batch(), list[int]()
    with ctx.lock:
        _make_room(ctx, sum(map(len, texts)))
        try:
            for text in texts:
                seq_ids.append(ctx.sequences.allocate(batch))
                batch.add(seq_ids[-1], text[:-1], first - 1)
            shown = [(n, i) for n, text in enumerate(texts) for i in range(first, len(text))]
            _decode(ctx, batch, shown, visit)
        finally:
            for seq_id in seq_ids:
                ctx.sequences.free(seq_id)


def _make_room(ctx: Context, n: int) -> None:
    ctx.decoder.make_room(min(n, ctx.kv_cache.n_free))


def _decode(ctx: Context, batch: Batch, shown: Sequence[tuple[int, int]], visit: Visit) -> None:
    """Decode a batch, and call ``visit`` for each row with the number and the index of ``shown``."""

    def show(n_before: int, rows: list[LogitsRow]) -> None:
        for (number, i), row in zip(shown[n_before : n_before + len(rows)], rows, strict=True):
            visit(number, i, row)

    batch.decode(ctx.decoder, read=show)
