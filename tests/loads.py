"""Long-running workloads and their memory growth; `soak` runs them in full, tests briefly."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import numpy as np
from test_engine import GREEDY, PENALISED, PROMPTS, UNSEEDED, WARM, Alone, assert_clean, make

import llamabranch as lb

# A leak of 105 bytes a round of 10,000, or of 1 KiB a round of 1,000, is 1 MiB. Without a leak the growth
# was below 0.4 MiB, most of it pages that the allocator keeps.
TOLERANCE_BYTES = 1 << 20
ENGINE_TOLERANCE_BYTES = 4 << 20  # after the first minute: vocabulary texts are still being kept
TEXTS = (*PROMPTS, "", "Gretel", "“No,” said he. " * 12)
SHARED_TOKENS = (
    512  # limit of a suffix drafter's index: reached within a minute, constant afterwards
)


def resident_bytes() -> int:
    """Return this process's resident memory; where the system does not report it, its peak."""
    gc.collect()
    trim = getattr(
        ctypes.CDLL(None), "malloc_trim", None
    )  # glibc: return free memory to the system first
    if trim is not None:
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
    call(model, rounds)
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
        requests.append(
            lb.Request(
                prompt,
                id=f"r{i}",
                max_tokens=int(rng.integers(0, 60)),
                sampling=sampling,
                stop=("the", ".")[: rng.integers(3)] if rng.random() < 0.2 else (),
                n=int(rng.integers(1, 4)) if rng.random() < 0.2 else 1,
            )
        )
    return requests


class RandomLoad:
    """Engines on the bundled pair, given random jobs; texts are compared with each request alone."""

    def __init__(self, stack: ExitStack, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        target, draft = (
            stack.enter_context(lb.Model(lb.hub.resolve(name)))
            for name in ("tale-target", "tale-draft")
        )
        self.target, self.draft, self.quiet = (
            stack.enter_context(lb.Context(model, n_ctx=1024, n_seq_max=n, n_threads=1))
            for model, n in ((target, 8), (draft, 8), (target, 1))
        )
        drafters = [
            *(make(which, self.draft) for which in ("none", "model", "lookup", "chain")),
            lb.SuffixDrafter(8, 1, min_probability=0.0, shared_tokens=SHARED_TOKENS),
        ]
        self.engines = [
            lb.Engine(self.target, drafter, lb.SpeculativeConfig(draft_k=k), seed=1)
            for drafter in drafters
            for k in (4, "auto")
        ]
        self.jobs = self.texts = self.tokens = self.compared = self.cancelled = self.refused = 0

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
            self.tokens += len(result.tokens)
            self.cancelled += result.finish_reason == "cancelled"
            self.refused += result.error is not None
            if result.finish_reason in ("stop", "length") and rng.random() < 0.25:
                Alone(self.quiet).check(asked[result.id], result)
                self.compared += 1
        self.jobs += 1
        self.texts += len(results)


def engine_load(seconds: float, seed: int, say: Callable[[str], None]) -> dict[str, object]:
    """Give engines random jobs for ``seconds``; return counts, and resident memory by the minute."""
    with ExitStack() as stack:
        load = RandomLoad(stack, seed)
        start = perf_counter()
        minutes: list[int] = []
        while (now := perf_counter() - start) < seconds or not minutes:
            load.run_job()
            if now >= 60 * (len(minutes) + 1) or now >= seconds:
                minutes.append(resident_bytes())
                say(f"engine: {load.jobs} jobs, {load.texts} texts, {minutes[-1]} bytes resident")
        minutes.append(resident_bytes())
        grown = minutes[-1] - minutes[0]
        assert grown < ENGINE_TOLERANCE_BYTES, f"resident memory grew by {grown} bytes"
        counts = {k: v for k, v in vars(load).items() if isinstance(v, int)}
    return {**counts, "resident_bytes": minutes}
