"""``/v1/branches``: nodes made, continued, forked, rated and deleted."""

from __future__ import annotations

import secrets
from array import array
from asyncio import to_thread
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from ..engine import Request
from ..sampling import SamplingParams
from .errors import HttpError
from .exchange import Exchange
from .fields import (
    SamplingFields,
    StructuredOutputs,
    TextFields,
    check_top,
    limit_of,
    prompt_tokens,
)
from .generation import Choice, Update, all_choices, answer, usage
from .nodes import Node
from .service import Service

__all__ = ["continue_", "create", "delete", "fork", "get", "listing", "score"]

_MOST_CONTINUATIONS = 128
_N_NEXT = 5  # tokens that are told to follow a node


class CreateFields(Struct, kw_only=True):
    """The body of POST /v1/branches."""

    prompt: str | None = None
    tokens: list[int] | None = None
    messages: list[dict[str, object]] | None = None
    add_special_tokens: bool = True
    parse_special: bool = True
    sampling: SamplingFields | None = None
    seed: int | None = None
    grammar: str | None = None
    json_schema: dict[str, object] | None = None
    structured_outputs: StructuredOutputs | None = None
    top_logprobs: int = _N_NEXT


class ContinueFields(Struct, kw_only=True):
    """The body of POST /v1/branches/{id}/continue."""

    max_tokens: int | None = 16
    n: int = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    top_logprobs: int | None = None
    sampling: SamplingFields | None = None
    seed: int | None = None
    stream: bool = False


class Append(Struct, kw_only=True):
    """What a fork adds: one of these."""

    text: str | None = None
    tokens: list[int] | None = None


class ForkFields(Struct, kw_only=True):
    """The body of POST /v1/branches/{id}/fork."""

    at: int | None = None
    append: Append | None = None
    parse_special: bool = True
    sampling: SamplingFields | None = None
    seed: int | None = None
    top_logprobs: int = _N_NEXT


class ScoreFields(Struct, kw_only=True):
    """The body of POST /v1/branches/{id}/score."""

    continuations: list[str | list[int]]
    parse_special: bool = True
    top_logprobs: int = 0


async def create(call: Exchange, service: Service) -> None:
    """Make a root."""
    fields = await call.json(CreateFields)
    given = [fields.prompt, fields.tokens, fields.messages]
    if sum(each is not None for each in given) != 1:
        raise HttpError(400, "give one of prompt, tokens and messages", param="prompt")
    messages = fields.messages
    if messages is not None:
        tokens = await to_thread(lambda: service.model.chat_tokens(messages))
    else:
        prompt = fields.tokens if fields.prompt is None else fields.prompt
        (found,) = await prompt_tokens(
            service,
            prompt,
            add_special=fields.add_special_tokens,
            parse_special=fields.parse_special,
        )
        tokens = service.model.prompt_tokens(found)
    grammar = await TextFields(
        grammar=fields.grammar,
        json_schema=fields.json_schema,
        structured_outputs=fields.structured_outputs,
    ).text_grammar(service)
    sampling = _sampling(service, service.settings.sampling, fields)
    node = Node(None, 0, array("i", tokens), len(tokens), sampling, grammar)
    await _add(call, service, node, fields.top_logprobs)


async def fork(call: Exchange, service: Service) -> None:
    """Make a child: the first tokens of a node, and what is appended."""
    fields = await call.json(ForkFields)
    parent = _node(call, service)
    at = parent.position if fields.at is None else fields.at
    if not 1 <= at <= parent.position:
        raise HttpError(400, f"at must be 1 to {parent.position}, not {at}", param="at")
    more: list[int] = []
    if fields.append is not None:
        text, ids = fields.append.text, fields.append.tokens
        if (text is None) == (ids is None):
            raise HttpError(400, "append needs text or tokens", param="append")
        more = ids or []
        if text is not None:
            parse = fields.parse_special
            more = await service.tokenize(text, add_special=False, parse_special=parse)
        service.model.check_tokens(more)
    n_read = at + len(more) if more else min(at, parent.n_read)
    sampling = _sampling(service, parent.sampling, fields)
    node = Node(parent, at, array("i", more), n_read, sampling, parent.grammar)
    await _add(call, service, node, fields.top_logprobs)


