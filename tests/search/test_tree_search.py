"""tree_search and TreeSearch: values, priors, final texts, rollouts, their cost."""

from __future__ import annotations

import math

import pytest

import llamabranch as lb
from llamabranch import Branch, Context, search

STORY = "Once upon a time there was"
WARM = lb.SamplingParams(temperature=0.9, seed=5)
SECRET = " cbda"


def letters(text: str) -> list[str]:
    return [] if len(text) == 5 else [" a", " b", " c", " d"] if not text else list("abcd")


def matches(text: str) -> float:
    return sum(a == b for a, b in zip(text, SECRET, strict=False)) / 5


def test_a_puzzle_is_solved_with_far_fewer_texts_than_there_are(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        result = search.tree_search(root, matches, 200, expand=letters, enough=1.0, prior="uniform")
        assert result.text == SECRET
        assert result.best.score == 1.0
        assert result.tree.n_visits < 120  # of 256 texts of four letters, and 84 shorter ones
        alone = search.select(root, [SECRET], method="sum").scores[0]
        if ctx.tokenize(SECRET, add_special=False) == result.best.tokens:
            assert result.best.logprob == pytest.approx(alone)


def test_values_are_means_and_visits_are_counted(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        result = search.tree_search(root, matches, 40, expand=letters)
    assert result.tree.n_visits == 40
    assert 0 < result.tree.score < 1
    for node in result.tree.walk():
        below = sum(child.n_visits for child in node.children)
        assert below <= node.n_visits
        assert node.n_visits == 0 or not math.isnan(node.score) or node.children


def test_priors_are_the_models_and_ties_go_to_the_more_probable_move(ctx: Context) -> None:
    with (
        Branch.start(ctx, "The king's daughter was very", sampling=WARM) as root,
        search.TreeSearch(root, lambda text: [] if text else [" zinc", " beautiful"]) as tree,
    ):
        ((node, text),) = tree.ask()
        assert text == " beautiful"
        tree.tell(node, 0.0)
        texts = {asked[1] for asked in [tree.ask()[0] for _ in range(30)]}
        assert " zinc" in texts or tree.lines.root.n_visits == 31


def test_rollouts_are_part_of_the_text_that_is_evaluated(ctx: Context) -> None:
    def reward(text: str) -> float:
        return text.count("e") / (1 + len(text))

    with Branch.start(ctx, STORY, sampling=WARM) as root:
        result = search.tree_search(
            root, reward, 20, expand=3, step=3, max_tokens=12, rollout_tokens=6, n=4
        )
    for hypothesis in result.hypotheses:
        assert hypothesis.score == reward(hypothesis.text)
        assert hypothesis.node.path_tokens == hypothesis.tokens


def test_given_moves_are_scored_in_one_decode_each_time(ctx: Context) -> None:
    with (
        Branch.start(ctx, STORY, sampling=WARM) as root,
        search.TreeSearch(root, lambda text: [" one two", " one three", " four"]) as tree,
    ):
        before = ctx.decoder.n_decodes
        tree.ask()
        assert ctx.decoder.n_decodes - before == tree.lines.stats.decodes == 1


def test_a_search_that_only_asks_for_rewards_can_be_ended(ctx: Context) -> None:
    asked: list[str] = []

    def reward(text: str) -> float:
        asked.append(text)
        return 0.0

    with Branch.start(ctx, "Once") as branch:
        result = search.tree_search(
            branch,
            reward,
            1000,
            expand=lambda text: [] if text else [" a", " b"],
            parallel=2,
            on_step=lambda _: len(asked) >= 10,
        )
    assert len(asked) == 10
    assert result.hypotheses
