"""A loaded model: weights, vocabulary, and text from tokens."""

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
