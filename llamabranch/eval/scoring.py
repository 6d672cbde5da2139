"""How probable given texts are after given contexts: ``score``, in as few decodes as possible.

All requests become one tree of tokens (`trie`). It is walked depth first in groups of subtrees that fit
into the context together; the nodes of one depth share their decodes. What several lines have in common
is decoded once, and every other token is what it would be alone: in a batch-invariant context the numbers
do not depend, to the bit, on which requests are scored together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..branch import Branch, BranchStore
from ..context import Context
from ..context.context import text_context
from ..context.logits import LogitsRow
from ..errors import CacheFullError, ConfigError
from ..model import Model, TokenIds, token_list
from .trie import Line, Node, build

__all__ = ["Score", "ScoreRequest", "encode_pair", "score"]

ScoreRequest = tuple[str | TokenIds, Sequence[str | TokenIds]]

_MEANT = "requests must be a list of pairs: a context and a list of continuations"
# How many decodes the tokens of a group fill, at least: more leave fewer half empty, and need more cells.
_DECODES = 4


@dataclass(frozen=True)
class Score:
    """How probable a continuation is after its context.

    Attributes:
        tokens: of the continuation.
        logprobs: the model's log-probability of each of them, nats.
        is_greedy: whether no token anywhere has a larger logit than the one that is there.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool

    @property
    def logprob(self) -> float:
        """The log-probability of the continuation, nats: the sum of its tokens'."""
        return math.fsum(self.logprobs)


def score(
    ctx: Context,
    requests: Sequence[ScoreRequest],
    *,
    parse_special: bool = True,
    on_done: Callable[[int, list[Score]], None] | None = None,
) -> list[list[Score]]:
    """Rate continuations after their contexts.

    A text is tokenized with its context, and its tokens are those after the context's, as in
    lm-evaluation-harness; spaces at the end of a context belong to the continuation.

    Args:
        ctx: holds each context with a continuation; other branches of it are not touched. The more of its
            cells and sequences are free, the more requests share a decode.
        requests: pairs of a context and its continuations, each a text or token ids. An empty context
            is the model's BOS token, or EOS if it has none.
        parse_special: whether control tokens written in texts are parsed.
        on_done: called with the index of a request and its scores as soon as they are known, in any
            order. What it was called with is not lost if something fails or is interrupted later.

    Returns:
        for each request the scores of its continuations.

    Raises:
        ConfigError: a request that is no such pair, or a continuation without tokens.
        CacheFullError: a context with a continuation is longer than the context; nothing is decoded.
        TokenizeError, SequencesExhaustedError, DecodeError: all sequences are returned.
    """
    text_context("ctx", ctx)
    if not _is_list(requests):
        raise ConfigError(_MEANT, hint='for example [("2 + 2 =", [" 4", " 5"])]')
    named = [(f"request {i}", its) for i, its in enumerate(requests)]
    return rate(ctx, named, on_done, parse_special)


def rate(
    ctx: Context,
    requests: Sequence[tuple[str, ScoreRequest]],
    on_done: Callable[[int, list[Score]], None] | None,
    parse_special: bool = True,
) -> list[list[Score]]:
    """Do what `score` does, for requests that have names for messages."""
    lines = [_lines(ctx, name, its, parse_special) for name, its in requests]
    _Run(ctx, lines, on_done).walk(None, build(line for its in lines for line in its))
    return [[_score(line) for line in its] for its in lines]


