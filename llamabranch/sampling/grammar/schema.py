"""JSON schemas before llguidance reads them: from types, and those that no finite text satisfies."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ...arguments import shown
from ...errors import ConfigError, GrammarError, ParseError

__all__ = ["TAKEN", "closed", "of_type", "parse", "path_to", "value"]

TAKEN = (
    "give a pydantic model (class Person(BaseModel)), a dataclass, a TypedDict, a list of them "
    "(list[Person]), or a JSON schema as a dict or text"
)
_COMBINE = ("allOf", "anyOf", "oneOf", "$ref")
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


def path_to(keyword: str, schema: object, path: str = "#") -> str | None:
    """Return where ``keyword`` is first used, as a JSON pointer; None if nowhere."""
    items = schema.items() if isinstance(schema, dict) else enumerate(schema)  # type: ignore[arg-type]
    for name, value in items:
        if name == keyword:
            return path
        if isinstance(value, (dict, list)):
            found = path_to(keyword, value, f"{path}/{name}")
            if found is not None:
                return found
    return None


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

    Objects then have the declared properties only, as llama.cpp writes them too. Not where several
    schemas apply to one object, each with some of its properties.
    """
    schema = json.loads(json.dumps(schema))
    combined: set[int] = set()
    for part in _parts(schema):
        every = part.get("allOf")
        n_schemas = sum(name in part for name in _COMBINE) + ("properties" in part)
        if n_schemas > 1 or (isinstance(every, list) and len(every) > 1):
            _add_combined(part, schema, combined)
    for part in _parts(schema):
        properties, required = part.get("properties"), part.get("required", [])
        if id(part) in combined or not isinstance(properties, dict):
            continue
        is_declared = isinstance(required, list) and all(name in properties for name in required)
        if is_declared and not any(name in part for name in _OPEN):
            part["additionalProperties"] = False
    return schema


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


def _parts(value: object) -> Iterator[dict[str, object]]:
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            yield one
            todo.extend(one.values())
        elif isinstance(one, list):
            todo.extend(one)


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
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found
