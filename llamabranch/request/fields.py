"""The fields of requests in JSON: bodies of HTTP requests, lines of a file, rows of a table.

msgspec checks types and ranges. The names are OpenAI's and the library's own. Unsupported fields of
other programs that would change a text are refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, TypedDict, cast, get_type_hints

import msgspec
from msgspec import Meta, Struct, defstruct

from ..arguments import placed, token_key
from ..errors import ConfigError
from ..model import Message, Model
from ..sampling import SamplingParams, SamplingSettings
from ..sampling.grammar import Grammar

DEFAULT_TTL_S = 600.0  # how long a session is kept after its last request
_ID = re.compile(r"-?[0-9]+")
# Fields of OpenAI's API that do not change the text.
_IGNORED = {
    "model", "user", "metadata", "store", "stream", "stream_options", "service_tier",
    "prompt_cache_key", "safety_identifier",
}  # fmt: skip
_Limit = Annotated[int, Meta(ge=-2)]  # of tokens; -1 and -2 mean no limit
_Number = Annotated[int, Meta(ge=0)]
_Token = Annotated[int, Meta(ge=0, lt=2**31)]  # C's int

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
    if name not in ("logit_bias", "logprobs", "logits_processor")
} | {"seed": object}  # `SamplingParams` checks the seed
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

    def check(self) -> None:
        """Raise ConfigError if the request has an unsupported field."""
        for name, instead in _REFUSED.items():
            if getattr(self, name) not in (None, False, "", [], {}):
                more = f": use {instead}" if instead else ""
                raise ConfigError(f"{name} is not supported{more}")

    def sampling(self, base: SamplingParams, model: Model | None = None) -> SamplingParams:
        """Return the settings.

        Args:
            base: the values of settings that are left out.
            model: reads the texts in ``logit_bias``; None = only token ids are allowed.

        Raises:
            ConfigError, TokenizeError: a value is out of range, or a setting is not supported.
        """
        self.check()
        changes: dict[str, object] = {
            name: value for name in _SAME if (value := getattr(self, name)) is not None
        }
        if self.top_k is not None:
            changes["top_k"] = max(0, self.top_k)
        if self.logit_bias or self.ignore_eos:
            changes["logit_bias"] = {**base.logit_bias, **self._bias(model)}
        return base.replace(**cast(SamplingSettings, changes)) if changes else base

    def _bias(self, model: Model | None) -> dict[int, float]:
        entries = self.logit_bias or {}
        bias: dict[int, float] = {}
        for key, value in entries.items() if isinstance(entries, dict) else entries:
            added = -math.inf if value is False else float(value)  # false = never this token
            if model is None or isinstance(key, int) or _ID.fullmatch(key):
                tokens = [token_key("logit_bias", key)]
            else:
                tokens = model.tokenize(key, add_special=False)
            if model is not None:
                model.check_tokens(tokens)
            bias |= dict.fromkeys(tokens, added)
        if self.ignore_eos and model is None:
            raise ConfigError("ignore_eos is not possible here", hint="set min_tokens")
        eog_tokens = model.eog_tokens if model is not None and self.ignore_eos else ()
        return bias | dict.fromkeys(eog_tokens, -math.inf)


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
            raise ConfigError(
                f"response_format.type is text, json_object or json_schema, not {self.type[:40]!r}"
            )
        schema = self.schema if self.json_schema is None else self.json_schema.schema
        if schema is None:
            raise ConfigError("response_format lacks its schema")
        return schema


class RequestFields(TypedDict):
    """Arguments of `Request`, and options of ``complete``."""

    min_tokens: int
    sampling: SamplingParams | None
    stop: Sequence[str]
    stop_tokens: Sequence[int]
    n: int
    priority: int
    session_id: str | None
    parent_session_id: str | None
    ttl: float


class TextFields(SamplingFields, kw_only=True):
    """The fields of all requests for a text."""

    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    stop_tokens: list[int] | None = None
    min_tokens: int | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, object] | str | None = None
    grammar: str | None = None
    regex: str | None = None
    choices: list[str] | None = None
    priority: int | None = None
    session_id: str | None = None
    parent_session_id: str | None = None
    ttl: float | None = None

    def limit(self, *otherwise: int | None) -> int | None:
        """Return the token limit, or the first of ``otherwise`` that is set; None = no limit.

        Raises:
            ConfigError: the two names of the limit have different values.
        """
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and limits[0] != limits[1]:
            raise ConfigError("max_tokens has two values, under this name and another; send one")
        first = next((limit for limit in (*limits, *otherwise) if limit is not None), -1)
        return None if first < 0 else first

    def arguments(self, base: SamplingParams, model: Model | None = None) -> RequestFields:
        """Return arguments of a request; ``base`` and ``model``: see ``sampling``.

        Raises:
            ConfigError, TokenizeError: a value is out of range, or a setting is not supported.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "min_tokens": self.min_tokens or 0,
            "sampling": self.sampling(base, model),
            "stop": [text for text in stop if text],
            "stop_tokens": self.stop_tokens or (),
            "n": self.n or 1,
            "priority": self.priority or 0,
            "session_id": self.session_id,
            "parent_session_id": self.parent_session_id,
            "ttl": DEFAULT_TTL_S if self.ttl is None else self.ttl,
        }

    def text_grammar(self) -> Grammar | None:
        """Return the grammar of the text, or None. Compiling it can take a long time.

        Raises:
            GrammarError, ConfigError: it is invalid, or there is more than one. The message begins
                with the name of the field.
        """
        form = self.response_format
        given = {
            "grammar": ("gbnf", self.grammar or None),
            "json_schema": ("json_schema", self.json_schema),
            "regex": ("regex", self.regex),
            "choices": ("choice", self.choices),
            "response_format": ("json_schema", form and form.asked()),
        }
        asked = [(name, kind, value) for name, (kind, value) in given.items() if value is not None]
        if len(asked) > 1:
            names = " and ".join(name for name, _, _ in asked)
            raise ConfigError(f"{names} exclude each other: use one of {', '.join(given)}")
        for name, kind, value in asked:
            with placed(name):
                return _compiled(value if isinstance(value, str) else json.dumps(value), kind)
        return None


