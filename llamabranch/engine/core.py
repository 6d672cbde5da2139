"""The engine's loop for one set of requests: admit jobs, draft, decode once for all of them, accept."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from contextlib import suppress
from time import perf_counter, sleep

from ..branch import Produced
from ..errors import (
    CacheFullError,
    CapacityError,
    ConstraintError,
    DecodeInterruptedError,
    LlamaBranchError,
)
from ..generation.loop import RunningText, Step
from ..generation.text import Text
from ..native.interrupts import HeldInterrupts
from ..speculative import SpeculativeStats
from .job import EngineSettings, Job, JobState, Submission
from .request import Event, Request, Result
from .scheduler import Scheduler

__all__ = ["EngineCore"]

_POLL_S = 0.02  # how often to check whether others have freed a sequence


class EngineCore:
    """Requests that share decodes: those of one ``stream``, or those added to the engine.

    ``add`` and ``abort`` may be called from any thread, all else from one at a time.

    Args:
        settings: those of the engine.
        reports_tokens: whether there are events for tokens, besides those for results.
        expected: ids of requests that are not added yet, to which ``abort`` applies as well.
        redraws: where the engine has no given seed: each request draws another text, not all together.

    Attributes:
        scheduler: which of its texts hold a sequence.
        n_added: how many requests were added.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        reports_tokens: bool = True,
        expected: Collection[str] = (),
        redraws: bool = False,
    ) -> None:
        self.n_added = 0
        self._settings = settings
        self._stats = settings.stats
        self.scheduler = Scheduler(settings.target, settings.parallel, self._shares)
        self._reports_tokens = reports_tokens
        self._expected = expected
        self._seed = None if redraws else settings.draw_seed()
        self._n_idle = 0  # polls for a sequence without a decode
        self._n_decodes = -1
        self._added: deque[Submission] = deque()
        self._aborted: deque[Submission] = deque()
        self._aborted_ahead: set[str] = set()  # of those expected
        self._events: list[Event] = []  # still to be returned
        self._failure: LlamaBranchError | None = None  # raised once those are
        self._is_broken_off = False  # an exception has left a step in the middle

    # -- requests ------------------------------------------------------------------------------------

    def add(
        self, request: Request, name: str, samples: list[int], *, reports_tokens: bool = True
    ) -> None:
        """Queue the texts ``samples`` of a request, whose id is ``name``; see ``Engine.add_request``.

        Raises:
            ConfigError, TokenizeError: its prompt or its stop strings are invalid; it is not queued.
        """
        submission = Submission(
            request,
            name,
            self.n_added,
            self._settings,
            self._settings.draw_seed() if self._seed is None else self._seed,
            samples,
            reports_tokens=self._reports_tokens and reports_tokens,
        )
        self.n_added += 1
        if samples:
            self._added.append(submission)
            if name in self._aborted_ahead:
                self._aborted.append(submission)

    def refuse(
        self, request: Request, name: str, samples: list[int], error: LlamaBranchError
    ) -> None:
        """End the texts of a request that cannot be queued, with ``error``."""
        self.n_added += 1
        seed = 0 if request.sampling is None else request.sampling.seed or 0
        for i in samples:
            stats = SpeculativeStats()
            result = Result(name, i, request.prompt, "", [], "error", seed, stats, error=error)
            self._events.append(Event(name, i, result=result))

    def abort(self, name: str) -> None:
        """End a request at the next step; its results hold what was generated.

        An unknown id is ignored.
        """
        if name in self._expected:
            self._aborted_ahead.add(name)
        submission = self._find(name)  # also if it has just been added
        if submission is not None and not submission.is_aborted:
            submission.is_aborted = True
            self._aborted.append(submission)

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
        """How many requests wait, or were refused and not yet reported."""
        return self.n_waiting + len(self._events)

    @property
    def has_unfinished(self) -> bool:
        """True if a request has no result yet, or an event has not been returned."""
        return bool(self._added or self._events or self._failure or not self.scheduler.is_idle)

    @property
    def is_stalled(self) -> bool:
        """True if nothing can go on until a paused request is resumed, or another is added."""
        scheduler = self.scheduler
        return not (self._added or self._events or self._failure or self._aborted) and (
            scheduler.is_stalled
        )

    # -- steps ---------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Run one step; return its events.

        Raises:
            DecodeError: the decode failed or was interrupted. The requests are as before; the next call
                goes on with them.
        """
        if self._failure is None or self._events:
            self.advance()
        failure = self._failure
        if failure is not None and not self._events:
            self._failure = None
            raise failure
        return self._take_events()

    def drain(self) -> list[Event]:
        """Run steps until all requests have ended; return their events. What it raises loses none.

        Raises:
            DecodeError: a decode failed. An interrupted one is repeated.
        """
        while self._added or not self.scheduler.is_idle:
            self.advance()
            failure, self._failure = self._failure, None
            if failure is not None and not isinstance(failure, DecodeInterruptedError):
                raise failure
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events: list[Event] = []
        try:  # they are returned, or kept for the next step, whatever is raised here
            events, self._events = self._events, []
            return events
        except BaseException:
            self._events = events + self._events
            raise

    def advance(self) -> None:
        """Run one step; ``step`` returns its events, and raises what it has met."""
        start = perf_counter()
        with HeldInterrupts() as held:
            try:
                if self._is_broken_off:
                    self._recover()
                self._is_broken_off = True
                try:
                    self._step()
                except LlamaBranchError as error:
                    if held.caught is None:
                        self._failure = error
                self._is_broken_off = False
            except BaseException:
                self._recover()
                raise
            finally:
                self._stats.elapsed_s += perf_counter() - start

    def _recover(self) -> None:
        """Queue all texts again after a step that was broken off; they go on after their last token."""
        ended = {(event.id, event.sample) for event in self._events if event.result is not None}
        for submission in self.scheduler.unfinished():
            for job in list(submission.jobs.values()):
                if (job.name, job.sample) in ended:
                    with suppress(Exception):
                        self.scheduler.finish(job)
        self.scheduler.rebuild()
        self._is_broken_off = False

    def close(self) -> None:
        """Free all sequences; requests without a result get none."""
        with HeldInterrupts():
            self._added.clear()
            self._events.clear()
            self.scheduler.close()

    def _step(self) -> None:
        running, reading = self._schedule()
        if running or reading:
            self._postprocess([*running, *reading], self._run(running, reading))

    # -- a step --------------------------------------------------------------------------------------

    def _schedule(self) -> tuple[list[Job], list[Job]]:
        """Take what was added and aborted since the last step, and admit what there is room for.

        Returns:
            the texts that go on, and those whose prompt is read.
        """
        scheduler = self.scheduler
        while self._added:
            scheduler.add(self._added[0])
            self._added.popleft()
        while self._aborted:
            submission = self._aborted[0]
            if scheduler.find(submission.name) is submission:
                for job in scheduler.jobs_of(submission):
                    self._end(job, "cancelled")
            self._aborted.popleft()
        n_shared, n_cached = scheduler.n_shared, scheduler.n_cached
        for job in scheduler.admit():
            self._fail(job, job.error)
        self._stats.shared_prompt_tokens += scheduler.n_shared - n_shared
        self._stats.cached_prompt_tokens += scheduler.n_cached - n_cached
        if scheduler.no_sequence is None:
            self._n_idle = 0
        elif not self._waits():  # others hold all sequences of the context
            while (waiting := scheduler.head()) is not None:
                self._end(waiting, "capacity", scheduler.no_sequence)
        active, paused = scheduler.active, scheduler.paused
        running = [j for j in active if j.state is JobState.RUNNING and j.name not in paused]
        return running, [job for job in active if job.state is JobState.READING]

    def _waits(self) -> bool:
        """Sleep briefly; return False once ``wait_s`` has passed without a decode on the context.

        Polls are counted, not seconds, so that a suspended machine does not use up the time.
        """
        n_decodes = self._settings.target.decoder.n_decodes
        if n_decodes != self._n_decodes:
            self._n_decodes, self._n_idle = n_decodes, 0
        if self._n_idle * _POLL_S >= self._settings.wait_s:
            return False
        self._n_idle += 1
        sleep(_POLL_S)
        return True

    def _run(self, running: list[Job], reading: list[Job]) -> Step:
        """Draft, decode once, and give each text what it has got."""
        texts = [
            (job.running, job.output.draft_limit) for job in running if job.running is not None
        ]
        step = self._settings.drafting.loop.step(texts, reading)
        self._stats.target_forward_passes += step.n_tokens > 0
        self._stats.draft_forward_passes += step.n_draft_decodes
        return step

    def _postprocess(self, jobs: list[Job], step: Step) -> None:
        """Begin texts whose prompt is read, report the emitted tokens, end what has ended."""
        try:
            for job in jobs:
                self._take(job)
            if step.no_room is not None:
                self._make_room(step.no_room)
        except LlamaBranchError:  # of a drafter that cannot close a state: the others have accepted
            self._recover()
            raise

    def _take(self, job: Job) -> None:
        running, emitted, error = job.running, [], job.error
        if running is not None:
            emitted, error = running.emitted, running.error
        elif job.n_decoded and error is None:
            self._stats.prompt_tokens += job.n_decoded
            if not job.n_uncached:
                try:
                    emitted = self._begin(job)
                except LlamaBranchError as failure:
                    error = failure
        for one in emitted:
            if job.output.finish_reason is None:
                self._events += job.emit(one)
        if emitted:
            job.note_token()
            if job.equals and job.running is not None:
                self._part(job, job.running)
        reason = job.output.finish_reason
        if reason is not None:
            if error is not None or job.state is JobState.RUNNING:
                self._end(job, reason)
        elif error is not None:
            self._fail(job, error)

    def _part(self, job: Job, running: RunningText) -> None:
        """Give equal texts their tokens; those that have drawn another one go on by themselves."""
        emitted = running.emitted
        job.equals, apart = running.part(job.equals)
        for drawn, group in [(emitted, job.equals), *apart]:
            for each in group:
                for one in drawn:
                    if each.output.finish_reason is None:
                        self._events += each.emit(one)
                each.note_token()
        for _, (first, *others) in apart:
            first.equals = others
            reason = first.output.finish_reason
            try:
                if reason is not None:
                    self._end(first, reason)
                elif self.scheduler.part(first, job):
                    self._begin(first)
            except LlamaBranchError as error:
                self._fail(first, error)

    def _shares(self, text: Text) -> bool:
        """Return whether equal texts may be drawn from its rows; with drafts not if they have states."""
        drafting = self._settings.drafting
        is_seeded = drafting.config.rule == "seeded"
        return drafting.loop.drafter is None or (is_seeded and text.sampler.is_stateless)

    def _begin(self, job: Job) -> list[Produced]:
        """Begin a text whose prompt is read; return what it emits: one token or none."""
        drafting, branch = self._settings.drafting, job.held
        job.constrain()
        loop = drafting.loop
        rule = drafting.config.rule if job.constraint is None else "seeded"
        drafts = loop.drafter is not None and job.output.finish_reason is None
        like, (source, n_shared) = None, job.shared
        if (
            source is not None
            and source.running is not None
            and source.running.rule == rule
            and source.request.grammar == job.request.grammar
        ):
            like = source.running.state  # so the drafter, too, reads a shared prompt only once
        top = job.request.top_logprobs or 0
        running = loop.open(branch.sequence, rule, job.stats, top, drafts=drafts, like=like)
        if like is not None:
            running.state.observe(n_shared)
        running.on_round = job.request.on_round
        job.begin(running)
        if job.output.emitted or job.output.finish_reason is not None:
            return []  # it was preempted, and goes on after its last token; or max_tokens is 0
        return [running.draw()]

    def _make_room(self, error: CacheFullError) -> None:
        """Preempt the newest request; end the last one as "capacity"."""
        if self.scheduler.preempt() is not None:
            self._stats.preemptions += 1
        else:
            self._end(self.scheduler.active[0], "capacity", error)

    def _fail(self, job: Job, error: LlamaBranchError | None) -> None:
        self._end(job, "capacity" if isinstance(error, CapacityError) else "error", error)

    def _end(self, job: Job, reason: str, error: LlamaBranchError | None = None) -> None:
        """Report the result of a text and of those that are equal, and free what they hold."""
        if isinstance(error, ConstraintError):
            reason, error = "constraint", None
        for each in (job, *job.equals):
            if each.state is not JobState.ENDED:
                self._events += each.break_off()
                result = each.result(reason, error)
                self._events.append(Event(each.name, each.sample, result=result))
                self.scheduler.finish(each)
                self._stats.speculative.add(each.stats)
                self._stats.generated_tokens += len(result.tokens)
