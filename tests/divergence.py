"""Where two texts that should be equal first differ, and how near the draw was.

In a context that is not exact, a token's logits depend slightly on the other tokens of its
decode. That can change a token if the decision is close. An experiment shows how close it was: the real
sampler gets logits that are moved further and further until it draws the other token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
from rounding import gumbel_noise

from llamabranch import Branch, Context, SamplingParams
from llamabranch.errors import ConfigError, GrammarError
from llamabranch.sampling import Sampler

__all__ = ["Divergence", "first_divergence"]

Logits = npt.NDArray[np.float32]
_MOVES = [2.0 ** (i / 4) for i in range(-80, 21)]  # the moves that are tried, in logits


@dataclass(frozen=True)
class Divergence:
    """The first token in which two continuations of a prompt differ.

    Attributes:
        position: the index of that token, from 0 = the first generated one.
        tokens: the tokens of the two texts there; None if a text had ended.
        gap: how far logits must move relative to each other for the other token to be drawn; at most a
            fifth too large, infinite if no such move was found.
    """

    position: int
    tokens: tuple[int | None, int | None]
    gap: float


def first_divergence(
    ctx: Context,
    prompt: Sequence[int],
    left: Sequence[int],
    right: Sequence[int],
    sampling: SamplingParams,
    seed: int = 0,
) -> Divergence | None:
    """Return where ``left`` and ``right``, both generated after ``prompt``, differ; None if nowhere.

    Both were drawn with ``sampling`` and ``seed``, under the rule "seeded" (at temperature 0 under any
    rule).
    """
    pairs = enumerate(zip_longest(left, right))
    difference = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), None)
    if difference is None:
        return None
    same, tokens = difference
    sampler = Sampler(ctx.model, sampling).replay(list(prompt), list(left[:same]))
    with Branch.start(ctx, list(prompt), temperature=0.0) as branch:
        for token in left[:same]:  # one at a time, as plain decoding does
            branch.commit(token)
        row = branch.logits
    gap = max(least_gap(sampler, row, len(prompt) + same, seed, token) for token in tokens)
    return Divergence(same, tokens, gap)


def least_gap(sampler: Sampler, row: Logits, position: int, seed: int, token: int | None) -> float:
    """Return how far logits must move for a token to be drawn; None = a token that ends the text."""
    wanted = list(sampler.model.eog_tokens) if token is None else [token]

    def drawn(logits: Logits) -> int | None:
        try:
            return sampler.distribution(logits, position, seed).draw(seed, position)
        except (GrammarError, ConfigError):
            return None

    before = drawn(row)
    if before in wanted or not wanted:
        return 0.0 if wanted else math.inf
    raised = max(wanted, key=lambda t: float(row[t]))
    noise = gumbel_noise(seed, position, np.arange(len(row), dtype=np.int32))
    keys: Logits = (row / max(sampler.params.temperature, 1e-9) + noise).astype(np.float32)
    least = math.inf
    for direction in _directions(row, keys, raised, before):
        tried = (far for far in _MOVES if far < least)
        wins = (far for far in tried if drawn(row + np.float32(far) * direction) in wanted)
        least = next(wins, least)
    return 2 * least


def _directions(row: Logits, keys: Logits, token: int, drawn: int | None) -> Iterator[Logits]:
    """Yield directions to move logits in, each by at most 1, that change a draw with the smallest moves.

    ``token`` rises or ``drawn`` sinks, relative to the other one, to all others, or to the larger ones:
    top-p counts their mass, and top-k their number.
    """
    is_token = np.arange(len(row)) == token
    rising = [is_token, is_token | (row < row[token]), keys <= keys[token]]
    if drawn is not None:
        rising += [np.arange(len(row)) != drawn, row > row[drawn]]
    for which in rising:
        yield np.where(which, np.float32(1), np.float32(-1))
