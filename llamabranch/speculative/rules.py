"""Which drafted tokens stand: pure functions over distributions and chance.

Every rule here is lossless: what it emits has exactly the target's distribution. A rule knows nothing of
models. It asks for distributions, and it leaves everything random to a :class:`Chance`, so the tests can
put an enumeration of all outcomes in the place of the noise and prove the code that runs.

Within one round all noise must be fresh. Draft tokens under the token and block rules are drawn
with :func:`draft_seed`: the block rule looks at drafted tokens that it then throws away, so
drawing them again from the same noise in the next round would bias that round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..sampling import Distribution
from ..sampling.noise import derive_seed, uniform

__all__ = [
    "RULES",
    "Chance",
    "DraftTree",
    "Noise",
    "TreeVerdict",
    "Verdict",
    "block_rule",
    "choose_rule",
    "draft_seed",
    "seeded_rule",
    "token_rule",
    "tree_rule",
    "verify",
    "verify_tree",
]

Floats = npt.NDArray[np.float64]
Target = Callable[[int], Distribution]

RULES = ("seeded", "token", "block")


class Chance(Protocol):
    """Where a rule's randomness comes from: independent over indices and from the draft's draws."""

    def coin(self, index: int, probability: float) -> bool:
        """Return True with ``probability``; each index is tossed at most once a round."""

    def draw(self, distribution: Distribution, offset: int) -> int:
        """Return a token drawn for the ``offset``-th position of the round."""


@dataclass(frozen=True)
class Noise:
    """The counter-based chance of a round whose first drafted token is at ``position``.

    Draws are the target's own: (seed, absolute position). Coins are keyed by where the round begins,
    so no two rounds share one.
    """

    seed: int
    position: int

    def coin(self, index: int, probability: float) -> bool:
        """Return True with ``probability``, a pure function of seed, position and index."""
        return uniform(self.seed, self.position, index=index) <= probability

    def draw(self, distribution: Distribution, offset: int) -> int:
        """Return what plain decoding draws at position + ``offset``."""
        return distribution.draw(self.seed, self.position + offset)


@dataclass(frozen=True)
class Verdict:
    """``n_accepted`` drafted tokens stand, and ``token`` follows them: bonus or correction."""

    n_accepted: int
    token: int


@dataclass(frozen=True)
class TreeVerdict:
    """The nodes of ``path`` stand, from the root downward, and ``token`` follows them."""

    path: list[int]
    token: int


@dataclass(frozen=True)
class DraftTree:
    """Alternative drafts that share their beginnings.

    Node i proposes ``tokens[i]`` after node ``parents[i]``; -1 is the root, the text so far. Parents
    come before their children, and a node's children have different tokens.

    Raises:
        ConfigError: it is not such a tree.
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ConfigError(
                f"a tree needs a parent for each token: {len(self.tokens)} tokens, "
                f"{len(self.parents)} parents"
            )
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ConfigError(f"node {node} of a tree has parent {parent}: not before it")
        if len(set(zip(self.parents, self.tokens, strict=True))) != len(self.tokens):
            raise ConfigError("a node of a tree has two children with the same token")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    def children(self, node: int) -> list[int]:
        """Return the children of ``node`` (-1 = root) in order; a copy."""
        return list(self._children.get(node, ()))

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root's child down to ``node``, both included."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def depth(self, node: int) -> int:
        """Return how many tokens lie between the text so far and ``node``: 0 for a root's child."""
        return len(self.path(node)) - 1


# -- the rules -------------------------------------------------------------------------------------


def token_rule(
    drafted: Sequence[int], sources: Sequence[Distribution], target: Target, chance: Chance
) -> Verdict:
    """Accept token by token (Leviathan et al. 2022, 2211.17192, algorithm 1; Chen et al. 2302.01318).

    x_i stands with probability min(1, p_i(x_i) / q_i(x_i)); the first that falls is replaced from
    norm(max(p_i - q_i, 0)); after a draft that stands whole comes one more token from p.

    Args:
        drafted: the drafted tokens.
        sources: what each was really drawn from. ``Distribution.point`` for a draft without chance;
            it is right for any draft, but where it was drawn from more, fewer tokens stand.
        target: ``target(i)`` is the target's distribution after i drafted tokens, asked in
            increasing i, and never beyond a token of probability zero.
        chance: its coin i decides on ``drafted[i]``.

    Raises:
        ConfigError: a token that its source cannot have drawn.
    """
    _check_sources(drafted, sources)
    for i, token in enumerate(drafted):
        p, q = target(i), sources[i]
        if not chance.coin(i, min(1.0, p.prob(token) / q.prob(token))):
            return Verdict(i, chance.draw(p.residual(q), i))
    n = len(drafted)
    return Verdict(n, chance.draw(target(n), n))


