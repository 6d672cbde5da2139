"""Prepare JSON schemas for llguidance: make them from types, check them, and close their objects.

Schemas that llguidance would silently get wrong are refused, with the keyword and the place: numbers
that its 64-bit floats cannot tell apart, and patterns that it reads differently. It refuses unknown
keywords itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from decimal import Decimal
from math import isfinite, prod
from time import perf_counter
from typing import NoReturn

from ...arguments import shown
from ...errors import ConfigError, GrammarError, ParseError, told
from ...model.functions import type_schemas
from ...model.shape import pointed
from .patterns import CONTROLS, exactly, rust_pattern

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
_OPEN = ("additionalProperties", "patternProperties", "minProperties", "const", "enum")
# Keyword values that restrict nothing, and formats that every text has; schema generators write them.
_IDLE: dict[str, list[object]] = {
    "uniqueItems": [False], "not": [False], "propertyNames": [True, {}, {"type": "string"}],
    "unevaluatedProperties": [True, {}], "unevaluatedItems": [True, {}], "dependentRequired": [{}],
    "format": ["path", "file-path", "directory-path", "binary", "password"],
}  # fmt: skip
# llguidance allows second 60 at any time; validators and Python's datetime do not.
_NO_LEAP_SECOND = {"time": "^.{6}[0-5]", "date-time": "^.{17}[0-5]"}
_DATE = (
    "(?:[1-9][0-9]{3}|0[0-9]{2}[1-9]|0[0-9][1-9]0|0[1-9]00)-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|"
    "3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_OFFSET = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"
# Formats of Python's types, which llguidance does not support, as patterns.
_PATTERNS = {
    "iso-date-time": f"^{_DATE}T{_TIME}{_OFFSET}$",
    "date-time-local": f"^{_DATE}T{_TIME}$",
    "iso-time": f"^{_TIME}{_OFFSET}$",
}
_MOST_S = 2.0  # to find which part of a schema is refused
_MOST_DEPTH = 600  # schemas inside one another; 1,500 fit into 8 MB of stack
_MOST_NAMES = 100_000  # of properties that are added to close objects
_MOST_MULTIPLE = 100_000  # each remainder is a state of the grammar; so many take 1.5 s and 50 MB


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
    """Remove ``uniqueItems`` from a schema for Python, where a set drops repetitions itself.

    An array of listed values gets at most as many items as there are values, so that it ends.
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
    """Return the value of a JSON text, as an instance of ``model`` if it is set; or raise ParseError."""
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
    """Parse the text of a schema; return the schema that llguidance gets.

    Raises:
        GrammarError: it is not a JSON schema, or llguidance would get a part of it wrong; the message
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
    check_depth(schema)
    units: set[int] = set()
    for path, part in [*_walk(schema)]:
        try:
            units.add(_check(part))
        except GrammarError as error:
            raise GrammarError(f"{REFUSED} {path}: {error.message}") from None
    if prod(units) >= 1 << 32 and any(f'"{name}"' in source for name in _COMBINE):
        raise GrammarError(f"{REFUSED} #: the numbers of multipleOf have too many digits")
    _close(schema)
    return schema


def _number(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise GrammarError(f"the number {text:.40} is larger than JSON readers can hold")
    digits = re.sub("[eE].*|[-.]", "", text).strip("0")
    is_exact = not digits or (len(digits) <= 15 and 1e-20 <= abs(value) < 1e15)
    return value if is_exact else _Inexact(value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _check(part: Schema) -> int:
    """Check and rewrite a part for llguidance; return the units of its ``multipleOf``, or 1."""
    part.pop("$schema", None)  # read as 2020-12
    for name, values in _IDLE.items():
        if part.get(name) in values:
            del part[name]
    for name in _NUMBERS:
        if name in part and not _is_exact(part[name]):
            raise GrammarError(
                f"{name}: numbers beyond 2^53 or of more than 15 digits are not supported"
            )
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
    if isinstance(value, (list, dict)):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, _Inexact) and not (
        isinstance(value, int) and abs(value) >= 1 << 53
    )


def _check_bounds(part: Schema) -> None:
    """Refuse an exclusive integer bound less than 1 from the other bound: llguidance would allow it."""
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
    """Return c * 10^|e| of a ``multipleOf`` c * 10^e; 1 if llguidance refuses it."""
    if not isinstance(multiple, (int, float)) or not multiple:
        return 1
    digits = Decimal(str(multiple)).normalize().as_tuple()
    units, places = int("".join(map(str, digits.digits))), abs(int(digits.exponent))
    if units > _MOST_MULTIPLE or places > 9:
        raise GrammarError(f"multipleOf {multiple!r:.40} has too many digits")
    return units * int(10**places)


def _within(part: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas directly inside a schema, each with its place in it."""
    for name, value in part.items():
        inner: Iterable[tuple[object, object]] = [(name, value)]
        at = ""
        if isinstance(value, list) or (isinstance(value, dict) and name in _MAPS):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            at = f"{name}/"
        for key, schema in inner:
            if isinstance(schema, dict) and name not in _VALUES:
                yield at + str(key).replace("~", "~0").replace("/", "~1"), schema


