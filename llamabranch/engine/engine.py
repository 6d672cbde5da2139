"""The engine's loop: admit jobs, draft, decode once for all of them, accept."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import closing
from time import perf_counter, sleep

from ..arguments import whole
from ..branch import Branch, Produced
from ..branch.branch import random_seed
from ..context import Context
from ..context.logits import LogitsRow
from ..errors import (
    CacheFullError,
    CapacityError,
    ConfigError,
    LlamaBranchError,
)
from ..sampling import SamplingParams
from ..speculative import Draft, Drafter, NullDrafter, SpeculativeConfig
from ..speculative.drafters.base import NO_DRAFT, DraftRequest, DraftState, NullState
from ..speculative.length.auto import draft_length
from ..speculative.pair_profile import PairProfile
from ..speculative.round import Stream
from ..speculative.rules import choose_rule
from .batch import Batch
from .job import Job, jobs_of, refusal
from .request import EngineStats, Event, Request, Result
from .scheduler import Scheduler

__all__ = ["Engine"]

_POLL_S = 0.02  # how often to check whether others have freed a sequence


class Engine:
    """Continues any number of prompts over the sequences of one context.

    Every token carries its own position and sequence, so ragged prompts and ragged acceptance need no
    padding. The sequence of a finished text is reused at once; prompts are prefilled in chunks that
    share decodes with the running texts.

    Args:
        target: the context that generates; at most its n_seq_max texts run at a time.
        drafter: proposes the drafts; None = plain decoding. To draft for every text, a draft model's
            context needs as many sequences as the target.
        config: how much to draft; "auto" drafts as many tokens as raise the throughput of the batch.
        sampling: the settings of requests that give none.
        max_tokens: the limit of requests that give none.
        seed: the seed from which those of requests without one are derived; None = a random one.
        wait_s: how long to wait, in seconds, when others hold every sequence of the context and none of
            the engine's own requests is running; then the waiting requests end with "capacity". Only
            time in which nothing is decoded on the context counts; 0 = do not wait.

    Raises:
        ConfigError: a drafter of token trees, which cannot share a decode; an invalid limit, seed or
            ``wait_s``.
        VocabularyMismatchError: the drafter cannot draft for the target's vocabulary.

    Attributes:
        stats: totals over all requests so far.
        seed: the seed in use.
    """

    def __init__(
        self,
        target: Context,
        drafter: Drafter | None = None,
        config: SpeculativeConfig | None = None,
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = 128,
        seed: int | None = None,
        wait_s: float = 2.0,
    ) -> None:
        if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or not wait_s >= 0:
            raise ConfigError(f"wait_s must be a number of seconds of at least 0, not {wait_s!r}")
        self.target = target
        self.drafter: Drafter = drafter or NullDrafter()
        if self.drafter.width > 1:
            raise ConfigError("token trees cannot share a decode: use a drafter of width 1")
        self.drafter.check(target.model)
        self.config = config or SpeculativeConfig()
        self.stats = EngineStats()
        self.seed = random_seed() if seed is None else whole("seed", seed)
        self._seed_given = seed is not None
        self._sampling = sampling or SamplingParams()
        self._max_tokens = None if max_tokens is None else whole("max_tokens", max_tokens, 0)
        self._wait_s = wait_s
        self._drafts = drafter is not None and target.capabilities.can_truncate
        self._length = draft_length(self.config)
        self._profile: PairProfile | None = None
        if self._drafts and not isinstance(self.drafter, NullDrafter):
            self._length, self._profile = PairProfile.open(
                target, self.drafter, self.config, batched=True
            )
        # Every call of ``stream`` has a scheduler of its own, with its cancellations and whether it had
        # room to draft. A scheduler that is garbage-collected removes itself from the list; these list
        # operations are atomic, so ``cancel`` needs no lock.
        self._schedulers: list[weakref.ref[Scheduler]] = []

    # -- use ---------------------------------------------------------------------------------------

    def generate(
        self,
        requests: Iterable[Request | str],
        *,
        on_event: Callable[[Event], None] | None = None,
        skip: Collection[tuple[str, int]] = (),
    ) -> list[Result]:
        """Generate for all prompts; return one result for each text, in the order of the requests.

        Args:
            requests: requests, or prompts as text.
            on_event: called with every event (a token, or the end of a text) as it happens.
            skip: texts not to generate, as (id, sample): those that exist already.

        A request that fails has its error in its result; the others finish.

        Raises:
            ConfigError: two requests with the same id, or no list of requests.
        """
        order: dict[tuple[str, int], int] = {}
        results: list[Result] = []
        listed = _listed(requests)
        for number, request in enumerate(listed):
            name, n = self._identity(request, number)
            order.update({(name, sample): len(order) + sample for sample in range(n)})
        scheduler, stream = self._begin(listed, skip)
        scheduler.reports_tokens = on_event is not None
        with closing(stream) as events:  # also if ``on_event`` raises
            for event in events:
                if on_event is not None:
                    on_event(event)
                if event.result is not None:
                    results.append(event.result)
        return sorted(results, key=lambda r: order.get((r.id, r.sample), len(order)))

    def stream(
        self, requests: Iterable[Request | str], *, skip: Collection[tuple[str, int]] = ()
    ) -> Generator[Event, None, None]:
        """Yield every event (a token, or the end of a text) as it happens; ``skip`` as in ``generate``.

        All sequences and cells are freed when the iterator ends or is closed.

        Raises:
            ConfigError: two requests with the same id, or no list of requests.
        """
        return self._begin(requests, skip)[1]

    def _begin(
        self, requests: Iterable[Request | str], skip: Collection[tuple[str, int]] = ()
    ) -> tuple[Scheduler, Generator[Event, None, None]]:
        listed = _listed(requests)
        skip = _skipped(skip)
        seen: set[str] = set()
        for number, request in enumerate(listed):
            name, _ = self._identity(request, number)
            if name in seen:
                raise ConfigError(f"two requests have the id {name!r}")
            seen.add(name)
        scheduler = Scheduler(self.target)
        self._schedulers.append(weakref.ref(scheduler, self._schedulers.remove))
        return scheduler, self._run(scheduler, listed, skip)

    async def astream(self, requests: Iterable[Request | str]) -> AsyncIterator[Event]:
        """Yield the events of ``stream`` without blocking the event loop: decoding runs in a thread."""
        scheduler, events = self._begin(requests)
        step: asyncio.Future[Event | None] | None = None
        try:
            while True:
                step = asyncio.ensure_future(asyncio.to_thread(next, events, None))
                event = await asyncio.shield(step)
                if event is None:
                    return
                yield event
        finally:
            scheduler.is_abandoned = True
            if step is not None:  # the thread of a cancelled task may be in the middle of a step
                await asyncio.gather(step, return_exceptions=True)
            await asyncio.to_thread(events.close)

    def cancel(self, request_id: str) -> None:
        """End a request at its next step; its result holds what it has generated. From any thread.

        It applies to every open ``stream`` that has an unfinished request of this id; ids are unique
        only within one stream. All other streams ignore it.
        """
        for scheduler in [ref() for ref in list(self._schedulers)]:
            if scheduler is not None:
                scheduler.cancelled.add(request_id)

    def explain(self) -> str:
        """Return a description of how it drafts, with the measurements behind it."""
        if not self._drafts:
            if isinstance(self.drafter, NullDrafter):
                return "plain decoding: there is no drafter"
            return (
                "plain decoding: this model's memory cannot remove the rejected tokens of a draft"
            )
        return self._length.explain()

    # -- requests ----------------------------------------------------------------------------------

    @staticmethod
    def _identity(request: Request | str, number: int) -> tuple[str, int]:
        if isinstance(request, str):
            return str(number), 1
        if not isinstance(request, Request):
            raise ConfigError(
                f"a request is a Request or text, not {request!r:.40}",
                hint="give token ids as Request([1, 2, 3]), bytes as text: prompt.decode()",
            )
        return (str(number) if request.id is None else request.id), request.n

    # -- the loop ----------------------------------------------------------------------------------

    def _run(
        self,
        scheduler: Scheduler,
        requests: list[Request | str],
        skip: frozenset[tuple[str, int]],
    ) -> Generator[Event, None, None]:
        start = perf_counter()
        try:
            for number, given in enumerate(requests):
                request = Request(given) if isinstance(given, str) else given
                name, _ = self._identity(request, number)
                wanted = [i for i in range(request.n) if (name, i) not in skip]
                try:
                    jobs = jobs_of(
                        request,
                        name,
                        self.target.model,
                        self._sampling,
                        self._max_tokens,
                        self.seed,
                        logprobs=scheduler.reports_tokens,
                    )
                    scheduler.add(jobs[i] for i in wanted)
                except LlamaBranchError as error:
                    for i in wanted:
                        yield self._refuse(request, name, i, error)
            wait = _SequenceWait(self.target, self._wait_s)
            while not (scheduler.is_idle or scheduler.is_abandoned):
                events: list[Event] = []
                failure: LlamaBranchError | None = None
                try:
                    for event in self._step(scheduler):
                        events.append(event)
                except LlamaBranchError as error:
                    failure = error  # raised after the events of this step have been yielded
                yield from events
                if failure is not None:
                    raise failure
                if scheduler.no_sequence is None:
                    wait.reset()
                elif not wait.poll():
                    yield from self._end_waiting(scheduler, scheduler.no_sequence)
        finally:
            for job in [*scheduler.active, *scheduler.waiting]:
                job.release()
            self.stats.elapsed_s += perf_counter() - start
            if self._profile is not None:
                self._profile.save(self._length)

    @staticmethod
    def _refuse(request: Request, name: str, sample: int, error: LlamaBranchError) -> Event:
        return Event(name, sample, result=refusal(request, name, sample, error))

    def _end(
        self,
        scheduler: Scheduler,
        job: Job,
        reason: str,
        error: LlamaBranchError | None = None,
    ) -> Iterator[Event]:
        scheduler.remove(job)
        yield from self._finish(scheduler, job, reason, error)

    def _finish(
        self,
        scheduler: Scheduler,
        job: Job,
        reason: str,
        error: LlamaBranchError | None = None,
    ) -> Iterator[Event]:
        """Yield the last events of a job that the scheduler no longer has."""
        held = job.output.break_off()
        if held is not None and scheduler.reports_tokens:
            yield Event(job.name, job.sample, emitted=held)
        result = job.result(reason, error)
        self.stats.speculative.add(job.stats)
        self.stats.generated_tokens += len(result.tokens)
        yield Event(job.name, job.sample, result=result)

    def _end_waiting(self, scheduler: Scheduler, error: LlamaBranchError) -> Iterator[Event]:
        """End every waiting request with "capacity": others hold all sequences of the context."""
        for job in scheduler.take_waiting():
            yield from self._finish(scheduler, job, "capacity", error)

    def _step(self, scheduler: Scheduler) -> Iterator[Event]:
        if scheduler.cancelled:
            for job in scheduler.take_cancelled():
                yield from self._finish(scheduler, job, "cancelled")
        if scheduler.waiting:
            shared = scheduler.n_shared
            for job, error in scheduler.admit():
                reason = "capacity" if isinstance(error, CapacityError) else "error"
                yield from self._finish(scheduler, job, reason, error)
            self.stats.shared_prompt_tokens += scheduler.n_shared - shared
        if not scheduler.active:
            return
        batch = self._fill(scheduler)
        # No drafter is called under the lock: another thread may generate on the drafter's context and
        # draft on this one, and each would wait for the other's lock.
        try:
            with self.target.lock:  # the logits are valid until the next decode of any thread
                start = perf_counter()
                rows = self._decode(batch)
                verify_s = perf_counter() - start
                outcomes = self._accept(batch, rows, verify_s)
        except CacheFullError as error:
            yield from self._make_room(scheduler, batch, error)
            return
        yield from self._conclude(scheduler, batch, outcomes, verify_s)

    def _fill(self, scheduler: Scheduler) -> Batch:
        """Return the next batch: every stream's pending token and draft, then chunks of prompts."""
        batch = Batch()
        running = [job for job in scheduler.active if job.stream is not None]
        prefilling = [job for job in scheduler.active if job.stream is None]
        ctx = self.target
        room = min(ctx.n_batch, ctx.n_outputs_max) - len(running) - len(prefilling)
        for job, draft in self._make_drafts(scheduler, running, batch):
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
                batch.add_prompt(job, branch, job.to_cache[branch.position :][:left])
        return batch

    def _make_drafts(
        self, scheduler: Scheduler, running: list[Job], batch: Batch
    ) -> list[tuple[Job, Draft]]:
        drafts_now = self._drafts and not scheduler.had_no_room
        scheduler.had_no_room = False
        if not drafts_now:
            return [(job, NO_DRAFT) for job in running]
        asked: list[Job] = []
        requests: list[DraftRequest] = []
        plain: list[Job] = []
        for job in running:
            stream = job.stream
            if stream is None:
                continue
            limit = job.output.draft_limit
            tokens = stream.draft_input(limit)
            if tokens is None:
                plain.append(job)
            else:
                limit = min(limit, stream.length.limit)
                asked.append(job)
                requests.append(DraftRequest(stream.state, tokens, stream.length, limit))
        drafts = self.drafter.propose_many(requests)
        self.stats.draft_forward_passes += sum(draft.n_decodes for draft in drafts)
        made = list(zip(asked, drafts, strict=True))
        return made + [(job, NO_DRAFT) for job in plain]

    def _decode(self, batch: Batch) -> list[LogitsRow]:
        expiring = [
            row
            for job, _ in batch.parts
            if job.branch is not None
            for row in job.branch.sequence.expiring_rows()
        ]
        rows = self.target.decoder.decode(batch.tokens, batch.seqs, batch.wants, expiring)
        self.stats.target_forward_passes += 1
        return rows

    def _make_room(
        self, scheduler: Scheduler, batch: Batch, error: CacheFullError
    ) -> Iterator[Event]:
        """Retry without drafts, then preempt the newest request, then finish the last as "capacity"."""
        for job in scheduler.active:
            if job.stream is not None:
                job.stream.set_draft(NO_DRAFT)
                job.stream.state.observe(job.stream.branch.position)
        if batch.n_drafted:
            for job, n in batch.parts:
                if job.stream is not None and n > 1:
                    job.stats.count_stop("no room to verify")
            scheduler.had_no_room = True
        elif scheduler.preempt() is not None:
            self.stats.preemptions += 1
        else:
            yield from self._end(scheduler, scheduler.active[0], "capacity", error)

    # -- after the decode --------------------------------------------------------------------------

    def _accept(
        self, batch: Batch, rows: list[LogitsRow], verify_s: float
    ) -> list[list[Produced] | LlamaBranchError]:
        """Apply the logits; return for each part the emitted tokens, or the error that ends its text."""
        at = 0
        outcomes: list[list[Produced] | LlamaBranchError] = []
        for job, n in batch.parts:
            n_rows = n if job.stream is not None else int(n == job.n_uncached)
            its_rows = rows[at : at + n_rows]
            at += n_rows
            try:
                if job.stream is not None:
                    outcomes.append(job.stream.accept(its_rows, verify_s * n / len(batch.tokens)))
                else:
                    self._append_prompt(job, n, its_rows[0] if its_rows else None)
                    outcomes.append([])
            except LlamaBranchError as error:
                outcomes.append(error)
        return outcomes

    def _conclude(
        self,
        scheduler: Scheduler,
        batch: Batch,
        outcomes: list[list[Produced] | LlamaBranchError],
        verify_s: float,
    ) -> Iterator[Event]:
        """Update the draft states, begin texts whose prompt is complete, yield the emitted tokens."""
        lengths = [job.stream.length for job, _ in batch.parts if job.stream is not None]
        for (job, n), outcome in zip(batch.parts, outcomes, strict=True):
            failed = outcome if isinstance(outcome, LlamaBranchError) else None
            emitted = [] if isinstance(outcome, LlamaBranchError) else outcome
            if failed is None:
                try:
                    if job.stream is not None:
                        job.stream.conclude()
                    else:
                        self.stats.prompt_tokens += n
                        emitted = [] if job.n_uncached else self._begin_text(job)
                except LlamaBranchError as error:
                    failed = error
            shown = job.add(emitted)
            if scheduler.reports_tokens:
                for one in shown:
                    yield Event(job.name, job.sample, emitted=one)
            if job.output.finish_reason is not None:
                yield from self._end(scheduler, job, job.output.finish_reason)
            elif failed is not None:
                yield from self._end(scheduler, job, "error", failed)
        if self._drafts:
            # The time of a decode that also prefilled prompts is not comparable.
            is_pure = batch.n_plans == len(batch.parts)
            self._length.learn_decode(lengths, len(batch.tokens), verify_s if is_pure else math.nan)

    def _append_prompt(self, job: Job, n: int, row: LogitsRow | None) -> None:
        """Append ``n`` decoded tokens of ``to_cache`` to the branch; ``row``: the logits after them."""
        branch = job.branch
        if branch is None:
            raise RuntimeError("a job needs a branch to prefill its prompt")
        start = branch.position
        tokens = job.to_cache[start : start + n]
        n_prompt = max(0, len(job.prompt) - start)
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
        params = job.request.sampling or self._sampling
        rule = choose_rule(
            self.config.rule,
            seed_given=self._seed_given or params.seed is not None,
            temperature=params.temperature,
        )
        try:
            state = self._draft_state(job, branch, rule) if self._drafts else NullState()
        except CapacityError:  # without room for a draft state it decodes plainly
            state = NullState()
        return Stream(branch, state, self._length.stream(shares_decode=True), rule, job.stats)

    def _draft_state(self, job: Job, branch: Branch, rule: str) -> DraftState:
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
        return self.drafter.start(branch, rule)


def _listed(requests: Iterable[Request | str]) -> list[Request | str]:
    """Return the requests as a list; a single prompt is refused, since it would be split into letters."""
    one = (str, bytes, bytearray, memoryview, Request)
    if isinstance(requests, (*one, Mapping)) or not isinstance(requests, Iterable):
        raise ConfigError(
            f"requests are a list of prompts or Requests, not {requests!r:.40}",
            hint="put a single one into a list: [prompt]" if isinstance(requests, one) else None,
        )
    return list(requests)


def _skipped(skip: Collection[tuple[str, int]]) -> frozenset[tuple[str, int]]:
    """Return ``skip`` as a set, after checking that it consists of pairs (id, sample)."""
    pairs = list(skip) if isinstance(skip, Iterable) else [skip]
    for pair in pairs:
        match pair:
            case (str(), int()):
                continue
        raise ConfigError(
            f"skip is a collection of pairs (id, sample), not of {pair!r:.40}",
            hint='for example [("0", 0), ("0", 1)]',
        )
    return frozenset(pairs)


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
