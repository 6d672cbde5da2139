"""Branches in a cache that is full, or full of holes; all moves in any order: `test_state_machine`."""

from __future__ import annotations

import pytest

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.branch import BranchStore
from llamabranch.errors import CacheFullError


def facts(branch: Branch) -> tuple[object, ...]:
    """Return all observable state at a branch's end."""
    choice = branch.distribution()
    return (
        branch.logits.tolist(), choice.ids.tolist(), choice.logprobs.tolist(), branch.produce(),
        branch.entropy(), branch.log_likelihood(), branch.text,
    )  # fmt: skip


STORY = "Once upon a time there was a poor woodcutter who lived with his wife and two children"


def test_branch_in_the_holes_of_another_is_the_same(ctx: Context, other_ctx: Context) -> None:
    ctx.decode([5] * 900, 0, logits="none")
    ctx.kv_cache_remove(0, 40, 60)
    ctx.kv_cache_remove(0, 200, 500)
    branch = Branch.start(ctx, STORY, temperature=0.0)
    again = Branch.start(other_ctx, STORY, temperature=0.0)
    assert [t.token for t in branch.generate(60)] == [t.token for t in again.generate(60)]
    assert facts(branch) == facts(again)


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
        assert facts(other) == theirs
        ctx.audit()
        other.prune()
        again = Branch.start(other_ctx, STORY, temperature=0.8, seed=1)
        again.commit(expected.token)
        assert facts(branch) == facts(again)
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
        assert facts(root) == before
        other.prune()
        children[0].prefill([7, 8, 9])
        BranchStore(ctx).prefill({grandchild: [7, 8, 9]})
        again = Branch.start(other_ctx, [*range(100, 150), 7, 8, 9], temperature=0.0)
        assert facts(children[0]) == facts(again)
        assert facts(grandchild) == facts(again)
        children[1].commit(7)
        assert children[1].position == 51 == ctx.kv_cache_size(children[1].seq_id)
        ctx.audit()
