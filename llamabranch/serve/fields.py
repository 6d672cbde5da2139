"""The fields of requests, and the sampling settings and grammars that they mean.

Unknown fields are ignored, as by llama-server and vLLM; so are those of OpenAI that do not change a text
(``user``, ``store``, ``metadata``, ...). Others that would, and are not offered, are refused by name.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache

from msgspec import Struct

from ..model import Model
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from .errors import HttpError
from .settings import ServeSettings

__all__ = ["SamplingFields", "StructuredOutputs", "TextFields", "compiled", "limit_of"]

_SAME = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability",
    "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "repeat_penalty", "presence_penalty",
    "frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "min_keep",
)  # fmt: skip
_ID = re.compile(r"-?[0-9]{1,10}")
_OTHERS = {"repetition_penalty": "repeat_penalty", "repeat_last_n": "penalty_last_n"}


class SamplingFields(Struct, kw_only=True):
    """How tokens are drawn: OpenAI's, llama-server's and vLLM's names."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    min_keep: int | None = None
    mirostat: int | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None

    def sampling(
        self, model: Model, settings: ServeSettings, default: SamplingParams | None = None
    ) -> SamplingParams:
        """Return the settings; what is not given is ``default``'s, else the server's.

        Raises:
            ConfigError: a value out of range.
            HttpError: a setting that is not offered.
        """
        if self.mirostat:
            raise HttpError(400, "mirostat is not supported", param="mirostat")
        base = default or settings.sampling
        names = {**{name: name for name in _SAME}, **_OTHERS}
        given = {
            ours: value
            for name, ours in names.items()
            if (value := getattr(self, name)) is not None
        }
        if isinstance(given.get("top_k"), int) and given["top_k"] < 0:
            given["top_k"] = 0
        if self.logit_bias or self.ignore_eos:
            bias = {**base.logit_bias, **self._bias(model)}
            if self.ignore_eos:
                bias.update(dict.fromkeys(model.eog_tokens, -math.inf))
            given["logit_bias"] = bias
        if self.seed is not None and self.seed != -1:
            given["seed"] = self.seed
        elif base.seed is None and settings.seed is not None and self.seed is None:
            given["seed"] = settings.seed
        return base.replace(**given) if given else base

    def _bias(self, model: Model) -> dict[int, float]:
        given = self.logit_bias or {}
        found: dict[int, float] = {}
        for key, value in given.items() if isinstance(given, dict) else given:
            added = -math.inf if value is False else float(value)  # false: never
            if isinstance(key, int) or _ID.fullmatch(key):
                tokens = [int(key)]
            else:
                tokens = model.tokenize(key, add_special=False)
            model.check_tokens(tokens)
            found |= dict.fromkeys(tokens, added)
        return found


class JsonSchema(Struct, kw_only=True):
    """OpenAI's description of a schema."""

    schema: dict[str, object] | bool | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """OpenAI's, and llama-server's with ``schema`` beside the type."""

    type: str
    json_schema: JsonSchema | None = None
    schema: dict[str, object] | None = None


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's: one of these."""

    json: dict[str, object] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(Struct, kw_only=True):
    """OpenAI's."""

    include_usage: bool | None = None


class TextFields(SamplingFields, kw_only=True):
    """What all requests for a text have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, object] | None = None
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    timings_per_token: bool | None = None
    token_details: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    verbose: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; empty ones, which llama-server's clients send, end nothing."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(text for text in given if text)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def grammars(self) -> list[tuple[str, str]]:
        """Return the kind and the source of each grammar that is asked for.

        Raises:
            HttpError: an unknown type of format, or one without its schema.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        asked: list[tuple[str, object]] = [
            ("json_schema", self._format()), ("json_schema", self.json_schema),
            ("gbnf", self.grammar or None), ("json_schema", outputs.json),
            ("regex", outputs.regex), ("choice", outputs.choice), ("gbnf", outputs.grammar),
        ]  # fmt: skip
        return [
            (kind, source if isinstance(source, str) else json.dumps(source))
            for kind, source in asked
            if source is not None
        ]

    def _format(self) -> object:
        """Return the schema of ``response_format``, None if there is none."""
        given = self.response_format
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return {"type": "object"} if given.schema is None else given.schema
        schema = given.schema if given.json_schema is None else given.json_schema.schema
        if given.type == "json_schema" and schema is not None:
            return schema
        told = f"response_format of type {given.type[:40]!r} is unknown, or lacks its schema"
        raise HttpError(400, told, param="response_format")

    def text_grammar(self) -> Grammar | None:
        """Return the grammar that the text must follow, None if there is none. It may take a while.

        Raises:
            GrammarError, ConfigError: it is invalid.
            HttpError: more than one is asked for.
        """
        found = self.grammars()
        if len(found) > 1:
            told = "give one of response_format, json_schema, grammar and structured_outputs"
            raise HttpError(400, told, param="grammar")
        return compiled(*found[0]) if found else None


@lru_cache(maxsize=64)
def compiled(kind: str, source: str) -> Grammar:
    """Return a grammar, the one made before if there is one."""
    return Grammar(source, kind)


def limit_of(given: int | None, name: str = "max_tokens") -> int | None:
    """Return a limit of tokens; -1 and -2, which are llama-server's, are none.

    Raises:
        HttpError: it is negative.
    """
    if given is None or given in (-1, -2):
        return None
    if given < 0:
        raise HttpError(400, f"{name} must be at least 0, not {given}", param=name)
    return given
