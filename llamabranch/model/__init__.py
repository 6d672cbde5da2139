"""Weights, vocabulary, text."""

from .model import Model
from .text import NO_TOKEN, StopStrings, TextDecoder, TokenIds, token_list
from .vocabulary import VocabularyReport

__all__ = [
    "NO_TOKEN",
    "Model",
    "StopStrings",
    "TextDecoder",
    "TokenIds",
    "VocabularyReport",
    "token_list",
]
