"""How a template writes function calls: the form, and code that writes and reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import NamedTuple

from .shape import pointed

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\W\d]\w*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_CUT = re.compile(r"[\d.eE+-]+|t(ru?)?|f(al?|als)?|n(ul?)?")  # the beginnings of scalars
_BEGUN = re.compile(r"[\d.eE+-]+|\w{1,5}")  # a word or a number that may continue
_BARE_KEY = re.compile(r"[^\s,:=(){}\[\]<>'\"]+")
_NAME = re.compile(r"[\w.\-/:]+")
_LITERALS = {
    "true": True, "false": False, "null": None, "True": True, "False": False, "None": None,
}  # fmt: skip
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|U[0-9a-fA-F]{8}|.)", re.DOTALL)


class ToolCall(NamedTuple):
    """A function call that a model wrote.

    Attributes:
        name: the name of the function.
        arguments: a JSON value, for most functions a dict.
        id: identifies the call in the message that answers it, as ``tool_call_id``; "" = none yet.
    """

    name: str
    arguments: object
    id: str = ""


class Mismatch(Exception):
    """The text does not have the expected form."""


class Incomplete(Exception):
    """The text ends too early; with more text, it may get the expected form."""


class Slot(Enum):
    """A part of a call that differs from call to call."""

    NAME = "name"
    ID = "id"
    INDEX = "index"
    WORDS = "words"
    ARGUMENTS = "arguments"


Part = str | Slot


@dataclass(frozen=True)
class Known:
    """The functions that may be called.

    Attributes:
        schemas: by name, the JSON schema of each function's arguments. None = any function.
    """

    schemas: Mapping[str, object] | None = None

    def takes(self, name: str) -> bool:
        """Return whether there is a function of this name."""
        return bool(name) if self.schemas is None else name in self.schemas


def properties_of(schema: object) -> Mapping[str, object]:
    """Return the schemas of an object's properties, as far as they are known."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def is_text_schema(schema: object, root: object, depth: int = 8) -> bool | None:
    """Return True if a schema allows only strings, False if it allows none, and otherwise None."""
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    if isinstance(schema.get("$ref"), str):
        return is_text_schema(pointed(schema["$ref"], root), root, depth - 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return kinds == "string"
    if isinstance(kinds, list) and kinds:
        return None if "string" in kinds and len(kinds) > 1 else kinds == ["string"]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        are_texts = {isinstance(value, str) for value in values}
        return are_texts.pop() if len(are_texts) == 1 else None
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list) and parts:
            answers = {is_text_schema(part, root, depth - 1) for part in parts}
            return answers.pop() if len(answers) == 1 else None
    return None


class Cursor:
    """A place in a text that may still grow.

    White space need not match: where a literal has some, the text may have none or different white
        space.

    Args:
        text: the text.
        at: the position.
        last: whether the text is complete.
        ruled_out: what readers of a shorter part of the text found out: for each value in tags, a
            position before which it does not end. Pass the same dictionary to every reader.
    """

    def __init__(
        self,
        text: str,
        at: int = 0,
        *,
        last: bool = True,
        ruled_out: dict[tuple[object, ...], int] | None = None,
    ) -> None:
        self.text, self.at, self.last = text, at, last
        self.ruled_out = {} if ruled_out is None else ruled_out

    def need(self) -> Exception:
        """Return the exception for a text that ends too early."""
        return Mismatch() if self.last else Incomplete()

    def space(self) -> None:
        """Skip white space."""
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at
        if self.at == len(self.text) and not self.last:
            raise Incomplete

    def literal(self, literal: str) -> None:
        """Read a literal."""
        is_space = False
        for character in literal:
            if character.isspace():
                is_space = True
                continue
            may_be_apart = is_space or character in "[]{}"
            if may_be_apart and self.text[self.at : self.at + 1] != character:
                self.space()
            is_space = False
            if self.at >= len(self.text):
                raise self.need()
            if self.text[self.at] != character:
                raise Mismatch
            self.at += 1
        if is_space:
            self.space()

    def tries(self, literal: str, *, skip: bool = False) -> bool:
        """Read a literal if it comes next; with ``skip``, white space may come before it."""
        at = self.at
        if skip:
            self.space()
        try:
            self.literal(literal)
        except Mismatch:
            self.at = at
            return False
        return True

    def until(self, literal: str) -> str:
        """Read up to and including a literal; return the text before it."""
        core = literal.strip()
        end = self.text.find(core, self.at)
        if end < 0:
            raise self.need()
        text = self.text[self.at : end]
        self.at = end + len(core)
        return text

    def before(self, literal: str) -> str:
        """Read a short text up to the first word of a literal, or a name if the literal has no word."""
        core = literal.split()[0] if literal.strip() else ""
        if core:
            end = self.text.find(core, self.at)
            if end < 0:
                raise self.need()
        else:
            match = _NAME.match(self.text, self.at)
            if match is None or (match.end() == len(self.text) and not self.last):
                raise self.need()
            end = match.end()
        text, self.at = self.text[self.at : end], end
        if len(text) > 256:
            raise Mismatch
        return text

    def json(self) -> object:
        """Read a JSON value."""
        self.space()
        value, self.at = json_end(self.text, self.at, last=self.last)
        return value


