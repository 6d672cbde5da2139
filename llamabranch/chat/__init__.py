"""Conversations in which only new tokens are evaluated."""

from .chat import Answer, Chat, ChatSettings, ChatStats
from .conversation import Exchange
from .saved import saved_model

__all__ = ["Answer", "Chat", "ChatSettings", "ChatStats", "Exchange", "saved_model"]
