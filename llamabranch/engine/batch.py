"""The tokens of one decode of the engine, and which job each of them belongs to."""

from __future__ import annotations

from typing import NamedTuple

from ..branch import Branch
from .job import Job

__all__ = ["Batch", "Part"]


class Part(NamedTuple):
    """A job's tokens of a batch, and how many rows of logits they get."""

    job: Job
    n_tokens: int
    n_rows: int


class Batch:
    """The input of one decode: the pending tokens and drafts of streams, and chunks of prompts.

    Attributes:
        tokens, seqs, wants: for each token its id, its sequence, and whether its logits are needed.
        parts: the jobs in the order of their tokens.
        n_plans: how many of the parts are streams, not chunks of prompts.
        n_drafted: how many of the tokens are drafted.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.seqs: list[int] = []
        self.wants: list[bool] = []
        self.parts: list[Part] = []
        self.n_plans = 0
        self.n_drafted = 0

    def add_plan(self, job: Job, branch: Branch, tokens: list[int]) -> None:
        """Add a stream's pending token and draft: the logits after each of them are needed."""
        self._add(job, branch, tokens, [True] * len(tokens))
        self.n_plans += 1
        self.n_drafted += len(tokens) - 1

    def add_prompt(self, job: Job, branch: Branch, tokens: list[int], *, all_rows: bool) -> None:
        """Add a chunk of a prompt: the logits after the whole prompt are needed, or after each token."""
        is_last = len(tokens) == job.n_uncached
        self._add(job, branch, tokens, [all_rows] * (len(tokens) - 1) + [all_rows or is_last])

    def _add(self, job: Job, branch: Branch, tokens: list[int], wants: list[bool]) -> None:
        self.tokens += tokens
        self.seqs += [branch.seq_id] * len(tokens)
        self.wants += wants
        self.parts.append(Part(job, len(tokens), sum(wants)))
