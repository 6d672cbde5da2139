"""What a caller does: it asks for texts, lets steps run, and takes the events of its texts."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from ..errors import DecodeInterruptedError
from ..generation.draft_states import Beginning
from ..native import forkable_lock
from ..request.request import EngineStats, Event, Request
from ..sampling import SamplingParams
from .core import Core, core_of
from .drafting import Drafting
from .job import Caller, Job

__all__ = ["Client"]


class Client(Caller):
    """Asks for texts of a context, and takes their events.

    Any thread may call ``add``, ``abort``, ``pause`` and ``resume``. All other methods may be used by
    one thread at a time. The texts begin with the next ``step``. From then on they run in the steps
    of all callers.

    Args:
        drafting, stats, parallel, wait_s, sampling, max_tokens: as for `Caller`.

    Attributes:
        n_added: how many requests were added.
        jobs: the requests that have a result which was not taken yet, by their ids.
    """

    def __init__(
        self,
        drafting: Drafting,
        stats: EngineStats,
        parallel: int | None = None,
        wait_s: float = 0.0,
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(
            drafting, stats, parallel, wait_s, sampling=sampling, max_tokens=max_tokens
        )
        self.n_added = 0
        self.jobs: dict[str, Job] = {}
        self._core: Core | None = None  # runs the jobs; None before the first step
        self._unsent: deque[tuple[str, Job]] = deque()  # what it will tell the core
        self._binding = forkable_lock()

    # -- requests ------------------------------------------------------------------------------------

    def add(
        self,
        request: Request,
        name: str,
        seed: int,
        *,
        reports_tokens: bool = True,
        beginning: Beginning | None = None,
    ) -> Job:
        """Ask for the texts of a request; for the arguments see `Job`.

        Raises:
            ConfigError, TokenizeError: the prompt or the stop strings are invalid. Nothing is queued.
        """
        job = Job(request, name, self, seed, reports_tokens=reports_tokens, beginning=beginning)
        self.n_added += 1
        self._send("add", job)
        return job

    def refuse(self, event: Event) -> None:
        """Report, with the events of the next step, that a request could not be queued."""
        self.events.append(event)

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
        return self.n_waiting + len(self.events)

    @property
    def has_unfinished(self) -> bool:
        """True if a request has no result yet, or an event was not taken."""
        return bool(self.jobs or self.events or self.failure)

    @property
    def is_stalled(self) -> bool:
        """True if nothing can continue until a paused request is resumed or another one is added."""
        jobs = list(self.jobs.values())
        return not (self.events or self.failure) and all(
            job.is_paused and not job.is_aborted for job in jobs
        )

    # -- steps ---------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Run one step, or wait for one of another thread; return the events of this caller.

        Raises:
            DecodeError: the decode failed or was interrupted. The requests are as before the step,
                and the next call continues them.
        """
        if not self.events and self.failure is None:
            self._bound().advance(self)
        if not self.events and self.failure is not None:
            failure, self.failure = self.failure, None
            for job in list(self.jobs.values()):
                self._send("resume", job)
            raise failure
        events: list[Event] = []
        try:  # if anything is raised here, the events are kept for the next step
            while self.events:
                events.append(self.events.popleft())
            for event in events:
                if event.result is not None and (job := self.jobs.get(event.id)) is not None:
                    job.taken.add(event.sample)
                    if len(job.taken) == job.request.n:
                        self._forget(job)
            return events
        except BaseException:
            self.events.extendleft(reversed(events))
            raise

    def _bound(self) -> Core:
        """Return the core that runs its jobs, and tell it what it does not know yet."""
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
            self.events.extendleft(reversed(events))
            raise

    def check_free(self) -> None:
        """Raise UsageError if a step is running that has called this function."""
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
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