async def _add(call: Exchange, service: Service, node: Node, top: int) -> None:
    with service.branches.room_for(1) as add:
        choice = await _look(service, node, check_top(top) or 0)
        add(node)
    shown = await _shown(service, node)
    await call.reply({**shown, "next": node.next, **usage([choice])}, 201)


async def continue_(call: Exchange, service: Service) -> None:
    """Generate children of a node."""
    fields = await call.json(ContinueFields)
    parent = _node(call, service)
    if not 1 <= fields.n <= service.settings.max_choices:
        raise HttpError(400, f"n must be 1 to {service.settings.max_choices}", param="n")
    top, limit = check_top(fields.top_logprobs), limit_of(fields.max_tokens)
    sampling = _sampling(service, parent.sampling, fields)
    tokens = parent.tokens
    service.check_room(tokens, limit)
    request = Request(
        tokens,
        continues=parent.continues,
        grammar=parent.grammar,
        sampling=sampling.replace(logprobs=top is not None),
        max_tokens=service.n_ctx if limit is None else limit,
        n=fields.n,
        stop=TextFields(stop=fields.stop).stops,
        stop_tokens=fields.stop_token_ids or (),
        top_logprobs=top,
    )
    with service.branches.room_for(fields.n) as add:
        writer = _Writer(service, parent, sampling, top, add)
        await answer(call, service, [request], writer, stream=fields.stream)


@dataclass
class _Writer:
    """Writes texts as children of a node, which they become when they have ended."""

    service: Service
    parent: Node
    sampling: SamplingParams
    top: int | None
    add: Callable[[Node], None]

    def body(self, choices: Sequence[Choice]) -> dict[str, object]:
        """Make the children and show them."""
        children = [self._child(choice.whole) for choice in choices]
        return {"object": "branch.children", "children": children, **usage(choices)}

    def events(self, update: Update) -> list[dict[str, object]]:
        """Return the new text of a child that is not yet one."""
        return [{"object": "branch.chunk", **self._part(update)}]

    def last_events(self, choices: Sequence[Choice]) -> list[dict[str, object]]:
        """Return the children."""
        return [self.body(choices)]

    def _child(self, update: Update) -> dict[str, object]:
        parent, result = self.parent, update.choice.result
        sampling = self.sampling.replace(seed=result.seed)
        own, reason = array("i", result.tokens), update.end["finish_reason"]
        child = Node(parent, parent.position, own, parent.n_read, sampling, parent.grammar, reason)
        self.add(child)
        return {**_told(self.service, child), **self._part(update)}

    def _part(self, update: Update) -> dict[str, object]:
        found: dict[str, object] = {
            "index": update.choice.index,
            "text": update.text,
            "tokens": [token.token for token in update.tokens],
            **update.end,
        }
        if self.top is not None:
            words = self.service.vocabulary
            found["logprobs"] = words.chat_logprobs(update.tokens, more=True)
        return found


