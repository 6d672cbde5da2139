r"""Patterns of JSON schemas, translated to Rust's syntax without the parts that llguidance gets wrong.

In strings with a pattern, llguidance allows ``\u`` only for control characters, so a model that writes
``\u00e9`` would end up with another letter. It also confuses the class of all control characters with
the class of all escapes. So ``.`` and the text around a match allow no control characters, and classes
allow only ``\t``, ``\n`` and ``\r``.
"""

from __future__ import annotations

import re

from ...errors import GrammarError

CONTROLS = r"\x00-\x1f\x7f"
# Not in classes: most control characters, and white space that not all engines count as such.
_RARE = r"\x7f\x85\x{feff}\x00-\x08\x0b\x0c\x0e-\x1f"
_PIECE = re.compile(r"(\[\^?)((?:\\.|[^\\\]])*)\]|\\[pP]\{[^}]*\}|\\.|.", re.DOTALL)
_ITEM = re.compile(r"\\.|--|[\[&~]", re.DOTALL)


def rust_pattern(pattern: str) -> str:
    """Return a pattern that matches the same texts in llguidance, except for control characters.

    Raises:
        GrammarError: it has an empty class, ``--`` in a class, or ends with a backslash.
    """
    any_character = f"[^{_RARE if '(?s' in pattern else CONTROLS}]"
    pieces: list[str] = []
    for match in _PIECE.finditer(pattern):
        piece, opening, items = match[0], match[1], match[2]
        if opening is not None:
            body = _ITEM.sub(_item, items)
            if not body:
                raise GrammarError("pattern: an empty class matches nothing")
            piece = f"[^{_RARE}{body}]" if opening == "[^" else f"[[^{_RARE}]&&[{body}]]"
        elif piece == ".":
            piece = any_character
        elif piece == "\\":
            raise GrammarError("pattern: incomplete escape at the end")
        elif piece[0] == "\\" and piece[1] in "sDSWpP":
            piece = f"[{piece}&&[^{_RARE}]]"
        pieces.append(piece)
    if "|" not in pieces:
        pieces.insert(0, "" if "^" in pieces else f"^[^{CONTROLS}]*")
        pieces.append("" if "$" in pieces else f"[^{CONTROLS}]*$")
    return "".join(pieces)


def _item(match: re.Match[str]) -> str:
    """Return a part of a class, with characters escaped that open a class or are operators in Rust."""
    if match[0] == "--":
        raise GrammarError(r"pattern: -- in a class is a set operator in other engines: write \-")
    return match[0] if match[0][0] == "\\" else f"\\{match[0]}"


def exactly(text: str) -> str:
    """Return a regular expression, in Rust's syntax, that only ``text`` matches."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
