"""llama.cpp's memory and the table of it change together, wherever Ctrl-C comes or a native call fails.

Each place is a line of ``context/`` that the calls pass. Ctrl-C is a real signal, sent at that place.
Afterwards the table agrees with llama.cpp, all texts have the logits of a clean context, and nothing
is left in the memory once they are gone.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from rounding import rounding
from tracing import Place, Tracer

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.context.memory import Memory
from llamabranch.errors import SnapshotError
from llamabranch.native.context import ContextHandle
from llamabranch.native.interrupts import HeldInterrupts
from llamabranch.native.library import max_sequences

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are sent as POSIX has them")

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "in order, prefix cache": ("llama", {"exact": True, "prefix_cache": True}),
    "own cells": ("llama", {"kv_unified": False}),
    "window": ("gemma3", {"kv_type": "bf16"}),
    "in order, decoded again": ("llama", {"exact": True}),
    "window, cells used again": ("gemma3", {"swa_full": False, "kv_type": "bf16"}),
    "recurrent": ("mamba", {}),
    "hybrid": ("lfm2", {}),
}
TOKENS = [5 + i * 7 % 200 for i in range(60)]
CONTEXT = Path(lb.__file__).parent / "context"


@pytest.fixture(scope="module", params=KINDS)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[lb.Model, dict[str, Any]]]:
    architecture, options = KINDS[request.param]
    path = tmp_path_factory.mktemp("toy") / "toy.gguf"
    toys.write_toy(path, architecture, vocab="bytes", seed=3)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    with lb.Model(path) as model, pytest.MonkeyPatch.context() as patch:
        if request.param == "in order, decoded again":  # as where K/V cannot be copied
            patch.setattr(Memory, "can_move", False)
        yield model, {"n_ctx": 4 * 256, "n_seq_max": 4, "n_threads": 1, **options}
    signal.signal(signal.SIGINT, previous)


class World:
    """Two branches, a third one while ``act`` runs, and a clean context to compare with."""

    def __init__(self, model: lb.Model, options: dict[str, Any]) -> None:
        self.ctx = Context(model, **options)
        self.clean = Context(model, **{**options, "prefix_cache": False})
        self.allowed = rounding(self.clean, 0.05)
        self.branches: list[Branch] = []

    def act(self) -> None:
        """Use every call that changes the memory."""
        for tokens in (TOKENS, TOKENS[9:]):
            self.branches.append(Branch.start(self.ctx, tokens))
        low, high = self.branches
        child = low.fork()
        self.branches.append(child)
        child.extend(TOKENS[:5])
        child.rewind(50)
        low.rewind(40)
        saved = high.snapshot()
        child.prune()
        other = Branch.restore(self.ctx, saved)
        self.branches.append(other)
        other.sequence.keep_cached()
        other.prune()
        high.extend(TOKENS[:3])
        with self.ctx.lock:
            # Other memory has nothing to put in order, and is left alone.
            assert self.ctx.kv_cache.compact() == self.ctx.kv_cache.order.is_kept
            if self.ctx.prefix_cache is not None:
                self.ctx.prefix_cache.evict(20)
                self.ctx.prefix_cache.clear()
            self.ctx.kv_cache.clear()
        low.extend(TOKENS[:2])

    def check(self) -> None:
        """Compare everything that is left; then leave nothing."""
        ctx = self.ctx
        ctx.audit()
        for branch in self.branches:
            if branch.state in ("ready", "finished"):
                branch.extend([11])
                with Branch.start(self.clean, branch.tokens) as alone:
                    np.testing.assert_allclose(branch.logits, alone.logits, atol=self.allowed)
        ctx.audit()
        for branch in self.branches[:2]:
            branch.prune_subtree()
        self.branches.clear()
        gc.collect()  # what an exception may still refer to
        with ctx.lock:
            if ctx.prefix_cache is not None:
                ctx.prefix_cache.clear()
        usage = ctx.usage()
        assert (usage.cells_used, usage.cells_reserved, usage.cells_cached) == (0, 0, 0)
        assert ctx.n_seq_free == 4
        if ctx.kv_cache.order.is_kept:  # other memory has no more ids than the context
            for seq_id in range(max_sequences()):
                assert ctx.decoder.handle.position_range(seq_id)[1] < 0, seq_id


@pytest.fixture
def world(opened: tuple[lb.Model, dict[str, Any]]) -> Iterator[World]:
    made = World(*opened)
    yield made
    made.ctx.close()
    made.clean.close()


def test_ctrl_c_at_every_line(world: World) -> None:
    def run(target: Place | None) -> dict[Place, None]:
        tracer = Tracer(CONTEXT, lambda: os.kill(os.getpid(), signal.SIGINT), target)
        sys.settrace(tracer)
        try:
            world.act()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        try:
            world.check()
        except AssertionError as error:
            raise AssertionError(f"after Ctrl-C at {target}") from error
        return tracer.passed

    places = run(None)
    assert len(places) > 100
    for place in list(places)[:: 1 if world.ctx.kv_cache.order.is_kept else 3]:
        run(place)


NATIVE = ("clear", "copy", "remove", "set_state", "set_partial_state", "state", "partial_state")
FAILURES: list[tuple[str, type[BaseException]]] = [
    *((name, KeyboardInterrupt) for name in NATIVE),
    ("set_state", SnapshotError), ("set_partial_state", SnapshotError),
]  # fmt: skip


@pytest.mark.parametrize(("name", "error"), FAILURES)
def test_an_exception_after_every_native_call(
    name: str, error: type[BaseException], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal that arrives during the call; or llama.cpp refuses a state."""
    real, counts = getattr(ContextHandle, name), [0, 0]  # calls so far; the one that raises

    def raising(*arguments: Any) -> Any:
        is_signal = error is KeyboardInterrupt
        if is_signal and threading.current_thread() is not threading.main_thread():
            return real(*arguments)  # there are no signals
        counts[0] += 1
        if counts[0] == counts[1] and not is_signal:
            raise error("llama.cpp refuses it")
        result = real(*arguments)
        if counts[0] == counts[1]:
            raise error
        return result

    monkeypatch.setattr(ContextHandle, name, raising)
    world.act()
    n_calls, counts[1] = counts[0], -1
    world.check()
    for i in range(n_calls):
        counts[:] = 0, i + 1
        try:
            world.act()
        except error as caught:
            # A compaction that is refused decodes the tokens again, and nobody is told.
            frames = [frame.name for frame in traceback.extract_tb(caught.__traceback__)]
            assert error is KeyboardInterrupt or "rewrite_in_order" not in frames
        counts[1] = -1
        try:
            world.check()
        except AssertionError as difference:
            raise AssertionError(f"after call {i} of {n_calls}") from difference


def test_a_held_ctrl_c_does_not_stop_a_compaction(
    toy: lb.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of an engine holds Ctrl-C, and a decode that can be stopped then ends at once."""
    monkeypatch.setattr(Memory, "can_move", False)  # so that the tokens are decoded again
    with Context(toy, n_ctx=256, n_seq_max=4, n_threads=1, exact=True) as ctx:
        branches = [Branch.start(ctx, TOKENS), Branch.start(ctx, TOKENS[9:])]
        before = [branch.logits for branch in branches]
        monkeypatch.setattr(ctx.decoder.handle, "n_watched", 2)
        with pytest.raises(KeyboardInterrupt), HeldInterrupts() as held:
            os.kill(os.getpid(), signal.SIGINT)
            while held.caught is None:
                pass
            assert ctx.kv_cache.compact()
        ctx.audit()
        for branch, row in zip(branches, before, strict=True):
            assert branch.sequence.n_cached == len(branch.tokens)
            with branch.fork() as fork:
                fork.rewind(len(fork.tokens) - 1)
                fork.extend(branch.tokens[-1:])
                assert np.array_equal(fork.logits, row)