def _refuse(word: str) -> object:
    raise ValueError(word)


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


def json_end(text: str, at: int, *, last: bool) -> tuple[object, int]:
    """Return the JSON value that begins at a position, and where it ends.

    Raises:
        Mismatch, Incomplete: nothing fits here, or more of the text is needed.
    """
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].lstrip()
        is_cut = (
            not rest
            or error.msg.startswith("Unterminated")
            or (error.msg.startswith("Invalid") and len(text) - error.pos < 8)
            or _CUT.fullmatch(rest)
        )
        if is_cut and not last:
            raise Incomplete from None
        raise Mismatch from None
    except (ValueError, RecursionError):
        raise Mismatch from None
    if end == len(text) and not last and isinstance(value, (int, float)):
        raise Incomplete  # more digits may come
    return value, end


# -- values ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """How values other than plain text are written: as JSON, Python, or with special quotes.

    Attributes:
        quote: what strings are quoted with; "" = as in JSON.
        item, pair: between items; between a key and its value.
        bare_keys: keys have no quotes.
        words: how True, False and None are written.
        tags: if objects are written as nested tags, the texts before and after the opening key, and
            before and after the closing key. Items of a list have the key "item".
    """

    quote: str = ""
    item: str = ", "
    pair: str = ": "
    bare_keys: bool = False
    words: tuple[str, str, str] = ("true", "false", "null")
    tags: tuple[str, str, str, str] | None = None

    @property
    def is_json(self) -> bool:
        """Whether the values are JSON."""
        return not self.quote and not self.bare_keys and self.words[0] == "true" and not self.tags

    def write(self, value: object) -> str:
        """Return the text of a JSON value."""
        if self.is_json:
            return json.dumps(value, ensure_ascii=False, separators=(self.item, self.pair))
        if self.tags:
            return self._tagged(value, self.tags)
        if value is True or value is False or value is None:
            return self.words[(True, False, None).index(value)]
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            pairs = (
                f"{key if self.bare_keys else self._text(str(key))}{self.pair}{self.write(inner)}"
                for key, inner in value.items()
            )
            return "{" + self.item.join(pairs) + "}"
        if isinstance(value, (list, tuple)):
            return "[" + self.item.join(map(self.write, value)) + "]"
        return json.dumps(value)

    def _text(self, text: str) -> str:
        if not self.quote:
            return json.dumps(text, ensure_ascii=False)
        return repr(text) if self.quote == "'" else self.quote + text + self.quote

    def _tagged(self, value: object, tags: tuple[str, str, str, str]) -> str:
        if isinstance(value, Mapping):
            pairs = [(str(key), inner) for key, inner in value.items() if inner is not None]
        elif isinstance(value, (list, tuple)):
            pairs = [("item", item) for item in value]
        elif isinstance(value, bool):
            return self.words[not value]
        else:
            return value if isinstance(value, str) else json.dumps(value)
        a, b, c, d = tags
        return "".join(f"{a}{k}{b}{self._tagged(inner, tags)}{c}{k}{d}" for k, inner in pairs)

    def read(self, cursor: Cursor, depth: int = 0) -> object:
        """Return the value at a cursor: JSON, Python or these values.

        Raises:
            Mismatch, Incomplete: nothing fits here, or more of the text is needed.
        """
        if depth > 200:
            raise Mismatch
        cursor.space()
        text, at = cursor.text, cursor.at
        if at >= len(text):
            raise cursor.need()
        quotes = tuple(filter(None, (self.quote, '"', "'")))
        for quote in quotes:
            if text.startswith(quote, at):
                return self._read_text(cursor, quote)
            if not cursor.last and quote.startswith(text[at:]):
                raise Incomplete
        if text[at] in "{[":
            return self._read_many(cursor, depth)
        if not cursor.last and _BEGUN.fullmatch(text, at):
            raise Incomplete
        word, number = _WORD.match(text, at), _NUMBER.match(text, at)
        if word and word[0] in _LITERALS:
            cursor.at = word.end()
            return _LITERALS[word[0]]
        if number is None:
            raise Mismatch
        cursor.at = number.end()
        try:
            value: object = json.loads(number[0])
        except ValueError:  # more digits than Python converts
            raise Mismatch from None
        return value

    def read_all(self, text: str) -> object:
        """Return the value of a text that contains nothing else but white space.

        Raises:
            Mismatch: it is not one value.
        """
        cursor = Cursor(text.strip())
        value = self.read(cursor)
        if cursor.at < len(cursor.text):
            raise Mismatch
        return value

    def _read_text(self, cursor: Cursor, quote: str) -> str:
        if len(quote) > 1:
            cursor.at += len(quote)
            return cursor.until(quote)
        match = _quoted(quote).match(cursor.text, cursor.at)
        if match is None:
            raise cursor.need()
        cursor.at = match.end()
        text = _ESCAPE.sub(_escaped, match[1])
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _read_many(self, cursor: Cursor, depth: int) -> object:
        opening = cursor.text[cursor.at]
        closing = "}" if opening == "{" else "]"
        cursor.at += 1
        items: list[object] = []
        pairs: dict[str, object] = {}
        while True:
            cursor.space()
            if cursor.tries(closing):
                break
            if opening == "[":
                items.append(self.read(cursor, depth + 1))
            else:
                key = self._key(cursor)
                cursor.space()
                cursor.literal(":")
                pairs[key] = self.read(cursor, depth + 1)
            cursor.space()
            if not cursor.tries(","):
                cursor.literal(closing)
                break
        return pairs if opening == "{" else items

    def _key(self, cursor: Cursor) -> str:
        cursor.space()
        for quote in filter(None, (self.quote, '"', "'")):
            if cursor.text.startswith(quote, cursor.at):
                return self._read_text(cursor, quote)
        if not self.bare_keys:
            raise Mismatch
        return cursor.before(":").strip()

    def read_tagged(self, text: str, schema: object = None) -> object:
        """Return the value that a text writes as nested tags."""
        if not self.tags:
            raise Mismatch
        a, b, c, d = self.tags
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind in ("object", "array") and not text.strip():
            return {} if kind == "object" else []
        if a.strip() not in text or kind == "string":
            try:
                return text if kind == "string" else self.read_all(text)
            except Mismatch:
                return text
        pairs: list[tuple[str, object]] = []
        cursor = Cursor(text)
        cursor.space()
        while cursor.at < len(text):
            cursor.literal(a)
            key = cursor.until(b)
            inner = _closing(cursor.text, cursor.at, f"{a}{key}{b}", f"{c}{key}{d}")
            of_item = _inner(schema, key, kind == "array" or key == "item")
            pairs.append((key, self.read_tagged(cursor.text[cursor.at : inner], of_item)))
            cursor.at = inner + len(f"{c}{key}{d}")
            cursor.space()
        if kind == "array" or (kind is None and pairs and all(key == "item" for key, _ in pairs)):
            return [value for _, value in pairs]
        return dict(pairs)


@lru_cache
def _quoted(quote: str) -> re.Pattern[str]:
    """Return the pattern of a text in quotes."""
    q = re.escape(quote)
    return re.compile(rf"{q}([^{q}\\]*(?:\\.[^{q}\\]*)*){q}", re.DOTALL)


def _escaped(match: re.Match[str]) -> str:
    """Return the character that an escape in quotes stands for; unknown escapes stay as they are."""
    code = match[1]
    if len(code) == 1:
        return _ESCAPES.get(code, code if code in "\"'\\/" else "\\" + code)
    number = int(code[1:], 16)
    if number > 0x10FFFF:
        raise Mismatch
    return chr(number)


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    """Return the position of the tag that closes the tag opened before ``at``."""
    depth = 1
    while True:
        end, inner = text.find(closing, at), text.find(opening, at)
        if end < 0:
            raise Mismatch
        if 0 <= inner < end:
            depth, at = depth + 1, inner + len(opening)
            continue
        depth -= 1
        if depth == 0:
            return end
        at = end + len(closing)


def _inner(schema: object, key: str, is_item: bool) -> object:
    if key in (properties := properties_of(schema)):
        return properties[key]
    return schema.get("items") if is_item and isinstance(schema, Mapping) else None


# -- the arguments in tags -------------------------------------------------------------------------


class Around(NamedTuple):
    """The texts around an argument: before its name, between name and value, after the value."""

    before: str
    between: str
    after: tuple[Part, ...]  # may name the argument again

    def closing(self, key: str) -> str:
        """Return the text after the value of an argument."""
        return "".join(key if part is Slot.NAME else str(part) for part in self.after)


class Rest(NamedTuple):
    """The text after all arguments of a call.

    Attributes:
        literal: the end of the call.
        then: if the literal is so short that values may contain it, one of these texts, or the end of
            the text, must follow it.
    """

    literal: str
    then: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArgumentTags:
    """How arguments are written if their names and values are in tags or in quotes.

    Attributes:
        text: the texts around a string; None = strings are written like other values.
        others: the texts around other values, by kind ("number", "bool", "null", "object", "list").
        separator: between two arguments.
        values: how values other than plain text are written.
        start, end: around all arguments, if there are any.
    """

    text: Around | None
    others: Mapping[str, Around]
    separator: str = ""
    values: Values = field(default_factory=Values)
    start: str = ""
    end: str = ""

    @cached_property
    def arounds(self) -> tuple[Around, ...]:
        """All texts that may surround an argument, those with the longest middle part first."""
        every = dict.fromkeys([*([self.text] if self.text else []), *self.others.values()])
        return tuple(sorted(every, key=lambda around: -len(around.between)))

    def around(self, value: object) -> Around:
        """Return the texts around a value."""
        if isinstance(value, str) and self.text is not None:
            return self.text
        kind = _kind(value)
        return self.others.get(kind) or self.others["number"]

    def write(self, arguments: Mapping[str, object]) -> str:
        """Return the text of a call's arguments."""
        parts = []
        for key, value in arguments.items():
            around = self.around(value)
            is_plain = isinstance(value, str) and self.text is not None
            text = str(value) if is_plain else self.values.write(value)
            parts.append(around.before + key + around.between + text + around.closing(key))
        return self.start + self.separator.join(parts) + self.end if parts else ""

    @property
    def is_quoted(self) -> bool:
        """Whether values end by themselves, as in Python, instead of at a tag."""
        return not any("".join(map(str, around.after)).strip() for around in self.others.values())

    def read(self, cursor: Cursor, schema: object, rest: Rest) -> dict[str, object]:
        """Return the arguments at a cursor, up to ``rest``, which is not read.

        ``schema`` is the schema of the function's arguments.

        Raises:
            Mismatch, Incomplete: the text has no arguments here, or more of it is needed.
        """
        found: dict[str, object] = {}
        if not self._ends(cursor, rest):
            if self.start:
                cursor.literal(self.start)
            while True:
                key, value = self._one(cursor, schema, rest)
                if key in found:
                    raise Mismatch
                found[key] = value
                if self._closes(cursor, rest):
                    break
                if self.separator.strip():
                    cursor.literal(self.separator)
        return found

    def _closes(self, cursor: Cursor, rest: Rest) -> bool:
        """Read the end of all arguments, if it is at the cursor and ``rest`` follows it."""
        at = cursor.at
        if (not self.end or cursor.tries(self.end)) and self._ends(cursor, rest):
            return True
        cursor.at = at
        return False

    def _ends(self, cursor: Cursor, rest: Rest) -> bool:
        """Return whether ``rest`` is at the cursor; the end of a complete text counts too."""
        at = cursor.at
        try:
            if not rest.literal.strip():
                cursor.space()
                return cursor.at == len(cursor.text)
            if not cursor.tries(rest.literal.lstrip(), skip=True):
                return False
            return not rest.then or any(cursor.tries(literal, skip=True) for literal in rest.then)
        finally:
            cursor.at = at

    def _one(self, cursor: Cursor, schema: object, rest: Rest) -> tuple[str, object]:
        """Return an argument's name and value."""
        start = cursor.at
        for around in self.arounds:
            cursor.at = start
            try:
                cursor.space()
                cursor.literal(around.before)
                key = self._key(cursor, around, schema)
                return key, self._value(cursor, around, key, schema, rest)
            except Mismatch:
                continue
        raise Mismatch

    def _key(self, cursor: Cursor, around: Around, schema: object) -> str:
        between = around.between
        for key in sorted(properties_of(schema), key=len, reverse=True):
            at = cursor.at
            try:
                cursor.literal(key)
                if cursor.tries(between.rstrip()):
                    break
            except Mismatch:
                pass
            cursor.at = at
        else:
            if not between.strip():
                word = _WORD.match(cursor.text, cursor.at)
                if word is None:
                    raise cursor.need()
                cursor.at = word.end()
                return word[0]
            # Skip all of `between`, because it may contain quotes that mark a string.
            key = cursor.before(between).strip()
            if not key or "\n" in key:
                raise Mismatch
            if not around.before.strip() and not _BARE_KEY.fullmatch(key):
                raise Mismatch  # it is not clear where it begins
            cursor.literal(between.rstrip())
        # White space at the end of a literal is read, but not white space of a value.
        tail = between[len(between.rstrip()) :]
        if cursor.text.startswith(tail, cursor.at):
            cursor.at += len(tail)
        elif not cursor.last and tail.startswith(cursor.text[cursor.at :]):
            raise Incomplete
        return key

    def _value(
        self, cursor: Cursor, around: Around, key: str, schema: object, rest: Rest
    ) -> object:
        is_text, is_other = around == self.text, around in self.others.values()
        after = around.closing(key)
        if not after.strip():
            return self.values.read(cursor)
        text = self._raw(cursor, after, rest)
        own = properties_of(schema).get(key)
        if is_text and (not is_other or is_text_schema(own, schema)):
            return text
        if self.values.tags:
            return self.values.read_tagged(text, own)
        try:
            value = self.values.read_all(text)
        except Mismatch:
            if not is_text:
                raise
            return text
        # Strings are written without quotes, so these belong to the value.
        return text if is_text and isinstance(value, str) else value

    def _raw(self, cursor: Cursor, after: str, rest: Rest) -> str:
        """Read up to and including ``after``, and return the text before it.

        A value may contain the text of ``after``, so another argument or the end must follow it.
        """
        start, core = cursor.at, after.strip()
        lead = after[: len(after) - len(after.lstrip())]
        befores = {around.before for around in self.arounds}
        place = (start, core, rest)
        end = cursor.text.find(core, cursor.ruled_out.get(place, start))
        while end >= 0:
            cursor.at = end + len(core)
            if self._goes_on(cursor, rest, befores):
                return cursor.text[start:end].removesuffix(lead)
            cursor.ruled_out[place] = end + 1
            end = cursor.text.find(core, end + 1)
        raise cursor.need()

    def _goes_on(self, cursor: Cursor, rest: Rest, befores: set[str]) -> bool:
        at = cursor.at
        try:
            if self._closes(cursor, rest):
                return True
            cursor.space()
            if self.separator.strip() and not cursor.tries(self.separator):
                return False
            cursor.space()
            for before in befores:
                if before.strip():
                    if cursor.tries(before.strip()):
                        return True
                elif _WORD.match(cursor.text, cursor.at):
                    return True
            return False
        finally:
            cursor.at = at


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "bool"
    if isinstance(value, Mapping):
        return "object"
    return "list" if isinstance(value, (list, tuple)) else "number"


