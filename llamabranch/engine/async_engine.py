"""The engine on a thread of its own, for programs with an event loop.

At the end of a step the thread makes one call into each event loop, with all new events of that
loop's requests. A thread switch for each token would take longer than the token itself. If the
events of a request are not read, the request is paused when its buffer is full. Other requests may
then take its cells, and never wait for it.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Literal, TypeAlias, overload

from typing_extensions import TypeVar, Unpack

from ..arguments import whole
from ..errors import ClosedError, ConfigError, in_thread
from ..model import Prompt
from ..request.request import AnyRequest, ChatOptions, TextOptions
from ..request.result import Event, Result
from ..run.job import Job
from ..sampling import SamplingParams
from ..speculative import SpeculativeConfig
from ..speculative.combined import DrafterChoice
from .completion import Call, Conversations, Messages, Prompts
from .engine import Engine, Target

T = TypeVar("T", default=object)
_On: TypeAlias = Literal[True]
_Off: TypeAlias = Literal[False]
_Chats = Messages | Conversations
_Answer = Coroutine[None, None, Result | list[Result]] | AsyncGenerator[Event, None]


class AsyncEngine:
    """An :class:`Engine` on a thread of its own: ``async for event in engine.generate(request)``.

    Any number of tasks, in one event loop or several, may call ``generate`` at the same time; their
    requests share decodes. Like ``Context.complete``, the engine turns the prefix cache on, unless
    the context was opened with ``prefix_cache=False``.

    Args:
        target, drafter, config, sampling, max_tokens: as for ``Engine``.
        seed, wait_s, max_waiting, parallel: as for ``Engine``.
        buffer: how many events of a request may be unread before it is paused.

    Raises:
        ConfigError: as for ``Engine``.

    Attributes:
        engine: the engine; do not call its ``step``.
        stats: totals over all requests so far.
    """

    def __init__(
        self,
        target: Target,
        drafter: DrafterChoice = "auto",
        config: SpeculativeConfig | None = None,
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = 128,
        seed: int | None = None,
        wait_s: float = 2.0,
        max_waiting: int | None = None,
        parallel: int | None = None,
        buffer: int = 256,
    ) -> None:
        self._buffer = whole("buffer", buffer, 1)
        self.engine = Engine(
            target,
            drafter,
            config,
            sampling=sampling,
            max_tokens=max_tokens,
            seed=seed,
            wait_s=wait_s,
            max_waiting=max_waiting,
            parallel=parallel,
        )
        try:
            self.engine.target.keep_prefixes()
        except BaseException:
            self.engine.close()  # also closes a context that it opened
            raise
        self.stats = self.engine.stats
        self._readers: dict[str, _Reader] = {}
        self._wake = threading.Condition()
        self._resumed: deque[str] = deque()
        self._has_news = False  # whether the thread has something new to do
        self._ends: str | None = None  # "drain" or "abort" once it is closed
        self._is_over = False  # whether the thread runs no more steps
        self._thread = threading.Thread(
            target=in_thread(self._serve),
            args=(weakref.ref(self), self._wake),
            name="AsyncEngine",
            daemon=True,
        )
        self.engine.target.release_threads()
        self._thread.start()

    async def generate(self, request: AnyRequest) -> AsyncIterator[Event]:
        """Yield the events of a request: each token, and the result of each of its texts.

        If the task is cancelled or the iterator is closed, the request is aborted. Its sequences
        are free after the current step.

        Raises:
            ConfigError, TokenizeError, QueueFullError, ClosedError: see ``Engine.add_request``.
            DecodeError: the decode failed; all unfinished requests get this error.
        """
        async with aclosing(self.steps(request)) as steps:
            async for events in steps:
                for event in events:
                    yield event

    def steps(
        self, *requests: AnyRequest | Job, reports_tokens: bool = True
    ) -> AsyncGenerator[list[Event], None]:
        """Yield the events of one or more requests, each time a list of all new events.

        A list holds the events of one step, or of several steps if the task did not read in
        between. So all tokens of a draft need only one thread switch.

        Args:
            requests: one or several, also prepared ones. If one is refused, none is added.
            reports_tokens: as for ``Engine.add_request``.

        Raises:
            Exception: see ``generate``.
        """
        return self._steps(requests, reports_tokens=reports_tokens)

    async def _steps(
        self, requests: Sequence[AnyRequest | Job], *, reports_tokens: bool
    ) -> AsyncGenerator[list[Event], None]:
        self._check_open()
        jobs = [self.engine.prepare(each, reports_tokens=reports_tokens) for each in requests]
        reader = _Reader(jobs, self._buffer)
        try:
            with self._wake:  # the reader must be registered before a step can end
                self._check_open()
                self.engine.queue(*jobs)
                self._readers |= dict.fromkeys(reader.names, reader)
                self._tell()
            while reader.n_expected:
                events = await reader.read()
                reader.n_expected -= sum(event.result is not None for event in events)
                yield events
                reader.n_read += len(events)
                if reader.is_paused:
                    reader.is_paused = False
                    with self._wake:
                        self._resumed += reader.names
                        self._tell()
        finally:
            with self._wake:
                self._leave(reader)

    def _check_open(self) -> None:
        if self._ends is not None or self._is_over:
            raise ClosedError("the engine is closed")

    # -- texts in one call -----------------------------------------------------------------------------

    @overload
    def complete(
        self, prompt: Prompts, *, stream: _Off = False, **options: Unpack[TextOptions[T]]
    ) -> Coroutine[None, None, list[Result[T]]]: ...
    @overload
    def complete(
        self, prompt: Prompt, *, stream: _Off = False, **options: Unpack[TextOptions[T]]
    ) -> Coroutine[None, None, Result[T]]: ...
    @overload
    def complete(
        self, prompt: Prompt | Prompts, *, stream: _On, **options: Unpack[TextOptions]
    ) -> AsyncGenerator[Event, None]: ...
    @overload
    def complete(
        self, prompt: Prompt | Prompts, *, stream: bool, **options: Unpack[TextOptions]
    ) -> _Answer: ...
    def complete(
        self, prompt: Prompt | Prompts, *, stream: bool = False, **options: Unpack[TextOptions]
    ) -> Coroutine[None, None, Result | Sequence[Result]] | AsyncGenerator[Event, None]:
        """Continue prompts as ``Context.complete`` does: ``(await engine.complete("The king")).text``.

        With ``stream=True``: ``async for event in engine.complete(prompt, stream=True)``. The
        engine's drafter is used, and the engine's value of each setting that you leave out.

        Raises:
            LlamaBranchError: see ``Context.complete`` and ``generate``. Bad arguments raise when
                the call is awaited; with ``stream=True`` they raise at once.
        """
        make = partial(self._call, prompt, options, chats=False)
        return self._stream(make()) if stream else self._answer(make)

    @overload
    def chat(
        self, messages: Conversations, *, stream: _Off = False, **options: Unpack[ChatOptions[T]]
    ) -> Coroutine[None, None, list[Result[T]]]: ...
    @overload
    def chat(
        self, messages: Messages, *, stream: _Off = False, **options: Unpack[ChatOptions[T]]
    ) -> Coroutine[None, None, Result[T]]: ...
    @overload
    def chat(
        self, messages: _Chats, *, stream: _On, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[Event, None]: ...
    @overload
    def chat(
        self, messages: _Chats, *, stream: bool, **options: Unpack[ChatOptions]
    ) -> _Answer: ...
    def chat(
        self, messages: _Chats, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> Coroutine[None, None, Result | Sequence[Result]] | AsyncGenerator[Event, None]:
        """Answer conversations as ``Context.chat`` does; see ``complete``.

        Raises:
            LlamaBranchError: see ``complete`` and ``Context.chat``.
        """
        make = partial(self._call, messages, options, chats=True)
        return self._stream(make()) if stream else self._answer(make)

    def _call(self, prompt: object, options: Mapping[str, object], *, chats: bool) -> Call:
        call = Call(self.engine.target, prompt, self.engine.sampling, options, chats=chats)
        if call.drafter != "auto":
            raise ConfigError("a call uses the drafter of its engine: AsyncEngine(ctx, drafter)")
        call.prepare(lambda _, request: self.engine.prepare(request))
        return call

    async def _answer(self, make: Callable[[], Call]) -> Result | list[Result]:
        call = await asyncio.to_thread(make)
        async with aclosing(self._stream(call)) as events:
            async for _ in events:
                pass
        return call.answer()

    async def _stream(self, call: Call) -> AsyncGenerator[Event, None]:
        """Yield the events of all prompts, as they come."""
        numbers = {job.name: number for number, job in enumerate(call.jobs)}
        async with aclosing(self.steps(*call.jobs)) as steps:
            async for events in steps:
                for event in events:
                    number = numbers[event.id]
                    call.note(number, event)
                    yield replace(event, id=str(number))
        call.check()

    def abort(self, request_id: str) -> None:
        """End a request at its next step; its result has the text so far."""
        with self._wake:
            self.engine.abort(request_id)
            self._resumed.append(request_id)
            self._tell()

    async def close(self, *, drain: bool = False) -> None:
        """Accept no more requests and end the thread.

        Args:
            drain: finish the requests first; their readers get the remaining events. Otherwise the
                requests end with "cancelled".
        """
        self.shut_down(drain=drain, wait=False)
        await asyncio.to_thread(self._thread.join)

    def shut_down(self, *, drain: bool = False, wait: bool = True) -> None:
        """Do what ``close`` does, without an event loop.

        With ``wait``, return only after the thread has ended.
        """
        with self._wake:
            if self._ends is None or not drain:
                self._ends = "drain" if drain else "abort"
            self._resumed += self._readers  # from now on nothing is paused
            self._tell()
        if wait:
            self._thread.join()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _leave(self, reader: _Reader) -> None:
        """Abort the requests of a reader that is gone. The caller must hold ``_wake``."""
        for name in reader.names:
            if self._readers.get(name) is reader:
                del self._readers[name]
                self.engine.abort(name)
                self._tell()

    def _tell(self) -> None:
        self._has_news = True
        self._wake.notify()

    # -- the thread ----------------------------------------------------------------------------------

    @staticmethod
    def _serve(ref: weakref.ref[AsyncEngine], wake: threading.Condition) -> None:
        """Run steps until the engine is closed, or no longer referenced."""
        try:
            while True:
                engine = ref()
                if engine is None or not engine._turn():
                    return
                with wake:
                    while engine is not None and engine._must_wait():
                        del engine
                        wake.wait(1.0)
                        engine = ref()
                del engine
        finally:
            if (engine := ref()) is not None:
                engine._end()

    def _turn(self) -> bool:
        """Run one step and transfer its events; return False once everything has ended."""
        engine = self.engine
        with self._wake:
            self._has_news = False
            while self._resumed:
                engine.client.resume(self._resumed.popleft())
            ends = self._ends
            if ends == "abort":
                engine.client.abort_all()
        failure: BaseException | None = None
        events: list[Event] = []
        if engine.has_unfinished():
            try:
                events = engine.step()
            except BaseException as error:  # a user's drafter may raise anything
                failure = error
        elif ends is not None:
            engine.close()
            return False
        self._transfer(events, failure)
        return failure is None or not engine.target.closed

    def _end(self) -> None:
        """Refuse new requests; those that came after the last step get an error."""
        with self._wake:
            self._is_over = True
        self._transfer([], ClosedError("the engine is closed"))

    def _transfer(self, events: list[Event], failure: BaseException | None) -> None:
        batches: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
        by_name: dict[str, list[Event]] = {}
        for event in events:
            by_name.setdefault(event.id, []).append(event)
        with self._wake:
            for name, its in by_name.items():
                reader = self._readers.get(name)
                if reader is None:
                    continue
                if reader.send(its) and self._ends is None:
                    for each in reader.names:
                        self.engine.client.pause(each)
                if not reader.n_running:
                    for each in reader.names:
                        del self._readers[each]
                batches.setdefault(reader.loop, []).append((reader, its, None))
            if failure is not None:
                for name, reader in self._readers.items():
                    self.engine.abort(name)
                    batches.setdefault(reader.loop, []).append((reader, [], failure))
                self._readers.clear()
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop is closed: nobody will read these events
                with self._wake:
                    for reader, _, _ in batch:
                        self._leave(reader)

    def _must_wait(self) -> bool:
        """Return whether the thread has nothing to do. The caller must hold ``_wake``."""
        engine = self.engine
        idle = engine.client.is_stalled if engine.has_unfinished() else self._ends is None
        return idle and not self._has_news


class _Reader:
    """Carries the events of one ``steps`` call from the engine's thread to the task that reads.

    Args:
        jobs: the requests.
        buffer: how many events of a request may be unread before the requests are paused.

    Attributes:
        loop: the event loop of the task.
        n_running: how many texts are unfinished, as counted by the thread.
        n_expected, n_read: how many results the task still expects, and how many events it has read.
        is_paused: whether the requests are paused, because too many events were unread.
        names: the ids of the requests.
    """

    def __init__(self, jobs: Sequence[Job], buffer: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.n_running = self.n_expected = sum(job.request.n for job in jobs)
        self.is_paused = False
        self.names = [job.name for job in jobs]
        self._limit = buffer * len(jobs)
        self._n_sent = 0  # counted by the thread
        self.n_read = 0  # counted by the task
        self._ready: list[Event] = []
        self._failure: BaseException | None = None  # for the task, after the ready events
        self._news = asyncio.Event()

    def send(self, events: list[Event]) -> bool:
        """Count events that the thread transfers; return True if the requests must be paused."""
        self._n_sent += len(events)
        self.n_running -= sum(event.result is not None for event in events)
        if self._n_sent - self.n_read < self._limit or self.is_paused:
            return False
        self.is_paused = True
        return True

    def deliver(self, events: list[Event], failure: BaseException | None) -> None:
        """Hand events to the task, or the error that ends them; called in its event loop."""
        self._ready += events
        if failure is not None:
            self._failure = failure
        self._news.set()

    async def read(self) -> list[Event]:
        """Wait for events and return them.

        Raises:
            Exception: the error that ended all requests.
        """
        await self._news.wait()
        events, self._ready = self._ready, []
        if self._failure is None:
            self._news.clear()
        elif not events:
            raise self._failure
        return events


# New events of a reader, or the error that it gets after its last event.
_Delivery: TypeAlias = tuple[_Reader, list[Event], BaseException | None]


def _deliver(batch: list[_Delivery]) -> None:
    for reader, events, failure in batch:
        reader.deliver(events, failure)
