"""Reserved cells: what they guarantee, when they are freed, and what happens when the cache is full.

The logits of a branch must equal, to the bit, those of the same tokens decoded one by one in a clean
cache.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import together

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.context.memory import CellOrder, Memory
from llamabranch.errors import CacheFullError, SnapshotError

Logits = npt.NDArray[np.float32]
Replay = Callable[[Sequence[int]], Logits]


@pytest.fixture
def replay(target: lb.Model) -> Iterator[Replay]:
    with Context(target, n_ctx=1024, n_seq_max=1, n_threads=1, exact=True) as quiet:

        def logits(tokens: Sequence[int]) -> Logits:
            quiet.kv_cache_clear()
            quiet.decode(tokens, 0)
            return quiet.logits()

        yield logits


@pytest.fixture
def small(target: lb.Model) -> Iterator[Context]:
    """A context of 256 cells for eight branches, which is soon full."""
    with Context(target, n_ctx=256, n_seq_max=8, n_threads=1, exact=True) as ctx:
        yield ctx
        ctx.audit()


def order_of(ctx: Context) -> CellOrder:
    assert ctx.kv_cache.order.is_kept
    return ctx.kv_cache.order


def random_tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(2, 4000, n)]


def check(ctx: Context, branches: Sequence[Branch], replay: Replay) -> None:
    """Assert that all branches are exact and that every common beginning is stored once."""
    for branch in branches:
        assert np.array_equal(branch.logits, replay(branch.tokens)), branch
    texts = [tuple(branch.tokens) for branch in branches]
    n_needed = len({text[:n] for text in texts for n in range(1, len(text) + 1)})
    usage = ctx.usage()
    # After a rewind the last token is decoded again, into a cell of its own.
    assert n_needed <= usage.cells_used <= n_needed + len(branches)
    assert usage.cells_reserved == order_of(ctx).n_cells
    assert usage.cells_used + usage.cells_reserved <= ctx.n_ctx
    ctx.audit()


def compactions_of(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets True whenever all sequences of a context are decoded again."""
    done, compact = [], ctx.kv_cache.compact

    def noted() -> bool:
        done.append(compact())
        return done[-1]

    monkeypatch.setattr(ctx.kv_cache, "compact", noted)
    return done


# -- when cells are reserved, and when they are freed --------------------------------------------------


def test_tail_below_another_branch_is_reserved_until_that_is_pruned(ctx: Context) -> None:
    rng = np.random.default_rng(1)
    low, high = (Branch.start(ctx, random_tokens(rng, 30)) for _ in range(2))
    low.extend(random_tokens(rng, 10))
    high.extend(random_tokens(rng, 10))
    high.rewind(35)  # on top: no branch has cells above it
    assert order_of(ctx).n_cells == 0
    low.rewind(20)
    assert order_of(ctx).n_cells == 20
    assert ctx.usage().cells_used == 55
    assert ctx.usage().cells_free == ctx.n_ctx - 55  # reserved cells count as free
    low.rewind(15)
    assert order_of(ctx).n_cells == 25
    high.prune()
    assert order_of(ctx).n_cells == 0
    assert ctx.usage().cells_used == 15


def test_shared_cells_are_not_reserved(ctx: Context) -> None:
    rng = np.random.default_rng(2)
    root = Branch.start(ctx, random_tokens(rng, 50))
    child = root.fork()
    child.extend(random_tokens(rng, 5))
    root.rewind(20)
    assert order_of(ctx).n_cells == 0
    root.extend(random_tokens(rng, 5))  # above the child's
    child.prune()  # 30 shared cells, 5 of its own, and one that root has decoded again
    assert order_of(ctx).n_cells == 36
    root.prune()
    assert order_of(ctx).n_cells == 0
    alone = Branch.start(ctx, random_tokens(rng, 50))
    for _ in range(9):
        alone.extend(random_tokens(rng, 9))
        alone.rewind(int(rng.integers(5, alone.position)))
        assert order_of(ctx).n_cells == 0 and order_of(ctx).in_order


