"""What a caller does: it asks for texts, lets steps run, and takes the events of its texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from threading import RLock

from ..errors import DecodeInterruptedError
from ..native.handle import forkable_lock
from ..native.interrupts import HeldInterrupts
from ..request.request import AnyRequest, as_request, identity
from ..request.result import Event
from .core import Core, core_of
from .job import Caller, Job


@dataclass(eq=False)
class Client(Caller):
    """Asks for texts of a context, and takes their events.

    Any thread may call ``queue``, ``abort``, ``pause`` and ``resume``. All other methods may be used by
    one thread at a time. The texts begin with the next ``step``. From then on they run in the steps
    of all callers.

    Args:
        drafting, stats, parallel, wait_s, sampling, max_tokens: as for `Caller`.

    Attributes:
        jobs: the requests with a result that was not taken yet, by id.
    """

    jobs: dict[str, Job] = field(init=False, default_factory=dict)
    # The next events that ``step`` returns.
    _told: list[Event] = field(init=False, default_factory=list)
    # Runs the jobs; None before the first step, which sends it everything in ``_unsent``.
    _core: Core | None = field(init=False, default=None)
    _unsent: deque[tuple[str, Job]] = field(init=False, default_factory=deque)
    _binding: RLock = field(init=False, default_factory=forkable_lock)

    # -- requests ------------------------------------------------------------------------------------

    def queue(self, job: Job) -> None:
        """Ask for the texts of a job of this caller. They begin with its next ``step``."""
        self._send("add", job)

    def submit(self, request: AnyRequest, seed: int) -> Job:
        """Ask for the texts of a request. They begin with the next step of any caller.

        Raises:
            ConfigError, TokenizeError, UnsupportedError: the request is invalid. Nothing is queued.
        """
        job = Job(as_request(request), identity(request, 0), self, seed)
        self.queue(job)
        self._bound()
        return job

    def refuse(self, event: Event) -> None:
        """Report, with the events of the next step, that a request could not be queued."""
        self._told.append(event)

    def abort(self, name: str) -> None:
        """End a request at the next step; its results have the text so far.

        A decode that reads its prompt is stopped. An unknown id is ignored.
        """
        job = self.jobs.get(name)
        if job is not None and not job.is_aborted:
            self._send("abort", job)

    def abort_all(self) -> None:
        """End all requests at the next step."""
        for name in list(self.jobs):
            self.abort(name)

    def pause(self, name: str) -> None:
        """Do not continue the texts of a request until ``resume``; others may take their cells."""
        job = self.jobs.get(name)
        if job is not None:
            job.is_paused = True

    def resume(self, name: str) -> None:
        """Continue the texts of a paused request."""
        job = self.jobs.get(name)
        if job is not None and job.is_paused:
            job.is_paused = False
            self._send("resume", job)

    def _send(self, what: str, job: Job) -> None:
        with self._binding:
            if what == "add":
                self.jobs[job.name] = job
            if self._core is None:
                self._unsent.append((what, job))
            else:
                self._core.send(what, job)

    @property
    def n_waiting(self) -> int:
        """How many requests have a text that has never had a sequence."""
        return sum(job.is_waiting for job in list(self.jobs.values()))

    @property
    def n_ahead(self) -> int:
        """The number of waiting requests, plus the number of events that are not taken yet."""
        return self.n_waiting + len(self.events) + len(self._told)

    @property
    def has_unfinished(self) -> bool:
        """True if a request has no result yet, or an event was not taken."""
        return bool(self.jobs or self.events or self.failure or self._told)

    @property
    def is_stalled(self) -> bool:
        """True if nothing can continue until a paused request is resumed or another one is added."""
        jobs = list(self.jobs.values())
        return not (self.events or self.failure or self._told) and all(
            job.is_paused and not job.is_aborted for job in jobs
        )

    # -- steps ---------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Run one step, or wait for another thread's step; return the events of this caller.

        Raises:
            DecodeError: the decode failed or was interrupted. The requests are as they were before the
                step, and the next call continues them.
        """
        if not (self.events or self._told) and self.failure is None:
            self._bound().advance(self)
        if not (self.events or self._told) and self.failure is not None:
            for rested in list(self.jobs.values()):
                self._send("resume", rested)
            self._raise_failure()
        with HeldInterrupts():
            while self.events:
                told = self._read(*self.events[0])
                # This is one line so that an interrupt between two lines cannot repeat an event.
                self._told += told if self.events.popleft() else ()
            for event in self._told:
                job = self.jobs.get(event.id)
                if job is not None and len(job.taken) == job.request.n:
                    self._forget(job)
        told = []
        try:  # if anything is raised here, the events are kept for the next step
            told, self._told = self._told, []
            return told
        except BaseException:
            self._told = told + self._told
            raise

    def _read(self, job: Job, event: Event) -> list[Event]:
        """Return an event as the caller gets it; nothing if its job was closed during the step."""
        return job.read(event) if self.jobs.get(job.name) is job else []

    def run(self, read_next: Callable[[], bool] = lambda: False) -> Generator[Event, None, None]:
        """Yield the events of all steps, until all requests have ended. Then all sequences are free.

        Args:
            read_next: queues the next request; returns False if no request is left. It is called
                while fewer requests wait than can run.

        Raises:
            UsageError: a running step called this function.
            DecodeInterruptedError: a decode was interrupted. The requests end with "cancelled"; their
                last events come before the exception.
        """
        most, more = max(2, self.drafting.ctx.n_seq_max), True
        self.check_free()
        try:
            while True:
                while more and self.n_ahead < most:
                    more = read_next()
                if not self.has_unfinished:
                    return
                try:
                    events = self.step()
                except DecodeInterruptedError:
                    self.abort_all()
                    yield from self.drain()
                    raise
                yield from events
        finally:
            self.close()

    def _bound(self) -> Core:
        """Return the core that runs its jobs, after sending it everything that was not sent yet."""
        with self._binding:
            if self._core is None:
                self._core = core_of(self.drafting.ctx)
            while self._unsent:
                self._core.send(*self._unsent[0])
                self._unsent.popleft()
            return self._core

    def _forget(self, job: Job) -> None:
        with self._binding:
            self.jobs.pop(job.name, None)
            if not self.jobs:
                self._core = None

    def drain(self) -> list[Event]:
        """Run steps until all requests have ended; return their events.

        If a step raises, no event is lost.

        Raises:
            DecodeError: a decode failed. After an interrupt there is no error: the decode is
                repeated.
        """
        events: list[Event] = []
        try:
            while self.has_unfinished:
                for name in list(self.jobs):
                    self.resume(name)
                with suppress(DecodeInterruptedError):
                    events += self.step()
            return events
        except BaseException:
            self._told = events + self._told
            raise

    def check_free(self) -> None:
        """Raise UsageError if a running step called this function."""
        core = self._core
        if core is not None:
            core.check_free()

    def close(self) -> None:
        """Free all sequences. Requests that have no result yet never get one.

        If a step is running, it frees them at its end.

        Raises:
            Exception: a drafter could not close a state.
        """
        with self._binding:
            core, jobs = self._core, list(self.jobs.values())
            self.jobs.clear()
            self._unsent.clear()
            self._core = self.failure = None
        if core is not None:
            for job in jobs:
                core.send("drop", job)
            core.tidy()
        self.events.clear()
        self._told.clear()
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
