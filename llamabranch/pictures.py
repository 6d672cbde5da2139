"""The parts of a drawn text or tree, for the terminal, plain text and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The sources of tokens other than plain decoding, with their labels.
SOURCES = {
    "drafted": "drafted and accepted",
    "forced": "forced by the grammar",
    "bonus": "bonus",
    "corrected": "corrected",
}


@dataclass(frozen=True)
class TreeLine:
    """A line of a drawn tree of texts.

    Attributes:
        text: its text.
        figures: short text next to it, such as a score.
        children: the lines that continue it, in the order in which they are drawn.
    """

    text: str
    figures: str = ""
    children: Sequence[TreeLine] = ()


def visible(text: str) -> str:
    """Return the text with invisible characters, and those that change the direction, as codes."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def last_words(text: str, n: int) -> str:
    """Return at most the last ``n`` characters of a text, beginning at a word."""
    if len(text) <= n:
        return text
    tail = text[-n:]
    space = tail.find(" ", 0, n // 2)
    return "..." + (tail[space + 1 :] if space >= 0 else tail)
