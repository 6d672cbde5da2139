"""Any number of requests over the sequences of one context."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing, suppress
from time import perf_counter, sleep

from ..arguments import function, instance, whole
from ..branch import Produced
from ..context import Context
from ..errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    ConstraintError,
    DecodeInterruptedError,
    LlamaBranchError,
    QueueFullError,
)
from ..generation.loop import RunningText, Step
from ..native.interrupts import HeldInterrupts
from ..sampling import SamplingParams
from ..speculative import NullDrafter, SpeculativeConfig, SpeculativeStats
from ..speculative.combined import DrafterChoice
from .job import EngineSettings, Job, Submission, Target
from .request import (
    AnyRequest,
    Event,
    Request,
    Requests,
    RequestSource,
    Result,
    Skip,
    as_request,
    identity,
)
from .scheduler import Scheduler

__all__ = ["Engine", "EngineCore"]

_POLL_S = 0.02  # how often to check whether others have freed a sequence


class Engine:
    """Continues any number of prompts over the sequences of one context.

    Every token carries its own position and sequence, so prompts and drafts of different lengths need no
    padding. The sequence of a finished text is reused at once. Prompts are prefilled in chunks that share
    decodes with the running texts.

    You can add requests one at a time (``add_request``, ``step``), or run a job (``generate``,
    ``stream``), or both at once. With a prefix cache, later requests reuse the K/V of prompts and
    finished texts.

    Args:
        target: the context that generates; at most its n_seq_max texts run at a time. Or a `Model`, or a
            name or path as for `load`: then the engine opens a context, which is closed with it, with
            2,048 tokens for each of ``parallel`` texts (8). Each text has its own part of the cache if
            the memory can be divided and there is no draft model.
        drafter: proposes the drafts. "auto" = drafts from MTP layers, from copies of the text so far and
            from text that a grammar forces, if it measures that this is faster; None = plain decoding. To
            draft for every text, a draft model's context needs as many sequences as the target.
        config: how much to draft; "auto" drafts as many tokens as raise the throughput of the batch.
        sampling: the settings for requests without any.
        max_tokens: the limit for requests without one.
        seed: the seed from which those of requests without one are derived: the same requests get the
            same texts each time. None = each call of ``generate`` or ``stream``, and each request that is
            added, draws others; a request with the ``seed`` of a result in its ``sampling`` repeats it.
        wait_s: how long to wait, in seconds, when others hold every sequence of the context and none of
            the engine's own requests is running; then the waiting requests end with "capacity". Only
            time in which nothing is decoded on the context counts; 0 = do not wait.
        max_waiting: how many requests may wait at most; None = any number. ``add_request`` raises beyond.
        parallel: the most texts at a time; None = as many as the target has sequences.

    Raises:
        ConfigError: an invalid limit, seed or ``wait_s``; an argument of another type.
        UnsupportedError: ``target`` is the context of a head, or the drafter is a head for another model.
        VocabularyMismatchError: the drafter cannot draft for the target's vocabulary.

    Attributes:
        stats: totals over all requests so far.
        seed: the seed in use.
        sampling: the settings for requests without any.
        owns_target: whether the target is closed with the engine.
        core: runs the added requests; for ``AsyncEngine``, not for users.
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
    ) -> None:
        self._max_waiting = None if max_waiting is None else whole("max_waiting", max_waiting, 0)
        self._settings = opened = EngineSettings.opened(
            target, drafter, config, sampling, max_tokens, seed, wait_s, parallel
        )
        self.target, self.owns_target = opened.target, not isinstance(target, Context)
        self.drafter, self.config = opened.drafting.drafter, opened.drafting.config
        self.sampling, self.stats = opened.sampling, opened.stats
        self.core = EngineCore(opened, redraws=True)
        self._adding = threading.Lock()
        self._is_closed = False
        # Every call of ``stream`` has a core of its own, with its own ids. A core that is
        # garbage-collected removes itself from the list; these list operations are atomic, so
        # ``abort`` needs no lock.
        self._streams: list[weakref.ref[EngineCore]] = []

    @property
    def seed(self) -> int:
        """The seed from which seeds of requests without one are derived."""
        return self._settings.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._settings.seed, self._settings.repeats = whole("seed", seed), True

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests at any time ------------------------------------------------------------------------

    def add_request(self, request: AnyRequest, *, reports_tokens: bool = True) -> str:
        """Queue a request and return its id. You may call it from any thread.

        A request without an id gets its number among the added ones.

        Args:
            request: the request.
            reports_tokens: False = no events for tokens, only one for each result. Log-probabilities are
                then computed only with ``top_logprobs``.

        Raises:
            ConfigError, TokenizeError: the request is invalid, or another one with this id is unfinished.
            QueueFullError: ``max_waiting`` requests are already waiting.
            ClosedError: the engine is closed.
        """
        with self._adding:
            self._check_open()
            name, n = identity(request, self.core.n_added)
            if name in self.core:
                raise ConfigError(f"a request with the id {name!r} is unfinished")
            most = self._max_waiting
            if most is not None and (n_waiting := self.core.n_waiting) >= most:
                raise QueueFullError(
                    f"the queue is full: {n_waiting} requests wait, max_waiting is {most}",
                    hint="add it again after some steps, or raise max_waiting",
                )
            samples = list(range(n))
            self.core.add(as_request(request), name, samples, reports_tokens=reports_tokens)
            return name

    def step(self) -> list[Event]:
        """Run one step for the added requests; return its events.

        Most steps are one decode, with the next tokens of all running texts and chunks of prompts. An
        empty list does not mean that everything is done: see ``has_unfinished``.

        Raises:
            DecodeError: the decode failed or was interrupted. The next step continues; nothing is lost.
        """
        return self.core.step()

    def has_unfinished(self) -> bool:
        """Return whether an added request has no result yet."""
        return self.core.has_unfinished

    def abort(self, request_id: str) -> None:
        """End a request at its next step; its result has the text so far. Callable from any thread.

        If its prompt is being read, the running decode is stopped.

        It applies to an added request, and to every open ``stream`` with an unfinished request of this
        id, or a list of requests in which it is still to come; ids are unique only within one stream. An
        unknown id is ignored.
        """
        self.core.abort(instance("request_id", request_id, str))
        for core in [ref() for ref in list(self._streams)]:
            if core is not None:
                core.abort(request_id)

    def close(self, *, drain: bool = False) -> list[Event]:
        """Accept no more requests; end the added ones, and return their last events.

        Args:
            drain: finish them first. Otherwise they end with "cancelled".

        The prefix cache of a context that you passed stays. A second call does nothing.
        """
        with self._adding:
            self._is_closed = True
        try:
            if self.target.closed:
                self.core.close()
                return []
            if not drain:
                self.core.abort_all()
            return self.core.drain()
        finally:
            if self.owns_target:
                self.target.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the engine is closed")

    # -- jobs ------------------------------------------------------------------------------------------

    def generate(
        self,
        requests: Requests,
        *,
        on_event: Callable[[Event], None] | None = None,
        skip: Skip = (),
    ) -> list[Result]:
        """Generate for all prompts; return one result for each text, in the order of the requests.

        Args:
            requests: requests or prompts (text, or messages for the model's chat template), read as they
                are needed; a single one is a list of one.
            on_event: called with every event (a token, or the end of a text).
            skip: texts that exist already and are not generated, as (id, sample).

        If a request fails, its result has the error; the others finish.

        Raises:
            ConfigError: two requests have the same id, or there are no requests.
            DecodeInterruptedError: a decode was interrupted; ``results`` of the error has the texts.
        """
        order: dict[str, int] = {}
        results: list[Result] = []
        source = RequestSource(requests, skip, order)

        def in_order(found: list[Result]) -> list[Result]:
            return sorted(found, key=lambda r: (order.get(r.id, len(order)), r.sample))

        if on_event is not None:
            function("on_event", on_event)
        core = self._open(source, reports_tokens=on_event is not None)
        try:
            with closing(self._run(core, source)) as events:  # also if ``on_event`` raises
                for event in events:
                    if event.result is not None:
                        results.append(event.result)
                    if on_event is not None:
                        on_event(event)
        except DecodeInterruptedError as error:
            error.results = in_order(results)
            raise
        return in_order(results)

    def stream(self, requests: Requests, *, skip: Skip = ()) -> Generator[Event, None, None]:
        """Yield every event (a token, or the end of a text) as it happens; ``skip`` as in ``generate``.

        Requests are read as they are needed, a few more than can run at a time. If reading them raises,
        the exception is raised after the requests read before have ended.

        All sequences are freed when the iterator ends or is closed.

        Raises:
            ConfigError: two requests have the same id, or there are no requests.
            DecodeInterruptedError: a decode was interrupted. Before that come the results of the
                unfinished requests that were read, with their texts so far and "cancelled".
        """
        source = RequestSource(requests, skip)
        return self._run(self._open(source), source)

    def _open(self, source: RequestSource, *, reports_tokens: bool = True) -> EngineCore:
        self._check_open()
        core = EngineCore(self._settings, reports_tokens=reports_tokens, expected=source.expected)
        self._streams.append(weakref.ref(core, self._streams.remove))
        return core

    def _run(self, core: EngineCore, source: RequestSource) -> Generator[Event, None, None]:
        """Yield the events of all steps until ``source`` and all requests have ended."""
        ahead = max(2, self.target.n_seq_max)  # requests that wait, besides those that run
        more = True
        try:
            while True:
                while more and core.n_ahead < ahead:
                    more = core.feed(source)
                if not core.has_unfinished:
                    if source.failure is not None:
                        raise source.failure
                    return
                try:
                    events = core.step()
                except DecodeInterruptedError:
                    core.abort_all()
                    yield from core.drain()
                    raise
                yield from events
        finally:
            core.close()

    def explain(self) -> str:
        """Return a description of its drafting and batching, with the measurements behind it."""
        loop = self._settings.drafting.loop
        if loop.drafter is not None:
            return loop.length.explain()
        if isinstance(self.drafter, NullDrafter):
            return "plain decoding: there is no drafter"
        return "plain decoding: this model's memory cannot remove the rejected tokens of a draft"


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
        self.scheduler = Scheduler(settings.target, settings.parallel, settings.stats)
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
        # Whether the running decode reads prompts, and whether an abort has stopped it.
        self._stopping = threading.Lock()
        self._reads = self._has_stopped = False

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

    def feed(self, source: RequestSource) -> bool:
        """Add the next request; False at the end. A request that cannot be queued ends with its error."""
        if (asked := next(source, None)) is None:
            return False
        name, request, samples, error = asked
        if name in self and error is None:
            error = ConfigError(f"two unfinished requests have the id {name!r}")
        try:
            if error is None:
                self.add(request, name, samples)
        except LlamaBranchError as refused:
            error = refused
        if error is not None:
            self.n_added += 1
            seed = 0 if request.sampling is None else request.sampling.seed or 0
            for i in samples:
                stats = SpeculativeStats()
                result = Result(name, i, request.prompt, "", [], "error", seed, stats, error=error)
                self._events.append(Event(name, i, result=result))
        source.expected.discard(name)  # once it is known here
        return True

    def abort(self, name: str) -> None:
        """End a request at the next step; its results hold what was generated.

        A decode that reads its prompt is stopped, which can take seconds: the step has then changed
        nothing, and the other texts repeat it. An unknown id is ignored.
        """
        if name in self._expected:
            self._aborted_ahead.add(name)
        submission = self._find(name)  # also if it has just been added
        if submission is not None and not submission.is_aborted:
            submission.is_aborted = True
            self._aborted.append(submission)
            with self._stopping:
                if self._reads and any(j.is_reading for j in list(submission.jobs.values())):
                    self._has_stopped = True
                    self._settings.target.interrupt()

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
                continues them.
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
        jobs, reading = self._schedule()
        announced = [event for job in reading if not job.is_announced for event in job.note_read()]
        if announced:  # before a decode that can take seconds
            self._events += announced
            return
        if jobs or reading:
            running = [(job.running, job.output.draft_limit) for job in jobs if job.running]
            step = self._run(running, reading)
            if step is None:
                return
            self._stats.target_forward_passes += step.n_tokens > 0
            self._stats.draft_forward_passes += step.n_draft_decodes
            self._postprocess([*jobs, *reading], step)

    def _run(
        self, running: Sequence[tuple[RunningText, int]], reading: Sequence[Job]
    ) -> Step | None:
        """Run a step of the loop; None if ``abort`` has stopped it: then nothing has changed."""
        loop = self._settings.drafting.loop
        if not reading:
            return loop.step(running)
        self._reads = True
        try:
            return loop.step(running, reading)
        except DecodeInterruptedError:
            with self._stopping:
                if not self._has_stopped:
                    raise
            return None
        finally:
            with self._stopping:
                self._reads = False
                if self._has_stopped:  # the decode may have ended before
                    self._has_stopped = False
                    self._settings.target.resume()

    # -- a step --------------------------------------------------------------------------------------

    def _schedule(self) -> tuple[list[Job], list[Job]]:
        """Take the requests that were added or aborted since the last step, and admit those that fit.

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
        for job in scheduler.admit():
            self._fail(job, job.error)
        if scheduler.no_sequence is None:
            self._n_idle = 0
        elif not self._waits():  # others hold all sequences of the context
            while (waiting := scheduler.head()) is not None:
                self._end(waiting, "capacity", scheduler.no_sequence)
        active, paused = scheduler.active, scheduler.paused
        running = [job for job in active if job.running and job.name not in paused]
        return running, [job for job in active if job.is_reading]

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

    def _postprocess(self, jobs: list[Job], step: Step) -> None:
        """Begin texts whose prompt is read, report the emitted tokens, end what has ended."""
        try:
            for job in jobs:
                self._take(job)
            if step.no_room is not None:  # the newest request gives way, the last one ends
                if self.scheduler.preempt() is not None:
                    self._stats.preemptions += 1
                else:
                    self._end(self.scheduler.active[0], "capacity", step.no_room)
        except LlamaBranchError:  # of a drafter that cannot close a state: the others have accepted
            self._recover()
            raise

    def _take(self, job: Job) -> None:
        running, emitted, error = job.running, [], job.error
        if running is not None:
            emitted, error = running.emitted, running.error
        elif job.n_decoded and error is None:
            self._stats.prompt_tokens += job.n_decoded
            self._events += job.note_read()
            if not job.n_uncached:
                try:
                    emitted = job.begin()
                except LlamaBranchError as failure:
                    error = failure
        for one in emitted:
            if job.output.finish_reason is None:
                self._events += job.emit(one)
        if emitted:
            job.note_token()
            if job.shares_thought:
                for each in job.equals:
                    self._give(each, emitted)
            elif job.equals and job.running is not None:
                self._part(job, job.running)
        reason = job.output.finish_reason
        if reason is not None and error is None and job.ends_thought:
            for each in (job, *job.equals):
                self._events += each.emit(None)
            self.scheduler.answer(job)
        elif reason is not None:
            if error is not None or job.running is not None:
                self._end(job, reason)
        elif error is not None:
            self._fail(job, error)

    def _part(self, job: Job, running: RunningText) -> None:
        """Give equal texts their tokens; those that have drawn another one go on by themselves."""
        emitted = running.emitted
        job.equals, apart = running.part(job.equals)
        for drawn, group in [(emitted, job.equals), *apart]:
            for each in group:
                self._give(each, drawn)
        for _, (first, *others) in apart:
            first.equals = others
            reason = first.output.finish_reason
            try:
                if first.ends_thought:
                    self.scheduler.answer(first)
                    self.scheduler.requeue(first)
                elif reason is not None:
                    self._end(first, reason)
                elif self.scheduler.part(first, job):
                    first.begin()
            except LlamaBranchError as error:
                self._fail(first, error)

    def _give(self, job: Job, drawn: Sequence[Produced]) -> None:
        """Give a text that is equal to another what was drawn for it."""
        for one in drawn:
            if job.output.finish_reason is None:
                self._events += job.emit(one)
        job.note_token()

    def _fail(self, job: Job, error: LlamaBranchError | None) -> None:
        self._end(job, "capacity" if isinstance(error, CapacityError) else "error", error)

    def _end(self, job: Job, reason: str, error: LlamaBranchError | None = None) -> None:
        """Report the result of a text and of those that are equal, and free what they hold."""
        if isinstance(error, ConstraintError):
            reason, error = "constraint", None
        for each in (job, *job.equals):
            if not each.has_ended:
                self._events += each.emit(None)
                result = each.result(reason, error)
                self._events.append(Event(each.name, each.sample, result=result))
                self.scheduler.finish(each)
                self._stats.speculative.add(each.stats)
                self._stats.generated_tokens += len(result.tokens)
