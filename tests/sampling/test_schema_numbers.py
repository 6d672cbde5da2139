"""Which texts a JSON schema takes and refuses: of numbers beyond floats, objects, names and formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import run_python
from test_json_schema import N_TEXTS, accepts, judge, obj, walk

import llamabranch as lb
from llamabranch import Grammar
from llamabranch.errors import ParseError

_OBJECT = (
    '{"type": "object", "properties": {"id": {"const": 18446744073709551615}, "b": {"type": "string"}, '
    '"c": {"enum": [1, null, 2.5]}}, "required": ["id"]}'
)
_TREE = (
    '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9223372036854775807}, '
    '"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]}'
)
_THREE = '"items": {"enum": ["a", "b", "c"]}, "uniqueItems": true'
_OPTIONAL = '{"type": "object", "properties": {"a": {"const": 1e22}, "b": {"type": "null"}}}'
INT = {"type": "integer"}
Case = tuple[Any, list[str], list[str]]  # a schema, texts that it takes, and others

NUMBERS: list[Case] = [
    # Integers whose float is -2^63 ended the process. Others were written as the nearest float.
    ('{"const": -9223372036854775808}', ["-9223372036854775808"], ["-9223372036854775807"]),
    ('{"enum": [-9223372036854775807]}', ["-9223372036854775807"], ["-9223372036854775808"]),
    ('{"type": "integer", "enum": [-1e22, 0.5]}', ["-1e22"], ["0.5", "-1"]),
    ('{"const": 1234567890123456789}', ["1234567890123456789"], ["1234567890123456768"]),
    ('{"const": 18446744073709551615}', ["18446744073709551615"], ["18446744073709552000"]),
    ('{"const": 123456789.12345679}', ["123456789.12345679"], ["123456789.1234568"]),
    ('{"const": 0.10000000000000000555}', ["0.10000000000000000555"], ["0.1"]),
    ('{"enum": ["a", 9007199254740993, null], "type": ["integer", "null"]}',
     ["9007199254740993", "null"], ['"a"', "9007199254740992"]),
    ('{"enum": [9007199254740993, 5], "maximum": 100}', ["5"], ["9007199254740993"]),
    ('{"const": {"a": [1234567890123456789, "x"]}}', ['{"a": [1234567890123456789, "x"]}'], []),
    ('{"anyOf": [{"type": "null"}, {"const": 1234567890123456789}]}',
     ["null", "1234567890123456789"], ["1"]),
    ('{"$ref": "#/$defs/n", "$defs": {"n": {"const": 1234567890123456789}}}',
     ["1234567890123456789"], ["1"]),
    (_OBJECT, ['{"id": 18446744073709551615}', '{"id": 18446744073709551615, "b": "x", "c": 2.5}',
               '{"id": 18446744073709551615, "c": null}'],
     ['{"b": "x"}', '{"id": 1}', '{"id": 18446744073709551615, "c": 3}', "{}"]),
    (_OPTIONAL, ["{}", '{"b": null}', '{"a": 1e22}', '{"a": 1e22, "b": null}'],
     ['{, "b": null}', '{"b": null, "a": 1e22}']),
    ('{"type": "array", "items": {"const": 1e22}, "minItems": 1, "maxItems": 2}',
     ["[1e22]", "[1e22, 1e22]"], ["[]", "[1]", "[1e22, 1e22, 1e22]"]),
    ('{"type": "array", "items": {"const": 1e22}}', ["[]", "[1e22, 1e22, 1e22]"], ["[1]"]),
    ('{"type": "array", "prefixItems": [{"const": 1e22}, {"type": "null"}]}',
     ["[]", "[1e22]", "[1e22, null]", '[1e22, null, "x"]'], ["[null]"]),
    # Bounds are exact to the last integer.
    ('{"type": "integer", "minimum": 0, "maximum": 9223372036854775807}',
     ["0", "9223372036854775807"], ["-1", "9223372036854775808"]),
    ('{"type": "integer", "exclusiveMinimum": -9223372036854775808}',
     ["-9223372036854775807", "99999999999999999999"], ["-9223372036854775808"]),
    ('{"type": ["integer", "null"], "minimum": 1e19}', ["10000000000000000000", "null"], ["9"]),
    ('{"type": "integer", "format": "int64"}',
     ["9223372036854775807", "-9223372036854775808"], ["9223372036854775808"]),
    (_TREE, ['{"n": 9223372036854775807, "next": {"n": 5, "next": null}}'],
     ['{"n": 9223372036854775808}', '{"n": 1, "next": 5}']),
    # If no rule can be written, the bound is the next number inside.
    ('{"allOf": [{"type": "integer", "maximum": 9223372036854775807}]}',
     ["5"], ["9223372036854775808"]),
    ('{"type": "number", "minimum": 0.12345678901234567}', ["0.13"], ["0.1234567890123456"]),
    # Arrays of a few values that repeat none.
    (f'{{"type": "array", {_THREE}}}', ["[]", '["c", "a", "b"]'], ['["a", "a"]']),
    (f'{{"type": "array", {_THREE}, "minItems": 2, "maxItems": 2}}',
     ['["a", "c"]'], ['["a"]', '["a", "b", "c"]', '["b", "b"]']),
    ('{"type": "array", "items": {"enum": [1, 1.0, 2]}, "uniqueItems": true}',
     ["[1, 2]", "[2]"], ["[1, 1.0]"]),
    # 16 digits with a fraction of 0: the last digit was another one.
    ('{"const": 8267737855832660.0}', ["8267737855832660.0"], ["8267737855832659"]),
    ('{"enum": [-8267737855832660.0, 1]}', ["-8267737855832660.0", "1"], ["-8267737855832659"]),
    # An excluded integer less than 1 away from the other bound was taken.
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.0000001"], ["0", "-0", "0.0"]),
    ({"exclusiveMinimum": -0.0, "exclusiveMaximum": 1e-6}, ["0.0000001", '"a"'], ["0", "0.000001"]),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5", "-1.01"], ["-1", "-1.0"]),
    ({"minimum": 12, "exclusiveMinimum": 12, "maximum": 12.25}, ["12.25", "12.001"], ["12", "12.0"]),
    ({"minimum": 3, "exclusiveMinimum": True, "maximum": 3.5}, ["3.5", "3.1"], ["3"]),
]  # fmt: skip


_BASE = {"Base": obj(properties={"n": INT, "c": obj(properties={"d": INT})}, required=["n"])}
_PARTS = [{"$ref": "#/$defs/Base"}, obj(properties={"next": {"$ref": "#/$defs/Node"}})]
_NODE = {"Node": {"allOf": _PARTS}, **_BASE}
OBJECTS: list[Case] = [
    (obj(), ['{"z": 1}'], []),  # any object
    (obj(required=["a"]), ['{"a": 1}', '{"a": {"b": 2}}'], ['{"a": 1, "z": 1}', "{}"]),
    (obj(properties={"a": INT}, required=["b"]), ['{"a": 1, "b": "x"}', '{"b": 2}'],
     ['{"b": 1, "z": 1}', '{"a": 1}']),
    (obj(properties={"a": INT}, allOf=[{"properties": {"b": INT}, "required": ["b"]}]),
     ['{"a": 1, "b": 2}', '{"b": 2}'], ['{"a": 1, "b": 2, "z": 3}', '{"a": 1}', '{"b": "x"}']),
    ({"allOf": [{"$ref": "#/$defs/Base"}, obj(properties={"a": INT})], "$defs": _BASE},
     ['{"n": 1, "c": {"d": 2}, "a": 3}', '{"n": 1}'],
     ['{"n": 1, "z": 1}', '{"n": 1, "c": {"z": 1}}', '{"a": 1}']),
    ({"$ref": "#/$defs/Node", "$defs": _NODE}, ['{"n": 1, "next": {"n": 2, "c": {"d": 1}}}'],
     ['{"n": 1, "next": {"n": 2, "z": 3}}', '{"n": 1, "z": 1}', '{"next": {"n": 1}}']),
    (obj(properties={"a/b ~": INT}, required=["a/b ~"], allOf=[{"$ref": "#/$defs/C"}],
         **{"$defs": {"C": obj(properties={"%/é ~": INT})}}),
     ['{"a/b ~": 1, "%/é ~": 2}'], ['{"a/b ~": 1, "z": 1}', '{"a/b ~": 1, "%/é ~": "x"}']),
    (obj(properties={"a": INT}, allOf=[obj(properties={"a": {"minimum": 3}})]),
     ['{"a": 3}'], ['{"a": 2}', '{"a": 4, "z": 1}']),
    (obj(properties={"a": INT}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
     ['{"a": 3}', '{"b": 1}', '{"a": 4, "b": "x"}'], ['{"z": 2}', "{}"]),
    (obj(properties={"k": INT}, required=["k"],
         anyOf=[obj(properties={"x": INT}, required=["x"]), {"$ref": "#/$defs/Base"}],
         **{"$defs": _BASE}),
     ['{"k": 1, "x": 2}', '{"k": 1, "n": 2, "c": {"d": 1}}'],
     ['{"k": 1}', '{"k": 1, "x": "a"}', '{"k": 1, "x": 2, "z": 3}']),
    (obj(properties={"both": {"allOf": [{"$ref": "#/$defs/Base"}, obj(required=["b"])]},
                     "alone": {"$ref": "#/$defs/Base"}}, **{"$defs": _BASE}),
     ['{"both": {"n": 1, "b": 2}, "alone": {"n": 1, "z": 2}}'],
     ['{"both": {"n": 1, "b": 2, "z": 2}}', '{"z": 1}']),
    ({"anyOf": [obj(properties={"x": INT}), obj(properties={"y": INT})]},
     ['{"x": 1}', '{"y": 1}'], ['{"x": 1, "y": 2}', '{"z": 1}']),
    (obj(properties={"a": INT}, allOf=[obj(additionalProperties=INT)]),
     ['{"a": 1, "z": 2}'], ['{"a": 1, "z": "x"}']),
    # Names of properties and values are no keywords.
    (obj(properties={"properties": INT, "required": INT}),
     ['{"properties": 1, "required": 2}'], ['{"additionalProperties": 1}']),
    ({"const": {"required": ["b"], "type": "object"}},
     ['{"required": ["b"], "type": "object"}'], []),
    (obj(properties={"default": obj(required=["a"])}),
     ['{"default": {"a": 1}}'], ['{"default": {"a": 1, "z": 1}}']),
    (obj(properties={}), ["{}"], ['{"x": 1}']),
    *((schema, ["{}", '{"x": 1}'], []) for schema in (
        obj(), obj(properties={}, additionalProperties=True),
        obj(properties={}, patternProperties={"x": True}),
    )),
]  # fmt: skip


PROPERTY_NAMES: list[Case] = [
    ({"propertyNames": {"enum": ["x", "y"]}}, ['{"x": 1}', "{}"], ['{"z": 1}', '{"x": "a"}']),
    ({"propertyNames": {"pattern": "^[a-z]+$"}}, ['{"abc": 1}', "{}"], ['{"A": 1}']),
    ({"propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab": 1}'], ['{"a": 1}', '{"abcd": 1}']),
    ({"propertyNames": {"type": "string"}}, ['{"ab": 1}'], ['{"a": "x"}']),
]  # fmt: skip
# Keywords that constrain nothing in an object whose "a" is an integer.
IDLE = [
    '"propertyNames": true', '"propertyNames": {"type": "string"}', '"not": false',
    '"unevaluatedProperties": true', '"unevaluatedItems": {}', '"dependentRequired": {}',
    '"dependentRequired": {"a": []}', '"dependentSchemas": {"a": true}', '"dependencies": {}',
    '"if": {"required": ["a"]}', '"then": false', '"if": {"minProperties": 1}, "then": {}',
    '"contains": {"type": "null"}, "minContains": 0', '"maxContains": 3', '"uniqueItems": false',
    '"minProperties": 0', '"maxProperties": 9e9', '"allOf": [true, {}]',
]  # fmt: skip
_A = '{"type": "object", "properties": {"a": {"type": "integer"}}, '
OTHERS: list[Case] = [
    *((obj(additionalProperties=INT, **names), taken, others) for names, taken, others in PROPERTY_NAMES),
    *((f"{_A}{keywords}}}", ['{"a": 1}'], ['{"a": "x"}']) for keywords in IDLE),
    (_A + '"if": true, "then": {"required": ["a"]}, "else": false}', ['{"a": 1}'], ["{}"]),
    (_A + '"if": false, "then": false, "else": {"required": ["a"]}}', ['{"a": 1}'], ["{}"]),
    (obj(properties={"a": {"$ref": "#tt"}}, required=["a"],
         **{"$defs": {"T": {"$anchor": "tt", **INT}}}), ['{"a": 5}'], ['{"a": "x"}']),
    (obj(patternProperties={r'^[^\\/:*?"<>|&&]+$': INT}, additionalProperties=False),
     ['{"a b": 1}'], [json.dumps({name: 1}) for name in ("a/b", "a\\b", 'a"b', "&")]),
    # limits that no text reaches
    *(({"type": "string", **limit}, ['"xxx"'], []) for limit in (
        {"maxLength": 2**33}, {"pattern": "^x{1,99999999999}$"}, {"maxLength": 3.0})),
    # formats that people send
    *(({"type": "string", "format": name}, ['"a b"', '""'], [])
      for name in ("path", "file-path", "binary", "password")),
    ({"type": "string", "format": "byte"}, ['""', '"aGk="', '"aGVq"'], ['"a"', '"aGk"', '"a=Gk"']),
    ({"type": "string", "format": "uuid4"}, ['"123e4567-e89b-42d3-a456-426614174000"'],
     ['"123e4567-e89b-12d3-a456-426614174000"']),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [*NUMBERS, *OBJECTS, *OTHERS],
    ids=lambda s: "" if isinstance(s, list) else str(s)[:70],
)
def test_a_schema_takes_these_texts_and_refuses_those(
    schema: Any, texts: list[str], others: list[str], toy: lb.Model
) -> None:
    grammar = Grammar.from_json_schema(schema)
    assert [text for text in texts if not accepts(toy, grammar, text)] == []
    assert [text for text in others if accepts(toy, grammar, text)] == []


@pytest.mark.parametrize("schema", [schema for schema, *_ in OBJECTS], ids=lambda s: str(s)[:70])
def test_objects_have_what_is_declared_or_required(schema: Any, toy: lb.Model) -> None:
    grammar, right = Grammar.from_json_schema(schema), judge(schema)
    for seed in range(N_TEXTS):
        right.validate(json.loads(walk(toy, grammar, seed)))


@pytest.mark.parametrize(
    ("whitespace", "taken"),
    [("single", [True, False, False]), ("none", [False, True, False]), ("any", [True] * 3)],
)
def test_whitespace_is_as_asked(whitespace: str, taken: list[bool], toy: lb.Model) -> None:
    """In rules of llguidance, and in ours."""
    numbers = {"items": INT, "type": "array"}
    theirs = obj(properties={"a": INT, "b": numbers}, required=["a", "b"])
    for schema, texts in (
        (theirs, ['{"a": 1, "b": [1, 2]}', '{"a":1,"b":[1,2]}', '{\n  "a": 1,\n\t"b": [ 1,2 ]\n}']),
        (_OPTIONAL, ['{"a": 1e22, "b": null}', '{"a":1e22,"b":null}', '{\n "a" : 1e22 ,\t"b": null }']),
    ):  # fmt: skip
        grammar = Grammar.from_json_schema(schema, whitespace=whitespace)
        assert [accepts(toy, grammar, text) for text in texts] == taken


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 2, 1]"),
        ({"properties": {"a": {"anyOf": [{"uniqueItems": True}, {"type": "null"}]}}},
         '{"a": [[1], [1]]}'),
        ({"items": {"$ref": "#/$defs/s"}, "$defs": {"s": {"uniqueItems": True}}}, "[[], [{}, {}]]"),
        # Numbers are equal by value, also inside; 1e999 is larger than a float.
        ({"type": "array", "uniqueItems": True}, "[1, 1.0]"),
        ({"type": "array", "uniqueItems": True}, '[{"a": [0, 1e2]}, {"a": [-0.0, 100]}]'),
        ({"type": "array", "uniqueItems": True}, "[1e999, 1e999]"),
    ],
    ids=str,
)  # fmt: skip
def test_repeated_items_are_found_after_the_text(schema: Any, text: str) -> None:
    """A grammar cannot follow ``uniqueItems`` of many values: ``parse`` checks it."""
    grammar = Grammar.from_json_schema(schema)
    with pytest.raises(ParseError, match="not unique"):
        grammar.parse(text)
    assert grammar.parse('[1, true, "1", 2, 1e999]' if text[0] == "[" else '{"a": [1, 2]}')


@pytest.mark.parametrize(
    ("seed", "n"),
    [(0, 400), *(pytest.param(seed, 2000, marks=pytest.mark.slow) for seed in range(1, 11))],
)
def test_no_number_of_a_schema_ends_the_process(seed: int, n: int) -> None:
    """Earlier, 19 of 2,051 such schemas did, and constants were changed."""
    done = run_python(Path(__file__).with_name("schema_fuzz.py"), seed, n)
    report = json.loads(done.stdout)
    assert report["broken"] == []
    assert report["texts"] > n // 2
