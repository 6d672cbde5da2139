"""Ctrl-C: how it interrupts calls into llama.cpp, and how it is held back during changes.

Python runs signal handlers in the main thread, between two of its instructions, and their exceptions are
raised there. While that thread is inside llama.cpp this cannot happen, so long calls run in another
thread. If the main thread is inside a Python callback that C called, ctypes prints the KeyboardInterrupt
and drops it. llama.cpp calls its log and progress callbacks all the time while it loads, so a Ctrl-C
would often be lost. In another thread, callbacks get no KeyboardInterrupt; the waiting main thread gets
it.

Inside ``with HeldInterrupts():`` any SIGINT handler still runs at once, but its exception is raised at
the end of the block. Ctrl-C stops a long decode in ``ContextHandle.decode`` at once.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal takes 20 times as long
import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

from typing_extensions import ParamSpec

T = TypeVar("T")
_POLL_S = 0.1  # how often to look for a signal that did not wake the waiting thread
_PATIENCE_S = 1.0  # a second Ctrl-C after this time is raised at once: the block takes too long


class HeldInterrupts:
    """A ``with`` block that holds back exceptions of the SIGINT handler until its end.

    In threads other than the main one, and inside another such block, it does nothing.

    Attributes:
        caught: the exception that the outermost block holds back, or None.
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
            if callable(previous):  # a Python function, not SIG_IGN or SIG_DFL
                self._previous = previous
                _signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        previous = self._previous
        if previous is None:
            return
        if _active() is self:  # no other handler was set in the block
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
            if self.is_over:  # it was set again after the block
                raise
            if self.caught is None:
                self.caught, self._caught_at = error, monotonic()
            elif monotonic() - self._caught_at > _PATIENCE_S:
                raise


P = ParamSpec("P")


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate ``function`` to hold interrupts, so that they come before or after it, never inside."""

    @wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> T:
        with HeldInterrupts():
            return function(*args, **kwargs)

    return held


def is_interrupted() -> bool:
    """Return whether this thread has a ``HeldInterrupts`` that holds back an exception."""
    block = _active() if in_main_thread() else None
    return block is not None and block.caught is not None


def in_main_thread() -> bool:
    """Return whether this is the thread in which Python runs signal handlers."""
    # At exit, generators may still be closed when `threading` has already been cleared.
    return not sys.is_finalizing() and threading.current_thread() is threading.main_thread()


def _active() -> HeldInterrupts | None:
    """Return the outermost block that the main thread is in."""
    block = getattr(_signal.getsignal(signal.SIGINT), "__self__", None)
    return block if isinstance(block, HeldInterrupts) and not block.is_over else None


def call_in_thread(
    call: Callable[[], T],
    *,
    messages: SimpleQueue[Any] | None = None,
    on_message: Callable[[Any], None] | None = None,
    stop: Callable[[], None] = lambda: None,
    is_to_stop: Callable[[], bool] = lambda: False,
) -> T:
    """Run ``call`` in another thread and wait for it; return its result or raise its exception.

    If the waiting thread is interrupted, it calls ``stop``, waits until ``call`` has returned, and then
    raises the exception. The caller must free what ``call`` had created by then.

    Args:
        call: the function to run.
        messages: ``call`` puts messages here; the waiting thread passes each to ``on_message``, in
            order.
        on_message: called with each message; an exception in it stops ``call`` as an interruption does.
        stop: asks ``call`` to return soon.
        is_to_stop: polled while waiting; True stops ``call`` too.
    """
    queue: SimpleQueue[Any] = SimpleQueue() if messages is None else messages
    results: list[T] = []
    errors: list[BaseException] = []
    claim = threading.Lock()  # taken by the call when it begins, or by an interruption before that

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
            # Ignore further Ctrl-C, because nothing may continue before llama.cpp has returned.
            with contextlib.suppress(BaseException):
                stop()
                queue.get(timeout=_POLL_S)
        raise
    if errors:
        raise errors[0]
    return results[0]
