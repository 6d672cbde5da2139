"""JSON schemas as GBNF grammars. Pure Python.

Every text of the grammar is valid JSON and satisfies the schema; an unsupported keyword raises an error
that names it. Where llama.cpp's converter is correct the texts are the same: properties in the order of
their declaration, no others unless ``additionalProperties`` allows them, at most one space between
tokens. llama-cpp-python's converter is not used, because it ignores some combinations of keywords, writes
names and constants that need an escape wrongly, and allows raw control characters in strings.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import unquote

from ...errors import GrammarError
from .characters import literal, plain
from .gbnf import Gbnf
from .numbers import LARGEST_BOUND, bounded_integer, bounded_number
from .pattern import Pattern

__all__ = ["gbnf_of_schema"]

Schema = dict[str, object]

_NOTES = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
    "examples", "readOnly", "title", "writeOnly",
}  # fmt: skip
# Keywords that apply to values of one type only.
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"pattern", "format", "minLength", "maxLength"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
}
_COMBINERS = ("$ref", "oneOf", "anyOf", "allOf")
_KEYWORDS = {*_COMBINERS, "type", "const", "enum"}.union(*_OF_TYPE.values())
# Keywords that a value of "const" or "enum" is checked against.
_CHECKED_OF_CONSTANTS = {
    "type", "const", "enum", "minLength", "maxLength", "minItems", "maxItems", *_OF_TYPE["number"],
}  # fmt: skip
_TYPES = {
    "string": {"string"}, "integer": {"integer"}, "number": {"integer", "number"},
    "boolean": {"boolean"}, "null": {"null"}, "object": {"object"}, "array": {"array"},
}  # fmt: skip
_ALL_TYPES = frozenset().union(*_TYPES.values())

_DIGITS = "[0-9]{0,15}"
_HEX = "[0-9a-fA-F]"
_YEAR = '([1-9] [0-9]{3} | "0" [1-9] [0-9]{2} | "00" [1-9] [0-9] | "000" [1-9])'
_LEAP_YEAR = (
    '([0-9] [0-9] ("0" [48] | [2468] [048] | [13579] [26])'
    ' | ("0" [48] | [2468] [048] | [13579] [26]) "00")'
)
_BUILT_IN = {
    "space": '" "?',
    "boolean": '("true" | "false") space',
    "null": '"null" space',
    "integral": f"[0-9] | [1-9] {_DIGITS}",
    "integer": '"-"? integral space',
    "number": f'"-"? integral ("." [0-9] {_DIGITS})? ([eE] [-+]? integral)? space',
    # No half of a surrogate pair: it would count as a character, but is not one.
    "char": f'{plain()} | "\\\\" (["\\\\/bfnrt] | "u" ([0-9a-cA-CefEF] {_HEX} | [dD] [0-7]) {_HEX}{{2}})',
    "string": '"\\"" char* "\\"" space',
    "array": '"[" space (value ("," space value)*)? "]" space',
    "object": '"{" space (string ":" space value ("," space string ":" space value)*)? "}" space',
    "value": "object | array | string | number | boolean | null",
    "uuid": '"-"'.join(f" {_HEX}{{{n}}} " for n in (8, 4, 4, 4, 12)).strip(),
    "date": (
        f'{_YEAR} "-" (("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])'
        ' | ("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30")'
        ' | "02-" ("0" [1-9] | "1" [0-9] | "2" [0-8]))'
        f' | {_LEAP_YEAR} "-02-29"'
    ),
    "time": (
        '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{3})?'
        ' ("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])'
    ),
    "date-time": 'date "T" time',
    "duration": '"P" (duration-date duration-time? | duration-time | duration-n "W")',
    "duration-n": "[0-9]{1,4}",
    "duration-date": (
        'duration-n "D" | duration-n "M" (duration-n "D")?'
        ' | duration-n "Y" (duration-n "M" (duration-n "D")?)?'
    ),
    "duration-time": (
        '"T" (duration-n "S" | duration-n "M" (duration-n "S")?'
        ' | duration-n "H" (duration-n "M" (duration-n "S")?)?)'
    ),
    "host-label": "[a-zA-Z0-9] ([a-zA-Z0-9-]{0,30} [a-zA-Z0-9])?",
    "host-top": "[a-zA-Z] ([a-zA-Z0-9-]{0,30} [a-zA-Z0-9])?",
    "hostname": '(host-label "."){0,3} host-top',
    "email": 'email-atom ("." email-atom){0,2} "@" (host-label "."){1,3} host-top',
    "email-atom": "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}",
    "ipv4": 'ipv4-part ("." ipv4-part){3}',
    "ipv4-part": '"25" [0-5] | "2" [0-4] [0-9] | "1" [0-9]{2} | [1-9]? [0-9]',
    # Eight groups, or up to seven around "::".
    "ipv6": " | ".join(
        [
            'ipv6-part (":" ipv6-part){7}',
            '"::" (ipv6-part (":" ipv6-part){0,6})?',
            *(
                f'ipv6-part (":" ipv6-part){{{n}}} "::" (ipv6-part (":" ipv6-part){{0,{5 - n}}})?'
                for n in range(6)
            ),
            'ipv6-part (":" ipv6-part){6} "::"',
        ]
    ),
    "ipv6-part": f"{_HEX}{{1,4}}",
    "uri": (
        '[a-zA-Z] [a-zA-Z0-9+.-]{0,15} "://" hostname (":" [1-9] [0-9]{0,3})?'
        ' ("/" uri-char*)* ("?" (uri-char | [/?])*)? ("#" (uri-char | [/?])*)?'
    ),
    "uri-char": f'[a-zA-Z0-9._~!$&\'()*+,;=:@-] | "%" {_HEX}{{2}}',
}
# Format: the smallest and the largest number of characters.
_FORMATS: dict[str, tuple[int, int | None]] = {
    "uuid": (36, 36), "date": (10, 10), "time": (9, 18), "date-time": (20, 29), "duration": (3, 32),
    "email": (5, 194), "hostname": (1, 131), "ipv4": (7, 15), "ipv6": (2, 39), "uri": (5, None),
}  # fmt: skip
_NAME = re.compile(r"[^a-zA-Z0-9]+")


_DEEPEST = 512  # objects and lists in each other; an array of arrays takes one level for each
_FRAMES = 8  # of Python, at most, for each level
_recursion = threading.Lock()


def gbnf_of_schema(text: str) -> str:
    """Return the GBNF grammar of the texts that fit a JSON schema, given as JSON.

    Raises:
        GrammarError: not a schema, one that no text can fit, or one that cannot be kept, by name.
    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from error
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deep") from None
    if _depth(document) > _DEEPEST:
        raise GrammarError("the JSON schema is nested too deep")
    with (
        _recursion
    ):  # the limit is the whole process's, so it is raised and restored by one at a time
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + _FRAMES * _DEEPEST)
        try:
            return _Converter(document).gbnf()
        except RecursionError:
            raise GrammarError("the JSON schema is nested too deep") from None
        finally:
            sys.setrecursionlimit(limit)