def _walk(document: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield a schema and all schemas in it, each with its JSON pointer."""
    todo = [("#", document)]
    while todo:
        path, part = todo.pop()
        yield path, part
        todo += [(f"{path}/{at}", inner) for at, inner in _within(part)]


def check_depth(schema: object) -> None:
    """Raise GrammarError if schemas contain or refer to each other in too long a chain."""
    if isinstance(schema, dict):
        _depth(schema, schema, {})


def _depth(part: Schema, document: Schema, known: dict[int, int], level: int = 1) -> int:
    """Return the length of the longest chain of schemas, each inside the one before or referred to by it.

    llguidance recurses along the chain, and would overflow its stack and end the process.
    """
    if id(part) not in known:
        known[id(part)] = 0  # for now, because a schema may contain itself
        below = [schema for _, schema in _within(part)]
        place = str(part.get("$ref", "")).partition("#")
        if isinstance(target := pointed("".join(place[1:]), document), dict):
            below.append(target)
        depth = 0
        for schema in below if level <= _MOST_DEPTH else ():
            depth = max(depth, _depth(schema, document, known, level + 1))
        known[id(part)] = 1 + depth
    if level + known[id(part)] > _MOST_DEPTH:
        raise GrammarError("the JSON schema is nested too deep")
    return known[id(part)]


def place(schema: Schema, reason: str, refusal: Callable[[Schema], str]) -> tuple[str, str]:
    """Return the innermost part that is refused on its own, as a JSON pointer, and the reason."""
    is_empty = "Unsatisfiable" in reason
    defs = {name: schema[name] for name in _DEFS if name in schema}
    end = perf_counter() + _MOST_S
    for path, part in sorted(_walk(schema), key=lambda at: -at[0].count("/")):
        inner_reason = refusal({**defs, **part}) if perf_counter() < end else ""
        if inner_reason == reason or (is_empty and "Unsatisfiable" in inner_reason):
            return path, inner_reason
    return "#", reason


# -- closed objects --------------------------------------------------------------------------------


def _close(schema: Schema) -> None:
    """Allow an object only the properties that it declares or requires, unless it mentions others.

    If several schemas apply to one object, the outermost one gets all their names. Names of other
    properties must not have escapes, because llguidance would allow "\\u0061" in addition to a declared
    "a". With ``patternProperties``, no other properties are allowed.
    """
    parts = [part for _, part in _walk(schema)]
    groups = [(part, _applied(part, schema, {})) for part in parts if _is_combined(part)]
    inner = {key for part, group in groups for key in group if key != id(part)}
    shared = inner.union(id(part) for part, _ in groups)
    n_names = 0
    for part, group in groups:
        names = [name for other in group.values() for name in _named(other)]
        n_names += len(names)
        is_open = any(name in other for other in group.values() for name in _OPEN)
        if id(part) not in inner and names and not is_open and n_names < _MOST_NAMES:
            part["properties"] = dict.fromkeys(names, True) | _dict(part.get("properties"))
            part["additionalProperties"] = False
    for part in parts:
        names = _named(part)
        declares = "properties" in part or (part.get("type") == "object" and names)
        is_open = id(part) in shared or any(name in part for name in _OPEN)
        rest = part.get("additionalProperties", is_open)
        is_due = part.get("patternProperties") or (declares and (names or rest is False))
        if not is_due or part.get("additionalProperties") is False:
            continue
        if "patternProperties" not in part and isinstance(part.get("properties", {}), dict):
            part["properties"] = dict.fromkeys(names, rest or True) | _dict(part.get("properties"))
            if rest is not False:
                others = f"[^{CONTROLS}]*" if rest in (True, {}) else _other_texts({*names})
                part["patternProperties"] = {f"^{others}$": rest}
        part["additionalProperties"] = False


def _is_combined(part: Schema) -> bool:
    """Return whether several schemas apply to the same value."""
    every = part.get("allOf")
    names = [name for name in (*_COMBINE, "properties", "required") if name in part]
    return (len(names) > 1 and names[0] in _COMBINE) or (isinstance(every, list) and len(every) > 1)


def _applied(part: object, document: Schema, known: dict[int, Schema]) -> dict[int, Schema]:
    """Add a schema and all others that can apply to the same value to ``known``, by id; return it."""
    if isinstance(part, dict) and id(part) not in known:
        known[id(part)] = part
        for ways in ([pointed(part.get("$ref"), document)], *map(part.get, _COMBINE[:3])):
            for way in ways if isinstance(ways, list) else ():
                _applied(way, document, known)
    return known


def _named(part: Schema) -> list[str]:
    """Return the properties that a schema declares, then those that it requires."""
    required = part.get("required")
    names = [*_dict(part.get("properties")), *(required if isinstance(required, list) else ())]
    return [name for name in names if isinstance(name, str)]


def _dict(value: object) -> Schema:
    return value if isinstance(value, dict) else {}


def _other_texts(texts: set[str]) -> str:
    """Return a regular expression for all texts except these, without control characters."""
    by_first: dict[str, set[str]] = {}
    for text in texts - {""}:
        by_first.setdefault(text[0], set()).add(text[1:])
    ways = [f"[^{exactly(''.join(by_first))}{CONTROLS}][^{CONTROLS}]*"]
    ways += [exactly(first) + _other_texts(rest) for first, rest in by_first.items()]
    return f"(?:{'|'.join(ways)})" + ("" if "" in texts else "?")
