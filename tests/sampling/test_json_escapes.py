r"""Escapes in JSON strings under a schema: what JSON allows is possible, or cannot be begun.

With ``\u`` for control characters only, a mask bends the right ``\u00e9`` of a model into ``\u007f``.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from turn_shapes import SHAPES

import llamabranch as lb
from llamabranch import Grammar
from llamabranch.model import ToolCall, TurnFormat
from llamabranch.model.tools import Tools
from llamabranch.sampling.grammar import turn_grammar

_S = {"type": "string"}
_CAFE = r'"caf\u00e9"'
TOOLS = [{"type": "function", "function": {
    "name": "f", "parameters": {"type": "object", "properties": {"s": _S}, "required": ["s"]},
}}]  # fmt: skip


@pytest.fixture(params=["toy", "target"])
def model(request: Any) -> Any:
    return request.getfixturevalue(request.param)


def stopped(model: lb.Model, grammar: Grammar, text: str) -> str:
    """Return the longest beginning of a text that a grammar accepts; the text may be followed by EOG."""
    matcher = grammar.start(model)
    done = b""
    for token in model.tokenize(text, add_special=False):
        if not matcher.allows(token):
            return done.decode("utf-8", "replace")
        matcher.accept(token)
        done += model.piece(token)
    return text if matcher.allows(next(iter(model.eog_tokens))) else f"{text} (unfinished)"


KEPT: list[tuple[Any, str]] = [
    (_S, _CAFE), (_S, r'"\ud83e\udd8a"'), (_S, r'"\u0041\u000a\n"'), ({}, rf'{{"a": [{_CAFE}]}}'),
    ({"maxLength": 4, **_S}, _CAFE), ({"maxLength": 1, **_S}, r'"\ud83e\udd8a"'),
    ({"minLength": 2, **_S}, r'"\u00e9x"'), ({"type": "object"}, rf'{{{_CAFE}: {_CAFE}}}'),
    ({"type": "object", "additionalProperties": _S}, rf'{{{_CAFE}: ""}}'),
    ({"type": ["string", "null"]}, _CAFE), ({"type": "array", "items": _S}, f"[{_CAFE}]"),
    ({"enum": ["a\u0001"]}, r'"a\u0001"'), ({"pattern": "^a\\x01$", **_S}, r'"a\u0001"'),
    ({"type": "object", "properties": {"s": _S}, "required": ["s"]}, rf'{{"s": {_CAFE}}}'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text"), KEPT)
def test_escapes_that_json_allows_are_possible(schema: Any, text: str, model: lb.Model) -> None:
    grammar = Grammar.from_json_schema(schema)
    assert stopped(model, grammar, text) == text
    value = json.loads(text)
    jsonschema.validate(value, schema)
    assert grammar.parse(text) == value


_OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": _S}
BENT: list[tuple[Any, str, str]] = [  # the last is the longest beginning that is possible
    ({"maxLength": 3, **_S}, _CAFE, r'"caf'),
    (_S, r'"\ud83ex"', r'"\ud83e'),
    ({"pattern": "^c.*$", **_S}, _CAFE, '"caf\\'),
    ({"pattern": "^c", **_S}, _CAFE, '"caf\\'),
    ({"pattern": "f", **_S}, _CAFE, '"caf\\'),
    ({"patternProperties": {"^c": _S}, "type": "object"}, rf'{{{_CAFE}: ""}}', '{"caf\\'),
    ({"enum": ["café"]}, _CAFE, '"caf'),
    ({"type": "object", "properties": {"é": _S}, "required": ["é"]}, r'{"\u00e9": ""}', '{"'),
    (_OBJECT, r'{"a": 1, "\u0061": "x"}', '{"a": 1, "\\'),
    (_OBJECT, r'{"\u0061": "x"}', '{"\\'),
    ({**_OBJECT, "required": ["b"], "additionalProperties": True}, r'{"\u0062": "x"}', '{"'),
    ({"type": "object", "patternProperties": {"^a$": {"type": "integer"}}}, r'{"\u0061": "x"}', '{"'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "taken"), BENT)
def test_an_escape_that_would_become_another_letter_cannot_begin(
    schema: Any, text: str, taken: str, toy: lb.Model
) -> None:
    assert stopped(toy, Grammar.from_json_schema(schema), text) == taken


def test_other_properties_are_those_with_other_names(toy: lb.Model) -> None:
    names = ["a", "ab", "b", "", 'q"', "é"]
    schema = {
        "type": "object",
        "properties": {key: {"const": 1} for key in names},
        "additionalProperties": _S,
    }
    grammar = Grammar.from_json_schema(schema)
    for name in (*names, "aa", "abc", "bb", 'q""', "q", "éé", "z", "\\"):
        other, declared = (json.dumps({name: value}, ensure_ascii=False) for value in ("x", 1))
        assert (stopped(toy, grammar, other) == other) == (name not in names), name
        assert (stopped(toy, grammar, declared) == declared) == (name in names), name


def test_arguments_of_tools_may_have_escapes(toy: lb.Model) -> None:
    """As JSON, and as JSON in a string, whose own escapes may not end the text in it."""
    tools = Tools(TOOLS, "required")
    text = r'{"name": "f", "arguments": {"s": "caf\u00e9 \ud83e\udd8a"}}'
    assert stopped(toy, turn_grammar(toy, tools), text) == text


_IN_TEXT = [
    (r'\"caf\\u00e9\"', True), (r'\"caf\u00e9\"', True), (r'\"\ud83e\udd8a\\ud83e\\udd8a\"', True),
    (r'\"a\/b\\/c\\\/\\\"\"', True), (r'\"\\u000A\"', True), (r'\"\u0022\"', False),
    (r'\"\u000a\"', False), (r'\"\\ud83e\"', False), (r'\"\ud83e\"', False),
]  # fmt: skip


@pytest.mark.parametrize(("string", "is_taken"), _IN_TEXT)
def test_escapes_in_arguments_that_are_text(string: str, is_taken: bool, toy: lb.Model) -> None:
    form = TurnFormat.of(SHAPES["arguments are a text"])
    tools = Tools(TOOLS, "required", form)
    text = form.write([ToolCall("f", {"s": "STRING"})]).replace('\\"STRING\\"', string)
    assert (stopped(toy, turn_grammar(toy, tools), text) == text) == is_taken
    if is_taken:
        json.loads(json.loads(f'"{string}"'))
