"""The progress of a prompt: how many of its tokens have been processed."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from ..arguments import function


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
    """A prompt whose processing begins now.

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


def reading(report: OnPromptProgress, n_cached: int, n: int) -> Callable[[int], None]:
    """Report that ``n`` tokens will be processed after ``n_cached``; return a function for each decode.

    That function takes how many of the ``n`` tokens are decoded so far.

    Raises:
        ConfigError: ``report`` is not a function. Errors of ``report`` are raised too.
    """
    function("on_prompt_progress", report)
    this = Reading(n_cached, n_cached + n)
    report(this.progress(n_cached))

    def after(n_decoded: int) -> None:
        report(this.progress(n_cached + n_decoded))

    return after
