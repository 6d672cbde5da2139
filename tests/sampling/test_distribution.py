"""Distributions agree with mathematics, and draws are pure functions of (seed, position, id).

Statistical tests use fixed seeds, so their result never changes. The odds that they state are those of a
false failure if somebody changes the hash. All chi-square limits are at one in a million.
"""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rounding import gumbel_noise

from llamabranch import Distribution
from llamabranch.errors import ConfigError
from llamabranch.sampling.noise import (
    DRAFT,
    FORK,
    MIXTURE,
    RULE,
    derive_seed,
    log_uniforms,
    uniform,
)

Floats = npt.NDArray[np.float64]


def logits_of(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    tenths = rng.integers(-300, 301, rng.integers(1, 41))
    return (tenths / 10).astype(np.float32)


def chi_square(counts: npt.NDArray[Any], expected: Floats) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(degrees: int) -> float:
    """Return the value that chi-square exceeds once in a million (Wilson-Hilferty approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.7534 * math.sqrt(spread)) ** 3


# -- noise ---------------------------------------------------------------------------------------


def test_noise_is_the_same_every_time_and_different_for_every_argument() -> None:
    base = gumbel_noise(7, 3, 100)
    assert np.array_equal(base, gumbel_noise(7, 3, 100))
    others = [gumbel_noise(8, 3, 100), gumbel_noise(7, 4, 100), gumbel_noise(-7, 3, 100)]
    others += [gumbel_noise(7, 3, 100, purpose) for purpose in (RULE, MIXTURE, FORK, DRAFT)]
    assert not any(np.isin(other, base).any() for other in others)


def _uniforms(which: str) -> Floats:
    n = 20_000
    if which == "ids":
        return np.exp(log_uniforms(3, 4, np.arange(n, dtype=np.int32)))
    if which == "seeds":
        return np.array([uniform(seed, 4) for seed in range(n)])
    if which == "positions":
        return np.array([uniform(3, position) for position in range(n)])
    return np.array([uniform(3, 4, RULE, index) for index in range(n)])


@pytest.mark.parametrize("which", ["ids", "seeds", "positions", "indices"])
def test_uniforms_are_uniform_and_neighbours_independent(which: str) -> None:
    """Chi-square over 64 cells, and over 8 x 8 cells of neighbours: once in a million each."""
    u = _uniforms(which)
    counts = np.bincount((u * 64).astype(int), minlength=64)
    assert chi_square(counts, np.full(64, len(u) / 64)) < chi_square_limit(63)
    cells = (u * 8).astype(int)
    pairs = np.bincount(cells[:-1:2] * 8 + cells[1::2], minlength=64)
    assert chi_square(pairs, np.full(64, len(u) / 128)) < chi_square_limit(63)


def test_seeds_of_forks_do_not_collide() -> None:
    seeds = {derive_seed(seed, index) for seed in range(200) for index in range(200)}
    assert len(seeds) == 200 * 200


# -- draws ---------------------------------------------------------------------------------------

SHAPES = {
    "even": np.full(8, 1 / 8),
    "steep": np.array([0.9, 0.05, 0.03, 0.015, 0.005]),
    "two": np.array([0.3, 0.7]),
    "many": np.random.default_rng(1).dirichlet(np.full(50, 0.8)),
}


def _counts(draws: list[int], ids: npt.NDArray[np.int32]) -> Floats:
    return np.array([draws.count(int(token)) for token in ids], dtype=float)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_draws_follow_the_probabilities(shape: str, along: str) -> None:
    """Chi-square over 20,000 draws: a false failure once in a million."""
    n = 20_000
    p = SHAPES[shape]
    p = np.maximum(p, 1e-3) / np.maximum(p, 1e-3).sum()  # the test wants some draws in every cell
    ids = np.random.default_rng(2).permutation(4096)[: len(p)].astype(np.int32)
    choice = Distribution.from_probs(p, ids)
    shuffled = Distribution(choice.ids[::-1], choice.logprobs[::-1])  # the order does not matter
    if along == "seeds":
        draws = [choice.draw(seed, 17) for seed in range(n)]
        assert [shuffled.draw(seed, 17) for seed in range(100)] == draws[:100]
    else:
        draws = [choice.draw(17, position) for position in range(n)]
    assert chi_square(_counts(draws, ids), n * p) < chi_square_limit(len(p) - 1)


def test_tokens_too_improbable_for_a_float_are_never_drawn() -> None:
    """At a temperature near 0 most weights underflow to 0. NumPy must not warn: tests would fail."""
    choice = Distribution.from_logits(np.array([-1e6, 0.0, -800.0, -3.0], dtype=np.float32))
    drawn = {choice.draw(7, position) for position in range(500)}
    assert drawn == {1, 3}
    assert choice.logprob(2) == pytest.approx(-800.0, abs=0.1)


# -- what a distribution knows of itself -----------------------------------------------------------


def test_from_logits_is_softmax() -> None:
    """Masked tokens are left out, the smallest of equal ids comes first, ids come in any order."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        logits = logits_of(rng)
        n = len(logits)
        logits[1:][rng.random(n - 1) < 0.2] = -np.inf
        order = rng.permutation(n).astype(np.int32)
        choice = Distribution.from_logits(logits[order], order)
        for same in (choice, pickle.loads(pickle.dumps(choice))):
            weights = np.exp(logits.astype(np.float64) - logits.max())
            expected = weights / weights.sum()
            assert sorted(same.ids.tolist()) == np.flatnonzero(expected).tolist()
            np.testing.assert_allclose(same.dense(n), expected, rtol=1e-9)
            looked_up = same.at(np.arange(n + 3, dtype=np.int32))
            np.testing.assert_allclose(looked_up, [*expected, 0, 0, 0], rtol=1e-9)
            best = sorted(np.flatnonzero(expected).tolist(), key=lambda i: (-logits[i], i))
            assert [token for token, _ in same.top(99)] == best
            assert [token for token, _ in same.top(3)] == best[:3]
            assert same.argmax() == best[0]
            assert 0 <= same.entropy() <= math.log(len(best)) + 1e-9
    point = Distribution.point(42)
    assert len(point) == 1 and point.entropy() == 0
    assert {point.draw(seed, 0) for seed in range(20)} == {42}


def test_entropy_and_surprisal_have_bases() -> None:
    choice = Distribution.from_probs(np.full(8, 1 / 8))
    assert choice.entropy("bits") == pytest.approx(3)
    assert choice.entropy() == pytest.approx(math.log(8))
    assert choice.surprisal(0, "bits") == pytest.approx(3)
    assert (choice.prob(9), choice.logprob(9), choice.surprisal(9)) == (0.0, -math.inf, math.inf)
    with pytest.raises(ConfigError, match="base"):
        choice.entropy("bans")


@pytest.mark.parametrize("seed", range(20))
def test_residual_and_overlap_rebuild_the_distribution(seed: int) -> None:
    """min(p, q) + TV * residual = p: the identity that makes speculative sampling exact."""
    rng = np.random.default_rng(seed)
    a, b = logits_of(rng), logits_of(rng)
    p = Distribution.from_logits(a / 10, rng.permutation(50)[: len(a)].astype(np.int32))
    q = Distribution.from_logits(b / 10, rng.permutation(50)[: len(b)].astype(np.int32))
    overlap = np.minimum(p.dense(50), q.dense(50))
    distance = 1 - overlap.sum()
    if distance > 1e-9:
        rebuilt = overlap + distance * p.residual(q).dense(50)
        np.testing.assert_allclose(rebuilt, p.dense(50), atol=1e-9)
    assert p.residual(p) is p


@pytest.mark.parametrize(
    ("make", "arrays"),
    [
        *((Distribution.from_logits, [x]) for x in (
            [], [-math.inf, -math.inf], [math.nan, 1.0], [math.inf, 1.0],
        )),
        *((Distribution.from_probs, [x]) for x in ([], [0.0, 0.0], [math.inf, 1.0])),
        (Distribution, [[0, 1], [0.0, 0.0, 0.0]]),
        (Distribution, [[], []]),
    ],
)  # fmt: skip
def test_no_distribution_from_unusable_numbers(make: Any, arrays: list[list[float]]) -> None:
    with pytest.raises(ConfigError):
        make(*map(np.array, arrays))
