"""The grammar of a turn: text is free, and calls are valid from their opening on, in every form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from turn_shapes import CHANGING, SHAPES

import llamabranch as lb
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
DEEP = [{"type": "function", "function": {"name": "plan", "parameters": {
    "type": "object", "required": ["stops", "with"], "properties": {
        "stops": {"type": "array", "minItems": 1, "items": {"type": "string"}},
        "with": {"type": "object", "required": ["n"], "properties": {
            "n": {"type": "integer"}, "who": {"enum": ["me", "all"]}}},
        "any": {}, "maybe": {"type": ["string", "null"]}, "free": {"type": "object"}}}}}]  # fmt: skip
NAMES = ["a.b-c", 'say "hi"', "it's", "a.b", "a/b", "get_1", "get_11"]
VALUES = ["it's", 'say "x"', "a\\b", "a.b"]
ONE = [ToolCall("find", {"text": "a b", "n": 3})]
# Tools, calls that they take, and other calls.
KINDS: dict[str, tuple[list[Any], list[ToolCall], list[ToolCall]]] = {
    "flat": (
        TOOLS,
        [ToolCall("ping", {}), *ONE, ToolCall("find", {"text": "x"}),
         ToolCall("set", {"unit": "F", "on": True}),
         *(ToolCall("find", {"text": text, "n": 5}) for text in ('a "b" \\ c', "\n", "", "é"))],
        [ToolCall("seek", {"text": "x"}), ToolCall("set", {"unit": "K"}), ToolCall("set", {"on": True}),
         ToolCall("find", {"text": "x", "n": "many"}), ToolCall("ping", {"x": 1}),
         ToolCall("find", {"n": 5})],
    ),
    "deep": (
        DEEP,
        [ToolCall("plan", arguments) for arguments in (
            {"stops": ["a", "b, c"], "with": {"n": 3}},
            {"stops": ["it's"], "with": {"n": 3, "who": "all"}, "any": [1, {"x": True}], "maybe": "x"},
            {"stops": ["é"], "with": {"n": -1}, "maybe": None, "free": {"x": [1.5, None, "y"]}},
        )],
        [ToolCall("plan", arguments) for arguments in (
            {"stops": [], "with": {"n": 3}}, {"stops": ["a"], "with": {}}, {"stops": ["a"]},
            {"stops": ["a"], "with": {"n": 3, "who": "you"}},
        )],
    ),
    # Names and values are distinguished, whatever characters they have, among 1,000.
    "quotes": (
        [{"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "required": ["k-1"], "properties": {"k-1": {"enum": VALUES}}}}}
         for name in (*NAMES, *(f"tool_{i}" for i in range(1000)))],
        [ToolCall(name, {"k-1": value}) for name in NAMES for value in VALUES],
        [ToolCall(name, {"k-1": value}) for name, value in (
            ("a.bc", "a.b"), ("get_2", "a.b"), ("get_1", "axb"), ("aXb", "a.b"))],
    ),
}  # fmt: skip


@pytest.fixture
def model(toy: lb.Model) -> lb.Model:
    return toy


def fits(model: lb.Model, grammar: lb.Grammar, text: str) -> bool:
    """Return whether a whole text follows a grammar."""
    state: Any = grammar.start(model)
    for token in model.tokenize(text, add_special=False, parse_special=True):
        if not state.allows(token):
            return False
        state.accept(token)
    return bool(state.allows(model.eos))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_valid_from_their_opening_on(model: lb.Model, kind: str, shape: str) -> None:
    form = TurnFormat.of(SHAPES[shape])
    tools, good, bad = KINDS[kind]
    tools = tools if shape == "name, then JSON" else tools[: len(NAMES)]
    auto = turn_grammar(model, Tools(tools, "auto", form))
    required = turn_grammar(model, Tools(tools, "required", form))
    named = turn_grammar(model, Tools(tools, {"function": {"name": good[0].name}}, form))
    assert fits(model, auto, "Just a text, with a < b and {}.") and not fits(model, required, "No.")
    for call in good:
        text = form.write([call])
        assert fits(model, required, text), text
        assert fits(model, auto, text if kind == "quotes" else f"I look.\n{text}"), text
        assert kind == "quotes" or fits(model, auto, text), text
        assert fits(model, named, text) == (call.name == good[0].name)
        assert form.read(text, tools).calls[0][:2] == call[:2]
    for call in bad:
        assert not fits(model, required, form.write([call])), call
        # Only the braces distinguish some from text. A name may go on where another one ends.
        if shape != "bare JSON" and kind != "quotes":
            assert not fits(model, auto, form.write([call])), call


@pytest.mark.parametrize("shape", SHAPES)
def test_several_calls_where_the_form_has_them(model: lb.Model, shape: str) -> None:
    form = TurnFormat.of(SHAPES[shape])
    text = form.write([*ONE, ToolCall("ping", {})])
    for parallel in (True, False):
        grammar = turn_grammar(model, Tools(TOOLS, "required", form, parallel=parallel))
        assert fits(model, grammar, text) == (parallel and form.form.several is True)


def test_a_template_that_refuses_two_calls_in_a_turn_gets_one(model: lb.Model) -> None:
    """In its own form and in those that models write on their own."""
    form = TurnFormat.of(CHANGING["one call in a turn"])
    auto = turn_grammar(model, Tools(TOOLS, "auto", form))
    call = '{"name": "ping", "arguments": {}}'
    for text in (call, f"<do>\n{call}\n</do>", f"```json\n{call}\n```"):
        assert fits(model, auto, text) and not fits(model, auto, f"{text}\n{text}")


def walked(model: lb.Model, grammar: lb.Grammar, tokens: list[int]) -> int:
    """Return how many of some tokens a grammar takes; its mask and ``allows`` agree at each."""
    state: Any = grammar.start(model)
    for n, token in enumerate(tokens):
        mask = np.unpackbits(state.mask().view(np.uint8), bitorder="little")[: model.n_vocab]
        assert [state.allows(token) for token in np.flatnonzero(mask)] == [True] * int(mask.sum())
        if not state.allows(token):
            return n
        state.accept(token)
        if model.is_eog(token):
            return n + 1
    return len(tokens) if state.allows(model.eos) else -1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_eog", [False, True])
def test_tags_that_are_control_tokens(tmp_path: Path, shape: str, is_eog: bool) -> None:
    """The mask never has a refused token. Tokens that end every text end a call, too."""
    source = SHAPES[shape]
    if not is_eog:  # llama.cpp ends texts at tokens of these names
        for name in ("call", "calls", "end"):
            source = source.replace(f"<|{name}|>", f"<|a_{name}|>")
    form = TurnFormat.of(source)
    text = form.write(ONE)
    tags = sorted(set(re.findall(r"<[^<>\s=]+>|\[[A-Z]+\]", text)))
    vocabulary = toys.Vocabulary.with_control("<s>", "</s>", "<note>", *tags)
    with lb.Model(toys.write_toy(tmp_path / "toy.gguf", vocab=vocabulary)) as model:
        tokens = model.tokenize(text, add_special=False, parse_special=True)
        ends = [n for n, token in enumerate(tokens) if model.is_eog(token)]
        auto = turn_grammar(model, Tools(TOOLS, "auto", form))
        plain = model.tokenize("A <note> b.\n", add_special=False, parse_special=True)
        # Control tokens that belong to no call are free.
        assert walked(model, auto, plain) == len(plain)
        if ends and ends[0] == 0:
            return  # no call can be written
        n = ends[0] + 1 if ends else len(tokens)
        if not ends or text.rstrip().endswith(model.detokenize([tokens[ends[0]]], special=True)):
            assert walked(model, auto, tokens) == n
            assert walked(model, auto, plain + tokens) == len(plain) + n
            required = turn_grammar(model, Tools(TOOLS, "required", form))
            assert walked(model, required, tokens) == n


def test_forms_that_models_write_on_their_own_are_valid_too(model: lb.Model) -> None:
    form = TurnFormat.of(SHAPES["tags around JSON"])
    grammar = turn_grammar(model, Tools(TOOLS, "auto", form))
    call = '{"name": "find", "arguments": {"text": "x"}}'
    for text in (
        call,
        f"```json\n{call}\n```",
        f"{{{call}}}",
        call.replace("arguments", "parameters"),
        f"<tool_call>\n{call}\n</tool_call>",
        f"Let me look.\n\n```json\n{call}\n```\n",
        f"```json\n{json.dumps(json.loads(call), indent=4)}\n```",
        f"{call}\n{call}",
    ):
        assert fits(model, grammar, text), text
        assert len(form.read(text, TOOLS).calls) == text.count('"name"'), text
        assert not fits(model, grammar, text.replace('"x"', "5")), text


def test_the_function_may_be_named_after_the_channel(model: lb.Model) -> None:
    form = TurnFormat.of(SHAPES["channels"])
    grammar = turn_grammar(model, Tools(TOOLS, "auto", form))
    call = '<|on|>tool to=fn.find <|as|>json<|say|>{"text": "x"}'
    for text in (call, call.replace(" <|as|>json", " json"), f"<|on|>tool<|say|>So.<|over|>{call}"):
        assert fits(model, grammar, text), text
        assert not fits(model, grammar, text.replace('"x"', "5")), text
        assert not fits(model, grammar, text.replace("find", "seek")), text
    assert fits(model, grammar, "<|on|>final<|say|>Yes.<|over|>")


def test_free_text_may_hold_what_an_opening_begins_with(tmp_path: Path) -> None:
    """A tag that other parts of a turn have, too, begins a call only when the call's words follow."""
    source = SHAPES["one tag around several"].replace("<dos>", "<|open|>do<|sep|>")
    source = source.replace("<mull>", "<|open|>mull<|sep|>").replace("</mull>", "<|shut|>")
    form = TurnFormat.of(source)
    vocabulary = toys.Vocabulary.with_control("<s>", "</s>", "<|open|>", "<|sep|>", "<|shut|>")
    with lb.Model(toys.write_toy(tmp_path / "toy.gguf", vocab=vocabulary)) as model:
        grammar = turn_grammar(model, Tools(TOOLS, "auto", form))
        assert fits(model, grammar, "<|open|>mull<|sep|>Hm.<|shut|>Well, < or <|open|>d?<|sep|>.")
        assert fits(model, grammar, "Well.\n" + form.write(ONE))
        assert not fits(model, grammar, form.write([ToolCall("seek", {"text": "x"})]))
