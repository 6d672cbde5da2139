"""Every outcome of a program that takes everything random from an object it is given.

The object walks through every outcome of every coin and draw with its exact probability, so what is
integrated is the code that runs, not a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from ..errors import ConfigError
from ..sampling import Distribution

__all__ = ["Outcomes", "enumerate_outcomes"]

Outcome = TypeVar("Outcome", bound=Hashable)


class Outcomes:
    """A `RandomSource` that repeats a given start of outcomes and notes what else could have happened.

    Attributes:
        weight: the probability of what happened.
        others: the starts of what could have happened instead.
    """

    def __init__(self, start: tuple[int, ...]) -> None:
        self.weight = 1.0
        self.others: list[tuple[int, ...]] = []
        self._taken: list[int] = []
        self._start = start
        self._tossed: set[int] = set()

    def coin(self, index: int, probability: float) -> bool:
        """Return True with ``probability``.

        Raises:
            ConfigError: the coin of this index was tossed before, or no probability.
        """
        if index in self._tossed:
            raise ConfigError(f"coin {index} was tossed twice in a round")
        if not 0.0 <= probability <= 1.0:
            raise ConfigError(f"coin {index} has the probability {probability}")
        self._tossed.add(index)
        return self._choose([probability, 1.0 - probability]) == 0

    def draw(self, distribution: Distribution, offset: int) -> int:
        """Return a token of ``distribution``."""
        return int(distribution.ids[self._choose(list(distribution.probs))])

    def _choose(self, weights: Sequence[float]) -> int:
        step = len(self._taken)
        possible = [i for i, weight in enumerate(weights) if weight > 0.0]
        if step < len(self._start):
            choice = self._start[step]
        else:
            choice = possible[0]
            self.others += [(*self._taken, i) for i in possible[1:]]
        self._taken.append(choice)
        self.weight *= weights[choice]
        return choice


def enumerate_outcomes(program: Callable[[Outcomes], Outcome]) -> dict[Outcome, float]:
    """Return the exact probability of every outcome of ``program``.

    It gets its randomness as its argument, and must take all of it from there.
    """
    found: dict[Outcome, float] = {}
    starts: list[tuple[int, ...]] = [()]
    while starts:
        random = Outcomes(starts.pop())
        outcome = program(random)
        found[outcome] = found.get(outcome, 0.0) + random.weight
        starts += random.others
    return found
