"""Which drafted tokens stand. Pure functions over distributions and the noise of (seed, position)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..distribution import Distribution

__all__ = ["Verdict", "seeded_rule"]

Target = Callable[[int], Distribution]


@dataclass(frozen=True)
class Verdict:
    """``n_accepted`` drafted tokens stand, and ``token`` follows them: bonus or correction."""

    n_accepted: int
    token: int


def seeded_rule(drafted: Sequence[int], target: Target, *, seed: int, position: int) -> Verdict:
    """Accept while the target's own draw is the drafted token (Daliri et al. 2024, 2408.07978).

    ``target(i)`` is the target's distribution after i drafted tokens; ``position`` that of the first
    one. What is emitted is what plain decoding draws from the same seed, whoever drafted and however
    much: the draft only decides how much of it one decode yields.
    """
    for i, token in enumerate(drafted):
        choice = target(i).draw(seed, position + i)
        if choice != token:
            return Verdict(i, choice)
    n = len(drafted)
    return Verdict(n, target(n).draw(seed, position + n))
