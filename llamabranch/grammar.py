"""What a text must look like: GBNF grammars, and those made from JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import GrammarError
from .native import json_schema_to_gbnf

__all__ = ["Grammar"]

_MAX_DEPTH = 200
_MAX_REPEAT = 2000
_SCHEMA_KEYWORDS = {
    "$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "format", "items", "maxItems",
    "maxLength", "minItems", "minLength", "oneOf", "pattern", "prefixItems", "properties", "required",
    "type",
}  # fmt: skip
_SCHEMA_NOTES = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
    "examples", "readOnly", "title", "writeOnly",
}  # fmt: skip
_SCHEMA_FORMATS = {"date", "time", "date-time", "uuid"}


@dataclass(frozen=True)
class Grammar:
    """A GBNF grammar that the generated text must follow; its start symbol is ``root``.

    Raises:
        GrammarError: empty, nested too deep, or with repetitions that llama.cpp cannot expand. Whether
            the grammar parses is known once a branch with a model uses it.
    """

    gbnf: str

    def __post_init__(self) -> None:
        if not isinstance(self.gbnf, str) or not self.gbnf.strip():
            raise GrammarError("a grammar must be a string that is not empty")
        try:
            self.gbnf.encode("utf-8")
        except UnicodeEncodeError as error:
            raise GrammarError(f"the grammar is not valid Unicode: {error}") from error
        # Strings, character classes and comments may contain any bracket.
        plain = re.sub(r'"(\\.|[^"\\])*"|\[(\\.|[^\]\\])*\]|#[^\n]*', " ", self.gbnf)
        depth = deepest = 0
        for character in plain:
            depth += (character == "(") - (character == ")")
            deepest = max(deepest, depth)
        if deepest > _MAX_DEPTH:
            raise GrammarError(
                f"the grammar nests {deepest} deep; llama.cpp's parser recurses and would overflow "
                f"(limit {_MAX_DEPTH})"
            )
        for low, comma, high in re.findall(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}", plain):
            at_least = int(low or 0)
            at_most = int(high) if high else (at_least if not comma else None)
            if at_most is not None and at_most < at_least:
                raise GrammarError(f"repetition {{{low},{high}}} is backwards")
            if max(at_least, at_most or 0) > _MAX_REPEAT:
                raise GrammarError(
                    f"repetition {{{low}{comma}{high}}} is above the limit of {_MAX_REPEAT}"
                )

    @classmethod
    def from_json_schema(cls, schema: str | Mapping[str, object]) -> Grammar:
        """Return the grammar of all JSON texts that the schema admits.

        Raises:
            GrammarError: not a schema, or one with a keyword that llama-cpp-python's converter would
                silently ignore.
        """
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            parsed = json.loads(text)
            _check_schema(parsed)
            return cls(json_schema_to_gbnf(text))
        except (ValueError, TypeError) as error:
            raise GrammarError(f"the JSON schema is not JSON: {error}") from error
        except RecursionError:
            raise GrammarError("the JSON schema is nested too deep") from None


def _check_schema(schema: object) -> None:
    """Refuse what the converter does not look at: a text could break it and still pass."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema is an object, not {schema!r}")
    ignored = sorted(set(schema) - _SCHEMA_KEYWORDS - _SCHEMA_NOTES)
    if ignored:
        raise GrammarError(f"the JSON-schema keyword {ignored[0]!r} is not supported")
    form = schema.get("format")
    if form is not None and form not in sorted(_SCHEMA_FORMATS):
        raise GrammarError(f"the JSON-schema format {form!r} is not supported")
    for name in ("properties", "$defs", "definitions"):
        inside = schema.get(name, {})
        if not isinstance(inside, dict):
            raise GrammarError(f"{name!r} of a JSON schema is an object, not {inside!r}")
        for inner in inside.values():
            _check_schema(inner)
    for name in ("oneOf", "anyOf", "allOf", "prefixItems"):
        listed = schema.get(name, [])
        if not isinstance(listed, list):
            raise GrammarError(f"{name!r} of a JSON schema is a list, not {listed!r}")
        for inner in listed:
            _check_schema(inner)
    for name in ("additionalProperties", "items"):
        inner = schema.get(name, True)
        for one in inner if isinstance(inner, list) else [inner]:
            _check_schema(one)
