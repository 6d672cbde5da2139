"""Comparisons of methods on the same items: intervals, exact paired tests, adjusted p-values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["holm", "interval", "mcnemar"]


def interval(values: Sequence[float], n_draws: int = 10_000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of independent values, one for each item."""
    if not values:
        return math.nan, math.nan
    rng = np.random.default_rng(0)
    chosen = rng.integers(len(values), size=(n_draws, len(values)))
    low, high = np.quantile(np.asarray(values, float)[chosen].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def mcnemar(gained: int, lost: int) -> float:
    """Return the p-value of the exact two-sided McNemar test.

    Args:
        gained: the number of items that only the first method has right.
        lost: the number of items that only the second method has right.
    """
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << n))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of several tests, adjusted by Holm's method."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, reached = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = reached
    return adjusted
