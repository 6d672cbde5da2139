"""Batch invariance: other content of cache and batch changes no bit of a branch's logits.

The bundled pair in default contexts. A branch is compared with the same tokens decoded one by one, alone,
in a clean cache: next to other branches, in cells that pruned ones freed, forked, stepped in any
order, verified, and at length.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from divergence import first_divergence
from rounding import rounding

import llamabranch as lb
from llamabranch import Branch, BranchStore, Context, SamplingParams, SpeculativeConfig, Speculator
from llamabranch.generation.drafter import Draft
from llamabranch.generation.verify import Plan

Logits = npt.NDArray[np.float32]
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, seed=42)
PROMPT = "Once upon a time there was a king who had three daughters, and the youngest"


@pytest.fixture(params=["target", "draft"])
def model(request: pytest.FixtureRequest) -> lb.Model:
    found: lb.Model = request.getfixturevalue(request.param)
    return found


class Alone:
    """Sequences decoded token by token in a clean cache; common prefixes are decoded once."""

    def __init__(self, model: lb.Model, n_ctx: int = 2048) -> None:
        self.ctx = Context(model, n_ctx=n_ctx, n_seq_max=2, n_threads=1)
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
    found = Alone(model)
    yield found
    found.ctx.close()


@pytest.fixture
def shared(model: lb.Model) -> Iterator[Context]:
    with Context(model, n_ctx=2048, n_seq_max=16, n_threads=1) as ctx:
        assert ctx.capabilities.batch_invariant
        yield ctx
        ctx.audit()


def random_tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(2, 4000, n)]


def check(branch: Branch, alone: Alone) -> None:
    assert np.array_equal(branch.logits, alone.logits(branch.tokens))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16])
def test_branches_next_to_each_other(size: int, shared: Context, alone: Alone) -> None:
    """Of different lengths and texts, ``size`` of them in a decode; then blocks and drafts of that size:
    each token has the logits of the text up to it, however much of a draft is kept."""
    rng = np.random.default_rng(size)
    branches = [Branch.start(shared, random_tokens(rng, 3 + 5 * i)) for i in range(size)]
    store = BranchStore(shared)
    for _ in range(3):
        store.commit({b: random_tokens(rng, 1)[0] for b in branches})
    for branch in branches[:: max(1, size // 3)]:
        check(branch, alone)
    branch, bystander = branches[0], branches[-1]
    for length in (size, 17 - size):
        before, block = branch.tokens, random_tokens(rng, length)
        for i, row in enumerate(branch.extend(block, "all")):
            assert np.array_equal(row, alone.logits(before + block[: i + 1])), (length, i)
        before = branch.tokens
        plan = Plan(branch.sequence, Draft(block))
        arrays = [row.array.copy() for row in plan.decode()]
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
        BranchStore(shared).commit({c: random_tokens(rng, 1)[0] for c in children})
    children[0].extend(random_tokens(rng, 12))
    for branch in (root, children[0], children[3]):
        check(branch, alone)


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "seeded"])
def test_long_text_is_the_same_alone_and_batched(
    params: SamplingParams, target: lb.Model, draft_ctx: Context
) -> None:
    """500 tokens: plainly alone, stepped with seven others, and speculatively among them."""
    with (
        Context(target, n_ctx=1024, n_seq_max=1, n_threads=1) as quiet,
        Branch.start(quiet, PROMPT, sampling=params) as branch,
    ):
        expected = [t.token for t in branch.generate(500)]
    n = len(expected)
    with Context(target, n_ctx=8192, n_seq_max=12, n_threads=1) as busy:
        branches = [Branch.start(busy, PROMPT, sampling=params)]
        branches += [Branch.start(busy, [5 + i] * 9, temperature=1.0, seed=i) for i in range(7)]
        store = BranchStore(busy)
        for _ in range(n // 2):
            store.step([b for b in branches if b.state != "finished"])
        config = SpeculativeConfig(draft_k=4)
        speculator = Speculator(busy, lb.ModelDrafter(draft_ctx), config)
        for _ in range(5):
            left = min(20, n - len(branches[0].generated))
            if left > 0 and branches[0].state != "finished":
                speculator.generate(branches[0], max_tokens=left).finish()
            store.step([b for b in branches[1:] if b.state != "finished"])
        list(branches[0].generate(n - len(branches[0].generated)))
        assert branches[0].generated == expected
        speculator.forget(branches[0])
        busy.audit()


# -- contexts that are not batch-invariant -----------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "seeded"])
def test_first_difference_of_inexact_contexts_is_a_near_tie(
    params: SamplingParams, target: lb.Model, draft_ctx: Context
) -> None:
    """F16 K/V without flash attention: where texts part, the two tokens were almost equally good."""
    with Context(target, n_ctx=1024, n_threads=1, kv_type="f16", flash_attention=False) as ctx:
        prompt, allowed = ctx.tokenize(PROMPT) * 8, rounding(ctx)
        for start in range(4):
            with Branch.start(ctx, prompt[start:], sampling=params) as branch:
                left = [t.token for t in branch.generate(150)]
            speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=8))
            generation = speculator.generate(prompt[start:], max_tokens=150, sampling=params)
            right = generation.finish().tokens
            found = first_divergence(ctx, prompt[start:], left, right, params, params.seed or 0)
            assert (found is None) == (left == right)
            if found is not None:
                assert left[: found.position] == right[: found.position]
                assert 0 <= found.gap <= allowed, found
        assert ctx.usage().cells_used == 0
