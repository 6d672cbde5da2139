"""From the fields of a request to token ids and the engine's requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ..engine import Request
from .errors import HttpError
from .fields import TextFields, compiled
from .service import Service

__all__ = ["check_top", "engine_requests", "infill", "prompt_tokens"]

_MOST_LOGPROBS = 20
_FIM = ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id")


def check_top(top: int | None, name: str = "top_logprobs") -> int | None:
    """Return how many of the most probable tokens are asked for.

    Raises:
        HttpError: too many, or a negative number.
    """
    if top is not None and not 0 <= top <= _MOST_LOGPROBS:
        raise HttpError(400, f"{name} must be 0 to {_MOST_LOGPROBS}, not {top}", param=name)
    return top


async def engine_requests(
    service: Service,
    fields: TextFields,
    prompts: Sequence[Sequence[int]],
    *,
    n: int,
    max_tokens: int | None,
    top_logprobs: int | None,
    prompt_logprobs: int | None = None,
    rates: bool = False,
    schema: Mapping[str, object] | None = None,
) -> list[Request]:
    """Return the engine's requests, one for each prompt.

    Args:
        service, fields, prompts: the model, the request, its prompts.
        n: texts of each prompt.
        max_tokens, top_logprobs, prompt_logprobs: as for ``Request``; None = no limit.
        rates: log-probabilities are needed, whether they are told or not.
        schema: a JSON schema in place of what the fields ask for.

    Raises:
        HttpError, LlamaBranchError: something is invalid, or too much.
    """
    settings, model = service.settings, service.model
    if n < 1 or len(prompts) * n > settings.max_choices:
        told = (
            f"{len(prompts)} prompts with {n} texts each; 1 to {settings.max_choices} are allowed"
        )
        raise HttpError(400, told, param="n")
    if fields.min_tokens:
        raise HttpError(400, "min_tokens is not supported: use ignore_eos", param="min_tokens")
    for prompt in prompts:
        model.check_tokens(prompt)
        service.check_room(prompt, max_tokens)
    params = fields.sampling(model, settings)
    grammar = None
    if schema is not None:
        source = msgspec.json.encode(schema).decode()
        grammar = await service.in_thread(lambda: compiled("json_schema", source))
    elif fields.grammars():
        grammar = await service.in_thread(fields.text_grammar)
    return [
        Request(
            list(prompt),
            max_tokens=service.n_ctx if max_tokens is None else max_tokens,
            sampling=params.replace(logprobs=top_logprobs is not None or rates),
            stop=fields.stops,
            stop_tokens=fields.stop_token_ids or (),
            grammar=grammar,
            n=n,
            priority=fields.priority or 0,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        for prompt in prompts
    ]


async def prompt_tokens(
    service: Service, prompt: object, *, add_special: bool = True
) -> list[list[int]]:
    """Return the token ids of a request's prompts.

    A prompt is a text, token ids, or a list of these; llama-server's lists that mix both for one prompt
    and its ``{"prompt_string": ...}`` too. Token ids are used as they are.

    Raises:
        HttpError: something else.
        TokenizeError: a text that the vocabulary cannot write.
    """
    several = isinstance(prompt, list) and prompt and not any(map(_is_id, prompt))
    prompts = prompt if several and isinstance(prompt, list) else [prompt]
    return [await _one(service, each, add_special) for each in prompts]


def _is_id(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


async def _one(service: Service, prompt: object, add_special: bool) -> list[int]:
    parts = prompt if isinstance(prompt, list) else [prompt]
    tokens: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, dict) and set(part) == {"prompt_string"}:
            part = part["prompt_string"]
        if isinstance(part, str):
            tokens += await service.tokenize(part, add_special=add_special and i == 0)
        elif isinstance(part, int) and _is_id(part) and isinstance(prompt, list):
            tokens.append(part)
        else:
            told = "prompt must be a text, a list of token ids, or a list of these"
            raise HttpError(400, told, param="prompt")
    if not parts:
        raise HttpError(400, "a prompt of token ids must have one at least", param="prompt")
    return tokens


async def infill(service: Service, prompt: list[int], suffix: str) -> list[int]:
    """Return a prompt for the text between ``prompt`` and ``suffix``.

    Raises:
        HttpError: the vocabulary has no tokens for that.
    """
    known = service.model.metadata
    ids = [known.get(f"tokenizer.ggml.{name}") for name in _FIM]
    if None in ids:
        told = "suffix needs a model that was made to fill in text between two others"
        raise HttpError(400, told, param="suffix")
    before, after, middle = (int(each or 0) for each in ids)
    rest = await service.tokenize(suffix, add_special=False)
    return [before, *prompt, after, *rest, middle]
