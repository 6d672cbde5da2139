"""How near a draw was: small changes of the logits have small gaps, draws of other seeds have not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from divergence import first_divergence, least_gap

import llamabranch as lb
from llamabranch.sampling import Sampler

OPEN = lb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@pytest.mark.parametrize(
    ("changes", "logits", "tokens"),
    [
        # Tokens 2, 3, ... have these logits, all others are far below. The two tokens move by 2e-3.
        ({"top_k": 2}, (3.0, 1.0, 0.999), (3, 4)),
        ({"min_p": 0.1}, (3.0, 3.0 + math.log(0.1) - 1e-3), (2, 3)),
        ({"top_p": 0.6}, (math.log(0.6003), math.log(0.3997)), (2, 3)),
        ({}, (2.0, 1.0), (2, 3)),
        ({"temperature": 0.0}, (2.0, 1.999, 1.0), (2, 3)),
    ],
    ids=["top_k", "min_p", "top_p", "scores", "logits"],
)
def test_a_draw_that_a_small_move_turns_has_a_small_gap(
    small_toy: lb.Model,
    changes: dict[str, float],
    logits: tuple[float, ...],
    tokens: tuple[int, int],
) -> None:
    """The token is next to a boundary, and the noise favours it. The scores are not nearly equal."""
    row = np.full(small_toy.n_vocab, -30.0, dtype=np.float32)
    row[2 : 2 + len(logits)] = logits
    other = row.copy()
    other[list(tokens)] += np.array([-1e-3, 1e-3], dtype=np.float32)
    sampler = Sampler(small_toy, OPEN.replace(**changes))  # type: ignore[arg-type]
    for seed in range(20_000):
        drawn = [sampler.distribution(logits, 5, seed).draw(seed, 5) for logits in (row, other)]
        if set(drawn) == set(tokens):
            break
    assert set(drawn) == set(tokens), "no seed turns this draw"
    assert 0 < max(least_gap(sampler, row, 5, seed, token) for token in tokens) < 0.01


def test_other_seeds_and_ends_of_texts_are_no_near_ties(toy: lb.Model) -> None:
    """By chance two scores lie closer than 0.04 once in about fifty draws.

    A text that ended is compared with its end token. A text that was cut elsewhere is far from it.
    """
    greedy, sampler = lb.SamplingParams(temperature=0.0), Sampler(toy, OPEN)
    (end,) = toy.eog_tokens
    with lb.Context(toy, n_ctx=256, n_threads=1, exact=True) as ctx:
        with lb.Branch.start(ctx, [5, 6], sampling=greedy) as branch:
            row, best = branch.logits, branch.sequence.logits_row().best
        difference = first_divergence(ctx, [5, 6], [best], [], greedy)
    gap = float(row[best] - row[end])
    assert difference is not None and difference.tokens == (best, None)
    assert gap <= difference.gap <= 1.2 * gap
    gaps = []
    for seed in range(60):
        token, other_token = (
            sampler.distribution(row, 5, s).draw(s, 5) for s in (seed, seed + 1000)
        )
        if token != other_token:
            gaps.append(least_gap(sampler, row, 5, seed, other_token))
    assert len(gaps) > 40
    assert sum(gap < 0.04 for gap in gaps) < len(gaps) / 10
