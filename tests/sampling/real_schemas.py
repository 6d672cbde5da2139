"""Schemas like those that people use, each with valid texts and invalid texts.

Objects are written in the order of the declared properties, as the grammar writes them.
"""

from __future__ import annotations

from typing import Any

Case = tuple[Any, list[Any], list[Any]]

_S, _I, _N, _B = ({"type": t} for t in ("string", "integer", "number", "boolean"))


def obj(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def arr(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def _fields() -> list[Case]:
    """One property of each kind, in an object with annotations that a validator ignores."""
    kinds: list[tuple[Any, list[Any], list[Any]]] = [
        (_S, ["", "a b", 'quoted "x"', "é€😀"], [1, None, ["a"]]),
        (_I, [0, -7, 123456], [1.5, "1", None, True]),
        (_N, [0, -1.5, 2e5], ["1", None, False]),
        (_B, [True, False], [0, "true", None]),
        ({"type": "null"}, [None], [0, "", False]),
        ({"type": ["string", "null"]}, ["a", None], [1, []]),
        ({"type": ["integer", "boolean"]}, [1, True], [1.5, "a"]),
        ({"enum": ["low", "medium", "high"]}, ["low", "high"], ["Low", "", 1]),
        ({"enum": [1, 2, 3, None]}, [1, None], [4, "1"]),
        ({"const": "v1"}, ["v1"], ["v2", "v1 "]),
        (text(minLength=1), ["a", "ab"], [""]),
        (text(maxLength=3), ["", "abc", "é€😀"], ["abcd"]),
        (text(minLength=2, maxLength=2), ["ab"], ["a", "abc"]),
        (text(pattern="^[A-Z]{2}[0-9]{3}$"), ["AB123"], ["AB12", "ab123", "AB1234"]),
        (text(pattern=r"^\d{4}-\d{2}$"), ["2026-11"], ["2026-1", "x2026-11"]),
        (text(pattern="foo"), ["foo", "a foo b"], ["fo", "bar"]),
        (text(pattern="^(GET|POST|PUT)$"), ["GET", "PUT"], ["get", "DELETE"]),
        (text(pattern=r"^[^@\s]+@[^@\s]+\.[a-z]+$"), ["a@b.org"], ["a@b", "@b.org"]),
        (text(pattern="^#[0-9a-fA-F]{6}$"), ["#00ffAA"], ["#00ffA", "00ffAA"]),
        (text(format="date"), ["2026-11-22"], ["2026-13-22", "22.11.2026", ""]),
        (text(format="time"), ["12:30:00Z", "23:59:59+01:00"], ["25:00:00Z", "12:30", "12:30:60Z"]),
        (text(format="date-time"), ["2026-11-22T12:30:00Z"], ["2026-11-22", "2026-11-22T12:30:60Z"]),
        (text(format="uuid"), ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", ""]),
        (text(format="email"), ["a.b@example.org"], ["a.b", "@example.org"]),
        (text(format="ipv4"), ["192.168.0.1"], ["256.1.1.1", "1.2.3"]),
        (text(format="ipv6"), ["::1", "2001:db8::8a2e"], ["1.2.3.4", ":::"]),
        (text(format="hostname"), ["example.org"], ["-a.org", "a b"]),
        (text(format="uri"), ["https://example.org/a?b=c#d", "urn:isbn:1"], ["example", "://"]),
        (text(format="duration"), ["P3D", "PT1H30M"], ["3D", "P"]),
        ({"type": "integer", "minimum": 0, "maximum": 150}, [0, 150, 42], [-1, 151]),
        ({"type": "integer", "exclusiveMinimum": 0}, [1, 99], [0, -3]),
        ({"type": "integer", "exclusiveMaximum": 10, "minimum": 5}, [5, 9], [10, 4]),
        ({"type": "integer", "multipleOf": 5}, [0, 15, 100], [3, 7]),
        ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.25, 1], [1.5, -0.1]),
        ({"type": "number", "exclusiveMinimum": 0.5}, [0.75, 3], [0.5, 0.25, 0]),
        (arr(_S), [[], ["a"], ["a", "b"]], [[1], "a"]),
        (arr(_I, minItems=1), [[1], [1, 2]], [[]]),
        (arr(_I, maxItems=2), [[], [1, 2]], [[1, 2, 3]]),
        (arr(_N, minItems=2, maxItems=3), [[1, 2], [1, 2, 0.5]], [[1], [1, 2, 3, 4]]),
        (arr(arr(_I)), [[[1], []]], [[1], [["a"]]]),
        (arr({"enum": ["a", "b"]}, maxItems=3), [["a", "b", "a"]], [["c"]]),
        ({"type": "array", "prefixItems": [_N, _N], "items": False}, [[1.5, 2]], [[1, 2, 3], ["a", 1]]),
        ({"type": "array", "prefixItems": [_S], "items": _I}, [["a", 1, 2]], [["a", "b"], [1]]),
        (arr(obj({"id": _I}, "id")), [[{"id": 1}, {"id": 2}]], [[{}], [{"id": "1"}]]),
        (obj({"x": _N, "y": _N}, "x", "y"), [{"x": 1, "y": 2.5}], [{"x": 1}, {"x": "1", "y": 2}]),
        (obj({"x": _N}), [{}, {"x": 3}], [{"x": None}]),
        ({"type": "object", "additionalProperties": _I}, [{}, {"a": 1, "b c": 2}], [{"a": "1"}]),
        ({"type": "object", "additionalProperties": {"type": ["string", "null"]}},
         [{"a": None, "b": "x"}], [{"a": 1}]),
        ({"type": "object", "patternProperties": {"^x-": _S}, "additionalProperties": False},
         [{}, {"x-a": "1"}], [{"y": "1"}, {"x-a": 1}]),
        ({"type": "object", "patternProperties": {"^[a-z]+$": _I, "^[A-Z]+$": _S},
          "additionalProperties": False}, [{"abc": 1, "ABC": "x"}], [{"abc": "x"}, {"a1": 1}]),
        ({"anyOf": [_S, _I]}, ["a", 1], [1.5, None]),
        ({"anyOf": [{"type": "null"}, text(format="date")]}, [None, "2026-01-31"], ["x", 1]),
        ({"anyOf": [text(maxLength=2), arr(_S, maxItems=1)]}, ["ab", ["abc"]], ["abc", ["a", "b"]]),
        ({"oneOf": [_S, _B]}, ["a", True], [1, None]),
        ({"oneOf": [{"const": "on"}, {"const": "off"}]}, ["on", "off"], ["ON", True]),
        ({"oneOf": [{"const": 0}, text(), {"type": "null"}]}, [0, "0", None], [1]),
        ({"allOf": [_I, {"minimum": 3}]}, [3, 4], [2, 3.5]),
        ({"allOf": [text(minLength=2), text(maxLength=4)]}, ["ab", "abcd"], ["a", "abcde"]),
        ({}, [1, "a", None, {"b": [1, {}]}], []),
    ]  # fmt: skip
    cases: list[Case] = []
    for i, (kind, valid, invalid) in enumerate(kinds):
        annotated = {
            "title": f"Field {i}", "description": "a field with 'quotes'", "examples": [1],
            "default": None, "deprecated": False, "readOnly": True, "$comment": "ours", **kind,
        }  # fmt: skip
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.org/field.json", "title": "Record", "id": "record",
            "_format": "x", "x-order": 3,
            **obj({"value": annotated}, "value", additionalProperties=False),
        }  # fmt: skip
        cases.append((
            schema, [{"value": v} for v in valid],
            [*({"value": v} for v in invalid), {}, {"other": 1}],
        ))  # fmt: skip
        cases.append((arr(kind, maxItems=2), [[v] for v in valid], [[v] for v in invalid]))
    return cases


