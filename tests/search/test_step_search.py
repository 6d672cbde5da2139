"""step_search: what each method keeps, where steps end, plain text."""

from __future__ import annotations

import math

import pytest

import llamabranch as lb
from llamabranch import Branch, Context, search
from llamabranch.search.continuations import Continuation
from llamabranch.search.node import SearchNode
from llamabranch.search.steps import rebase_counts

STORY = "Once upon a time there was"
WARM = lb.SamplingParams(temperature=0.9, seed=5)
METHODS = ["beam", "dvts", "rebase", "particles"]


def likes_e(text: str) -> float:
    return text.count("e") / (1 + len(text))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [4, ","])
def test_one_text_is_plain_text(ctx: Context, method: str, step: str | int) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        found = search.step_search(
            root, likes_e, 1, method=method, beam_width=1, step=step, max_tokens=30
        )
        with root.fork() as branch:
            assert found.best.text == "".join(t.text for t in branch.generate(30))
        assert found.best.score == likes_e(found.best.text)
        assert found.best.finish_reason == "length"


@pytest.mark.parametrize("method", METHODS)
def test_every_prefix_of_a_hypothesis_was_a_node_with_its_reward(ctx: Context, method: str) -> None:
    asked: dict[str, float] = {}

    def reward(text: str) -> float:
        asked[text] = likes_e(text)
        return asked[text]

    with Branch.start(ctx, STORY, sampling=WARM) as root:
        found = search.step_search(
            root, reward, 4, method=method, beam_width=2, step=5, max_tokens=20
        )
    assert [h.score for h in found.hypotheses] == sorted(
        (h.score for h in found.hypotheses), reverse=True
    )
    for hypothesis in found.hypotheses:
        assert [len(node.tokens) for node in hypothesis.node.path] == [5] * 4
        assert hypothesis.node.path_tokens == hypothesis.tokens
        for node in hypothesis.node.path:
            assert node.path_text in asked
            assert node.score == asked[node.path_text]


def test_beam_keeps_the_best_and_runs_to_the_end_in_the_last_iteration(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        found = search.step_search(
            root, likes_e, 4, beam_width=2, step=5, max_steps=3, max_tokens=25
        )
    first = found.tree.children
    assert len(first) == 4
    going_on = [node for node in first if node.children]
    best = sorted(first, key=lambda node: -node.score)[:2]
    assert set(going_on) == set(best)
    assert [len(node.children) for node in going_on] == [2, 2]
    assert {len(h.node.path) for h in found.hypotheses} == {3}
    assert {len(h.tokens) for h in found.hypotheses} == {25}


def test_dvts_keeps_one_in_each_tree(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        found = search.step_search(
            root, likes_e, 4, method="dvts", beam_width=2, step=5, max_tokens=15
        )
    first = found.tree.children
    for pair in (first[:2], first[2:]):
        best = max(pair, key=lambda node: node.score)
        assert [bool(node.children) for node in pair] == [node is best for node in pair]
    assert len(found.hypotheses) == 4


def test_rebase_shares_the_width_by_reward() -> None:
    lines = [Continuation(SearchNode(None, (), 0.0), i, None) for i in range(4)]
    rewards = [0.1, 0.9, 0.5, 0.9]
    scored = list(zip(lines, rewards, strict=True))
    counts = rebase_counts(scored, 10, 0.2)
    left, expected = 10, []
    ranked = sorted(scored, key=lambda pair: -pair[1])
    for i, (line, score) in enumerate(ranked):
        total = sum(math.exp(s / 0.2) for _, s in ranked[i:])
        count = min(left, math.ceil(left * math.exp(score / 0.2) / total))
        if count:
            expected.append((line, count))
        left -= count
    assert counts == expected
    assert sum(count for _, count in counts) == 10
    assert rebase_counts([], 5, 0.2) == []


def test_entropy_ends_a_step_before_an_uncertain_token(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        found = search.step_search(root, likes_e, 2, beam_width=2, entropy=2.0, max_tokens=24)
        for hypothesis in found.hypotheses:
            branch = root.fork()
            for node in hypothesis.node.path:
                for i, token in enumerate(node.tokens):
                    if i and node is not found.best.node:
                        assert branch.entropy() <= 2.0
                    elif i == 0 and branch.position > root.position:
                        assert branch.entropy() > 2.0 or node is hypothesis.node
                    branch.commit(token)
            branch.prune()