# -- calls -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallForm:
    """How a template writes calls.

    Attributes:
        unit: the literals and slots of a call.
        object_at, object_end: which parts form a JSON object with name and arguments; 0 = none do.
        section_start, section_end: around all calls of a turn.
        separator: between two calls.
        several: whether a turn may have several calls; None = not known.
        name_path, arguments_path, id_path: the keys that lead there in the object; () = the key itself
            is the name.
        tags: how arguments are written if they are not JSON.
        values: how JSON arguments are spaced.
        arguments_as_text: the arguments are a string that contains JSON.
        name_in_id: the id contains the name, between these two texts.
        index_from: the first number of a call.
        other: another form of these calls, which the model writes even though the template does not.
    """

    unit: tuple[Part, ...]
    object_at: int = 0
    object_end: int = 0
    section_start: str = ""
    section_end: str = ""
    separator: str = ""
    several: bool | None = None
    name_path: tuple[str, ...] = ("name",)
    arguments_path: tuple[str, ...] = ("arguments",)
    id_path: tuple[str, ...] | None = None
    tags: ArgumentTags | None = None
    values: Values = field(default_factory=Values)
    arguments_as_text: bool = False
    name_in_id: tuple[str, str] | None = None
    index_from: int = 0
    other: CallForm | None = None

    @property
    def kind(self) -> str:
        """How a call is written.

        "json" = an object that holds name and arguments; "tag" = a tag with the name, and JSON; "tags" =
        names and values in tags, or in quotes.
        """
        if self.object_end:
            return "json"
        return "tag" if self.tags is None else "tags"

    @property
    def call_start(self) -> str:
        """The literal that a call begins with."""
        end = (
            self.object_at
            if self.kind == "json"
            else next((i for i, part in enumerate(self.unit) if isinstance(part, Slot)), 0)
        )
        return "".join(str(part) for part in self.unit[:end])

    @property
    def call_end(self) -> str:
        """The literal that a call ends with."""
        if self.kind == "json":
            return "".join(str(part) for part in self.unit[self.object_end :])
        return self.unit[-1] if isinstance(self.unit[-1], str) else ""

    @property
    def opening(self) -> str:
        """The beginning of the first call of a turn, up to its first slot or object."""
        return self.section_start + self.call_start

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of calls; "" without calls."""
        texts = [
            "".join(p if isinstance(p, str) else self._slot(p, call, i) for p in self.unit)
            for i, call in enumerate(calls, self.index_from)
        ]
        return self.section_start + self.separator.join(texts) + self.section_end if texts else ""

    def _slot(self, slot: Slot, call: ToolCall, index: int) -> str:
        if slot is Slot.INDEX:
            return str(index)
        if slot is Slot.WORDS:
            return ""
        if slot is Slot.ARGUMENTS:
            if self.tags is not None:
                return self.tags.write(
                    call.arguments if isinstance(call.arguments, Mapping) else {}
                )
            text = self.values.write(call.arguments)
            return json.dumps(text, ensure_ascii=False) if self.arguments_as_text else text
        if slot is Slot.ID and self.name_in_id:
            before, after = self.name_in_id
            text = f"{before}{call.name}{after}{index}"
        else:
            text = call.name if slot is Slot.NAME else call.id
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.kind == "json" else text

    # -- reading -----------------------------------------------------------------------------------

    def read_call(self, cursor: Cursor, known: Known) -> list[ToolCall]:
        """Return the calls at a cursor: one call, or the calls of a JSON list.

        Raises:
            Mismatch, Incomplete: nothing fits here, or more of the text is needed.
        """
        if self.kind != "json":
            return [self._read_one(cursor, known)]
        if self.call_start:
            cursor.space()
            cursor.literal(self.call_start)
        value = cursor.json()
        calls = [
            self.of_object(item, known) for item in (value if isinstance(value, list) else [value])
        ]
        if not calls:
            raise Mismatch
        self._tolerant(cursor, self.call_end)
        return calls

    def head(self, cursor: Cursor, known: Known) -> tuple[str, str, int]:
        """Return the name and id of a call at a cursor, and where its arguments begin.

        Raises:
            Mismatch, Incomplete: its parts are not in the expected order, or more is needed.
        """
        end = self.unit.index(Slot.ARGUMENTS)
        name, call_id = self._read_parts(cursor, known, range(end))
        if self.tags is None:
            cursor.space()
        return name, call_id, cursor.at

    def _rest(self, i: int) -> Rest:
        """Return the text that follows the arguments of a call."""
        literal = self._literal_after(i)
        then = tuple(text.strip() for text in (self.separator, self.section_end) if text.strip())
        is_short = len(literal.strip()) < 3 and i + 2 == len(self.unit) and len(then) == 2
        return Rest(literal, then if is_short else ())

    def _literal_after(self, i: int) -> str:
        following = self.unit[i + 1] if i + 1 < len(self.unit) else ""
        return following if isinstance(following, str) else ""

    def _tolerant(self, cursor: Cursor, literal: str) -> None:
        """Read the end of a complete call; at the end of the text, the rest of it may be missing."""
        at = cursor.at
        try:
            cursor.space()
            cursor.literal(literal.lstrip())
        except Mismatch:
            cursor.at = at
            rest = cursor.text[at:].strip()
            if not literal.strip().startswith(rest):
                raise
            cursor.at = len(cursor.text)

    def of_object(self, value: object, known: Known) -> ToolCall:
        """Return the call that a JSON object describes.

        Raises:
            Mismatch: it does not describe a call.
        """
        if not isinstance(value, Mapping):
            raise Mismatch
        if not self.name_path:
            if len(value) != 1:
                raise Mismatch
            name, arguments = next(iter(value.items()))
            call_id: object = ""
        else:
            name = _at(value, self.name_path)
            *outer, last = self.arguments_path
            other = {"arguments": "parameters", "parameters": "arguments"}.get(last, last)
            arguments = _at(value, self.arguments_path, _at(value, (*outer, other), _missing))
            call_id = _at(value, self.id_path, "") if self.id_path else ""
        if not isinstance(name, str) or not known.takes(name):
            raise Mismatch
        return ToolCall(name, arguments_of(arguments, known, name), str(call_id or ""))

    def _read_one(self, cursor: Cursor, known: Known) -> ToolCall:
        name, call_id, _ = self.head(cursor, known)
        at = self.unit.index(Slot.ARGUMENTS)
        if self.tags is None:
            arguments = arguments_of(cursor.json(), known, name)
        else:
            schema = (known.schemas or {}).get(name)
            arguments = self.tags.read(cursor, schema, self._rest(at))
        after = range(at + 1, len(self.unit))
        name, call_id = self._read_parts(cursor, known, after, name, call_id)
        if not known.takes(name):
            raise Mismatch
        return ToolCall(name, arguments, call_id)

    def _read_parts(
        self, cursor: Cursor, known: Known, places: range, name: str = "", call_id: str = ""
    ) -> tuple[str, str]:
        """Read parts of a call other than its arguments; return its name and id."""
        for i in places:
            part, after = self.unit[i], self._literal_after(i)
            if isinstance(part, str):
                if i == len(self.unit) - 1:
                    self._tolerant(cursor, part)
                elif i == 0:
                    cursor.space()
                    cursor.literal(part.lstrip())
                else:
                    cursor.literal(part)
            elif part is Slot.NAME and not name:
                name = self._read_name(cursor, known, after)
            elif part is Slot.NAME:
                cursor.literal(name)
            else:
                text = cursor.before(after).strip()
                if part is Slot.INDEX and not text.isdigit():
                    raise Mismatch
                if part is Slot.ID:
                    call_id = text
                    if self.name_in_id and not name:
                        before, end = self.name_in_id
                        name = re.sub(rf"{re.escape(end)}\d+\Z", "", text.removeprefix(before))
        return name, call_id

    def _read_name(self, cursor: Cursor, known: Known, after: str) -> str:
        """Return the name of a function; the text after it is not read."""
        text, start = cursor.text, cursor.at
        names: Collection[str] = known.schemas or ()
        if not cursor.last and any(
            len(text) - start < len(name) and name.startswith(text[start:]) for name in names
        ):
            raise Incomplete
        for name in sorted(names, key=len, reverse=True):
            if not text.startswith(name, start):
                continue
            cursor.at = start + len(name)
            probe = Cursor(cursor.text, cursor.at, last=cursor.last)
            if not after and _NAME.match(cursor.text, cursor.at):
                continue  # this is the beginning of a longer name
            if not after or probe.tries(after) or probe.tries(after.lstrip(), skip=True):
                return name
        if known.schemas is not None:
            raise Mismatch
        name = cursor.before(after).rstrip()
        cursor.at = start + len(name)
        if not name.strip() or "\n" in name.strip():
            raise Mismatch
        return name.strip()


_missing = object()


def _at(value: object, path: Sequence[str], default: object = None) -> object:
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def arguments_of(value: object, known: Known, name: str) -> object:
    """Return a call's arguments, which may be JSON in a string; {} if they are missing.

    Raises:
        Mismatch: they are missing, but the function has parameters.
    """
    if isinstance(value, str) and value.strip():
        value, _end = json_end(value.strip(), 0, last=True)
    if value is _missing or value is None or value == "":
        schema = (known.schemas or {}).get(name)
        if isinstance(schema, Mapping) and schema.get("required"):
            raise Mismatch
        if value is _missing and known.schemas is None:
            raise Mismatch
        return {}
    if not isinstance(value, Mapping):
        raise Mismatch
    return value
