"""How far counts are from a law that is known exactly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

Text = tuple[int, ...]


def departure(counts: Counter[Text], law: Mapping[Text, float]) -> float:
    """Return the distance of the counts from the probabilities of ``law``, in standard deviations.

    It is a chi-square, with cells merged until 5 are expected in each, transformed to a standard normal
    number (Wilson & Hilferty 1931).
    """
    n = sum(counts.values())
    assert set(counts) <= set(law), "said what has probability zero"
    cells: list[tuple[float, int]] = []
    expected, seen = 0.0, 0
    for text in sorted(law, key=lambda t: (law[t], t)):
        expected += n * law[text]
        seen += counts[text]
        if expected >= 5.0:
            cells.append((expected, seen))
            expected, seen = 0.0, 0
    if expected:
        last = cells.pop()
        cells.append((last[0] + expected, last[1] + seen))
    freedom = len(cells) - 1
    square = sum((o - e) ** 2 / e for e, o in cells)
    third = 2.0 / (9.0 * freedom)
    return float((np.cbrt(square / freedom) - (1.0 - third)) / math.sqrt(third))
