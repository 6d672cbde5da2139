"""``/v1/branches``: create, continue, fork, score and delete nodes."""

from __future__ import annotations

import secrets
from asyncio import to_thread
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from msgspec import Meta, Struct

from ..engine import Request
from ..sampling import SamplingParams
from .errors import HttpError
from .fields import (
    Limit,
    Prompt,
    SamplingFields,
    StructuredOutputs,
    TextFields,
    Top,
    engine_requests,
    limit_of,
    prompt_tokens,
)
from .generation import Update, Writer, all_texts, answer, usage
from .http_call import HttpCall
from .nodes import BranchNode
from .service import Service

__all__ = ["continue_", "create", "delete", "fork", "get", "listing", "score"]

_N_NEXT = 5  # tokens reported to follow a node
_Text = Annotated[str, Meta(min_length=1)]
_Tokens = Annotated[list[int], Meta(min_length=1)]


class NodeFields(Struct, kw_only=True):
    """The fields of all requests that create a node."""

    sampling: SamplingFields | None = None
    seed: int | None = None
    parse_special: bool = True

    def params(self, service: Service, default: SamplingParams) -> SamplingParams:
        """Return settings with a seed, so that continuing a node again gives the same text."""
        fields = self.sampling or SamplingFields()
        params = fields.sampling(service.model, service.settings, default)
        if self.seed is not None:
            params = params.replace(seed=self.seed)
        return params.replace(seed=params.drawn_seed(secrets.randbits(31)))


class CreateFields(NodeFields, kw_only=True):
    """The body of POST /v1/branches."""

    prompt: str | None = None
    tokens: _Tokens | None = None
    messages: list[dict[str, object]] | None = None
    add_special_tokens: bool = True
    grammar: str | None = None
    json_schema: dict[str, object] | None = None
    structured_outputs: StructuredOutputs | None = None
    top_logprobs: Top = _N_NEXT


class ContinueFields(NodeFields, kw_only=True):
    """The body of POST /v1/branches/{id}/continue."""

    max_tokens: Limit | None = 16
    n: Annotated[int, Meta(ge=1)] = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    top_logprobs: Top | None = None
    stream: bool = False


class Append(Struct, kw_only=True):
    """The text that a fork appends; one of these fields is set."""

    text: str | None = None
    tokens: list[int] | None = None


class ForkFields(NodeFields, kw_only=True):
    """The body of POST /v1/branches/{id}/fork."""

    at: int | None = None
    append: Append | None = None
    top_logprobs: Top = _N_NEXT


class ScoreFields(Struct, kw_only=True):
    """The body of POST /v1/branches/{id}/score."""

    continuations: Annotated[list[_Text | _Tokens], Meta(min_length=1, max_length=128)]
    parse_special: bool = True
    top_logprobs: Top = 0


async def create(call: HttpCall, service: Service) -> None:
    """Make a root."""
    fields, model = await call.json(CreateFields), service.model
    beginnings = [fields.prompt, fields.tokens, fields.messages]
    if sum(beginning is not None for beginning in beginnings) != 1:
        raise HttpError(400, "send one of prompt, tokens and messages", param="prompt")
    if fields.messages is not None:
        tokens = await to_thread(model.chat_tokens, fields.messages)
    elif fields.tokens is not None:
        tokens = model.prompt_tokens(fields.tokens)
    else:
        add, parse = fields.add_special_tokens, fields.parse_special
        text = service.tokenize(fields.prompt or "", add_special=add, parse_special=parse)
        tokens = model.prompt_tokens(await text)
    grammar = await TextFields(
        grammar=fields.grammar,
        json_schema=fields.json_schema,
        structured_outputs=fields.structured_outputs,
    ).text_grammar()
    sampling = fields.params(service, service.settings.sampling)
    await _add(
        call, service, BranchNode(tokens, len(tokens), sampling, grammar), fields.top_logprobs
    )


async def fork(call: HttpCall, service: Service) -> None:
    """Make a child with the first tokens of a node and the appended text."""
    fields = await call.json(ForkFields)
    parent, append = _node(call, service), fields.append or Append(tokens=[])
    at = parent.position if fields.at is None else fields.at
    if not 1 <= at <= parent.position:
        raise HttpError(400, f"at must be 1 to {parent.position}, not {at}", param="at")
    if (append.text is None) == (append.tokens is None):
        raise HttpError(400, "append needs text or tokens", param="append")
    more = append.tokens or []
    if append.text is not None:
        parse = fields.parse_special
        more = await service.tokenize(append.text, add_special=False, parse_special=parse)
    service.model.check_tokens(more)
    n_read = at + len(more) if more else min(at, parent.n_read)
    sampling = fields.params(service, parent.sampling)
    node = BranchNode([*parent.tokens[:at], *more], n_read, sampling, parent.grammar, parent, at)
    await _add(call, service, node, fields.top_logprobs)


async def _add(call: HttpCall, service: Service, node: BranchNode, top: int) -> None:
    with service.branches.room_for(1):
        text = await _look(service, node, top)
        service.branches.add(node)
    reply = {**_shown(service, node), "resident": await service.n_cached(node.tokens)}
    await call.reply({**reply, "next": node.next, **usage([text])}, 201)


async def continue_(call: HttpCall, service: Service) -> None:
    """Generate children of a node."""
    fields = await call.json(ContinueFields)
    parent = _node(call, service)
    text = TextFields(
        n=fields.n, stop=fields.stop, stop_token_ids=fields.stop_token_ids, stream=fields.stream
    )
    requests = await engine_requests(
        service, text, [parent.tokens], limit_of(fields.max_tokens), fields.top_logprobs
    )
    sampling = fields.params(service, parent.sampling)
    request = replace(
        requests[0], continues=parent.continues, grammar=parent.grammar,
        sampling=sampling.replace(logprobs=fields.top_logprobs is not None),
    )  # fmt: skip
    with service.branches.room_for(fields.n):
        await answer(call, _Writer(service, text, parent, sampling), [request])


