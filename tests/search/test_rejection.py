"""rejection: independent samples of the valid texts, exactly; bounds of their probability."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from departure import departure
from enumeration import PLAIN, OneB, ended, toy_of_letters

import llamabranch as lb
from llamabranch import Branch, Context, search

STORY = "Once upon a time there was"


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    with toy_of_letters(tmp_path_factory, "ab") as context:
        yield context


def exact(
    root: Branch, max_tokens: int, is_valid: Any, settings: lb.SamplingParams
) -> dict[tuple[int, ...], float]:
    """Return the probability of every valid text, by its tokens with EOG."""
    text_of = root.ctx.model.detokenize
    every = ended(root, max_tokens, settings)
    return {tokens: p for tokens, p in every.items() if is_valid(text_of(tokens[:-1]))}


def ends_with_b(text: str) -> bool:
    return text.endswith("b") and len(text) == 3


CASES = [
    (OneB(), PLAIN),
    (ends_with_b, PLAIN),
    (OneB(), PLAIN.replace(top_k=3, repeat_penalty=1.3)),
]


@pytest.mark.parametrize(("rule", "settings"), CASES)
def test_samples_have_the_distribution_of_valid_texts(
    little: Context, rule: Any, settings: lb.SamplingParams
) -> None:
    """1,500 samples: by chance it fails in 1 of 1,000 versions of the noise."""
    with Branch.start(little, "ab", sampling=settings) as root:
        is_valid = rule.complete if isinstance(rule, OneB) else rule
        expected = exact(root, 3, is_valid, settings)
        share = math.fsum(expected.values())
        counts: Counter[tuple[int, ...]] = Counter()
        for seed in range(30):
            result = search.rejection(root, rule, 50, 3, seed=seed, max_draws=100_000)
            assert len(result.hypotheses) == 50
            for h in result.hypotheses:
                key = tuple(h.node.path_tokens)
                counts[key] += 1
                assert math.exp(h.score) == pytest.approx(expected[key], rel=1e-9)
            assert result.valid_mass is not None
            low, high = result.valid_mass
            assert low <= share + 1e-12 and share <= high + 1e-12
    assert departure(counts, {tokens: p / share for tokens, p in expected.items()}) < 3.1


def test_the_bounds_close_in_on_the_probability(little: Context) -> None:
    with Branch.start(little, "ab", sampling=PLAIN) as root:
        expected = math.fsum(exact(root, 2, OneB().complete, PLAIN).values())
        widths = []
        for n in (1, 20, 400):
            result = search.rejection(root, OneB(), n, 2, max_draws=100_000)
            assert result.valid_mass is not None
            low, high = result.valid_mass
            assert low <= expected + 1e-12 and expected <= high + 1e-12
            widths.append(high - low)
        assert widths[0] > widths[1] > widths[2] and widths[2] < 1e-3


def test_what_cannot_be_valid_ends_without_a_text(little: Context) -> None:
    with Branch.start(little, "ab", sampling=PLAIN) as root:
        result = search.rejection(root, lambda text: False, 3, 2, max_draws=100_000)
        assert not result.hypotheses and result.valid_mass == (0.0, 0.0)
        never = search.rejection(root, lambda text: False, 3, 2, max_draws=4)
        assert never.valid_mass is not None and 0.0 < never.valid_mass[1] < 1.0
        cold = search.rejection(root, lambda t: False, 2, 3, max_draws=9, seed=1)
        assert not cold.hypotheses
        root.resample(PLAIN.replace(temperature=0.0))
        assert search.rejection(root, lambda text: False, 2, 3).valid_mass == (0.0, 0.0)


def test_it_draws_fewer_texts_than_throwing_away(ctx: Context) -> None:
    def wanted(text: str) -> bool:
        return "and" in text and "e" not in text[:3]

    with Branch.start(ctx, STORY, sampling=PLAIN) as root:
        result = search.rejection(root, wanted, 4, 12, stop=["."], max_draws=4000)
        again = search.rejection(root, wanted, 4, 12, stop=["."], max_draws=4000)
        assert [h.tokens for h in again.hypotheses] == [h.tokens for h in result.hypotheses]
        assert result.hypotheses and all(wanted(h.text) for h in result.hypotheses)
        assert {h.finish_reason for h in result.hypotheses} == {"stop"}
        for h in result.hypotheses:
            with root.fork() as branch:
                p = 0.0
                for token in h.tokens:
                    p += float(branch.log_probs()[token])
                    branch.commit(token)
            assert h.logprob == pytest.approx(p, abs=1e-3) and h.score == pytest.approx(p, abs=1e-3)
        assert result.stats.constraint_calls >= len(result.hypotheses)
        assert "valid_mass" in result.as_dict()
    ctx.audit()


def test_probabilities_are_forgotten_and_read_again(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Branch.start(ctx, STORY, sampling=PLAIN) as root:

        def run() -> list[list[int]]:
            result = search.rejection(
                root, lambda t: t.count("a") > 2, 6, 10, stop=["."], max_draws=90
            )
            return [h.tokens for h in result.hypotheses]

        expected = run()
        module = importlib.import_module("llamabranch.search.rejection")
        monkeypatch.setattr(module, "_BYTES", 0)  # 16 texts are remembered
        assert run() == expected
