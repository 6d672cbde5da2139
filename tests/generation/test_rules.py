"""The acceptance rules are lossless: proved by enumeration, then seen again through the real noise.

The rules take their random numbers from an object. Here that object walks through every outcome of every
coin and draw, with exact probabilities. So the proof is about the code that runs, not about a copy.
Drafts are drawn with the same object, and so are the faults of the negative controls.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from departure import departure

from benchmarks.rule_error import (
    KINDS,
    Law,
    ModelPair,
    Outcomes,
    drafted_text,
    enumerate_outcomes,
    random_pair,
    rule_error,
    texts_up_to,
)
from llamabranch.errors import ConfigError
from llamabranch.generation.verify import (
    Acceptance,
    AcceptanceRule,
    Noise,
    RandomSource,
    apply_rule,
    block_rule,
    draft_seed,
    token_rule,
)
from llamabranch.sampling import Distribution
from llamabranch.sampling.noise import DRAFT, derive_seed

V = 3
EXACT = 1e-12
LIMIT = 5.6  # standard deviations; a right program exceeds it with odds of 1e-8

Context = tuple[int, ...]
Sources = list[Distribution]
Target = Callable[[int], Distribution]
Drafting = Callable[["ModelPair", RandomSource], tuple[list[int], Sources]]


# -- ways to draft ---------------------------------------------------------------------------------


def draft_until_unsure(models: ModelPair, rng: RandomSource) -> tuple[list[int], Sources]:
    """Stop on the entropy of the next distribution, before drawing from it."""
    drafted: list[int] = []
    sources: Sources = []
    while len(drafted) < models.gamma and models.draft[tuple(drafted)].entropy() < 0.8:
        sources.append(models.draft[tuple(drafted)])
        drafted.append(rng.draw(sources[-1], len(drafted)))
    return drafted, sources


def draft_until_unlikely_kept(models: ModelPair, rng: RandomSource) -> tuple[list[int], Sources]:
    """Stop after a token that the draft itself found unlikely, and keep it."""
    drafted: list[int] = []
    sources: Sources = []
    while len(drafted) < models.gamma:
        sources.append(models.draft[tuple(drafted)])
        drafted.append(rng.draw(sources[-1], len(drafted)))
        if sources[-1].prob(drafted[-1]) < 0.4:
            break
    return drafted, sources


def draft_until_unlikely_dropped(models: ModelPair, rng: RandomSource) -> tuple[list[int], Sources]:
    """BIASED, a negative control: draw a token, and drop it if it is unlikely."""
    drafted, sources = draft_until_unlikely_kept(models, rng)
    if sources[-1].prob(drafted[-1]) < 0.4:
        del drafted[-1], sources[-1]
    return drafted, sources


def draft_argmax(models: ModelPair, rng: RandomSource) -> tuple[list[int], Sources]:
    """A draft without randomness: each source is a point."""
    drafted: list[int] = []
    while len(drafted) < models.gamma:
        drafted.append(models.draft[tuple(drafted)].argmax())
    return drafted, [Distribution.point(token) for token in drafted]


def emitted_by(rule: AcceptanceRule, models: ModelPair, drafting: Drafting = drafted_text) -> Law:
    def program(walk: Outcomes) -> Context:
        drafted, sources = drafting(models, walk)
        acceptance = rule(drafted, sources, models.after(drafted), walk)
        return (*drafted[: acceptance.n_accepted], acceptance.token)

    return enumerate_outcomes(program)


def tokens_a_round(emitted: Law) -> float:
    return sum(weight * len(text) for text, weight in emitted.items())


LOSSLESS: list[Drafting] = [
    drafted_text,
    draft_until_unsure,
    draft_until_unlikely_kept,
    draft_argmax,
]
both_rules = pytest.mark.parametrize("rule", [token_rule, block_rule])


# -- the proofs ------------------------------------------------------------------------------------


@both_rules
@pytest.mark.parametrize("gamma", range(4))
@pytest.mark.parametrize("drafting", LOSSLESS)
def test_rule_is_lossless(rule: AcceptanceRule, drafting: Drafting, gamma: int) -> None:
    """At any honest draft length, for models of every kind."""
    n_pairs = 4 if gamma < 3 else 2
    assert rule_error(rule, gamma=gamma, n_pairs=n_pairs, drafting=drafting) < EXACT


def misreported(models: ModelPair, rng: RandomSource) -> tuple[list[int], Sources]:
    """BIASED: report the distributions before the draft's own temperature."""
    drafted, sources = drafted_text(models, rng)
    return drafted, [Distribution.from_logits(0.5 * q.logprobs, q.ids) for q in sources]


@both_rules
@pytest.mark.parametrize("drafting", [draft_until_unlikely_dropped, misreported])
def test_faults_of_a_draft_are_seen(rule: AcceptanceRule, drafting: Drafting) -> None:
    """The proof must be able to fail. A draft that keeps the unlikely token passes, see below."""
    for seed in range(4):
        models = random_pair("dense", 2, seed)
        assert models.error(emitted_by(rule, models, drafting)) > 1e-3


def test_the_proof_sees_a_rule_that_is_wrong() -> None:
    def wrong(
        _: object, sources: Sequence[Distribution], target: Target, rng: RandomSource
    ) -> Acceptance:
        return Acceptance(0, rng.draw(sources[0] if sources else target(0), 0))

    def tosses_twice(_: object, __: object, target: Target, rng: RandomSource) -> Acceptance:
        rng.coin(0, 0.5)
        rng.coin(0, 0.5)
        return Acceptance(0, rng.draw(target(0), 0))

    assert rule_error(wrong, n_pairs=1) > 1e-2
    with pytest.raises(ConfigError, match="gamma"):
        rule_error(wrong, gamma=4)
    with pytest.raises(ConfigError, match="twice"):
        rule_error(tosses_twice)


