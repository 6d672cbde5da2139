"""Runs a call into llama.cpp in a thread of its own, so that Ctrl-C works while it lasts.

Python runs signal handlers in the main thread, between two of its instructions. If the main thread is
just then inside a Python callback that C has called, ctypes prints the KeyboardInterrupt and drops it.
llama.cpp calls its log and progress callbacks all the time while it loads, so a Ctrl-C would often be
lost. In another thread callbacks get no KeyboardInterrupt, and the waiting main thread does.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

_POLL_S = 0.1  # how often to look for a signal that did not wake the waiting thread


def call_in_thread(
    call: Callable[[], None],
    *,
    messages: SimpleQueue[Any] | None = None,
    on_message: Callable[[Any], None] | None = None,
    stop: Callable[[], None] | None = None,
) -> None:
    """Run ``call`` in another thread, wait for it, and raise here what it raises.

    If the waiting thread is interrupted, it calls ``stop``, waits until ``call`` has returned, and then
    raises the exception. The caller frees what ``call`` has created by then.

    Args:
        call: the function to run.
        messages: ``call`` puts messages here; each is passed to ``on_message``, in the waiting thread and
            in order.
        on_message: receives a message; an exception in it stops ``call`` as an interruption does.
        stop: asks ``call`` to return soon.
    """
    queue: SimpleQueue[Any] = SimpleQueue() if messages is None else messages
    errors: list[BaseException] = []
    begun: list[bool] = []
    ended: list[bool] = []
    gate = threading.Lock()
    forbidden = False

    def run() -> None:
        with gate:
            if forbidden:
                return
            begun.append(True)
        try:
            call()
        except BaseException as error:
            errors.append(error)
        finally:
            ended.append(True)
            queue.put(None)  # wakes the waiting thread

    def wait() -> None:
        while not ended or not queue.empty():
            with contextlib.suppress(Empty):
                message = queue.get(timeout=_POLL_S)
                if message is not None and on_message is not None:
                    on_message(message)

    try:
        try:
            _thread.start_new_thread(run, ())
        except RuntimeError:  # no thread can be started, for example while the interpreter exits
            run()
        wait()
    except BaseException:
        if stop is not None:
            stop()
        with gate:
            forbidden = not begun
        while begun and not ended:
            # Ignore further Ctrl-C: nothing may continue before llama.cpp has returned.
            with contextlib.suppress(BaseException):
                queue.get(timeout=_POLL_S)
        raise
    if errors:
        raise errors[0]
