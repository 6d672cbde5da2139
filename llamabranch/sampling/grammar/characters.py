"""Sets of characters inside a JSON string, and their GBNF. Pure Python.

A character that JSON must escape (a quotation mark, a backslash, a control character) is written as its
escape sequence. Surrogates are not characters, so no set contains them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

__all__ = ["CHARACTERS", "complement", "encoded", "literal", "plain"]

Ranges = tuple[tuple[int, int], ...]

CHARACTERS: Ranges = ((0x00, 0xD7FF), (0xE000, 0x10FFFF))
_UNESCAPED: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))


def _common(left: Ranges, right: Ranges) -> Ranges:
    both = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return tuple(sorted((low, high) for low, high in both if low <= high))


def complement(ranges: Iterable[tuple[int, int]], within: Ranges = CHARACTERS) -> Ranges:
    """Return ``within`` without ``ranges``."""
    left: Ranges = within
    for low, high in ranges:
        left = _common(left, ((0, low - 1), (high + 1, 0x10FFFF)))
    return left


def plain(but: Iterable[str] = ()) -> str:
    """Return the GBNF set of the characters that need no escape in JSON, except ``but``."""
    return _bracket(_common(_UNESCAPED, complement((ord(c), ord(c)) for c in but)))


def encoded(ranges: Iterable[tuple[int, int]]) -> str:
    """Return GBNF for one character of a set, as written in a JSON string; "" for an empty set."""
    within = _common(CHARACTERS, tuple(ranges))
    raw = _common(_UNESCAPED, within)
    forms = [_bracket(raw)] if raw else []
    for code in (*range(0x20), 0x22, 0x5C):
        if any(low <= code <= high for low, high in within):
            forms.append(literal(json.dumps(chr(code))[1:-1]))
    return forms[0] if len(forms) == 1 else f"({' | '.join(forms)})" if forms else ""


def literal(text: str) -> str:
    """Return the GBNF literal of ``text``."""
    special = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    inner = (
        special.get(c) or (f"\\x{ord(c):02X}" if ord(c) < 0x20 or ord(c) == 0x7F else c)
        for c in text
    )
    return f'"{"".join(inner)}"'


def _bracket(ranges: Ranges) -> str:
    parts = (_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges)
    return f"[{''.join(parts)}]"


def _code(code: int) -> str:
    if code < 0x80:
        return chr(code) if chr(code).isalnum() else f"\\x{code:02X}"
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
