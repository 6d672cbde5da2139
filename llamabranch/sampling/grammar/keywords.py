"""Keywords of JSON schemas, rewritten for llguidance; unsupported ones are refused by name.

Keywords that constrain nothing are left out: ``uniqueItems: false``, ``not: false``, formats that any
text fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from ...errors import GrammarError
from . import numbers
from .patterns import rust_pattern

__all__ = ["CONSTRAINTS", "REFUSED", "Schema", "pointed", "prepare", "schema_parts", "step"]

Schema = dict[str, object]
REFUSED = "the JSON schema is refused at"  # then comes a place, and the reason

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
    "maxContains",
)  # fmt: skip
_INNER = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties",
    "propertyNames", "contains", "not", "if", "then", "else",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "dependentSchemas")
# All keywords that can refuse a value. Other keywords are annotations.
CONSTRAINTS = frozenset(
    (
        *_NUMBERS, *_COUNTS, *_INNER, *_LISTS, *_NAMED, "$ref", "$dynamicRef", "const", "enum", "type",
        "required", "dependentRequired", "dependencies", "uniqueItems", "pattern", "format",
        "multipleOf",
    )
)  # fmt: skip
_MOST = 1 << 31  # characters or items: more than any text has
_DIALECTS = re.compile(
    r"^(http://json-schema\.org/draft-0[467]|https://json-schema\.org/draft/20(19-09|20-12))/schema#*$"
)
_COMBINE = ("allOf", "anyOf", "oneOf", "$ref")

# Formats that llguidance does not know.
_ANY_TEXT = {"path", "file-path", "directory-path", "binary", "password"}
_ANY_NUMBER = {"float", "double"}
_BASE64 = "(?:[{0}]{{4}})*(?:[{0}]{{2}}==|[{0}]{{3}}=)?"
_DATE = (
    "(?:[1-9][0-9]{3}|0[0-9]{2}[1-9]|0[0-9][1-9]0|0[1-9]00)-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|"
    "3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_OFFSET = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"
_FORMATS = {
    "iso-date-time": f"^{_DATE}T{_TIME}{_OFFSET}$",
    "date-time-local": f"^{_DATE}T{_TIME}$",
    "iso-time": f"^{_TIME}{_OFFSET}$",
    "byte": f"^{_BASE64.format('A-Za-z0-9+/')}$",
    "base64": f"^{_BASE64.format('A-Za-z0-9+/')}$",
    "base64url": f"^{_BASE64.format('A-Za-z0-9_-')}$",
    **{f"uuid{n}": f"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{n}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
       for n in range(1, 9)},
}  # fmt: skip
_INTEGERS = {"int32": 31, "int64": 63}


def prepare(document: Schema) -> None:
    """Rewrite, in place, all parts of a schema that can apply to a value.

    Raises:
        GrammarError: a part has something unsupported; the message names the keyword and its place.
    """
    _resolve_anchors(document)
    multiples: list[tuple[int, int]] = []
    combines = False
    for path, part in schema_parts(document):
        with _at(path):
            if "$schema" in part and not _DIALECTS.search(str(part["$schema"])):
                del part["$schema"]  # read as 2020-12
            _drop_idle(part)
            _write_patterns(part)
            _write_format(part)
            _check_numbers(part)
            _write_names(part)
            if numbers.is_number(part.get("multipleOf")):
                multiples.append(numbers.multiple(part["multipleOf"]))
        combines = combines or any(name in part for name in _COMBINE)
    if combines:
        with _at("#"):
            numbers.check_multiples(multiples)


@contextmanager
def _at(path: str) -> Iterator[None]:
    """Add the place to the message of an error."""
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{REFUSED} {path}: {error.message}", hint=error.hint) from None


def schema_parts(document: Schema, start: Schema | None = None) -> Iterator[tuple[str, Schema]]:
    """Yield each part that may apply to a value, outer ones first, with its JSON pointer.

    Definitions count only if something refers to them. With ``start``, a part of the document, only the
    parts that can apply to a value of that part are yielded.
    """
    todo, seen = [("#", document if start is None else start)], set[int]()
    while todo:
        path, part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        target = pointed(part.get("$ref"), document)
        if isinstance(target, dict):
            todo.append((str(part["$ref"]), target))
        for name in (*_INNER, *_LISTS, *_NAMED):
            value = part.get(name)
            if isinstance(value, dict) and name in _INNER:
                todo.append((f"{path}/{name}", value))
            elif isinstance(value, (dict, list)):
                keys = value if isinstance(value, dict) else range(len(value))
                for key in keys:
                    if isinstance(value[key], dict):
                        todo.append((f"{path}/{name}/{step(key)}", value[key]))


def step(key: object) -> str:
    """Return a key or an index as a step of a JSON pointer."""
    return str(key).replace("~", "~0").replace("/", "~1")


def pointed(reference: object, document: object) -> object:
    """Return the part that a reference within the document points to; None if it points nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    value = document
    for name in reference[1:].split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(key)
        elif (
            isinstance(value, list) and key.isdecimal() and len(key) < 10 and int(key) < len(value)
        ):
            value = value[int(key)]
        else:
            return None
    return value


