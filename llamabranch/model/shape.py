"""Short descriptions of JSON schemas, for a model that has to answer with such JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_MOST = 4000  # characters
_MOST_PARTS = 1000  # in one attempt
_MOST_VALUES = 30  # of an enum
_MOST_NOTE = 200  # characters of a description
_FORMATS = {
    "date": "date YYYY-MM-DD",
    "date-time": "date and time YYYY-MM-DDThh:mm:ss with an offset",
    "iso-date-time": "date and time YYYY-MM-DDThh:mm:ss",
    "date-time-local": "date and time YYYY-MM-DDThh:mm:ss without an offset",
    "time": "time hh:mm:ss with an offset",
    "iso-time": "time hh:mm:ss",
    "duration": "ISO 8601 duration",
}
_Schema = Mapping[str, object]


def asking(schema: object) -> str:
    """Return the text that asks for an answer that follows a JSON schema."""
    return f"Give the answer as JSON of this form:\n{shape_of(schema)}"


def shape_of(schema: object) -> str:
    """Describe a JSON schema: names, types, formats, values, descriptions; at most 4,000 characters.

    Long, deep and recursive schemas are shortened: descriptions are dropped first, then inner parts.
    """
    for depth, has_notes in ((8, True), (8, False), (3, False), (1, False)):
        try:
            text = _Writer(schema, depth, has_notes=has_notes).written(schema, 0)
        except _TooLong:
            continue
        if len(text) <= _MOST or depth == 1:
            break
    else:
        text = "{...}"
    if len(text) > _MOST:
        text = f"{text[:_MOST].rpartition(chr(10))[0]}\n  ..."
    return text.encode("utf-8", "replace").decode()


def pointed(reference: object, document: object) -> object:
    """Return the part that a reference in the document points to, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    value = document
    for name in reference[1:].split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and re.fullmatch("[0-9]{1,9}", key) and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


class _TooLong(Exception):
    """The schema has too many parts."""


class _Writer:
    """Writes a schema down to ``depth``, with or without descriptions."""

    def __init__(self, document: object, depth: int, *, has_notes: bool) -> None:
        self._document, self._depth, self._has_notes = document, depth, has_notes
        self._n_left = _MOST_PARTS
        self._open: list[str] = []  # the references that are being written

    def written(self, schema: object, level: int) -> str:
        """Return a schema as text, with all lines but the first indented for ``level``."""
        self._n_left -= 1
        if self._n_left < 0:
            raise _TooLong
        if not isinstance(schema, Mapping):
            return "any JSON"
        if isinstance(reference := schema.get("$ref"), str):
            return self._referred(reference, schema, level)
        for key in ("enum", "const"):
            if key in schema:
                return _values(schema[key] if key == "enum" else [schema[key]])
        for key in ("anyOf", "oneOf"):
            if isinstance(ways := schema.get(key), list):
                return " | ".join(dict.fromkeys(self.written(way, level) for way in ways))
        if isinstance(every := schema.get("allOf"), list):
            rest = {key: value for key, value in schema.items() if key != "allOf"}
            parts = [*every, rest] if "properties" in rest else every
            return " & ".join(self.written(part, level) for part in parts)
        kinds = schema.get("type", "object" if "properties" in schema else None)
        if isinstance(kinds, list):
            return " | ".join(self.written({**schema, "type": kind}, level) for kind in kinds)
        if kinds == "object":
            return self._object(schema, level)
        if kinds == "array" or "items" in schema or "prefixItems" in schema:
            return self._array(schema, level)
        known = schema.get("format")
        if kinds == "string" and isinstance(known, str):
            return _FORMATS.get(known, f"string in the format {known}")
        return str(kinds or "any JSON")

    def _referred(self, reference: str, schema: _Schema, level: int) -> str:
        target = pointed(reference, self._document)
        name = reference.strip("#/").rpartition("/")[2] or "the whole"
        if reference in self._open or target is None:
            return f"{{... {name}}}" if reference in self._open else "any JSON"
        self._open.append(reference)
        text = self.written(target, level)
        self._open.pop()
        return text

    def _object(self, schema: _Schema, level: int) -> str:
        if level >= self._depth:
            return "{...}"
        properties, required = schema.get("properties"), schema.get("required")
        needs = required if isinstance(required, list) else []
        known = properties.items() if isinstance(properties, Mapping) else ()
        lines = [(_quoted(name), inner, name in needs) for name, inner in known]
        others = schema.get("additionalProperties")
        if isinstance(others, Mapping) and others:
            lines.append(("any name", others, True))
        if not lines:
            return "{...}"
        indent, written = "  " * (level + 1), []
        for name, inner, is_needed in lines:
            if self._n_left < 1 and self._depth == 1:
                written.append(f"{indent}...")
                break
            notes = [] if is_needed else ["optional"]
            about = inner.get("description") if isinstance(inner, Mapping) else None
            if self._has_notes and isinstance(about, str) and about.strip():
                notes.append(" ".join(about.split())[:_MOST_NOTE])
            note = f" ({': '.join(notes)})" if notes else ""
            written.append(f"{indent}{name}: {self.written(inner, level + 1)}{note}")
        return "{\n" + ",\n".join(written) + "\n" + "  " * level + "}"

    def _array(self, schema: _Schema, level: int) -> str:
        first, rest = schema.get("prefixItems"), schema.get("items")
        items = [self.written(item, level) for item in first] if isinstance(first, list) else []
        if isinstance(rest, Mapping) or not items:
            items += [self.written(rest, level), "..."] if isinstance(rest, Mapping) else ["..."]
        return f"[{', '.join(items)}]"


def _values(values: object) -> str:
    texts = [_quoted(value) for value in values] if isinstance(values, list) else []
    return " | ".join([*texts[:_MOST_VALUES], *(["..."] if len(texts) > _MOST_VALUES else [])])


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
