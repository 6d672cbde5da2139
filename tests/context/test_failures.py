"""Decodes that fail, with every code that llama.cpp can be made to return, and the state afterwards.

Each failure is a real one. Code 1 is a full cache, 2 an abort in the middle of a graph, -1 a batch whose
positions have a gap, and -2 a failed memory allocation. Code -3 means that a kernel failed. That cannot
happen on a CPU, so it is not tested. Logits must equal, to the bit, those from before and those of a
clean replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import together
from decodes import Decodes
from programs import run_code

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.errors import CacheFullError, DecodeError
from llamabranch.generation.drafter import Draft
from llamabranch.generation.verify import Plan

BATCH = 64
TOKENS = [(7 * i + 3) % 4096 for i in range(600)]


@pytest.fixture
def small(target: lb.Model) -> Iterator[Context]:
    """An exact context of 256 cells, in batches of 64."""
    with Context(target, n_ctx=256, n_seq_max=7, n_batch=BATCH, n_threads=1, exact=True) as context:
        yield context
        context.audit()


class Failures(Decodes):
    """Makes decodes fail in one of several real ways."""

    def __init__(self, ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self._ctx = ctx

    @contextmanager
    def full_cache(self) -> Iterator[None]:
        """Fill the cache, so that no further token fits."""
        usage = self._ctx.usage()
        free = usage.cells_free - usage.cells_reserved
        with Branch.create(self._ctx) as rival:
            rival.prefill(TOKENS[: free or 1])
            yield

    def shift(self) -> None:
        """Shift the positions of a batch, so that they do not follow those in the cache."""
        self._ctx.decoder.handle.positions += 5

    @contextmanager
    def abort(self) -> Iterator[None]:
        """Ask for an abort once llama.cpp has been called."""
        self.before = lambda _: self._ctx.interrupt()
        yield
        self.before = lambda _: None

    @contextmanager
    def gap(self) -> Iterator[None]:
        """Leave a gap below the positions of every batch."""
        self.before = lambda _: self.shift()
        yield
        self.before = lambda _: None


@pytest.fixture
def failures(small: Context, monkeypatch: pytest.MonkeyPatch) -> Failures:
    return Failures(small, monkeypatch)


WAYS = {
    "full_cache": (CacheFullError, 1, None),
    "abort": (DecodeError, 2, True),
    "gap": (DecodeError, -1, False),
}
Act = Callable[[Branch, Branch], object]
ACTS: dict[str, Act] = {
    "commit": lambda branch, other: branch.commit(9),
    "prefill": lambda branch, other: branch.prefill([8, 9, 10]),
    "extend": lambda branch, other: branch.extend([8, 9, 10]),
    "follow": lambda branch, other: branch.sequence.decode_unscored([8, 9]),
    "verify": lambda branch, other: Plan(branch.sequence, Draft([8, 9, 10])).decode(),
    "commit together": lambda branch, other: together.commit(branch.ctx, {branch: 8, other: 9}),
    "prefill together": lambda branch, other: together.prefill(
        branch.ctx, {branch: [8] * 50, other: [9] * 50}
    ),
    "raw": lambda branch, other: branch.ctx.decode([7, 8], 3, seq_id=0),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("way", WAYS)
def test_failed_call_leaves_everything_as_it_was(
    way: str, act: str, small: Context, failures: Failures
) -> None:
    kind, code, memory_changed = WAYS[way]
    small.decode([4, 5, 6], 0, seq_id=0)
    root = Branch.start(small, TOKENS[:20], seed=1)
    branch, other = root.fork(), root.fork()
    branch.prefill([5])
    lines = (root, branch, other)
    before = [(line.tokens, line.logits, line.produce()) for line in lines]
    if act == "verify":  # a plan decodes the last token again
        branch.sequence.truncate(len(branch.tokens) - 1)
    usage = small.usage()
    with getattr(failures, way)():
        with pytest.raises(kind) as caught:
            ACTS[act](branch, other)
        assert failures.codes[-1] == code
        if isinstance(caught.value, CacheFullError):
            assert "of 256 are free" in str(caught.value) and "n_ctx" in str(caught.value.hint)
        else:
            assert isinstance(caught.value, DecodeError)
            assert (caught.value.code, caught.value.memory_changed) == (code, memory_changed)
        small.audit()
    small.audit()
    now = small.usage()
    assert (now.cells_used, now.sequences) == (usage.cells_used, usage.sequences)
    for line, (tokens, logits, produced) in zip(lines, before, strict=True):
        assert line.tokens == tokens
        assert np.array_equal(line.logits, logits)
        assert line.produce() == produced
    for line in (branch, other):
        line.commit(11)
        with Branch.create(small) as again:
            again.prefill(line.tokens)
            assert np.array_equal(line.logits, again.logits)
    small.decode([7], 3, seq_id=0)
    raw = small.logits()
    small.kv_cache_remove(0)
    small.decode([4, 5, 6, 7], 0)
    assert np.array_equal(small.logits(), raw)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_prefill_that_fails_in_a_later_batch_is_taken_back_whole(
    fails_at: int, way: str, small: Context, failures: Failures
) -> None:
    branch = Branch.start(small, TOKENS[:10], seed=1)
    before = branch.logits
    tokens = TOKENS[: 3 * BATCH]
    kind, code, _ = WAYS[way]
    small.decode([3] * (256 - 10 - fails_at * BATCH - 5), 0)
    if way != "full_cache":
        small.kv_cache_remove(0)
        failures.on_call(fails_at, small.interrupt if way == "abort" else failures.shift)
    with pytest.raises(kind):
        branch.prefill(tokens)
    failures.before = lambda _: None
    assert failures.codes[-1] == code
    assert branch.position == 10 == small.kv_cache_size(branch.seq_id)
    assert np.array_equal(branch.logits, before)
    small.audit()
    small.kv_cache_remove(0)
    branch.prefill(tokens)
    with Branch.create(small) as again:
        branch.rewind(40)
        again.prefill(branch.tokens)
        assert np.array_equal(branch.logits, again.logits)


OUT_OF_MEMORY = """
    import resource, sys
    import numpy as np
    import llamabranch as lb
    from llamabranch.errors import DecodeError

    with lb.Model(sys.argv[1]) as model:
        ctx = lb.Context(
            model, n_ctx=2048, n_batch=1024, n_outputs_max=1024, n_seq_max=6, n_threads=1,
            exact=True,
        )
        branch = lb.Branch.start(ctx, "Once upon a time", seed=1)
        child = branch.fork()
        child.commit(5)
        before = branch.logits, child.logits
        tokens = [5] * 1000
        ctx.decode(tokens, 0, seq_id=1)  # what a graph of this size takes is there by now
        ctx.kv_cache_remove(1)
        ctx.decode([1, 2, 3], 0)
        raw = ctx.logits()
        with open("/proc/self/status") as status:
            size = next(int(l.split()[1]) << 10 for l in status if l.startswith("VmSize"))
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), limits[1]))
        try:
            ctx.decode(tokens, 0, seq_id=1, logits="all")  # 16 MB of rows
        except DecodeError as error:
            resource.setrlimit(resource.RLIMIT_AS, limits)
            assert (error.code, error.memory_changed) == (-2, True), error
        else:
            raise SystemExit("it found the memory")
        ctx.audit()
        assert ctx.kv_cache_size(1) == 0
        assert np.array_equal(ctx.logits(), raw)
        assert np.array_equal(branch.logits, before[0])
        assert np.array_equal(child.logits, before[1])
        ctx.decode([4, 5, 6], 0, seq_id=1, logits="all")
        rows = [ctx.logits(i) for i in range(3)]
        child.commit(6)
        ctx.decode([6, 7, 8, 9, 10, 11], 3, seq_id=1, logits="all")
        ctx.kv_cache_remove(1)
        ctx.decode([4, 5, 6], 0, seq_id=1, logits="all")
        assert all(np.array_equal(ctx.logits(i), rows[i]) for i in range(3))
        again = lb.Branch.create(ctx)
        again.prefill(child.tokens)
        assert np.array_equal(again.logits, child.logits)
        ctx.audit()
        print("fine")
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_that_the_system_does_not_give_is_an_error_and_nothing_is_lost(
    target: lb.Model,
) -> None:
    # One arena: the arena of the thread that creates the context has enough address space.
    assert run_code(OUT_OF_MEMORY, target.path, MALLOC_ARENA_MAX="1").strip() == "fine"
