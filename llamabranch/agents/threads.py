"""Functions and event loops in threads of their own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar, cast

from ..native import call_in_thread

__all__ = ["all_done", "iterated", "on_a_loop", "threaded"]

T = TypeVar("T")
_POLL_S = 0.1


async def threaded(call: Callable[[], T]) -> T:
    """Run a function in a thread of its own, with the caller's context variables, and await it.

    Unlike `asyncio.to_thread` nothing waits for the thread where the caller stops waiting: a function
    that hangs takes no thread from others, and does not keep the event loop from closing.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # the thread runs on where the caller stops waiting

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
    """Run all calls together and return what they return; if one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Running(Generic[T]):
    """A coroutine that ``run`` runs on an event loop of its own, with the maker's context variables."""

    def __init__(self, call: Callable[[], Coroutine[None, None, T]]) -> None:
        self._call, self._context = call, contextvars.copy_context()
        self._cancel: Callable[[], object] | None = None

    def run(self) -> T:
        """Run it, and return what it returns."""
        return self._context.run(asyncio.run, self._main())

    async def _main(self) -> T:
        task = cast("asyncio.Task[T]", asyncio.current_task())
        loop = asyncio.get_running_loop()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        return await self._call()

    def stop(self) -> None:
        """Cancel it, from any thread. Before it has begun, and a second time, this does nothing."""
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            with suppress(RuntimeError):  # it has ended
                cancel()


def on_a_loop(call: Callable[[], Coroutine[None, None, T]]) -> T:
    """Run a coroutine on an event loop in a thread of its own; Ctrl-C cancels it."""
    running = _Running(call)
    return call_in_thread(running.run, stop=running.stop)


def iterated(make: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
    """Yield what an asynchronous generator yields on an event loop in a thread of its own.

    Closing the iterator closes the generator.
    """
    ready: SimpleQueue[T | None] = SimpleQueue()
    errors: list[BaseException] = []

    async def pump() -> None:
        async with aclosing(make()) as items:
            async for item in items:
                ready.put(item)

    def run() -> None:
        try:
            running.run()
        except BaseException as error:
            errors.append(error)
        ready.put(None)

    running = _Running(pump)
    thread = threading.Thread(target=run, name="agent", daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = ready.get(timeout=_POLL_S)
            except Empty:
                continue
            if item is None:
                break
            yield item
        if errors:
            raise errors[0]
    finally:
        while thread.is_alive():
            running.stop()
            thread.join(_POLL_S)
