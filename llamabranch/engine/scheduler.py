"""Which jobs hold a sequence: admission, prefix sharing, preemption. It decodes nothing."""

from __future__ import annotations

import heapq
from contextlib import suppress

from ..branch import Branch
from ..context import Context
from ..context.prefix_cache import MIN_SHARED, n_common
from ..errors import CacheFullError, GrammarError, LlamaBranchError, SequencesExhaustedError
from .job import Job, Key, Submission
from .request import EngineStats, Event

__all__ = ["Scheduler"]


class Scheduler:
    """Keeps the queue and the jobs that hold a sequence.

    Jobs are admitted in the order of their keys while a sequence is free and the cache has room for their
    prompt. A job whose prompt begins like that of an active job shares those cells instead of decoding
    them again; so does one whose prompt begins like a text in the prefix cache.
    Only the head of the queue is looked at in a step.

    Args:
        ctx: whose sequences they are.
        limit: how many jobs may be active at a time; None for as many as there are sequences.
        stats: counts the prompt tokens that are not decoded.

    Attributes:
        active: the jobs with a sequence: those prefilling their prompt and those generating.
        paused: ids of requests whose texts are not continued for now.
        no_sequence: why no job could be admitted, while no job is active; None if one could.
    """

    def __init__(self, ctx: Context, limit: int | None, stats: EngineStats) -> None:
        self._ctx = ctx
        self._limit = limit
        self._stats = stats
        self.active: list[Job] = []
        self.paused: set[str] = set()
        self.no_sequence: SequencesExhaustedError | None = None
        self._queue: list[tuple[Key, Submission | Job]] = []  # a heap; keys are unique
        self._set_aside: dict[str, list[Job]] = {}  # paused jobs without a sequence
        self._known: dict[str, Submission] = {}  # those with unfinished texts, by id

    # -- the queue -----------------------------------------------------------------------------------

    def add(self, submission: Submission) -> None:
        """Put the texts of a request into the queue; a second call does nothing."""
        if self._known.get(submission.name) is not submission:
            self._known[submission.name] = submission
            heapq.heappush(self._queue, (submission.key, submission))

    def find(self, name: str) -> Submission | None:
        """Return the request of this id while it has unfinished texts, else None."""
        return self._known.get(name)

    def unfinished(self) -> list[Submission]:
        """Return the unfinished requests in the order in which they were added."""
        return list(self._known.values())

    def head(self) -> Job | None:
        """Return the job that is next, without taking it; None if nothing waits."""
        while self._queue:
            _, first = self._queue[0]
            if isinstance(first, Submission):
                if not first.samples:  # it was cancelled, or all its texts have begun
                    heapq.heappop(self._queue)
                    continue
                job = first.next_job()
                if not first.samples:
                    heapq.heappop(self._queue)
                else:
                    heapq.heapreplace(self._queue, (first.key, first))
                self.requeue(job)
                continue
            if first.has_ended:
                heapq.heappop(self._queue)
            elif first.name in self.paused:
                heapq.heappop(self._queue)
                self._set_aside.setdefault(first.name, []).append(first)
            else:
                return first
        return None

    def requeue(self, job: Job) -> None:
        """Put a text that has begun, and holds no sequence, into the queue."""
        heapq.heappush(self._queue, (job.key, job))

    def pause(self, name: str) -> None:
        """Do not continue the texts of a request until ``resume``; others may take their cells."""
        if name in self._known:
            self.paused.add(name)

    def resume(self, name: str) -> None:
        """Continue the texts of a paused request."""
        self.paused.discard(name)
        for job in self._set_aside.pop(name, ()):
            self.requeue(job)

    def jobs_of(self, submission: Submission) -> list[Job]:
        """Return the jobs of all texts of a request that have no result, made where there was none."""
        while submission.samples:
            submission.next_job()
        return list(submission.jobs.values())

    def finish(self, job: Job) -> None:
        """Remove a job that has ended, and free what it holds."""
        submission = job.submission
        submission.jobs.pop(job.sample, None)
        if not (submission.jobs or submission.samples):
            self._known.pop(submission.name, None)
            self._set_aside.pop(submission.name, None)
            self.paused.discard(submission.name)
        if job in self.active:
            self.active.remove(job)
        job.end()

    def rebuild(self) -> None:
        """Queue all unfinished texts again: a step was broken off, in the middle of anything."""
        for submission in self._known.values():
            for job in submission.jobs.values():
                if job.branch is not None:
                    # Of a user's drafter; what broke the step off is raised.
                    with suppress(Exception):
                        job.preempt()
                job.equals = []
            if submission.samples and submission.samples[0] in submission.jobs:
                submission.samples.popleft()  # it had just begun
        self.active.clear()
        self._set_aside.clear()
        for name in [n for n, s in self._known.items() if not (s.jobs or s.samples)]:
            del self._known[name]
        begun = [job for s in self._known.values() for job in s.jobs.values()]
        ahead = [s for s in self._known.values() if s.samples]
        self._queue = [*((job.key, job) for job in begun), *((s.key, s) for s in ahead)]
        heapq.heapify(self._queue)

    @property
    def n_waiting(self) -> int:
        """How many requests have a text that has never had a sequence. From any thread."""
        return sum(
            bool(s.samples) or any(job.n_cached is None for job in list(s.jobs.values()))
            for s in self.unfinished()
        )

    @property
    def is_stalled(self) -> bool:
        """True if all that is unfinished is paused."""
        return not self._queue and all(
            job.name in self.paused and job.running is not None for job in self.active
        )

    def close(self) -> None:
        """Free all sequences and forget all requests."""
        self._known.clear()
        self._queue.clear()
        self._set_aside.clear()
        self._release_active()

    def _release_active(self) -> None:
        try:
            while self.active:
                self.active.pop().preempt()
        finally:  # the others too, if a drafter fails to close its state
            if self.active:
                self._release_active()

    @property
    def is_idle(self) -> bool:
        """True if nothing waits or runs."""
        return not self._known

    # -- sequences -----------------------------------------------------------------------------------

    def admit(self) -> list[Job]:
        """Give sequences to waiting jobs; remove and return those that cannot be served: see ``error``.

        If others hold every sequence of the context, the jobs stay queued; if no job is active then,
        ``no_sequence`` holds the error.
        """
        refused: list[Job] = []
        before, self.no_sequence = self.no_sequence, None
        while (job := self.head()) is not None:
            if self._joins(job):
                heapq.heappop(self._queue)
                continue
            if not self._admit(job, before):
                break
            if job.error is not None:
                heapq.heappop(self._queue)
                refused.append(job)
        return refused

    def _joins(self, job: Job) -> bool:
        """Let a text that has not begun wait beside one of its request that reads the same prompt.

        Not where its tokens need more than a row of logits, unless the thought before them is shared.
        """
        if job.n_cached is not None or job.request.n == 1:
            return False
        if not job.shares_thought and not job.may_be_equal:
            return False
        for other in self.active:
            is_begin = other.is_reading and not other.output.tokens
            may_join = other.shares_thought or other.can_draw_others
            if other.submission is job.submission and is_begin and may_join:
                other.equals.append(job)
                n = len(job.prompt) - 1 if self._ctx.kv_cache.can_draft else 0
                job.note_admitted(n)
                self._stats.shared_prompt_tokens += n
                return True
        return False

    def answer(self, job: Job) -> list[Event]:
        """Let a text, and those equal to it, go on to their answers; each by itself if need be.

        Returns the events that report their thoughts.
        """
        equals = job.equals
        events = [event for each in (job, *equals) for event in each.answer()]
        if job.branch is None or not (job.may_be_equal and job.can_draw_others):
            job.equals = []
            for each in equals:
                self.requeue(each)
        return events

    def part(self, job: Job, other: Job) -> bool:
        """Give a text that was equal to ``other`` a sequence of its own; False if it waits for one.

        The sequence holds all tokens but the last one. Nothing is decoded.
        """
        if self._ctx.n_seq_free == 0 or len(self.active) == self._limit:
            self.requeue(job)
            return False
        source, n = other.held, job.n_to_cache
        with self._ctx.lock:
            sampler = source.sequence.sampler.clone()
            try:
                branch = Branch(self._ctx, sampler, job.sampling.seed or 0, source)
            except SequencesExhaustedError:  # others took it meanwhile
                self.requeue(job)
                return False
            branch.rewind(n)
            branch.detach()
        job.shared = (other, n)
        job.admit(branch, n)
        self.active.append(job)
        return True

    def _admit(self, job: Job, before: SequencesExhaustedError | None) -> bool:
        """Give the head of the queue a sequence, make room, or note its error; False: it has to wait."""
        n_tokens, job.error = job.n_to_cache, None
        if n_tokens > self._ctx.n_ctx_seq:
            job.error = CacheFullError.of_prompt(n_tokens, self._ctx.n_ctx_seq)
            return True
        is_limited = self._limit is not None and len(self.active) >= self._limit
        if is_limited or ((self.active or before) and self._ctx.n_seq_free == 0):
            self.no_sequence = None if self.active else before
            return self._set_paused_aside()
        source, n_cached = self._best_prefix(job)
        shared = None if source is None else source.branch
        if shared is not None and shared.sequence.n_cached < n_cached:
            return False  # the prefix it will share is still being decoded
        n_needed = sum(other.n_uncached + 1 for other in self.active)  # by the active jobs, next
        if self.active and not self._ctx.kv_cache.has_room(n_tokens + 1 - n_cached, n_needed):
            return self._set_paused_aside()
        wanted = [] if shared is not None else _not_scored(job)
        try:
            branch = Branch.create(self._ctx, job.sampling, job.grammar, beginning=wanted)
        except SequencesExhaustedError as error:
            self.no_sequence = None if self.active else error
            return False
        except LlamaBranchError as error:  # its grammar or sampling settings are invalid
            job.error = error
            return True
        if shared is not None:
            branch.sequence.share_prefix(shared.sequence, n_cached)
            job.shared = (source, n_cached)
            self._stats.shared_prompt_tokens += n_cached
        else:
            try:
                n_cached = branch.sequence.take_cached(wanted, job.n_read)
            except GrammarError as error:  # forbids what the request continues
                branch.prune()
                job.error = error
                return True
            n_cached = min(n_cached, len(job.prompt))
            self._stats.cached_prompt_tokens += n_cached
        heapq.heappop(self._queue)
        job.admit(branch, n_cached)
        self.active.append(job)
        return True

    def _best_prefix(self, job: Job) -> tuple[Job | None, int]:
        """Return the active job that shares the longest prefix with the prompt, and how many tokens.

        None if the prefix cache has a longer one.
        """
        if job.wants_rows:
            return None, 0
        # The last token must be decoded: its logits are needed. Tokens that a job generated before it
        # was preempted are decoded by the job itself, since they advance its grammar.
        tokens = job.to_cache[:-1]
        wanted = tokens[: job.n_read]
        best: tuple[Job | None, int] = (None, 0)
        memory = self._ctx.kv_cache
        for other in self.active:
            if other.branch is None:
                continue
            n = memory.usable(other.branch.seq_id, n_common(other.to_cache, wanted))
            if n >= MIN_SHARED and n > best[1]:
                best = (other, n)
        prefixes = self._ctx.prefix_cache
        n_kept = 0 if prefixes is None else prefixes.n_common(tokens)
        if n_kept == best[1] and memory.forks_copy:
            # Cells of a cached prefix may be evicted, those of a running one are copied.
            return None, 0
        return (None, 0) if n_kept > best[1] else best

    def _set_paused_aside(self) -> bool:
        """Take the sequence of a paused job, if there is one; it waits until it is resumed."""
        for job in self.active:
            if job.name in self.paused:
                self._give_up(job)
                return True
        return False

    def preempt(self) -> Job | None:
        """Free the newest job's sequence and queue that job again; None if no other job is active."""
        if len(self.active) < 2:
            return None
        job = max(self.active, key=lambda j: (j.name in self.paused, j.key))
        self._give_up(job)
        return job

    def _give_up(self, job: Job) -> None:
        self.active.remove(job)
        job.preempt()
        self.requeue(job)


def _not_scored(job: Job) -> list[int]:
    """Return the tokens of a job that the prefix cache may give it."""
    tokens = job.to_cache[:-1]
    if job.wants_rows:  # the token before the first scored one has to be decoded
        tokens = tokens[: max(0, min(job.request.logprobs_from, len(job.prompt)) - 1)]
    return tokens
