"""Holds Ctrl-C back while a change is under way, so that it cannot come in the middle of one.

Python runs signal handlers in the main thread, between any two of its instructions, and what they raise
comes out there. Inside ``with HeldInterrupts():`` the handler of SIGINT still runs at once, whoever has
set it, but what it raises comes at the end of the block; a decode in ``ContextHandle.decode`` that
takes long is stopped at once.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal takes 20 times as long
import signal
import sys
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any

__all__ = ["HeldInterrupts", "in_main_thread", "is_interrupted"]

_PATIENCE_S = 1.0  # a Ctrl-C this long after the first one is not held: something takes too long


class HeldInterrupts:
    """A ``with`` block at whose end comes what the handler of SIGINT has raised in it.

    In another thread than the main one, and inside a block like it, it does nothing.

    Attributes:
        caught: what is held, in the outermost block; None so far.
        is_over: whether the block has ended.
    """

    def __init__(self) -> None:
        self.caught: BaseException | None = None
        self._caught_at = 0.0
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self.is_over = False

    def __enter__(self) -> HeldInterrupts:
        if in_main_thread():
            outer = _active()
            if outer is not None:
                return outer
            previous = _signal.getsignal(signal.SIGINT)
            if callable(previous):  # neither ignored nor the end of the process
                self._previous = previous
                _signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        previous = self._previous
        if previous is None:
            return
        if _active() is self:  # nobody has set another one meanwhile
            _signal.signal(signal.SIGINT, previous)
        self.is_over = True
        caught, self.caught = self.caught, None
        if caught is not None:
            try:
                raise caught
            finally:
                del caught  # it refers to this frame

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            if self._previous is not None:
                self._previous(number, frame)
        except BaseException as error:
            if self.is_over:  # somebody has set this handler again after the block
                raise
            if self.caught is None:
                self.caught, self._caught_at = error, monotonic()
            elif monotonic() - self._caught_at > _PATIENCE_S:
                raise


def is_interrupted() -> bool:
    """Return whether a ``HeldInterrupts`` of this thread holds something."""
    held = _active() if in_main_thread() else None
    return held is not None and held.caught is not None


def in_main_thread() -> bool:
    """Return whether this is the thread in which Python runs signal handlers."""
    # While the interpreter ends, generators may still be closed, but `threading` is cleared already.
    return not sys.is_finalizing() and threading.current_thread() is threading.main_thread()


def _active() -> HeldInterrupts | None:
    """Return the outermost block that the main thread is in."""
    held = getattr(_signal.getsignal(signal.SIGINT), "__self__", None)
    return held if isinstance(held, HeldInterrupts) and not held.is_over else None
