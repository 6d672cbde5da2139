r"""Patterns of JSON schemas: ECMAScript's regular expressions, written as Rust's regex reads them.

JSON Schema uses ECMA-262 with the flag ``u``. Rust's syntax is similar but differs in many places: inside
a class ``&&``, ``--``, ``~~`` and ``[`` are set operators in Rust, ``\d`` is any Unicode digit, and ``$``
and ``.`` use other line ends. So every class is computed here, as a set of code points, and written out.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple, NoReturn

from ...errors import GrammarError

__all__ = ["rust_pattern"]

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included; sorted, none touch

_LAST = sys.maxunicode
_SURROGATES = (0xD800, 0xDFFF)  # these code points never occur in a text
_MOST_REPEATS = 1 << 31
_CONTROL = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}
# Escapes of other languages. In ECMAScript they are errors with the flag ``u``.
_FOREIGN = {
    "A": "^ stands for the beginning", "Z": "$ stands for the end", "z": "$ stands for the end",
    "a": r"\x07 is that character", "e": r"\x1b is that character", "h": r"[ \t]", "R": r"\r?\n",
    "Q": "escape each character", "E": "escape each character", "G": "", "X": "", "K": "",
}  # fmt: skip
_LONG_CATEGORIES = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Nonspacing_Mark": "Mn",
    "Spacing_Mark": "Mc", "Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd",
    "Letter_Number": "Nl", "Other_Number": "No", "Punctuation": "P", "Connector_Punctuation": "Pc",
    "Dash_Punctuation": "Pd", "Open_Punctuation": "Ps", "Close_Punctuation": "Pe",
    "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf", "Other_Punctuation": "Po",
    "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc", "Modifier_Symbol": "Sk",
    "Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl",
    "Paragraph_Separator": "Zp", "Other": "C", "Control": "Cc", "Format": "Cf",
    "Private_Use": "Co", "Unassigned": "Cn",
}  # fmt: skip


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def _others(ranges: Ranges) -> Ranges:
    """Return all other code points, without surrogates."""
    gaps, start = [], 0
    for first, last in _merged([*ranges, _SURROGATES]):
        if first > start:
            gaps.append((start, first - 1))
        start = last + 1
    return tuple([*gaps, (start, _LAST)] if start <= _LAST else gaps)


def _of(text: str) -> Ranges:
    return _merged((ord(c), ord(c)) for c in text)


_DIGITS: Ranges = ((0x30, 0x39),)
_WORD = _merged([*_DIGITS, (0x41, 0x5A), (0x61, 0x7A), (0x5F, 0x5F)])
_LINE_ENDS = _of("\n\r\u2028\u2029")
_SPACE = _merged([*_of("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000"), (0x2000, 0x200A)])
# Characters that are white space in ECMAScript or in Python's validators, but not in both. Here neither
# \s nor \S matches them.
_UNSURE = _of("\x1c\x1d\x1e\x1f\x85\ufeff")
_CLASSES = {
    "d": _DIGITS, "D": _others(_DIGITS), "w": _WORD, "W": _others(_WORD), "s": _SPACE,
    "S": _others(_merged([*_SPACE, *_UNSURE])),
}  # fmt: skip
_CONTROLS = ((0, 0x1F), (0x7F, 0x7F))
_ESCAPED = _merged([(0, 8), (0xB, 0xC), (0xE, 0x1F), (0x7F, 0x7F)])  # all but \t, \n and \r


@cache
def _category(name: str) -> Ranges:
    """Return the code points of a general category, "L" or "Lu"."""
    known = (chr(i) for i in range(_LAST + 1) if not _SURROGATES[0] <= i <= _SURROGATES[1])
    return _merged((ord(c), ord(c)) for c in known if unicodedata.category(c).startswith(name))


class _Flags(NamedTuple):
    """The flags that ``(?i:...)`` and ``(?s:...)`` turned on."""

    ignores_case: bool = False
    dot_is_all: bool = False


def rust_pattern(pattern: str) -> str:
    """Return an equivalent of an ECMAScript pattern in the syntax of Rust's regex.

    Groups capture nothing. Anchors stay, because llguidance handles them.

    Raises:
        GrammarError: it is not a valid ECMAScript pattern, or has look-around, a backreference or a word
            boundary, which a grammar cannot express.
    """
    return _Reader(pattern).read()


class _Reader:
    """Reads a pattern from the left to the right, once."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._has_atom = False  # whether a quantifier may follow
        self._flags = [_Flags()]

    def read(self) -> str:
        pieces: list[str] = []
        while self._at < len(self._pattern):
            pieces.append(self._next())
        if len(self._flags) > 1:
            self._refuse("unclosed group")
        if "|" not in pieces:  # what may surround a match is text without control characters too
            around = f"[{_listed(_others(_CONTROLS))}]*"
            pieces.insert(0, "" if "^" in pieces else f"^{around}")
            pieces.append("" if "$" in pieces else f"{around}$")
        return "".join(pieces)

    def _refuse(self, reason: str) -> NoReturn:
        raise GrammarError(f"pattern: {reason}")

    def _match(self, expression: str) -> re.Match[str] | None:
        """Return the match of a regular expression at this place, and move behind it."""
        match = re.compile(expression, re.DOTALL).match(self._pattern, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _next(self) -> str:
        char = self._pattern[self._at]
        if char in "*+?" or (
            char == "{" and re.match(r"\{\d+(,\d*)?\}", self._pattern[self._at :])
        ):
            return self._quantifier()
        self._has_atom = char not in "^$|("
        if char == "(":
            return self._group()
        self._at += 1
        if char == ")":
            if len(self._flags) == 1:
                self._refuse("unopened group")
            self._flags.pop()
            return ")"
        if char in "^$|":
            return char
        if char == ".":
            return self._written(_others(() if self._flags[-1].dot_is_all else _LINE_ENDS))
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        return self._written(_of(char))

    def _quantifier(self) -> str:
        if not self._has_atom:
            self._refuse(f"nothing to repeat before {self._pattern[self._at : self._at + 8]!r}")
        self._has_atom = False  # a second quantifier may not follow
        match = self._match(r"([*+?])\??|\{(\d+)(,?)(\d*)\}\??")
        if match is None:
            self._refuse("unclosed counted repetition")
        if match[1]:
            return match[1]
        least, most = int(match[2]), int(match[4]) if match[4] else None
        if most is not None and most < least:
            self._refuse(f"invalid repetition count range {{{least},{most}}}")
        if least >= _MOST_REPEATS:
            self._refuse(f"no text repeats anything {least} times")
        if not match[3]:
            return f"{{{least}}}"
        is_open = most is None or most >= _MOST_REPEATS
        return f"{{{least},}}" if is_open else f"{{{least},{most}}}"

    def _group(self) -> str:
        if self._match(r"\(\?(?:<[=!]|[=!])"):
            self._refuse("look-around, including look-ahead and look-behind, is not supported")
        if named := self._match(r"\(\?P?<([^>]*)>"):
            if not named[1].replace("$", "_").isidentifier():
                self._refuse(f"invalid name of a group {named[1]!r}")
        elif modified := self._match(r"\(\?([a-z]*)(?:-([a-z]*))?(:|\))"):
            return self._modified(modified)
        elif self._match(r"\(\?"):
            self._refuse("unrecognized kind of group")
        else:
            self._at += 1
        self._flags.append(self._flags[-1])
        return "(?:"

    def _modified(self, match: re.Match[str]) -> str:
        on, off = match[1], match[2] or ""
        if not on and not off and match[3] == ":":
            self._flags.append(self._flags[-1])
            return "(?:"
        unknown = set(on + off) - set("is")
        if unknown:
            self._refuse(f"the flag {min(unknown)!r} of a group is not supported")
        before = self._flags[-1]
        flags = _Flags(
            (before.ignores_case or "i" in on) and "i" not in off,
            (before.dot_is_all or "s" in on) and "s" not in off,
        )
        if match[3] == ")":  # flags for the rest of the group: not ECMAScript, but people send it
            self._flags[-1] = flags
            self._has_atom = False
            return f"(?{'' if flags.ignores_case else '-'}i)"
        self._flags.append(flags)
        return f"(?{'' if flags.ignores_case else '-'}i:"

    # -- characters --------------------------------------------------------------------------------

    def _escape(self) -> str:
        if self._match("[bB]"):
            self._refuse("lookarounds not supported: \\b and \\B look at both sides of a position")
        if self._match("[1-9]|k<"):
            self._refuse("backreferences are not supported")
        escaped = self._escaped(in_class=False)
        return escaped if isinstance(escaped, str) else self._written(escaped)

    def _escaped(self, *, in_class: bool) -> Ranges | str:
        """Return the meaning of an escape, after its backslash, or a property in Rust's syntax."""
        if self._at >= len(self._pattern):
            self._refuse("incomplete escape at the end")
        if match := self._match("[dDwWsS]"):
            return _CLASSES[match[0]]
        if match := self._match(r"([pP])\{([^}]*)\}"):
            return self._unicode_property(match[1] == "P", match[2])
        if match := self._match("[tnvfr]"):
            return _of(_CONTROL[match[0]])
        if self._match(r"0(?!\d)"):
            return ((0, 0),)
        if match := self._match("c([A-Za-z])"):
            return _of(chr(ord(match[1]) % 32))
        high_low = r"u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
        if match := self._match(high_low):
            code = 0x10000 + ((int(match[1], 16) - 0xD800) << 10) + int(match[2], 16) - 0xDC00
            return ((code, code),)
        if match := self._match(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}"):
            code = int(match[1] or match[2] or match[3], 16)
            if code > _LAST:
                self._refuse(f"{match[0]!r} is not a code point")
            return () if _SURROGATES[0] <= code <= _SURROGATES[1] else ((code, code),)
        if in_class and self._match("b"):
            return _of("\b")
        char = self._pattern[self._at]
        if char in _FOREIGN:
            hint = _FOREIGN[char]
            raise GrammarError(f"pattern: unknown escape \\{char}", hint=hint or None)
        if char.isascii() and (char.isalnum() or char == "_"):
            self._refuse(f"unknown escape \\{char}")
        self._at += 1
        return _of(char)

    def _unicode_property(self, is_negated: bool, name: str) -> Ranges | str:
        key, _, value = name.rpartition("=")
        short = _LONG_CATEGORIES.get(value, value)
        if key in ("", "General_Category", "gc") and short in _LONG_CATEGORIES.values():
            ranges = _category(short)
            return _others(ranges) if is_negated else ranges
        return f"[^\\p{{{name}}}{_listed(_ESCAPED)}]" if is_negated else f"\\p{{{name}}}"

    def _class(self) -> str:
        is_negated = self._match(r"\^") is not None
        ranges: list[tuple[int, int]] = []
        properties: list[str] = []
        while not self._match(r"\]"):
            first = self._class_item()
            if not (isinstance(first, tuple) and self._match(r"-(?!\])")):
                if isinstance(first, str):
                    properties.append(first)
                else:
                    ranges += first
                continue
            last = self._class_item()
            ends = [x[0][0] for x in (first, last) if isinstance(x, tuple) and _is_one(x)]
            if len(ends) == 2:
                if ends[0] > ends[1]:
                    self._refuse(f"invalid character class range {chr(ends[0])}-{chr(ends[1])}")
                ranges.append((ends[0], ends[1]))
            else:  # as in [\w-.], where the dash is a character
                ranges += [*first, *_of("-")]
                if isinstance(last, str):
                    properties.append(last)
                else:
                    ranges += last
        merged = _merged(ranges)
        # Rust adds the other case of each letter before it negates, so Rust must do the negation.
        if not properties and not (is_negated and self._flags[-1].ignores_case):
            return self._written(_others(merged) if is_negated else merged)
        if is_negated:
            merged = _merged([*merged, *_ESCAPED])  # see `_written`
        return f"[{'^' if is_negated else ''}{''.join(properties)}{_listed(merged)}]"

    def _class_item(self) -> Ranges | str:
        if self._at >= len(self._pattern):
            self._refuse("unclosed character class")
        char = self._pattern[self._at]
        self._at += 1
        return self._escaped(in_class=True) if char == "\\" else _of(char)

    def _written(self, ranges: Ranges) -> str:
        """Return a class in Rust's syntax."""
        if not ranges:
            self._refuse("an empty class matches nothing")
        if _is_one(ranges):
            char = chr(ranges[0][0])
            return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
        # llguidance allows \u only for control characters: the \u00e9 of a model would become \u007f.
        has_lines = any(first <= 0xA <= last for first, last in ranges)
        left_out = _ESCAPED if has_lines else _CONTROLS
        ranges = _others(_merged([*_others(ranges), *left_out])) or ranges
        return f"[{_listed(ranges)}]"


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _listed(ranges: Ranges) -> str:
    return "".join(
        f"\\x{{{first:x}}}" if first == last else f"\\x{{{first:x}}}-\\x{{{last:x}}}"
        for first, last in ranges
    )
