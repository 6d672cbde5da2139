"""Proof by enumeration that an acceptance rule is lossless, with small random models.

The rule takes its random numbers from an object that walks through every outcome of every coin and draw,
with exact probabilities. So the proof is about the code that runs, not about a copy of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from llamabranch import ConfigError
from llamabranch.arguments import whole
from llamabranch.generation.verify import AcceptanceRule
from llamabranch.sampling import Distribution
from llamabranch.speculative import RandomSource

__all__ = [
    "KINDS",
    "Law",
    "ModelPair",
    "Outcomes",
    "drafted_text",
    "enumerate_outcomes",
    "random_pair",
    "rule_error",
    "texts_up_to",
]

V = 3  # tokens of the small models

Text = tuple[int, ...]
Law = dict[Text, float]
Drafting = Callable[["ModelPair", RandomSource], tuple[list[int], list[Distribution]]]
Outcome = TypeVar("Outcome", bound=Hashable)


# -- every outcome -----------------------------------------------------------------------------------


class Outcomes:
    """A `RandomSource` that repeats the first outcomes of an earlier run and notes the alternatives.

    Attributes:
        weight: the probability of all outcomes so far.
        others: for each alternative the outcomes up to it, with which another run can begin.
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
            ConfigError: the coin of this index was tossed before, or ``probability`` is not in 0 to 1.
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

    Its argument is the only source of random numbers that it may use.
    """
    law: dict[Outcome, float] = {}
    starts: list[tuple[int, ...]] = [()]
    while starts:
        random = Outcomes(starts.pop())
        outcome = program(random)
        law[outcome] = law.get(outcome, 0.0) + random.weight
        starts += random.others
    return law


# -- pairs of models -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelPair:
    """A target and a draft over three tokens: distributions after each text of at most gamma tokens."""

    target: Mapping[Text, Distribution]
    draft: Mapping[Text, Distribution]
    gamma: int

    def after(self, drafted: Sequence[int]) -> Callable[[int], Distribution]:
        """Return ``target(i)`` as a rule gets it.

        It raises ConfigError beyond a token of probability zero, as a target with a grammar does.
        """

        def target(i: int) -> Distribution:
            for j in range(i):
                if self.target[tuple(drafted[:j])].prob(drafted[j]) == 0.0:
                    raise ConfigError("the rule asked beyond a token of probability zero")
            return self.target[tuple(drafted[:i])]

        return target

    def completed(self, emitted: Law) -> Law:
        """Return the law of the first gamma + 1 tokens: that of ``emitted``, completed by the target."""
        total: Law = {}
        for start, weight in emitted.items():
            for rest in itertools.product(range(V), repeat=self.gamma + 1 - len(start)):
                text = start + rest
                share = weight
                for i in range(len(start), len(text)):
                    share *= self.target[text[:i]].prob(text[i])
                total[text] = total.get(text, 0.0) + share
        return total

    def error(self, emitted: Law) -> float:
        """Return the largest difference from the target's own law of gamma + 1 tokens."""
        want, got = self.completed({(): 1.0}), self.completed(emitted)
        return max(abs(want.get(text, 0.0) - got.get(text, 0.0)) for text in want | got)


def _dirichlet(rng: np.random.Generator, alpha: float = 1.0) -> Distribution:
    return Distribution.from_probs(rng.dirichlet([alpha] * V) + 1e-9)


def _truncated(rng: np.random.Generator) -> Distribution:
    """Return a distribution over one or two of the three tokens, in any order, as top-k does."""
    ids = rng.permutation(V)[: rng.integers(1, V)].astype(np.int32)
    return Distribution.from_probs(rng.dirichlet(np.ones(len(ids))) + 1e-9, ids)


def _disjoint(rng: np.random.Generator) -> tuple[Distribution, Distribution]:
    ids = rng.permutation(V).astype(np.int32)
    cut = int(rng.integers(1, V))
    p, q = rng.dirichlet(np.ones(cut)), rng.dirichlet(np.ones(V - cut))
    return (
        Distribution.from_probs(p + 1e-9, ids[:cut]),
        Distribution.from_probs(q + 1e-9, ids[cut:]),
    )


