"""Log-probabilities of the next token as searches use them: float64, after bias, grammar, penalties."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..branch.sequence import TokenSequence
from ..errors import ConfigError

__all__ = ["log_softmax", "next_scores"]

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


def log_softmax(logits: npt.NDArray[np.floating]) -> Floats:
    """Return log softmax(logits), float64 (V,).

    Raises:
        ConfigError: the logits contain NaN.
    """
    x = logits.astype(np.float64)
    top = float(x.max())
    if not math.isfinite(top):
        raise ConfigError(f"no scores: the largest logit is {top}")
    x -= top
    x -= math.log(np.exp(x).sum())
    return x


def next_scores(sequence: TokenSequence) -> tuple[Ids, Floats, Floats]:
    """Return the tokens that may follow, their scores (K,), and all log-probabilities (V,).

    The scores are the log-probabilities after logit bias, grammar and penalties, not normalised again.
    """
    logprobs = log_softmax(sequence.logits_row().array)
    ids, scores = sequence.sampler.processed(logprobs)
    return ids, scores, logprobs
