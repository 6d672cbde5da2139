"""From the fields of a request to the engine's requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ..engine import Request
from .errors import HttpError
from .fields import TextFields, compiled
from .service import Service

__all__ = ["requests_of"]


async def requests_of(
    service: Service,
    fields: TextFields,
    prompts: Sequence[Sequence[int]],
    *,
    n: int,
    max_tokens: int | None,
    top_logprobs: int | None,
    prompt_logprobs: int | None = None,
    rates: bool = False,
    grammar: Mapping[str, object] | None = None,
) -> list[Request]:
    """Return the engine's requests, one for each prompt.

    Args:
        service: the model and the limits.
        fields: of the request.
        prompts: token ids.
        n: texts of each prompt.
        max_tokens, top_logprobs, prompt_logprobs: as for ``Request``.
        rates: log-probabilities are needed, whether they are told or not.
        grammar: a JSON schema in place of what the fields ask for.

    Raises:
        HttpError, LlamaBranchError: something is invalid, or too much.
    """
    settings = service.settings
    if len(prompts) * n > settings.max_choices:
        raise HttpError(
            400,
            f"{len(prompts)} prompts with {n} texts each; a request may have {settings.max_choices}",
            param="n",
        )
    if fields.min_tokens:
        raise HttpError(400, "min_tokens is not supported: use ignore_eos", param="min_tokens")
    for prompt in prompts:
        service.model.check_tokens(prompt)
        service.check_room(prompt, max_tokens)
    params = fields.sampling(service.model, settings)
    if grammar is None:
        found = await service.in_thread(fields.text_grammar) if _has_grammar(fields) else None
    else:
        found = await service.in_thread(
            lambda: compiled("json_schema", msgspec.json.encode(grammar).decode())
        )
    params = params.replace(logprobs=top_logprobs is not None or rates)
    return [
        Request(
            list(prompt),
            max_tokens=service.n_ctx if max_tokens is None else max_tokens,
            sampling=params,
            stop=fields.stops,
            stop_tokens=fields.stop_token_ids or (),
            grammar=found,
            n=n,
            priority=fields.priority or 0,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        for prompt in prompts
    ]


def _has_grammar(fields: TextFields) -> bool:
    given = (fields.response_format, fields.json_schema, fields.structured_outputs)
    return bool(fields.grammar) or any(each is not None for each in given)
