"""Schemas in the manner of real ones: valid texts are accepted to their end, invalid ones are not."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from real_schemas import REAL

import llamabranch as lb
from llamabranch import Grammar, SamplingParams
from llamabranch.sampling import Sampler


def accepts(model: lb.Model, grammar: Grammar, text: str) -> bool:
    tokens = model.tokenize(text, add_special=False)
    sampler = Sampler(model, SamplingParams(), grammar)
    return sampler.count_allowed([*tokens, 1]) == len(tokens) + 1


@pytest.mark.parametrize("number", range(len(REAL)))
def test_valid_texts_are_accepted_and_invalid_ones_refused(number: int, toy: lb.Model) -> None:
    schema, valid, invalid = REAL[number]
    judge = jsonschema.Draft202012Validator(schema)
    grammar = Grammar.from_json_schema(schema)
    for value in valid:
        assert judge.is_valid(value), value
        assert accepts(toy, grammar, json.dumps(value, ensure_ascii=False)), value
    for value in invalid:
        # jsonschema checks few formats without more packages: those are judged by the table alone
        assert not judge.is_valid(value) or "format" in json.dumps(schema), value
        assert not accepts(toy, grammar, json.dumps(value, ensure_ascii=False)), value


def test_there_are_a_hundred_of_them() -> None:
    assert len(REAL) > 100


@pytest.mark.parametrize(
    ("whitespace", "texts"),
    [
        ("single", ['{"a": 1, "b": [1, 2]}']),
        ("none", ['{"a":1,"b":[1,2]}']),
        ("any", ['{"a": 1, "b": [1, 2]}', '{"a":1,"b":[1,2]}', '{\n  "a": 1,\n\t"b": [ 1,2 ]\n}']),
    ],
)
def test_whitespace_is_as_asked(whitespace: str, texts: list[str], toy: lb.Model) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"items": {"type": "integer"}, "type": "array"}},
        "required": ["a", "b"],
    }  # fmt: skip
    grammar = Grammar.from_json_schema(schema, whitespace=whitespace)
    every = ['{"a": 1, "b": [1, 2]}', '{"a":1,"b":[1,2]}', '{\n  "a": 1,\n\t"b": [ 1,2 ]\n}']
    assert [text for text in every if accepts(toy, grammar, text)] == [
        text for text in every if text in texts
    ]
