"""The laws, each by itself: fork = replay, rewind = never happened, prune leaves no trace.

All moves in any order are in `test_state_machine`. Logits are compared to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

import llamabranch as lb
from llamabranch import Branch, Context, Distribution, SamplingParams
from llamabranch.branch import BranchStore
from llamabranch.errors import CacheFullError

WITH_MEMORY = SamplingParams(
    temperature=0.9, repeat_penalty=1.3, presence_penalty=0.2, penalty_last_n=12,
    dry_multiplier=0.8, dry_allowed_length=1, xtc_probability=0.3, seed=5,
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """All observable state at a branch's end."""

    logits: npt.NDArray[np.float32]
    choice: Distribution
    produced: lb.Produced
    entropy: float
    log_likelihood: float
    text: str


def facts(branch: Branch) -> Facts:
    return Facts(
        branch.logits, branch.distribution(), branch.produce(), branch.entropy(),
        branch.log_likelihood(), branch.text,
    )  # fmt: skip


def assert_same(one: Facts, two: Facts) -> None:
    assert np.array_equal(one.logits, two.logits)
    assert np.array_equal(one.choice.ids, two.choice.ids)
    assert np.array_equal(one.choice.logprobs, two.choice.logprobs)
    assert one.produced == two.produced
    assert one.entropy == two.entropy
    assert one.log_likelihood == two.log_likelihood
    assert one.text == two.text


# -- each law by itself, small enough to read --------------------------------------------------------

STORY = "Once upon a time there was a poor woodcutter who lived with his wife and two children"


def test_fork_is_replay(ctx: Context, other_ctx: Context) -> None:
    root = Branch.start(ctx, STORY, temperature=0.8, seed=1)
    child = root.fork()
    list(root.generate(20))  # the parent goes elsewhere, in the same cache
    list(child.generate(10))
    again = Branch.start(other_ctx, STORY, temperature=0.8, seed=1)
    again.extend(child.generated)
    assert_same(facts(child), facts(again))


def test_fork_keeps_parent_logits(ctx: Context) -> None:
    root = Branch.start(ctx, STORY, temperature=0.8, seed=1)
    before = facts(root)
    children = root.fork_many(5)
    for child in children:
        list(child.generate(7))
    assert_same(facts(root), before)
    for child in children:
        child.prune()
    assert_same(facts(root), before)


def test_rewound_is_never_happened(ctx: Context, other_ctx: Context) -> None:
    branch = Branch.start(ctx, STORY, sampling=WITH_MEMORY)
    again = Branch.start(other_ctx, STORY, sampling=WITH_MEMORY)
    stops = []
    for _ in range(5):
        stops.append((branch.position, facts(branch)))
        branch.extend([t.token for t in again.generate(4)], logits="last")
        assert_same(facts(branch), facts(again))
    for position, before in reversed(stops):
        branch.rewind(position)
        assert branch.position == position
        assert_same(facts(branch), before)


def test_pruned_leaves_its_sequence_clean(ctx: Context, other_ctx: Context) -> None:
    for _ in range(3):
        branch = Branch.start(ctx, [9, 8, 7], temperature=0.0)
        list(branch.generate(10))
        sequence = branch.seq_id
        branch.prune()
        assert ctx.usage().sequences == {}
    branch = Branch.start(ctx, STORY, temperature=0.8, seed=1)
    assert branch.seq_id == sequence
    again = Branch.start(other_ctx, STORY, temperature=0.8, seed=1)
    assert_same(facts(branch), facts(again))


def test_branch_in_the_holes_of_another_is_the_same(ctx: Context, other_ctx: Context) -> None:
    ctx.decode([5] * 900, 0, logits="none")
    ctx.kv_cache_remove(0, 40, 60)
    ctx.kv_cache_remove(0, 200, 500)
    branch = Branch.start(ctx, STORY, temperature=0.0)
    again = Branch.start(other_ctx, STORY, temperature=0.0)
    assert [t.token for t in branch.generate(60)] == [t.token for t in again.generate(60)]
    assert_same(facts(branch), facts(again))


@pytest.mark.parametrize(
    "fill",
    [
        lambda branch: branch.commit(7),
        lambda branch: branch.extend([7] * 40),
        lambda branch: branch.fork().extend([7] * 40),
    ],
    ids=["commit", "extend", "fork"],
)
def test_full_cache_harms_no_branch_and_a_prune_helps(
    fill: Callable[[Branch], object], target: lb.Model
) -> None:
    with Context(target, n_ctx=256, n_seq_max=4, n_batch=32, n_threads=1) as ctx:
        branch = Branch.start(ctx, STORY, temperature=0.8, seed=1)
        other = Branch.start(ctx, [3] * (256 - branch.position), temperature=0.0)
        before, theirs = facts(branch), facts(other)
        with pytest.raises(CacheFullError, match="full") as caught:
            fill(branch)
        assert "prune" in str(caught.value.hint)
        assert_same(facts(branch), before)
        assert_same(facts(other), theirs)
        ctx.audit()
        other.prune()
        fill(branch)
        ctx.audit()


def test_generation_gives_one_token_more_than_there_are_cells(
    target: lb.Model, other_ctx: Context
) -> None:
    with Context(target, n_ctx=256, n_seq_max=4, n_batch=32, n_threads=1) as ctx:
        branch = Branch.start(ctx, STORY, temperature=0.8, seed=1)
        other = Branch.start(ctx, [3] * (256 - branch.position), temperature=0.0)
        expected, theirs = branch.produce(), facts(other)
        given = []
        with pytest.raises(CacheFullError, match="full"):
            for token in branch.generate(40):
                given.append(token)
        assert given == [expected] and branch.generated == [expected.token]
        with pytest.raises(CacheFullError):
            branch.produce()
        assert_same(facts(other), theirs)
        ctx.audit()
        other.prune()
        again = Branch.start(other_ctx, STORY, temperature=0.8, seed=1)
        again.commit(expected.token)
        assert_same(facts(branch), facts(again))
        assert list(branch.generate(40)) == list(again.generate(40))
        ctx.audit()


def test_row_that_finds_no_cell_is_decoded_later(target: lb.Model, other_ctx: Context) -> None:
    """After a rewind the logits are computed once more; where cells are shared this takes a new cell."""
    with Context(target, n_ctx=256, n_seq_max=5, n_batch=64, n_threads=1) as ctx:
        root = Branch.start(ctx, list(range(100, 300)), temperature=0.0)
        before = facts(root)
        children = [root.fork(), root.fork()]
        other = Branch.start(ctx, [3] * 56, temperature=0.0)
        for child in children:
            child.rewind(50)
            for _ in range(2):
                with pytest.raises(CacheFullError):
                    child.produce()
        grandchild = children[0].fork()
        assert_same(facts(root), before)
        other.prune()
        children[0].prefill([7, 8, 9])
        BranchStore(ctx).prefill({grandchild: [7, 8, 9]})
        again = Branch.start(other_ctx, [*range(100, 150), 7, 8, 9], temperature=0.0)
        assert_same(facts(children[0]), facts(again))
        assert_same(facts(grandchild), facts(again))
        children[1].commit(7)
        assert children[1].position == 51 == ctx.kv_cache_size(children[1].seq_id)
        ctx.audit()
