"""Decides which jobs hold a sequence: admission, shared prefixes, parking and preemption.

The scheduler never decodes.
"""

from __future__ import annotations

import heapq
from contextlib import suppress

from ..context import Context
from ..context.prefix_cache import MIN_SHARED
from ..errors import CacheFullError, GrammarError, LlamaBranchError, SequencesExhaustedError
from ..generation.text import Text
from ..model.text import n_common
from ..request.request import EngineStats, Event
from .job import Job, Key, State, Submission

__all__ = ["Scheduler"]


class Scheduler:
    """Keeps the queue and the jobs that hold a sequence.

    Jobs are admitted in the order of their keys while a sequence is free and the cache has room for their
    prompt. If a prompt begins like another job's prompt, or like a text in the prefix cache, the
    job shares those cells instead of decoding the tokens again. If the first job in the queue does
    not fit, the jobs behind it wait too.

    A parked job keeps its sequence until other jobs need it. A job that has lost its sequence decodes
    its tokens again before it continues.

    Args:
        ctx: the context that has the sequences.
        limit: how many jobs may be active at a time; None = as many as there are sequences.
        stats: the engine's totals, for the prompt tokens that are shared or cached.

    Attributes:
        active: the jobs that read their prompt or generate.
        idle: the parked jobs that still hold a sequence, least recently used first.
        paused: ids of requests whose texts are not continued for now.
        no_sequence: the error if no job is active because the context's other users hold all
            sequences; otherwise None.
    """

    def __init__(self, ctx: Context, limit: int | None, stats: EngineStats) -> None:
        self._ctx = ctx
        self._limit = limit
        self._stats = stats
        self.active: list[Job] = []
        self.idle: list[Job] = []
        self.paused: set[str] = set()
        self.no_sequence: SequencesExhaustedError | None = None
        self._queue: list[tuple[Key, Submission | Job]] = []  # a heap; keys are unique
        self._known: dict[str, Submission] = {}  # requests with unfinished texts, by id

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
        """Return the next job, which stays in the queue; None if nothing waits."""
        while self._queue:
            _, first = self._queue[0]
            if isinstance(first, Submission):
                if not first.samples:  # it was cancelled, or all its texts have begun
                    heapq.heappop(self._queue)
                    continue
                job = first.next_job()
                while job.shares_thought and first.samples:
                    job.equals.append(first.next_job())
                if not first.samples:
                    heapq.heappop(self._queue)
                else:
                    heapq.heapreplace(self._queue, (first.key, first))
                heapq.heappush(self._queue, (job.key, job))
                continue
            if first.state is not State.WAITING:
                heapq.heappop(self._queue)
            elif first.name in self.paused:
                heapq.heappop(self._queue)
                first.state = State.PARKED
            else:
                return first
        return None

    def requeue(self, job: Job) -> None:
        """Put a text that has begun back into the queue."""
        job.state = State.WAITING
        heapq.heappush(self._queue, (job.key, job))

    def pause(self, name: str) -> None:
        """Do not continue the texts of a request until ``resume``; other jobs may take their cells."""
        if name in self._known:
            self.paused.add(name)

    def resume(self, name: str) -> None:
        """Continue the texts of a paused request."""
        self.paused.discard(name)
        if (submission := self._known.get(name)) is not None:
            for job in submission.jobs.values():
                if job.state is State.PARKED:
                    self.requeue(job)

    def park(self, job: Job) -> None:
        """Do not continue an active text for now; it keeps its sequence while there is room."""
        job.state = State.PARKED
        self.active.remove(job)
        self.idle.append(job)

    def add_job(self, job: Job) -> None:
        """Queue a text that a search has made itself."""
        self._known[job.name] = job.submission
        job.submission.jobs[job.sample] = job
        heapq.heappush(self._queue, (job.key, job))

    def jobs_of(self, submission: Submission) -> list[Job]:
        """Return the unfinished jobs of a request; create those that do not exist yet."""
        while submission.samples:
            submission.next_job()
        return list(submission.jobs.values())

    def finish(self, job: Job) -> None:
        """Remove a job that has ended, and free its sequence and draft states."""
        submission = job.submission
        submission.jobs.pop(job.sample, None)
        if not (submission.jobs or submission.samples):
            self._known.pop(submission.name, None)
            self.paused.discard(submission.name)
        for jobs in (self.active, self.idle):
            if job in jobs:
                jobs.remove(job)
        job.state = State.ENDED
        job.release()

    def rebuild(self) -> None:
        """Queue all unfinished texts again: a step was interrupted at an unknown point."""
        queue: list[tuple[Key, Submission | Job]] = []
        jobs = [job for s in self._known.values() for job in s.jobs.values()]
        for job in {*jobs, *self.active, *self.idle}:
            # A user's drafter may fail; the error that interrupted the step is raised instead.
            with suppress(Exception):
                self._preempt(job)
        self.active.clear()
        self.idle.clear()
        for submission in self._known.values():
            if submission.samples and submission.samples[0] in submission.jobs:
                submission.samples.popleft()  # its job had just been created
        for name in [n for n, s in self._known.items() if not (s.jobs or s.samples)]:
            del self._known[name]
        for job in jobs:
            job.equals = []
            if job.state is not State.PARKED:
                job.state = State.WAITING
            if job.state is State.WAITING:
                queue.append((job.key, job))
        queue += [(s.key, s) for s in self._known.values() if s.samples]
        self._queue = queue
        heapq.heapify(self._queue)

    @property
    def n_waiting(self) -> int:
        """How many requests have a text that has never had a sequence. Callable from any thread."""
        return sum(
            bool(s.samples) or any(job.n_cached is None for job in list(s.jobs.values()))
            for s in self.unfinished()
        )

    @property
    def is_stalled(self) -> bool:
        """True if all unfinished requests are paused."""
        return not self._queue and not self.active

    def stuck(self) -> list[Job]:
        """Return the jobs that a step should have continued: the active ones, or else a waiting one."""
        if self.active:
            return self.active[:]
        first = self.head()
        jobs = (
            [job for s in self.unfinished() for job in s.jobs.values()]
            if first is None
            else [first]
        )
        resting = State.PARKED, State.ENDED
        return [job for job in jobs if job.state not in resting and job.name not in self.paused]

    def close(self) -> None:
        """Free all sequences and forget all requests."""
        self._known.clear()
        self._queue.clear()
        try:
            for jobs in (self.active, self.idle):
                while jobs:
                    jobs.pop().release()
        finally:  # free the other sequences too if a drafter raises an error
            if self.active or self.idle:
                self.close()

    @property
    def is_idle(self) -> bool:
        """True if nothing waits or runs."""
        return not self._known

    # -- sequences -----------------------------------------------------------------------------------

    def admit(self) -> list[Job]:
        """Give sequences to waiting jobs; return the refused ones, each with its ``error``.

        If others hold every sequence of the context, the jobs stay queued. If no job is active
        either, ``no_sequence`` is the error.
        """
        refused: list[Job] = []
        previous, self.no_sequence = self.no_sequence, None
        for active in self.active[:] if self.paused else ():
            if active.name in self.paused and active.state is State.RUNNING:
                self.park(active)
        while (job := self.head()) is not None:
            if not self._admit(job, previous):
                break
            heapq.heappop(self._queue)
            if job.error is not None:
                refused.append(job)
        return refused

    def begin_answers(self, job: Job) -> list[Event]:
        """Let a text and all that share its thought begin their answers, each by itself.

        Return the events that report their thoughts.
        """
        equals, job.equals = job.equals, []
        events = [event for text in (job, *equals) for event in text.answer()]
        for text in equals:
            heapq.heappush(self._queue, (text.key, text))
        return events

    def _activate(self, job: Job, text: Text, n_cached: int, shared: Job | None) -> None:
        """Give a job a sequence that holds its first ``n_cached`` tokens.

        ``shared`` is the job with which it shares the cells of these tokens, if any.
        """
        job.shared = (shared, n_cached if shared is not None else 0)
        if shared is not None or job.submission.beginning is not None:
            self._stats.shared_prompt_tokens += n_cached
        job.admit(text, n_cached)
        self.active.append(job)

    def _admit(self, job: Job, previous: SequencesExhaustedError | None) -> bool:
        """Give the first waiting job a sequence or an error; return False if it must wait.

        ``previous`` is the value of ``no_sequence`` after the last ``admit``.
        """
        n_tokens, job.error = job.n_to_cache, None
        if n_tokens > self._ctx.n_ctx_seq:
            job.error = CacheFullError.of_prompt(n_tokens, self._ctx.n_ctx_seq)
            return True
        if self._limit is not None and len(self.active) >= self._limit:
            return False
        if job.sequence is not None:  # it was parked
            self.idle.remove(job)
            self.active.append(job)
            job.state = State.RUNNING
            return True
        source, n_cached = self._best_prefix(job)
        if source is not None and source.is_reading and source.text.n_cached < n_cached:
            return False  # the prefix it will share is still being decoded
        if source in self.idle and not self._free_sequence(source):
            self._free_idle()  # only the source itself is left
            source, n_cached = None, 0
        if not self._make_room(max(1, n_tokens + 1 - n_cached), source, is_first=previous is None):
            self.no_sequence = None if self.active else previous
            return False
        try:
            text, n_cached = self._new_text(job, source, n_cached)
        except SequencesExhaustedError as error:
            self.no_sequence = None if self.active else error
            return False
        except LlamaBranchError as error:  # its grammar or sampling settings are invalid
            job.error = error
            return True
        self._activate(job, text, n_cached, source)
        return True

    def _new_text(self, job: Job, source: Job | None, n: int) -> tuple[Text, int]:
        """Return a text for a job, and how many of the job's tokens it already holds."""
        beginning = job.submission.beginning
        if beginning is not None:
            with self._ctx.lock:
                text = Text(
                    self._ctx, None, beginning.text.sampler.clone(), job.seed, beginning.text
                )
                text.keep(n)
                text.hang(None)
                return text, n
        cacheable = [] if source is not None else _unscored(job)
        text = Text(self._ctx, None, job.new_sampler(), job.seed, beginning=cacheable)
        if source is not None:
            text.share_prefix(source.text, n)
            return text, n
        try:
            n = text.take_cached(cacheable, job.n_read)
        except GrammarError:  # the grammar forbids the text that the request continues
            text.release()
            raise
        n = min(n, len(job.prompt))
        self._stats.cached_prompt_tokens += n
        return text, n

    def _best_prefix(self, job: Job) -> tuple[Job | None, int]:
        """Return the job that has the longest prefix in common with this one, and its length.

        The job is None if the prefix cache has a longer prefix, and in a search, where all texts
        continue one branch.
        """
        if job.submission.beginning is not None:
            return None, len(job.prompt)
        if job.wants_rows:
            return None, 0
        memory = self._ctx.kv_cache
        # The job decodes its last token itself, because it needs the logits after it, and also
        # the tokens generated before a preemption, because its grammar must accept them.
        tokens = job.to_cache[:-1]
        wanted = tokens[: job.n_read]
        best: tuple[Job | None, int] = (None, 0)
        if len(wanted) < MIN_SHARED:
            return best
        for other in (*self.active, *self.idle):
            if other.sequence is None:
                continue
            n = memory.usable(other.sequence.seq_id, n_common(other.cells, wanted))
            if n >= MIN_SHARED and n > best[1]:
                best = (other, n)
                if n == len(wanted):
                    break
        prefixes = self._ctx.prefix_cache
        n_kept = 0 if prefixes is None else prefixes.n_common(tokens)
        if n_kept == best[1] and memory.forks_copy:
            # Take the cached prefix: its cells may be evicted; a running job's cells would be
            # copied.
            return None, 0
        return (None, 0) if n_kept > best[1] else best

    # -- room ----------------------------------------------------------------------------------------

    def _make_room(self, n: int, source: Job | None, *, is_first: bool) -> bool:
        """Make room for ``n`` tokens of a new job, and for the next tokens of the active jobs.

        ``source`` is the job whose first tokens it shares. ``is_first`` is False if the last
        attempt found no free sequence.
        """
        if not self._free_sequence(source) and (self.active or not is_first):
            return False
        n_needed = sum(other.n_uncached + 1 for other in self.active)
        while self.active and not self._ctx.kv_cache.has_room(n, n_needed):
            if not self._free_idle(source):
                return False
        return True

    def _free_sequence(self, source: Job | None = None) -> bool:
        """If no sequence is free, free one of an idle job except ``source``; return whether one is."""
        return self._ctx.n_seq_free > 0 or self._free_idle(source)

    def _free_idle(self, source: Job | None = None) -> bool:
        """Free the sequence of an idle job other than ``source``; return False without such a job."""
        oldest = next((job for job in self.idle if job is not source), None)
        if oldest is None:
            return False
        self.idle.remove(oldest)
        self._preempt(oldest)
        return True

    def preempt(self, at_least: int = 1) -> bool:
        """Free the sequence of an idle job, or else of the newest active job, which then waits.

        Return False if there is no idle job, and no active job but the ``at_least`` that must stay.
        """
        if self._free_idle():
            return True
        if len(self.active) <= at_least:
            return False
        job = max(self.active, key=lambda active: active.key)
        self.active.remove(job)
        self._preempt(job)
        self.requeue(job)
        return True

    def _preempt(self, job: Job) -> None:
        job.num_preemptions += job.sequence is not None
        job.release()


def _unscored(job: Job) -> list[int]:
    """Return the first tokens of a job, as far as they may come from the prefix cache."""
    tokens = job.to_cache[:-1]
    if job.wants_rows:  # the token before the first scored one has to be decoded
        tokens = tokens[: max(0, min(job.request.logprobs_from, len(job.prompt)) - 1)]
    return tokens
