"""The engine of a worker: batches that overlap share it, and what breaks it is reported."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

import llamabranch as lb
from llamabranch.scale.resident import ResidentEngine


def requests(n: int, start: int = 0) -> list[lb.Request]:
    return [lb.Request(f"A wolf {i}", id=str(i), max_tokens=12) for i in range(start, start + n)]


def test_requests_that_come_while_it_runs_share_decodes(
    ctx: lb.Context, other_ctx: lb.Context
) -> None:
    resident = ResidentEngine(lb.Engine(ctx, seed=5), on_broken=pytest.fail)
    try:
        futures = [resident.submit(request) for request in requests(8)]
        futures += [resident.submit(request) for request in requests(8, 8)]
        results = {result.id: result for future in futures for result in future.result(60)}
    finally:
        resident.close()
    alone = lb.Engine(other_ctx, seed=5).generate(requests(16))
    assert {r.id: (r.text, r.tokens, r.seed) for r in alone} == {
        r.id: (r.text, r.tokens, r.seed) for r in results.values()
    }
    assert resident.stats.target_forward_passes < 16 * 12 / 3


def test_all_texts_of_a_request_come_together(ctx: lb.Context) -> None:
    resident = ResidentEngine(lb.Engine(ctx, seed=5), on_broken=pytest.fail)
    try:
        found = resident.submit(lb.Request("A wolf", n=3, max_tokens=5)).result(60)
    finally:
        resident.close()
    assert sorted(result.sample for result in found) == [0, 1, 2]


def test_invalid_request_is_refused_and_the_others_go_on(ctx: lb.Context) -> None:
    resident = ResidentEngine(lb.Engine(ctx, seed=5), on_broken=pytest.fail)
    try:
        with pytest.raises(lb.TokenizeError):
            resident.submit(lb.Request([10**6]))
        (result,) = resident.submit(lb.Request("A wolf", max_tokens=3)).result(60)
    finally:
        resident.close()
    assert len(result.tokens) == 3


@pytest.mark.parametrize("error", [lb.DecodeError("decode failed", code=-3), MemoryError("none")])
def test_failed_step_is_reported(
    ctx: lb.Context, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine, broken = lb.Engine(ctx, seed=5), Future[str]()

    def step() -> Any:
        raise error

    monkeypatch.setattr(engine, "step", step)
    resident = ResidentEngine(engine, on_broken=broken.set_result)
    future = resident.submit(lb.Request("A wolf"))
    assert broken.result(60) == f"the engine failed: {error}"
    assert not future.done()
    resident.close()
    engine.close()


def test_engine_without_progress_is_reported(
    ctx: lb.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, broken, ended = lb.Engine(ctx, seed=5), Future[str](), threading.Event()

    def step() -> Any:
        ended.wait(60)
        return []

    monkeypatch.setattr(engine, "step", step)
    resident = ResidentEngine(engine, stall_s=0.2, on_broken=broken.set_result)
    resident.submit(lb.Request("A wolf"))
    assert "no progress" in broken.result(60)
    ended.set()
    resident.close()
    engine.close()


def test_idle_engine_is_not_stalled(ctx: lb.Context) -> None:
    broken: list[str] = []
    resident = ResidentEngine(lb.Engine(ctx, seed=5), stall_s=0.05, on_broken=broken.append)
    threading.Event().wait(0.5)
    resident.close()
    assert not broken
