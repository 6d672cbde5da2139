"""``/v1/branches``: nodes made, continued, forked, rated and deleted."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from uuid import uuid4

import msgspec
from msgspec import Struct

from ..engine import Request
from ..sampling import SamplingParams
from .errors import HttpError
from .exchange import Exchange
from .fields import SamplingFields, StructuredOutputs, TextFields, limit_of
from .generation import (
    Choice,
    all_choices,
    begun,
    detail,
    finish_reason,
    stop_reason,
    total_timings,
    updates,
    usage,
)
from .nodes import Node
from .prompts import prompt_tokens
from .service import Service

__all__ = ["continue_", "create", "delete", "fork", "get", "listing", "score"]

_MOST_LOGPROBS = 20
_MOST_CONTINUATIONS = 128
_FILE = "branches.json"


class CreateFields(Struct, kw_only=True):
    """The body of POST /v1/branches."""

    prompt: str | None = None
    tokens: list[int] | None = None
    messages: list[dict[str, object]] | None = None
    add_special_tokens: bool = True
    sampling: SamplingFields | None = None
    seed: int | None = None
    grammar: str | None = None
    json_schema: dict[str, object] | None = None
    structured_outputs: StructuredOutputs | None = None
    top_logprobs: int = 5


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
    """What a fork adds."""

    text: str | None = None
    tokens: list[int] | None = None


class ForkFields(Struct, kw_only=True):
    """The body of POST /v1/branches/{id}/fork."""

    at: int | None = None
    append: Append | None = None
    sampling: SamplingFields | None = None
    seed: int | None = None
    top_logprobs: int = 5


class ScoreFields(Struct, kw_only=True):
    """The body of POST /v1/branches/{id}/score."""

    continuations: list[str | list[int]]
    top_logprobs: int = 0


_decode_create = msgspec.json.Decoder(CreateFields).decode
_decode_continue = msgspec.json.Decoder(ContinueFields).decode
_decode_fork = msgspec.json.Decoder(ForkFields).decode
_decode_score = msgspec.json.Decoder(ScoreFields).decode


async def create(call: Exchange, service: Service) -> None:
    """Make a root."""
    fields = await call.json(_decode_create)
    given = [fields.prompt, fields.tokens, fields.messages]
    if sum(each is not None for each in given) != 1:
        raise HttpError(400, "give one of prompt, tokens and messages", param="prompt")
    if fields.messages is not None:
        messages = fields.messages
        tokens = await service.in_thread(lambda: service.model.chat_tokens(messages))
    else:
        prompt = fields.tokens if fields.prompt is None else fields.prompt
        (tokens,) = await prompt_tokens(service, prompt, add_special=fields.add_special_tokens)
        tokens = service.model.prompt_tokens(tokens)
    shape = TextFields(
        grammar=fields.grammar,
        json_schema=fields.json_schema,
        structured_outputs=fields.structured_outputs,
    )
    grammar = await service.in_thread(shape.text_grammar)
    sampling = _sampling(service, service.settings.sampling, fields.sampling, fields.seed)
    node = Node(_new_id(), None, 0, array("i", tokens), len(tokens), sampling, grammar)
    await _add(call, service, node, fields.top_logprobs)


async def fork(call: Exchange, service: Service) -> None:
    """Make a child: the first tokens of a node, and what is appended."""
    fields = await call.json(_decode_fork)
    parent = _named(call, service)
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
            more = await service.tokenize(text, add_special=False)
        service.model.check_tokens(more)
    n_read = at + len(more) if more else min(at, parent.n_read)
    sampling = _sampling(service, parent.sampling, fields.sampling, fields.seed)
    node = Node(_new_id(), parent, at, array("i", more), n_read, sampling, parent.grammar)
    await _add(call, service, node, fields.top_logprobs)


async def _add(call: Exchange, service: Service, node: Node, top: int) -> None:
    service.branches.check_quota(1)
    found = await _look(service, node, _checked_top(top) or 0)
    service.branches.add(node)
    body = {**await _shown(service, node), "next": node.next, "usage": usage([found])}
    await call.reply(body, 201)


async def continue_(call: Exchange, service: Service) -> None:
    """Generate children of a node."""
    fields = await call.json(_decode_continue)
    parent = _named(call, service)
    if not 1 <= fields.n <= service.settings.max_choices:
        raise HttpError(400, f"n must be 1 to {service.settings.max_choices}", param="n")
    service.branches.check_quota(fields.n)
    top = _checked_top(fields.top_logprobs)
    limit = limit_of(fields.max_tokens)
    sampling = _sampling(service, parent.sampling, fields.sampling, fields.seed)
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    request = parent.request(
        sampling=sampling.replace(logprobs=top is not None),
        max_tokens=service.n_ctx if limit is None else limit,
        n=fields.n,
        stop=tuple(stop for stop in stops if stop),
        stop_tokens=fields.stop_token_ids or (),
        top_logprobs=top,
    )
    service.check_room(parent.tokens, limit)
    if not fields.stream:
        choices = await all_choices(service, [request])
        await call.reply(await _children(service, parent, choices, sampling, top))
        return
    ended: list[Choice] = []
    async with aclosing(await begun(updates(service, [request]))) as steps:
        await call.start_stream()
        async for step in steps:
            events = []
            for update in step:
                event: dict[str, object] = {
                    "object": "branch.chunk",
                    "index": update.choice.index,
                    "text": update.text,
                    "tokens": [token.token for token in update.tokens],
                    "finish_reason": finish_reason(update.result),
                }
                if top is not None:
                    details = map(detail, update.tokens)
                    event["logprobs"] = service.vocabulary.chat_logprobs(details, more=True)
                events.append(event)
                ended += [update.choice] if update.result is not None else []
            await call.event(*events)
    ended.sort(key=lambda choice: choice.index)
    await call.event(await _children(service, parent, ended, sampling, top))
    await call.end_stream()


async def _children(
    service: Service,
    parent: Node,
    choices: Sequence[Choice],
    sampling: SamplingParams,
    top: int | None,
) -> dict[str, object]:
    shown = []
    for choice in choices:
        result = choice.result
        if result is None:
            continue
        own = array("i", result.tokens)
        child = Node(
            _new_id(), parent, parent.position, own, parent.n_read,
            sampling.replace(seed=result.seed), parent.grammar, finish_reason(result),
        )  # fmt: skip
        service.branches.add(child)
        one = {
            **await _shown(service, child),
            "index": choice.index,
            "text": result.text,
            "tokens": result.tokens,
            "stop_reason": stop_reason(result),
        }
        if top is not None:
            details = map(detail, choice.whole.tokens)
            one["logprobs"] = service.vocabulary.chat_logprobs(details, more=True)
        shown.append(one)
    return {
        "object": "branch.children",
        "children": shown,
        "usage": usage(choices),
        "timings": total_timings(choices),
    }


async def score(call: Exchange, service: Service) -> None:
    """Rate continuations of a node; no node is added."""
    fields = await call.json(_decode_score)
    node = _named(call, service)
    if not 1 <= len(fields.continuations) <= _MOST_CONTINUATIONS:
        raise HttpError(
            400, f"give 1 to {_MOST_CONTINUATIONS} continuations", param="continuations"
        )
    top = _checked_top(fields.top_logprobs)
    tokens = node.tokens
    requests = []
    for given in fields.continuations:
        (more,) = await prompt_tokens(service, given, add_special=False)
        if not more:
            raise HttpError(400, "a continuation has no tokens", param="continuations")
        service.model.check_tokens(more)
        prompt = [*tokens, *more]
        service.check_room(prompt, 0)
        sampling = node.sampling.replace(logprobs=True)
        requests.append(
            Request(
                prompt, max_tokens=0, sampling=sampling, prompt_logprobs=top,
                logprobs_from=len(tokens),
            )
        )  # fmt: skip
    choices = await all_choices(service, requests)
    scores = []
    for choice in choices:
        found = [] if choice.result is None else choice.result.prompt_logprobs or []
        rated = [one for one in found[len(tokens) :] if one is not None]
        scores.append({
            "logprob": sum(one.logprob for one in rated),
            "tokens": [
                {
                    "id": one.token, "token": service.vocabulary.text(one.token),
                    "bytes": list(service.vocabulary.raw(one.token)), "logprob": one.logprob,
                    "rank": one.rank, "entropy": one.entropy,
                    "top": _top(service, one.alternatives),
                }
                for one in rated
            ],
        })  # fmt: skip
    await call.reply({"object": "branch.scores", "scores": scores, "usage": usage(choices)})


async def get(call: Exchange, service: Service) -> None:
    """Show a node; ``?include=tokens,next`` shows more of it."""
    node = _named(call, service)
    wanted = set(filter(None, call.query.get("include", "").split(",")))
    if wanted - {"tokens", "next"}:
        raise HttpError(400, "include takes tokens and next", param="include")
    shown = await _shown(service, node)
    if "tokens" in wanted:
        shown |= {"tokens": node.tokens, "text": service.model.detokenize(node.tokens)}
    if "next" in wanted:
        if node.next is None:
            await _look(service, node, 5)
        shown["next"] = node.next
    await call.reply(shown)


async def listing(call: Exchange, service: Service) -> None:
    """List all nodes, or those of one tree."""
    root = call.query.get("root")
    nodes = service.branches.all() if root is None else list(service.branches[root].subtree())
    shown = [await _shown(service, node, resident=False) for node in nodes]
    await call.reply({"object": "list", "data": shown})


async def delete(call: Exchange, service: Service) -> None:
    """Delete a node."""
    node = _named(call, service)
    subtree = call.query.get("subtree", "false").lower() in ("1", "true")
    n = service.branches.delete(node, subtree=subtree)
    await call.reply({"id": node.id, "object": "branch.deleted", "deleted": True, "count": n})


# -- parts -----------------------------------------------------------------------------------------


def _named(call: Exchange, service: Service) -> Node:
    return service.branches[call.path_param("id")]


def _new_id() -> str:
    return f"br-{uuid4().hex}"


def _sampling(
    service: Service, default: SamplingParams, given: SamplingFields | None, seed: int | None
) -> SamplingParams:
    """Return settings that have a seed: so a node, continued again, gives the same text."""
    fields = given or SamplingFields()
    found = fields.sampling(service.model, service.settings, default)
    if seed is not None and seed != -1:
        found = found.replace(seed=seed)
    return found if found.seed is not None else found.replace(seed=secrets.randbits(31))


def _checked_top(top: int | None) -> int | None:
    if top is not None and not 0 <= top <= _MOST_LOGPROBS:
        raise HttpError(400, f"top_logprobs must be 0 to {_MOST_LOGPROBS}", param="top_logprobs")
    return top


async def _look(service: Service, node: Node, top: int) -> Choice:
    """Find what may follow a node: one token is drawn and dropped, never one that ends the text."""
    tokens = node.tokens
    service.check_room(tokens, 1)
    banned = dict.fromkeys(service.model.eog_tokens, float("-inf"))
    sampling = SamplingParams(temperature=0.0, seed=0, logit_bias=banned)
    request = Request(tokens, max_tokens=1, sampling=sampling, top_logprobs=top)
    (choice,) = await all_choices(service, [request])
    if choice.emitted:
        first = choice.emitted[0]
        node.next = {"entropy": first.entropy, "top": _top(service, first.alternatives)}
    return choice


def _top(service: Service, alternatives: Iterable[tuple[int, float]]) -> list[dict[str, object]]:
    words = service.vocabulary
    return [
        {"id": token, "token": words.text(token), "bytes": list(words.raw(token)), "logprob": p}
        for token, p in alternatives
    ]


async def _shown(service: Service, node: Node, *, resident: bool = True) -> dict[str, object]:
    shown: dict[str, object] = {
        "id": node.id,
        "object": "branch",
        "parent": None if node.parent is None else node.parent.id,
        "root": node.root.id,
        "position": node.position,
        "fork_position": node.start,
        "children": [child.id for child in node.children],
        "seed": node.sampling.seed,
        "finish_reason": node.finish_reason,
    }
    if resident:
        tokens = node.tokens
        shown["resident"] = await service.in_thread(lambda: service.n_cached(tokens))
    if not service.is_exact:
        shown["batch_invariant"] = False
    return shown
