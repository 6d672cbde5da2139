"""Functions and event loops in threads of their own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import TypeVar

from ..errors import ClosedError, in_thread

T = TypeVar("T")
_POLL_S = 0.1
_CANCELLED = "a function has cancelled the tasks of its event loop"


async def threaded(call: Callable[[], T]) -> T:
    """Run a function in a thread of its own, with the caller's context variables, and await it.

    Unlike with `asyncio.to_thread`, nothing waits for the thread once the caller has stopped waiting. So
    a function that hangs takes no thread from others, and the event loop can close.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # the caller can stop waiting; the thread runs on

    def run() -> None:
        try:
            future.set_result(call())
        except (StopIteration, asyncio.CancelledError, KeyboardInterrupt) as error:
            # No asyncio future takes the first two, and Ctrl-C is for the main thread.
            raised = RuntimeError(f"{type(error).__name__} was raised")
            raised.__cause__ = error
            future.set_exception(raised)
        except BaseException as error:
            future.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="agent tool", daemon=True).start()
    return await asyncio.wrap_future(future)


async def all_done(calls: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Run all calls together and return their results; if one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def event_loop() -> Iterator[Callable[[Coroutine[None, None, T]], T]]:
    """Run an event loop in a thread of its own; yield a function that awaits a coroutine there.

    At the end, and on Ctrl-C, everything that still runs on the loop is cancelled.

    Raises:
        ClosedError: raised by the function if the coroutine was cancelled from inside.
    """
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        ended = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), ended))
        try:
            await ended.wait()
        finally:
            ended.set()

    def call(coroutine: Coroutine[None, None, T]) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise ClosedError(_CANCELLED) from None
        while not future.done() and thread.is_alive():
            wait([future], timeout=_POLL_S)  # short, so that Ctrl-C is noticed on all systems
        # A loop that ends closes its generators, so one that looks exhausted was cancelled.
        if not future.done() or future.cancelled() or ended.is_set():
            raise ClosedError(_CANCELLED)
        return future.result()

    def serve() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # for example, a function cancelled all tasks of its loop
            if not started.done():
                started.set_exception(error)

    thread = threading.Thread(target=in_thread(serve), name="agent", daemon=True)
    thread.start()
    loop, ended = started.result()
    try:
        yield call
    finally:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)
        while thread.is_alive():
            thread.join(_POLL_S)
