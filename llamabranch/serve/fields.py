"""The fields of requests, converted to options of a call: settings, grammars, token ids.

msgspec checks types and ranges. The names are OpenAI's and the library's own. Unknown fields are ignored;
so are OpenAI's fields that do not change a text (``user``, ``store``, ``metadata``, ...). Unsupported
fields that would change a text are refused by name.
"""

from __future__ import annotations

import json
import math
import re
from asyncio import to_thread
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, cast, get_type_hints

from msgspec import Meta, Struct, defstruct

from ..arguments import token_key
from ..engine.completion import Completion, TextOptions
from ..errors import CacheFullError, LlamaBranchError
from ..model import Model
from ..sampling import SamplingParams, SamplingSettings
from ..sampling.grammar import Grammar
from .errors import HttpError, http_error
from .service import Service
from .settings import ServeSettings

__all__ = [
    "Limit", "Prompt", "SamplingFields", "TextFields", "Top", "limit_of",
    "planned", "prompt_tokens",
]  # fmt: skip

_ID = re.compile(r"-?[0-9]+")

Limit = Annotated[int, Meta(ge=-2)]  # of tokens; -1 and -2 mean no limit
Top = Annotated[int, Meta(ge=0, le=20)]  # how many of the most probable tokens are reported


_Parts = Annotated[list[int | str], Meta(min_length=1)]
Prompt = str | Annotated[list[int | str | _Parts], Meta(min_length=1)]


# Unsupported fields that would change a text, and what to use instead.
_REFUSED = {
    **dict.fromkeys(("functions", "function_call"), "tools"),
    **dict.fromkeys(("guided_json", "structured_outputs"), "json_schema, regex, choices or grammar"),
    "guided_regex": "regex", "guided_choice": "choices", "guided_grammar": "grammar",
    "repetition_penalty": "repeat_penalty", "stop_token_ids": "stop_tokens", "n_predict": "max_tokens",
    **dict.fromkeys(
        ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget"), "thinking"
    ),
    **dict.fromkeys(("bad_words", "allowed_token_ids"), "logit_bias"),
    **dict.fromkeys(("audio", "web_search_options", "suffix", "use_beam_search", "mirostat"), ""),
}  # fmt: skip
# Settings with the same name in requests and in SamplingParams.
_SAME = {
    name: kind
    for name, kind in get_type_hints(SamplingSettings).items()
    if name not in ("logit_bias", "seed", "logprobs", "logits_processor")
}
if TYPE_CHECKING:
    _Named = Struct
else:
    _Named = defstruct(
        "_Named",
        [(name, object, None) for name in _REFUSED]
        + [(name, kind | None, None) for name, kind in _SAME.items()],
        kw_only=True,
        omit_defaults=True,
    )


class SamplingFields(_Named, kw_only=True):
    """How tokens are drawn."""

    top_k: int | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None

    def check(self) -> None:
        """Raise HttpError if the request has an unsupported field."""
        for name, instead in _REFUSED.items():
            if getattr(self, name) not in (None, False, "", [], {}):
                more = f": use {instead}" if instead else ""
                raise HttpError(400, f"{name} is not supported{more}", param=name)

    def sampling(self, model: Model, settings: ServeSettings) -> SamplingParams:
        """Return the settings; missing ones are taken from the server.

        Raises:
            ConfigError, HttpError: a value is out of range, or a setting is not supported.
        """
        self.check()
        base = settings.sampling
        changes: dict[str, object] = {
            name: value for name in _SAME if (value := getattr(self, name)) is not None
        }
        if self.top_k is not None:
            changes["top_k"] = max(0, self.top_k)
        if self.logit_bias or self.ignore_eos:
            changes["logit_bias"] = {**base.logit_bias, **self._bias(model)}
        if self.seed is not None:
            changes["seed"] = self.seed
        elif base.seed is None and settings.seed is not None:
            changes["seed"] = settings.seed
        return base.replace(**cast(SamplingSettings, changes)) if changes else base

    def _bias(self, model: Model) -> dict[int, float]:
        entries = self.logit_bias or {}
        bias: dict[int, float] = {}
        for key, value in entries.items() if isinstance(entries, dict) else entries:
            added = -math.inf if value is False else float(value)  # false = never this token
            if isinstance(key, int) or _ID.fullmatch(key):
                tokens = [key if isinstance(key, int) else token_key("logit_bias", key)]
            else:
                tokens = model.tokenize(key, add_special=False)
            model.check_tokens(tokens)
            bias |= dict.fromkeys(tokens, added)
        return bias | dict.fromkeys(model.eog_tokens if self.ignore_eos else (), -math.inf)