@both_rules
@pytest.mark.parametrize("drafting", [drafted_text, draft_until_unlikely_dropped])
def test_point_source_is_right_for_any_draft(rule: AcceptanceRule, drafting: Drafting) -> None:
    # The rule does not depend on how the token was found; it only accepts fewer. So a draft whose
    # distribution is unknown or wrong can always be passed in this way.
    def as_points(models: ModelPair, rng: RandomSource) -> tuple[list[int], Sources]:
        drafted, _ = drafting(models, rng)
        return drafted, [Distribution.point(token) for token in drafted]

    for seed in range(4):
        models = random_pair("dense", 2, seed)
        assert models.error(emitted_by(rule, models, as_points)) < EXACT
        honest = tokens_a_round(emitted_by(rule, models))
        assert tokens_a_round(emitted_by(rule, models, as_points)) < honest


def test_block_rule_yields_at_least_as_much_as_token_rule() -> None:
    more = 0
    for kind in [*KINDS, "mixed"]:
        for seed in range(3):
            models = random_pair(kind, 3 if seed == 0 else 2, seed)
            by_token = tokens_a_round(emitted_by(token_rule, models))
            by_block = tokens_a_round(emitted_by(block_rule, models))
            assert by_block > by_token - EXACT
            more += by_block > by_token + 1e-3
    assert more > 5


def example_of_the_block_paper() -> ModelPair:
    """Return the two models without context of Sun et al. 2024 (2403.10444), section 1."""
    p = Distribution.from_probs(np.array([1.0, 2.0]) / 3)
    q = Distribution.from_probs(np.array([2.0, 1.0]) / 3)
    return ModelPair(dict.fromkeys(texts_up_to(2), p), dict.fromkeys(texts_up_to(2), q), gamma=2)


def test_acceptance_is_that_of_the_papers() -> None:
    """Figures of the block paper. Point masses gain nothing. Equal models accept everything."""
    models = example_of_the_block_paper()
    assert tokens_a_round(emitted_by(token_rule, models)) == pytest.approx(1 + 10 / 9, abs=EXACT)
    assert tokens_a_round(emitted_by(block_rule, models)) == pytest.approx(1 + 11 / 9, abs=EXACT)
    for seed in range(3):
        models = random_pair("dense", 3, seed)
        by_token, by_block = (
            emitted_by(rule, models, draft_argmax) for rule in (token_rule, block_rule)
        )
        assert tokens_a_round(by_block) == pytest.approx(tokens_a_round(by_token), abs=EXACT)
    for rule in (token_rule, block_rule):
        equal = emitted_by(rule, random_pair("equal", 3, 0))
        assert tokens_a_round(equal) == pytest.approx(4.0, abs=EXACT)


# -- the real noise --------------------------------------------------------------------------------


def generate(models: ModelPair, seed: int, n: int, fresh: bool) -> Context:
    """Run rounds of the block rule as the library does until ``n`` tokens are emitted."""
    text: list[int] = []
    while len(text) < n:
        first, drafted, sources = len(text), list[int](), Sources()
        source_seed = draft_seed(seed, first) if fresh else seed
        while len(drafted) < min(models.gamma, n - 1 - first):
            sources.append(models.draft[tuple(text + drafted)])
            drafted.append(sources[-1].draw(source_seed, first + len(drafted), DRAFT))

        def target(i: int, so_far: list[int] = text, d: list[int] = drafted) -> Distribution:
            return models.target[tuple(so_far + d[:i])]

        acceptance = apply_rule("block", drafted, sources, target, seed=seed, position=first)
        text += [*drafted[: acceptance.n_accepted], acceptance.token]
    return tuple(text)


def test_drafting_again_from_the_same_noise_is_biased() -> None:
    # Why there is draft_seed: the block rule rejects because of later drafted tokens. Here the first
    # token is rejected only if the second is a 0, too. Drawn again from the same noise in the next
    # round, it would always be a 0 again, instead of two times in three.
    models = example_of_the_block_paper()
    law = models.completed({(): 1.0})
    for fresh in (True, False):
        texts = Counter(generate(models, seed, 3, fresh) for seed in range(6000))
        assert (departure(texts, law) < LIMIT) == fresh


def test_noise_is_that_of_plain_decoding_and_its_coins_are_fair() -> None:
    p = Distribution.from_probs(np.array([0.2, 0.3, 0.5]))
    assert [Noise(4, 9).draw(p, i) for i in range(20)] == [p.draw(4, 9 + i) for i in range(20)]
    heads = sum(Noise(seed, 3).coin(i, 0.3) for seed in range(2000) for i in range(2))
    assert abs(heads - 1200) < 6 * math.sqrt(4000 * 0.3 * 0.7)  # odds of a false failure: 2e-9
    assert all(Noise(seed, 0).coin(0, 1.0) for seed in range(500))
    assert not any(Noise(seed, 0).coin(0, 0.0) for seed in range(500))
    assert len({draft_seed(1, position) for position in range(1000)}) == 1000
    assert draft_seed(1, 5) == derive_seed(1, 5)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block", "fast"])
def test_impossible_draft_and_unknown_rule_are_refused(rule: str) -> None:
    p = Distribution.from_probs(np.array([0.5, 0.5]))
    for sources, words in (
        ([Distribution.point(0)], "cannot have been drawn"), ([], "1 drafted tokens but 0 sources"),
    ):  # fmt: skip
        words = "unknown rule 'fast'" if rule == "fast" else words
        with pytest.raises(ConfigError, match=words):
            apply_rule(rule, [1], sources, lambda i: p, seed=0, position=0)