_ADDRESS = obj(
    {"street": _S, "zip": text(pattern="^[0-9]{5}$"), "country": {"enum": ["DE", "FR"]}},
    "street",
    "zip",
    additionalProperties=False,
)
_WHOLE: list[Case] = [
    # as pydantic writes them
    ({"$defs": {"Address": _ADDRESS, "Kind": {"enum": ["a", "b"], "type": "string", "title": "Kind"}},
      **obj({"name": _S, "kind": {"$ref": "#/$defs/Kind"}, "home": {"$ref": "#/$defs/Address"},
             "work": {"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}], "default": None}},
            "name", "kind", "home")},
     [{"name": "M", "kind": "a", "home": {"street": "S", "zip": "12345"}},
      {"name": "M", "kind": "b", "home": {"street": "", "zip": "00000", "country": "FR"}, "work": None}],
     [{"name": "M", "kind": "c", "home": {"street": "S", "zip": "12345"}},
      {"name": "M", "kind": "a", "home": {"street": "S", "zip": "1234"}}, {"name": "M"}]),
    # a tagged union
    ({"$defs": {
        "Cat": obj({"kind": {"const": "cat", "type": "string"}, "lives": _I}, "kind", "lives"),
        "Dog": obj({"kind": {"const": "dog", "type": "string"}, "tricks": arr(_S)}, "kind")},
      **obj({"pet": {
          "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                            "propertyName": "kind"},
          "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}}, "pet")},
     [{"pet": {"kind": "cat", "lives": 9}}, {"pet": {"kind": "dog", "tricks": ["sit"]}},
      {"pet": {"kind": "dog"}}],
     [{"pet": {"kind": "cat"}}, {"pet": {"kind": "cow"}}, {"pet": {"kind": "cat", "lives": "9"}}]),
    # recursion
    ({"$defs": {"Node": obj({"value": _I, "children": arr({"$ref": "#/$defs/Node"})}, "value")},
      "$ref": "#/$defs/Node"},
     [{"value": 1}, {"value": 1, "children": [{"value": 2, "children": []}]}],
     [{"children": []}, {"value": 1, "children": [{}]}]),
    ({"definitions": {"a/b": {"type": "integer"}}, **obj({"n": {"$ref": "#/definitions/a~1b"}}, "n")},
     [{"n": 3}], [{"n": "3"}]),
    # a tool call
    (obj({"name": {"const": "get_weather"}, "arguments": obj(
        {"city": _S, "unit": {"enum": ["celsius", "fahrenheit"]}, "days": {
            "type": "integer", "minimum": 1, "maximum": 7}},
        "city", additionalProperties=False)}, "name", "arguments", additionalProperties=False),
     [{"name": "get_weather", "arguments": {"city": "Paris"}},
      {"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 7}}],
     [{"name": "get_time", "arguments": {"city": "Paris"}},
      {"name": "get_weather", "arguments": {"city": "Paris", "days": 8}}]),
    # a few of ours
    (arr(obj({"start": _I, "end": _I, "label": {"enum": ["PER", "LOC", "ORG"]}},
             "start", "end", "label")),
     [[], [{"start": 0, "end": 4, "label": "PER"}]], [[{"start": 0, "end": 4, "label": "X"}], {}]),
    (obj({"answer": {"enum": ["yes", "no"]}, "why": text(maxLength=20)}, "answer", "why"),
     [{"answer": "no", "why": "because"}],
     [{"answer": "maybe", "why": ""}, {"answer": "no", "why": "x" * 21}]),
    (obj({"reasoning": arr(_S, minItems=1, maxItems=3), "result": _N}, "reasoning", "result"),
     [{"reasoning": ["a"], "result": 0.5}], [{"reasoning": [], "result": 1}, {"result": 1}]),
]  # fmt: skip

REAL: list[Case] = [*_fields(), *_WHOLE]
