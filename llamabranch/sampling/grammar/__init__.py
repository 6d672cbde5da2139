"""What a text must follow: GBNF, checked, and JSON schemas turned into it."""

from .grammar import Grammar

__all__ = [
    "Grammar",
]
