"""``score``: how probable continuations are after contexts, in as few decodes as possible."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..branch.scorer import Wanted, read
from ..context import Context
from ..context.context import text_context
from ..context.logits import LogitsRow
from ..errors import CacheFullError, ConfigError
from ..model import Model, TokenIds, token_list

ScoreRequest = tuple[str | TokenIds, Sequence[str | TokenIds]]

_MEANT = "requests must be a list of pairs: a context and a list of continuations"


@dataclass(frozen=True)
class Score:
    """How probable a continuation is after its context.

    Attributes:
        tokens: the tokens of the continuation.
        logprobs: the model's log-probability of each token, nats.
        is_greedy: whether each token has the largest logit at its position.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool

    @property
    def logprob(self) -> float:
        """The log-probability of the continuation, nats: the sum over its tokens."""
        return math.fsum(self.logprobs)


def score(
    ctx: Context,
    requests: Sequence[ScoreRequest],
    *,
    parse_special: bool = True,
    on_done: Callable[[int, list[Score]], None] | None = None,
) -> list[list[Score]]:
    """Score continuations after their contexts.

    A continuation is tokenized together with its context, and its tokens are those that follow the
    tokens of the context, as in lm-evaluation-harness. Spaces at the end of a context belong to the
    continuation.

    Args:
        ctx: a context that each context text with its continuation fits into; its other branches are not
            touched. With more free cells and sequences more requests share a decode.
        requests: pairs of a context and its continuations, each a text or token ids. An empty context
            is the model's BOS token, or EOS if it has none.
        parse_special: whether control tokens written in texts are parsed.
        on_done: called with the index of a request and its scores as soon as they are known, in any
            order. So these scores are not lost if something fails or is interrupted later.

    Returns:
        For each request the scores of its continuations.

    Raises:
        ConfigError: a request is not such a pair, or a continuation has no tokens.
        CacheFullError: a context with a continuation is longer than the context; nothing is decoded.
        TokenizeError, SequencesExhaustedError, DecodeError: all sequences are returned.
    """
    text_context("ctx", ctx)
    if not _is_list(requests):
        raise ConfigError(_MEANT, hint='for example [("2 + 2 =", [" 4", " 5"])]')
    wanted: list[Wanted] = []
    texts: list[range] = []  # the range in ``wanted`` of each request
    for number, request in enumerate(requests):
        new = _wanted(ctx, f"request {number}", request, parse_special)
        texts.append(range(len(wanted), len(wanted) + len(new)))
        wanted += new
    request_of = [number for number, span in enumerate(texts) for _ in span]
    left = Counter(request_of)
    logprobs: list[list[float]] = [[] for _ in wanted]
    is_greedy = [True] * len(wanted)

    def visit(text: int, i: int, row: LogitsRow) -> None:
        token = wanted[text].tokens[i]
        logprobs[text].append(row.logprob(token))
        is_greedy[text] &= bool(row.array[token] >= row.array[row.best])

    def scores(request: int) -> list[Score]:
        return [
            Score(tuple(wanted[i].tokens[wanted[i].first :]), tuple(logprobs[i]), is_greedy[i])
            for i in texts[request]
        ]

    def done(text: int) -> None:
        request = request_of[text]
        left[request] -= 1
        if on_done is not None and not left[request]:
            on_done(request, scores(request))

    read(ctx, wanted, visit, done)
    return [scores(request) for request in range(len(texts))]


def encode_pair(
    model: Model, context: str, continuation: str, *, parse_special: bool = True
) -> tuple[list[int], list[int]]:
    """Return the token ids of a context and of its continuation, which may be empty.

    They are tokenized together and cut after as many tokens as the context has alone, as in
    lm-evaluation-harness; spaces at the end of the context belong to the continuation.
    """
    stripped = context.rstrip()
    continuation, context = context[len(stripped) :] + continuation, stripped
    if not context:
        alone = model.tokenize(continuation, add_special=False, parse_special=parse_special)
        return model.prompt_tokens(""), alone
    whole = model.prompt_tokens(context + continuation, parse_special=parse_special)
    n_context = len(model.prompt_tokens(context, parse_special=parse_special))
    return whole[:n_context], whole[n_context:]


def _wanted(ctx: Context, name: str, request: ScoreRequest, parse_special: bool) -> list[Wanted]:
    if not (_is_list(request) and len(request) == 2 and _is_list(request[1])):
        raise ConfigError(f"{_MEANT}; {name} is {request!r:.60}")
    context, continuations = request
    model, most, wanted = ctx.model, ctx.n_ctx_seq + 1, []  # the last token is not decoded
    for continuation in continuations:
        if isinstance(context, str) and isinstance(continuation, str):
            before, after = encode_pair(model, context, continuation, parse_special=parse_special)
        elif isinstance(context, str) or isinstance(continuation, str):
            message = f"{name} mixes text and token ids"
            raise ConfigError(message, hint="use text for both, or ids for both")
        else:
            before = model.prompt_tokens(context)
            after = token_list(continuation)
            model.check_tokens(after)
        if not after:
            message = f"{name}: {continuation!r:.60} has no tokens of its own after its context"
            raise ConfigError(message, hint="it must not be empty, and usually begins with a space")
        if (n := len(before) + len(after)) > most:
            message = f"{name} has {n} tokens, the context has room for {most}"
            raise CacheFullError(message, hint="open the context with a larger n_ctx")
        wanted.append(Wanted(None, [*before, *after], len(before)))
    return wanted


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