def encode_pair(
    model: Model, context: str, continuation: str, *, parse_special: bool = True
) -> tuple[list[int], list[int]]:
    """Return the token ids of a context and of what follows it, which may be none.

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


def _lines(ctx: Context, name: str, request: ScoreRequest, parse_special: bool) -> list[Line]:
    if not (_is_list(request) and len(request) == 2 and _is_list(request[1])):
        raise ConfigError(f"{_MEANT}; {name} is {request!r:.60}")
    context, continuations = request
    model, most, lines = ctx.model, ctx.n_ctx_seq + 1, []  # the last token is not decoded
    for continuation in continuations:
        if isinstance(context, str) and isinstance(continuation, str):
            before, after = encode_pair(model, context, continuation, parse_special=parse_special)
        elif isinstance(context, str) or isinstance(continuation, str):
            told = f"{name} mixes text and token ids"
            raise ConfigError(told, hint="give both as text, or as ids")
        else:
            before = model.prompt_tokens(context)
            after = token_list(continuation)
            model.check_tokens(after)
        if not after:
            told = f"{name}: {continuation!r:.60} has no tokens of its own after its context"
            raise ConfigError(told, hint="it must not be empty, and mostly begins with a space")
        if (n := len(before) + len(after)) > most:
            told = f"{name} has {n} tokens, the context has room for {most}"
            raise CacheFullError(told, hint="open the context with a larger n_ctx")
        lines.append(Line([*before, *after], len(before)))
    return lines


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _score(line: Line) -> Score:
    logprobs = tuple(line.logprobs[i] for i in range(line.n_context, len(line.tokens)))
    return Score(tuple(line.tokens[line.n_context :]), logprobs, line.is_greedy)


class _Run:
    """A walk over the tree that fills in the ratings of its lines."""

    def __init__(
        self,
        ctx: Context,
        lines: Sequence[Sequence[Line]],
        on_done: Callable[[int, list[Score]], None] | None,
    ) -> None:
        self._ctx = ctx
        self._store = BranchStore(ctx)
        self._lines = lines
        self._on_done = on_done
        self._request = {line: i for i, its in enumerate(lines) for line in its}

    def walk(self, base: Branch | None, nodes: Sequence[Node]) -> None:
        """Read all that is below ``base``: subtrees that fit together at once, others one by one."""
        for group in self._groups(nodes):
            first = group[0]
            if len(group) > 1 or not first.children or self._fits(group):
                self._read_group(base, group)
            elif self._ctx.n_seq_free < 3:  # none would be left for what is below
                self.walk(base, first.paths())
            else:
                branch = self._begin(base)
                try:
                    self._read({branch: first})
                    self.walk(branch, first.children)
                finally:
                    branch.prune()

    def _fits(self, nodes: Sequence[Node]) -> bool:
        cells = min(self._ctx.usage().cells_free, _DECODES * self._ctx.n_batch)
        n_leaves = sum(node.n_leaves for node in nodes)
        return sum(node.n_tokens for node in nodes) <= cells and n_leaves <= self._ctx.n_seq_free

    def _groups(self, nodes: Sequence[Node]) -> Iterator[list[Node]]:
        group: list[Node] = []
        for node in nodes:
            if group and not self._fits([*group, node]):
                yield group
                group = []
            group.append(node)
        if group:
            yield group

    def _begin(self, base: Branch | None) -> Branch:
        return Branch.create(self._ctx) if base is None else base.fork()

    def _read_group(self, base: Branch | None, group: Sequence[Node]) -> None:
        """Read subtrees together, depth by depth."""
        level: dict[Branch, Node] = {}
        try:
            for node in group:
                level[self._begin(base)] = node
            while level:
                self._read(level)
                for branch, node in list(level.items()):
                    del level[branch]
                    if not node.children:
                        branch.prune()
                        continue
                    level[branch] = node.children[-1]
                    for child in node.children[:-1]:
                        fork = branch.fork()
                        level[fork] = child
                        fork.detach()
        finally:
            for branch in level:
                branch.prune_subtree()

    def _read(self, nodes: dict[Branch, Node]) -> None:
        done: list[int] = []

        def visit(branch: Branch, i: int, row: LogitsRow) -> None:
            position = nodes[branch].start + i
            for line in nodes[branch].ratings.get(position, ()):
                if position + 1 in line.logprobs:
                    continue  # a beginning that is read again
                token = line.tokens[position + 1]
                line.logprobs[position + 1] = row.logprob(token)
                line.is_greedy &= bool(row.array[token] >= row.array[row.best])
                if line.is_done:
                    done.append(self._request[line])

        self._store.read(
            {branch: node.tokens for branch, node in nodes.items()},
            visit,
            {branch: node.first_row for branch, node in nodes.items()},
        )
        for request in dict.fromkeys(done):
            lines = self._lines[request]
            if self._on_done is not None and all(line.is_done for line in lines):
                self._on_done(request, [_score(line) for line in lines])
