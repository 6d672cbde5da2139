"""One vocabulary: what has the same name means the same, whoever sends it or asks for it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run

import llamabranch as lb
from llamabranch.request.request import ChatOptions
from llamabranch.serve.completions import ChatFields

MODULES = (lb, lb.agents, lb.chat, lb.context, lb.engine, lb.eval, lb.model, lb.search, lb.serve,
           lb.speculative)  # fmt: skip
CLASSES = {
    kind.__name__: kind
    for module in MODULES
    for kind in (getattr(module, name) for name in module.__all__)
    if inspect.isclass(kind)
}
# What iterators yield that is no event of a text.
OTHERS = {"Self", "None", "int"}
# Names that were used for something that has another name elsewhere.
OTHER_WORDS = {
    "prompt_tokens": "evaluated", "cached_prompt_tokens": "cached", "n_cached_tokens": "cached",
    "n_generated": "generated", "n_evaluated": "evaluated", "decodes": "target_forward_passes",
    "tok_per_s": "tokens_per_second", "log_prob": "logprob", "logp": "logprob", "piece": "text",
    "reasoning": "thought", "parallel_calls": "parallel_tool_calls", "think": "thinking",
    "stop_cause": "finish_reason", "again": "reread",
}  # fmt: skip


def members(kind: type) -> dict[str, object]:
    """The fields and properties of a class that are public."""
    names = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    found = {name: getattr(kind, name, None) for name in names | set(dir(kind))}
    return {n: value for n, value in found.items() if n[0] != "_" and not inspect.isroutine(value)}


def yielded() -> Iterator[str]:
    """The names of what the iterators of public classes and functions yield."""
    for kind in CLASSES.values():
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if name[0] != "_" or name in ("__next__", "__iter__"):
                returned = str(inspect.signature(method).return_annotation)
                yield from re.findall(r"(?:Iterator|Generator)\[(?:list\[)?(\w+)", returned)
                yield from [returned] if name == "__next__" else []


def test_an_event_has_a_token_a_text_and_a_logprob_whoever_sends_it() -> None:
    events = {*yielded()} - OTHERS
    assert events == {"Event", "Produced", "Step"}
    for name in events:
        assert {"token", "text", "logprob"} <= members(CLASSES[name]).keys(), name


@pytest.mark.parametrize("name", ["Result", "Answer", "Report", "Record", "EngineStats"])
def test_what_is_read_and_written_has_one_name(name: str) -> None:
    counts = {"evaluated", "cached", "generated", "tokens_per_second"}
    assert counts <= members(CLASSES[name]).keys()


def test_a_forward_pass_is_a_decode() -> None:
    """A text counts its rounds instead, because several texts share a decode."""
    counted = [name for name, kind in CLASSES.items() if "target_forward_passes" in members(kind)]
    assert counted == ["EngineStats"]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_no_public_class_has_another_word(name: str) -> None:
    assert not members(CLASSES[name]).keys() & OTHER_WORDS.keys()


def test_what_can_be_asked_has_one_name_at_every_door() -> None:
    asked = {"thinking", "parallel_tool_calls", "tool_choice", "tools", "max_tokens"}
    assert asked <= set(inspect.signature(lb.Agent).parameters)
    assert asked <= ChatOptions.__annotations__.keys()
    for fields in (lb.Request, ChatFields):
        assert asked <= set(fields.__struct_fields__)
    named = {*re.findall(r"\w+", run("agent", "-h").stdout)}
    assert {"thinking", "parallel_tool_calls", "tool_choice", "tools"} <= named


def test_messages_are_plain_english() -> None:
    """Before, one said "its key_length is 32, that of misfit is 16"."""
    odd = re.compile(
        r"\b(that of|those of|of which|there is none|there are none|announces|that one's|"
        r"not the one|whose largest|whose logit)\b"
    )
    told = [
        f"{path.name}:{node.lineno}: {node.value}"
        for path in Path(lb.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise | ast.Return)
        for node in ast.walk(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if odd.search(node.value)
    ]
    assert not told, told
