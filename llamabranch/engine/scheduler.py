"""Who runs: admission, shared prefixes, preemption. Decides; decodes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..branch import Branch
from ..context import Context
from ..context.cell_ledger import n_common
from ..errors import CacheFullError, LlamaBranchError, SequencesExhaustedError
from .job import Job

__all__ = ["Scheduler"]

_WORTH_SHARING = 8  # tokens: below that a prefix is faster read than looked for


class Scheduler:
    """Keeps the queue and the jobs that hold a sequence.

    Jobs are admitted in order while a sequence is free and the cache has room for their prompt. A job
    whose prompt begins like that of one already in takes those cells instead of computing them.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.waiting: deque[Job] = deque()
        self.active: list[Job] = []
        self._arrivals = 0
        self.n_shared = 0
        self.cancelled: set[str] = set()  # ids; written by any thread
        self.is_cramped = False  # the last decode found no room with its drafts
        self.is_abandoned = False  # nobody listens any more
        self.no_sequence: SequencesExhaustedError | None = None  # why nobody could be admitted

    def add(self, jobs: Iterable[Job]) -> None:
        """Queue jobs behind those that wait."""
        self.waiting.extend(jobs)

    def admit(self) -> list[tuple[Job, LlamaBranchError]]:
        """Give sequences to waiting jobs; return those that cannot be served, with the reason.

        Where others hold the sequences, the jobs go on waiting; ``no_sequence`` says so if none is in.
        """
        refused: list[tuple[Job, LlamaBranchError]] = []
        before, self.no_sequence = self.no_sequence, None
        for job in list(self.waiting):
            n_read = len(job.to_read)
            if n_read > self._ctx.n_ctx:
                refused.append((job, self._too_long(n_read)))
                continue
            need = n_read + 1  # and its next token, which only the last one of all can do without
            if (self.active or before) and self._ctx.n_seq_free == 0:
                self.no_sequence = None if self.active else before
                break
            source, n_shared = self._best_prefix(job)
            shared = None if source is None else source.branch
            if shared is not None and shared.position < n_shared:
                break  # what it will share is still being read
            free = self._ctx.usage().cells_free - sum(other.n_unread + 1 for other in self.active)
            if self.active and need - n_shared > free:
                break
            try:
                branch = Branch.create(self._ctx, job.sampling, job.request.grammar)
            except SequencesExhaustedError as error:
                self.no_sequence = None if self.active else error
                break
            except LlamaBranchError as error:  # its grammar or its settings
                refused.append((job, error))
                continue
            self.waiting.remove(job)
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
        """Return the active job whose prompt begins most like the job's, and how far."""
        if not self._ctx.capabilities.can_truncate:
            return None, 0
        # The last token must be decoded: its logits are needed. Words a job said before it was
        # preempted are read by itself: they count for its grammar.
        wanted = job.to_read[:-1][: len(job.prompt)]
        best: tuple[Job | None, int] = (None, 0)
        for other in self.active:
            if other.branch is None:
                continue
            n = n_common(other.to_read, wanted)
            if n >= _WORTH_SHARING and n > best[1]:
                best = (other, n)
        return best

    def preempt(self) -> Job | None:
        """Free the newest job's sequence and queue it first; None if there is nobody to give way."""
        if len(self.active) < 2:
            return None
        job = max(self.active, key=lambda j: (j.arrival, j.sample))
        self.active.remove(job)
        job.release()
        job.n_preempted += 1
        self.waiting.appendleft(job)
        return job

    def remove(self, job: Job) -> None:
        """Take a job out and free what it holds."""
        if job in self.active:
            self.active.remove(job)
        else:
            self.waiting.remove(job)
        job.release()

    @property
    def is_idle(self) -> bool:
        """True if nothing waits or runs."""
        return not self.waiting and not self.active
