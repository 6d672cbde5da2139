"""tree_search and TreeSearch: values, priors, final texts, rollouts, their cost."""

from __future__ import annotations

import math

import pytest
from test_every_search import likes_e, spells

import llamabranch as lb
from llamabranch import Branch, Context, search

STORY = "Once upon a time there was"
WARM = lb.SamplingParams(temperature=0.9, seed=5)
SECRET = " cbda"


def matches(text: str) -> float:
    return sum(a == b for a, b in zip(text, SECRET, strict=False)) / 5


def test_a_puzzle_is_solved_with_far_fewer_texts_than_there_are(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        result = search.tree_search(root, matches, 200, expand=spells, enough=1.0, prior="uniform")
        assert result.text == SECRET
        assert result.best.score == 1.0
        assert result.tree.n_visits < 120  # of 256 texts of four letters, and 84 shorter ones
        alone = search.select(root, [SECRET], method="sum").scores[0]
        if ctx.tokenize(SECRET, add_special=False) == result.best.tokens:
            assert result.best.logprob == pytest.approx(alone)


def test_values_are_means_and_visits_are_counted(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        result = search.tree_search(root, matches, 40, expand=spells)
    assert result.tree.n_visits == 40
    assert 0 < result.tree.score < 1
    for node in result.tree.walk():
        below = sum(child.n_visits for child in node.children)
        assert below <= node.n_visits
        assert node.n_visits == 0 or not math.isnan(node.score) or node.children


def test_priors_are_the_models_and_all_moves_are_scored_in_one_decode(ctx: Context) -> None:
    """If values are equal, the more probable move is tried."""
    moves = [" zinc", " zinc one two", " zinc one three", " beautiful"]
    with (
        Branch.start(ctx, "The king's daughter was very", sampling=WARM) as root,
        search.TreeSearch(root, lambda text: [] if text else moves) as tree,
    ):
        before = ctx.decoder.n_decodes
        ((node, text),) = tree.ask()
        assert ctx.decoder.n_decodes - before == tree.lines.stats.decodes == 1
        assert text == " beautiful"
        tree.tell(node, 0.0)
        texts = {asked[1] for asked in [tree.ask()[0] for _ in range(30)]}
        assert " zinc" in texts or tree.lines.root.n_visits == 31


def test_rollouts_are_part_of_the_text_that_is_evaluated(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        result = search.tree_search(
            root, likes_e, 20, expand=3, step=3, max_tokens=12, rollout_tokens=6, n=4
        )
    for hypothesis in result.hypotheses:
        assert hypothesis.score == likes_e(hypothesis.text)