def _depth(document: object) -> int:
    """Return how deep objects and lists are nested in each other."""
    depth, level = 0, [document]
    while level := [inner for inner in level if isinstance(inner, (dict, list))]:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


class _Converter:
    def __init__(self, document: object) -> None:
        self._document = document
        self._rules: dict[str, str] = {}
        self._of_ref: dict[str, str] = {}

    def gbnf(self) -> str:
        """Return the grammar of the whole document."""
        self._rules["root"] = ""
        self._rules["root"] = self._visit(self._document, "root")
        text = "\n".join(f"{name} ::= {rule}" for name, rule in sorted(self._rules.items()))
        if Gbnf(text).endless:
            raise GrammarError(
                "no finite text satisfies the JSON schema: it requires itself inside itself"
            )
        return text

    # -- rules -------------------------------------------------------------------------------------

    def _rule(self, name: str, body: str) -> str:
        name = self._free(name)
        self._rules[name] = body
        return name

    def _free(self, name: str) -> str:
        name = _NAME.sub("-", name)[:60].strip("-") or "x"
        free, n = name, 1
        while free in self._rules or free in _BUILT_IN:
            n += 1
            free = f"{name}-{n}"
        return free

    def _built_in(self, name: str) -> str:
        if name not in self._rules:
            self._rules[name] = _BUILT_IN[name]
            words = re.findall(
                r"[a-z0-9-]+", re.sub(r'"(\\.|[^"\\])*"|\[(\\.|[^\]\\])*\]', " ", _BUILT_IN[name])
            )
            for word in words:
                if word in _BUILT_IN:
                    self._built_in(word)
        return name

    def _string(self, inside: str) -> str:
        return f'"\\"" {inside} "\\"" {self._built_in("space")}'

    # -- schemas -----------------------------------------------------------------------------------

    def _visit(self, schema: object, name: str) -> str:
        """Return an expression: the name of a rule, or the body of one."""
        if schema is True:
            return self._built_in("value")
        return self._visit_object(_checked(schema), name)

    def _visit_object(self, schema: Schema, name: str) -> str:
        combiners = [k for k in _COMBINERS if k in schema]
        if combiners:
            return self._combined(schema, combiners[0], name)
        if "const" in schema or "enum" in schema:
            return self._constants(schema)
        types = _declared_types(schema)
        if isinstance(schema.get("type"), list):
            visited = [self._typed(schema, t, f"{name}-{t}") for t in types]
            return " | ".join(
                dict.fromkeys(
                    self._named(v, f"{name}-{t}") for v, t in zip(visited, types, strict=True)
                )
            )
        return self._typed(schema, types[0] if types else _implied_type(schema), name)

    def _named(self, expression: str, name: str) -> str:
        """Return the name of a rule with the body ``expression``."""
        return expression if expression in self._rules else self._rule(name, expression)

    def _inner(self, schema: object, name: str) -> str:
        return self._named(self._visit(schema, name), name)

    def _typed(self, schema: Schema, kind: str, name: str) -> str:
        build: dict[str, Callable[[Schema, str], str]] = {
            "object": self._object, "array": self._array, "string": self._text,
            "number": self._number, "integer": self._integer,
        }  # fmt: skip
        if kind in build and _OF_TYPE[kind] & schema.keys():
            return build[kind](schema, name)
        return self._built_in(kind)

    def _combined(self, schema: Schema, keyword: str, name: str) -> str:
        beside = sorted(schema.keys() - _NOTES - {keyword, "type"})
        if beside:
            raise GrammarError(
                f"the JSON-schema keyword {beside[0]!r} is not supported together with {keyword!r}"
            )
        if keyword == "$ref":
            self._check_type(schema, keyword, [self._resolve(schema["$ref"])])
            return self._reference(schema["$ref"])
        parts = _list_of(schema, keyword)
        if keyword == "allOf":
            return self._all_of(schema, parts, name)
        parts = self._with_type(schema, parts, keyword)
        if keyword == "oneOf":
            for i, one in enumerate(parts):
                for other in (*parts[:i], *parts[i + 1 :]):
                    if not self._excludes(one, other):
                        raise GrammarError(
                            "the JSON-schema keyword 'oneOf' is not supported if a text could satisfy "
                            "two of its schemas",
                            hint="use anyOf, or give each a property with a different const",
                        )
        names = [self._inner(part, f"{name}-{i}") for i, part in enumerate(parts)]
        return " | ".join(dict.fromkeys(names))

    def _with_type(self, schema: Schema, parts: list[object], keyword: str) -> list[object]:
        """Return ``parts`` with the type that is given together with the keyword."""
        types = _declared_types(schema)
        if not types:
            return parts
        given = {"type": schema["type"]}
        typed = [
            {**given, **part}
            if isinstance(part, dict) and not {"type", *_COMBINERS} & part.keys()
            else part
            for part in parts
        ]
        self._check_type(schema, keyword, typed)
        return typed

    def _check_type(self, schema: Schema, keyword: str, meant: list[object]) -> None:
        types = _declared_types(schema)
        allowed = frozenset().union(*(_TYPES[t] for t in types)) if types else _ALL_TYPES
        if any(not self._types(part) <= allowed for part in meant):
            raise GrammarError(
                f"the JSON-schema keyword 'type' is not supported with a {keyword!r} of other types"
            )

    def _reference(self, ref: object) -> str:
        target = self._resolve(ref)
        key = str(ref)
        if key not in self._of_ref:
            if key == "#":
                self._of_ref[key] = "root"
                return "root"
            name = self._free(f"ref-{key.rsplit('/', 1)[-1]}")
            self._of_ref[key] = name
            self._rules[name] = ""
            self._rules[name] = self._visit(target, name)
        return self._of_ref[key]

    def _resolve(self, ref: object) -> object:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise GrammarError(
                f"the JSON-schema reference {ref!r} is not supported: it must begin with '#/'"
            )
        found = self._document
        for step in ref[2:].split("/") if ref != "#" else ():
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise GrammarError(f"the JSON-schema reference {ref!r} has no target")
        return found

    def _followed(self, schema: object) -> object:
        """Return the schema that a reference finally refers to; other schemas unchanged."""
        seen = set()
        while isinstance(schema, dict) and "$ref" in schema:
            if str(schema["$ref"]) in seen:
                raise GrammarError(f"the JSON-schema reference {schema['$ref']!r} refers to itself")
            seen.add(str(schema["$ref"]))
            schema = self._resolve(schema["$ref"])
        return schema

    def _constants(self, schema: Schema) -> str:
        values = [schema["const"]] if "const" in schema else _list_of(schema, "enum")
        types = _declared_types(schema)
        kinds = {_type_of(v) for v in values}
        unchecked = set().union(*(_OF_TYPE.get(k, set()) for k in kinds)) - _CHECKED_OF_CONSTANTS
        beside = sorted(unchecked & schema.keys())
        if beside:
            keyword = "const" if "const" in schema else "enum"
            raise GrammarError(
                f"the JSON-schema keyword {beside[0]!r} is not supported together with {keyword!r}"
            )
        fitting = [v for v in values if _fits(v, schema, types)]
        if not fitting:
            raise GrammarError(
                "no value of the JSON schema's 'const' or 'enum' satisfies its other keywords"
            )
        return " | ".join(dict.fromkeys(_constant(v) for v in fitting))

    def _all_of(self, schema: Schema, parts: list[object], name: str) -> str:
        followed = [_checked(self._followed(part)) for part in parts]
        if len(parts) == 1 and not _is_object(followed[0]) and not self._is_optional(followed[0]):
            self._check_type(schema, "allOf", [followed[0]])
            return self._visit(parts[0], name)
        if _declared_types(schema) not in ([], ["object"]):
            raise GrammarError("the JSON-schema keyword 'allOf' is supported for objects only")
        properties: Schema = {}
        required: set[str] = set()
        for part in followed:
            optional = self._is_optional(part)
            for member in self._members(part) if optional else [part]:
                if not _is_object(member):
                    raise GrammarError(
                        "the JSON-schema keyword 'allOf' is supported for objects with properties only"
                    )
                for key, inner in _properties(member).items():
                    if key in properties and properties[key] != inner:
                        raise GrammarError(
                            f"the JSON-schema keyword 'allOf' is not supported if two schemas "
                            f"describe the property {key!r}"
                        )
                    properties[key] = inner
                    if not optional:
                        required.add(key)
                required.update(_required(member))
        for part in followed:
            for member in (part, *(self._members(part) if "anyOf" in part else ())):
                closed = member.get("additionalProperties", True) is not True
                if closed and (
                    member["additionalProperties"] is not False
                    or properties.keys() - _properties(member).keys()
                ):
                    raise GrammarError(
                        "the JSON-schema keyword 'additionalProperties' is not supported inside 'allOf'"
                    )
        merged: Schema = {"properties": properties, "required": sorted(required)}
        return self._object(merged, name)

    def _members(self, schema: Schema) -> list[Schema]:
        return [_checked(self._followed(part)) for part in _list_of(schema, "anyOf")]

    def _is_optional(self, schema: Schema) -> bool:
        """Return True for an anyOf of objects without 'required': any mixture of them is valid."""
        return (
            "anyOf" in schema
            and not schema.keys() - _NOTES - {"anyOf", "type"}
            and _declared_types(schema) in ([], ["object"])
            and all(_is_object(m) and "required" not in m for m in self._members(schema))
        )

    # -- types -------------------------------------------------------------------------------------

    def _object(self, schema: Schema, name: str) -> str:
        properties = _properties(schema)
        required = _required(schema)
        missing = [key for key in required if key not in properties]
        if missing:
            raise GrammarError(
                f"the JSON-schema keyword 'required' names {missing[0]!r}, which is not in 'properties'"
            )
        additional = schema.get("additionalProperties")
        if not properties and (additional is None or additional is True):
            return self._built_in("object")
        space = self._built_in("space")
        pairs = {}
        for key, inner in properties.items():
            if inner is False and key not in required:
                continue  # a property that is forbidden
            value = self._inner(inner, f"{name}-{key}")
            pairs[key] = self._rule(
                f"{name}-{key}-kv", f'{_constant(key)} {space} ":" {space} {value}'
            )
        must = [pair for key, pair in pairs.items() if key in required]
        may = [pair for key, pair in pairs.items() if key not in required]
        if additional is not None and additional is not False:
            # An empty schema means an object, as in llama.cpp.
            value = self._inner({} if additional is True else additional, f"{name}-additional")
            key = self._other_name(properties, name) if properties else self._built_in("string")
            pair = self._rule(f"{name}-additional-kv", f'{key} ":" {space} {value}')
            may.append(self._rule(f"{name}-additional-kvs", f'{pair} ("," {space} {pair})*'))
        comma = f'"," {space}'
        rest, starts = "", []
        for i, pair in reversed(list(enumerate(may))):
            starts.append(f"{pair} {rest}".strip())
            if i:
                rest = self._rule(f"{name}-rest-{i}", f"({comma} {pair})? {rest}".strip())
        some = " | ".join(reversed(starts))
        inside = f" {comma} ".join(must)
        if some:
            inside += f" ({comma} ({some}))?" if must else f"({some})?"
        return f'"{{" {space} {inside} "}}" {space}'

    def _other_name(self, names: Iterable[str], name: str) -> str:
        """Return a rule for a string that is not in ``names``: a repeated key would replace the first."""
        ends: set[str] = set(names)
        starts = {n[:i] for n in ends for i in range(len(n) + 1)}
        rules: dict[str, str] = {}
        for start in sorted(starts, key=len, reverse=True):
            following = sorted(
                s[-1] for s in starts if len(s) == len(start) + 1 and s[:-1] == start
            )
            ways = [f"{plain(following)} {plain()}*"]
            ways += [
                f"{literal(c)} {rules[start + c]}"
                for c in following
                if json.dumps(c)[1:-1][0] != "\\" or ord(c) > 0x7E
            ]
            if start not in ends:
                ways.append('""')
            rules[start] = self._rule(f"{name}-name", " | ".join(ways))
        return self._rule(f"{name}-additional-k", self._string(rules[""]))

    def _array(self, schema: Schema, name: str) -> str:
        least, most = _bounds(schema, "minItems", "maxItems")
        items = schema.get("items", True)
        space = self._built_in("space")
        if isinstance(items, list) and "prefixItems" in schema:
            raise GrammarError(
                "the JSON-schema keyword 'items' is not supported as a list together with 'prefixItems'"
            )
        if isinstance(items, list) or "prefixItems" in schema:
            prefix = items if isinstance(items, list) else _list_of(schema, "prefixItems")
            if isinstance(items, dict):
                raise GrammarError(
                    "the JSON-schema keyword 'items' is not supported together with 'prefixItems'"
                )
            if least > len(prefix) or (most is not None and most < len(prefix)):
                keyword = "minItems" if least > len(prefix) else "maxItems"
                raise GrammarError(
                    f"the JSON-schema keyword {keyword!r} is supported for tuples only if it allows "
                    f"exactly their {len(prefix)} items"
                )
            each = [self._inner(item, f"{name}-tuple-{i}") for i, item in enumerate(prefix)]
            inside = f' "," {space} '.join(each)
            return f'"[" {space} {inside} "]" {space}'
        if items is False:
            if least:
                raise GrammarError(
                    "no array satisfies the JSON schema: 'items' allows no item, 'minItems' requires some"
                )
            most = 0
        if most == 0:
            return f'"[" {space} "]" {space}'
        item = self._inner(items, f"{name}-item")
        more = {(0, None): "*", (0, 0): ""}.get(
            (max(0, least - 1), None if most is None else most - 1),
            f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}",
        )
        inside = f'{item} ("," {space} {item}){more}' if more else item
        return f'"[" {space} {inside if least else f"({inside})?"} "]" {space}'

    def _text(self, schema: Schema, name: str) -> str:
        least, most = _bounds(schema, "minLength", "maxLength")
        form, pattern = schema.get("format"), schema.get("pattern")
        if pattern is not None and not isinstance(pattern, str):
            raise GrammarError(f"the JSON-schema keyword 'pattern' needs a string, not {pattern!r}")
        if pattern is not None and form is not None:
            raise GrammarError(
                "the JSON-schema keyword 'format' is not supported together with 'pattern'"
            )
        if pattern is None and form is None:
            char = self._built_in("char")
            if (least, most) == (0, None):
                return self._built_in("string")
            return self._string(f"{char}{{{least},{'' if most is None else most}}}")
        shortest: int
        longest: int | None
        if pattern is not None:
            read = Pattern(pattern)
            inside, shortest, longest = read.gbnf, read.least, read.most
        else:
            inside = self._built_in(str(form))
            shortest, longest = _FORMATS[str(form)]
        keyword = "pattern" if form is None else "format"
        if shortest < least:
            raise GrammarError(
                f"the JSON-schema keyword 'minLength' is not supported together with a "
                f"{keyword!r} of shorter texts"
            )
        if most is not None and (longest is None or longest > most):
            raise GrammarError(
                f"the JSON-schema keyword 'maxLength' is not supported together with a "
                f"{keyword!r} of longer texts"
            )
        return self._string(inside)

    def _integer(self, schema: Schema, name: str) -> str:
        low, high, above, below = _limits(schema)
        least = None if low is None else math.floor(low) + 1 if above else math.ceil(low)
        most = None if high is None else math.ceil(high) - 1 if below else math.floor(high)
        inside = bounded_integer(least, most)
        if inside is None:
            raise GrammarError("no integer lies between the bounds of the JSON schema")
        return f"({inside}) {self._built_in('space')}"

    def _number(self, schema: Schema, name: str) -> str:
        low, high, above, below = _limits(schema)
        for bound in (low, high):
            if bound is not None and bound != bound // 1:
                raise GrammarError(
                    f"the bound {bound!r} of the JSON schema is not supported: a bound of numbers that "
                    "are not integers must be a whole number"
                )
        inside = bounded_number(
            None if low is None else int(low),
            None if high is None else int(high),
            above=above,
            below=below,
        )
        if inside is None:
            raise GrammarError("no number lies between the bounds of the JSON schema")
        return f"({inside}) {self._built_in('space')}"

    # -- disjoint schemas -------------------------------------------------------------------------

    def _types(self, schema: object, seen: frozenset[str] = frozenset()) -> frozenset[str]:
        """Return a superset of the types of the texts that are generated for a schema."""
        if isinstance(schema, dict) and "$ref" in schema:
            if str(schema["$ref"]) in seen:
                return frozenset()  # a circular reference generates nothing
            return self._types(self._resolve(schema["$ref"]), seen | {str(schema["$ref"])})
        if not isinstance(schema, dict):
            return _ALL_TYPES
        for keyword in ("oneOf", "anyOf"):
            if keyword in schema:
                parts = self._with_type(schema, _list_of(schema, keyword), keyword)
                return frozenset().union(*(self._types(p, seen) for p in parts))
        if "allOf" in schema:
            parts = _list_of(schema, "allOf")
            return self._types(parts[0], seen) if len(parts) == 1 else frozenset({"object"})
        values = _values(schema)
        if values is not None:
            return frozenset(_type_of(v) for v in values)
        types = _declared_types(schema) or [_implied_type(schema)]
        return frozenset().union(*(_TYPES[t] for t in types))

    def _excludes(self, generated: object, other: object) -> bool:
        """Return True if no text generated for the first schema satisfies the second."""
        generated, other = self._followed(generated), self._followed(other)
        if not isinstance(generated, dict) or not isinstance(other, dict):
            return other is False
        values, others = _values(generated), _values(other)
        if values is not None:
            return not any(self._may_fit(v, other) for v in values)
        declared = _declared_types(other)
        if others is not None:
            declared = [_type_of(v) for v in others]
        admitted = frozenset().union(*(_TYPES[t] for t in declared)) if declared else _ALL_TYPES
        if not self._types(generated) & admitted:
            return True
        if any(k in s for k in _COMBINERS for s in (generated, other)) or not _is_object(generated):
            return False
        if self._types(generated) != {"object"}:
            return False
        mine, theirs = _properties(generated), _properties(other)
        open_ended = generated.get("additionalProperties", False) is not False or not mine
        if not open_ended and set(_required(other)) - mine.keys():
            return True
        if other.get("additionalProperties") is False and set(_required(generated)) - theirs.keys():
            return True
        shared = [k for k in _required(generated) if k in mine and k in theirs]
        return any(self._excludes(mine[k], theirs[k]) for k in shared)

    def _may_fit(self, value: object, schema: Schema) -> bool:
        if any(k in schema for k in _COMBINERS):
            return True
        values = _values(schema)
        if values is not None and not any(_equal(value, v) for v in values):
            return False
        return _fits(value, schema, _declared_types(schema))


