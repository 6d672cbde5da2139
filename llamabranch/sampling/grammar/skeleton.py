"""JSON schemas that llguidance cannot represent: a Lark grammar around the parts that it can.

Some numbers (`numbers`) and arrays without repetitions must be written as rules of a Lark grammar. So
must the objects and arrays that contain them. Every other part stays a JSON schema, in a rule ``%json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from ...errors import GrammarError
from . import numbers
from .keywords import CONSTRAINTS, REFUSED, Schema, pointed, schema_parts

__all__ = ["lark_of", "same_text", "unique_values"]

_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_MOST_UNIQUE = 8  # values; there is a rule for each set of used values
_DEFS = ("$defs", "definitions")
_SPACE = {"any": r"/[\x20\x0A\x0D\x09]*/", "single": "", "none": ""}
_SEPARATORS = {"single": (", ", ": "), "none": (",", ":"), "any": (",", ":")}


def lark_of(document: Schema, whitespace: str) -> str:
    """Return a Lark grammar for a schema; "" if llguidance can follow the schema itself.

    If a rule cannot be written, unsupported bounds are replaced by the next stricter ones, and
    repetitions are allowed.

    Raises:
        GrammarError: an unsupported constant is in a place where a rule cannot be written, for example
            inside ``allOf``. The message names the place.
    """
    hard = {id(part): path for path, part in schema_parts(document) if _is_hard(part)}
    if not hard:
        return ""
    try:
        return _Rules(document, whitespace, hard).lark()
    except _NoRule as reason:
        for path, part in schema_parts(document):
            if id(part) in hard and not _narrow(part):
                raise GrammarError(
                    f"{REFUSED} {path}: constants beyond 2^53 or of more than 15 "
                    f"digits are not supported beside {reason}"
                ) from None
        return ""


class _NoRule(Exception):
    """A part cannot be written as a rule; the message names the keyword."""


def _is_hard(part: Schema) -> bool:
    """Return whether a part needs a Lark rule."""
    if "const" in part or "enum" in part:
        return any(not numbers.is_exact(n) for n in _numbers_in(_constants(part)))
    if _is_integer(part):
        return any(n is not None and abs(n) >= numbers.LARGEST for n in numbers.integers(part))
    return _bounds_are_hard(part) or unique_values(part) is not None


def _bounds_are_hard(part: Schema) -> bool:
    return any(numbers.is_number(part.get(k)) and not numbers.is_exact(part[k]) for k in _BOUNDS)


def _narrow(part: Schema) -> bool:
    """Replace unsupported bounds; return whether the part is no longer hard."""
    if "const" in part or "enum" in part:
        return False
    part.pop("uniqueItems", None)  # `schema.repetition` checks the whole value
    for name in _BOUNDS & part.keys():
        if numbers.is_number(part[name]):
            side = "minimum" if name.endswith("inimum") else "maximum"
            part[name] = numbers.rounded(part[name], side)
    return True


def _is_integer(part: Schema) -> bool:
    types = _listed(part.get("type"))
    return "integer" in types and "number" not in types


def _constants(part: Schema) -> list[object]:
    """Return the values that ``const`` and ``enum`` name."""
    enum = part.get("enum")
    values = enum if isinstance(enum, list) else [part["const"]] if "const" in part else []
    if "const" in part and "enum" in part:
        values = [value for value in values if same_text(value) == same_text(part["const"])]
    return values


def _numbers_in(value: object) -> Iterator[object]:
    todo = [value]
    while todo:
        item = todo.pop()
        if numbers.is_number(item):
            yield item
        elif isinstance(item, (list, dict)):
            todo.extend(item.values() if isinstance(item, dict) else item)


def same_text(value: object) -> str:
    """Return a key for a JSON value; equal values have equal keys (1 and 1.0, but not 1 and true)."""
    if numbers.is_number(value):
        number = cast(float, value)
        return repr(
            int(number) if isinstance(number, int) or number.is_integer() else float(number)
        )
    if isinstance(value, dict):
        return json.dumps({key: same_text(member) for key, member in value.items()}, sort_keys=True)
    return json.dumps([same_text(item) for item in value] if isinstance(value, list) else value)


def unique_values(part: Schema) -> list[object] | None:
    """Return the values of an array whose items must be unique and are enumerated; otherwise None."""
    items = part.get("items")
    if part.get("uniqueItems") is not True or not isinstance(items, dict):
        return None
    values = _constants(items)
    if items.get("type") == "boolean" and not values:
        values = [True, False]
    unique = list(
        {
            same_text(constant): constant for constant in reversed(values) if _fits(constant, items)
        }.values()
    )[::-1]
    is_simple = set(items) & CONSTRAINTS <= {"const", "enum", "type"}
    return unique if is_simple and 0 < len(unique) <= _MOST_UNIQUE else None


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "null": (type(None),), "array": (list,), "object": (dict,),
}  # fmt: skip


def _fits(value: object, part: Schema) -> bool:
    """Return whether a constant has one of the part's types and is within its bounds."""
    types = part.get("type")
    if types is not None and not any(_is_of(value, t) for t in _listed(types)):
        return False
    return not numbers.is_number(value) or numbers.within(value, part)


