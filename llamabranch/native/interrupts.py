"""Ctrl-C: while a call into llama.cpp lasts, and held back while a change is under way.

Python runs signal handlers in the main thread, between any two of its instructions, and what they raise
comes out there: never while that thread is inside llama.cpp, so long calls run in a thread of their own.
If the main thread is just then inside a Python callback that C has called, ctypes prints the
KeyboardInterrupt and drops it. llama.cpp calls its log and progress callbacks all the time while it
loads, so a Ctrl-C would often be lost. In another thread callbacks get no KeyboardInterrupt, and the
waiting main thread does.

Inside ``with HeldInterrupts():`` the handler of SIGINT still runs at once, whoever has set it, but what
it raises comes at the end of the block; a decode in ``ContextHandle.decode`` that takes long is stopped
at once.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal takes 20 times as long
import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_POLL_S = 0.1  # how often to look for a signal that did not wake the waiting thread

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


def call_in_thread(
    call: Callable[[], T],
    *,
    messages: SimpleQueue[Any] | None = None,
    on_message: Callable[[Any], None] | None = None,
    stop: Callable[[], None] = lambda: None,
    is_to_stop: Callable[[], bool] = lambda: False,
) -> T:
    """Run ``call`` in another thread, wait for it, and return, or raise, what it does.

    If the waiting thread is interrupted, it calls ``stop``, waits until ``call`` has returned, and then
    raises the exception. The caller frees what ``call`` has created by then.

    Args:
        call: the function to run.
        messages: ``call`` puts messages here; each is passed to ``on_message``, in the waiting thread and
            in order.
        on_message: receives a message; an exception in it stops ``call`` as an interruption does.
        stop: asks ``call`` to return soon.
        is_to_stop: whether something that interrupts nothing asks for that; looked at while it waits.
    """
    queue: SimpleQueue[Any] = SimpleQueue() if messages is None else messages
    results: list[T] = []
    errors: list[BaseException] = []
    claim = threading.Lock()  # of the call, or of the interruption that comes before it has begun

    def run() -> None:
        if claim.acquire(blocking=False):
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)
            queue.put(None)  # wakes the waiting thread

    try:
        try:
            _thread.start_new_thread(run, ())
        except RuntimeError:  # no thread can be started, for example while the interpreter exits
            run()
        while not (results or errors) or not queue.empty():
            if is_to_stop():
                stop()
            with contextlib.suppress(Empty):
                message = queue.get(timeout=_POLL_S)
                if message is not None and on_message is not None:
                    on_message(message)
    except BaseException:
        while not (results or errors or claim.acquire(blocking=False)):
            # Ignore further Ctrl-C: nothing may continue before llama.cpp has returned.
            with contextlib.suppress(BaseException):
                stop()
                queue.get(timeout=_POLL_S)
        raise
    if errors:
        raise errors[0]
    return results[0]
