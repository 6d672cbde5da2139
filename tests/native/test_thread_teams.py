"""Helper threads that wait for a thread's next decode are released if another thread decodes next."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from llama_cpp import llama_cpp as C

import llamabranch as lb

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(C._lib, "omp_pause_resource_all"),
    reason="counts OpenMP's threads in /proc",
)


def _n_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _has_team(ctx: lb.Context) -> bool:
    """Return whether this thread had helpers; releasing them ends some threads."""
    before = _n_threads()
    ctx.release_threads()
    return _n_threads() < before


def test_new_context_leaves_no_helpers(target: lb.Model) -> None:
    with lb.Context(target, n_ctx=64, n_threads=2, exact=True) as ctx:
        assert not _has_team(ctx)
        lb.Branch.start(ctx, [5, 6]).step()
        assert _has_team(ctx)
        assert not _has_team(ctx)
        lb.Branch.start(ctx, [5, 6]).step()  # they come back


def test_async_engine_leaves_its_creator_no_helpers(target: lb.Model) -> None:
    async def main(ctx: lb.Context) -> None:
        lb.Branch.start(ctx, [5, 6]).step()
        async with lb.AsyncEngine(ctx, max_tokens=8) as engine:
            assert not _has_team(ctx)
            async for _ in engine.generate("Once"):
                pass

    with lb.Context(target, n_ctx=64, n_seq_max=4, n_threads=2, exact=True) as ctx:
        asyncio.run(main(ctx))
