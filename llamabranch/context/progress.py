"""How much of a prompt is read: one record, whoever reads it and whoever looks."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from ..arguments import function

__all__ = ["OnPromptProgress", "PromptProgress", "Reading", "reading"]


class PromptProgress(NamedTuple):
    """How much of a prompt is read.

    Attributes:
        n_read: its tokens that are in the cache, those that were there before included.
        n_cached: its tokens that were in the cache before.
        n_total: all of its tokens.
        seconds: how long it has been read.
    """

    n_read: int
    n_cached: int
    n_total: int
    seconds: float


OnPromptProgress = Callable[[PromptProgress], object]


class Reading:
    """A prompt that is being read from now on.

    Args:
        n_cached: its tokens that are in the cache already.
        n_total: all of its tokens.
    """

    def __init__(self, n_cached: int, n_total: int) -> None:
        self._n_cached, self._n_total = n_cached, n_total
        self._begun = perf_counter()

    def progress(self, n_read: int) -> PromptProgress:
        """Return how much is read now: ``n_read`` tokens are in the cache."""
        seconds = perf_counter() - self._begun
        return PromptProgress(n_read, self._n_cached, self._n_total, seconds)


def reading(report: OnPromptProgress | None, n_cached: int, n: int) -> Callable[[int], None] | None:
    """Report that ``n`` tokens are to be read after ``n_cached``; return what reports each decode.

    None if nobody looks. What is returned takes how many of the ``n`` tokens are decoded so far.

    Raises:
        ConfigError: ``report`` is no function. And what it raises.
    """
    if report is None:
        return None
    function("on_prompt_progress", report)
    this = Reading(n_cached, n_cached + n)
    report(this.progress(n_cached))

    def after(n_decoded: int) -> None:
        report(this.progress(n_cached + n_decoded))

    return after
