"""best_of_n: texts and their seeds, their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import llamabranch as lb
from llamabranch import Branch, Context, search
from llamabranch.sampling.noise import derive_seed

STORY = "The wolf ran and the wolf ran and the wolf"
WARM = lb.SamplingParams(temperature=0.8, seed=5)


def alone(root: Branch, index: int, n: int, stop: Sequence[str] = ()) -> list[int]:
    """Return the tokens that text number ``index`` gets when nothing else is generated."""
    with root.fork() as branch:
        if index:
            branch.reseed(derive_seed(root.seed, index))
        return branch.generate(n, stop).finish().tokens


@pytest.mark.parametrize(
    "settings",
    [
        *({"temperature": t} for t in (0.0, 0.4, 0.8)),
        {"temperature": 0.3, "repeat_penalty": 1.1, "grammar": 'root ::= " " [a-z ]+ "."'},
    ],
    ids=str,
)
def test_texts_are_those_of_their_seeds_alone(ctx: Context, settings: dict[str, Any]) -> None:
    """Penalties and grammars have a state."""
    stops: list[list[str]] = [[], ["."]]
    with Branch.start(ctx, STORY, seed=5, **settings) as root:
        for seed in (5, 6, 7):
            root.reseed(seed)
            for stop in stops:
                result = search.best_of_n(root, 6, 20, stop=stop)
                expected = [alone(root, i, 20, stop) for i in range(6)]
                assert sorted(h.tokens for h in result.hypotheses) == sorted(expected)
            for h in result.hypotheses:
                with root.fork() as branch:
                    branch.extend(h.tokens)
                    if h.finish_reason == "length":
                        assert h.logprob == pytest.approx(branch.log_likelihood(), abs=1e-3)
        given = search.best_of_n(root, 1, 20, seed=9).best
        root.reseed(9)
        assert given.tokens == alone(root, 0, 20)
        shown = repr(result)
        assert shown.startswith("<SearchResult 6 hypotheses, best -") and len(shown) < 100
        assert [h.tokens for h in search.best_of_n(root, 3, 0).hypotheses] == [[]] * 3


def test_score_and_reward_decide_the_order(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        by_length = search.best_of_n(root, 5, 20, reward=lambda text: -len(text))
        lengths = [len(h.text) for h in by_length.hypotheses]
        assert lengths == sorted(lengths)
        by_sum = search.best_of_n(root, 5, 20, score="sum")
        assert [h.score for h in by_sum.hypotheses] == sorted(
            (h.logprob for h in by_sum.hypotheses), reverse=True
        )
        own = search.best_of_n(root, 5, 20, score=lambda h: h.tokens[0])
        assert [h.score for h in own.hypotheses] == sorted(
            (h.tokens[0] for h in own.hypotheses), reverse=True
        )
