"""The engine in its own thread: many tasks share one engine, and none waits for a slow one."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from drafts import WARM
from engine_runs import PROMPTS, check_alone, heard

import llamabranch as lb
from llamabranch import AsyncEngine, Context, Event, Request, Result, SamplingParams
from llamabranch.errors import (
    ClosedError,
    ConfigError,
    DecodeError,
    DecodeInterruptedError,
    QueueFullError,
    TokenizeError,
)

ENDLESS = SamplingParams(seed=1, logit_bias={0: -1e9})


def serve(
    ctx: Context, job: Callable[[AsyncEngine], Awaitable[object]], **options: Any
) -> AsyncEngine:
    """Run ``job`` with an engine, close that, and check that nothing is left.

    By default its requests never end by themselves.
    """
    options = {"sampling": ENDLESS, **options}

    async def main() -> AsyncEngine:
        async with AsyncEngine(ctx, **options) as engine:
            await asyncio.wait_for(job(engine), 120)
        return engine

    engine = asyncio.run(main())
    assert ctx.usage().cells_used == 0
    assert ctx.n_seq_free == ctx.n_seq_max
    ctx.audit()
    return engine


async def collect(engine: AsyncEngine, request: Request | str) -> list[Event]:
    return [event async for event in engine.generate(request)]


def last(events: list[Event]) -> Result:
    result = events[-1].result
    assert result is not None
    return result


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name == "AsyncEngine" and t.is_alive()]


def test_many_tasks_share_the_engine_and_a_slow_reader_holds_up_nobody(
    ctx: Context, other_ctx: Context
) -> None:
    """A text waits unread while more requests than sequences come and go; the event loop is free."""
    slow = Request("A king", id="slow", max_tokens=60, sampling=WARM, n=8)
    endless = WARM.replace(logit_bias={0: -1e9})
    requests = [Request(p, max_tokens=12, sampling=endless) for p in PROMPTS * 5]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def job(engine: AsyncEngine) -> None:
        events = engine.generate(slow)
        seen = [await anext(events)]
        ticking = asyncio.ensure_future(tick())
        all_events = await asyncio.gather(*(collect(engine, r) for r in requests))
        ticking.cancel()
        assert ticks > 20
        # No text of the slow one has ended.
        assert engine.stats.generated == 12 * len(requests)
        assert engine.stats.target_forward_passes < 12 * len(requests) / 2
        for request, its_events in zip(requests, all_events, strict=True):
            assert len(heard(its_events)) == 1
            check_alone(other_ctx, request, last(its_events))
        texts = heard(seen + [event async for event in events])
        assert len(texts) == 8
        for said in texts.values():
            assert said.result is not None
            check_alone(other_ctx, slow, said.result)

    serve(ctx, job, buffer=8)


def test_cancelled_or_paused_request_is_aborted_and_no_other(
    ctx: Context, other_ctx: Context
) -> None:
    other = Request("The wolf", id="other", max_tokens=60, sampling=WARM)

    async def job(engine: AsyncEngine) -> None:
        events = engine.generate(Request("A king", id="endless", max_tokens=900))
        await anext(events)
        reading = asyncio.ensure_future(collect(engine, other))
        task = asyncio.ensure_future(collect(engine, Request("A fox", id="read", max_tokens=900)))
        for _ in range(200):  # meanwhile the endless one is paused
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        result = last(await reading)
        check_alone(other_ctx, other, result)
        engine.abort("endless")
        assert [e async for e in events][-1].result is not None
        for name in ("read", "endless"):
            again = Request("A king", id=name, max_tokens=3)
            assert last(await collect(engine, again)).finish_reason == "length"

    serve(ctx, job, buffer=2)


def test_bad_requests_are_refused_in_their_task(ctx: Context) -> None:
    async def job(engine: AsyncEngine) -> None:
        with pytest.raises(TokenizeError):
            await collect(engine, Request([10**6]))
        events = engine.generate(Request("A king", id="a", max_tokens=900))
        await anext(events)
        with pytest.raises(ConfigError, match="'a' is unfinished"):
            await collect(engine, Request("x", id="a"))
        with pytest.raises(QueueFullError):
            await asyncio.gather(*(collect(engine, Request("x", n=9)) for _ in range(9)))
        await events.aclose()  # type: ignore[attr-defined]

    serve(ctx, job, max_waiting=2)


def test_decode_that_fails_reaches_every_task(ctx: Context) -> None:
    async def job(engine: AsyncEngine) -> None:
        async def read() -> None:
            async for _ in engine.generate(Request("A king", max_tokens=900)):
                ctx.interrupt()

        errors = await asyncio.gather(read(), read(), return_exceptions=True)
        assert [type(error) for error in errors] == [DecodeInterruptedError] * 2
        ctx.resume()  # of events that came together with the error
        assert last(await collect(engine, Request("x", max_tokens=2))).tokens

    serve(ctx, job)


def test_failure_that_arrives_with_events_reaches_the_task(ctx: Context) -> None:
    """The event loop is busy until the engine has failed, so it gets events and failure together."""
    failed = threading.Event()
    is_busy = threading.Event()
    n_drafts = 0

    def draft(tokens: list[int], n: int) -> list[int]:
        nonlocal n_drafts
        n_drafts += 1
        if n_drafts == 2:
            assert is_busy.wait(60)
        if n_drafts == 4:
            raise ValueError("no draft")
        return [5]

    async def job(engine: AsyncEngine) -> None:
        transfer = engine._transfer

        def noted(events: list[Event], failure: BaseException | None) -> None:
            transfer(events, failure)
            if failure is not None:
                failed.set()

        engine._transfer = noted  # type: ignore[method-assign]
        seen = []

        async def read() -> None:
            async for event in engine.generate(Request("A king", max_tokens=900)):
                seen.append(event)
                if len(seen) == 1:
                    is_busy.set()
                    assert failed.wait(60)

        with pytest.raises(ValueError, match="no draft"):
            await asyncio.wait_for(read(), 60)
        assert len(seen) > 1  # the events before the failure come first
        assert last(await collect(engine, Request("x", max_tokens=2))).tokens

    config = lb.SpeculativeConfig(draft_k=1)
    serve(ctx, job, drafter=lb.FunctionDrafter(draft), config=config)


@pytest.mark.parametrize("kind", ["context closed", "thread killed"])
def test_request_that_comes_after_the_last_step_gets_an_error(
    kind: str, target: lb.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is added after the engine's last step and before the end of its thread."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    async def main() -> None:
        ctx = Context(target, n_ctx=256, n_threads=1, exact=True)
        engine = AsyncEngine(ctx)
        transfer, has_failed, is_added = engine._transfer, threading.Event(), threading.Event()

        def held(events: list[Event], failure: BaseException | None) -> None:
            transfer(events, failure)
            if failure is not None and not has_failed.is_set():
                has_failed.set()
                assert is_added.wait(60)
                if kind == "thread killed":
                    raise SystemExit

        engine._transfer = held  # type: ignore[method-assign]
        client = engine.engine.client

        def failing() -> list[Event]:
            if kind == "context closed":
                ctx.close()
            raise DecodeError("failed")

        client.step = failing  # type: ignore[method-assign]
        reading = asyncio.ensure_future(collect(engine, Request("A king")))
        assert await asyncio.to_thread(has_failed.wait, 60)
        late = asyncio.ensure_future(collect(engine, Request("A fox")))
        await asyncio.sleep(0)
        is_added.set()
        errors = await asyncio.wait_for(asyncio.gather(reading, late, return_exceptions=True), 60)
        assert isinstance(errors[0], lb.LlamaBranchError)
        assert isinstance(errors[1], ClosedError)
        with pytest.raises(ClosedError):
            await collect(engine, "x")
        await engine.close()
        ctx.close()

    asyncio.run(main())


def test_drain_does_not_wait_for_a_reader(ctx: Context) -> None:
    """The task that drains the engine reads a paused request itself."""

    async def job(engine: AsyncEngine) -> None:
        events = engine.generate(Request("A king", max_tokens=60))
        seen = [await anext(events)]
        while not any(job.is_paused for job in list(engine.engine.client.jobs.values())):
            await asyncio.sleep(0)
        await asyncio.wait_for(engine.close(drain=True), 60)
        seen += [event async for event in events]
        assert len(last(seen).tokens) == 60

    serve(ctx, job, buffer=4)


@pytest.mark.parametrize("drain", [False, True])
def test_close_ends_all_requests(drain: bool, ctx: Context) -> None:
    async def rest(events: AsyncIterator[Event]) -> list[Event]:
        return [event async for event in events]

    async def main() -> None:
        engine = AsyncEngine(ctx, sampling=ENDLESS)
        request = Request("The wolf", max_tokens=100)
        events = engine.generate(request)
        await anext(events)
        tasks = [asyncio.ensure_future(collect(engine, request)) for _ in range(12)]
        await asyncio.sleep(0)
        await engine.close(drain=drain)
        tasks.append(asyncio.ensure_future(rest(events)))
        reasons = {last(events).finish_reason for events in await asyncio.gather(*tasks)}
        assert reasons == ({"length"} if drain else {"cancelled"})
        with pytest.raises(ClosedError):
            await collect(engine, "x")
        await engine.close()

    asyncio.run(main())
    assert ctx.usage().cells_used == 0


def test_event_loops_share_an_engine_and_one_that_is_gone_frees_its_requests(
    ctx: Context, other_ctx: Context
) -> None:
    engine = AsyncEngine(ctx)

    async def leave() -> None:
        await anext(engine.generate(Request("A king", max_tokens=900)))

    asyncio.run(leave())
    requests = [Request(p, max_tokens=10, sampling=WARM) for p in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        all_events = [*pool.map(lambda request: asyncio.run(collect(engine, request)), requests)]
    for request, events in zip(requests, all_events, strict=True):
        check_alone(other_ctx, request, last(events))
    engine.shut_down(drain=True)
    assert ctx.usage().cells_used == 0


def test_forgotten_engine_ends_its_thread(ctx: Context) -> None:
    left = weakref.ref(AsyncEngine(ctx))
    threads = [t for t in threading.enumerate() if t.name == "AsyncEngine"]
    gc.collect()
    for thread in threads:
        thread.join(30)
    assert left() is None


def test_defaults_are_those_of_complete(target: lb.Model) -> None:
    """Copies are drafted and prefixes are cached, with and without a grammar. The texts are plain."""
    prompt = "The king said: go home, go home, go home, go home, go home, go home, go home, go"
    params: dict[str, Any] = {"max_tokens": 24, "temperature": 0.3, "seed": 3}
    option_sets: list[dict[str, Any]] = [
        params,
        {**params, "choices": ["go home, go home, go home"]},
    ]
    with Context(target, n_ctx=1024, n_threads=1, exact=True) as ctx:
        plain = [ctx.complete(prompt, drafter=None, **options).tokens for options in option_sets]
    for more in ({}, {"prefix_cache": False}):
        with Context(target, n_ctx=1024, n_threads=1, exact=True, **more) as ctx:  # type: ignore[arg-type]
            # "auto" depends on measured times.
            config = lb.SpeculativeConfig(draft_k=4, rule="seeded")

            async def main() -> list[list[Result]]:
                async with AsyncEngine(ctx, config=config) as engine:  # noqa: B023
                    assert engine.engine.config is config  # noqa: B023
                    calls = (engine.complete([prompt], **options) for options in option_sets * 2)
                    return [await call for call in calls]

            all_results = [results[0] for results in asyncio.run(main())]
            assert [result.tokens for result in all_results] == plain * 2
            assert all(result.stats.num_draft_tokens for result in all_results)
            assert all_results[0].cached == 0
            assert bool(all_results[3].cached) == (not more)
            own = AsyncEngine(ctx)
            assert own.engine.config.rule == "seeded" and own.engine.config.draft_k == "auto"
            own.shut_down()
            asyncio.run(AsyncEngine(ctx, None).close())
