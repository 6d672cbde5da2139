"""``/completion``: llama-server's own endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict

import msgspec

from ..engine import Request
from .completions import CompletionFields
from .errors import HttpError
from .exchange import Exchange
from .fields import limit_of
from .generation import Choice, Update, all_choices, begun, detail, total_timings, updates
from .prompts import prompt_tokens
from .requests import requests_of
from .service import Service

__all__ = ["completion", "sampling_of"]

_STOPS = {"length": "limit", "capacity": "limit"}


class NativeFields(CompletionFields, kw_only=True):
    """The body of a request."""

    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    post_sampling_probs: bool | None = None


_decode = msgspec.json.Decoder(NativeFields).decode


async def completion(call: Exchange, service: Service) -> None:
    """Answer a request: an object, or a list of them for several prompts."""
    fields = await call.json(_decode)
    if fields.post_sampling_probs:
        raise HttpError(400, "post_sampling_probs is not supported", param="post_sampling_probs")
    prompts = await prompt_tokens(service, fields.prompt)
    limit = limit_of(fields.max_tokens if fields.n_predict is None else fields.n_predict)
    default = service.settings.max_tokens
    if fields.n_predict is None and fields.max_tokens is None:
        limit = default
    top = fields.n_probs or None
    requests = await requests_of(
        service, fields, prompts, n=fields.n or 1, max_tokens=limit, top_logprobs=top
    )
    if fields.stream:
        await _stream(call, service, fields, requests, limit)
        return
    choices = await all_choices(service, requests)
    found = [_body(service, fields, choice.whole, limit) for choice in choices]
    if fields.response_fields:
        found = [_selected(each, fields.response_fields) for each in found]
    await call.reply(found[0] if len(found) == 1 else found)


async def _stream(
    call: Exchange,
    service: Service,
    fields: NativeFields,
    requests: Sequence[Request],
    limit: int | None,
) -> None:
    async with aclosing(await begun(updates(service, requests))) as steps:
        await call.start_stream()
        async for step in steps:
            events: list[dict[str, object]] = []
            for update in step:
                events += [
                    _part(service, fields, update.choice, Update(update.choice, 0, [one]))
                    for one in update.fresh
                    if one.token >= 0
                ]
                if update.result is not None:
                    end = Update(update.choice, 0, [], update.result)
                    events.append(_body(service, fields, end, limit))
            await call.event(*events)
        await call.end_stream()


def _part(
    service: Service, fields: NativeFields, choice: Choice, update: Update
) -> dict[str, object]:
    found: dict[str, object] = {
        "index": choice.index,
        "content": update.text,
        "tokens": [token.token for token in update.tokens],
        "stop": False,
        "id_slot": -1,
    }
    if fields.n_probs:
        details = map(detail, update.tokens)
        found["completion_probabilities"] = service.vocabulary.chat_logprobs(details, more=False)
    return found


def _body(
    service: Service, fields: NativeFields, update: Update, limit: int | None
) -> dict[str, object]:
    choice, result = update.choice, update.result
    if result is None:
        raise HttpError(500, "internal error: a text has no end")
    found = _part(service, fields, choice, update)
    if not fields.return_tokens:
        found["tokens"] = []
    reason = "word" if isinstance(result.stop_reason, str) else "eos"
    ids = [token for token in choice.request.prompt if isinstance(token, int)]
    params = choice.request.sampling
    found |= {
        "stop": True,
        "model": service.names[0],
        "tokens_predicted": len(result.tokens),
        "tokens_evaluated": result.num_prompt_tokens,
        "tokens_cached": result.num_cached_tokens,
        "generation_settings": {
            **({} if params is None else sampling_of(service, asdict(params))),
            "seed": result.seed,
            "n_predict": -1 if limit is None else limit,
            "max_tokens": -1 if limit is None else limit,
            "stop": list(fields.stops),
        },
        "prompt": service.model.detokenize(ids, special=True),
        "has_new_line": "\n" in result.text,
        "truncated": False,
        "stop_type": _STOPS.get(result.finish_reason, reason),
        "stopping_word": result.stop_reason if isinstance(result.stop_reason, str) else "",
        "timings": total_timings([choice]),
    }
    return found


def sampling_of(service: Service, params: dict[str, object]) -> dict[str, object]:
    """Return sampling settings by llama-server's names."""
    renamed = {"penalty_last_n": "repeat_last_n"}
    found = {renamed.get(name, name): value for name, value in params.items()}
    found["logit_bias"] = [
        {"id": token, "bias": bias} for token, bias in service.settings.sampling.logit_bias.items()
    ]
    return found


def _selected(body: dict[str, object], wanted: Sequence[str]) -> dict[str, object]:
    """Return the fields of ``wanted``, where ``a/b`` is a field of a field."""
    found: dict[str, object] = {}
    for path in wanted:
        value: object = body
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found
