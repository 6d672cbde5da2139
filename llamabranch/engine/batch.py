"""What one decode of the engine computes."""

from __future__ import annotations

from ..branch import Branch
from .job import Job

__all__ = ["Batch"]


class Batch:
    """Parts in order, each a job and its number of tokens: plans of streams, pieces of prompts."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.seqs: list[int] = []
        self.wants: list[bool] = []
        self.parts: list[tuple[Job, int]] = []
        self.n_plans = 0
        self.n_drafted = 0

    def add_plan(self, job: Job, branch: Branch, tokens: list[int]) -> None:
        """Add a stream's pending token and draft: every row is wanted."""
        self._add(job, branch, tokens, [True] * len(tokens))
        self.n_plans += 1
        self.n_drafted += len(tokens) - 1

    def add_reading(self, job: Job, branch: Branch, tokens: list[int]) -> None:
        """Add a piece of a prompt: the row after its very end is wanted."""
        last = len(tokens) == job.n_unread
        self._add(job, branch, tokens, [False] * (len(tokens) - 1) + [last])

    def _add(self, job: Job, branch: Branch, tokens: list[int], wants: list[bool]) -> None:
        self.tokens += tokens
        self.seqs += [branch.seq_id] * len(tokens)
        self.wants += wants
        self.parts.append((job, len(tokens)))
