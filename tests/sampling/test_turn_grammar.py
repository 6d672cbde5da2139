"""The grammar of a turn: free text is free, calls are valid from their opening on, in every form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toys
from turn_shapes import SHAPES

import llamabranch as lb
from llamabranch.errors import UnsupportedError
from llamabranch.model import ToolCall, TurnFormat
from llamabranch.model.tools import Tools
from llamabranch.sampling.grammar import turn_grammar

TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": {
        "type": "object", "required": ["text"],
        "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "set", "parameters": {
        "type": "object", "required": ["unit"],
        "properties": {"unit": {"enum": ["C", "F"]}, "on": {"type": "boolean"}}}}},
    {"type": "function", "function": {"name": "ping"}},
]  # fmt: skip
ONE = [ToolCall("find", {"text": "a b", "n": 3})]
GOOD = [
    ONE, [ToolCall("find", {"text": "x"})], [ToolCall("set", {"unit": "F", "on": True})],
    [ToolCall("ping", {})],
]  # fmt: skip
BAD = [
    [ToolCall("seek", {"text": "x"})], [ToolCall("set", {"unit": "K"})], [ToolCall("set", {"on": True})],
    [ToolCall("find", {"text": "x", "n": "many"})], [ToolCall("ping", {"x": 1})],
]  # fmt: skip
WRITTEN = [shape for shape in SHAPES if shape != "arguments are a text"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lb.Model]:
    path: Path = toys.write_toy(tmp_path_factory.mktemp("toy") / "toy.gguf", vocab="bytes")
    with lb.Model(path) as model:
        yield model


def fits(model: lb.Model, grammar: lb.Grammar, text: str) -> bool:
    """Return whether a whole text follows a grammar."""
    state: Any = grammar.start(model)
    for token in model.tokenize(text, add_special=False, parse_special=True):
        if not state.allows(token):
            return False
        state.accept(token)
    return bool(state.allows(model.eos))


@pytest.mark.parametrize("shape", WRITTEN)
def test_calls_are_valid_from_their_opening_on(model: lb.Model, shape: str) -> None:
    form = TurnFormat.of(SHAPES[shape])
    auto = turn_grammar(model, Tools(TOOLS, "auto", form))
    required = turn_grammar(model, Tools(TOOLS, "required", form))
    named = turn_grammar(model, Tools(TOOLS, {"function": {"name": "ping"}}, form))
    assert fits(model, auto, "Just a text, with a < b and {}.") and not fits(model, required, "No.")
    for calls in GOOD:
        text = form.write(calls)
        assert fits(model, required, text), text
        assert fits(model, auto, text) and fits(model, auto, f"I look.\n{text}"), text
        assert fits(model, named, text) == (calls[0].name == "ping")
        assert form.read(text, TOOLS).calls[0][:2] == calls[0][:2]
    for calls in BAD:
        if shape == "bare JSON":  # nothing but the braces tells it from a text
            continue
        assert not fits(model, required, form.write(calls)), calls
        assert not fits(model, auto, form.write(calls)), calls


@pytest.mark.parametrize("shape", WRITTEN)
def test_several_calls_where_the_form_has_them(model: lb.Model, shape: str) -> None:
    form = TurnFormat.of(SHAPES[shape])
    text = form.write([*ONE, ToolCall("ping", {})])
    for parallel in (True, False):
        grammar = turn_grammar(model, Tools(TOOLS, "required", form, parallel=parallel))
        assert fits(model, grammar, text) == (parallel and form.form.several is True)


def test_a_form_without_a_grammar_is_told_and_a_forced_call_is_json(model: lb.Model) -> None:
    form = TurnFormat.of(SHAPES["arguments are a text"])
    with pytest.raises(UnsupportedError, match="no grammar"):
        turn_grammar(model, Tools(TOOLS, "auto", form))
    text = '{"name": "find", "arguments": {"text": "x"}}'
    assert fits(model, turn_grammar(model, Tools(TOOLS, "required", form)), text)
    assert form.read(text, TOOLS).calls[0].arguments == {"text": "x"}


def test_forms_that_models_write_on_their_own_are_valid_too(model: lb.Model) -> None:
    grammar = turn_grammar(model, Tools(TOOLS, "auto", TurnFormat.of(SHAPES["tags around JSON"])))
    call = '{"name": "find", "arguments": {"text": "x"}}'
    for text in (
        call,
        f"```json\n{call}\n```",
        f"{{{call}}}",
        call.replace("arguments", "parameters"),
    ):
        assert fits(model, grammar, text), text
        assert not fits(model, grammar, text.replace('"x"', "5")), text


def test_a_thousand_tools(model: lb.Model) -> None:
    many = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": {
        "type": "object", "properties": {"x": {"type": "integer"}}}}} for i in range(1000)]  # fmt: skip
    form = TurnFormat.of(SHAPES["name, then JSON"])
    grammar = turn_grammar(model, Tools(many, "auto", form))
    assert fits(model, grammar, form.write([ToolCall("tool_999", {"x": 5})]))
    assert not fits(model, grammar, form.write([ToolCall("tool_1000", {"x": 5})]))
