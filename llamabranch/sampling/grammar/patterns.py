r"""Patterns of JSON schemas for llguidance: in Rust's syntax, without what it does silently wrong.

In such strings llguidance allows ``\u`` for control characters only, so the ``\u00e9`` of a model would
become another letter; and it confuses the class of all control characters with that of all escapes. So
``.`` and what surrounds a match allow no control characters, and classes only ``\t``, ``\n`` and ``\r``.
"""

from __future__ import annotations

import re

from ...errors import GrammarError

__all__ = ["CONTROLS", "rust_pattern"]

CONTROLS = r"\x00-\x1f\x7f"
_RARE = r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f"
_UNSURE = r"\x85\x{feff}"  # white space in some engines only: neither \s nor \S
_CLASSES = {
    "d": "0-9", "w": "0-9A-Za-z_",
    "s": r"\t\n\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}",
}  # fmt: skip
_TOKEN = re.compile(r"\\[pP]\{[^}]*\}|\\.|\(\?<?[!=]|\[\^?|.", re.DOTALL)
_ITEM = re.compile(r"\\[pP]\{[^}]*\}|\\.|--|.", re.DOTALL)


def rust_pattern(pattern: str) -> str:
    """Return a pattern that matches the same texts in llguidance, but for control characters.

    Raises:
        GrammarError: it has look-around, an empty class, ``--`` in a class, or ``{,n}``.
    """
    pieces: list[str] = []
    at = 0
    while match := _TOKEN.match(pattern, at):
        piece, at = match[0], match.end()
        if piece[:2] == "(?" and piece[-1] in "!=":
            raise GrammarError("pattern: look-around is not supported")
        if piece == "\\":
            raise GrammarError("pattern: incomplete escape at the end")
        if piece == "{" and pattern[at : at + 1] == ",":
            raise GrammarError("pattern: {,n} differs between engines: write {0,n}")
        if piece[0] == "[":
            piece, at = _class(pattern, at, is_negated=len(piece) > 1)
        elif piece == ".":
            piece = f"[^{_RARE if '(?s' in pattern else CONTROLS}]"
        elif _is_class(piece):
            piece = f"[{_item(piece)}]"
        pieces.append(piece)
    if "|" not in pieces:
        pieces.insert(0, "" if "^" in pieces else f"^[^{CONTROLS}]*")
        pieces.append("" if "$" in pieces else f"[^{CONTROLS}]*$")
    return "".join(pieces)


def _class(pattern: str, at: int, *, is_negated: bool) -> tuple[str, int]:
    """Return the class whose items begin at ``at``, in Rust's syntax, and where it ends."""
    items: list[str] = []
    while match := _ITEM.match(pattern, at):
        item, at = match[0], match.end()
        if item == "--":
            raise GrammarError(
                r"pattern: -- in a class is a set operator in other engines: write \-"
            )
        if item == "]" and not items:
            raise GrammarError("pattern: an empty class matches nothing")
        if item == "]":
            edges = (
                0,
                len(items) - 1,
                *(k + d for k, i in enumerate(items) if _is_class(i) for d in (1, -1)),
            )
            for k in edges:
                if items[k : k + 1] == ["-"]:
                    items[k] = r"\-"
            body = "".join(map(_item, items))
            unsure = _UNSURE if r"\S" in items else ""
            return (f"[^{body}{_RARE}{unsure}]" if is_negated else f"[{body}&&[^{_RARE}]]"), at
        items.append(item)
    raise GrammarError("pattern: unclosed character class")


def _is_class(item: str) -> bool:
    return item[0] == "\\" and item[1] in "dwspDWSP"


def _item(item: str) -> str:
    """Return an item of a class; the complement of a class is a class in it."""
    if not _is_class(item):
        return f"\\{item}" if item in "[&~" else item
    name = item[1]
    body = _CLASSES.get(name.lower(), rf"\p{item[2:]}")
    return body if name.islower() else f"[^{body}{_RARE}{_UNSURE if name == 'S' else ''}]"