# -- a full cache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("can_move", [True, False], ids=["copied", "decoded again"])
def test_compaction_shares_what_was_shared(
    can_move: bool, small: Context, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Memory, "can_move", can_move)
    rng = np.random.default_rng(5)
    compactions = compactions_of(small, monkeypatch)
    root = Branch.start(small, random_tokens(rng, 60))
    children = root.fork_many(4)
    for child in children:
        child.extend(random_tokens(rng, 10))
    grandchild = children[0].fork()
    grandchild.extend(random_tokens(rng, 40))
    last = Branch.start(small, random_tokens(rng, 30))
    grandchild.rewind(75)
    children[1].rewind(65)
    n_used = small.usage().cells_used
    assert n_used == 60 + 4 * 10 - 5 + 5 + 30
    assert order_of(small).n_cells == 40
    last.extend(random_tokens(rng, small.n_ctx - n_used))
    assert sum(compactions) == 1
    assert order_of(small).n_cells == 0
    assert small.usage().cells_used == small.n_ctx
    check(small, [root, *children, grandchild, last], replay)
    with pytest.raises(CacheFullError):
        last.commit(5)
    check(small, [root, *children, grandchild, last], replay)


def test_full_cache_with_raw_sequences_loses_the_order_and_continues(small: Context) -> None:
    """The context does not know the tokens of raw sequences, so it cannot be compacted."""
    rng = np.random.default_rng(7)
    small.decode(random_tokens(rng, 80), 0, 0)
    branch = Branch.start(small, random_tokens(rng, 80))
    small.kv_cache_remove(0, 20)
    assert order_of(small).n_cells == 60
    assert order_of(small).in_order
    branch.extend(random_tokens(rng, 150))
    assert not order_of(small).in_order
    assert order_of(small).n_cells == 0
    assert small.usage().cells_used == 20 + 230
    small.audit()
    with pytest.raises(CacheFullError):
        branch.extend(random_tokens(rng, 7))
    assert branch.position == 230
    branch.prune()
    small.kv_cache_clear()
    assert order_of(small).in_order


@pytest.mark.parametrize(
    ("way", "end"),
    [("copied", ""), ("copied", "interrupted"), ("copied", "refused"), ("decoded", "interrupted")],
)
def test_compaction_that_fails_is_finished_first(
    way: str, end: str, small: Context, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C must not leave branches without their cells.

    It waits until copies of cells are done, and the rest is decoded later. If llama.cpp accepts one copy
    and
    refuses the next, all are decoded."""
    rng = np.random.default_rng(8)
    branches = [Branch.start(small, random_tokens(rng, 60)) for _ in range(3)]
    branches[0].rewind(20)
    monkeypatch.setattr(Memory, "can_move", way == "copied")
    handle = small.decoder.handle
    set_state, n_set, n_decodes, before = handle.set_state, 0, 0, small.decoder.n_decodes

    def set_or_fail(seq_id: int, state: npt.NDArray[np.uint8]) -> None:
        nonlocal n_set
        n_set += 1
        if n_set == 2 and end == "refused":
            raise SnapshotError("llama.cpp cannot take the K/V")
        if n_set == 2 and end == "interrupted":
            _thread.interrupt_main()
        set_state(seq_id, state)

    def interrupted(decode: Callable[[int], int], n: int) -> int:
        nonlocal n_decodes
        code = decode(n)
        n_decodes += 1
        if n_decodes == 3:  # the decode that found the cache full, a replay, and this one
            raise KeyboardInterrupt
        return code

    monkeypatch.setattr(handle, "set_state", set_or_fail)
    if way == "decoded":
        monkeypatch.setattr(handle, "decode", partial(interrupted, handle.decode))
    with pytest.raises(KeyboardInterrupt) if end == "interrupted" else nullcontext():
        branches[2].extend(random_tokens(rng, 100))
    monkeypatch.undo()
    n_decodes = small.decoder.n_decodes - before
    if way == "copied":
        assert n_set == (2 if end == "refused" else 3)
        assert (n_decodes > 2) == (end == "refused")
    assert order_of(small).n_cells == 0 or way == "decoded"
    check(small, branches, replay)


def test_many_prompts_over_several_decodes_keep_the_order(
    target: lb.Model, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is made before the first decode. Between two decodes the branch and the cache do not agree."""
    rng = np.random.default_rng(9)
    with Context(target, n_ctx=256, n_seq_max=8, n_batch=32, n_threads=1, exact=True) as ctx:
        compactions = compactions_of(ctx, monkeypatch)
        low, high = (Branch.start(ctx, random_tokens(rng, 80)) for _ in range(2))
        low.rewind(10)
        new = [Branch.create(ctx) for _ in range(3)]
        together.prefill(ctx, {branch: random_tokens(rng, 45) for branch in new})
        assert sum(compactions) == 1
        assert order_of(ctx).in_order
        check(ctx, [low, high, *new], replay)
