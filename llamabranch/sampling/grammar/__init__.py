"""Grammars for the generated text: GBNF, checked, and JSON schemas converted to GBNF."""

from .grammar import Grammar

__all__ = [
    "Grammar",
]
