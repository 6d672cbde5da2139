"""A conversation over the engine: turns, retries, edits, forks and saves."""

from .chat import Answer, Chat
from .conversation import Exchange
from .saved import saved_model

__all__ = ["Answer", "Chat", "Exchange", "saved_model"]
