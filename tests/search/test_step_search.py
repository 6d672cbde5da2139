"""step_search: which texts continue, where steps end, plain text."""

from __future__ import annotations

from test_every_search import likes_e

import llamabranch as lb
from llamabranch import Branch, Context, search

STORY = "Once upon a time there was"
WARM = lb.SamplingParams(temperature=0.9, seed=5)


def test_every_prefix_of_a_hypothesis_was_a_node_with_its_reward(ctx: Context) -> None:
    asked: dict[str, float] = {}

    def reward(text: str) -> float:
        asked[text] = likes_e(text)
        return asked[text]

    with Branch.start(ctx, STORY, sampling=WARM) as root:
        result = search.step_search(root, reward, 4, beam_width=2, step=5, max_tokens=20)
    assert [h.score for h in result.hypotheses] == sorted(
        (h.score for h in result.hypotheses), reverse=True
    )
    for hypothesis in result.hypotheses:
        assert [len(node.tokens) for node in hypothesis.node.path] == [5] * 4
        for node in hypothesis.node.path:
            assert node.path_text in asked
            assert node.score == asked[node.path_text]


def test_the_best_go_on_and_runs_to_the_end_in_the_last_iteration(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        result = search.step_search(
            root, likes_e, 4, beam_width=2, step=5, max_steps=3, max_tokens=25
        )
    first = result.tree.children
    assert len(first) == 4
    going_on = [node for node in first if node.children]
    best = sorted(first, key=lambda node: -node.score)[:2]
    assert set(going_on) == set(best)
    assert [len(node.children) for node in going_on] == [2, 2]
    assert {len(h.node.path) for h in result.hypotheses} == {3}
    assert {len(h.tokens) for h in result.hypotheses} == {25}


def test_entropy_ends_a_step_before_an_uncertain_token(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        result = search.step_search(root, likes_e, 2, beam_width=2, entropy=2.0, max_tokens=24)
        for hypothesis in result.hypotheses:
            branch = root.fork()
            for node in hypothesis.node.path:
                for i, token in enumerate(node.tokens):
                    if i and node is not result.best.node:
                        assert branch.entropy() <= 2.0
                    elif i == 0 and branch.position > root.position:
                        assert branch.entropy() > 2.0 or node is hypothesis.node
                    branch.commit(token)
            branch.prune()
