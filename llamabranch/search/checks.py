"""The arguments that several searches have, checked before a search takes or decodes anything."""

from __future__ import annotations

from ..arguments import bounded, function, instance, whole
from ..branch import Branch
from ..errors import ConfigError
from ..generation.drafter import checked_drafter
from ..generation.loop import CommonNoise
from ..speculative import Drafter
from .sequences import OnStep

__all__ = ["MOST_STEPS", "MOST_TEXTS", "check_start", "common_noise", "first_seed", "token_limit"]

MOST_TEXTS = 100_000  # at a time; each takes a few kilobytes, as in an engine's request
MOST_STEPS = 1_000_000  # iterations
_MOST_TOKENS = 2**31 - 1


def check_start(branch: Branch, on_step: OnStep | None, drafter: Drafter | None = None) -> None:
    """Raise unless a search may start from ``branch``.

    Raises:
        ConfigError: no branch, no function, or no drafter. BranchStateError, ClosedError: the branch
            cannot be used. VocabularyMismatchError: the drafter cannot draft for its model.
    """
    instance("branch", branch, Branch, "a search needs one that has read the prompt")
    if on_step is not None:
        function("on_step", on_step)
    branch.sequence.check_usable()
    checked_drafter(drafter, branch.ctx.model)


def first_seed(branch: Branch, seed: int | None) -> int:
    """Return the seed of a search: ``seed``, or that of the branch."""
    return branch.seed if seed is None else whole("seed", seed)


def common_noise(entropy: float, seed: int, drafter: Drafter | None) -> CommonNoise | None:
    """Return where all texts draw with ``seed``; None = nowhere.

    Raises:
        ConfigError: no entropy of at least 0, or one with a drafter.
    """
    if not bounded("entropy", entropy, 0, 1e9):
        return None
    if drafter is not None:
        raise ConfigError("give either entropy or a drafter: equal texts are not drafted for")
    return CommonNoise(entropy, seed)


def token_limit(max_tokens: int | None, low: int = 0) -> int | None:
    """Return ``max_tokens`` as int, None = without a limit."""
    return None if max_tokens is None else whole("max_tokens", max_tokens, low, _MOST_TOKENS)
