"""Sparse categorical distributions, and how to draw from them.

Every draw is Gumbel-max, argmax_x(log p(x) + g(x)), with the noise g of ``noise.py``. This module is
pure NumPy and needs neither models nor llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..arguments import choice, instance, whole
from ..errors import ConfigError
from .noise import DRAW, Floats, Ids, log_uniforms

_LEAST_WEIGHT = np.array(1e-300)  # a 0-d array, which NumPy handles faster than a scalar
T = TypeVar("T", bound=np.generic)
_LOG_BASES = {"nats": 1.0, "bits": math.log(2.0)}


def candidates(logits: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp] | None:
    """Return ascending ids that include the ``k`` largest of ``logits`` (V,) and all ties with them.

    They are found without sorting and are only a few more than k. The row is divided into 8 k blocks,
    and the maximum of each block is computed. At least k logits are as large as the k-th largest
    maximum, so the k largest logits are too. We return all logits that large. The result is None if
    this is impossible or saves no time: NaN among the logits, a small vocabulary, too many ties.
    """
    n_blocks = max(512, 8 * k)
    n_rows = len(logits) // n_blocks
    if n_rows < 32:
        return None
    maxima = logits[: n_rows * n_blocks].reshape(n_rows, n_blocks).max(axis=0)
    maxima.partition(n_blocks - k)
    least = maxima[n_blocks - k]
    if not (maxima[n_blocks - k :] < math.inf).all():  # NaN is sorted to the end
        return None
    ids = np.flatnonzero(logits >= least)
    return ids if len(ids) < len(logits) // 4 else None


class Distribution:
    """A categorical distribution over token ids, stored sparsely.

    ``ids`` is int32 (K,) without repeats, ``logprobs`` float64 (K,), normalised, natural logarithm.
    Tokens that are not listed have probability zero. Do not change the arrays: they may be shared.
    A draw does not need normalised probabilities, so ``logprobs`` is computed when it is first used.
    """

    __slots__ = ("_logprobs", "_logweights", "ids")

    def __init__(self, ids: Ids, logprobs: Floats) -> None:
        ids = number_array("ids", ids, np.int32)
        logprobs = number_array("log-probabilities", logprobs, np.float64)
        if ids.shape != logprobs.shape or len(ids) == 0:
            raise ConfigError(
                f"a distribution needs equally many ids and log-probabilities, at least one; "
                f"got shapes {ids.shape} and {logprobs.shape}"
            )
        self.ids = ids
        self._logweights = logprobs  # the log-probabilities plus some constant
        self._logprobs: Floats | None = logprobs

    @property
    def logprobs(self) -> Floats:
        """Normalised log-probabilities, float64 (K,), nats, in the order of ``ids``."""
        if self._logprobs is None:
            x = self._logweights
            self._logprobs = x - math.log(np.exp(x).sum())
        return self._logprobs

    @classmethod
    def from_logits(cls, logits: npt.NDArray[np.floating], ids: Ids | None = None) -> Distribution:
        """Return softmax(logits); logits are (V,), or (K,) with ``ids``. Entries of -inf are left out."""
        x = number_array("logits", logits, np.float64, copy=True)
        top = x.max() if len(x) else -math.inf
        if not math.isfinite(top):
            raise ConfigError(f"no distribution: the largest logit is {top}")
        if ids is None:
            ids = np.arange(len(x), dtype=np.int32)
        x -= top
        if x.min() == -math.inf:
            keep = x > -math.inf
            x, ids = x[keep], ids[keep]
        distribution = cls(ids, x)
        distribution._logprobs = None
        return distribution

    @classmethod
    def from_logweights(cls, ids: Ids, logweights: Floats) -> Distribution:
        """Return the distribution proportional to exp(logweights), (K,), finite, with the largest 0."""
        distribution = cls(ids, logweights)
        distribution._logprobs = None
        return distribution

    @classmethod
    def from_probs(cls, probs: Floats, ids: Ids | None = None) -> Distribution:
        """Return the distribution proportional to ``probs`` >= 0: (V,), or (K,) with ``ids``."""
        probs = number_array("probabilities", probs, np.float64)
        all_ids = number_array("ids", np.arange(len(probs)) if ids is None else ids, np.int32)
        keep = probs > 0.0
        total = float(probs[keep].sum())
        if not keep.any() or not math.isfinite(total):
            raise ConfigError("no distribution: all weights are zero, or one is not finite")
        return cls(all_ids[keep], np.log(probs[keep] / total))

    @classmethod
    def point(cls, token: int) -> Distribution:
        """Return the distribution in which ``token`` has probability 1."""
        return cls(np.array([whole("token", token, 0, 2**31 - 1)], dtype=np.int32), np.zeros(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        best = self.argmax()
        return f"Distribution({len(self)} tokens, argmax {best} at {self.prob(best):.3f})"

    @property
    def probs(self) -> Floats:
        """Probabilities, float64 (K,), in the order of ``ids``; a copy."""
        return np.exp(self.logprobs)

    def dense(self, n_vocab: int) -> Floats:
        """Return all probabilities, float64 (n_vocab,), 0 for tokens that are not listed."""
        p = np.zeros(whole("n_vocab", n_vocab, int(self.ids.max()) + 1))
        p[self.ids] = np.exp(self.logprobs)
        return p

    def logprob(self, token: int) -> float:
        """Return log p(token) in nats, -inf for a token that is not listed."""
        at = np.flatnonzero(self.ids == whole("token", token))
        return float(self.logprobs[at[0]]) if len(at) else -math.inf

    def prob(self, token: int) -> float:
        """Return p(token)."""
        return math.exp(self.logprob(token))

    def surprisal(self, token: int, base: str = "nats") -> float:
        """Return -log p(token) in ``base`` ("nats" or "bits"), inf if p(token) is 0."""
        return -self.logprob(token) / log_base(base)

    def entropy(self, base: str = "nats") -> float:
        """Return the Shannon entropy in ``base`` ("nats" or "bits")."""
        return max(0.0, -float(np.dot(np.exp(self.logprobs), self.logprobs))) / log_base(base)

    def argmax(self) -> int:
        """Return the most probable token, and if several are, the one with the smallest id."""
        best = self.logprobs.max()
        return int(self.ids[self.logprobs == best].min())

    def draw(self, seed: int, position: int, purpose: int = DRAW) -> int:
        """Return the token drawn for (seed, position): Gumbel-max with counter-based noise.

        argmax(log p + g) is computed as argmax(log(u) / w), where w is proportional to p and u is
        uniform, so that -log(u) = exp(-g) is exponential.
        """
        if len(self.ids) == 1:
            return int(self.ids[0])
        return int(self.ids[self._race(seed, position, purpose).argmax()])

    def order(self, seed: int, position: int) -> Iterator[int]:
        """Yield the indices of all tokens in ``ids``, in the order of a draw without replacement.

        The first is the token that ``draw`` returns; the others follow with the same noise.
        """
        return falling(self._race(seed, position, DRAW))

    def _race(self, seed: int, position: int, purpose: int) -> Floats:
        weights = np.exp(self._logweights)
        np.maximum(
            weights, _LEAST_WEIGHT, out=weights
        )  # a weight that underflowed to 0 is never drawn
        race = log_uniforms(seed, position, self.ids, purpose)
        race /= weights
        return race

    def top(self, k: int) -> list[tuple[int, float]]:
        """Return the ``k`` most probable tokens with their log-probabilities, best first."""
        order = np.lexsort((self.ids, -self.logprobs))[: whole("k", k, 0)]
        return [(int(self.ids[i]), float(self.logprobs[i])) for i in order]

    def at(self, ids: Ids) -> Floats:
        """Return the probabilities of ``ids``, float64 (len(ids),)."""
        order = np.argsort(self.ids, kind="stable")
        ranks = np.searchsorted(self.ids, ids, sorter=order)
        where = order[np.minimum(ranks, len(order) - 1)]
        return np.where(self.ids[where] == ids, np.exp(self.logprobs[where]), 0.0)

    def residual(self, other: Distribution) -> Distribution:
        """Return norm(max(self - other, 0)), from which the replacement for a rejected token is drawn.

        Leviathan et al. 2022, section 2.3. If both distributions are equal, nothing is left, but then
        no token is ever rejected; return ``self``.
        """
        instance("other", other, Distribution)
        left = np.maximum(np.exp(self.logprobs) - other.at(self.ids), 0.0)
        return Distribution.from_probs(left, self.ids) if left.any() else self


def falling(values: Floats) -> Iterator[int]:
    """Yield the indices of ``values`` (K,), the largest value first; equal values keep their order.

    The first index needs no sorting, and the next ones only a little.
    """
    best = int(values.argmax())
    yield best
    n = min(64, len(values) - 1)
    least = np.partition(values, len(values) - n)[len(values) - n] if n else math.inf
    top = np.flatnonzero(values >= least)
    top = top[np.argsort(-values[top], kind="stable")]
    yield from (int(i) for i in top if i != best)
    if len(top) < len(values):
        yield from np.argsort(-values, kind="stable")[max(1, len(top)) :].tolist()


def number_array(name: str, values: object, kind: type[T], *, copy: bool = False) -> npt.NDArray[T]:
    """Return ``values`` as an array; raise ConfigError unless they are numbers."""
    try:
        array = np.array(values, dtype=kind) if copy else np.asarray(values, dtype=kind)
    except (TypeError, ValueError, OverflowError):
        array = np.zeros((), dtype=kind)
    if array.ndim != 1:
        raise ConfigError(f"{name} must be a list of numbers, not {values!r:.60}")
    return array


def log_base(base: str) -> float:
    """Return the divisor that turns nats into ``base``."""
    choice("base", base, _LOG_BASES)
    return _LOG_BASES[base]
