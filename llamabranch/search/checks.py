"""Checks of the arguments of several searches, before a search allocates or decodes anything."""

from __future__ import annotations

from ..arguments import function, instance, whole
from ..branch import Branch
from ..generation.drafter import checked_drafter
from ..sampling import SamplingParams
from ..speculative import Drafter
from .tree import OnStep

__all__ = ["MOST_STEPS", "MOST_TEXTS", "check_start", "first_seed", "token_limit"]

MOST_TEXTS = 100_000  # of one search; each takes a few kilobytes, as in an engine's request
MOST_STEPS = 1_000_000  # iterations
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


def token_limit(max_tokens: int | None, low: int = 0) -> int | None:
    """Return ``max_tokens`` as int, None = without a limit."""
    return None if max_tokens is None else whole("max_tokens", max_tokens, low, _MOST_TOKENS)