class JsonSchema(Struct, kw_only=True):
    """OpenAI's description of a schema, which also has a name."""

    schema: dict[str, object] | bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """OpenAI's format; a schema may also be next to the type."""

    type: str
    json_schema: JsonSchema | None = None
    schema: dict[str, object] | None = None

    def asked(self) -> object:
        """Return the requested schema; None for free text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"} if self.schema is None else self.schema
        if self.type != "json_schema":
            message = (
                f"response_format.type is text, json_object or json_schema, not {self.type[:40]!r}"
            )
            raise HttpError(400, message, param="response_format")
        schema = self.schema if self.json_schema is None else self.json_schema.schema
        if schema is None:
            raise HttpError(400, "response_format lacks its schema", param="response_format")
        return schema


class StreamOptions(Struct, kw_only=True):
    """OpenAI's."""

    include_usage: bool | None = None


class TextFields(SamplingFields, kw_only=True):
    """The fields of all requests for a text."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    stop_tokens: list[int] | None = None
    min_tokens: int | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, object] | None = None
    grammar: str | None = None
    regex: str | None = None
    choices: list[str] | None = None
    token_details: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings without empty ones."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(text for text in texts if text)

    def options(
        self, service: Service, max_tokens: int | None, top_logprobs: int | None
    ) -> TextOptions:
        """Return the fields as options of ``Context.complete``, without a grammar.

        Raises:
            ConfigError, HttpError: a value is out of range, or a setting is not supported.
        """
        params = self.sampling(service.model, service.settings)
        return {
            "max_tokens": max_tokens,
            "min_tokens": self.min_tokens or 0,
            "sampling": params.replace(logprobs=top_logprobs is not None),
            "stop": self.stops,
            "stop_tokens": self.stop_tokens or (),
            "n": self.n or 1,
            "priority": self.priority or 0,
            "top_logprobs": top_logprobs,
        }

    async def text_grammar(self) -> Grammar | None:
        """Return the grammar of the text, or None.

        Raises:
            GrammarError, ConfigError, HttpError: it is invalid, or there is more than one.
        """
        form = self.response_format
        candidates: list[tuple[str, str, object]] = [
            ("response_format", "json_schema", form and form.asked()),
            ("json_schema", "json_schema", self.json_schema),
            ("grammar", "gbnf", self.grammar or None),
            ("regex", "regex", self.regex),
            ("choices", "choice", self.choices),
        ]
        forms = [f for f in candidates if f[2] is not None]
        if len(forms) > 1:
            message = "use only one of response_format, json_schema, grammar, regex and choices"
            raise HttpError(400, message, param="grammar")
        for name, kind, source in forms:
            text = source if isinstance(source, str) else json.dumps(source)
            try:
                return await to_thread(_compiled, text, kind)
            except LlamaBranchError as error:
                raise http_error(error, param=name) from None
        return None


_compiled = lru_cache(maxsize=64)(Grammar)


def limit_of(*limits: int | None) -> int | None:
    """Return the first token limit that is set, or None for no limit."""
    first = next((limit for limit in limits if limit is not None), -1)
    return None if first < 0 else first


async def planned(service: Service, plan: Callable[[], Completion], param: str) -> Completion:
    """Return the checked call of a request; it has one of the engine's requests for each prompt.

    Args:
        service: the model, and its limits.
        plan: checks the call: ``plan_texts`` or ``plan_chat``.
        param: the field that has the prompts.

    Raises:
        HttpError, LlamaBranchError: something is invalid or too large.
    """
    try:
        call = await to_thread(plan)
    except CacheFullError as error:
        raise HttpError(400, error.message, param=param) from None
    n, most = call.requests[0].n, service.settings.max_choices
    if len(call.requests) * n > most:
        message = f"{len(call.requests)} prompts with {n} texts each; 1 to {most} are allowed"
        one = f"n must be 1 to {most}"
        raise HttpError(400, message if len(call.requests) > 1 else one, param="n")
    for request in call.requests:
        service.check_room(cast(Sequence[int], request.prompt), request.max_tokens, param)
    return call


async def prompt_tokens(
    service: Service, prompt: Prompt, *, add_special: bool = True, parse_special: bool = True
) -> list[list[int]]:
    """Return the token ids of a request's prompts.

    A prompt is a text, token ids, or a list of these, also mixed. Token ids are used as they are.

    Raises:
        HttpError, TokenizeError: a list is inside a list of token ids, or the vocabulary cannot write a
            text.
    """
    is_single = not isinstance(prompt, list) or any(isinstance(part, int) for part in prompt)
    prompts = []
    for item in [prompt] if is_single or not isinstance(prompt, list) else prompt:
        tokens: list[int] = []
        for i, part in enumerate(item if isinstance(item, list) else [item]):
            if isinstance(part, list):
                raise HttpError(400, "prompt mixes token ids and lists of them", param="prompt")
            if isinstance(part, int):
                tokens.append(part)
                continue
            add = add_special and i == 0
            tokens += await service.tokenize(part, add_special=add, parse_special=parse_special)
        prompts.append(tokens)
    return prompts
