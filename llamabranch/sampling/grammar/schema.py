"""JSON schemas before llguidance gets them: made from types, and checked for finite texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import NoReturn, cast

from ...arguments import shown
from ...errors import ConfigError, GrammarError, ParseError, told
from ...model.functions import type_schemas
from .keywords import pointed, prepare, schema_parts, step
from .numbers import Digits
from .skeleton import same_text, unique_values

__all__ = ["TAKEN", "closed", "of_type", "parse", "place", "repetition", "value",
    "with_plain_keys",
]  # fmt: skip

TAKEN = (
    "pass a pydantic model (class Person(BaseModel)), a dataclass, a TypedDict, a list of them "
    "(list[Person]), or a JSON schema as a dict or text"
)
_COMBINE = ("allOf", "anyOf", "oneOf", "$ref")
_DEFS = ("$defs", "definitions")
# Keywords that map names to schemas.
_MAPS = ("properties", "patternProperties", "dependentSchemas", *_DEFS)
_VALUES = ("const", "enum", "default", "examples")
_DECLARED = ("properties", "patternProperties", "required")
_CONTROLS = r"\x00-\x1f\x7f"
_MOST_S = 2.0  # for finding the part of a schema that is refused
_MOST_NAMES = 100_000  # names that are added to close objects
_OPEN = (
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames",
    "minProperties", "dependentSchemas",
)  # fmt: skip

_TYPES = {
    str: "string", bool: "boolean", type(None): "null", int: "number", float: "number",
    list: "array", dict: "object",
}  # fmt: skip


# llguidance allows second 60 at any time; validators and Python's datetime do not.
_NO_LEAP_SECOND = {"time": "^.{6}[0-5]", "date-time": "^.{17}[0-5]"}


def of_type(model: type) -> str:
    """Return the schema of a pydantic model, a TypedDict, a dataclass, or a list of these.

    Raises:
        ConfigError: pydantic is missing, or cannot describe the type.
    """
    try:
        return json.dumps(_adapter(model).json_schema(schema_generator=type_schemas()))
    except ImportError:
        raise
    except Exception as error:  # pydantic's errors have no common class
        reason = told(error).split(". ")[0].splitlines()[0]
        raise ConfigError(
            f"no JSON schema can be made from {shown(model)}: {reason}",
            hint=TAKEN,
        ) from error


def value(model: type | None, text: str) -> object:
    """Return the value of a JSON text, an instance of ``model`` if given; or raise ParseError."""
    read = json.loads if model is None else _adapter(model).validate_json
    try:
        return read(text)
    except Exception as error:  # a validator of the type may raise anything
        reason = " ".join(told(error).split())
        kind = "JSON" if model is None else f"for {shown(model)}"
        raise ParseError(f"the text is not valid {kind}: {reason:.300}", text=text) from error


def _adapter(model: type):  # type: ignore[no-untyped-def]
    try:
        from pydantic import TypeAdapter
    except ImportError:
        raise ConfigError(
            f"a schema from the type {shown(model)} needs pydantic", hint="pip install pydantic"
        ) from None
    return TypeAdapter(model)


def parse(source: str) -> dict[str, object]:
    """Return the schema of a text, without keywords that only llguidance knows.

    Raises:
        GrammarError: it is not a JSON schema, or no finite text satisfies it.
    """
    try:
        schema = json.loads(source, parse_float=Digits, parse_constant=_refuse_constant)
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deep") from None
    except ValueError as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from error
    if schema is True:
        return {}
    if schema is False:
        raise GrammarError("no text satisfies the JSON schema false")
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema is an object, not {schema!r:.40}", hint=TAKEN)
    schema.pop("x-guidance", None)
    prepare(schema)
    for _, part in schema_parts(schema):
        if unique_values(part) is None:
            part.pop("uniqueItems", None)  # see `repetition`
    for part in _parts(schema):
        ways = part.get("oneOf")
        if isinstance(ways, list) and "anyOf" not in part and _exclude_each_other(ways):
            part["anyOf"] = part.pop("oneOf")
        no_leap = _NO_LEAP_SECOND.get(str(part.get("format")))
        if no_leap is not None and "pattern" not in part:
            part["pattern"] = no_leap
    if not _is_finite(schema):
        raise GrammarError(
            "no finite text satisfies the JSON schema: something that is required contains itself"
        )
    return schema


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def repetition(source: str, value: object) -> str:
    """Return the place of an array in ``value`` that violates ``uniqueItems``; "" if no array does.

    An ``anyOf`` or ``oneOf`` is violated if every part for the value's type is.
    """
    document = json.loads(source)
    return _repetition(value, document, document, "#") if '"uniqueItems"' in source else ""


def _repetition(value: object, part: object, document: dict[str, object], path: str) -> str:
    if not isinstance(part, dict) or not isinstance(value, (list, dict)):
        return ""
    if isinstance(value, list):
        items, prefix = part.get("items", True), part.get("prefixItems", [])
        first = prefix if isinstance(prefix, list) else []
        inner = [(f"{path}/{i}", item, first[i] if i < len(first) else items)
                 for i, item in enumerate(value)]  # fmt: skip
        texts = [same_text(item) for item in value]
        if part.get("uniqueItems") is True and len(set(texts)) < len(texts):
            return path
    else:
        properties, rest = part.get("properties", {}), part.get("additionalProperties", True)
        known = properties if isinstance(properties, dict) else {}
        inner = [(f"{path}/{k}", member, known.get(k, rest)) for k, member in value.items()]
    every = part.get("allOf")
    schemas = [pointed(part.get("$ref"), document), *(every if isinstance(every, list) else [])]
    repetitions = [
        _repetition(inner_value, schema, document, at) for at, inner_value, schema in inner
    ]
    repetitions += [_repetition(value, schema, document, path) for schema in schemas]
    kind = "array" if isinstance(value, list) else "object"
    for name in ("anyOf", "oneOf"):
        ways = part.get(name)
        ways = ways if isinstance(ways, list) else []
        repeated = [_repetition(value, way, document, path) for way in ways if _may_be(way, kind)]
        repetitions.append(repeated[0] if repeated and all(repeated) else "")
    return next(filter(None, repetitions), "")


def _may_be(part: object, kind: str) -> bool:
    types = part.get("type", kind) if isinstance(part, dict) else kind
    return kind in types if isinstance(types, list) else kind == types


def place(
    schema: dict[str, object], reason: str, refusal: Callable[[dict[str, object]], str]
) -> tuple[str, str]:
    """Return the innermost part that is refused on its own, as a JSON pointer, and the reason."""
    path, part, seen, is_empty = "#", schema, {"#"}, "Unsatisfiable" in reason
    defs = {name: schema[name] for name in _DEFS if name in schema}
    end = perf_counter() + _MOST_S
    while True:
        places = [
            (f"{path}/{at}", inner) for at, inner in _within(part) if not at.startswith(_DEFS)
        ]
        target = pointed(part.get("$ref"), schema)
        if isinstance(target, dict):
            places.append((str(part["$ref"]), target))
        for at, inner in places:
            is_due = at not in seen and perf_counter() < end
            inner_reason = refusal({**defs, **inner}) if is_due else ""
            if inner_reason == reason or (is_empty and "Unsatisfiable" in inner_reason):
                path, part, reason = at, inner, inner_reason
                seen.add(at)
                break
        else:
            return path, reason


def _exclude_each_other(ways: list[object]) -> bool:
    """Return whether these parts are constants and simple types with no value in common.

    llguidance itself recognises objects that differ in a type or in the constant of a property.
    """
    seen: set[str] = set()
    for way in ways:
        values = _values(way)
        if not values or any(value in seen or value.split(" ")[0] in seen for value in values):
            return False
        if any(
            value in _TYPES.values() and any(s.startswith(value + " ") for s in seen)
            for value in values
        ):
            return False
        seen.update(values)
    return True


def _values(part: object) -> list[str]:
    """Return the type and text of each constant that ``part`` allows, or its type; [] if unknown."""
    if not isinstance(part, dict):
        return []
    if "enum" in part or "const" in part:
        constants = part["enum"] if isinstance(part.get("enum"), list) else [part.get("const")]
        return [f"{_TYPES[type(c)]} {json.dumps(c, sort_keys=True)}" for c in constants]
    return [str(part["type"])] if part.get("type") in ("string", "boolean", "null") else []


def closed(schema: dict[str, object]) -> dict[str, object]:
    """Return the schema with ``additionalProperties: false`` where it does not mention other properties.

    Objects then have exactly the properties that are declared or required, as in llama.cpp. If several
    schemas apply to one object, the outermost one gets the names of all of them.
    """
    schema = cast(dict[str, object], _copied(schema))
    outer, inner = set[int](), set[int]()
    for part in _parts(schema):
        every = part.get("allOf")
        n_schemas = sum(name in part for name in (*_COMBINE, "properties"))
        if n_schemas > 1 or (isinstance(every, list) and len(every) > 1):
            outer.add(id(part))
            _add_inner(_applied(part, schema), schema, inner)
    n_names, is_closed = 0, True
    for part in list(_parts(schema)):
        declares = "properties" in part or (part.get("type") == "object" and "required" in part)
        if id(part) not in inner and (declares or id(part) in outer):
            names = _names(part, schema, set())
            n_names += len(names or ())
            is_closed = is_closed and names is not None and n_names < _MOST_NAMES
            if n_names < _MOST_NAMES and (names or (names == {} and "properties" in part)):
                part.update(properties=names, additionalProperties=False)
    _write_keys(schema, inner if is_closed else set())
    return schema


def with_plain_keys(schema: dict[str, object]) -> dict[str, object]:
    """Return the schema with other properties by a pattern, where some properties are declared.

    llguidance would also take "\\u0061" as the name of another property beside a declared "a". A pattern
    matches decoded names. Properties beside ``patternProperties`` are not allowed.
    """
    schema = cast(dict[str, object], _copied(schema))
    _write_keys(schema, set())
    return schema


def _write_keys(schema: dict[str, object], closed_outside: set[int]) -> None:
    for part in [*_parts(schema)]:
        rest = part.get("additionalProperties", id(part) not in closed_outside)
        is_object = any(name in part for name in _DECLARED[:2]) or part.get("type") == "object"
        if rest is False or not is_object or not any(part.get(name) for name in _DECLARED):
            continue
        if "patternProperties" not in part:
            properties, required = part.get("properties"), part.get("required")
            names = [*(properties if isinstance(properties, dict) else ()),
                     *(required if isinstance(required, list) else ())]  # fmt: skip
            known = {name: rest for name in names if isinstance(name, str)}
            part["properties"] = known | (properties if isinstance(properties, dict) else {})
            part["patternProperties"] = {f"^{_other_texts({*known})}$": rest}
        part["additionalProperties"] = False


def _other_texts(texts: set[str]) -> str:
    """Return a regular expression for all texts but these, without control characters."""
    by_first: dict[str, set[str]] = {}
    for text in texts - {""}:
        by_first.setdefault(text[0], set()).add(text[1:])
    firsts = {first: f"\\x{{{ord(first):x}}}" for first in by_first}
    ways = [f"[^{''.join(firsts.values())}{_CONTROLS}][^{_CONTROLS}]*"]
    ways += [firsts[first] + _other_texts(rest) for first, rest in by_first.items()]
    return f"(?:{'|'.join(ways)})" + ("" if "" in texts else "?")


def _copied(value: object) -> object:
    """Return a copy of a JSON value; numbers keep their digits."""
    if isinstance(value, dict):
        return {name: _copied(member) for name, member in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _applied(part: dict[str, object], document: dict[str, object]) -> list[object]:
    """Return the other schemas that can apply to the same value."""
    schemas = [pointed(part["$ref"], document)] if "$ref" in part else []
    for name in _COMBINE[:3]:
        ways = part.get(name)
        schemas += ways if isinstance(ways, list) else []
    return schemas


def _add_inner(ways: list[object], document: dict[str, object], ids: set[int]) -> None:
    """Add the ids of ``ways``, and of all schemas that apply to the same value."""
    for way in ways:
        if isinstance(way, dict) and id(way) not in ids:
            ids.add(id(way))
            _add_inner(_applied(way, document), document, ids)


def _names(part: object, document: dict[str, object], seen: set[int]) -> dict[str, object] | None:
    """Return the properties that are declared or required; None if others are allowed."""
    if not isinstance(part, dict) or id(part) in seen:
        return {}
    seen.add(id(part))
    properties, required = part.get("properties", {}), part.get("required", [])
    is_valid = isinstance(properties, dict) and isinstance(required, list)
    if not is_valid or any(name in part for name in _OPEN):
        return None
    names: dict[str, object] = {name: True for name in required if isinstance(name, str)}
    for way in _applied(part, document):
        more = _names(way, document, seen)
        if more is None:
            return None
        names |= dict.fromkeys(more, True)
    return {**properties, **names, **properties}  # its own properties come first


def _is_finite(document: dict[str, object]) -> bool:
    """Return whether a finite text can satisfy ``document``: the least fixed point over its parts."""
    parts = {id(part): part for part in _parts(document)}
    needs = {key: _needs(part, document) for key, part in parts.items()}
    users: dict[int, list[int]] = {key: [] for key in parts}
    for key, groups in needs.items():
        for group in groups:
            for part in group:
                users[id(part)].append(key)
    finite: set[int] = set()
    todo = list(parts)
    while todo:
        key = todo.pop()
        if key not in finite and all(any(id(p) in finite for p in group) for group in needs[key]):
            finite.add(key)
            todo.extend(users[key])
    return id(document) in finite


def _parts(document: dict[str, object]) -> Iterator[dict[str, object]]:
    """Yield a schema and all schemas in it."""
    todo = [document]
    while todo:
        part = todo.pop()
        yield part
        todo.extend(inner for _, inner in _within(part))


def _within(part: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the schemas directly inside a schema, each with its place."""
    for name, value in part.items():
        if isinstance(value, dict) and name not in (*_MAPS, *_VALUES):
            yield name, value
        elif isinstance(value, (dict, list)) and name not in _VALUES:
            keys = value if isinstance(value, dict) else range(len(value))
            for key in keys:
                if isinstance(value[key], dict):
                    yield f"{name}/{step(key)}", value[key]


def _needs(part: dict[str, object], document: dict[str, object]) -> list[list[object]]:
    """Return groups of parts. ``part`` is finite if each group has at least one finite part."""
    every = part.get("allOf")
    needed = [pointed(part["$ref"], document)] if "$ref" in part else []
    needed += every if isinstance(every, list) else []
    properties, required = part.get("properties"), part.get("required")
    if part.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list):
        needed += [properties.get(name) for name in required if isinstance(name, str)]
    least = part.get("minItems", 0)
    if part.get("type") == "array" and isinstance(least, int) and least > 0:
        first = part.get("prefixItems")
        needed += first[:least] if isinstance(first, list) else [part.get("items")]
    groups: list[list[object]] = [[need] for need in needed if isinstance(need, dict)]
    for name in ("anyOf", "oneOf"):
        ways = part.get(name)
        if isinstance(ways, list) and ways and all(isinstance(way, dict) for way in ways):
            groups.append(ways)
    return groups
