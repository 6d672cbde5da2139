"""Parked cells: what they keep true, when they are freed, and what happens when the cache is full.

A branch's logits are compared, to the bit, with the same tokens decoded one by one in a clean cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

import llamabranch as lb
from llamabranch import Branch, BranchStore, Context, SamplingParams, SpeculativeConfig, Speculator
from llamabranch.branch.verification import Verification
from llamabranch.context.cell_order import CellOrder
from llamabranch.errors import CacheFullError

Logits = npt.NDArray[np.float32]
Replay = Callable[[Sequence[int]], Logits]
WARM = SamplingParams(temperature=0.8, seed=42)


@pytest.fixture
def replay(target: lb.Model) -> Iterator[Replay]:
    with Context(target, n_ctx=1024, n_seq_max=1, n_threads=1) as quiet:

        def logits(tokens: Sequence[int]) -> Logits:
            quiet.kv_cache_clear()
            quiet.decode(tokens, 0)
            return quiet.logits()

        yield logits


@pytest.fixture
def small(target: lb.Model) -> Iterator[Context]:
    """256 cells for eight branches: soon full."""
    with Context(target, n_ctx=256, n_seq_max=8, n_threads=1) as ctx:
        yield ctx
        ctx.audit()


def parking_of(ctx: Context) -> CellOrder:
    found = ctx.kv_cache.order
    assert found is not None
    return found


def words(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(2, 4000, n)]


def n_needed(branches: Sequence[Branch]) -> int:
    """Return how many cells the branches need if every common beginning is there once."""
    beginnings = set()
    for branch in branches:
        tokens = tuple(branch.tokens)
        beginnings |= {tokens[:n] for n in range(1, len(tokens) + 1)}
    return len(beginnings)


def check(ctx: Context, branches: Sequence[Branch], replay: Replay) -> None:
    for branch in branches:
        assert np.array_equal(branch.logits, replay(branch.tokens)), branch
    usage = ctx.usage()
    n_again = len(branches)  # after a rewind the last token is read again, and shared no more
    assert n_needed(branches) <= usage.cells_used <= n_needed(branches) + n_again
    assert usage.cells_reserved == parking_of(ctx).n_cells
    assert usage.cells_used + usage.cells_reserved <= ctx.n_ctx
    ctx.audit()


class Compactions:
    """Counts how often a context writes all its sequences anew."""

    def __init__(self, ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        compact = ctx.compact

        def counted() -> bool:
            done = compact()
            self.n += done
            return done

        monkeypatch.setattr(ctx, "compact", counted)


# -- when cells are parked, and when they are freed ----------------------------------------------------


def test_lone_branch_parks_nothing(ctx: Context, replay: Replay) -> None:
    rng = np.random.default_rng(0)
    branch = Branch.start(ctx, words(rng, 40))
    for _ in range(20):
        branch.extend(words(rng, 9))
        branch.rewind(int(rng.integers(5, branch.position)))
        assert parking_of(ctx).n_cells == 0
    check(ctx, [branch], replay)
    assert parking_of(ctx).in_order


def test_lone_speculation_parks_nothing(ctx: Context, draft_ctx: Context) -> None:
    for width in (1, 2):
        drafter = lb.ModelDrafter(draft_ctx, width=width)
        generation = Speculator(ctx, drafter, SpeculativeConfig(draft_k=4)).generate(
            "Once upon a time", max_tokens=60, sampling=WARM
        )
        for _ in generation:
            if width == 1:
                assert parking_of(ctx).n_cells == parking_of(draft_ctx).n_cells == 0
        assert parking_of(ctx).n_cells == parking_of(draft_ctx).n_cells == 0


def test_tail_below_another_branch_is_parked_until_that_is_gone(ctx: Context) -> None:
    rng = np.random.default_rng(1)
    low, high = (Branch.start(ctx, words(rng, 30)) for _ in range(2))
    low.extend(words(rng, 10))
    high.extend(words(rng, 10))
    high.rewind(35)  # on top: nobody lies above it
    assert parking_of(ctx).n_cells == 0
    low.rewind(20)
    assert parking_of(ctx).n_cells == 20
    assert ctx.usage().cells_used == 55
    assert ctx.usage().cells_free == ctx.n_ctx - 55  # parked cells are free: they can be had
    low.rewind(15)
    assert parking_of(ctx).n_cells == 25
    high.prune()
    assert parking_of(ctx).n_cells == 0
    assert ctx.usage().cells_used == 15


def test_shared_cells_are_not_parked(ctx: Context) -> None:
    rng = np.random.default_rng(2)
    root = Branch.start(ctx, words(rng, 50))
    child = root.fork()
    child.extend(words(rng, 5))
    root.rewind(20)
    assert parking_of(ctx).n_cells == 0
    root.extend(words(rng, 5))  # above the child's
    child.prune()  # 30 that were shared, 5 of its own, and one that root has read again
    assert parking_of(ctx).n_cells == 36
    root.prune()
    assert parking_of(ctx).n_cells == 0


def test_fallen_tree_is_parked_in_company(ctx: Context) -> None:
    rng = np.random.default_rng(3)
    branch, other = (Branch.start(ctx, words(rng, 20)) for _ in range(2))
    tokens, parents = words(rng, 7), [-1, 0, 0, 1, 1, 2, 2]
    verification = Verification(branch.sequence, tokens, parents)
    verification.decode()
    verification.accept([0, 2])
    assert branch.position == 22
    assert ctx.usage().cells_used == 42
    assert parking_of(ctx).n_cells in (0, 5)
    other.extend(words(rng, 3))
    ctx.audit()
    other.prune()
    branch.prune()
    assert parking_of(ctx).n_cells == 0


def test_cleared_cache_has_nothing_parked(ctx: Context) -> None:
    ctx.decode([5] * 20, 0, 0)
    ctx.decode([6] * 20, 0, 1)
    ctx.kv_cache_remove(0, 10)
    assert parking_of(ctx).n_cells == 10
    ctx.kv_cache_clear()
    assert parking_of(ctx).n_cells == 0
    assert ctx.usage().cells_used == 0


def test_context_that_promises_no_order_parks_nothing(target: lb.Model) -> None:
    with Context(target, n_ctx=256, n_threads=1, kv_type="f16") as ctx:
        assert ctx.kv_cache.order is None
        low, high = Branch.start(ctx, [5] * 100), Branch.start(ctx, [6] * 100)
        low.rewind(10)
        high.extend([7] * 100)
        assert ctx.usage().cells_used == 210


# -- a full cache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_busy_trees_stay_exact_through_full_caches(
    seed: int, small: Context, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks, rewinds, prunes, steps and verifications, in a cache that is full again and again."""
    rng = np.random.default_rng((4, seed))
    compactions = Compactions(small, monkeypatch)
    living = [Branch.start(small, words(rng, 40))]
    n_full = 0
    for _ in range(140):
        branch = living[rng.integers(len(living))]
        deed = rng.choice(["commit", "extend", "fork", "rewind", "prune", "together", "start"])
        before = [(b, b.tokens) for b in living]
        try:
            if deed == "commit":
                branch.commit(words(rng, 1)[0])
            elif deed == "extend":
                branch.extend(words(rng, int(rng.integers(1, 16))))
            elif deed == "fork" and len(living) < 7:
                living.append(branch.fork())
            elif deed == "start" and len(living) < 7:
                living.append(Branch.start(small, words(rng, int(rng.integers(1, 50)))))
            elif deed == "rewind" and branch.position > 2:
                branch.rewind(int(rng.integers(1, branch.position)))
            elif deed == "prune" and len(living) > 1 and not branch.children:
                living.remove(branch)
                branch.prune()
            elif deed == "together":
                BranchStore(small).commit({b: words(rng, 1)[0] for b in living})
        except CacheFullError:
            n_full += 1
            assert [(b, b.tokens) for b in living] == before
            longest = max(living, key=lambda b: b.position)
            longest.rewind(1 + longest.position // 3)
        chosen = living[rng.integers(len(living))]
        assert np.array_equal(chosen.logits, replay(chosen.tokens))
    check(small, living, replay)
    assert compactions.n > 0
    assert parking_of(small).in_order
    for branch in living:
        branch.prune_subtree()
    assert small.usage().cells_used == 0


def test_compaction_shares_what_was_shared(
    small: Context, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    compactions = Compactions(small, monkeypatch)
    root = Branch.start(small, words(rng, 60))
    children = root.fork_many(4)
    for child in children:
        child.extend(words(rng, 10))
    grandchild = children[0].fork()
    grandchild.extend(words(rng, 40))
    last = Branch.start(small, words(rng, 30))
    grandchild.rewind(75)
    children[1].rewind(65)
    n_used = small.usage().cells_used
    assert n_used == 60 + 4 * 10 - 5 + 5 + 30
    assert parking_of(small).n_cells == 40
    last.extend(words(rng, small.n_ctx - n_used))
    assert compactions.n == 1
    assert parking_of(small).n_cells == 0
    assert small.usage().cells_used == small.n_ctx
    check(small, [root, *children, grandchild, last], replay)
    with pytest.raises(CacheFullError):
        last.commit(5)
    check(small, [root, *children, grandchild, last], replay)


def test_rows_survive_a_compaction(small: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits that wait to be drawn from are not those of a replay's last token."""
    compactions = Compactions(small, monkeypatch)
    rng = np.random.default_rng(6)
    low, high = (Branch.start(small, words(rng, 100), sampling=WARM) for _ in range(2))
    before = low.logits, low.produce()
    high.extend(words(rng, 20))
    low_fork = low.fork()
    low_fork.extend(words(rng, 20))
    high.rewind(60)
    high.extend(words(rng, 50))
    assert compactions.n == 1
    assert np.array_equal(low.logits, before[0])
    assert low.produce() == before[1]


def test_raw_sequences_end_the_promise_not_the_work(small: Context) -> None:
    """Nobody but their owner knows the tokens of raw sequences: they cannot be written anew."""
    rng = np.random.default_rng(7)
    small.decode(words(rng, 80), 0, 0)
    branch = Branch.start(small, words(rng, 80))
    small.kv_cache_remove(0, 20)
    assert parking_of(small).n_cells == 60
    assert parking_of(small).in_order
    branch.extend(words(rng, 150))
    assert not parking_of(small).in_order
    assert parking_of(small).n_cells == 0
    assert small.usage().cells_used == 20 + 230
    small.audit()
    with pytest.raises(CacheFullError):
        branch.extend(words(rng, 7))
    assert branch.position == 230
    branch.prune()
    small.kv_cache_clear()
    assert parking_of(small).in_order


def test_promise_is_kept_without_raw_sequences(small: Context, replay: Replay) -> None:
    """The same moves as above, by branches only."""
    rng = np.random.default_rng(7)
    low, branch = (Branch.start(small, words(rng, 80)) for _ in range(2))
    low.rewind(20)
    branch.extend(words(rng, 150))
    assert parking_of(small).in_order
    check(small, [low, branch], replay)


def test_interrupted_compaction_is_finished_first(
    small: Context, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while everything is written anew must not leave branches without their cells."""
    rng = np.random.default_rng(8)
    branches = [Branch.start(small, words(rng, 60)) for _ in range(3)]
    branches[0].rewind(20)
    decode = small.decoder.handle.decode
    n_decodes = 0

    def interrupted(n: int) -> int:
        nonlocal n_decodes
        code = decode(n)
        n_decodes += 1
        if n_decodes == 3:  # the attempt that was one too many, a replay, and this one
            raise KeyboardInterrupt
        return code

    monkeypatch.setattr(small.decoder.handle, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        branches[2].extend(words(rng, 100))
    monkeypatch.undo()
    check(small, branches, replay)


def test_many_prompts_over_several_decodes_keep_the_order(
    target: lb.Model, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is made before the first decode: between two, branches do not know what they hold."""
    rng = np.random.default_rng(9)
    with Context(target, n_ctx=256, n_seq_max=8, n_batch=32, n_threads=1) as ctx:
        compactions = Compactions(ctx, monkeypatch)
        low, high = (Branch.start(ctx, words(rng, 80)) for _ in range(2))
        low.rewind(10)
        new = [Branch.create(ctx) for _ in range(3)]
        BranchStore(ctx).prefill({branch: words(rng, 45) for branch in new})
        assert compactions.n == 1
        assert parking_of(ctx).in_order
        check(ctx, [low, high, *new], replay)
