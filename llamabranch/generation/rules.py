"""Which drafted tokens are accepted: pure functions over distributions and random numbers.

Every rule here is lossless: the tokens it emits have exactly the target's distribution. A rule uses
no model. It calls a function for distributions and a :class:`RandomSource` for everything
random, so the tests can replace the noise by an enumeration of all outcomes and verify the very code
that runs.

Each round needs noise of its own. Under the token and block rules drafted tokens are drawn with
:func:`draft_seed`: the block rule's decisions depend on drafted tokens that it then rejects, so drawing
them again from the same noise in the next round would bias that round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..arguments import plain_int, shown
from ..errors import ConfigError
from ..sampling import Distribution
from ..sampling.noise import derive_seed, uniform

__all__ = [
    "RULES",
    "Acceptance",
    "AcceptanceRule",
    "Noise",
    "RandomSource",
    "Rule",
    "apply_rule",
    "block_rule",
    "draft_seed",
    "rule_name",
    "seeded_rule",
    "token_rule",
]

Floats = npt.NDArray[np.float64]
Target = Callable[[int], Distribution]

RULES = ("seeded", "token", "block")


class RandomSource(Protocol):
    """A rule's source of randomness: independent between indices, and of the draft's draws."""

    def coin(self, index: int, probability: float) -> bool:
        """Return True with ``probability``; called at most once per index in a round."""

    def draw(self, distribution: Distribution, offset: int) -> int:
        """Return a token drawn for the ``offset``-th position of the round."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The counter-based noise of a round whose first drafted token is at ``position``.

    Draws are those of plain decoding: keyed by (seed, absolute position). Coins are keyed by the
    position at which the round begins, so no two rounds share one.
    """

    seed: int
    position: int

    def coin(self, index: int, probability: float) -> bool:
        """Return True with ``probability``, a pure function of seed, position and index."""
        return uniform(self.seed, self.position, index=index) <= probability

    def draw(self, distribution: Distribution, offset: int) -> int:
        """Return what plain decoding draws at position + ``offset``."""
        return distribution.draw(self.seed, self.position + offset)


class Acceptance(NamedTuple):
    """``n_accepted`` drafted tokens are accepted; ``token`` follows them, as bonus or correction."""

    n_accepted: int
    token: int


AcceptanceRule = Callable[[Sequence[int], Sequence[Distribution], Target, RandomSource], Acceptance]
Rule = str | AcceptanceRule  # one of RULES, or a function with the arguments of `token_rule`


# -- the rules -------------------------------------------------------------------------------------


def token_rule(
    drafted: Sequence[int], sources: Sequence[Distribution], target: Target, rng: RandomSource
) -> Acceptance:
    """Accept token by token (Leviathan et al. 2022, 2211.17192, algorithm 1; Chen et al. 2302.01318).

    x_i is accepted with probability min(1, p_i(x_i) / q_i(x_i)); the first rejected one is replaced by
    a draw from norm(max(p_i - q_i, 0)); a draft that is accepted as a whole is followed by one more
    token from p.

    Args:
        drafted: the drafted tokens.
        sources: the distribution that each was really drawn from; ``Distribution.point`` for a draft
            that was not drawn at random. The latter is correct for any draft, but fewer tokens are
            accepted than with the distribution they were drawn from.
        target: ``target(i)`` is the target's distribution after i drafted tokens; called in increasing
            i, and never after a drafted token of probability zero.
        rng: its coin i decides on ``drafted[i]``.

    Raises:
        ConfigError: a token whose source gives it probability zero.
    """
    _check_sources(drafted, sources)
    for i, token in enumerate(drafted):
        p, q = target(i), sources[i]
        if not rng.coin(i, min(1.0, p.prob(token) / q.prob(token))):
            return Acceptance(i, rng.draw(p.residual(q), i))
    n = len(drafted)
    return Acceptance(n, rng.draw(target(n), n))


def block_rule(
    drafted: Sequence[int], sources: Sequence[Distribution], target: Target, rng: RandomSource
) -> Acceptance:
    """Accept the draft as a block (Sun et al. 2024, 2403.10444, algorithm 2).

    With w_0 = 1 and w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), and s_i = sum_x max(w_i p_{i+1}(x) -
    q_{i+1}(x), 0), a coin of its own for each i comes up with probability h_i = s_i / (s_i + 1 - w_i),
    h_gamma = w_gamma; the first i tokens are accepted for the largest i whose coin came up. The next
    token is drawn from norm(max(w_i p_{i+1} - q_{i+1}, 0)), or from p if the whole draft is accepted. On
    average at least as many tokens are accepted as under the token rule. After a token of probability
    zero w is zero, nothing longer can be accepted, and the target is not called further.

    Arguments and errors as for :func:`token_rule`.
    """
    _check_sources(drafted, sources)
    weight, h = 1.0, [1.0]  # w_i of the current step; h_0, h_1, ...
    excesses: list[tuple[Distribution, Floats]] = []
    for i, token in enumerate(drafted):
        p, q = target(i), sources[i]
        excess = np.maximum(weight * p.probs - q.at(p.ids), 0.0)
        excesses.append((p, excess))
        if i > 0:
            left = float(excess.sum())
            rest = left + (1.0 - weight)  # in this order: the ratio then never rounds above 1
            h.append(left / rest if rest > 0.0 else 1.0)
        weight = min(1.0, weight * p.prob(token) / q.prob(token))
        if weight == 0.0:
            break
    else:
        h = [*h[: len(drafted)], weight]
    # Longest first: equivalent to testing all and taking the longest, since coins are independent.
    n = next((i for i in range(len(h) - 1, 0, -1) if rng.coin(i, h[i])), 0)
    if n == len(drafted):
        return Acceptance(n, rng.draw(target(n), n))
    p, excess = excesses[n]
    # An empty excess means p = q: there a rejection has probability zero, rounding apart.
    return Acceptance(n, rng.draw(Distribution.from_probs(excess, p.ids) if excess.any() else p, n))


def seeded_rule(drafted: Sequence[int], draw: Callable[[int], int]) -> Acceptance:
    """Accept while the target's own draw is the drafted token (Daliri et al. 2024, 2408.07978).

    ``draw(i)`` is the target's own draw after i drafted tokens. The emitted tokens are those that plain
    decoding draws with the same seed, whatever was drafted: the draft only decides how many of them one
    decode yields.
    """
    for i, token in enumerate(drafted):
        choice = draw(i)
        if choice != token:
            return Acceptance(i, choice)
    return Acceptance(len(drafted), draw(len(drafted)))


# -- what a round calls ----------------------------------------------------------------------------


def rule_name(rule: Rule) -> str:
    """Return the name of a rule; "function" for one that is given as a function."""
    return rule if isinstance(rule, str) else "function"


def draft_seed(seed: int, position: int) -> int:
    """Return the seed with which a sampled draft that begins at ``position`` is drawn (purpose DRAFT).

    Each round has another one. Decisions of the block rule and of the draft-length controller depend
    on rejected tokens, so the noise that drew those must not be used again.
    """
    return derive_seed(seed, position)


def apply_rule(
    rule: Rule,
    drafted: Sequence[int],
    sources: Sequence[Distribution],
    target: Target,
    *,
    seed: int,
    position: int,
) -> Acceptance:
    """Apply ``rule``, one of :data:`RULES` or a function, to a draft, with the noise of (seed, position).

    Arguments as for :func:`token_rule`; ``position`` is that of the first drafted token. The seeded
    rule ignores ``sources``.

    Raises:
        ConfigError: an unknown rule, a token whose source gives it probability zero, or a function that
            returns no `Acceptance` of this draft.
    """
    if rule == "seeded":
        return seeded_rule(drafted, lambda i: target(i).draw(seed, position + i))
    known = {"token": token_rule, "block": block_rule}
    chosen = known.get(rule) if isinstance(rule, str) else rule
    if chosen is None:
        raise ConfigError(f"unknown rule {rule!r}: use {', '.join(map(repr, RULES))}")
    found: object = chosen(drafted, sources, target, Noise(seed, position))
    if isinstance(found, tuple) and len(found) == 2:
        n_accepted, token = (plain_int(value) for value in found)
        if n_accepted is not None and token is not None and 0 <= n_accepted <= len(drafted):
            return Acceptance(n_accepted, token)
    raise ConfigError(
        f"an acceptance rule must return Acceptance(n_accepted, token) with at most {len(drafted)} "
        f"accepted tokens, not {shown(found)}"
    )


def _check_sources(drafted: Sequence[int], sources: Sequence[Distribution]) -> None:
    if len(drafted) != len(sources):
        raise ConfigError(f"{len(drafted)} drafted tokens but {len(sources)} sources")
    for token, source in zip(drafted, sources, strict=True):
        if source.prob(token) == 0.0:
            raise ConfigError(f"token {token} cannot have been drawn from {source}")
