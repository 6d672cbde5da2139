"""Memory does not grow with use. SOAK=20 in the environment tests this for longer."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import llamabranch as lb

# A leak of 525 bytes a fork, or of 7 KiB a context, is 1 MiB; a context holds more. Without a leak the
# growth was below 0.4 MiB, most of it pages that the allocator keeps.
TOLERANCE_BYTES = 1 << 20


def resident_bytes() -> int:
    """Return the resident memory of this process, or its peak if the system does not report it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc: return free memory to the system first
        trim(0)
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def opened(model: lb.Model) -> tuple[lb.Context, lb.Branch]:
    ctx = lb.Context(model, n_ctx=512, n_seq_max=4, n_threads=1)
    return ctx, lb.Branch.start(ctx, list(range(2, 12)), temperature=0.8, seed=1)


def fork_and_prune(model: lb.Model, rounds: int) -> None:
    """Fork a branch, let the fork generate a token, fork that, prune both; over and over."""
    ctx, root = opened(model)
    with ctx:
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
        ctx, root = opened(model)
        with ctx:
            root.fork().step()


@pytest.mark.parametrize(
    ("call", "rounds", "warm_up"),
    [(fork_and_prune, 2000, 200), (open_and_close, 150, 50)],
    ids=["fork and prune", "open and close"],
)
def test_rounds_leave_nothing_in_memory(
    call: Callable[[lb.Model, int], None], rounds: int, warm_up: int, draft: lb.Model
) -> None:
    for _ in range(2):  # the second context may be allocated at another address than the first
        call(draft, warm_up)
    before = resident_bytes()
    call(draft, rounds * int(os.environ.get("SOAK", "1")))
    assert resident_bytes() - before < TOLERANCE_BYTES
