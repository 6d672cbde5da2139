"""A conversation over the engine: turns, retries, edits, forks and saves."""

from .chat import Answer, Chat, ChatStats
from .conversation import Exchange
from .saved import saved_model

__all__ = ["Answer", "Chat", "ChatStats", "Exchange", "saved_model"]
