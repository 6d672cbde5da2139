"""A loaded model: weights, vocabulary, and text from tokens."""

from .call_form import ToolCall
from .chat import Message, Prompt, chat_messages, is_chat
from .model import Model, TextDecoder
from .pairs import VocabularyReport
from .text import NO_TOKEN, StopStrings, TokenIds, stop_strings, token_list
from .turn_finding import TurnParts
from .turn_format import Turn, TurnEvent, TurnFormat, TurnReader

__all__ = [
    "NO_TOKEN",
    "Message",
    "Model",
    "Prompt",
    "StopStrings",
    "TextDecoder",
    "TokenIds",
    "ToolCall",
    "Turn",
    "TurnEvent",
    "TurnFormat",
    "TurnParts",
    "TurnReader",
    "VocabularyReport",
    "chat_messages",
    "is_chat",
    "stop_strings",
    "token_list",
]
