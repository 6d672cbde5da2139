"""Which jobs hold a sequence: admission, prefix sharing, preemption. It decodes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..branch import Branch
from ..context import Context
from ..context.cell_ledger import n_common
from ..errors import CacheFullError, LlamaBranchError, SequencesExhaustedError
from .job import Job

__all__ = ["Scheduler"]

_MIN_SHARED = 8  # tokens; a shorter prefix is decoded faster than it is shared


class Scheduler:
    """Keeps the queue and the jobs that hold a sequence.

    Jobs are admitted in order while a sequence is free and the cache has room for their prompt. A job
    whose prompt begins like that of an active job shares those cells instead of decoding them again.

    Attributes:
        waiting: the jobs without a sequence, in the order in which they will be admitted.
        active: the jobs with a sequence: those prefilling their prompt and those generating.
        n_shared: prompt tokens so far that were shared instead of decoded.
        cancelled: ids of requests to cancel at the next step; written by any thread.
        reports_tokens: whether somebody reads the events of tokens.
        had_no_room: the cache had no room for the last decode with its drafts; the next has none.
        is_abandoned: nobody consumes the events any more; the run ends after the current step.
        no_sequence: why no job could be admitted, while no job is active; None if one could.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.waiting: deque[Job] = deque()
        self.active: list[Job] = []
        self._arrivals = 0
        self.n_shared = 0
        self.cancelled: set[str] = set()
        self.reports_tokens = True
        self.had_no_room = False
        self.is_abandoned = False
        self.no_sequence: SequencesExhaustedError | None = None

    def add(self, jobs: Iterable[Job]) -> None:
        """Append jobs to the queue."""
        self.waiting.extend(jobs)

    def admit(self) -> list[tuple[Job, LlamaBranchError]]:
        """Give sequences to waiting jobs; remove and return those that cannot be served, with the reason.

        If others hold every sequence of the context, the jobs stay queued; if no job is active then,
        ``no_sequence`` holds the error.
        """
        refused: list[tuple[Job, LlamaBranchError]] = []
        before, self.no_sequence = self.no_sequence, None
        while self.waiting:  # only its head is looked at: the cost does not depend on its length
            job = self.waiting[0]
            n_tokens = job.n_to_cache
            if n_tokens > self._ctx.n_ctx:
                refused.append((self.waiting.popleft(), self._too_long(n_tokens)))
                continue
            need = n_tokens + 1  # its next token needs a cell too, unless the job runs alone
            if (self.active or before) and self._ctx.n_seq_free == 0:
                self.no_sequence = None if self.active else before
                break
            source, n_shared = self._best_prefix(job)
            shared = None if source is None else source.branch
            if shared is not None and shared.position < n_shared:
                break  # the prefix it will share is still being decoded
            free = self._ctx.usage().cells_free - sum(other.n_uncached + 1 for other in self.active)
            if self.active and need - n_shared > free:
                break
            try:
                branch = Branch.create(self._ctx, job.sampling, job.request.grammar)
            except SequencesExhaustedError as error:
                self.no_sequence = None if self.active else error
                break
            except LlamaBranchError as error:  # its grammar or sampling settings are invalid
                refused.append((self.waiting.popleft(), error))
                continue
            self.waiting.popleft()
            job.branch = branch
            if shared is not None:
                branch.sequence.share_prefix(shared.sequence, n_shared)
                job.shared = (source, n_shared)
                self.n_shared += n_shared
            if job.arrival == 0:
                self._arrivals += 1
                job.arrival = self._arrivals
            self.active.append(job)
        return refused

    def _too_long(self, need: int) -> CacheFullError:
        return CacheFullError(
            f"the prompt needs {need} cells, the context has {self._ctx.n_ctx}",
            hint="shorten the prompt, or open the context with a larger n_ctx",
        )

    def _best_prefix(self, job: Job) -> tuple[Job | None, int]:
        """Return the active job that shares the longest prefix with the prompt, and how many tokens."""
        if not self._ctx.capabilities.can_truncate:
            return None, 0
        # The last token must be decoded: its logits are needed. Tokens that a job generated before it
        # was preempted are decoded by the job itself, since they advance its grammar.
        wanted = job.to_cache[:-1][: len(job.prompt)]
        best: tuple[Job | None, int] = (None, 0)
        for other in self.active:
            if other.branch is None:
                continue
            n = n_common(other.to_cache, wanted)
            if n >= _MIN_SHARED and n > best[1]:
                best = (other, n)
        return best

    def preempt(self) -> Job | None:
        """Free the newest job's sequence and queue that job first; None if no other job is active."""
        if len(self.active) < 2:
            return None
        job = max(self.active, key=lambda j: (j.arrival, j.sample))
        self.active.remove(job)
        job.release()
        job.n_preempted += 1
        self.waiting.appendleft(job)
        return job

    def remove(self, job: Job) -> None:
        """Remove an active job and free what it holds."""
        self.active.remove(job)
        job.release()

    def take_waiting(self) -> list[Job]:
        """Remove all waiting jobs and return them."""
        jobs = list(self.waiting)
        self.waiting.clear()
        return jobs

    def take_cancelled(self) -> list[Job]:
        """Remove the jobs of the cancelled requests, free what they hold, and return them."""
        names = self.cancelled.copy()
        self.cancelled -= names  # another thread may have added one meanwhile
        jobs = [job for job in self.active if job.name in names]
        for job in jobs:
            self.remove(job)
        jobs += [job for job in self.waiting if job.name in names]
        self.waiting = deque(job for job in self.waiting if job.name not in names)
        return jobs

    @property
    def is_idle(self) -> bool:
        """True if nothing waits or runs."""
        return not self.waiting and not self.active