# -- reading schemas ---------------------------------------------------------------------------------


def _checked(schema: object) -> Schema:
    if schema is False:
        raise GrammarError("no value satisfies the JSON schema 'false'")
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema must be an object, not {schema!r}")
    unknown = sorted(set(schema) - _KEYWORDS - _NOTES)
    if unknown:
        raise GrammarError(f"the JSON-schema keyword {unknown[0]!r} is not supported")
    form = schema.get("format")
    if form is not None and (not isinstance(form, str) or form not in _FORMATS):
        raise GrammarError(f"the JSON-schema format {form!r} is not supported")
    _declared_types(schema)
    return schema


def _declared_types(schema: Mapping[str, object]) -> list[str]:
    given = schema.get("type", [])
    types: list[str] = []
    for one in given if isinstance(given, list) else [given]:
        if not isinstance(one, str) or one not in _TYPES:
            raise GrammarError(f"the JSON-schema type {one!r} does not exist")
        types.append(one)
    if not types and "type" in schema:
        raise GrammarError("the JSON-schema keyword 'type' needs at least one type")
    return types


def _implied_type(schema: Mapping[str, object]) -> str:
    """Return the type that a schema without 'type' means; an empty schema means an object."""
    for kind, keywords in _OF_TYPE.items():
        if keywords & schema.keys():
            return kind
    return "object"


