"""Requests from JSON objects: lines of a file, or rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Literal, TypedDict, cast

import msgspec
from msgspec import Meta, Struct

from ..arguments import token_key
from ..errors import ConfigError
from ..model import Message
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from ..sampling.params import SamplingSettings

__all__ = ["GRAMMARS", "RequestFields", "chosen_grammar", "request_fields"]

GRAMMARS = ("grammar", "json_schema", "regex", "choices")  # a text follows at most one of them
_EXCLUSIVE = (
    ("prompt", "messages"), ("id", "custom_id"),
    ("grammar", "json_schema", "regex", "choice", "response_format"),
)  # fmt: skip
_SETTINGS = {each.name for each in fields(SamplingParams)} - {"logprobs", "logits_processor"}
_OTHER_NAMES = {
    "max_completion_tokens": "max_tokens", "repetition_penalty": "repeat_penalty",
    "repeat_last_n": "penalty_last_n",
}  # fmt: skip
# Fields of OpenAI's API that do not change the text.
_IGNORED = {
    "model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
}  # fmt: skip

_Token = Annotated[int, Meta(ge=0, lt=2**31)]  # C's int


class RequestFields(TypedDict):
    """The arguments of `Request` that JSON can set."""

    prompt: str | Sequence[int] | Sequence[Message]
    id: str
    max_tokens: int | None
    stop: str | Sequence[str]
    n: int
    top_logprobs: int | None
    sampling: SamplingParams | None
    grammar: Grammar | None
    priority: int
    prompt_logprobs: int | None
    parse_special: bool


class _Format(Struct):
    """A ``response_format`` of OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, object] = {}

    @property
    def schema(self) -> object:
        """The schema of the text, or None if the text is free."""
        if self.type == "json_schema":
            if "schema" not in self.json_schema:
                raise ConfigError("response_format needs a json_schema with a schema")
            return self.json_schema["schema"]
        return {"type": "object"} if self.type == "json_object" else None


class _Line(Struct, forbid_unknown_fields=True):
    """The fields of a JSON object but the sampling settings; see `Request.from_json`."""

    prompt: str | list[_Token] | None = None
    messages: list[dict[str, object]] | None = None
    id: str | int | None = None
    custom_id: str | int | None = None
    max_tokens: int | None = None
    stop: str | list[str] = ""
    grammar: str | None = None
    json_schema: str | dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    response_format: _Format | None = None
    n: int = 1
    priority: int = 0
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    parse_special: bool = True
    stream: bool = False

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


def chosen_grammar(options: Mapping[str, object]) -> Grammar | None:
    """Return the one grammar among options, or None; see `GRAMMARS`.

    Raises:
        ConfigError: there are several. GrammarError: it is invalid.
    """
    grammar, schema, regex, choices = given = [options.get(name) for name in GRAMMARS]
    if sum(value is not None for value in given) > 1:
        raise ConfigError(f"use only one of {', '.join(GRAMMARS)}")
    if schema is not None:
        return Grammar.from_json_schema(cast(type, schema))  # or text, or an object
    if regex is not None:
        return Grammar.from_regex(cast(str, regex))
    if choices is not None:
        return Grammar.from_choices(cast(Sequence[str], choices))
    return Grammar(grammar) if isinstance(grammar, str) else cast("Grammar | None", grammar)


def request_fields(
    data: Mapping[str, object], name: str, sampling: SamplingParams | None
) -> RequestFields:
    """Return the arguments of the request that an object describes; see `Request.from_json`."""
    try:
        return _fields(data, name, sampling)
    except ConfigError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None


def _fields(
    data: Mapping[str, object], name: str, sampling: SamplingParams | None
) -> RequestFields:
    given: dict[str, object] = {}
    for key, value in data.items():
        name_here = _OTHER_NAMES.get(key, key)
        if value is None or key in _IGNORED:
            continue
        if given.setdefault(name_here, value) != value:
            raise ConfigError(f"{key} has two values, under this name and another; send one")
    settings = dict(_object("sampling", given.pop("sampling", {})))
    settings |= {key: given.pop(key) for key in _SETTINGS & given.keys()}
    if "logit_bias" in settings:  # keys in JSON are always text
        bias = _object("logit_bias", settings["logit_bias"])
        settings["logit_bias"] = {
            token_key("logit_bias", token): added for token, added in bias.items()
        }
    line = msgspec.convert(given, _Line)
    if settings:
        sampling = (sampling or SamplingParams()).replace(**cast(SamplingSettings, settings))
    if line.stream:
        raise ConfigError("stream is not possible in a file of requests")
    for names in _EXCLUSIVE:
        both = [each for each in names if getattr(line, each) is not None]
        if len(both) > 1:
            raise ConfigError(f"{' and '.join(both)} exclude each other")
    prompts = [given[key] for key in ("prompt", "messages") if given.get(key) not in (None, [])]
    if not prompts:
        raise ConfigError("a request needs prompt or messages")
    schema = line.response_format.schema if line.response_format else line.json_schema
    return RequestFields(
        prompt=cast("str | list[int]", prompts[0]),
        id=str(next((each for each in (line.id, line.custom_id) if each is not None), name)),
        max_tokens=line.max_tokens,
        stop=line.stop or (),
        n=line.n,
        top_logprobs=line.n_alternatives(),
        sampling=sampling,
        grammar=chosen_grammar({**given, "json_schema": schema, "choices": line.choice}),
        priority=line.priority,
        prompt_logprobs=line.prompt_logprobs,
        parse_special=line.parse_special,
    )


def _object(name: str, value: object) -> dict[str, object]:
    """Return ``value``, which must be a JSON object."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be an object, not {value!r:.60}")
    return value
