"""Python functions as tools: annotations and docstring become OpenAI's description."""

from __future__ import annotations

import inspect
import re
import typing
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import cast

from ..errors import ConfigError, told

_Field = tuple[object, object]  # annotation, default
_Schema = dict[str, object]
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$", re.M)


def function_tool(function: Callable[..., object]) -> dict[str, object]:
    """Return OpenAI's tool object of a function.

    The parameters' annotations become the JSON schema, by pydantic if it is installed, otherwise by
    msgspec. The docstring up to ``Args:`` is the description; the lines of ``Args:`` describe the
    parameters.

    Raises:
        ConfigError: a parameter has no annotation, or one that has no JSON schema; or it is ``*args``,
            ``**kwargs`` or positional-only.
    """
    name = ""
    try:
        name = getattr(function, "__name__", "")
        signature = inspect.signature(function)
        hints = typing.get_type_hints(function, include_extras=True)
        about, described = _docs(_own_docs(function, signature))
    except Exception as error:  # annotations and descriptors are the user's code
        raise ConfigError(f"the parameters of {name} cannot be read: {told(error)}") from error
    if not isinstance(name, str) or not name or name == "<lambda>":
        raise ConfigError("a tool must be a function with a name", hint="def, not lambda")
    fields: dict[str, _Field] = {}
    for key, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{name}: {parameter} cannot be passed by name", hint="use named parameters"
            )
        if key not in hints:
            raise ConfigError(f"{name}: the parameter {key} has no annotation")
        fields[key] = (hints[key], parameter.default)
    schema = _by_pydantic(name, fields) or _by_msgspec(name, fields)
    properties = schema.get("properties")
    for key, text in described.items():
        if isinstance(properties, dict) and isinstance(properties.get(key), dict):
            properties[key].setdefault("description", text)
    tool: dict[str, object] = {"name": name, "description": about, "parameters": schema}
    return {"type": "function", "function": tool}


def _own_docs(function: Callable[..., object], signature: inspect.Signature) -> str:
    """Return a function's or class's own docstring; "" if it has none."""
    text = function.__doc__  # unlike `inspect.getdoc`, which looks into base classes too
    if not isinstance(text, str):
        return ""
    by_dataclass = f"{function.__name__}{signature}".replace(" -> None", "")
    return "" if text == by_dataclass else inspect.cleandoc(text)


def _docs(text: str) -> tuple[str, dict[str, str]]:
    """Return the descriptions of a function and of its parameters from its docstring."""
    match = _SECTION.search(text)
    about = " ".join(text[: match.start() if match else None].split())
    described: dict[str, str] = {}
    if match and match[1] in ("Args", "Arguments", "Parameters"):
        body = text[match.end() :]
        following = _SECTION.search(body)
        last, first = "", 0
        for line in body[: following.start() if following else None].splitlines():
            head = re.match(r"\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
            indent = len(line) - len(line.lstrip())
            if head and (not last or indent <= first):
                last, first = head[1], indent
                described[last] = head[2].strip()
            elif last and line.strip():
                described[last] = f"{described[last]} {line.strip()}".strip()
    return about, described


def _by_pydantic(name: str, fields: Mapping[str, _Field]) -> _Schema | None:
    """Return the schema of parameters; None without pydantic."""
    try:
        from pydantic import Field, create_model
        from pydantic.json_schema import PydanticJsonSchemaWarning
    except ImportError:
        return None
    definitions = {  # pydantic reserves names such as "_x" and "schema", so they are aliases
        f"p{i}": (hint, Field(... if default is inspect.Parameter.empty else default, alias=key))
        for i, (key, (hint, default)) in enumerate(fields.items())
    }
    try:
        model = create_model(name, **cast(dict[str, "tuple[type, object]"], definitions))  # type: ignore[call-overload]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PydanticJsonSchemaWarning)  # defaults that JSON lacks
            schema = cast(_Schema, model.model_json_schema(schema_generator=type_schemas()))
    except Exception as error:  # pydantic's have no common class, and a type may raise anything
        raise ConfigError(f"{name}: no JSON schema: {told(error).splitlines()[0]}") from error
    properties = schema.get("properties")
    for part in [schema, *(properties.values() if isinstance(properties, dict) else ())]:
        part.pop("title", None)
    return schema


@cache
def type_schemas():  # type: ignore[no-untyped-def]
    """Return pydantic's JSON schema generator, changed to match the UTC offsets of Python's types.

    A ``datetime`` and a ``time`` may have an offset: "iso-date-time" and "iso-time". A ``NaiveDatetime``
    has none ("date-time-local"), an ``AwareDatetime`` has one ("date-time").

    Raises:
        ImportError: pydantic is missing.
    """
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def datetime_schema(self, schema: Mapping[str, object]) -> dict[str, object]:
            offsets = {"naive": "date-time-local", None: "iso-date-time"}
            zone = schema.get("tz_constraint")
            return {"type": "string", "format": offsets.get(cast("str | None", zone), "date-time")}

        def time_schema(self, schema: Mapping[str, object]) -> dict[str, object]:
            return {"type": "string", "format": "iso-time"}

    return Generator


def _by_msgspec(name: str, fields: Mapping[str, _Field]) -> _Schema:
    from msgspec.json import schema_components

    properties: dict[str, _Schema] = {}
    required, shared = [], dict[str, object]()
    for key, (hint, default) in fields.items():
        try:
            (schema,), parts = schema_components([hint], ref_template="#/$defs/{name}")
        except (TypeError, RecursionError):
            raise ConfigError(
                f"{name}: the annotation of {key} has no JSON schema", hint="pip install pydantic"
            ) from None
        properties[key] = schema
        shared |= parts
        if default is inspect.Parameter.empty:
            required.append(key)
        elif default is None or type(default) in (str, bool, int, float):
            schema["default"] = default
    more: _Schema = {"required": required} if required else {}
    if shared:
        more["$defs"] = shared
    return {"type": "object", "properties": properties, **more}
