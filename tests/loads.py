"""Workloads that go on as long as one likes, and by how much they make the memory grow."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from test_engine import GREEDY, PENALISED, PROMPTS, UNSEEDED, WARM, Alone, assert_clean, make

import llamabranch as lb

# A leak of 105 bytes a round of 10,000, or of 1 KiB a round of 1,000, is 1 MiB. Without a leak the growth
# was below 0.4 MiB, most of it pages that the allocator keeps.
TOLERANCE_BYTES = 1 << 20
TEXTS = (*PROMPTS, "", "Gretel", "“No,” said he. " * 12)
SOAK = int(os.environ.get("SOAK", "1"))  # so many times as long


def resident_bytes() -> int:
    """Return this process's resident memory; where the system does not report it, its peak."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc: return free memory to the system first
        trim(0)
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def growth_bytes(
    model: lb.Model, call: Callable[[lb.Model, int], None], *, rounds: int, warm_up: int
) -> int:
    """Return by how much resident memory is larger after ``rounds`` than after ``warm_up``."""
    for _ in range(2):  # the second context may be allocated at another address than the first
        call(model, warm_up)
    before = resident_bytes()
    call(model, rounds * SOAK)
    return resident_bytes() - before


def fork_and_prune(model: lb.Model, rounds: int) -> None:
    """Fork a branch, let the fork generate a token, fork that, prune both; over and over."""
    with lb.Context(model, n_ctx=512, n_seq_max=4, n_threads=1) as ctx:
        root = lb.Branch.start(ctx, list(range(2, 12)), temperature=0.8, seed=1)
        for _ in range(rounds):
            child = root.fork()
            child.step()
            child.fork()
            child.prune_subtree()
        usage = ctx.usage()
        assert (usage.cells_used, usage.sequences) == (10, {root.seq_id: 10})
        ctx.audit()


def open_and_close(model: lb.Model, rounds: int) -> None:
    """Open a context, use it, and close it with branches on it; over and over."""
    for _ in range(rounds):
        with lb.Context(model, n_ctx=512, n_seq_max=4, n_threads=1) as ctx:
            root = lb.Branch.start(ctx, list(range(2, 12)), temperature=0.8, seed=1)
            root.fork().step()


def random_job(rng: np.random.Generator) -> list[lb.Request]:
    """Return up to a dozen requests of all kinds."""
    requests = []
    for i in range(int(rng.integers(1, 13))):
        prompt: str | list[int] = TEXTS[rng.integers(len(TEXTS))]
        if rng.random() < 0.3:
            prompt = [int(t) for t in rng.integers(2, 4000, rng.integers(1, 200))]
        sampling = (GREEDY, WARM, UNSEEDED, PENALISED)[rng.integers(4)]
        stop = ("the", ".")[: rng.integers(3)] if rng.random() < 0.2 else ()
        n = int(rng.integers(1, 4)) if rng.random() < 0.2 else 1
        most = int(rng.integers(0, 60))
        request = lb.Request(prompt, id=f"r{i}", max_tokens=most, sampling=sampling, stop=stop, n=n)
        requests.append(request)
    return requests


class RandomLoad:
    """Engines on the bundled pair, given random jobs; texts are compared with each request alone."""

    def __init__(self, stack: ExitStack, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        models = [
            stack.enter_context(lb.Model(lb.hub.resolve(name)))
            for name in ("tale-target", "tale-draft", "tale-target")
        ]
        self.target, self.draft, self.quiet = (
            stack.enter_context(lb.Context(model, n_ctx=1024, n_seq_max=n, n_threads=1))
            for model, n in zip(models, (8, 8, 1), strict=True)
        )
        drafters = [
            *(make(which, self.draft) for which in ("none", "model", "lookup", "chain")),
            lb.SuffixDrafter(8, 1, min_probability=0.0, shared_tokens=512),
        ]
        self.engines = [
            lb.Engine(self.target, drafter, lb.SpeculativeConfig(draft_k=k), seed=1)
            for drafter in drafters
            for k in (4, "auto")
        ]
        self.texts = self.compared = 0

    def run_job(self) -> None:
        rng = self.rng
        engine = self.engines[rng.integers(len(self.engines))]
        requests = random_job(rng)
        victim = f"r{rng.integers(len(requests))}" if rng.random() < 0.3 else None
        patience = int(rng.integers(1, 100))

        def on_event(_event: lb.Event) -> None:
            nonlocal patience
            patience -= 1
            if victim is not None and patience == 0:
                engine.abort(victim)

        results = engine.generate(requests, on_event=on_event)
        assert len(results) == sum(request.n for request in requests)
        assert_clean(self.target, self.draft)
        asked = {request.id: request for request in requests}
        for result in results:
            if result.finish_reason in ("stop", "length") and rng.random() < 0.25:
                Alone(self.quiet).check(asked[result.id], result)
                self.compared += 1
        self.texts += len(results)
