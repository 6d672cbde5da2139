"""Text as it is shown: sources of tokens, invisible characters, last words."""

from __future__ import annotations

# The sources of tokens other than plain decoding, with their labels.
SOURCES = {
    "drafted": "drafted and accepted",
    "forced": "forced by the grammar",
    "bonus": "bonus",
    "corrected": "corrected",
}


def visible(text: str) -> str:
    """Return the text with invisible and direction-changing characters as codes."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def last_words(text: str, n: int) -> str:
    """Return at most the last ``n`` characters of a text, beginning at a word."""
    if len(text) <= n:
        return text
    tail = text[-n:]
    space = tail.find(" ", 0, n // 2)
    return "..." + (tail[space + 1 :] if space >= 0 else tail)
