"""Tools whose schemas no grammar can follow, and those that a JSON schema alone may have."""

from __future__ import annotations

import json
import re
import sys
import warnings
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NewType

import pytest
from test_json_schema import accepts
from turn_shapes import SHAPES

import llamabranch as lb
from llamabranch.errors import GrammarError, GrammarWarning
from llamabranch.model import ToolCall, TurnFormat
from llamabranch.model.functions import function_tool
from llamabranch.model.tools import Tools
from llamabranch.sampling.grammar import turn_grammar

_A = {"type": "string"}
ODD: dict[str, Any] = {
    "look-ahead": {"a": {"type": "string", "pattern": "^(?!/).*"}},
    "not": {"a": {"not": {"type": "null"}}},
    "oneOf": {"a": {"oneOf": [_A, {"type": "string", "maxLength": 3}]}},
    "contains": {"a": {"type": "array", "contains": {"const": 1}}},
    "uri-reference": {"a": {"type": "string", "format": "uri-reference"}},
    "reference": {"a": {"$ref": "https://localhost:1/x"}},
}


def tools(properties: Any, choice: Any, form: TurnFormat | None = None, **more: Any) -> Tools:
    odd = {"name": "odd", "parameters": {"type": "object", "properties": properties}, **more}
    good = {
        "name": "good",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    }
    return Tools([{"type": "function", "function": f} for f in (good, odd)], choice, form)


@pytest.mark.parametrize("choice", ["auto", "required", {"function": {"name": "odd"}}])
@pytest.mark.parametrize("name", ODD)
def test_a_schema_that_is_refused_leaves_the_arguments_free(
    name: str, choice: Any, toy: lb.Model
) -> None:
    given = tools(ODD[name], choice)
    with pytest.warns(
        GrammarWarning, match="any JSON object is allowed .* of odd: .*#/properties/a"
    ):
        grammar = turn_grammar(toy, given)
    assert [*given.unchecked] == ["odd"]
    for arguments in ("{}", '{"b": [1]}', '{"a": null, "\\u00e9": "x"}'):
        assert accepts(toy, grammar, f'{{"name": "odd", "arguments": {arguments}}}')
    assert not accepts(toy, grammar, '{"name": "odd", "arguments": [1]}') or choice == "auto"
    if choice == "required":
        assert accepts(toy, grammar, '{"name": "good", "arguments": {"n": 1}}')
        assert not accepts(toy, grammar, '{"name": "good", "arguments": {"n": "x"}}')


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", ODD)
def test_a_strict_tool_is_refused_by_name(name: str, choice: str, toy: lb.Model) -> None:
    with pytest.raises(GrammarError, match=r"the parameters of odd: .*#/properties/a"):
        turn_grammar(toy, tools(ODD[name], choice, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_free_arguments_keep_their_names_in_every_form(shape: str, toy: lb.Model) -> None:
    form = TurnFormat.of(SHAPES[shape])
    more = {"n": {"type": "integer", "not": {"const": 1}}, "u": {"type": ["string", "null"]}}
    given = tools({**ODD["look-ahead"], **more}, "required", form)
    with pytest.warns(GrammarWarning):
        grammar = turn_grammar(toy, given)
    assert accepts(toy, grammar, form.write([ToolCall("odd", {"a": "/x", "n": 1})]))


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


SETS: list[tuple[Any, list[Any], list[Any]]] = [
    (set[bool], [True, False], [1]), (set[Literal["a", "b"]], ["b", "a"], ["c"]),
    (set[bool], [True, True], [True, False, True]), (set[Colour], ["red"], ["red", "blue", "red"]),
    (set[str], ["x"], [1]), (set[int], [3, 4], ["x"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values", "others"), SETS)
def test_sets_are_parameters_as_they_are_schemas(
    kind: Any, values: list[Any], others: list[Any], toy: lb.Model
) -> None:
    def f(x):  # type: ignore[no-untyped-def]
        """Take a set."""

    f.__annotations__ = {"x": kind}
    given = Tools([f], "required")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turns, alone = turn_grammar(toy, given), lb.Grammar.from_json_schema(kind)
    for items, is_right in ((values, True), (others, False)):
        text = json.dumps({"name": "f", "arguments": {"x": items}})
        assert accepts(toy, turns, text) == accepts(toy, alone, json.dumps(items)) == is_right


def test_chat_tells_which_tool_is_free(stage: lb.Context) -> None:
    given = tools(ODD["not"], "auto").given
    with pytest.warns(GrammarWarning, match=re.escape("'not' at #/properties/a")):
        result = stage.chat([("user", "hi")], tools=given, max_tokens=2)
    assert result.tools is not None and [*result.tools.unchecked] == ["odd"]


Name = NewType("Name", str)
Names = NewType("Names", list[Name])


@dataclass
class Person:
    name: Name
    others: Names


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [(Name, '"x"', "x"), (Names, '["x"]', ["x"]), (dict[str, Name], '{"a": "x"}', {"a": "x"}),
     (Person, '{"name": "x", "others": ["y"]}', Person(Name("x"), Names([Name("y")])))],
)  # fmt: skip
def test_new_types_are_schemas(kind: Any, text: str, value: object, toy: lb.Model) -> None:
    grammar = lb.Grammar.from_json_schema(kind)
    assert accepts(toy, grammar, text) and not accepts(toy, grammar, "1")
    assert grammar.parse(text) == value


def test_new_types_are_parameters_without_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(name: Name, names: Names) -> None:
        """Take names."""

    described: Any = function_tool(f)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    by_hand: Any = function_tool(f)
    schemas = [tool["function"]["parameters"]["properties"] for tool in (described, by_hand)]
    assert all(
        s["name"]["type"] == "string" and s["names"]["items"] == {"type": "string"} for s in schemas
    )
