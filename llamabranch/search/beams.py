"""How beam search selects, without a model: which continuations are kept, and which are finished.

It works as in Hugging Face transformers 5 (``generate(num_beams=...)``), with two differences that do
not change the result with a usual vocabulary. Scores are float64. Beams that do not exist yet, or whose
continuations are all forbidden, are left out instead of being scored with -1e9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


class Candidate(NamedTuple):
    """A running beam continued by one token; ``score`` is the sum of all its scores, nats."""

    score: float
    beam: int
    token: int


class Finished(NamedTuple):
    """A finished beam; ``final`` is its score with the length penalty."""

    final: float
    key: object


def best_tokens(ids: Ids, scores: Floats, k: int) -> list[tuple[int, float]]:
    """Return the ``k`` best of ``ids`` (K,) by ``scores`` (K,), best first; equal scores by id."""
    if len(scores) > k:
        best = np.flatnonzero(scores >= np.partition(scores, len(scores) - k)[len(scores) - k])
        ids, scores = ids[best], scores[best]
    order = np.lexsort((ids, -scores))[:k]
    return [(int(ids[i]), float(scores[i])) for i in order]


class Beams:
    """The beams of a search: the scores of running beams, and the best finished ones.

    Args:
        width: the number of beams.
        n_eog: how many EOG tokens the vocabulary has.
        max_tokens: the maximum number of tokens of a text, the EOG token included.
        length_penalty, early_stopping: as for `beam_search`.

    Attributes:
        scores: the scores of the running beams, best first.
        finished: the finished beams, best first, at most ``width``.
        is_done: True once the search is over.
    """

    def __init__(
        self,
        width: int,
        n_eog: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ) -> None:
        self.width = width
        self.n_kept = max(2, 1 + n_eog) * width
        self.scores: list[float] = [0.0]
        self.finished: list[Finished] = []
        self.is_done = False
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._n_tokens = 0

    def choose(self, continuations: Sequence[Sequence[tuple[int, float]]]) -> list[Candidate]:
        """Return the best continuations of all beams, best first; equal scores by beam, then by token.

        ``continuations[i]`` has the best tokens of the i-th running beam with their scores: at least
        ``n_kept``, or all if there are fewer.
        """
        ranked = [
            (-(self.scores[beam] + score), beam, token)
            for beam, tokens in enumerate(continuations)
            for token, score in tokens
        ]
        ranked.sort()
        return [Candidate(-minus, beam, token) for minus, beam, token in ranked[: self.n_kept]]

    def advance(
        self,
        chosen: Sequence[Candidate],
        stops: Sequence[bool],
        keys: Sequence[object],
    ) -> list[int]:
        """Finish the chosen continuations that stop, keep the best others running.

        For each candidate, ``stops`` tells whether its text ends, and ``keys`` has its key in
        ``finished``. Return the indices of the candidates that continue, best first, at most ``width``.
        """
        self._n_tokens += 1
        length = self._n_tokens**self._length_penalty
        for i, candidate in enumerate(chosen[: self.width]):
            if stops[i]:
                self.finished.append(Finished(candidate.score / length, keys[i]))
        self.finished.sort(key=lambda f: -f.final)  # stable: equal scores keep their order
        del self.finished[self.width :]
        running = [i for i, stopped in enumerate(stops) if not stopped][: self.width]
        self.scores = [chosen[i].score for i in running]
        full = len(self.finished) == self.width
        self.is_done = (
            not running or (full and self._early_stopping is True) or not self._may_improve(full)
        )
        return running

    def _may_improve(self, full: bool) -> bool:
        """Return whether the best running beam may still beat the worst finished one."""
        if not full:
            return True
        length = self._n_tokens
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            length = self._max_tokens
        best = self.scores[0] if self.scores else -math.inf
        return bool(best / length**self._length_penalty > self.finished[-1].final)
