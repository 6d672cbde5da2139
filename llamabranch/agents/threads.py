"""Functions and event loops in threads of their own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, suppress
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

from ..native import call_in_thread

__all__ = ["all_done", "iterated", "on_a_loop", "threaded"]

T = TypeVar("T")
_POLL_S = 0.1


async def threaded(call: Callable[[], T]) -> T:
    """Run a function in a thread of its own, with the caller's context variables, and await it.

    Unlike `asyncio.to_thread` nothing waits for the thread where the caller stops waiting: a function
    that hangs takes no thread from others, and does not keep the event loop from closing.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(setter: Callable[[asyncio.Future[T]], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(lambda: None if future.done() else setter(future))

    def run() -> None:
        try:
            value = call()
        except BaseException as error:
            caught = error
            if isinstance(error, (StopIteration, asyncio.CancelledError, KeyboardInterrupt)):
                # No future takes the first two, and Ctrl-C is for the main thread.
                caught = RuntimeError(f"{type(error).__name__} was raised")
                caught.__cause__ = error
            tell(lambda waiting: waiting.set_exception(caught))
        else:
            tell(lambda waiting: waiting.set_result(value))

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="agent tool", daemon=True).start()
    return await future


async def all_done(calls: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Run all calls together and return what they return; if one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def on_a_loop(call: Callable[[], Coroutine[None, None, T]]) -> T:
    """Run a coroutine on an event loop in a thread of its own; Ctrl-C cancels it."""
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[object]]] = []

    async def main() -> T:
        task = cast("asyncio.Task[object]", asyncio.current_task())
        running.append((asyncio.get_running_loop(), task))
        return await call()

    def stop() -> None:
        if running:
            loop, task = running.pop()
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(task.cancel)

    context = contextvars.copy_context()
    return call_in_thread(lambda: context.run(lambda: asyncio.run(main())), stop=stop)


def iterated(make: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
    """Yield what an asynchronous generator yields on an event loop in a thread of its own.

    Closing the iterator closes the generator.
    """
    ready: SimpleQueue[T | None] = SimpleQueue()
    ended = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[object]]] = []
    errors: list[BaseException] = []

    async def main() -> None:
        task = cast("asyncio.Task[object]", asyncio.current_task())
        running.append((asyncio.get_running_loop(), task))
        async with aclosing(make()) as items:
            async for item in items:
                ready.put(item)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            errors.append(error)
        ended.set()
        ready.put(None)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), name="agent", daemon=True)
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
        while not ended.wait(_POLL_S if running else 0.001):
            if running:
                loop, task = running.pop()
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(task.cancel)
        thread.join()