def _point(rng: np.random.Generator) -> Distribution:
    return Distribution.point(int(rng.integers(V)))


KINDS: dict[str, Callable[[np.random.Generator], tuple[Distribution, Distribution]]] = {
    "dense": lambda rng: (_dirichlet(rng), _dirichlet(rng)),
    "sharp": lambda rng: (_dirichlet(rng, 0.2), _dirichlet(rng, 0.2)),
    "one-hot draft": lambda rng: (_dirichlet(rng), _point(rng)),
    "one-hot target": lambda rng: (_point(rng), _dirichlet(rng)),
    "both one-hot": lambda rng: (_point(rng), _point(rng)),
    "truncated": lambda rng: (_truncated(rng), _truncated(rng)),
    "disjoint": _disjoint,
    "equal": lambda rng: (_dirichlet(rng),) * 2,
}


def texts_up_to(longest: int) -> Iterator[Text]:
    """Yield every text of at most ``longest`` tokens."""
    for length in range(longest + 1):
        yield from itertools.product(range(V), repeat=length)


def random_pair(kind: str, gamma: int, seed: int) -> ModelPair:
    """Return a random pair for drafts of ``gamma`` tokens.

    Args:
        kind: one of ``KINDS``, or "mixed": a random one after each text.
        gamma: how many tokens are drafted.
        seed: a pair depends on these three arguments only.
    """
    rng = np.random.default_rng([seed, gamma, sorted([*KINDS, "mixed"]).index(kind)])
    distributions = {}
    for text in texts_up_to(gamma):
        name = list(KINDS)[rng.integers(len(KINDS))] if kind == "mixed" else kind
        distributions[text] = KINDS[name](rng)
    target = {text: p for text, (p, _) in distributions.items()}
    return ModelPair(target, {text: q for text, (_, q) in distributions.items()}, gamma)


def drafted_text(models: ModelPair, random: RandomSource) -> tuple[list[int], list[Distribution]]:
    """Draw a draft of ``gamma`` tokens; return it with the distribution each was drawn from."""
    drafted: list[int] = []
    sources: list[Distribution] = []
    while len(drafted) < models.gamma:
        sources.append(models.draft[tuple(drafted)])
        drafted.append(random.draw(sources[-1], len(drafted)))
    return drafted, sources


# -- the proof -------------------------------------------------------------------------------------


def rule_error(
    rule: AcceptanceRule,
    *,
    gamma: int = 2,
    n_pairs: int = 4,
    drafting: Drafting = drafted_text,
) -> float:
    """Return how far a rule's text is from the target's, by enumeration: 0 (to 1e-12) if it is lossless.

    This computes the probability that the rule gives to each text of gamma + 1 tokens, and compares it
    with the target's own. The random pairs are of every kind: dense, truncated, disjoint and
    deterministic distributions. A wrong rule differs by far more than rounding. The difference is exact,
    not estimated, so a few pairs are enough.

    Args:
        rule: as ``SpeculativeConfig(rule=...)`` takes it.
        gamma: how many tokens are drafted, 0 to 3.
        n_pairs: random pairs of each kind.
        drafting: how drafts are drawn; default: ``gamma`` tokens from the draft's distributions.

    Raises:
        ConfigError: ``gamma`` out of range, or the rule tosses a coin twice, or calls the target beyond a
            token of probability zero.
    """
    gamma = whole("gamma", gamma, 0, 3)
    worst = 0.0
    for kind in [*KINDS, "mixed"]:
        for seed in range(whole("n_pairs", n_pairs, 1)):
            models = random_pair(kind, gamma, seed)

            def emitted(random: Outcomes, models: ModelPair = models) -> Text:
                drafted, sources = drafting(models, random)
                acceptance = rule(drafted, sources, models.after(drafted), random)
                return (*drafted[: acceptance.n_accepted], acceptance.token)

            worst = max(worst, models.error(enumerate_outcomes(emitted)))
    return worst