def _resolve_anchors(document: Schema) -> None:
    """Replace references to an ``$anchor`` by references to its place."""
    places: dict[str, str] = {}
    references: list[Schema] = []
    todo: list[tuple[str, object]] = [("#", document)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dict):
            if isinstance(anchor := value.get("$anchor"), str):
                places.setdefault(anchor, path)
            if isinstance(value.get("$ref"), str):
                references.append(value)
        if isinstance(value, (dict, list)):
            keys = value if isinstance(value, dict) else range(len(value))
            for key in keys:
                if isinstance(value[key], (dict, list)) and key not in (
                    "const",
                    "enum",
                    "examples",
                ):
                    todo.append((f"{path}/{step(key)}", value[key]))
    for part in references:
        name = str(part["$ref"])
        if name[:1] == "#" and name[1:2] != "/" and name[1:] in places:
            part["$ref"] = places[name[1:]]


# -- keywords that constrain nothing ---------------------------------------------------------------


def _takes_all(value: object) -> bool:
    """Return whether a schema is true, or has only annotations."""
    return value is True or (isinstance(value, dict) and not CONSTRAINTS & value.keys())


def _takes_names(value: object) -> bool:
    """Return whether a schema allows every property name; names are strings."""
    if isinstance(value, dict) and value.get("type") == "string":
        value = {name: constraint for name, constraint in value.items() if name != "type"}
    return _takes_all(value)


def _names_nothing(value: object) -> bool:
    """Return whether all dependencies are empty."""
    return isinstance(value, dict) and all(
        dependency == [] or _takes_all(dependency) for dependency in value.values()
    )


_IDLE: dict[str, Callable[[object], bool]] = {
    "uniqueItems": lambda value: value is False,
    "propertyNames": _takes_names,
    "unevaluatedProperties": _takes_all,
    "unevaluatedItems": _takes_all,
    "dependentRequired": _names_nothing,
    "dependentSchemas": _names_nothing,
    "dependencies": _names_nothing,
    "not": lambda value: value is False,
    "required": lambda value: value is False,  # of draft 3
    "minProperties": lambda value: value == 0,
    "minItems": lambda value: value == 0,
    "minLength": lambda value: value == 0,
    "additionalItems": _takes_all,
}


def _drop_idle(part: Schema) -> None:
    for name, is_idle in _IDLE.items():
        if name in part and is_idle(part[name]):
            del part[name]
    _drop_condition(part)
    if "contains" not in part:
        part.pop("minContains", None)
        part.pop("maxContains", None)
    elif part.get("minContains") == 0 and "maxContains" not in part:
        del part["contains"], part["minContains"]
    elif _takes_all(part["contains"]) and "maxContains" not in part:
        least = part.pop("minContains", 1)
        del part["contains"]
        if isinstance(least, int):
            min_items = part.get("minItems", 0)
            part["minItems"] = max(least, min_items) if isinstance(min_items, int) else min_items


