"""Regular expressions of JSON schemas as GBNF, for text inside a JSON string. Pure Python.

Supported expressions mean the same in ECMA-262, which JSON Schema uses, and in Python's ``re``. Where the
two differ (``\\d``, ``\\w``, ``\\s``, a dot) only characters that match in both are generated.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import GrammarError
from .characters import complement, encoded

__all__ = ["Pattern"]

Ranges = tuple[tuple[int, int], ...]

_SHORTHANDS: dict[str, Ranges] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": ((0x09, 0x0D), (0x20, 0x20)),
}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_HEX_DIGITS = {"x": 2, "u": 4}
# A dot and a negated set generate no control characters. A negated set that contains a shorthand
# generates only ASCII, where both languages agree on what a digit, a letter and a space is.
_PRINTED: Ranges = ((0x20, 0xD7FF), (0xE000, 0x10FFFF))
_ASCII: Ranges = ((0x20, 0x7E),)
_NO_DOT: Ranges = ((0x2028, 0x2029),)
_MAX_DEPTH = 50


@dataclass(frozen=True)
class _Part:
    """A piece of GBNF and the number of characters it matches; ``most`` None = any number."""

    gbnf: str
    least: int
    most: int | None


class Pattern:
    """A regular expression ``^...$`` as GBNF.

    ``gbnf`` is an expression for the inside of the JSON string; its value has ``least`` to ``most``
    characters (None: any number).

    Raises:
        GrammarError: not anchored at both ends, or something unsupported, which the message names.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        if not source.startswith("^") or len(source) < 2 or not source.endswith("$"):
            raise self._unsupported("that does not begin with ^ and end with $")
        self._text = source[1:-1]
        n_backslashes = len(self._text) - len(self._text.rstrip("\\"))
        if n_backslashes % 2:
            raise self._unsupported("that does not end with $ (it is escaped)")
        self._at = 0
        whole = self._sequence()
        if self._next() == "|":
            raise self._unsupported("with an alternative outside of parentheses", "write ^(a|b)$")
        if self._at < len(self._text):
            raise self._unsupported(f"with an unbalanced {self._next()!r}")
        self.gbnf, self.least, self.most = whole.gbnf, whole.least, whole.most

    def _unsupported(self, what: str, hint: str | None = None) -> GrammarError:
        return GrammarError(
            f"the JSON-schema keyword 'pattern' does not support an expression {what}: "
            f"{self._source!r}",
            hint=hint,
        )

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        found = self._next()
        self._at += 1
        return found

    def _alternatives(self, depth: int) -> _Part:
        if depth > _MAX_DEPTH:
            raise self._unsupported(f"nested deeper than {_MAX_DEPTH}")
        parts = [self._sequence(depth)]
        while self._next() == "|":
            self._at += 1
            parts.append(self._sequence(depth))
        most = [p.most for p in parts]
        known = [n for n in most if n is not None]
        return _Part(
            "(" + " | ".join(p.gbnf or '""' for p in parts) + ")",
            min(p.least for p in parts),
            max(known) if len(known) == len(most) else None,
        )

    def _sequence(self, depth: int = 0) -> _Part:
        gbnf: list[str] = []
        least = 0
        most: int | None = 0
        while self._next() not in ("", "|", ")"):
            part = self._repeated(self._atom(depth))
            gbnf.append(part.gbnf)
            least += part.least
            most = None if most is None or part.most is None else most + part.most
        return _Part(" ".join(gbnf), least, most)

    def _atom(self, depth: int) -> _Part:
        c = self._take()
        if c == "(":
            if self._next() == "?":
                if self._text[self._at : self._at + 2] != "?:":
                    raise self._unsupported(f"with (?{self._text[self._at + 1 : self._at + 2]}...)")
                self._at += 2
            group = self._alternatives(depth + 1)
            if self._take() != ")":
                raise self._unsupported("with an unbalanced '('")
            return group
        if c == ".":
            return self._one_of(complement(_NO_DOT, _PRINTED))
        if c == "[":
            return self._one_of(self._set())
        if c == "\\":
            return self._one_of(self._escape(in_set=False)[0])
        if c in "*+?{":
            raise self._unsupported(f"in which {c!r} has nothing to repeat")
        if c in "^$":
            raise self._unsupported(f"with {c!r} in its middle")
        if c in "]}":
            raise self._unsupported(f"with an unbalanced {c!r}", f"write \\{c}")
        return self._one_of(((ord(c), ord(c)),))

    def _one_of(self, ranges: Ranges) -> _Part:
        gbnf = encoded(ranges)
        if not gbnf:
            raise self._unsupported("with a set of no characters")
        return _Part(gbnf, 1, 1)

    def _escape(self, in_set: bool) -> tuple[Ranges, bool]:
        """Return the set that an escape sequence means, and whether it is a shorthand such as ``d``."""
        c = self._take()
        if c in _CONTROLS:
            return ((_CONTROLS[c], _CONTROLS[c]),), False
        if c in _SHORTHANDS:
            return _SHORTHANDS[c], True
        if c.lower() in _SHORTHANDS and not in_set:
            return complement(_SHORTHANDS[c.lower()], _ASCII), True
        if c in _HEX_DIGITS:
            digits = self._text[self._at : self._at + _HEX_DIGITS[c]]
            if len(digits) == _HEX_DIGITS[c] and all(d in "0123456789abcdefABCDEF" for d in digits):
                self._at += len(digits)
                return ((int(digits, 16), int(digits, 16)),), False
        if not c or c.isalnum() or not c.isascii():
            raise self._unsupported(f"with \\{c}")
        return ((ord(c), ord(c)),), False

    def _set(self) -> Ranges:
        negated = self._next() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        shorthands = False
        if self._next() == "]":
            raise self._unsupported("with an empty set")
        while self._next() != "]":
            low, is_shorthand = self._member()
            shorthands |= is_shorthand
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high, is_too = self._member()
                if is_shorthand or is_too or low[0][0] > high[0][0]:
                    raise self._unsupported("with an invalid range")
                low = ((low[0][0], high[0][0]),)
            ranges.extend(low)
        self._at += 1
        if not negated:
            return tuple(ranges)
        return complement(ranges, _ASCII if shorthands else _PRINTED)

    def _member(self) -> tuple[Ranges, bool]:
        c = self._take()
        if not c:
            raise self._unsupported("with an unbalanced '['")
        if c == "\\":
            return self._escape(in_set=True)
        if c == "[":
            raise self._unsupported("with '[' inside a set", "write \\[")
        if c in "-&~|" and self._next() == c:
            raise self._unsupported(f"with {c + c!r} inside a set")
        return ((ord(c), ord(c)),), False

    def _repeated(self, part: _Part) -> _Part:
        c = self._next()
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if c not in (*bounds, "{"):
            return part
        self._at += 1
        low, high = bounds[c] if c in bounds else self._bounds()
        if self._next() == "?":
            self._at += 1  # lazy: matches the same texts
        if self._next() and self._next() in "*+?{":
            raise self._unsupported("with a repetition of a repetition", "use parentheses")
        if part.least == 0 and high is None:
            raise self._unsupported("that repeats an item without limit that may be empty")
        suffix = c if c in bounds else f"{{{low},{'' if high is None else high}}}"
        most = None if high is None or part.most is None else high * part.most
        return _Part(part.gbnf + suffix, low * part.least, most)

    def _bounds(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at : max(end, self._at)].partition(",")
        if end < 0 or not _is_number(low) or (high and not _is_number(high)) or len(low + high) > 9:
            raise self._unsupported("with a '{' that does not begin a repetition", "write \\{")
        self._at = end + 1
        least, most = int(low), int(high) if high else (None if comma else int(low))
        if most is not None and most < least:
            raise self._unsupported(f"with the maximum of {{{low},{high}}} below its minimum")
        return least, most


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