def _is_of(value: object, name: object) -> bool:
    if numbers.is_number(value):
        number = cast(float, value)
        return name == "number" or (name == "integer" and number == int(number))
    return isinstance(value, _TYPES.get(str(name), ()))


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


class _Rules:
    """The rules of a grammar, one for each part that contains something hard."""

    def __init__(self, document: Schema, whitespace: str, hard: Mapping[int, str]) -> None:
        self._document, self._hard = document, hard
        self._space = _SPACE[whitespace]
        self._item, self._key = _SEPARATORS[whitespace]
        self._guidance = {
            "whitespace_flexible": whitespace == "any",
            "item_separator": self._item,
            "key_separator": self._key,
            "json_allow_general_unicode_escapes": True,
        }
        self._lines: list[str] = []
        self._names: dict[int, str] = {}
        self._leaves: dict[int, str] = {}
        self._leads: dict[int, bool] = {}
        self._made: list[Schema] = []  # keeps our own parts alive, so that their ids stay unique

    def lark(self) -> str:
        start = self._rule(self._document)
        return "\n".join([f"start: {start}", *self._lines])

    def _leads_to_hard(self, part: object) -> bool:
        """Return whether a part is hard, or contains a hard one."""
        if not isinstance(part, dict):
            return False
        if id(part) not in self._leads:
            self._leads[id(part)] = False  # for a part that contains itself
            self._leads[id(part)] = any(
                id(inner) in self._hard for _, inner in schema_parts(self._document, part)
            )
        return self._leads[id(part)]

    def _add(self, body: str) -> str:
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _text(self, value: object) -> str:
        """Return the literal of a JSON value."""
        return json.dumps(self._json(value), ensure_ascii=False)

    def _json(self, value: object) -> str:
        if numbers.is_number(value):
            return numbers.exact_text(value)
        if isinstance(value, list):
            return f"[{self._item.join(map(self._json, value))}]"
        if isinstance(value, dict):
            pairs = [
                json.dumps(k, ensure_ascii=False) + self._key + self._json(v)
                for k, v in value.items()
            ]
            return f"{{{self._item.join(pairs)}}}"
        return json.dumps(value, ensure_ascii=False)

    def _rule(self, part: object) -> str:
        """Return the name of the rule of a part."""
        if not isinstance(part, dict) or not self._leads_to_hard(part):
            return self._leaf(part)
        if id(part) not in self._names:
            name = f"r{len(self._lines)}"
            self._names[id(part)] = name
            at = len(self._lines)
            self._lines.append("")
            self._lines[at] = f"{name}: {self._body(part)}"
        return self._names[id(part)]

    def _leaf(self, part: object) -> str:
        schema = part if isinstance(part, dict) else {} if part is not False else {"not": {}}
        if id(part) not in self._leaves:
            inner = schema_parts(self._document, schema)
            references = [
                str(inner_part["$ref"]) for _, inner_part in inner if "$ref" in inner_part
            ]
            if not all(
                reference.startswith(("#/$defs/", "#/definitions/")) for reference in references
            ):
                raise _NoRule("a $ref to something that is not a definition")
            defs = {name: self._document[name] for name in _DEFS if name in self._document}
            whole = {**defs, **schema, "x-guidance": self._guidance}
            self._leaves[id(part)] = self._add(f"%json {json.dumps(whole, ensure_ascii=False)}")
        return self._leaves[id(part)]

    def _body(self, part: Schema) -> str:
        used = set(part) & CONSTRAINTS
        if "const" in used or "enum" in used:
            self._only(used, {"const", "enum", "type", *_BOUNDS})
            values = [value for value in _constants(part) if _fits(value, part)]
            if not values:
                raise GrammarError(
                    "no text satisfies the JSON schema: no constant fits the other keywords"
                )
            return " | ".join(dict.fromkeys(map(self._text, values)))
        types = part.get("type")
        if isinstance(types, list) and len(types) > 1:
            self._only(used, {"type", *_BOUNDS, "properties", "required", "additionalProperties",
                              "items", "prefixItems", "minItems", "maxItems", "uniqueItems",
                              "minLength", "maxLength", "pattern", "format"})  # fmt: skip
            return " | ".join(self._of_type(part, name) for name in types)
        kind = types[0] if isinstance(types, list) and types else types
        if kind == "integer":
            self._only(used, {"type", *_BOUNDS})
            return f"/{numbers.integers_between(*numbers.integers(part))}/"
        if kind == "number" or (kind is None and used <= _BOUNDS):
            _narrow(part)
            return self._leaf(part)
        if kind == "object" or (kind is None and "properties" in used):
            self._only(used, {"type", "properties", "required", "additionalProperties"})
            return self._object(part)
        if kind == "array":
            self._only(
                used, {"type", "items", "prefixItems", "minItems", "maxItems", "uniqueItems"}
            )
            return self._array(part)
        if used == {"$ref"}:
            return self._rule(pointed(part["$ref"], self._document))
        if used == {"anyOf"} and isinstance(part["anyOf"], list):
            return " | ".join(map(self._rule, part["anyOf"]))
        self._only(used, {"type"})
        raise _NoRule("this schema")

    def _of_type(self, part: Schema, kind: object) -> str:
        alone = {k: v for k, v in part.items() if k not in _BOUNDS or kind in ("integer", "number")}
        alone["type"] = kind
        self._made.append(alone)
        if _is_hard(alone) or kind in ("object", "array"):
            self._leads[id(alone)] = True
            return self._rule(alone)
        return self._leaf(alone)

    def _only(self, used: set[str], known: set[str]) -> None:
        if others := used - known:
            raise _NoRule(repr(min(others)))

    def _object(self, part: Schema) -> str:
        properties = part.get("properties", {})
        required = part.get("required", [])
        if not isinstance(properties, dict) or part.get("additionalProperties") is not False:
            raise _NoRule("an object with other properties")
        names = [name for name, schema in properties.items() if schema is not False]
        missing = [n for n in cast(Sequence[str], required) if n not in names]
        if missing:
            raise _NoRule("'required'")
        pairs = []
        for name in names:
            key, space = json.dumps(json.dumps(name, ensure_ascii=False) + self._key), self._space
            if space:
                text = json.dumps(json.dumps(name, ensure_ascii=False))
                key = f'{text} {space} ":" {space}'
            pairs.append(
                (f"{key} {self._rule(properties[name])}", name in cast(list[str], required))
            )
        return self._braces("{", "}", self._ordered(pairs))

    def _braces(self, first: str, last: str, inner: str) -> str:
        return f'"{first}" {self._space} {inner} {self._space} "{last}"'

    def _comma(self) -> str:
        return f'{self._space} "," {self._space}' if self._space else json.dumps(self._item)

    def _ordered(self, pairs: list[tuple[str, bool]]) -> str:
        """Return a rule for the pairs in their order; those that are not required are optional."""
        first = rest = self._add(
            '""'
        )  # the pairs that are left, if none was written yet (first), and if one was (rest)
        for pair, is_required in reversed(pairs):
            written = f"{pair} {rest}"
            others = ("", "") if is_required else (f" | {first}", f" | {rest}")
            first, rest = (
                self._add(written + others[0]), self._add(f"{self._comma()} {written}{others[1]}")
            )  # fmt: skip
        return first

    def _array(self, part: Schema) -> str:
        least, most = cast(int, part.get("minItems", 0)), cast("int | None", part.get("maxItems"))
        values = unique_values(part)
        if values is not None:
            if "prefixItems" in part:
                raise _NoRule("'prefixItems'")
            return self._braces(
                "[", "]", self._unique([self._text(v) for v in values], least, most)
            )
        if part.get("uniqueItems") is True:
            raise _NoRule("an array of many values")
        prefix = part.get("prefixItems", [])
        items = part.get("items", True)
        if not isinstance(prefix, list) or isinstance(items, list):
            raise _NoRule("'items'")
        if most is not None and most < least:
            raise GrammarError(f"minItems ({least}) is greater than maxItems ({most})")
        if max(least, most or 0) > 1000:
            raise _NoRule("an array of more than 1,000 items")
        n = max(len(prefix), least, most or 0)
        item_rules = [self._rule(prefix[i] if i < len(prefix) else items) for i in range(n)]
        item_rules = item_rules if most is None else item_rules[:most]
        comma = self._comma()
        rest = '""'
        if most is None and items is not False:
            rest = self._add(f"({comma} {self._rule(items)})*")
        for i in reversed(range(1, len(item_rules))):
            written = f"{comma} {item_rules[i]} {rest}"
            rest = self._add(written if i < least else f'{written} | ""')
        head = item_rules[0] if item_rules else self._rule(items)
        if not item_rules and (items is False or most == 0):
            return self._braces("[", "]", '""')
        whole = self._add(f"{head} {rest}" + ("" if least else ' | ""'))
        return self._braces("[", "]", whole)

    def _unique(self, texts: list[str], least: int, most: int | None) -> str:
        """Return a rule for all orders of some of these texts; each set of used texts has a rule."""
        most = len(texts) if most is None else min(most, len(texts))
        if least > most:
            raise GrammarError(f"no array has {least} of {len(texts)} values without a repetition")
        names: dict[int, str] = {}
        for used in sorted(range(1 << len(texts)), key=lambda used: -used.bit_count()):
            n = used.bit_count()
            if n > most:
                continue
            comma = f"{self._comma()} " if n else ""
            ways = [f"{comma}{text} {names[used | 1 << i]}"
                    for i, text in enumerate(texts) if n < most and not used >> i & 1]  # fmt: skip
            if n >= least:
                ways.append('""')
            names[used] = self._add(" | ".join(ways))
        return names[0]