_compiled = lru_cache(maxsize=64)(Grammar)


class LineFields(TextFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of a line of a file, or of a row of a table; see `Request.from_json`."""

    max_tokens: _Number | None = None  # a request cannot say "no limit"
    max_completion_tokens: _Number | None = None
    prompt: str | list[_Token] | None = None
    messages: list[dict[str, object]] | None = None
    id: str | int | None = None
    custom_id: str | int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    parse_special: bool | None = None

    def n_alternatives(self) -> int | None:
        """Return how many alternatives each token lists, or None for no log-probabilities.

        ``logprobs`` is either a number, as in vLLM, or true, as in OpenAI's chat API, where
        ``top_logprobs`` is the number.
        """
        if isinstance(self.logprobs, bool):
            return self.top_logprobs or 0 if self.logprobs else None
        if self.logprobs is not None and self.top_logprobs is not None:
            raise ConfigError("with top_logprobs, logprobs must be true or false")
        return self.top_logprobs if self.logprobs is None else self.logprobs

    def asked(self) -> str | Sequence[int] | Sequence[Message]:
        """Return the prompt or the messages.

        Raises:
            ConfigError: there is neither, or there are both.
        """
        prompts = [each for each in (self.prompt, self.messages) if each not in (None, [])]
        if len(prompts) != 1:
            raise ConfigError("a request needs prompt or messages, and not both")
        return cast("str | Sequence[int] | Sequence[Message]", prompts[0])

    def name(self, otherwise: str) -> str:
        """Return the id, or ``otherwise`` without one.

        Raises:
            ConfigError: there are two.
        """
        names = [str(each) for each in (self.id, self.custom_id) if each is not None]
        if len(names) > 1:
            raise ConfigError("id and custom_id exclude each other")
        return names[0] if names else otherwise


def line_of(data: Mapping[str, object]) -> LineFields:
    """Return the fields of an object; values of None count as left out.

    Raises:
        ConfigError: a field is unknown, or of the wrong type.
    """
    given = {key: value for key, value in data.items() if value is not None}
    try:
        return msgspec.convert({k: v for k, v in given.items() if k not in _IGNORED}, LineFields)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None
