"""The expected gain of speculative decoding: tokens per round, speedup, the best draft length.

Pure arithmetic. ``a`` is the per-token acceptance rate: the probability that a drafted token is
accepted if those before it were, assumed to be the same for all tokens. It is not accepted / drafted,
which falls as the draft gets longer: see :func:`accepted_share`. ``c``, the draft cost ratio, is the time
of a draft step; v(n), the verify cost ratio, is the time of a target decode of n tokens. Both are divided
by the time of a target decode of one token. Values out of range are ConfigErrors.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .arguments import bounded, real, whole
from .errors import ConfigError

__all__ = [
    "VerifyCost",
    "accepted_share",
    "best_draft_length",
    "expected_tokens",
    "speedup",
]

VerifyCost = float | Callable[[int], float]

_SUMMED = 1000  # draft lengths up to this are summed term by term, longer ones by the closed form
_LONGEST = 2**53  # beyond this a float cannot represent every integer


def expected_tokens(a: float, gamma: int) -> float:
    """Return the mean number of tokens per round: (1 - a^(gamma+1)) / (1 - a).

    Leviathan et al. 2022 (2211.17192), equation 1. The token after the accepted ones, bonus or
    correction, counts too: at gamma = 0 it is the only one.
    """
    _check(a, gamma)
    if gamma <= _SUMMED:
        return sum(a**i for i in range(gamma + 1))
    if a in (0.0, 1.0):
        return 1.0 + a * gamma
    return -math.expm1((gamma + 1) * math.log(a)) / (1.0 - a)


def accepted_share(a: float, gamma: int) -> float:
    """Return accepted / drafted, which most reports call the acceptance rate; ``gamma`` is at least 1."""
    _check(a, gamma, least=1)
    return (expected_tokens(a, gamma) - 1.0) / gamma


def speedup(a: float, gamma: int, c: float = 0.0, v: VerifyCost = 1.0) -> float:
    """Return tokens per second divided by plain decoding's: E / (gamma c + v(gamma + 1)).

    With v = 1 this is theorem 3.8 of Leviathan et al. 2022 (2211.17192).

    Args:
        a, gamma: per-token acceptance and draft length; gamma 0 is plain decoding, with speedup 1.
        c: time of a draft step / time of a target step.
        v: a function of the number of tokens in one target decode, or one number for every draft;
            1.0 = verifying a draft costs no more than a plain step.
    """
    if not 0.0 <= real("c", c) < math.inf:
        raise ConfigError(f"a draft step cannot cost {c} target steps")
    tokens = expected_tokens(a, gamma)
    if gamma == 0:
        return 1.0
    cost = v(gamma + 1) if callable(v) else v
    if not 0.0 < real("v", cost) < math.inf:
        raise ConfigError(f"a target decode of {gamma + 1} tokens cannot cost {cost} steps")
    return tokens / (gamma * c + cost)


def best_draft_length(a: float, c: float, v: VerifyCost = 1.0, limit: int = 16) -> int:
    """Return the draft length from 0 to ``limit`` with the highest speedup; in a tie the shortest.

    0 means that plain decoding is fastest.
    """
    limit = whole("a limit of draft lengths", limit, 0)
    return max(range(limit + 1), key=lambda gamma: speedup(a, gamma, c, v))


def _check(a: float, gamma: int, least: int = 0) -> None:
    bounded("an acceptance rate", a, 0.0, 1.0)
    whole("a draft length", gamma, least, _LONGEST)
