"""Log-probabilities of the next token as searches use them: float64, after bias, grammar, penalties."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..context.logits import LogitsRow
from ..errors import ConfigError
from ..generation.text import Text
from ..native import core
from .beams import best_tokens

__all__ = ["BestScores", "Scored"]


class Scored(NamedTuple):
    """The best tokens that may follow a sequence.

    Attributes:
        best: tokens and their scores, best first; of equals, the smaller id first.
        logprobs: the model's own log-probabilities of these tokens, nats.
    """

    best: list[tuple[int, float]]
    logprobs: dict[int, float]


class BestScores:
    """Finds the ``k`` best tokens that may follow a sequence.

    A score is a log-probability after logit bias, grammar and penalties, not normalised again.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._compiled: core.RowSampler | None = None
        self._n_compiled = 0  # tokens that it keeps

    def __call__(self, sequence: Text) -> Scored:
        """Return the best tokens, at most ``k``: fewer only where a grammar forbids the others.

        Raises:
            ConfigError: the logits contain NaN.
        """
        row, sampler = sequence.logits_row(), sequence.sampler
        if not math.isfinite(top := float(row.array[row.best])):
            raise ConfigError(f"no scores: the largest logit is {top}")
        if not sampler.is_stateless:
            every = row.log_probs()
            best = best_tokens(*sampler.processed(every), self._k)
            return Scored(best, {token: float(every[token]) for token, _ in best})
        # Scores are ordered like logits, except for tokens with a bias.
        bias = sampler.params.logit_bias
        tokens = self._largest(row, self._k + len(bias))
        if tokens is None:
            ids = np.arange(len(row.array), dtype=np.int32)
            every = row.array.astype(np.float64)
            tokens = [token for token, _ in best_tokens(ids, every, self._k + len(bias))]
        logprobs = {token: row.logprob(token) for token in (*tokens, *bias)}
        scores = logprobs | {t: logprobs[t] + float(np.float32(x)) for t, x in bias.items()}
        ranked = sorted((-score, token) for token, score in scores.items() if score > -math.inf)
        return Scored([(token, -minus) for minus, token in ranked[: self._k]], logprobs)

    def _largest(self, row: LogitsRow, n: int) -> list[int] | None:
        """Return the ``n`` tokens with the largest logits; None if the compiled core cannot find them."""
        n_vocab = len(row.array)
        if not core.available or n >= n_vocab:
            return None
        if self._compiled is None or self._n_compiled != n:
            self._n_compiled = n
            self._compiled = core.RowSampler(
                n_vocab, temperature=1.0, top_k=n, top_p=1.0, min_p=0.0, bias={}
            )
        largest = self._compiled.candidates(row.address)
        return None if largest is None else largest[0].tolist()
