"""Shared by all searches: checked arguments, the cost so far, and early ends by ``on_step``."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from ..arguments import function, instance, whole
from ..branch import Branch
from ..errors import DecodeInterruptedError, SequencesExhaustedError
from ..generation.drafter import checked_drafter
from ..sampling import SamplingParams
from ..speculative import Drafter
from .result import SearchStats

__all__ = ["MOST_TEXTS", "OnStep", "Watch", "check_start", "first_seed", "token_limit"]

OnStep = Callable[[SearchStats], bool | None]

MOST_TEXTS = 100_000  # of one search; each takes a few kilobytes, as in an engine's request
_MOST_TOKENS = 2**31 - 1


def check_start(branch: Branch, on_step: OnStep | None, drafter: Drafter | None = None) -> None:
    """Raise unless a search may start from ``branch``.

    Raises:
        ConfigError: an argument is not a branch, a function or a drafter. BranchStateError, ClosedError:
            the branch cannot be used. VocabularyMismatchError: the drafter cannot draft for its model.
    """
    instance("branch", branch, Branch, "a search needs one that has read the prompt")
    if on_step is not None:
        function("on_step", on_step)
    branch.sequence.check_usable()
    checked_drafter(drafter, branch.ctx.model)


def first_seed(branch: Branch, seed: int | None) -> int:
    """Return the seed of a search: ``seed``, or else the branch's."""
    return SamplingParams(seed=seed).drawn_seed(branch.seed)


def token_limit(max_tokens: int | None) -> int | None:
    """Return ``max_tokens`` as int, None = without a limit."""
    return None if max_tokens is None else whole("max_tokens", max_tokens, 0, _MOST_TOKENS)


class Watch:
    """The cost of one search, and its ``on_step``. The branch does not change meanwhile.

    Args:
        branch, on_step: of the search.
        n_sequences: how many sequences the search needs beside that of the branch.

    Raises:
        BranchStateError: the branch is pruned or empty. SequencesExhaustedError: too few are free.

    Attributes:
        stats: the cost so far; ``is_cancelled``: whether ``on_step`` has ended the search.
    """

    def __init__(self, branch: Branch, on_step: OnStep | None, n_sequences: int = 1) -> None:
        self.stats = SearchStats()
        self.is_cancelled = False
        self._on_step = on_step
        self._start = perf_counter()
        ctx = branch.ctx
        with ctx.lock:
            branch.sequence.logits_row()
            n_free = ctx.n_seq_free
        if n_free < n_sequences:
            raise SequencesExhaustedError(
                f"this search needs {n_sequences} sequences beside that of the prompt; "
                f"{n_free} of {ctx.n_seq_max} are free",
                hint="prune branches, search for fewer texts, or raise n_seq_max of the context",
            )

    def report(self) -> bool:
        """Report the cost so far; return whether the search should end."""
        self.stats.elapsed_s = perf_counter() - self._start
        if self._on_step is not None and self._on_step(self.stats):
            self.is_cancelled = True
        return self.is_cancelled

    def was_interrupted(self, error: DecodeInterruptedError) -> None:
        """After an interrupted decode, note whether ``on_step`` ends the search; if not, raise."""
        if not self.report():
            raise error
