"""Generation, which decodes, measures and draws in one native call, is what separate calls make."""

from __future__ import annotations

import math
from typing import Any

import pytest

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.errors import DecodeInterruptedError
from llamabranch.native import core

pytestmark = pytest.mark.skipif(not core.available, reason=f"compiled core: {core.description}")

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": {257: -math.inf}},
    {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"repeat_penalty": 1.2},
]


def _apart(branch: Branch, n: int) -> list[lb.Produced]:
    made = []
    for _ in range(n):
        made.append(branch.produce())
        if made[-1].is_stop:
            break
        branch.commit(made[-1].token)
    return made


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_step_is_produce_and_commit(ctx: Context, settings: dict[str, Any]) -> None:
    for seed in range(3):
        with Branch.start(ctx, "Once upon a time", seed=seed, **settings) as one, one.fork() as two:
            together = [one.step() for _ in range(40)]
            apart = _apart(two, 40)
            assert together[: len(apart)] == apart


def test_token_drawn_ahead_is_dropped_where_the_seed_changes(ctx: Context) -> None:
    with Branch.start(ctx, "Once upon a time", seed=1) as one, one.fork() as two:
        for _ in range(3):
            produced = one.step()
            two.commit(produced.token)
        one.reseed(99)
        two.reseed(99)
        assert one.produce() == two.produce()
        one.resample(one.sampling.replace(temperature=1.7))
        two.resample(two.sampling.replace(temperature=1.7))
        assert one.produce() == two.produce()


def test_interrupted_step_leaves_the_branch_as_it_was(ctx: Context) -> None:
    with Branch.start(ctx, "Once upon a time", seed=1) as branch, branch.fork() as twin:
        expected = [twin.step() for _ in range(20)]
        made = []
        for i in range(20):
            if i % 3 == 0:
                ctx.interrupt()
                position = branch.position
                with pytest.raises(DecodeInterruptedError):
                    branch.step()
                assert branch.position == position
            made.append(branch.step())
        assert made == expected
