"""Runs the steps of all jobs, for an engine or a search, and collects their events."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from threading import get_ident
from time import perf_counter, sleep

from ..errors import (
    CacheFullError,
    CapacityError,
    ConstraintError,
    DecodeError,
    DecodeInterruptedError,
    LlamaBranchError,
    UsageError,
)
from ..generation.output import Produced
from ..native.handle import is_held
from ..native.interrupts import HeldInterrupts
from ..request.request import EngineStats, Event, Request
from ..sampling import SamplingParams
from ..sampling.params import settings_of
from .job import Job, State, Submission
from .loop import Loop, Step
from .running import RunningText
from .scheduler import Scheduler

__all__ = ["EngineCore"]

_POLL_S = 0.02  # how often to check whether others have freed a sequence or cells
_numbers = count()  # of all cores: of two that wait for cells, the newer one frees its own


def _is_in_a_step() -> bool:
    """Return whether the caller runs inside a step of an engine, in this thread.

    An exception may end a step at any line, before its end can be recorded.
    """
    frame = sys._getframe(2).f_back  # above the call that checks
    while frame is not None:
        if frame.f_code is EngineCore.advance.__code__:
            return True
        frame = frame.f_back
    return False


class EngineCore:
    """Runs requests whose texts share decodes: all of one call, or all added to an engine.

    Any thread may call ``add`` and ``abort`` at any time. All other methods may be used by one
    thread at a time.

    Args:
        loop: runs all texts; its ``ctx`` is the context that generates.
        stats: the totals, which the core updates.
        parallel: the most texts at a time; None = as many as there are sequences.
        wait_s: how long to wait, in seconds, while other users of the context, such as branches,
            hold all sequences, or while other engines hold the cells that a text needs.
        sampling: the settings for requests that have none.
        max_tokens: the limit for requests without one.

    Attributes:
        ctx: the context that generates.
        scheduler: decides which texts hold a sequence.
        n_added: how many requests were added.
        n_decoded: how many tokens its steps have decoded.
    """

    def __init__(
        self,
        loop: Loop,
        stats: EngineStats,
        parallel: int | None = None,
        wait_s: float = 0.0,
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.n_added = self.n_decoded = 0
        self._sampling, self._max_tokens = settings_of(sampling), max_tokens
        self.ctx = loop.ctx
        self._loop = loop
        self._stats = stats
        self.scheduler = Scheduler(loop.ctx, parallel, stats)
        self._wait_s = wait_s
        self._number = next(_numbers)
        weakref.finalize(self, loop.ctx.working.pop, self._number, None).atexit = False
        self._no_room: CacheFullError | None = None  # why the only text of this core must wait
        self._has_others = False  # whether other cores worked before the last decode
        self._n_idle = 0  # polls for a free sequence since the last decode on the context
        self._n_decodes = -1  # decodes on the context at the last poll
        self._added: deque[Submission] = deque()
        self._aborted: deque[Submission] = deque()
        self._events: list[Event] = []  # still to be returned
        self._failure: LlamaBranchError | None = None  # raised once those events are returned
        self._is_stepping = False
        self._is_interrupted = False  # True in a step, and after one that an exception ended
        self._seen: set[object] = set()  # where the jobs were after each step since the last decode
        # The jobs whose prompt the running decode reads, its thread, and whether ``abort`` stops it.
        self._stopping = threading.Lock()
        self._reading: Sequence[Job] = ()
        self._thread = 0
        self._has_stopped = False

    # -- requests ------------------------------------------------------------------------------------

    def add(self, request: Request, name: str, seed: int, *, reports_tokens: bool = True) -> None:
        """Queue the texts of a request.

        Args:
            request, name: the request and its id.
            seed: the seeds of the texts are derived from it, unless the request has one.
            reports_tokens: whether there are events for tokens.

        Raises:
            ConfigError, TokenizeError: the prompt or the stop strings are invalid. Nothing is queued.
        """
        submission = Submission(
            request, name, self.n_added, self._loop, self._sampling, self._max_tokens, seed,
            range(request.n), reports_tokens=reports_tokens,
        )  # fmt: skip
        self.n_added += 1
        self._added.append(submission)

    def refuse(self, event: Event) -> None:
        """Report, with the events of the next step, that a request could not be queued."""
        self._events.append(event)

    def abort(self, name: str) -> None:
        """End a request at the next step; its results have the text so far.

        A decode that reads its prompt can take seconds, so such a decode is stopped. The stopped
        step changes nothing, and the other texts repeat it. An unknown id is ignored.
        """
        submission = self._find(name)  # also if it has just been added
        if submission is not None and not submission.is_aborted:
            self._aborted.append(submission)
            submission.is_aborted = True
            with self._stopping:
                if any(job in self._reading for job in list(submission.jobs.values())):
                    self._stop()

    def abort_all(self) -> None:
        """End all requests at the next step."""
        self._aborted.extend(self.scheduler.unfinished() + list(self._added))

    def __contains__(self, name: str) -> bool:
        """Return whether a request of this id is unfinished."""
        return self._find(name) is not None

    def _find(self, name: str) -> Submission | None:
        """Return the unfinished request of this id."""
        waiting = next((s for s in list(self._added) if s.name == name), None)
        return waiting or self.scheduler.find(name)

    @property
    def n_waiting(self) -> int:
        """How many requests have a text that has never had a sequence."""
        return len(self._added) + self.scheduler.n_waiting

    @property
    def n_ahead(self) -> int:
        """The number of waiting requests, plus the number of events that are not returned yet."""
        return self.n_waiting + len(self._events)

    @property
    def has_unfinished(self) -> bool:
        """True if a request has no result yet, or an event has not been returned."""
        return bool(self._added or self._events or self._failure or not self.scheduler.is_idle)

    @property
    def is_stalled(self) -> bool:
        """True if nothing can continue until a paused request is resumed or another one is added."""
        scheduler = self.scheduler
        return not (self._added or self._events or self._failure or self._aborted) and (
            scheduler.is_stalled
        )

    # -- steps ---------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Run one step; return its events.

        Raises:
            DecodeError: the decode failed or was interrupted. The requests are as before the step,
                and the next call continues them.
        """
        if self._failure is None or self._events:
            self.advance()
        failure = self._failure
        if failure is not None and not self._events:
            self._failure = None
            raise failure
        return self._take_events()

    def drain(self) -> list[Event]:
        """Run steps until all requests have ended; return their events.

        If a step raises, no event is lost.

        Raises:
            DecodeError: a decode failed. After an interrupt there is no error: the decode is
                repeated.
        """
        while self._added or not self.scheduler.is_idle:
            for name in [*self.scheduler.paused] if self.is_stalled else ():
                self.scheduler.resume(name)
            self.advance()
            failure, self._failure = self._failure, None
            if failure is not None and not isinstance(failure, DecodeInterruptedError):
                raise failure
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events: list[Event] = []
        try:  # if anything is raised here, the events are kept for the next step
            events, self._events = self._events, []
            return events
        except BaseException:
            self._events = events + self._events
            raise

    def check_idle(self) -> None:
        """Raise UsageError if a step is running: the caller is a function that the step has called."""
        if self._is_stepping and _is_in_a_step():
            raise UsageError(
                "a function that a step of the engine calls cannot step or close this engine",
                hint="let it generate with the context (ctx.complete), or with another engine",
            )

    def advance(self) -> None:
        """Run one step; keep its events and its error, which ``step`` returns and raises.

        Raises:
            UsageError: a step is running.
        """
        self.check_idle()
        start = perf_counter()
        with HeldInterrupts() as interrupts:
            self._is_stepping = True
            try:
                if self._is_interrupted:
                    self._recover()
                self._is_interrupted = True
                try:
                    self._step()
                except LlamaBranchError as error:
                    if interrupts.caught is None:
                        self._failure = error
                self._is_interrupted = False
            except BaseException:
                self._recover()
                raise
            finally:
                self._is_stepping = False
                self._stats.elapsed_s += perf_counter() - start
                self._note_working()

    def _recover(self) -> None:
        """Queue all texts again after an interrupted step; each continues after its last token."""
        ended = {(event.id, event.sample) for event in self._events if event.result is not None}
        for submission in self.scheduler.unfinished():
            for job in list(submission.jobs.values()):
                if (job.name, job.sample) in ended:
                    with suppress(Exception):
                        self.scheduler.finish(job)
        self.scheduler.rebuild()
        self._is_interrupted = False

    def close(self) -> None:
        """Free all sequences. Requests that have no result yet never get one.

        Raises:
            UsageError: a step is running.
        """
        self.check_idle()
        with HeldInterrupts():
            self._added.clear()
            self._events.clear()
            try:
                self.scheduler.close()
            finally:
                self._note_working()

    def _step(self) -> None:
        """Run one step, and make sure that the jobs make progress.

        Raises:
            DecodeInterruptedError: the context was interrupted, and the step decoded nothing.
        """
        n_decoded, n_events = self.n_decoded, len(self._events)
        self._run()
        if self.n_decoded != n_decoded:
            self._seen.clear()
            return
        stops = self.ctx.decoder.stops
        if stops.is_pending:
            with self.ctx.lock:  # another thread's decode may be the one that stops
                if stops.is_pending:
                    stops.note_stopped()
                    raise DecodeInterruptedError("interrupted while nothing was decoded")
        waits = self.scheduler.no_sequence is not None or self._no_room is not None
        if len(self._events) != n_events or waits:
            self._seen.clear()
        else:
            self._end_stuck()

    def _end_stuck(self) -> None:
        """End the jobs that made no progress: nothing was decoded or changed for them."""
        stuck = self.scheduler.stuck()
        # A parked text that was preempted has made room.
        where: tuple[object, ...] = (len(self.scheduler.idle), *(job.place for job in stuck))
        if stuck and where in self._seen:
            error = DecodeError(
                f"{len(stuck)} texts made no progress in two steps; this is a bug in llamabranch"
            )
            for job in stuck:
                self._fail(job, error)
            where = ()
        self._seen.add(where)

    def _run(self) -> None:
        """Schedule the jobs, run a step of the loop, and take the results."""
        jobs, reading = self._schedule()
        announced = [event for job in reading if not job.is_announced for event in job.note_read()]
        if announced:  # report this before the decode, which can take seconds
            self._events += announced
            return
        running = []
        for job in jobs:
            if job.running is not None:
                job.running.draft_limit = job.output.draft_limit
                running.append(job.running)
        step = self._decode(running, reading) if jobs or reading else None
        if step is not None:
            self.n_decoded += step.n_tokens
            self._stats.target_forward_passes += step.n_tokens > 0
            if step.n_tokens:
                self._no_room = None
            self._stats.draft_forward_passes += step.n_draft_decodes
            self._postprocess([*jobs, *reading], step)

    def _decode(self, running: Sequence[RunningText], reading: Sequence[Job]) -> Step | None:
        """Run a step of the loop; return None if ``abort`` stopped it. Then nothing has changed."""
        if not reading:
            return self._loop.step(running)
        self._has_stopped = False
        try:
            return self._loop.step(running, reading, lambda: self._stoppable(reading))
        except DecodeInterruptedError:
            if not self._has_stopped:
                raise
            return None

    @contextmanager
    def _stoppable(self, reading: Sequence[Job]) -> Iterator[None]:
        """Let ``abort`` stop the decode in this block, and no other one."""
        with self._stopping:
            self._reading, self._thread = reading, get_ident()
            if any(job.submission.is_aborted for job in reading):
                self._stop()
        try:
            yield
        finally:
            with self._stopping:
                self._reading = ()
                # The decode may have ended before, or something else has stopped it.
                if self.ctx.decoder.stops.withdraw(self):
                    self._has_stopped = False

    def _stop(self) -> None:
        self._has_stopped = True
        self.ctx.decoder.stops.stop_thread(self, self._thread)

    def _schedule(self) -> tuple[list[Job], list[Job]]:
        """Take the requests that were added or aborted since the last step, and admit those that fit.

        Returns:
            the jobs that generate, and the jobs that read their prompt.
        """
        scheduler = self.scheduler
        while self._added:
            scheduler.add(self._added[0])
            self._added.popleft()
        while self._aborted:
            submission = self._aborted[0]
            if scheduler.find(submission.name) is submission:
                for job in scheduler.jobs_of(submission):
                    self.end(job, "cancelled")
            self._aborted.popleft()
        if self._no_room is not None and not scheduler.active and not self._has_room():
            return [], []
        for job in scheduler.admit():
            self._fail(job, job.error)
        self._note_working()
        self._has_others = bool(self._others())
        if scheduler.no_sequence is None:
            self._n_idle = 0 if self._no_room is None else self._n_idle
        elif not self._wait():
            while (waiting := scheduler.head()) is not None:
                self.end(waiting, "capacity", scheduler.no_sequence)
        active = scheduler.active
        reading = [job for job in active if job.is_reading]
        for job in reading:
            if not job.n_uncached:
                self._begin(job)
        return [job for job in active if job.running], [job for job in reading if job.is_reading]

    def _wait(self) -> bool:
        """Sleep briefly; return False once ``wait_s`` has passed without a decode on the context.

        Polls are counted, not seconds, so that a suspended machine does not use up the time.
        """
        # In a user's function that a decode calls, nobody else can work.
        if is_held(self.ctx.lock):
            return False
        n_decodes = self.ctx.decoder.n_decodes
        if n_decodes != self._n_decodes:
            self._n_decodes, self._n_idle = n_decodes, 0
        if self._n_idle * _POLL_S >= self._wait_s:
            return False
        self._n_idle += 1
        sleep(_POLL_S)
        return True

    def _note_working(self) -> None:
        """Note in the context whether texts of this core hold sequences."""
        if self.scheduler.active or self.scheduler.idle:
            self.ctx.working[self._number] = get_ident()
        else:
            self.ctx.working.pop(self._number, None)

    def _others(self) -> list[int]:
        """Return the numbers of the other cores that work. One of this thread cannot."""
        thread = get_ident()
        return [
            number
            for number, other in list(self.ctx.working.items())
            if number != self._number and other != thread
        ]

    def _waits_for_room(self, error: CacheFullError) -> bool:
        """Wait briefly for cells of other cores; return False if no other core works.

        Of all cores that wait, only the oldest keeps its cells, so one core can always continue.
        """
        others = self._others()
        if not (others or self._has_others) or not self._wait():
            return False
        self._no_room = error
        if others and min(others) < self._number:
            self.scheduler.preempt(at_least=0)
            self._stats.preemptions += 1
        return True

    def _has_room(self) -> bool:
        """Return whether the next job may have room now; end it if it has waited long enough."""
        job = self.scheduler.head()
        if job is not None and self._others():
            with self.ctx.lock:
                has_room = self.ctx.kv_cache.has_room(job.n_to_cache + 1, 0)
            if not has_room:
                if not self._wait():
                    self.end(job, "capacity", self._no_room)
                return False
        self._no_room = None
        return True

    def _postprocess(self, jobs: list[Job], step: Step) -> None:
        """Start texts whose prompt has been read, report new tokens, and end finished texts."""
        try:
            for job in jobs:
                self._take_results(job)
            if step.no_room is not None:  # preempt a text; end it if it is the only one
                if self.scheduler.preempt():
                    self._stats.preemptions += 1
                elif not self._waits_for_room(step.no_room):
                    self.end(self.scheduler.active[0], "capacity", step.no_room)
        except LlamaBranchError:  # a drafter could not close a state; the other texts are complete
            self._recover()
            raise

    def _take_results(self, job: Job) -> None:
        """Take what the loop's step did for a job: new tokens, an error, or tokens of its prompt."""
        running = job.running
        if running is not None:
            self._emit(job, running.emitted, running.error)
        elif job.error is not None:
            self._fail(job, job.error)
        elif job.n_decoded:
            self._stats.prompt_tokens += job.n_decoded
            self._events += job.note_read()
            if not job.n_uncached:
                self._begin(job)

    def _begin(self, job: Job) -> None:
        """Start to generate a text whose prompt has been read completely."""
        try:
            emitted = job.begin()
        except LlamaBranchError as error:
            self._fail(job, error)
        else:
            self._emit(job, emitted, None)

    def _emit(self, job: Job, emitted: Sequence[Produced], error: LlamaBranchError | None) -> None:
        """Add tokens to a running text. After them it may begin its answer, or end."""
        for produced in emitted:
            if job.output.finish_reason is None:
                for text in (job, *job.equals):
                    self._events += text.emit(produced)
        if emitted:
            for text in (job, *job.equals):
                text.note_token()
        reason = job.output.finish_reason
        if error is not None and reason is None:
            self._fail(job, error)
        elif error is None and reason is not None and job.ends_thought:
            for thinking in (job, *job.equals):
                self._events += thinking.break_off()
            self._events += self.scheduler.begin_answers(job)
        elif reason is not None:
            self.end(job, reason)

    def _fail(self, job: Job, error: LlamaBranchError | None) -> None:
        self.end(job, "capacity" if isinstance(error, CapacityError) else "error", error)

    def end(self, job: Job, reason: str, error: LlamaBranchError | None = None) -> None:
        """Report the results of a text and all that share its thought; free their sequences."""
        if isinstance(error, ConstraintError):
            reason, error = "constraint", None
        for ending in (job, *job.equals):
            if ending.state is not State.ENDED:
                self._events += ending.break_off(reason)
                ending.error = error
                if ending.submission.beginning is None:  # a search reads its jobs itself
                    result = ending.result(reason, error)
                    self._events.append(Event(ending.name, ending.sample, result=result))
                    self._stats.generated_tokens += len(result.tokens)
                self.scheduler.finish(ending)
                self._stats.speculative.add(ending.stats)
