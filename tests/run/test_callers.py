"""One core for all callers of a context: whose texts run, who gets which events, whose error it is."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import llamabranch as lb
from llamabranch import Context, Engine, Request, SamplingParams
from llamabranch.engine import Job
from llamabranch.errors import CacheFullError, DecodeError

PROMPTS = ["Once upon a time", "The old king had three", "The wolf ", "The princess said"]
FIXED = lb.SpeculativeConfig(draft_k=3)
WARM = SamplingParams(temperature=0.8, seed=4)


@pytest.fixture
def ctx(target: lb.Model) -> Iterator[Context]:
    with Context(target, n_ctx=1024, n_seq_max=8, n_threads=1, exact=True) as context:
        yield context
        context.audit()


def request(prompt: str, n: int = 12, **more: Any) -> Request:
    return Request(prompt, max_tokens=n, sampling=WARM, **more)


def alone(ctx: Context, *requests: Request) -> list[list[int]]:
    """Return the tokens of each request when it runs alone."""
    return [Engine(ctx, None).generate([each])[0].tokens for each in requests]


def once(call: Callable[[], object]) -> Callable[[str], bool]:
    """Return a constraint that calls a function at its first use."""
    calls = [call]
    return lambda text: (calls.pop()() if calls else None, True)[1]


def test_a_step_runs_the_texts_of_all_callers(ctx: Context) -> None:
    """A stream that nobody reads goes on, and a decode counts for everybody whose text was in it."""
    requests = [request(prompt) for prompt in PROMPTS]
    expected = alone(ctx, *requests)
    waiting, reading = Engine(ctx, None), Engine(ctx, None)
    stream = waiting.stream(requests[:1])
    first = next(stream)
    before = ctx.decoder.n_decodes
    (result,) = reading.generate([requests[1]])
    assert ctx.decoder.n_decodes - before == reading.stats.target_forward_passes
    before = ctx.decoder.n_decodes
    events = [first, *stream]
    assert ctx.decoder.n_decodes == before, "its text had been generated"
    assert events[-1].result is not None
    assert [events[-1].result.tokens, result.tokens] == expected[:2]
    assert waiting.stats.generated == reading.stats.generated == 12


def test_threads_that_generate_at_the_same_time(ctx: Context) -> None:
    requests = [request(prompt, 24) for prompt in PROMPTS]
    expected = alone(ctx, *requests)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            found = pool.map(lambda each: Engine(ctx, None).generate([each])[0].tokens, requests)
            assert [*found] == expected
    assert ctx.n_seq_free == ctx.n_seq_max


@pytest.mark.parametrize("at", [1, 5])
def test_an_error_of_a_processor_ends_its_text(ctx: Context, at: int) -> None:
    """Also if another caller runs the step. The other one's text goes on."""
    calls: list[int] = []

    def fail(tokens: Any, logits: Any) -> Any:
        calls.append(0)
        if len(calls) >= at:
            raise ValueError("mine")
        return logits

    (expected,) = alone(ctx, request(PROMPTS[1]))
    sampling = WARM.replace(logits_processor=fail)
    job = Engine(ctx, None).submit(Request(PROMPTS[0], max_tokens=12, sampling=sampling))
    (result,) = Engine(ctx, None).generate([request(PROMPTS[1])])
    assert result.tokens == expected and result.error is None
    (failed,) = job.results
    assert isinstance(failed.error, lb.ConfigError) and len(failed.tokens) == at - 1
    assert isinstance(failed.error.__cause__, ValueError)
    assert ctx.n_seq_free == ctx.n_seq_max


@pytest.mark.parametrize("where", ["on_prompt_progress", "on_round", "drafter"])
def test_an_error_of_a_function_is_its_callers(ctx: Context, where: str) -> None:
    """Of a callback or a drafter. It is raised as it is; the other caller's text goes on."""

    def fail(*_: object) -> list[int]:
        raise ValueError("mine")

    def propose(tokens: list[int], n: int) -> list[int]:
        return fail() if where == "drafter" else [12] * n

    more: dict[str, Any] = {} if where == "drafter" else {where: fail}
    (expected,) = alone(ctx, request(PROMPTS[1]))
    drafter = lb.FunctionDrafter(propose)
    job = Engine(ctx, drafter, FIXED).submit(request(PROMPTS[0], 12, **more))
    (result,) = Engine(ctx, None).generate([request(PROMPTS[1])])
    assert result.tokens == expected
    with pytest.raises(ValueError, match="mine"):
        list(job)
    assert ctx.n_seq_free == ctx.n_seq_max


