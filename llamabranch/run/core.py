"""Runs the steps of all texts of a context, for all callers together."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from threading import get_ident
from time import perf_counter, sleep

from ..context import Context
from ..errors import (
    CapacityError,
    ConstraintError,
    DecodeError,
    DecodeInterruptedError,
    LlamaBranchError,
    UsageError,
)
from ..generation.output import Produced
from ..native.handle import forkable_lock, held_before, is_held
from ..native.interrupts import HeldInterrupts
from ..request.result import EngineStats
from .drafting import Drafting
from .job import Caller, Choice, Job, State, Told
from .running import RunningText
from .scheduler import Scheduler
from .step import Step

_POLL_S = 0.02  # how often to check whether others have freed a sequence
_MOST_STUCK = 99  # steps without progress
_making = forkable_lock()  # of a context's core


def core_of(ctx: Context) -> Core:
    """Return the core that runs the texts of a context.

    A function that a step calls may ask for texts too. These texts get a core of their own, which runs
    them while the step waits, because the step's texts must not move during that time.
    """
    with _making:
        core = None if ctx.core is None else ctx.core()
        if not isinstance(core, Core):
            core = Core(ctx)
            ctx.core = weakref.ref(core)
        while core.is_in_step():
            core = core.inner()
        return core


class Core:
    """Runs the texts of all callers of one context: they share its decodes, sequences and cells.

    A context has one while it has callers. Any thread may call ``send``. The threads of the callers take
    turns: a thread that waits for events runs the next step, which continues all texts.

    Args:
        ctx: the context that generates.

    Attributes:
        ctx: the context.
        scheduler: decides which texts hold a sequence.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.scheduler = Scheduler(ctx)
        self._inner: weakref.ref[Core] | None = None
        self._lock = forkable_lock()  # held while its texts change
        self._mail: deque[tuple[str, Job]] = deque()  # what callers asked of the next step
        self._events: deque[Told] = deque()  # of this step
        self._step: Step | None = None
        self._at: Choice | None = None  # whose function may run now, outside of ``_step``
        self._in_step: list[Choice] = []
        self._n_stuck = 0  # steps without any progress
        self._n_idle = 0  # polls for a free sequence since the last decode on the context
        self._n_decodes = -1  # decodes on the context at the last poll
        self._is_stepping = False
        self._is_interrupted = False  # True in a step, and after one that an exception ended
        # The choices whose prompt the running decode reads, its thread, and whether a caller has
        # stopped it.
        self._stopping = threading.RLock()  # a handler of a signal may abort too
        self._reading: Sequence[Choice] = ()
        self._thread = 0
        self._has_stopped = False

    # -- callers -------------------------------------------------------------------------------------

    def send(self, what: str, job: Job) -> None:
        """Ask the next step to "add", "abort", "resume" or "drop" a request.

        Nobody takes the result of a dropped request. If the running decode reads the prompt of a request
        that is to end, it is stopped, because it can take seconds. A stopped step changes nothing, and
        the next step continues the other texts.
        """
        if what in ("abort", "drop"):
            job.is_aborted = True
        self._mail.append((what, job))
        if job.is_aborted:
            with self._stopping:
                if any(choice in self._reading for choice in list(job.choices.values())):
                    self._stop()

    def tidy(self) -> None:
        """Do what callers asked for now, unless a step is running, which does it at its end."""
        while self._mail and self._lock.acquire(blocking=False):
            try:
                if self.is_in_step():
                    return
                with HeldInterrupts():
                    self._tidy()
            finally:
                self._lock.release()

    def _tidy(self) -> None:
        self._is_stepping = True
        try:
            if self._is_interrupted:
                self._recover()
            self._read_mail()
        finally:
            self._is_stepping = False
            self._deliver()

    def is_in_step(self) -> bool:
        """Return whether the calling code runs inside a step of this core.

        An exception may end a step at any line, before its end can be recorded. So this looks at the
        functions that are running.
        """
        if not self._is_stepping:
            return False
        frame = sys._getframe(1).f_back
        steps = Core._advance.__code__, Core._tidy.__code__
        while frame is not None:
            if frame.f_code in steps and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False

    def inner(self) -> Core:
        """Return the core for texts of functions that a step of this core calls."""
        core = None if self._inner is None else self._inner()
        if core is None:
            core = Core(self.ctx)
            self._inner = weakref.ref(core)
        return core

    def advance(self, caller: Caller) -> None:
        """Run a step of all texts, unless another thread's step already has events for ``caller``.

        Raises:
            UsageError: a running step called this function.
            BaseException: a function of ``caller`` raised it, or a signal handler. No text is lost.
        """
        self.check_free()
        ctx = self.ctx
        with held_before(ctx.stepping, ctx.lock), held_before(self._lock, ctx.lock):
            if caller.events or caller.failure is not None:
                return
            start = perf_counter()
            with HeldInterrupts() as interrupts:
                self._is_stepping = True
                try:
                    self._advance(caller, interrupts)
                except BaseException:
                    self._recover()
                    raise
                finally:
                    self._is_stepping = False
                    elapsed_s = perf_counter() - start
                    for stats in self._stats_of(self._in_step, caller):
                        stats.elapsed_s += elapsed_s
                    self._step, self._in_step = None, []
                    self.scheduler.records.note_asker(None)
                    self._deliver()
        self.tidy()

    def check_free(self) -> None:
        """Raise UsageError if the calling code runs inside a step of this core."""
        if self.is_in_step():
            raise UsageError(
                "a function that a step of the engine calls cannot step or close this engine",
                hint="let it generate with the context (ctx.complete), or with another engine",
            )

    def _advance(self, caller: Caller, interrupts: HeldInterrupts) -> None:
        if self._is_interrupted:
            self._recover()
        self._is_interrupted = True
        self._step, self._at, self._in_step = None, None, []
        try:
            self._run()
        except LlamaBranchError as error:
            if interrupts.caught is None:
                for blamed in self._blamed(caller):
                    blamed.failure = error
        except Exception as error:
            (*others,) = self._blamed(caller)
            if caller in others:
                raise
            self._recover()
            for other in others:
                other.failure = error
        self._is_interrupted = False

    def _blamed(self, caller: Caller) -> list[Caller]:
        """Return the callers whose function raised the error, or else all that took part in the step."""
        at: object = self._at or (None if self._step is None else self._step.at)
        active = self.scheduler.active
        callers = [choice.job.caller for choice in active]
        if isinstance(at, Choice):
            callers = [at.job.caller]
        elif isinstance(at, RunningText):
            callers = [choice.job.caller for choice in active if choice.running is at]
        elif isinstance(at, Drafting):
            callers = [other for other in callers if other.drafting is at]
        else:
            callers.append(caller)
        return list(dict.fromkeys(callers)) or [caller]

    def _deliver(self) -> None:
        """Give the events of the step to the callers."""
        while self._events:
            # This is one line so that an interrupt between two lines cannot lose an event.
            self._events[0][0].caller.events.append(self._events.popleft())

    def _recover(self) -> None:
        """Queue all texts again after an interrupted step; each continues after its last token."""
        ended = {(job, event.sample) for job, event in self._events if event.result is not None}
        for job in self.scheduler.unfinished():
            for choice in list(job.choices.values()):
                if (job, choice.sample) in ended:
                    with suppress(Exception):
                        self.scheduler.finish(choice)
        self.scheduler.rebuild()
        self._is_interrupted = False

    @staticmethod
    def _stats_of(choices: Sequence[Choice], *more: Caller) -> list[EngineStats]:
        """Return the totals that a step of these texts adds to; callers may share them."""
        callers = [*(choice.job.caller for choice in choices), *more]
        return list({id(caller.stats): caller.stats for caller in callers}.values())

    # -- a step --------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Schedule the texts, run a step, and take the results.

        Raises:
            DecodeInterruptedError: the context was interrupted, and the step decoded nothing.
        """
        n_events = len(self._events)
        choices, reading = self._schedule()
        self._in_step = [*choices, *reading]
        announced = [choice for choice in reading if not choice.is_announced]
        for choice in announced:  # report this before the decode, which can take seconds
            self._at = choice
            self._events += choice.note_read()
        self._at = None
        if self._in_step and not any(c.job.request.prompt_progress for c in announced):
            running = []
            for choice in choices:
                if choice.running is not None:
                    choice.running.draft_limit = choice.output.draft_limit
                    running.append(choice.running)
            around = partial(self._stoppable, reading) if reading else nullcontext
            self.scheduler.records.note_asker(max(self._in_step, key=lambda its: its.n_uncached))
            step = Step(self.ctx, running, reading, around)
            if self._decode(step):
                self._count(step)
                self._postprocess(step)
                if step.n_tokens:
                    self._n_stuck, self.scheduler.is_crowded = 0, False
                    return
        stops = self.ctx.decoder.stops
        if stops.is_pending and not self.ctx.closed:
            with self.ctx.lock:  # the interrupt may have stopped another thread's decode
                if stops.is_pending:
                    stops.note_stopped()
                    raise DecodeInterruptedError("interrupted while nothing was decoded")
        waits = self.scheduler.no_sequence is not None or self.scheduler.head() is None
        is_stuck = len(self._events) == n_events and (self._in_step or not waits)
        self._n_stuck = self._n_stuck + 1 if is_stuck else 0
        if self._n_stuck > _MOST_STUCK:
            raise DecodeError("the texts make no progress; this is a bug in llamabranch")

    def _decode(self, step: Step) -> bool:
        """Run a step; return False if a caller stopped it. Then nothing has changed."""
        self._step, self._has_stopped = step, False
        try:
            step.run()
        except DecodeInterruptedError:
            if not self._has_stopped:
                raise
            return False
        return True

    @contextmanager
    def _stoppable(self, reading: Sequence[Choice]) -> Iterator[None]:
        """Let callers stop the decode in this block, and no other one."""
        with self._stopping:
            self._reading, self._thread = reading, get_ident()
            if any(choice.job.is_aborted for choice in reading):
                self._stop()
        try:
            yield
        finally:
            with self._stopping:
                self._reading = ()
                # The decode may have ended already, or something else may have stopped it.
                if self.ctx.decoder.stops.withdraw(self):
                    self._has_stopped = False

    def _stop(self) -> None:
        self._has_stopped = True
        self.ctx.decoder.stops.stop_thread(self, self._thread)

    def _read_mail(self) -> None:
        """Do what callers asked for."""
        scheduler = self.scheduler
        while self._mail:
            what, job = self._mail[0]
            if what == "add":
                scheduler.add(job)
            elif what == "resume":
                scheduler.resume(job)
            # The handler of a signal may abort a job while its caller is about to add it.
            if job.is_aborted and job in scheduler:
                for choice in scheduler.choices_of(job):
                    try:
                        if sys.is_finalizing():  # modules may be gone, and nobody takes the result
                            scheduler.finish(choice)
                        else:
                            self._end(choice, "cancelled")
                    except Exception as error:  # a drafter could not close a state
                        if what != "drop":
                            raise
                        job.caller.failure = error
            self._mail.popleft()

    def _schedule(self) -> tuple[list[Choice], list[Choice]]:
        """Do what callers asked for, and admit the texts that fit.

        Returns:
            the texts that generate, and those that read their prompt.
        """
        self._read_mail()
        scheduler = self.scheduler
        for choice in scheduler.admit():
            self._fail(choice, choice.error)
        if scheduler.no_sequence is None:
            self._n_idle = 0
        while scheduler.no_sequence is not None and (waiting := scheduler.head()) is not None:
            if self._wait(waiting.job.caller.wait_s):
                break
            self._end(waiting, "capacity", scheduler.no_sequence)
        active = scheduler.active
        reading = [choice for choice in active if choice.is_reading]
        for choice in reading:
            if not choice.n_uncached:
                self._begin(choice)
        return (
            [choice for choice in active if choice.running],
            [choice for choice in reading if choice.is_reading],
        )

    def _wait(self, wait_s: float) -> bool:
        """Sleep briefly; return False once ``wait_s`` has passed without a decode on the context.

        Polls are counted, not seconds, so that a suspended machine does not use up the time.
        """
        # Inside a user's function that a decode calls, no other thread can decode.
        if is_held(self.ctx.lock):
            return False
        n_decodes = self.ctx.decoder.n_decodes
        if n_decodes != self._n_decodes:
            self._n_decodes, self._n_idle = n_decodes, 0
        if self._n_idle * _POLL_S >= wait_s:
            return False
        self._n_idle += 1
        sleep(_POLL_S)
        return True

    def _count(self, step: Step) -> None:
        """Count the decodes of a step for its callers."""
        for drafting, n_decodes in step.draft_decodes.items():
            its = [c for c in self._in_step if c.job.caller.drafting is drafting]
            for stats in self._stats_of(its):
                stats.draft_forward_passes += n_decodes
        if not step.n_tokens:
            return
        for stats in self._stats_of(self._in_step):
            stats.target_forward_passes += 1

    def _postprocess(self, step: Step) -> None:
        """Start texts whose prompt has been read, report new tokens, and end finished texts."""
        try:
            for choice in self._in_step:
                self._at = choice
                self._take_results(choice)
            self._at = None
            # Without room, preempt a text; end it if it is the only one.
            if step.no_room is not None and not self.scheduler.preempt():
                self._end(self.scheduler.active[0], "capacity", step.no_room)
        except LlamaBranchError:  # a drafter could not close a state; the other texts are complete
            self._recover()
            raise

    def _take_results(self, choice: Choice) -> None:
        """Take what the step did for a text: new tokens, an error, or tokens of its prompt."""
        running = choice.running
        if running is not None:
            self._emit(choice, running.emitted, running.error)
        elif choice.error is not None:
            self._fail(choice, choice.error)
        elif choice.n_decoded:
            choice.job.caller.stats.evaluated += choice.n_decoded
            self._events += choice.note_read()
            if not choice.n_uncached:
                self._begin(choice)

    def _begin(self, choice: Choice) -> None:
        """Start to generate a text whose prompt has been read completely."""
        self._at = choice
        try:
            emitted = choice.begin()
        except LlamaBranchError as error:
            self._fail(choice, error)
        else:
            self._emit(choice, emitted, None)

    def _emit(
        self, choice: Choice, emitted: Sequence[Produced], error: LlamaBranchError | None
    ) -> None:
        """Add tokens to a running text. After them it may begin its answer, or end."""
        for produced in emitted:
            if choice.output.finish_reason is None:
                for text in (choice, *choice.equals):
                    self._events += text.emit(produced)
        if emitted:
            for text in (choice, *choice.equals):
                text.note_token()
        reason = choice.output.finish_reason
        if error is not None and reason is None:
            self._fail(choice, error)
        elif error is None and reason is not None and choice.ends_thought:
            for thinking in (choice, *choice.equals):
                self._events += thinking.break_off()
            self._events += self.scheduler.begin_answers(choice)
        elif reason is not None:
            self._end(choice, reason)

    def _fail(self, choice: Choice, error: LlamaBranchError | None) -> None:
        self._end(choice, "capacity" if isinstance(error, CapacityError) else "error", error)

    def _end(self, choice: Choice, reason: str, error: LlamaBranchError | None = None) -> None:
        """Report the results of a text and all that share its thought; free their sequences."""
        if isinstance(error, ConstraintError):
            reason, error = "constraint", None
        for ending in (choice, *choice.equals):
            if ending.state is not State.ENDED:
                self._events += ending.break_off(reason)
                ending.error = error
                result, stats = ending.result(reason, error), ending.job.caller.stats
                self.scheduler.records.end(ending, result)
                self._events += ending.told(result=result)
                stats.generated += len(result.tokens)
                self.scheduler.finish(ending)
                stats.speculative.add(ending.stats)
