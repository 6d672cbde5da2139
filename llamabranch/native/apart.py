"""Calls into llama.cpp that call back, made in a thread of their own.

Python raises what a signal's handler raises, KeyboardInterrupt above all, in the main thread, between
any two of its instructions there. Where that is a callback that C has called, ctypes prints the
exception and goes on without it: llama.cpp logs and reports progress all the time while it loads, so a
Ctrl-C would often be lost. In another thread callbacks raise nothing, and the main thread hears it.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

_LISTEN_S = 0.1  # how often to look for a signal that did not wake the waiting thread


def call_apart(
    call: Callable[[], None],
    *,
    messages: SimpleQueue[Any] | None = None,
    hear: Callable[[Any], None] | None = None,
    stop: Callable[[], None] | None = None,
) -> None:
    """Run ``call`` in another thread and wait for it; raise here what it raises.

    If this thread is interrupted, ``stop`` is called, then ``call`` is waited for, then the exception
    is raised. What ``call`` has made by then is the caller's to free.

    Args:
        call: what to run. It must not leave anything half done that nobody owns.
        messages: what ``call`` puts here is given to ``hear``, in this thread and in order.
        hear: takes a message; what it raises stops ``call`` as an interruption does.
        stop: asks ``call`` to end soon.
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
                message = queue.get(timeout=_LISTEN_S)
                if message is not None and hear is not None:
                    hear(message)

    try:
        try:
            _thread.start_new_thread(run, ())
        except RuntimeError:  # no thread is to be had, as when the interpreter ends
            run()
        wait()
    except BaseException:
        if stop is not None:
            stop()
        with gate:
            forbidden = not begun
        while begun and not ended:
            # One more Ctrl-C says nothing new; nobody may go on before llama.cpp has.
            with contextlib.suppress(BaseException):
                queue.get(timeout=_LISTEN_S)
        raise
    if errors:
        raise errors[0]