def test_callers_draft_by_themselves_in_one_decode(ctx: Context) -> None:
    requests = [request(prompt, 20) for prompt in PROMPTS[:3]]
    expected = alone(ctx, *requests)
    drafters = [None, lb.SuffixDrafter(), lb.FunctionDrafter(lambda tokens, n: [12] * n)]
    engines = [Engine(ctx, drafter, FIXED) for drafter in drafters]
    jobs = [engine.submit(each) for engine, each in zip(engines, requests, strict=True)]
    assert [job.results[0].tokens for job in jobs] == expected
    drafted = [engine.stats.speculative.num_draft_tokens for engine in engines]
    assert drafted[0] == 0 and drafted[2] > 0


def test_a_failed_decode_is_told_to_all_whose_texts_were_in_it(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them continues with its next step."""
    requests = [request(prompt) for prompt in PROMPTS[:2]]
    expected = alone(ctx, *requests)
    engines = [Engine(ctx, None), Engine(ctx, None)]
    for engine, each in zip(engines, requests, strict=True):
        engine.add_request(each)
        engine.step()
    ctx.interrupt()
    for engine in engines:
        with pytest.raises(DecodeError):
            for _ in range(3):
                engine.step()
    found = []
    for engine in engines:
        results = [event.result for event in engine.close(drain=True) if event.result]
        found.append(results[0].tokens)
    assert found == expected


def test_a_job_that_was_submitted(ctx: Context) -> None:
    (expected,) = alone(ctx, request(PROMPTS[0]))
    job = ctx.submit(Request(PROMPTS[0], max_tokens=12, n=2, sampling=WARM))
    events = list(job)
    assert [
        event.emitted.token for event in events if event.emitted and not event.sample
    ] == expected
    assert job.results[0].tokens == expected
    assert job.results[0].choices == job.results and len(job.results) == 2
    cancelled = ctx.submit(request(PROMPTS[1], 200))
    for _, _ in zip(range(3), cancelled, strict=False):
        pass
    endless = ctx.submit(request(PROMPTS[1], 200))
    endless.cancel()
    assert [text.finish_reason for text in endless.results] == ["cancelled"]
    assert ctx.n_seq_free == ctx.n_seq_max


def test_a_job_cancels_its_own_texts_only(ctx: Context) -> None:
    engine = Engine(ctx, None)
    jobs = [engine.prepare(request(prompt)) for prompt in PROMPTS[:2]]
    engine.queue(*jobs)
    jobs[0].cancel()
    reasons = {e.id: e.result.finish_reason for e in engine.client.run() if e.result is not None}
    assert reasons == {jobs[0].name: "cancelled", jobs[1].name: "length"}


def test_a_limit_of_one_engine_holds_nobody_else_up(ctx: Context) -> None:
    narrow, other = Engine(ctx, None, parallel=1), Engine(ctx, None)
    jobs = [request(prompt, 30, id=str(i)) for i, prompt in enumerate(PROMPTS[:3])]
    expected = alone(ctx, *jobs, request(PROMPTS[3], 4))
    for job in jobs:
        narrow.add_request(job)
    narrow.step()
    (result,) = other.generate([request(PROMPTS[3], 4)])
    assert result.tokens == expected[3]
    running = [
        job
        for job in narrow.client.jobs.values()
        if any(choice.sequence is not None for choice in job.choices.values())
    ]
    assert len(running) == 1
    results = {e.id: e.result.tokens for e in narrow.close(drain=True) if e.result}
    assert [results[str(i)] for i in range(3)] == expected[:3]


def test_what_a_function_asks_for_runs_in_the_middle_of_the_step(ctx: Context) -> None:
    """The texts of the step do not move meanwhile; a job that it leaves runs with the others later."""
    (expected, inner) = alone(ctx, request(PROMPTS[0]), request(PROMPTS[1]))
    found: list[list[int]] = []
    left: list[Any] = []

    def use() -> None:
        found.append(Engine(ctx, None).generate([request(PROMPTS[1])])[0].tokens)
        left.append(ctx.submit(request(PROMPTS[1])))

    outer = Engine(ctx, None)
    (result,) = outer.generate([request(PROMPTS[0], constraint=once(use))])
    assert (result.tokens, found) == (expected, [inner])
    assert left[0].results[0].tokens == inner
    assert ctx.n_seq_free == ctx.n_seq_max


def test_functions_of_two_threads_may_use_the_core_that_runs_the_other_one(ctx: Context) -> None:
    """A stream that began inside a step is continued by another thread while that step's core runs."""
    expected = alone(ctx, *map(request, PROMPTS))
    inside = {"stream": threading.Event(), "engine": threading.Event()}
    left = list[str]()
    texts: list[list[int]] = []

    def meets(name: str, other: str) -> Callable[[str], bool]:
        """Return a constraint that once uses the context, while the other one does so if it can."""

        def allows(text: str) -> bool:
            if name in left:
                left.remove(name)
                inside[name].set()
                inside[other].wait(0.5)
                texts.append(Engine(ctx, None).generate([request(PROMPTS[3])])[0].tokens)
            return True

        return allows

    first = request(PROMPTS[0], constraint=meets("stream", "engine"))
    other = Engine(ctx, None).stream([request(PROMPTS[3])])  # the core stays while it has a caller
    next(other)
    stream = Engine(ctx, None).stream([first])
    begun = request(PROMPTS[1], constraint=once(lambda: next(stream)))
    assert Engine(ctx, None).generate([begun])[0].tokens == expected[1]
    second = request(PROMPTS[2], constraint=meets("engine", "stream"))
    left += inside
    with ThreadPoolExecutor(2) as pool:
        rest = pool.submit(list, stream)
        result = pool.submit(Engine(ctx, None).generate, [second]).result(60)[0]
        last = rest.result(60)[-1].result
    assert last is not None
    assert [last.tokens, result.tokens] == [expected[0], expected[2]]
    assert texts == [expected[3]] * 2
    other.close()


def test_a_stream_that_is_closed_or_forgotten_frees_its_sequences(ctx: Context) -> None:
    """By a function in the middle of a step too, and while another thread runs a step."""
    streams = [Engine(ctx, None).stream([request(prompt, 100)]) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    assert ctx.n_seq_free == ctx.n_seq_max - 3
    streams.pop().close()
    assert ctx.n_seq_free == ctx.n_seq_max - 2
    del stream
    streams.pop()
    gc.collect()
    assert ctx.n_seq_free == ctx.n_seq_max - 1
    Engine(ctx, None).generate([request(PROMPTS[3], constraint=once(streams[0].close))])
    assert ctx.n_seq_free == ctx.n_seq_max
    is_inside, may_go = threading.Event(), threading.Event()

    def wait(text: str) -> bool:
        is_inside.set()
        return may_go.wait(60)

    stream = Engine(ctx, None).stream([request(PROMPTS[0], 100)])
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(Engine(ctx, None).generate, [request(PROMPTS[1], constraint=wait)])
        assert is_inside.wait(60)
        stream.close()  # it does not wait for the other thread's step
        may_go.set()
        other.result(60)
    assert ctx.n_seq_free == ctx.n_seq_max


def test_events_of_a_closed_job_are_not_those_of_the_next_one_with_its_id(ctx: Context) -> None:
    """It is closed while a step of another thread has its text."""
    requests = [request(prompt) for prompt in PROMPTS[:3]]
    expected = alone(ctx, requests[2])
    is_inside, may_go = threading.Event(), threading.Event()

    def wait(text: str) -> bool:
        is_inside.set()
        return may_go.wait(60)

    engine = Engine(ctx, None)
    client = engine.new_client()
    client.queue(Job(requests[0], "0", client, 1))
    client.step()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(Engine(ctx, None).generate, [request(PROMPTS[1], constraint=wait)])
        assert is_inside.wait(60)
        client.close()
        client.queue(Job(requests[2], "0", client, 1))
        may_go.set()
        other.result(60)
    events = list(client.run())
    assert [event.emitted.token for event in events if event.emitted is not None] == expected[0]
    assert events[-1].result is not None and events[-1].result.tokens == expected[0]


def test_a_step_of_its_own_engine_is_refused(ctx: Context) -> None:
    jobs: list[Any] = []
    jobs.append(ctx.submit(request(PROMPTS[0], constraint=lambda text: bool(list(jobs[0])))))
    (result,) = jobs[0].results
    assert isinstance(result.error, lb.ConfigError) and "UsageError" in result.error.message
    assert ctx.n_seq_free == ctx.n_seq_max


def test_texts_of_two_callers_that_do_not_fit_together(target: lb.Model) -> None:
    """One is preempted, whoever asked for it; a prompt that never fits is refused by itself."""
    requests = [request("The wolf ran " * 12, 40), request("A king sat " * 14, 40)]
    options: dict[str, Any] = {"n_threads": 1, "exact": True, "prefix_cache": False}
    with Context(target, n_ctx=1024, n_seq_max=4, **options) as roomy:
        expected = alone(roomy, *requests)
    with Context(target, n_ctx=128, n_seq_max=4, **options) as ctx:
        engines = [Engine(ctx, None), Engine(ctx, None)]
        jobs = [engine.submit(each) for engine, each in zip(engines, requests, strict=True)]
        too_long = Engine(ctx, None).submit(request("word " * 300))
        assert [job.results[0].tokens for job in jobs] == expected
        assert isinstance(too_long.results[0].error, CacheFullError)
        assert ctx.usage().cells_used == 0
