"""Runs a call into llama.cpp in a thread of its own, so that Ctrl-C works while it lasts.

Python runs signal handlers in the main thread, between two of its instructions: never while that thread
is inside llama.cpp. If it is just then inside a Python callback that C has called, ctypes prints the
KeyboardInterrupt and drops it. llama.cpp calls its log and progress callbacks all the time while it
loads, so a Ctrl-C would often be lost. In another thread callbacks get no KeyboardInterrupt, and the
waiting main thread does.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_POLL_S = 0.1  # how often to look for a signal that did not wake the waiting thread


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
        stop()
        while not (results or errors or claim.acquire(blocking=False)):
            # Ignore further Ctrl-C: nothing may continue before llama.cpp has returned.
            with contextlib.suppress(BaseException):
                queue.get(timeout=_POLL_S)
        raise
    if errors:
        raise errors[0]
    return results[0]