async def score(call: Exchange, service: Service) -> None:
    """Rate continuations of a node; no node is added."""
    fields = await call.json(ScoreFields)
    tokens = _node(call, service).tokens
    if not 1 <= len(fields.continuations) <= _MOST_CONTINUATIONS:
        told = f"give 1 to {_MOST_CONTINUATIONS} continuations"
        raise HttpError(400, told, param="continuations")
    top, n = check_top(fields.top_logprobs), len(tokens)
    requests = []
    for given in fields.continuations:
        (more,) = await prompt_tokens(
            service, [given], add_special=False, parse_special=fields.parse_special
        )
        if not more:
            raise HttpError(400, "a continuation has no tokens", param="continuations")
        service.model.check_tokens(more)
        service.check_room([*tokens, *more], 0)
        requests.append(
            Request([*tokens, *more], max_tokens=0, prompt_logprobs=top, logprobs_from=n)
        )
    choices = await all_choices(service, requests)
    scores = []
    for choice in choices:
        rated = [one for one in choice.result.prompt_logprobs or () if one is not None]
        words = [service.vocabulary.rated(one) for one in rated]
        scores.append({"logprob": sum(one.logprob for one in rated), "tokens": words})
    await call.reply({"object": "branch.scores", "scores": scores, **usage(choices)})


async def get(call: Exchange, service: Service) -> None:
    """Show a node; ``?include=tokens,next`` shows more of it."""
    node = _node(call, service)
    wanted = set(filter(None, call.query.get("include", "").split(",")))
    if wanted - {"tokens", "next"}:
        raise HttpError(400, "include takes tokens and next", param="include")
    shown = await _shown(service, node)
    if "tokens" in wanted:
        shown |= {"tokens": node.tokens, "text": service.text(node.tokens)}
    if "next" in wanted:
        if node.next is None:
            await _look(service, node, _N_NEXT)
        shown["next"] = node.next
    await call.reply(shown)


async def listing(call: Exchange, service: Service) -> None:
    """List all nodes, or those of one tree."""
    root = call.query.get("root")
    nodes = service.branches.all() if root is None else service.branches[root].subtree()
    await call.reply({"object": "list", "data": [_told(service, node) for node in nodes]})


async def delete(call: Exchange, service: Service) -> None:
    """Delete a node; ``?subtree=true`` those below too."""
    node = _node(call, service)
    subtree = call.query.get("subtree", "").lower() in ("1", "true")
    n = service.branches.delete(node, subtree=subtree)
    await call.reply({"id": node.id, "object": "branch.deleted", "deleted": True, "count": n})


# -- parts -----------------------------------------------------------------------------------------


def _node(call: Exchange, service: Service) -> Node:
    return service.branches[call.path_param("id")]


def _sampling(
    service: Service, default: SamplingParams, given: CreateFields | ContinueFields | ForkFields
) -> SamplingParams:
    """Return settings that have a seed: so a node, continued again, gives the same text."""
    asked = given.sampling or SamplingFields()
    found = asked.sampling(service.model, service.settings, default)
    if given.seed is not None and given.seed != -1:
        return found.replace(seed=given.seed)
    return found if found.seed is not None else found.replace(seed=secrets.randbits(31))


async def _look(service: Service, node: Node, top: int) -> Choice:
    """Find what may follow a node: one token is drawn and dropped, never one that ends the text."""
    tokens = node.tokens
    service.check_room(tokens, 1)
    banned = dict.fromkeys(service.model.eog_tokens, float("-inf"))
    sampling = SamplingParams(temperature=0.0, seed=0, logit_bias=banned)
    request = Request(tokens, max_tokens=1, sampling=sampling, top_logprobs=top)
    (choice,) = await all_choices(service, [request])
    for first in choice.result.emitted:
        node.next = {"entropy": first.entropy, "top": service.vocabulary.top(first.alternatives)}
    return choice


async def _shown(service: Service, node: Node) -> dict[str, object]:
    """Return what is told of a node, and how many of its tokens have their K/V in the cache."""
    return {**_told(service, node), "resident": await service.n_cached(node.tokens)}


def _told(service: Service, node: Node) -> dict[str, object]:
    return {
        "id": node.id,
        "object": "branch",
        "parent": node.parent_id,
        "position": node.position,
        "fork_position": node.start,
        "children": [child.id for child in node.children],
        "seed": node.sampling.seed,
        "finish_reason": node.finish_reason,
        **({} if service.is_exact else {"batch_invariant": False}),
    }
