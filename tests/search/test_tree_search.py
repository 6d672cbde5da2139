"""tree_search and TreeSearch: values, priors, final texts, rollouts, waves, accounts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from failing import check_every_failure

import llamabranch as lb
from llamabranch import Branch, Context, SuffixDrafter, search
from llamabranch.errors import ConfigError, UsageError

STORY = "Once upon a time there was"
WARM = lb.SamplingParams(temperature=0.9, seed=5)
SECRET = " cbda"


def letters(text: str) -> list[str]:
    return [] if len(text) == 5 else [" a", " b", " c", " d"] if not text else list("abcd")


def matches(text: str) -> float:
    return sum(a == b for a, b in zip(text, SECRET, strict=False)) / 5


def test_a_puzzle_is_solved_with_far_fewer_texts_than_there_are(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        found = search.tree_search(root, matches, 200, expand=letters, enough=1.0, prior="uniform")
        assert found.text == SECRET
        assert found.best.score == 1.0
        assert found.tree.n_visits < 120  # of 256 texts of four letters, and 84 shorter ones
        alone = search.select(root, [SECRET], method="sum").scores[0]
        if ctx.tokenize(SECRET, add_special=False) == found.best.tokens:
            assert found.best.logprob == pytest.approx(alone)


def test_values_are_means_and_visits_are_counted(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        found = search.tree_search(root, matches, 40, expand=letters)
    assert found.tree.n_visits == 40
    assert 0 < found.tree.score < 1
    for node in found.tree.walk():
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


def test_sampled_moves_and_rollouts_depend_on_the_seed_alone(
    target: lb.Model, ctx: Context
) -> None:
    options: dict[str, Any] = {
        "expand": 3, "step": 3, "max_tokens": 12, "rollout_tokens": 6, "n": 4,
    }  # fmt: skip

    def reward(text: str) -> float:
        return text.count("e") / (1 + len(text))

    with Branch.start(ctx, STORY, sampling=WARM) as root:
        expected = search.tree_search(root, reward, 20, **options)
        drafted = search.tree_search(root, reward, 20, drafter=SuffixDrafter(), **options)
        assert drafted.hypotheses == expected.hypotheses
        assert [h.score for h in expected.hypotheses] == [
            reward(h.text) for h in expected.hypotheses
        ]
        for hypothesis in expected.hypotheses:
            assert hypothesis.node.path_tokens == hypothesis.tokens
    with (
        lb.Context(target, n_ctx=512, n_seq_max=3, n_threads=1, batch_invariant=True) as small,
        Branch.start(small, STORY, sampling=WARM) as root,
    ):
        assert search.tree_search(root, reward, 20, **options).hypotheses == expected.hypotheses
        small.audit()


def test_given_moves_are_scored_in_one_decode_each_time(ctx: Context) -> None:
    with (
        Branch.start(ctx, STORY, sampling=WARM) as root,
        search.TreeSearch(root, lambda text: [" one two", " one three", " four"]) as tree,
    ):
        before = ctx.decoder.n_decodes
        tree.ask()
        assert ctx.decoder.n_decodes - before == tree.lines.stats.decodes == 1


def test_few_sequences_score_given_moves_the_same(target: lb.Model, ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        expected = search.tree_search(root, matches, 30, expand=letters, n=5)
    with (
        lb.Context(target, n_ctx=256, n_seq_max=2, n_threads=1, batch_invariant=True) as small,
        Branch.start(small, STORY, sampling=WARM) as root,
    ):
        found = search.tree_search(root, matches, 30, expand=letters, n=5)
        assert found.hypotheses == expected.hypotheses
        small.audit()


def test_ask_and_tell_are_checked(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        with search.TreeSearch(root, 2, step=2) as tree:
            asked = tree.ask(3)
            assert len(asked) == 3
            with pytest.raises(UsageError):
                tree.tell(tree.lines.root, 1.0)
            with pytest.raises(ConfigError):
                tree.tell(asked[0][0], math.nan)
            for node, _ in asked:
                tree.tell(node, 0.5)
            with pytest.raises(UsageError):
                tree.tell(asked[0][0], 0.5)
            assert tree.result(3).best.score == 0.5
        assert ctx.n_seq_free == 7


@pytest.mark.parametrize("expand", [letters, 2])
def test_a_failed_decode_leaves_nothing_behind(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, expand: Any
) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:

        def texts() -> list[str]:
            found = search.tree_search(
                root, matches, 6, expand=expand, step=2, max_tokens=6, rollout_tokens=2, n=6
            )
            return [h.text for h in found.hypotheses]

        assert check_every_failure(root, texts, monkeypatch) >= 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"iterations": 0},
        {"expand": 0},
        {"expand": lambda text: "abc"},
        {"expand": lambda text: [""]},
        {"exploration": -1.0},
        {"prior": "mine"},
        {"step": ""},
        {"max_tokens": 0},
        {"rollout_tokens": -1},
        {"parallel": 0},
        {"n": 0},
        {"reward": 3},
        {"reward": lambda text: math.nan},
        {"seed": "x"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_arguments_are_refused(ctx: Context, wrong: dict[str, Any]) -> None:
    with Branch.start(ctx, STORY) as root:
        with pytest.raises(ConfigError):
            search.tree_search(root, **{"reward": matches, "max_tokens": 8, **wrong})
        assert ctx.n_seq_free == 7


def test_a_search_that_only_asks_for_rewards_can_be_ended(ctx: Context) -> None:
    asked: list[str] = []

    def reward(text: str) -> float:
        asked.append(text)
        return 0.0

    with Branch.start(ctx, "Once") as branch:
        found = search.tree_search(
            branch,
            reward,
            1000,
            expand=lambda text: [] if text else [" a", " b"],
            parallel=2,
            on_step=lambda _: len(asked) >= 10,
        )
    assert len(asked) == 10
    assert found.hypotheses
