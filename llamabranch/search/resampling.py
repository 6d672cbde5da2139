"""Resampling of weighted particles: which particle each slot continues.

Douc, Cappé, Moulines 2005, "Comparison of resampling schemes for particle filtering". In all schemes
particle i gets N w_i copies on average. Pure NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["SCHEMES", "ancestors", "effective_size"]

SCHEMES = ("systematic", "stratified", "multinomial", "residual")

Floats = npt.NDArray[np.float64]


def effective_size(weights: Floats) -> float:
    """Return 1 / sum of squares of normalised ``weights`` (N,): N if they are equal, 1 if one has all."""
    return float(1.0 / np.square(weights).sum())


def ancestors(scheme: str, weights: Floats, uniform: Callable[[int], float]) -> list[int]:
    """Return for each slot the particle that continues there, in ascending order.

    Args:
        scheme: "systematic" (one uniform number; floor or ceiling of N w copies, so the fewest forks),
            "stratified" (one for each stratum), "multinomial" (independent draws) or "residual" (floor of
            N w copies, the rest multinomial).
        weights: normalised, (N,).
        uniform: returns the i-th uniform number in (0, 1).
    """
    n = len(weights)
    if scheme == "systematic":
        first = uniform(0)
        return _inverse(weights, [(i + first) / n for i in range(n)])
    if scheme == "stratified":
        return _inverse(weights, [(i + uniform(i)) / n for i in range(n)])
    if scheme == "multinomial":
        return _inverse(weights, sorted(uniform(i) for i in range(n)))
    copies = np.floor(weights * n + 1e-12).astype(int)
    fixed = [i for i, count in enumerate(copies) for _ in range(count)][:n]
    n_left = n - len(fixed)
    if n_left:
        rest = np.maximum(weights * n - copies, 0.0)
        fixed += _inverse(rest / rest.sum(), sorted(uniform(i) for i in range(n_left)))
    return sorted(fixed)


def _inverse(weights: Floats, points: Sequence[float]) -> list[int]:
    """Return, for each of the ascending ``points``, the particle whose part of (0, 1) contains it."""
    indices = []
    i, reached = 0, float(weights[0])
    last = int(np.flatnonzero(weights)[-1])
    for point in points:
        while i < last and point >= reached:
            i += 1
            reached += float(weights[i])
        indices.append(i)
    return indices


def log_mean(log_weights: Sequence[float]) -> float:
    """Return the logarithm of the mean of exp(log_weights); -inf if all are -inf."""
    top = max(log_weights)
    if top == -math.inf:
        return -math.inf
    return top + math.log(math.fsum(math.exp(w - top) for w in log_weights) / len(log_weights))
