"""One token's logits."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..native import core
from ..sampling.noise import DRAW

__all__ = ["LogitsRow", "TokenScore"]

Logits = npt.NDArray[np.float32]

_FLOOR = np.float32(-1e4)  # exp of it is 0
_NOTHING = np.empty(0, dtype=np.float32)
_UNKNOWN = math.nan  # compared by identity: a measured value may be NaN too


class TokenScore(NamedTuple):
    """How a model rates a given token.

    Attributes:
        token: its id.
        logprob: its log-probability, nats, under the model's own distribution.
        rank: 1 + how many tokens are more probable.
        entropy: of that distribution, nats.
        alternatives: the requested number of most probable tokens: (token, log-probability), best first.
    """

    token: int
    logprob: float
    rank: int
    entropy: float
    alternatives: tuple[tuple[int, float], ...] = ()


class LogitsRow:
    """One token's logits, with cached argmax, log-sum-exp and entropy.

    ``array`` (V,) is a view into llama.cpp's buffer until the next decode. ``users`` counts the objects
    that still need it; before the next decode overwrites the buffer, a row with users is copied.

    Args:
        array: the logits.
        address: where they lie in memory; 0 = to be asked of ``array``.
    """

    __slots__ = ("_address", "_best", "_entropy", "_logsumexp", "array", "users")

    def __init__(self, array: Logits, address: int = 0) -> None:
        self.array = array
        self.users = 0
        self._address = address
        self._best = -1
        self._logsumexp: float = _UNKNOWN
        self._entropy: float = _UNKNOWN

    def detach(self) -> None:
        """Copy the row out of llama.cpp's buffer."""
        if self.array.base is not None:
            self.array = self.array.copy()
            self._address = 0

    def invalidate(self) -> None:
        """Record that llama.cpp's buffer was overwritten; a detached row keeps its values."""
        if self.array.base is not None:
            self.array = _NOTHING
            self._address = 0

    @property
    def is_valid(self) -> bool:
        """False if the values were overwritten and the token must be decoded again."""
        return len(self.array) > 0

    def logprob(self, token: int) -> float:
        """Return the model's log-probability of ``token``, nats."""
        if self._logsumexp is _UNKNOWN:
            self._measure()
        return float(self.array[token]) - self._logsumexp

    def rank(self, token: int) -> int:
        """Return 1 + how many tokens have a larger logit than ``token``."""
        return 1 + int(np.count_nonzero(self.array > self.array[token]))

    def score(self, token: int, top: int = 0) -> TokenScore:
        """Return how the model rates ``token`` here, with the ``top`` most probable tokens."""
        alternatives = tuple(self.top(top)) if top else ()
        return TokenScore(
            token, self.logprob(token), self.rank(token), self.entropy(), alternatives
        )

    def entropy(self) -> float:
        """Return the entropy of softmax(logits), nats."""
        if self._entropy is _UNKNOWN:
            self._measure()
        return self._entropy

    def top(self, k: int) -> list[tuple[int, float]]:
        """Return the ``k`` most probable tokens with their log-probabilities (nats), best first."""
        k = min(k, len(self.array))
        best = np.argpartition(-self.array, k - 1)[:k]
        order = best[np.lexsort((best, -self.array[best]))]
        return [(int(token), self.logprob(int(token))) for token in order]

    @property
    def best(self) -> int:
        """The token with the largest logit, the smallest id among equals; computed once."""
        if self._best < 0:
            self._best = int(self.array.argmax())
        return self._best

    def sample(
        self,
        sampler: core.RowSampler,
        seed: int,
        position: int,
        purpose: int = DRAW,
        *,
        measured: bool = True,
    ) -> int:
        """Draw a token, measuring the row in the same call unless that is done or not wanted.

        Returns:
            the token that ``Distribution.draw`` draws; -1 where the core leaves that to NumPy.
        """
        measured = measured and self._logsumexp is _UNKNOWN
        token = sampler.sample(self.address, seed, position, purpose, measured)
        if measured:
            self._note(sampler.choice.best, sampler.choice.logsumexp, sampler.choice.entropy)
        return token

    @property
    def address(self) -> int:
        """Where the logits lie in memory."""
        if self._address == 0:
            self._address, self.array = core.address_of(self.array)
        return self._address

    def _note(self, best: int, logsumexp: float, entropy: float) -> None:
        if best >= 0:
            self._best, self._logsumexp, self._entropy = best, logsumexp, entropy

    def _measure(self) -> None:
        if core.available and len(self.array):
            self._note(*core.measure(self.address, 1, len(self.array))[0])
            if self._logsumexp is not _UNKNOWN:
                return
        row = self.array
        top = float(row[self.best])
        shifted = row - top
        np.maximum(
            shifted, _FLOOR, out=shifted
        )  # a logit of -inf has weight 0, and 0 * -inf is NaN
        weights = np.exp(shifted)
        total = float(np.dot(weights, _ones(len(row))))
        mean = float(np.dot(weights, shifted))
        log_total = math.log(total) if total > 0 else math.nan
        self._logsumexp = top + log_total
        self._entropy = max(0.0, log_total - mean / total)


@lru_cache(maxsize=8)
def _ones(n: int) -> Logits:
    return np.ones(n, dtype=np.float32)