def block_rule(
    drafted: Sequence[int], sources: Sequence[Distribution], target: Target, chance: Chance
) -> Verdict:
    """Accept the draft as a block (Sun et al. 2024, 2403.10444, algorithm 2).

    With w_0 = 1 and w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), and s_i = sum_x max(w_i p_{i+1}(x) -
    q_{i+1}(x), 0), the first i tokens stand together with probability h_i = s_i / (s_i + 1 - w_i),
    h_gamma = w_gamma; the longest such i is taken, each with a coin of its own. What follows is drawn
    from norm(max(w_i p_{i+1} - q_{i+1}, 0)), or from p if the whole draft stands. On average at least as
    many tokens stand as under the token rule. Where a token has probability zero, w is zero
    from there on, nothing longer can stand, and the target is not asked further.

    Arguments and errors as for :func:`token_rule`.
    """
    _check_sources(drafted, sources)
    weight, stand = 1.0, [1.0]  # w_i of the step at hand; h_0, h_1, ...
    excesses: list[tuple[Distribution, Floats]] = []
    for i, token in enumerate(drafted):
        p, q = target(i), sources[i]
        excess = np.maximum(weight * p.probs - q.at(p.ids), 0.0)
        excesses.append((p, excess))
        if i > 0:
            left = float(excess.sum())
            rest = left + (1.0 - weight)  # in this order: the ratio then never rounds above 1
            stand.append(left / rest if rest > 0.0 else 1.0)
        weight = min(1.0, weight * p.prob(token) / q.prob(token))
        if weight == 0.0:
            break
    else:
        stand = [*stand[: len(drafted)], weight]
    # The longest first: the same as testing all and taking the longest, since coins are independent.
    n = next((i for i in range(len(stand) - 1, 0, -1) if chance.coin(i, stand[i])), 0)
    if n == len(drafted):
        return Verdict(n, chance.draw(target(n), n))
    p, excess = excesses[n]
    # Nothing left means p = q, where falling has no probability but for rounding.
    return Verdict(n, chance.draw(Distribution.from_probs(excess, p.ids) if excess.any() else p, n))


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


def tree_rule(tree: DraftTree, target: Target, chance: Chance) -> TreeVerdict:
    """Follow the target's own draws down a tree (Miao et al. 2023, 2305.09781, naive sampling).

    At each node, from the root, y is drawn from the target; if y is a child the walk goes on there,
    else y is emitted. Lossless whatever the tree is, if the target's draws do not depend
    on it or, as under the seeded rule, are the very ones plain decoding makes.

    ``target(node)`` is the target's distribution after ``node``, -1 = after the text so far; only
    nodes that stand are asked.
    """
    path: list[int] = []
    node = -1
    while True:
        choice = chance.draw(target(node), len(path))
        child = next((c for c in tree.children(node) if tree.tokens[c] == choice), None)
        if child is None:
            return TreeVerdict(path, choice)
        path.append(child)
        node = child


# -- what a round calls ----------------------------------------------------------------------------


def choose_rule(rule: str, *, seed_given: bool, temperature: float) -> str:
    """Return the rule that ``rule``, one of :data:`RULES` or "auto", stands for.

    "auto" is seeded where a seed was given, so that the text depends on nothing else, and at temperature
    0, where all rules are the same and it is the cheapest; block otherwise, since most stands then.

    Raises:
        ConfigError: no such rule.
    """
    if rule == "auto":
        return "seeded" if seed_given or temperature == 0 else "block"
    if rule not in RULES:
        raise ConfigError(f"unknown rule {rule!r}: use 'auto', {', '.join(map(repr, RULES))}")
    return rule


def draft_seed(seed: int, position: int) -> int:
    """Return the seed a sampled draft that begins at ``position`` is drawn with, purpose DRAFT.

    It is another one in each round. A drafted token that fell has been looked at, by the block rule
    and by whatever learns the draft length: the same noise must not draw again.
    """
    return derive_seed(seed, position)


def verify(
    rule: str,
    drafted: Sequence[int],
    sources: Sequence[Distribution],
    target: Target,
    *,
    seed: int,
    position: int,
) -> Verdict:
    """Return what stands under ``rule``, one of :data:`RULES`, by the noise of (seed, position).

    Arguments as for :func:`token_rule`; ``position`` is that of the first drafted token. The seeded
    rule does not look at ``sources``.

    Raises:
        ConfigError: no such rule, or a token that its source cannot have drawn.
    """
    if rule == "seeded":
        return seeded_rule(drafted, target, seed=seed, position=position)
    if rule == "token":
        return token_rule(drafted, sources, target, Noise(seed, position))
    if rule == "block":
        return block_rule(drafted, sources, target, Noise(seed, position))
    raise ConfigError(f"unknown rule {rule!r}: use {', '.join(map(repr, RULES))}")


def verify_tree(tree: DraftTree, target: Target, *, seed: int, position: int) -> TreeVerdict:
    """Return what is accepted of a tree by :func:`tree_rule`, by the noise of (seed, position).

    The text is what plain decoding draws from the same seed.
    """
    return tree_rule(tree, target, Noise(seed, position))


def _check_sources(drafted: Sequence[int], sources: Sequence[Distribution]) -> None:
    if len(drafted) != len(sources):
        raise ConfigError(f"{len(drafted)} drafted tokens but {len(sources)} sources")
    for token, source in zip(drafted, sources, strict=True):
        if source.prob(token) == 0.0:
            raise ConfigError(f"token {token} cannot have been drawn from {source}")