def _is_object(schema: object) -> bool:
    if not isinstance(schema, dict) or any(k in schema for k in (*_COMBINERS, "const", "enum")):
        return False
    return (_declared_types(schema) or [_implied_type(schema)]) == ["object"]


def _list_of(schema: Schema, keyword: str) -> list[object]:
    found = schema[keyword]
    if not isinstance(found, list) or not found:
        raise GrammarError(f"the JSON-schema keyword {keyword!r} needs a list that is not empty")
    return found


def _properties(schema: Mapping[str, object]) -> Schema:
    found = schema.get("properties", {})
    if not isinstance(found, dict):
        raise GrammarError("the JSON-schema keyword 'properties' needs an object")
    return found


def _required(schema: Mapping[str, object]) -> list[str]:
    found = schema.get("required", [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise GrammarError("the JSON-schema keyword 'required' needs a list of strings")
    return found


def _bounds(schema: Schema, low: str, high: str) -> tuple[int, int | None]:
    """Return the smallest and the largest number that two keywords allow."""
    found: list[int | None] = []
    for keyword in (low, high):
        n = schema.get(keyword, 0 if keyword == low else None)
        if n is None:
            found.append(None)
        elif isinstance(n, bool) or not isinstance(n, int | float) or n < 0 or n != n // 1:
            raise GrammarError(
                f"the JSON-schema keyword {keyword!r} needs a whole number, not {n!r}"
            )
        else:
            found.append(int(n))
    least, most = found[0] or 0, found[1]
    if most is not None and most < least:
        raise GrammarError(f"no value satisfies the JSON schema: {low!r} is above {high!r}")
    return least, most


def _limits(schema: Schema) -> tuple[float | None, float | None, bool, bool]:
    """Return the bounds of numbers, None for none, and whether each of them is excluded."""
    found: dict[str, float] = {}
    for keyword in sorted(_OF_TYPE["number"] & schema.keys()):
        bound = schema[keyword]
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise GrammarError(f"the JSON-schema keyword {keyword!r} needs a number, not {bound!r}")
        if abs(bound) > LARGEST_BOUND:
            raise GrammarError(
                f"the JSON-schema keyword {keyword!r} is supported up to {LARGEST_BOUND:.0e}"
            )
        found[keyword] = bound
    low, over = found.get("minimum"), found.get("exclusiveMinimum")
    high, under = found.get("maximum"), found.get("exclusiveMaximum")
    above = over is not None and (low is None or over >= low)
    below = under is not None and (high is None or under <= high)
    return over if above else low, under if below else high, above, below


# -- values ------------------------------------------------------------------------------------------


def _values(schema: Mapping[str, object]) -> list[object] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds = ((str, "string"), (float, "number"), (dict, "object"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _equal(left: object, right: object) -> bool:
    """Return True if two JSON values are equal: 1 equals 1.0, but true does not equal 1."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _fits(value: object, schema: Schema, types: list[str]) -> bool:
    """Return False if a value violates one of the keywords that can be combined with "enum"."""
    if types and not any(_type_of(value) in _TYPES[t] for t in types):
        return False
    values = _values({k: v for k, v in schema.items() if k == "enum"})
    if values is not None and not any(_equal(value, v) for v in values):
        return False
    if isinstance(value, str):
        least, most = _bounds(schema, "minLength", "maxLength")
    elif isinstance(value, list):
        least, most = _bounds(schema, "minItems", "maxItems")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low, high, above, below = _limits(schema)
        over = low is None or value > low or (value == low and not above)
        return over and (high is None or value < high or (value == high and not below))
    else:
        return True
    return least <= len(value) and (most is None or len(value) <= most)


def _constant(value: object) -> str:
    """Return the GBNF literal of a JSON value, with the spaces of ``json.dumps``."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError as error:
        raise GrammarError(
            f"the JSON schema contains a value that cannot be written: {error}"
        ) from error
    return literal(text)
