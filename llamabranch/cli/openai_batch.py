"""OpenAI's batch files: requests in an envelope of ``custom_id`` and ``body``, and their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, cast

from llamabranch import ConfigError, Request

if TYPE_CHECKING:
    from llamabranch import Result

__all__ = ["BatchRequest", "answer", "is_envelope", "open_envelope"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_ENVELOPE = {"custom_id", "method", "url", "body"}
_SAME = ("messages", "prompt", "n", "stop", "seed", "logprobs", "top_logprobs", "max_tokens")
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "repetition_penalty": "repeat_penalty",  # vLLM's name
}
# What changes no text here: there is one model, and no account.
_IGNORED = {
    "model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
}  # fmt: skip
_FINISH = {"stop": "stop", "length": "length", "capacity": "length"}


@dataclass(frozen=True)
class BatchRequest(Request):
    """A request that came in an envelope; ``url`` tells whether it is a chat or a completion."""

    url: str = CHAT

    @classmethod
    def of(cls, request: Request, url: str) -> BatchRequest:
        """Return ``request`` as one that came in an envelope."""
        given = {field.name: getattr(request, field.name) for field in fields(Request)}
        return cls(**given, url=url)


def is_envelope(data: Mapping[str, object]) -> bool:
    """Return whether an object is a line of an OpenAI batch file, not a request of our own shape."""
    return "body" in data or "url" in data


def open_envelope(data: Mapping[str, object]) -> tuple[dict[str, object], str]:
    """Return the fields of a request of our own shape, and the URL.

    Raises:
        ConfigError: no envelope, another method or URL, or a field of the body that is not supported.
    """
    unknown = sorted(set(data) - _ENVELOPE)
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r} beside body")
    body, name, url = data.get("body"), data.get("custom_id"), data.get("url")
    if not isinstance(body, dict):
        raise ConfigError("body must be an object")
    if not isinstance(name, str):
        raise ConfigError(f"custom_id must be text, not {name!r:.40}")
    if data.get("method", "POST") != "POST":
        raise ConfigError(f"method must be POST, not {data['method']!r:.40}")
    if url not in (CHAT, COMPLETIONS):
        raise ConfigError(f"url must be {CHAT} or {COMPLETIONS}, not {url!r:.60}")
    needed = "messages" if url == CHAT else "prompt"
    if body.get(needed) is None:
        raise ConfigError(f"the body of {url} needs {needed}")
    return {"custom_id": name, **_fields(body)}, url


def _fields(body: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    sampling: dict[str, object] = {}
    for name, value in body.items():
        if value is None or name in _IGNORED or (name == "stream" and value is False):
            continue
        if name in _SAME:
            found[name] = value
        elif name in _SAMPLING:
            sampling[_SAMPLING[name]] = value
        elif name == "max_completion_tokens":
            if body.get("max_tokens") is not None:
                raise ConfigError("max_tokens and max_completion_tokens exclude each other")
            found["max_tokens"] = value
        elif name == "response_format":
            found.update(_schema(value))
        else:
            raise ConfigError(f"the field {name!r} of a body is not supported")
    return {**found, "sampling": sampling}


def _schema(given: object) -> dict[str, object]:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(given, dict) and kind == "json_schema":
        named = given.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if isinstance(schema, dict):
            return {"json_schema": schema}
    elif kind == "json_object":
        return {"json_schema": {"type": "object"}}
    elif kind == "text":
        return {}
    raise ConfigError(f"response_format is text, json_object or a json_schema, not {given!r:.60}")


def answer(
    request: BatchRequest, results: Sequence[Result], model: str, piece: Callable[[int], bytes]
) -> dict[str, object]:
    """Return the line of OpenAI's output file for the texts of one request.

    Args:
        results: all of them; an error is that of the first that has one. ``response`` is None if no text
            has a token then.
        model: its name.
        piece: gives the bytes of a token.
    """
    results = sorted(results, key=lambda result: result.sample)
    error = next((result.error for result in results if result.error is not None), None)
    response: dict[str, object] | None = None
    if error is None or any(result.tokens for result in results):
        is_chat = request.url == CHAT
        n_prompt, n_generated = results[0].num_prompt_tokens, sum(len(r.tokens) for r in results)
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request.id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [_choice(result, is_chat, piece) for result in results],
            "usage": {
                "prompt_tokens": n_prompt,
                "completion_tokens": n_generated,
                "total_tokens": n_prompt + n_generated,
            },
        }
        response = {"status_code": 200, "request_id": f"req_{request.id}", "body": body}
    failed = None if error is None else {"code": type(error).__name__, "message": str(error)}
    return {
        "id": f"batch_req_{request.id}",
        "custom_id": request.id,
        "response": response,
        "error": failed,
    }


def _choice(result: Result, is_chat: bool, piece: Callable[[int], bytes]) -> dict[str, object]:
    text: dict[str, object] = {"text": result.text}
    if is_chat:
        text = {"message": {"role": "assistant", "content": result.text}}
    details = cast("list[dict[str, object]] | None", result.as_dict(stats=False).get("logprobs"))
    logprobs: dict[str, object] | None = None
    if details is not None:
        tokens = [_token(piece, one["token"], one["logprob"]) for one in details]
        alternatives = [
            [_token(piece, *each[:2]) for each in cast("list[list[object]]", one["alternatives"])]
            for one in details
        ]
        if is_chat:
            logprobs = {
                "content": [
                    {**token, "top_logprobs": others}
                    for token, others in zip(tokens, alternatives, strict=True)
                ]
            }
        else:
            logprobs = {
                "tokens": [token["token"] for token in tokens],
                "token_logprobs": [token["logprob"] for token in tokens],
                "top_logprobs": [
                    {str(each["token"]): each["logprob"] for each in others}
                    for others in alternatives
                ],
            }
    finish = _FINISH.get(result.finish_reason, "length")
    return {"index": result.sample, **text, "logprobs": logprobs, "finish_reason": finish}


def _token(piece: Callable[[int], bytes], token: object, logprob: object) -> dict[str, object]:
    data = piece(cast(int, token))
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
