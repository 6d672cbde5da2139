"""Grammars for the generated text: JSON schemas, regular expressions, choices, Lark and GBNF."""

from .grammar import Grammar
from .guidance import LinePattern
from .turn import turn_grammar

__all__ = [
    "Grammar",
    "LinePattern",
    "turn_grammar",
]