def _drop_condition(part: Schema) -> None:
    """Remove ``if`` when it has no effect, or when its result is known."""
    condition = part.get("if")
    ways = {name: part.get(name, True) for name in ("then", "else")}
    decides = "if" in part and not all(map(_takes_all, ways.values()))
    if decides and not isinstance(condition, bool):
        return
    for name in ("if", *ways):
        part.pop(name, None)
    chosen = ways["then" if condition is True else "else"]
    if decides and not _takes_all(chosen):
        every = part.get("allOf")
        part["allOf"] = [*(every if isinstance(every, list) else []), chosen]


# -- texts -----------------------------------------------------------------------------------------


def _write_patterns(part: Schema) -> None:
    if isinstance(part.get("pattern"), str):
        part["pattern"] = rust_pattern(str(part["pattern"]))
    by_pattern = part.get("patternProperties")
    if isinstance(by_pattern, dict):
        part["patternProperties"] = {
            rust_pattern(name): schema for name, schema in by_pattern.items()
        }


def _write_format(part: Schema) -> None:
    name = part.get("format")
    if not isinstance(name, str):
        return
    types = part.get("type", [])
    types = types if isinstance(types, list) else [types]
    is_number = bool(types) and not {"string"} & set(types)
    if name in _ANY_TEXT or name in _ANY_NUMBER or (is_number and name not in _INTEGERS):
        del part["format"]  # for numbers and objects a format is an annotation
    elif name in _INTEGERS:
        del part["format"]
        if is_number:
            limit = 1 << _INTEGERS[name]
            part.setdefault("minimum", -limit)
            part.setdefault("maximum", limit - 1)
    elif name in _FORMATS and "pattern" not in part:
        del part["format"]
        part["pattern"] = rust_pattern(_FORMATS[name])


def _write_names(part: Schema) -> None:
    """Replace ``propertyNames`` by keywords that llguidance knows, if possible."""
    names = part.get("propertyNames")
    if not isinstance(names, dict) or "properties" in part or "patternProperties" in part:
        return
    own = {
        key: constraint for key, constraint in names.items() if key in CONSTRAINTS and key != "type"
    }
    rest = part.get("additionalProperties", True)
    if set(own) in ({"enum"}, {"const"}):
        values = own["enum"] if "enum" in own else [own["const"]]
        known = [value for value in cast(list[object], values) if isinstance(value, str)]
        part["properties"] = dict.fromkeys(known, rest)
    elif set(own) == {"pattern"} and isinstance(own["pattern"], str):
        part["patternProperties"] = {rust_pattern(own["pattern"]): rest}
    elif set(own) <= {"minLength", "maxLength"} and all(isinstance(n, int) for n in own.values()):
        least, most = own.get("minLength", 0), own.get("maxLength", "")
        part["patternProperties"] = {rust_pattern(f"^(?s:.){{{least},{most}}}$"): rest}
    else:
        return
    del part["propertyNames"]
    part["additionalProperties"] = False


# -- numbers ---------------------------------------------------------------------------------------


def _check_numbers(part: Schema) -> None:
    for side in ("inimum", "aximum"):  # in draft 4 exclusiveMinimum is a flag
        excluded, bound = f"exclusiveM{side}", f"m{side}"
        if isinstance(part.get(excluded), bool) and part.pop(excluded) and bound in part:
            part[excluded] = part.pop(bound)
    for name, limit in numbers.without_ends(part).items():
        del part[f"exclusiveM{name[1:]}"]
        part[name] = limit
    for name in _COUNTS:
        value = part.get(name)
        if name not in part or not numbers.is_number(value):
            continue
        number = cast(float, value)
        if number < 0 or number != int(number):
            raise GrammarError(
                f"{name} must be a whole number, not {numbers.exact_text(value):.40}"
            )
        if number < _MOST:
            part[name] = int(number)
        elif name.startswith("max"):
            del part[name]
        else:
            raise GrammarError(f"{name} is {int(number)}: no text is that long")
