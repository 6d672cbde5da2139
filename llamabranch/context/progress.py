"""The progress of a prompt: how many of its tokens have been processed."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple


class PromptProgress(NamedTuple):
    """The progress of a prompt.

    Attributes:
        n_read: its tokens that are in the cache, including those that were there before.
        n_cached: its tokens that were in the cache before.
        n_total: all of its tokens.
        seconds: time since the processing began.
    """

    n_read: int
    n_cached: int
    n_total: int
    seconds: float


OnPromptProgress = Callable[[PromptProgress], object]


class Reading:
    """A prompt whose processing has just begun.

    Args:
        n_cached: its tokens that are already in the cache.
        n_total: all of its tokens.
    """

    def __init__(self, n_cached: int, n_total: int) -> None:
        self._n_cached, self._n_total = n_cached, n_total
        self._begun = perf_counter()

    def progress(self, n_read: int) -> PromptProgress:
        """Return the progress when ``n_read`` tokens are in the cache."""
        seconds = perf_counter() - self._begun
        return PromptProgress(n_read, self._n_cached, self._n_total, seconds)
