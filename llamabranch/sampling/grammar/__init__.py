"""Grammars for the generated text: JSON schemas, regular expressions, choices, Lark and GBNF."""

from .grammar import Grammar

__all__ = [
    "Grammar",
]
