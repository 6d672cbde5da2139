"""JSON schemas before llguidance gets them: made from types, checked, and their objects closed.

What llguidance does silently wrong is refused by name and place: numbers that its 64-bit floats cannot
tell apart, and patterns that it reads in another way. Keywords that it does not know it refuses itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from decimal import Context, Decimal
from math import isfinite, prod
from time import perf_counter
from typing import NoReturn

from ...arguments import shown
from ...errors import ConfigError, GrammarError, ParseError, told
from ...model.functions import type_schemas
from .patterns import CONTROLS, rust_pattern

__all__ = [
    "REFUSED", "TAKEN", "closed", "of_type", "parse", "place", "pointed", "value", "without_unique",
]  # fmt: skip

Schema = dict[str, object]
REFUSED = "the JSON schema is refused at"  # then comes a place, and the reason
TAKEN = (
    "pass a pydantic model (class Person(BaseModel)), a dataclass, a TypedDict, a list of them "
    "(list[Person]), or a JSON schema as a dict or text"
)
_COMBINE = ("allOf", "anyOf", "oneOf", "$ref")
_DEFS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties", "dependentSchemas", *_DEFS)  # from names to schemas
_VALUES = ("const", "enum", "default", "examples")
_NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_DECLARED = ("properties", "patternProperties", "required")
_OPEN = (
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames",
    "minProperties", "dependentSchemas",
)  # fmt: skip
# Values of keywords that refuse nothing, and formats that refuse no text: generators write them.
_IDLE: dict[str, list[object]] = {
    "uniqueItems": [False], "not": [False], "propertyNames": [True, {}, {"type": "string"}],
    "unevaluatedProperties": [True, {}], "unevaluatedItems": [True, {}], "dependentRequired": [{}],
    "format": ["path", "file-path", "directory-path", "binary", "password"],
}  # fmt: skip
_DIALECTS = re.compile(
    r"(http://json-schema\.org/draft-0[467]|https://json-schema\.org/draft/20(19-09|20-12))/schema#*"
)
# llguidance allows second 60 at any time; validators and Python's datetime do not.
_NO_LEAP_SECOND = {"time": "^.{6}[0-5]", "date-time": "^.{17}[0-5]"}
_DATE = (
    "(?:[1-9][0-9]{3}|0[0-9]{2}[1-9]|0[0-9][1-9]0|0[1-9]00)-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|"
    "3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_OFFSET = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"
# Formats of Python's types, which llguidance does not know, as patterns.
_PATTERNS = {
    "iso-date-time": f"^{_DATE}T{_TIME}{_OFFSET}$",
    "date-time-local": f"^{_DATE}T{_TIME}$",
    "iso-time": f"^{_TIME}{_OFFSET}$",
}
_MOST_S = 2.0  # for finding the part of a schema that is refused
_MOST_NAMES = 100_000  # names that are added to close objects
_MOST_COUNT = 1 << 31
_MOST_MULTIPLE = 100_000  # remainders, each a state of the grammar; this many take 1.5 s and 50 MB
_EXACT = Context(prec=400, Emax=999_999, Emin=-999_999)


class _Inexact(float):
    """A number that llguidance would write with other digits."""


# -- types and values ------------------------------------------------------------------------------


def of_type(model: type) -> str:
    """Return the schema of a pydantic model, a TypedDict, a dataclass, or a list of these.

    Raises:
        ConfigError: pydantic is missing, or cannot describe the type.
    """
    try:
        schema = _adapter(model).json_schema(schema_generator=type_schemas())
        return json.dumps(without_unique(schema))
    except ImportError:
        raise
    except Exception as error:  # pydantic's errors have no common class
        reason = told(error).split(". ")[0].splitlines()[0]
        reason = f"no JSON schema can be made from {shown(model)}: {reason}"
        raise ConfigError(reason, hint=TAKEN) from error


def without_unique(schema: Schema) -> Schema:
    """Return a schema without ``uniqueItems``, for Python: a set drops repetitions itself.

    An array of values that are listed gets no more items than there are values, so it comes to an end.
    """
    schema = deepcopy(schema)
    for _, part in _walk(schema):
        if part.pop("uniqueItems", None) is True and (n := _n_values(part.get("items"), schema)):
            most = part.get("maxItems")
            part["maxItems"] = min(n, most) if isinstance(most, int) else n
    return schema


def _n_values(items: object, document: Schema) -> int:
    """Return how many values a schema lists; 0 if it lists none."""
    definitions = document.get("$defs")
    if isinstance(items, dict) and isinstance(definitions, dict) and "$ref" in items:
        items = definitions.get(str(items["$ref"]).removeprefix("#/$defs/"))
    if not isinstance(items, dict):
        return 0
    if items.get("type") == "boolean":
        return 2
    listed = [items["const"]] if "const" in items else items.get("enum")
    return len(listed) if isinstance(listed, list) else 0


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


# -- texts of schemas ------------------------------------------------------------------------------


def parse(source: str) -> Schema:
    """Return the schema of a text, as llguidance gets it.

    Raises:
        GrammarError: it is not a JSON schema, or llguidance would not follow a part of it; the message
            names the keyword and the place.
    """
    try:
        schema = json.loads(source, parse_float=_number, parse_constant=_refuse_constant)
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
    units: set[int] = set()
    for path, part in [*_walk(schema)]:
        try:
            units.add(_check(part))
        except GrammarError as error:
            raise GrammarError(f"{REFUSED} {path}: {error.message}") from None
    if prod(units) >= 1 << 32 and any(f'"{name}"' in source for name in _COMBINE):
        raise GrammarError(f"{REFUSED} #: the numbers of multipleOf have too many digits")
    _check_end(schema, schema, {})
    return schema


def _check_end(part: object, document: Schema, is_outside: dict[int, bool]) -> None:
    """Refuse a part that requires itself."""
    if not isinstance(part, dict) or is_outside.get(id(part)) is False:
        return
    if id(part) in is_outside:
        reason = "something that is required contains itself"
        raise GrammarError(f"no finite text satisfies the JSON schema: {reason}")
    every, required = part.get("allOf"), part.get("required")
    needed = [pointed(part.get("$ref"), document), *(every if isinstance(every, list) else [])]
    if part.get("type") == "object" and isinstance(properties := part.get("properties"), dict):
        names = required if isinstance(required, list) else []
        needed += [properties.get(name) for name in names if isinstance(name, str)]
    if part.get("type") == "array" and part.get("minItems") and "prefixItems" not in part:
        needed.append(part.get("items"))
    is_outside[id(part)] = True
    for need in needed:
        _check_end(need, document, is_outside)
    is_outside[id(part)] = False


def _number(text: str) -> float:
    value, number = float(text), _EXACT.create_decimal(text).normalize(_EXACT)
    if not isfinite(value):
        raise GrammarError(f"the number {text:.40} is larger than JSON readers can hold")
    n_digits, size = len(number.as_tuple().digits), number.adjusted() + 1
    return (
        value
        if not number or (max(n_digits, size) <= 15 and size - n_digits >= -20)
        else _Inexact(value)
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _check(part: Schema) -> int:
    """Check and rewrite a part for llguidance; return the units of its ``multipleOf``, or 1."""
    if not _DIALECTS.fullmatch(str(part.get("$schema"))):
        part.pop("$schema", None)  # read as 2020-12
    for name, values in _IDLE.items():
        if part.get(name) in values:
            del part[name]
    for name in _NUMBERS:
        if name in part and not _is_exact(part[name]):
            raise GrammarError(
                f"{name}: numbers beyond 2^53 or of more than 15 digits are not supported"
            )
    for name in _COUNTS:
        count = part.get(name, 0)
        if not isinstance(count, int) or not 0 <= count < _MOST_COUNT:
            raise GrammarError(f"{name} must be a whole number below 2^31, not {count!r:.40}")
    _check_bounds(part)
    if isinstance(part.get("pattern"), str):
        part["pattern"] = rust_pattern(str(part["pattern"]))
    elif (no_leap := _NO_LEAP_SECOND.get(str(part.get("format")))) is not None:
        part["pattern"] = no_leap
    elif (pattern := _PATTERNS.get(str(part.get("format")))) is not None:
        part["pattern"] = pattern
        del part["format"]
    by_pattern = part.get("patternProperties")
    if isinstance(by_pattern, dict):
        part["patternProperties"] = {rust_pattern(name): s for name, s in by_pattern.items()}
    return _units(part["multipleOf"]) if "multipleOf" in part else 1


def _is_exact(value: object) -> bool:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, _Inexact) or (isinstance(item, int) and abs(item) >= 1 << 53):
            return False
        if isinstance(item, (list, dict)):
            todo.extend(item.values() if isinstance(item, dict) else item)
    return True


def _check_bounds(part: Schema) -> None:
    """Refuse an excluded integer less than 1 from the other bound: llguidance takes it."""
    for name, others, sign in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        bound = part.get(name)
        for other in map(part.get, others):
            if not isinstance(bound, (int, float)) or not isinstance(other, (int, float)):
                continue
            if bound == int(bound) and 0 < sign * (other - bound) < 1:
                raise GrammarError(f"{name} is too close to the other bound")


def _units(multiple: object) -> int:
    """Return c of a ``multipleOf`` c / 10^e."""
    if not isinstance(multiple, (int, float)) or multiple <= 0:
        raise GrammarError(f"multipleOf must be above 0, not {multiple!r:.40}")
    digits = Decimal(str(multiple)).normalize(_EXACT).as_tuple()
    units, places = int("".join(map(str, digits.digits))), int(digits.exponent)
    if units > _MOST_MULTIPLE or not -10 < places < 9:
        raise GrammarError(f"multipleOf {multiple!r:.40} has too many digits")
    return units * int("1" + "0" * abs(places))


def pointed(reference: object, document: object) -> object:
    """Return the part that a reference within the document points to; None if it points nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    value = document
    for name in reference[1:].split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and re.fullmatch("[0-9]{1,9}", key) and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _walk(document: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield a schema and all schemas in it, each with its JSON pointer."""
    todo = [("#", document)]
    while todo:
        path, part = todo.pop()
        yield path, part
        todo.extend((f"{path}/{at}", inner) for at, inner in _within(part))


def _within(part: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas directly inside a schema, each with its place."""
    for name, value in part.items():
        if isinstance(value, dict) and name not in (*_MAPS, *_VALUES):
            yield name, value
        elif isinstance(value, (dict, list)) and name not in _VALUES:
            keys = value if isinstance(value, dict) else range(len(value))
            for key in keys:
                if isinstance(value[key], dict):
                    yield f"{name}/{_step(key)}", value[key]


def _step(key: object) -> str:
    """Return a key or an index as a step of a JSON pointer."""
    return str(key).replace("~", "~0").replace("/", "~1")


def place(schema: Schema, reason: str, refusal: Callable[[Schema], str]) -> tuple[str, str]:
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


# -- closed objects --------------------------------------------------------------------------------


def closed(schema: Schema, *, strictly: bool = True) -> Schema:
    """Return the schema with ``additionalProperties: false`` where it does not mention other properties.

    Objects then have exactly the properties that are declared or required, as in llama.cpp. If several
    schemas apply to one object, the outermost one gets the names of all of them. Other properties get a
    pattern of all other names: beside a declared "a", llguidance would take the key "\\u0061".
    Properties beside ``patternProperties`` are not allowed.

    Args:
        strictly: False = an object that does not mention other properties may have them.
    """
    schema = deepcopy(schema)
    outer, inner = set[int](), set[int]()
    parts = [part for _, part in _walk(schema)]
    for part in parts:
        every = part.get("allOf")
        n_schemas = sum(name in part for name in (*_COMBINE, "properties"))
        if n_schemas > 1 or (isinstance(every, list) and len(every) > 1):
            outer.add(id(part))
            _add_inner(_applied(part, schema), schema, inner)
    n_names, is_closed = 0, True
    for part in parts if strictly else ():
        declares = "properties" in part or (part.get("type") == "object" and "required" in part)
        if id(part) not in inner and (declares or id(part) in outer):
            names = _names(part, schema, set())
            n_names += len(names or ())
            is_closed = is_closed and names is not None and n_names < _MOST_NAMES
            if n_names < _MOST_NAMES and (names or (names == {} and "properties" in part)):
                part.update(properties=names, additionalProperties=False)
    for part in parts:
        is_open = id(part) not in inner or not (strictly and is_closed)
        rest = part.get("additionalProperties", is_open)
        is_object = any(name in part for name in _DECLARED[:2]) or part.get("type") == "object"
        if rest is False or not is_object or not any(part.get(name) for name in _DECLARED):
            continue
        if "patternProperties" not in part:
            properties, required = part.get("properties", {}), part.get("required", [])
            if not isinstance(properties, dict) or not isinstance(required, list):
                continue  # llguidance refuses it
            known = {n: rest for n in required if isinstance(n, str)} | properties
            part["properties"] = dict.fromkeys([*properties, *known]) | known
            part["patternProperties"] = {f"^{_other_texts({*known})}$": rest}
        part["additionalProperties"] = False
    return schema


def _other_texts(texts: set[str]) -> str:
    """Return a regular expression for all texts but these, without control characters."""
    by_first: dict[str, set[str]] = {}
    for text in texts - {""}:
        by_first.setdefault(text[0], set()).add(text[1:])
    firsts = {first: f"\\x{{{ord(first):x}}}" for first in by_first}
    ways = [f"[^{''.join(firsts.values())}{CONTROLS}][^{CONTROLS}]*"]
    ways += [firsts[first] + _other_texts(rest) for first, rest in by_first.items()]
    return f"(?:{'|'.join(ways)})" + ("" if "" in texts else "?")


def _applied(part: Schema, document: Schema) -> list[object]:
    """Return the other schemas that can apply to the same value."""
    schemas = [pointed(part["$ref"], document)] if "$ref" in part else []
    for name in _COMBINE[:3]:
        ways = part.get(name)
        schemas += ways if isinstance(ways, list) else []
    return schemas


def _add_inner(ways: list[object], document: Schema, ids: set[int]) -> None:
    """Add the ids of ``ways``, and of all schemas that apply to the same value."""
    for way in ways:
        if isinstance(way, dict) and id(way) not in ids:
            ids.add(id(way))
            _add_inner(_applied(way, document), document, ids)


def _names(part: object, document: Schema, seen: set[int]) -> Schema | None:
    """Return the properties that are declared or required; None if others are allowed."""
    if not isinstance(part, dict) or id(part) in seen:
        return {}
    seen.add(id(part))
    properties, required = part.get("properties", {}), part.get("required", [])
    is_valid = isinstance(properties, dict) and isinstance(required, list)
    if not is_valid or any(name in part for name in _OPEN):
        return None
    names: Schema = {name: True for name in required if isinstance(name, str)}
    for way in _applied(part, document):
        more = _names(way, document, seen)
        if more is None:
            return None
        names |= dict.fromkeys(more, True)
    return {**properties, **names, **properties}  # its own properties come first
