"""Batch invariance: other content of cache and batch changes no bit of a branch's logits.

The tests use the bundled pair in default contexts. A branch is compared with the same tokens decoded one
by one, alone, in a clean cache. The branch runs next to others, in cells that pruned branches freed; it
is forked, stepped in any order, verified, and long.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import together

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.generation.drafter import Draft
from llamabranch.generation.verify import Plan

Logits = npt.NDArray[np.float32]


@pytest.fixture(params=["target", "draft"])
def model(request: pytest.FixtureRequest) -> lb.Model:
    opened: lb.Model = request.getfixturevalue(request.param)
    return opened


class Alone:
    """Sequences decoded token by token in a clean cache; common prefixes are decoded once."""

    def __init__(self, model: lb.Model, n_ctx: int = 2048) -> None:
        self.ctx = Context(model, n_ctx=n_ctx, n_seq_max=2, n_threads=1, exact=True)
        self.tokens: list[int] = []
        self.rows: list[Logits] = []

    def logits(self, tokens: list[int]) -> Logits:
        same = 0
        while same < min(len(tokens), len(self.tokens)) and tokens[same] == self.tokens[same]:
            same += 1
        self.ctx.kv_cache_remove(0, same)
        del self.tokens[same:], self.rows[same:]
        for token in tokens[same:]:
            self.ctx.decode([token], len(self.tokens))
            self.tokens.append(token)
            self.rows.append(self.ctx.logits())
        return self.rows[-1]


@pytest.fixture
def alone(model: lb.Model) -> Iterator[Alone]:
    single = Alone(model)
    yield single
    single.ctx.close()


@pytest.fixture
def shared(model: lb.Model) -> Iterator[Context]:
    with Context(model, n_ctx=2048, n_seq_max=16, n_threads=1, exact=True) as ctx:
        assert ctx.capabilities.exact
        yield ctx
        ctx.audit()


def random_tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(2, 4000, n)]


def check(branch: Branch, alone: Alone) -> None:
    assert np.array_equal(branch.logits, alone.logits(branch.tokens))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16])
def test_branches_next_to_each_other(size: int, shared: Context, alone: Alone) -> None:
    """Branches of different lengths and texts, ``size`` per decode; then blocks and drafts of that size.

    Each token has the logits of the text up to it, however much of a draft is kept."""
    rng = np.random.default_rng(size)
    branches = [Branch.start(shared, random_tokens(rng, 3 + 5 * i)) for i in range(size)]
    for _ in range(3):
        together.commit(shared, {b: random_tokens(rng, 1)[0] for b in branches})
    for branch in branches[:: max(1, size // 3)]:
        check(branch, alone)
    branch, bystander = branches[0], branches[-1]
    for length in (size, 17 - size):
        before, block = branch.tokens, random_tokens(rng, length)
        for i, row in enumerate(branch.extend(block, "all")):
            assert np.array_equal(row, alone.logits(before + block[: i + 1])), (length, i)
        before = branch.tokens
        plan = Plan(branch.sequence, Draft(block))
        arrays = [row.array.copy() for row in plan.decode()][
            -length:
        ]  # the first may be the text's
        for i, array in enumerate(arrays):
            assert np.array_equal(array, alone.logits(before + block[: i + 1])), (length, i)
        plan.keep(int(rng.integers(0, length + 1)))
        check(branch, alone)
        if bystander is not branch:
            bystander.commit(random_tokens(rng, 1)[0])
            check(bystander, alone)


@pytest.mark.filterwarnings("ignore::llamabranch.errors.ContextLengthWarning")
@pytest.mark.parametrize("n", [600, 1500])
def test_long_contexts(n: int, shared: Context, alone: Alone) -> None:
    rng = np.random.default_rng(n)
    root = Branch.start(shared, random_tokens(rng, n))
    children = root.fork_many(5)
    for _ in range(4):
        together.commit(shared, {c: random_tokens(rng, 1)[0] for c in children})
    children[0].extend(random_tokens(rng, 12))
    for branch in (root, children[0], children[3]):
        check(branch, alone)