class _Writer(Writer[TextFields]):
    """Writes texts as children of a node; they become nodes when they end."""

    def __init__(
        self, service: Service, fields: TextFields, parent: BranchNode, sampling: SamplingParams
    ) -> None:
        super().__init__(service, fields, "br", "branch.children")
        self._parent, self._sampling = parent, sampling

    def body(self, texts: Sequence[Update]) -> dict[str, object]:
        """Make the children and show them."""
        children = [self._child(text) for text in texts]
        return {"object": "branch.children", "children": children, **usage(texts)}

    def events(self, update: Update) -> list[dict[str, object]]:
        """Return the new text of a child that has not ended."""
        return [{"object": "branch.chunk", **self.part(update)}]

    def last_events(self, texts: Sequence[Update]) -> list[dict[str, object]]:
        """Return the children."""
        return [self.body(texts)]

    def _child(self, update: Update) -> dict[str, object]:
        parent, result = self._parent, update.result
        child = BranchNode(
            [*parent.tokens, *result.tokens], parent.n_read,
            self._sampling.replace(seed=result.seed), parent.grammar, parent, parent.position,
            update.end["finish_reason"],
        )  # fmt: skip
        self.service.branches.add(child)
        return {**_shown(self.service, child), **self.part(update)}

    def part(self, update: Update) -> dict[str, object]:
        """Return the new part of a child's text."""
        ids = [token.token for token in update.tokens]
        part = {"index": update.index, "text": update.text, "tokens": ids, **update.end}
        if update.request.top_logprobs is not None:
            part["logprobs"] = self.words.chat_logprobs(update.tokens, more=True)
        return part


async def score(call: HttpCall, service: Service) -> None:
    """Score continuations of a node; no node is added."""
    fields = await call.json(ScoreFields)
    tokens, parse = _node(call, service).tokens, fields.parse_special
    requests = []
    for continuation in fields.continuations:
        prompt: Prompt = [continuation] if isinstance(continuation, str) else [[*continuation]]
        (more,) = await prompt_tokens(service, prompt, add_special=False, parse_special=parse)
        if not more:
            raise HttpError(400, "a continuation has no tokens", param="continuations")
        service.model.check_tokens(more)
        service.check_room([*tokens, *more], 0)
        requests.append(
            Request(
                [*tokens, *more], max_tokens=0, prompt_logprobs=fields.top_logprobs,
                logprobs_from=len(tokens),
            )
        )  # fmt: skip
    texts = await all_texts(service, requests)
    scores = []
    for text in texts:
        scored = [entry for entry in text.result.prompt_logprobs or () if entry is not None]
        words = [service.vocabulary.scored(entry) for entry in scored]
        scores.append({"logprob": sum(entry.logprob for entry in scored), "tokens": words})
    await call.reply({"object": "branch.scores", "scores": scores, **usage(texts)})


async def get(call: HttpCall, service: Service) -> None:
    """Show a node; ``?include=tokens,next`` shows more of it."""
    node, included = _node(call, service), call.query.get("include", "").split(",")
    if {*included} - {"", "tokens", "next"}:
        raise HttpError(400, "include takes tokens and next", param="include")
    reply = {**_shown(service, node), "resident": await service.n_cached(node.tokens)}
    if "tokens" in included:
        raw = b"".join(map(service.model.piece, node.tokens))  # control tokens have no text
        reply |= {"tokens": node.tokens, "text": raw.decode("utf-8", "replace")}
    if "next" in included:
        if node.next is None:
            await _look(service, node, _N_NEXT)
        reply["next"] = node.next
    await call.reply(reply)


async def listing(call: HttpCall, service: Service) -> None:
    """List all nodes, or the nodes of one tree."""
    root = call.query.get("root")
    nodes = service.branches.all() if root is None else service.branches[root].subtree()
    await call.reply({"object": "list", "data": [_shown(service, node) for node in nodes]})


async def delete(call: HttpCall, service: Service) -> None:
    """Delete a node; with ``?subtree=true`` also those below it."""
    node, subtree = _node(call, service), call.query.get("subtree", "").lower()
    n = service.branches.delete(node, subtree=subtree in ("1", "true"))
    await call.reply({"id": node.id, "object": "branch.deleted", "deleted": True, "count": n})


# -- parts -----------------------------------------------------------------------------------------


def _node(call: HttpCall, service: Service) -> BranchNode:
    return service.branches[call.scope["path_params"]["id"]]


async def _look(service: Service, node: BranchNode, top: int) -> Update:
    """Find the most probable next tokens of a node: draw one token and drop it."""
    (text,) = await all_texts(service, [service.next_request(node.tokens, top)])
    for first in text.result.emitted:
        node.next = {"entropy": first.entropy, "top": service.vocabulary.top(first.alternatives)}
    return text


def _shown(service: Service, node: BranchNode) -> dict[str, object]:
    """Return a node as JSON types."""
    return {
        "id": node.id,
        "object": "branch",
        "parent": None if node.parent is None else node.parent.id,
        "position": node.position,
        "fork_position": node.fork_position,
        "children": [child.id for child in node.children],
        "seed": node.sampling.seed,
        "finish_reason": node.finish_reason,
        **({} if service.is_exact else {"batch_invariant": False}),
    }
