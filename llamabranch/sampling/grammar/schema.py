"""JSON schemas before llguidance reads them: from types, and those that no finite text satisfies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import quote, unquote

from ...arguments import shown
from ...errors import ConfigError, GrammarError, ParseError

__all__ = ["TAKEN", "closed", "of_type", "parse", "place", "value"]

TAKEN = (
    "give a pydantic model (class Person(BaseModel)), a dataclass, a TypedDict, a list of them "
    "(list[Person]), or a JSON schema as a dict or text"
)
_COMBINE = ("allOf", "anyOf", "oneOf", "$ref")
_DEFS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties", "dependentSchemas", *_DEFS)  # of names to schemas
_VALUES = ("const", "enum", "default", "examples")
_MERGED = {  # what schemas of objects have that are merged
    "type", "properties", "required", "allOf", "$ref", "title", "description", "default", "examples",
    *_DEFS,
}  # fmt: skip
_OPEN = (
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames",
    "minProperties", "dependentSchemas",
)  # fmt: skip

_TYPES = {
    str: "string", bool: "boolean", type(None): "null", int: "number", float: "number",
    list: "array", dict: "object",
}  # fmt: skip


# llguidance takes second 60 at any time; validators, and Python's datetime, do not.
_NO_LEAP_SECOND = {"time": "^.{6}[0-5]", "date-time": "^.{17}[0-5]"}


def of_type(model: type) -> str:
    """Return the schema of a pydantic model, a TypedDict, a dataclass, or a list of such.

    Raises:
        ConfigError: pydantic is missing, or cannot describe the type.
    """
    try:
        return json.dumps(_adapter(model).json_schema())
    except ImportError:
        raise
    except Exception as error:  # pydantic's errors have no common class
        reason = str(error).split(". ")[0].splitlines()[0]
        raise ConfigError(
            f"no JSON schema can be made of {shown(model)}: {reason}",
            hint=TAKEN,
        ) from error


def value(model: type | None, text: str) -> object:
    """Return the value of a JSON text, an instance of ``model`` if there is one.

    Raises:
        ParseError: the text is not JSON, or ``model`` refuses it.
    """
    read = json.loads if model is None else _adapter(model).validate_json
    try:
        return read(text)
    except Exception as error:  # a validator of the type may raise anything
        reason = " ".join(str(error).split())
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
    """Return the schema that a text describes, without what only llguidance reads.

    Raises:
        GrammarError: it is no JSON schema, or no finite text satisfies it.
    """
    try:
        schema = json.loads(source)
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


def place(schema: dict[str, object], is_refused: Callable[[dict[str, object]], bool]) -> str:
    """Return where the innermost part lies that ``is_refused`` by itself, as a JSON pointer."""
    path, part = "#", schema
    defs = {name: schema[name] for name in _DEFS if name in schema}
    seen = []
    while path not in seen:
        seen.append(path)
        for at, child in _within(part):
            if at.split("/")[0] not in _DEFS and is_refused({**defs, **child}):
                path, part = f"{path}/{at}", child
                break
        else:
            target = _target(part.get("$ref"), schema)
            if isinstance(target, dict):
                path, part = str(part["$ref"]), target
    return path


def _exclude_each_other(ways: list[object]) -> bool:
    """Return whether these parts are constants and simple types of which no two share a value.

    llguidance finds out itself where types or the constants of properties tell objects apart.
    """
    seen: set[str] = set()
    for way in ways:
        found = _values(way)
        if not found or any(value in seen or value.split(" ")[0] in seen for value in found):
            return False
        if any(
            value in _TYPES.values() and any(s.startswith(value + " ") for s in seen)
            for value in found
        ):
            return False
        seen.update(found)
    return True


def _values(part: object) -> list[str]:
    """Return the type and the text of each constant that ``part`` allows, or a type; [] where unknown."""
    if not isinstance(part, dict):
        return []
    if "enum" in part or "const" in part:
        constants = part["enum"] if isinstance(part.get("enum"), list) else [part.get("const")]
        return [f"{_TYPES[type(c)]} {json.dumps(c, sort_keys=True)}" for c in constants]
    return [str(part["type"])] if part.get("type") in ("string", "boolean", "null") else []


def closed(schema: dict[str, object]) -> dict[str, object]:
    """Return the schema with ``additionalProperties: false`` where it says nothing of other properties.

    Objects then have the properties that it declares or requires, as llama.cpp writes them too. Not where
    several schemas apply to one object that cannot be merged, each with some of its properties.
    """
    schema = json.loads(json.dumps(schema))
    for part in list(_parts(schema)):
        merged = _merged(part, schema) if "allOf" in part else None
        if merged and merged["properties"]:
            del part["allOf"]
            part.pop("$ref", None)
            part |= merged
    combined: set[int] = set()
    for part in _parts(schema):
        every = part.get("allOf")
        n_schemas = sum(name in part for name in _COMBINE) + ("properties" in part)
        if n_schemas > 1 or (isinstance(every, list) and len(every) > 1):
            _add_combined(part, schema, combined)
    for part in _parts(schema):
        names = _names(part)
        if names is None or id(part) in combined or any(name in part for name in _OPEN):
            continue
        if "properties" in part or (names["required"] and part.get("type") == "object"):
            named = names["properties"]
            part["properties"] = {**named, **{n: {} for n in names["required"] if n not in named}}
            part["additionalProperties"] = False
    return schema


def _names(part: dict[str, object]) -> dict[str, Any] | None:
    """Return the type, properties and required names of a schema; None where they are invalid."""
    found: dict[str, Any] = {"properties": {}, "required": []}
    found |= {name: part[name] for name in ("type", *found) if name in part}
    is_list = isinstance(found["required"], list)
    is_valid = is_list and all(isinstance(name, str) for name in found["required"])
    return found if is_valid and isinstance(found["properties"], dict) else None


def _merged(part: object, document: dict[str, object], seen: tuple[int, ...] = ()) -> Any:
    """Return the type, properties and required names of an object, then those in its ``allOf``.

    None where there is more to it, or two schemas declare one property. Properties behind a reference
    are references to them.
    """
    if not isinstance(part, dict) or id(part) in seen or not part.keys() <= _MERGED:
        return None
    found, every, seen = _names(part), part.get("allOf", []), (*seen, id(part))
    if found is None or found.get("type", "object") != "object" or not isinstance(every, list):
        return None
    ways = [_merged(way, document, seen) for way in every]
    if "$ref" in part:
        target, at = _target(part["$ref"], document), f"{part['$ref']}/properties/"
        is_chain = isinstance(target, dict) and "$ref" in target
        base = None if is_chain else _merged(target, document, seen)
        names = base["properties"] if base else ()
        ways.append(base and {**base, "properties": {n: {"$ref": at + _escaped(n)} for n in names}})
    for way in ways:
        if way is None or way["properties"].keys() & found["properties"].keys():
            return None
        way["properties"] = {**found["properties"], **way["properties"]}
        found = {**found, **way, "required": [*found["required"], *way["required"]]}
    return found


def _add_combined(part: object, document: dict[str, object], found: set[int]) -> None:
    """Add ``part`` and all that applies to the same value."""
    if not isinstance(part, dict) or id(part) in found:
        return
    found.add(id(part))
    if "$ref" in part:
        _add_combined(_target(part["$ref"], document), document, found)
    for name in ("allOf", "anyOf", "oneOf"):
        ways = part.get(name)
        for way in ways if isinstance(ways, list) else []:
            _add_combined(way, document, found)


def _is_finite(document: dict[str, object]) -> bool:
    """Return whether some finite text may satisfy ``document``: the least fixed point over its parts."""
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
        one = todo.pop()
        yield one
        todo.extend(part for _, part in _within(one))


def _within(part: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the schemas right within a schema, each with its place there."""
    for name, value in part.items():
        within: Iterable[tuple[object, object]] = ()
        if name in _MAPS and isinstance(value, dict):
            within = value.items()
        elif isinstance(value, list) and name not in _VALUES:
            within = enumerate(value)
        elif isinstance(value, dict) and name not in _VALUES:
            yield name, value
        for key, each in within:
            if isinstance(each, dict):
                yield f"{name}/{_escaped(str(key))}", each


def _escaped(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~")


def _needs(part: dict[str, object], document: dict[str, object]) -> list[list[object]]:
    """Return groups of parts, of each of which one at least must be finite for ``part`` to be."""
    every = part.get("allOf")
    needed = [_target(part["$ref"], document)] if "$ref" in part else []
    needed += every if isinstance(every, list) else []
    properties, required = part.get("properties"), part.get("required")
    if part.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list):
        needed += [properties.get(name) for name in required if isinstance(name, str)]
    least = part.get("minItems", 0)
    if part.get("type") == "array" and isinstance(least, int) and least > 0:
        first = part.get("prefixItems")
        needed += first[:least] if isinstance(first, list) else [part.get("items")]
    groups: list[list[object]] = [[one] for one in needed if isinstance(one, dict)]
    for name in ("anyOf", "oneOf"):
        ways = part.get(name)
        if isinstance(ways, list) and ways and all(isinstance(way, dict) for way in ways):
            groups.append(ways)
    return groups


def _target(reference: object, document: dict[str, object]) -> object:
    """Return the part that a reference within the document points to; None where there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: object = document
    for step in reference[1:].split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found
