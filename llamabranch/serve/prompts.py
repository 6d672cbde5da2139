"""The prompts of requests as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import HttpError
from .service import Service

__all__ = ["infill", "prompt_tokens"]

_FIM = ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id")


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
    if isinstance(prompt, list) and prompt:
        if any(isinstance(each, int) and not isinstance(each, bool) for each in prompt):
            return [await _mixed(service, prompt, add_special)]
        return [await _one(service, each, add_special) for each in prompt]
    return [await _one(service, prompt, add_special)]


async def _one(service: Service, prompt: object, add_special: bool) -> list[int]:
    if isinstance(prompt, dict) and set(prompt) == {"prompt_string"}:
        prompt = prompt["prompt_string"]
    if isinstance(prompt, str):
        return await service.tokenize(prompt, add_special=add_special)
    if isinstance(prompt, list):
        return await _mixed(service, prompt, add_special)
    raise HttpError(
        400, "prompt must be a text, a list of token ids, or a list of these", param="prompt"
    )


async def _mixed(service: Service, parts: Sequence[object], add_special: bool) -> list[int]:
    tokens: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int) and not isinstance(part, bool):
            tokens.append(part)
        elif isinstance(part, str):
            tokens += await service.tokenize(part, add_special=add_special and i == 0)
        else:
            raise HttpError(400, "a prompt of tokens must hold integers and texts", param="prompt")
    if not tokens:
        raise HttpError(400, "a prompt must have at least one token", param="prompt")
    return tokens


async def infill(service: Service, prompt: list[int], suffix: str) -> list[int]:
    """Return a prompt for the text between ``prompt`` and ``suffix``."""
    known = service.model.metadata
    ids = [known.get(f"tokenizer.ggml.{name}") for name in _FIM]
    found = [int(each) for each in ids if each is not None]
    if len(found) < len(_FIM):
        raise HttpError(
            400, "suffix needs a model made to fill in text between two others", param="suffix"
        )
    before, after, middle = found
    rest = await service.tokenize(suffix, add_special=False)
    return [before, *prompt, after, *rest, middle]
