"""Checks of the arguments that all searches share."""

from __future__ import annotations

from ..arguments import instance, whole
from ..branch import Branch
from ..errors import SequencesExhaustedError
from ..sampling import SamplingParams

MOST_TEXTS = 100_000  # in one search; each takes a few kilobytes, as in an engine's request
_MOST_TOKENS = 2**31 - 1


def check_start(branch: Branch, n_sequences: int = 1) -> None:
    """Raise an error unless a branch has logits and ``n_sequences`` more sequences are free.

    Raises:
        ConfigError: it is not a branch. BranchStateError, ClosedError: it is pruned or empty, or its
            context is closed. SequencesExhaustedError: too few sequences are free.
    """
    ctx = instance("branch", branch, Branch, "a search needs one that has read the prompt").ctx
    with ctx.lock:
        branch.sequence.logits_row()
        n_free = ctx.n_seq_free
    if n_free < n_sequences:
        raise SequencesExhaustedError(
            f"this search needs {n_sequences} sequences besides the prompt's; "
            f"{n_free} of {ctx.n_seq_max} are free",
            hint="prune branches, search for fewer texts, or raise n_seq_max of the context",
        )


def first_seed(branch: Branch, seed: int | None) -> int:
    """Return the seed of a search: ``seed``, or else the branch's."""
    return SamplingParams(seed=seed).drawn_seed(branch.seed)


def token_limit(max_tokens: int | None) -> int | None:
    """Return ``max_tokens`` as an int; None = no limit."""
    return None if max_tokens is None else whole("max_tokens", max_tokens, 0, _MOST_TOKENS)
