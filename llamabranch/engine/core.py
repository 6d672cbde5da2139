"""The engine's loop for one set of requests: admit jobs, draft, decode once for all of them, accept."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter, sleep

from ..branch import Branch, Produced
from ..context import Context
from ..context.logits import LogitsRow
from ..errors import CacheFullError, CapacityError, DecodeInterruptedError, LlamaBranchError
from ..native.interrupts import HeldInterrupts
from ..sampling import SamplingParams
from ..sampling.noise import derive_seed
from ..speculative import Draft, Drafter, GrammarDrafter, NullDrafter
from ..speculative.config import SpeculativeConfig
from ..speculative.drafters.base import NO_DRAFT, DraftRequest, DraftState, NullState
from ..speculative.length.auto import draft_length
from ..speculative.pair_profile import PairProfile
from ..speculative.round import Stream
from ..speculative.rules import Rule, choose_rule, rule_name
from .batch import Batch
from .concurrency import Concurrency
from .job import Job, Submission, refusal
from .request import EngineStats, Event, Request
from .scheduler import Scheduler

__all__ = ["EngineCore", "EngineSettings"]

_POLL_S = 0.02  # how often to check whether others have freed a sequence


@dataclass
class EngineSettings:
    """What all requests of an engine have in common; see ``Engine``."""

    target: Context
    drafter: Drafter
    config: SpeculativeConfig
    sampling: SamplingParams
    max_tokens: int | None
    seed: int
    seed_given: bool
    wait_s: float
    drafts: bool
    parallel: int | None = None
    # No drafter was asked for, so grammars draft; ``drafts`` once one has.
    drafts_grammars: bool = False

    def __post_init__(self) -> None:
        self.length = draft_length(self.config)
        self.profile: PairProfile | None = None
        if self.drafts and not isinstance(self.drafter, NullDrafter):
            self.length, self.profile = PairProfile.open(
                self.target, self.drafter, self.config, batched=True
            )
        self.stats = EngineStats()
        # Who is in the batch must not change a text, so this depends on no clock elsewhere.
        capabilities = self.target.capabilities
        chooses = capabilities.batch_invariant and capabilities.can_share and not self.drafts
        self.concurrency = Concurrency() if chooses else None
        self.repeats = self.seed_given
        self._n_draws = 0

    def next_seed(self) -> int:
        """Return the seed, or, if none was given, another one each time: first that one itself."""
        n, self._n_draws = self._n_draws, self._n_draws + 1
        return self.seed if self.repeats or not n else derive_seed(self.seed, n)

    def draft_from_grammars(self) -> None:
        """Draft texts that have a grammar from here on."""
        self.drafter, self.drafts = GrammarDrafter.copying(), True
        self.length, self.profile = PairProfile.open(
            self.target, self.drafter, self.config, batched=True
        )
        self.concurrency = None

    def save_profile(self) -> None:
        """Keep what was learned about drafts for later runs."""
        if self.profile is not None:
            self.profile.save(self.length)


class EngineCore:
    """Requests that share decodes: those of one ``stream``, or those added to the engine.

    ``add`` and ``abort`` may be called from any thread, all else from one at a time.

    Args:
        settings: those of the engine.
        reports_tokens: whether there are events for tokens, besides those for results.
        expected: ids of requests that are not added yet, to which ``abort`` applies as well.
        redraws: where the engine has no given seed: each request draws another text, not all together.

    Attributes:
        n_added: how many requests were added.
        is_abandoned: nobody reads the events any more.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        reports_tokens: bool = True,
        expected: Collection[str] = (),
        redraws: bool = False,
    ) -> None:
        self.settings = settings
        self.n_added = 0
        self.is_abandoned = False
        self._scheduler = Scheduler(settings.target)
        self._scheduler.limit = settings.parallel
        self._reports_tokens = reports_tokens
        self._expected = expected
        self._redraws = redraws
        self._seed = settings.seed if redraws else settings.next_seed()
        self._wait = _SequenceWait(settings.target, settings.wait_s)
        self._added: deque[Submission] = deque()
        self._aborted: deque[Submission] = deque()
        self._aborted_ahead: set[str] = set()  # of those expected
        self._events: list[Event] = []  # still to be returned
        self._failure: LlamaBranchError | None = None  # raised once those are
        self._is_broken_off = False  # an exception has left a step in the middle

    # -- requests ------------------------------------------------------------------------------------

    def add(self, request: Request, name: str, samples: list[int]) -> None:
        """Queue the texts ``samples`` of a request, whose id is ``name``.

        Raises:
            ConfigError, TokenizeError: its prompt or its stop strings are invalid; it is not queued.
        """
        settings = self.settings
        submission = Submission(
            request,
            name,
            self.n_added,
            settings.target.model,
            settings.sampling,
            settings.max_tokens,
            settings.next_seed() if self._redraws else self._seed,
            samples,
            reports_tokens=self._reports_tokens,
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
        for i in samples:
            self._events.append(Event(name, i, result=refusal(request, name, i, error)))

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
        self._aborted.extend(self._scheduler.unfinished() + list(self._added))

    def __contains__(self, name: str) -> bool:
        """Return whether a request of this id is unfinished."""
        return self._find(name) is not None

    def _find(self, name: str) -> Submission | None:
        """Return the unfinished request of this id."""
        waiting = next((s for s in list(self._added) if s.name == name), None)
        return waiting or self._scheduler.find(name)

    def pause(self, name: str) -> None:
        """Do not continue the texts of a request until ``resume``; others may take their cells."""
        if self._scheduler.find(name) is not None:
            self._scheduler.paused.add(name)

    def resume(self, name: str) -> None:
        """Continue the texts of a paused request."""
        self._scheduler.resume(name)

    @property
    def n_waiting(self) -> int:
        """How many requests have a text that has not begun."""
        return len(self._added) + self._scheduler.n_waiting

    @property
    def n_ahead(self) -> int:
        """How many requests wait, or were refused and not yet reported."""
        return self.n_waiting + len(self._events)

    @property
    def has_unfinished(self) -> bool:
        """True if a request has no result yet, or an event has not been returned."""
        return bool(self._added or self._events or self._failure or not self._scheduler.is_idle)

    @property
    def is_stalled(self) -> bool:
        """True if nothing can go on until a paused request is resumed, or another is added."""
        scheduler = self._scheduler
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
        while self._added or not self._scheduler.is_idle:
            self.advance()
            failure, self._failure = self._failure, None
            if failure is not None and not isinstance(failure, DecodeInterruptedError):
                raise failure
        return self._take_events()

    def _take_events(self) -> list[Event]:
        try:
            return self._events
        finally:  # nothing can come between: they are returned, or kept for the next step
            self._events = []

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
                    self._drop_drafts()
                    if held.caught is None:
                        self._failure = error
                self._is_broken_off = False
            except BaseException:
                self._recover()
                raise
            finally:
                self.settings.stats.elapsed_s += perf_counter() - start

    def _recover(self) -> None:
        """Queue all texts again after a step that was broken off; they go on after their last token."""
        ended = {(event.id, event.sample) for event in self._events if event.result is not None}
        for submission in self._scheduler.unfinished():
            for job in list(submission.jobs.values()):
                if (job.name, job.sample) in ended:
                    with suppress(Exception):
                        self._scheduler.finish(job)
        self._scheduler.rebuild()
        self._is_broken_off = False

    def close(self) -> None:
        """Free all sequences; requests without a result get none."""
        with HeldInterrupts():
            self._added.clear()
            self._events.clear()
            self._scheduler.close()
            self.settings.save_profile()

    def _step(self) -> None:
        self._schedule()
        if self._scheduler.active:
            batch = self._fill()
            if batch.tokens:
                self._run(batch)
        if self._scheduler.no_sequence is None:
            self._wait.reset()
        elif not self._wait.poll():
            self._end_waiting(self._scheduler.no_sequence)

    def _schedule(self) -> None:
        """Take what was added and aborted since the last step, and admit what there is room for."""
        scheduler, settings = self._scheduler, self.settings
        while self._added:
            scheduler.add(self._added[0])
            self._added.popleft()
        while self._aborted:
            submission = self._aborted[0]
            if scheduler.find(submission.name) is submission:
                for job in scheduler.end(submission):
                    self._end(job, "cancelled")
            self._aborted.popleft()
        if settings.concurrency is not None:
            scheduler.limit = settings.concurrency.limit or settings.parallel
        if scheduler.n_queued:
            n_shared, n_cached = scheduler.n_shared, scheduler.n_cached
            for job, error in scheduler.admit():
                self._end(job, "capacity" if isinstance(error, CapacityError) else "error", error)
            settings.stats.shared_prompt_tokens += scheduler.n_shared - n_shared
            settings.stats.cached_prompt_tokens += scheduler.n_cached - n_cached

    def _run(self, batch: Batch) -> None:
        """Decode a batch and give each text what it has got."""
        ctx, learned = self.settings.target, self.settings.concurrency
        # No drafter is called under the lock: another thread may generate on the drafter's context and
        # draft on this one, and each would wait for the other's lock.
        try:
            with ctx.lock:  # the logits are valid until the next decode of any thread
                start = perf_counter()
                rows = self._decode(batch)
                verify_s = perf_counter() - start
                outcomes = self._accept(batch, rows, verify_s)
        except CacheFullError as error:
            self._make_room(batch, error)
            return
        try:
            self._conclude(batch, outcomes, verify_s)
        except LlamaBranchError:  # of a drafter that cannot close a state: the others have accepted
            self._recover()
            raise
        if learned is not None:
            learned.note_step(
                batch.n_plans,
                len(batch.parts),
                sum(map(ctx.kv_cache.next_position, set(batch.seqs))),
                perf_counter() - start,
                most=min(ctx.n_seq_max, self.settings.parallel or ctx.n_seq_max),
                waits=self._scheduler.n_queued > 0,
            )

    # -- ends ----------------------------------------------------------------------------------------

    def _end(self, job: Job, reason: str, error: LlamaBranchError | None = None) -> None:
        """Report the result of a text, and free what it holds."""
        self._events += job.break_off()
        result = job.result(reason, error)
        self._events.append(Event(job.name, job.sample, result=result))
        self._scheduler.finish(job)
        settings = self.settings
        settings.stats.speculative.add(job.stats)
        settings.stats.generated_tokens += len(result.tokens)
        if settings.concurrency is not None and error is None:
            settings.concurrency.note_end(result.num_prompt_tokens + len(result.tokens))
        settings.save_profile()

    def _end_waiting(self, error: LlamaBranchError) -> None:
        """End every waiting request with "capacity": others hold all sequences of the context."""
        while (job := self._scheduler.head()) is not None:
            self._end(job, "capacity", error)

    # -- the batch -----------------------------------------------------------------------------------

    def _fill(self) -> Batch:
        """Return the next batch: every stream's pending token and draft, then chunks of prompts."""
        batch = Batch()
        active = self._scheduler.active
        paused = self._scheduler.paused
        running = [job for job in active if job.stream is not None and job.name not in paused]
        prefilling = [job for job in active if job.stream is None]
        ctx = self.settings.target
        room = min(ctx.n_batch, ctx.n_outputs_max) - len(running) - len(prefilling)
        for job, draft in self._make_drafts(running):
            stream = job.stream
            if stream is not None:
                if draft.tokens:
                    keep = min(len(draft.tokens), max(0, room))
                    room -= keep
                    draft.cut(keep)
                batch.add_plan(job, stream.branch, stream.set_draft(draft))
        for job in prefilling:
            left, branch = ctx.n_batch - len(batch.tokens), job.branch
            if left > 0 and branch is not None:
                scores = job.needs_scores
                if scores:
                    left = min(left, 1 + max(0, room))
                tokens = job.to_cache[branch.position :][:left]
                room -= (len(tokens) - 1) * scores
                batch.add_prompt(job, branch, tokens, all_rows=scores)
        return batch

    def _make_drafts(self, running: list[Job]) -> list[tuple[Job, Draft]]:
        drafts_now = self.settings.drafts and not self._scheduler.had_no_room
        self._scheduler.had_no_room = False
        if not drafts_now:
            return [(job, NO_DRAFT) for job in running]
        asked: list[Job] = []
        requests: list[DraftRequest] = []
        plain: list[Job] = []
        for job in running:
            stream = job.stream
            if stream is None:
                continue
            limit = min(job.output.draft_limit, self._room_of(stream.branch))
            tokens = stream.draft_input(limit)
            if tokens is None:
                plain.append(job)
            else:
                limit = min(limit, stream.length.limit)
                asked.append(job)
                requests.append(DraftRequest(stream.state, tokens, stream.length, limit))
        drafts = self.settings.drafter.propose_many(requests)
        self.settings.stats.draft_forward_passes += sum(draft.n_decodes for draft in drafts)
        made = list(zip(asked, drafts, strict=True))
        return made + [(job, NO_DRAFT) for job in plain]

    def _room_of(self, branch: Branch) -> int:
        """Return how many drafted tokens a text has cells for, as far as that depends on it alone."""
        ctx = self.settings.target
        if ctx.capabilities.can_share:
            return 1 << 30
        return max(0, ctx.n_ctx_seq - branch.position - 1)

    def _decode(self, batch: Batch) -> list[LogitsRow]:
        expiring = [
            row
            for job, _, _ in batch.parts
            if job.branch is not None
            for row in job.branch.sequence.expiring_rows()
        ]
        decoder = self.settings.target.decoder
        rows = decoder.decode(batch.tokens, batch.seqs, batch.wants, expiring)
        self.settings.stats.target_forward_passes += 1
        return rows

    def _drop_drafts(self) -> None:
        """Take the streams back to before this step, if they were about to decode."""
        for job in self._scheduler.active:
            if job.stream is not None:
                job.stream.set_draft(NO_DRAFT)
                job.stream.state.observe(job.stream.branch.position)

    def _make_room(self, batch: Batch, error: CacheFullError) -> None:
        """Retry without drafts, then preempt the newest request, then finish the last as "capacity"."""
        scheduler = self._scheduler
        self._drop_drafts()
        if not self.settings.target.capabilities.can_share:  # nobody can make room for another
            most = self.settings.target.n_ctx_seq
            for job, n, _ in batch.parts:
                if job.branch is not None and job.branch.position + n > most:
                    self._end(job, "capacity", error)
        elif batch.n_drafted:
            for job, n, _ in batch.parts:
                if job.stream is not None and n > 1:
                    job.stats.count_stop("no room to verify")
            scheduler.had_no_room = True
        elif scheduler.preempt() is not None:
            self.settings.stats.preemptions += 1
        else:
            self._end(scheduler.active[0], "capacity", error)

    # -- after the decode ----------------------------------------------------------------------------

    def _accept(
        self, batch: Batch, rows: list[LogitsRow], verify_s: float
    ) -> list[list[Produced] | LlamaBranchError]:
        """Apply the logits; return for each part the emitted tokens, or the error that ends its text."""
        at = 0
        outcomes: list[list[Produced] | LlamaBranchError] = []
        for job, n, n_rows in batch.parts:
            its_rows = rows[at : at + n_rows]
            at += n_rows
            try:
                if job.stream is not None:
                    outcomes.append(job.stream.accept(its_rows, verify_s * n / len(batch.tokens)))
                else:
                    self._append_prompt(job, n, its_rows)
                    outcomes.append([])
            except LlamaBranchError as error:
                outcomes.append(error)
        return outcomes

    def _conclude(
        self,
        batch: Batch,
        outcomes: list[list[Produced] | LlamaBranchError],
        verify_s: float,
    ) -> None:
        """Update the draft states, begin texts whose prompt is complete, report the emitted tokens."""
        lengths = [job.stream.length for job, _, _ in batch.parts if job.stream is not None]
        for (job, n, _), outcome in zip(batch.parts, outcomes, strict=True):
            failed = outcome if isinstance(outcome, LlamaBranchError) else None
            emitted = [] if isinstance(outcome, LlamaBranchError) else outcome
            if failed is None:
                try:
                    if job.stream is not None:
                        job.stream.conclude()
                    else:
                        self.settings.stats.prompt_tokens += n
                        emitted = [] if job.n_uncached else self._begin_text(job)
                except LlamaBranchError as error:
                    failed = error
            if emitted:
                self._emit(job, emitted)
            if job.output.finish_reason is not None:
                if not job.n_uncached or job.stream is not None or failed is not None:
                    self._end(job, job.output.finish_reason)
            elif failed is not None:
                self._end(job, "error", failed)
        if self.settings.drafts:
            # The time of a decode that also prefilled prompts is not comparable.
            is_pure = batch.n_plans == len(batch.parts)
            self.settings.length.learn_decode(
                lengths, len(batch.tokens), verify_s if is_pure else math.nan
            )

    def _emit(self, job: Job, emitted: list[Produced]) -> None:
        """Add new tokens to a text, up to its end, and report those that have text to show."""
        for one in emitted:
            if job.output.finish_reason is not None:
                break
            self._events += job.emit(one)
        job.note_token()

    def _append_prompt(self, job: Job, n: int, rows: list[LogitsRow]) -> None:
        """Append ``n`` decoded tokens of ``to_cache`` to the branch.

        ``rows`` are the logits after each of them, after the last one, or none.
        """
        branch = job.branch
        if branch is None:
            raise RuntimeError("a job needs a branch to prefill its prompt")
        start = branch.position
        if job.needs_scores:
            job.score(rows, start)
        row = rows[-1] if rows and n == job.n_uncached else None
        tokens = job.to_cache[start : start + n]
        n_prompt = max(0, job.n_read - start)
        if n_prompt:
            branch.sequence.append_prompt(tokens[:n_prompt], row if n <= n_prompt else None)
        if n > n_prompt:
            branch.sequence.append_unscored(tokens[n_prompt:], row)

    def _begin_text(self, job: Job) -> list[Produced]:
        """Open the stream of a job whose prompt is decoded; return what it emits: one token or none."""
        branch = job.branch
        if branch is None:
            raise RuntimeError("a job needs a branch to generate")
        job.stream = self._open(job, branch)
        if job.pending is not None:  # it was preempted: it continues after its last token
            job.stream.pending = job.pending
            return []
        if job.output.finish_reason is not None:  # max_tokens is 0
            return []
        return [job.stream.begin()]

    def _open(self, job: Job, branch: Branch) -> Stream:
        settings = self.settings
        params = job.request.sampling or settings.sampling
        rule = choose_rule(
            settings.config.rule,
            seed_given=settings.seed_given or params.seed is not None,
            temperature=params.temperature,
        )
        has_grammar = branch.grammar is not None
        if settings.drafts_grammars and not settings.drafts and has_grammar:
            settings.draft_from_grammars()
            self._scheduler.limit = settings.parallel
        wanted = settings.drafts and (has_grammar or not settings.drafts_grammars)
        drafts = wanted and job.output.finish_reason is None
        try:
            state = self._draft_state(job, branch, rule) if drafts else NullState()
        except CapacityError:  # without room for a draft state it decodes plainly
            state = NullState()
        length = settings.length.stream(shares_decode=True)
        top = job.request.top_logprobs or 0
        return Stream(branch, state, length, rule, job.stats, top)

    def _draft_state(self, job: Job, branch: Branch, rule: Rule) -> DraftState:
        """Return a draft state for ``branch``; if its prompt was shared, a fork of the other job's.

        So the draft model, too, decodes a shared prefix only once.
        """
        source, n_shared = job.shared
        usable = source is not None and source.request.grammar == job.request.grammar
        if (
            source is not None
            and usable
            and source.stream is not None
            and source.stream.rule == rule
        ):
            state = source.stream.state.fork(branch)
            state.observe(n_shared)
            return state
        return self.settings.drafter.start(branch, rule_name(rule))


class _SequenceWait:
    """Waits for a sequence that others hold: while they decode, and for ``wait_s`` after that."""

    def __init__(self, ctx: Context, wait_s: float) -> None:
        self._ctx = ctx
        self._wait_s = wait_s
        self._n_idle = 0
        self._n_decodes = -1

    def reset(self) -> None:
        """Start counting again: there was a sequence."""
        self._n_idle = 0

    def poll(self) -> bool:
        """Sleep briefly; return False once ``wait_s`` has passed without a decode on the context.

        Polls are counted, not seconds, so that a suspended machine does not use up the time.
        """
        n_decodes = self._ctx.decoder.n_decodes
        if n_decodes != self._n_decodes:
            self._n_decodes = n_decodes
            self._n_idle = 0
        if self._n_idle * _POLL_S >= self._wait_s:
            return False
        self._n_idle += 1
        sleep(_POLL_S)
        return True
