"""An engine that runs for a long time: requests come and go, and each gets its text of running alone."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from drafts import GREEDY, WARM, counting
from engine_runs import PROMPTS, assert_clean, check_alone, results_of, run, write_tiny

import llamabranch as lb
from llamabranch import (
    Branch,
    Context,
    Engine,
    Request,
    Result,
    SamplingParams,
    SpeculativeConfig,
)
from llamabranch.errors import (
    ClosedError,
    ConfigError,
    QueueFullError,
    TokenizeError,
)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[lb.Model]:
    """A random model whose step takes a fraction of a millisecond."""
    with lb.Model(write_tiny(tmp_path / "tiny.gguf")) as model:
        yield model


# -- requests at any time --------------------------------------------------------------------------


def test_a_request_without_an_id_gets_one_that_nobody_has(ctx: Context) -> None:
    engine = Engine(ctx, seed=1, max_tokens=3)
    names = [engine.add_request(Request("The wolf", id=name)) for name in ("1", None, "4", None)]
    names += [engine.add_request("A king") for _ in range(2)]
    assert len({*names}) == 6 and results_of(run(engine)).keys() == {*names}


def test_id_is_free_again_and_abort_of_an_unknown_one_does_nothing(ctx: Context) -> None:
    engine = Engine(ctx, seed=1, max_tokens=3)
    for reason in ("length", "cancelled", "length"):
        engine.abort("a")  # too early, or too late
        engine.add_request(Request("The wolf", id="a"))
        with pytest.raises(ConfigError, match="'a' is unfinished"):
            engine.add_request(Request("The wolf", id="a"))
        if reason == "cancelled":
            engine.abort("a")
        assert results_of(run(engine))["a"].finish_reason == reason

    def late() -> Iterator[Request]:
        engine.abort("b")  # not known yet: it has not been read
        yield Request("The wolf", id="b")

    assert [result.finish_reason for result in engine.generate(late())] == ["length"]
    assert_clean(ctx)


def test_abort_in_the_step_in_which_a_request_ends_is_not_kept(ctx: Context) -> None:
    """A call from another thread may come then; here a drafter makes it."""
    engine: Engine

    def function(tokens: list[int], k: int) -> list[int]:
        engine.abort("a")
        return []

    engine = Engine(ctx, lb.FunctionDrafter(function), seed=1, sampling=GREEDY)
    engine.add_request(Request("The wolf", id="a", max_tokens=2))
    events = run(engine)
    engine.add_request(Request("The wolf", id="a", max_tokens=1))
    ended = [e.result.finish_reason for e in events + run(engine) if e.result is not None]
    assert ended == ["length", "length"]
    assert_clean(ctx)


def test_engine_without_a_seed_draws_another_text_each_time(ctx: Context) -> None:
    request = Request("Once upon a time", max_tokens=24)
    engine = Engine(ctx)
    results = [*engine.generate(request), *engine.generate([request])]
    for _ in range(2):
        engine.add_request(Request("Once upon a time", id="a", max_tokens=24))
        results += results_of(run(engine)).values()
    assert len({r.seed for r in results}) == 4
    assert len({tuple(r.tokens) for r in results}) == 4  # equal by chance: 1 in 10^12
    for result in results:
        repeated = Request(
            "Once upon a time", max_tokens=24, sampling=SamplingParams(seed=result.seed)
        )
        assert engine.generate(repeated)[0].tokens == result.tokens
    seeded = Engine(ctx, seed=engine.seed)
    assert seeded.generate(request)[0].tokens == results[0].tokens
    assert seeded.generate(request)[0].tokens == results[0].tokens


def test_result_is_short_to_read(ctx: Context) -> None:
    (result,) = Engine(ctx, seed=1, max_tokens=200).generate("Once upon a time")
    assert len(repr(result)) < 120
    (failed,) = Engine(ctx).generate("once " * 2000)
    n = len(ctx.tokenize("once " * 2000))
    assert f"the prompt has {n} tokens" in repr(failed)
    assert f"has room for {ctx.n_ctx}" in repr(failed)


def test_queue_has_a_limit_that_counts_the_request_that_is_next(target: lb.Model) -> None:
    with Context(target, n_ctx=256, n_seq_max=1, n_threads=1, exact=True) as ctx:
        engine = Engine(ctx, max_waiting=2)
        for bad in (cast("Request", 5), Request([5, 10**6]), Request("x", stop=("",))):
            with pytest.raises((ConfigError, TokenizeError)):
                engine.add_request(bad)  # refused at once
        for _ in range(3):
            engine.add_request(Request("The wolf", max_tokens=50))
            engine.step()  # looks at the next request, which has no sequence yet
        with pytest.raises(QueueFullError, match="2 requests wait, max_waiting is 2") as caught:
            engine.add_request("The wolf")
        assert caught.value.hint
        engine.abort("1")
        engine.step()
        assert engine.client.n_waiting == 1
        engine.add_request(Request("The wolf", n=3, max_tokens=2))
        assert len(results_of(run(engine))) == 3
        assert engine.client.n_waiting == 0


def test_urgent_requests_are_admitted_first(target: lb.Model) -> None:
    with Context(target, n_ctx=256, n_seq_max=1, n_threads=1, exact=True) as ctx:
        engine = Engine(ctx)
        for name, priority in (("c", 5), ("a", -1), ("b", 0), ("d", 5), ("b2", 0)):
            engine.add_request(Request("The wolf", id=name, max_tokens=2, priority=priority))
        assert list(results_of(run(engine))) == ["a", "b", "b2", "c", "d"]
        texts = [Request("x", id=str(-p), max_tokens=1, priority=p) for p in (3, 1, 2)]
        ended = [e.id for e in engine.stream(texts) if e.result is not None]
        assert ended == ["-1", "-2", "-3"]
        assert [r.id for r in engine.generate(texts)] == ["-3", "-1", "-2"]


def test_urgent_texts_are_preempted_last(target: lb.Model, other_ctx: Context) -> None:
    endless = SamplingParams(temperature=0.8, seed=1, logit_bias={target.eos or 0: -1e9})
    with Context(target, n_ctx=256, n_seq_max=4, n_threads=1, exact=True) as ctx:
        engine = Engine(ctx)
        requests = [
            Request(p, id=str(i), max_tokens=90, sampling=endless, priority=-i)
            for i, p in enumerate(PROMPTS)
        ]
        for request in requests:
            engine.add_request(request)
        results = results_of(run(engine))
        for request in requests:
            result = results[str(request.id)]
            check_alone(other_ctx, request, result)
        assert results["3"].num_preemptions == 0
        assert results["0"].num_preemptions > 0
        assert_clean(ctx)


def test_a_closed_engine_has_ended_all_requests_and_takes_no_more(ctx: Context) -> None:
    """A block drops unfinished requests; ``drain`` finishes them."""
    endless = SamplingParams(logit_bias=dict.fromkeys(ctx.model.eog_tokens, -math.inf))
    for drain, reason in ((False, "cancelled"), (True, "length")):
        with Engine(ctx, sampling=endless, max_tokens=10) as engine:
            names = [engine.add_request(prompt) for prompt in PROMPTS * 3]
            early = engine.step()
            results = results_of(early + engine.close(drain=drain))
        assert list(results) == names or (drain and {*results} == {*names})
        assert {result.finish_reason for result in results.values()} == {reason}
        assert_clean(ctx)
    with Engine(ctx) as dropping:
        dropping.add_request("The wolf")
        dropping.step()
    assert_clean(ctx)
    for call in (engine.add_request, lambda x: engine.stream([x]), lambda x: engine.generate([x])):
        with pytest.raises(ClosedError):
            call("x")
    assert engine.close() == []


# -- lazy reading ----------------------------------------------------------------------------------


def test_requests_are_read_as_they_are_needed(tiny: lb.Model) -> None:
    n_read = n_ended = 0
    most = 0

    def source() -> Iterator[Request]:
        nonlocal n_read
        for i in range(300):
            n_read += 1
            yield Request([2 + i % 50, 3 if i % 4 else 10**6], max_tokens=2)

    with Context(tiny, n_ctx=256, n_seq_max=4, n_threads=1, exact=True) as ctx:
        for event in Engine(ctx).stream(source()):
            n_ended += event.result is not None
            most = max(most, n_read - n_ended)
        assert (n_read, n_ended) == (300, 300)
        assert most <= 4 + 4 + 4  # requests that wait, that run, and that have just ended
        assert_clean(ctx)


def test_source_that_fails_loses_no_result(ctx: Context, other_ctx: Context) -> None:
    request = Request("The wolf", max_tokens=8, sampling=WARM)

    def source() -> Iterator[Request | str]:
        yield request
        yield 5  # type: ignore[misc]
        yield Request([10**6])
        yield request
        raise OSError("the file is gone")

    ended: list[Result] = []
    with pytest.raises(OSError, match="the file is gone"):
        for event in Engine(ctx).stream(source()):
            if event.result is not None:
                ended.append(event.result)
    reasons = {result.id: result.finish_reason for result in ended}
    assert reasons == {"0": "length", "1": "error", "2": "error", "3": "length"}
    for result in ended:
        if result.id in ("0", "3"):
            check_alone(other_ctx, request, result)
    assert_clean(ctx)


# -- the prefix cache ------------------------------------------------------------------------------


def test_turn_of_a_chat_reads_only_what_is_new(
    target: lb.Model, draft: lb.Model, other_ctx: Context
) -> None:
    """The draft model reads only what is new, too, beside another text with the same beginning."""
    options: Any = {"n_ctx": 1024, "n_seq_max": 3, "n_threads": 1, "exact": True}
    with (
        Context(target, prefix_cache=True, **options) as ctx,
        Context(draft, prefix_cache=True, **options) as draft_ctx,
        counting(draft_ctx) as n_read,
    ):
        engine = Engine(ctx, lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=2))
        history = ctx.tokenize("Once upon a time there was a king who had a daughter." * 4)
        distinct, n_prompts = len(history), 0
        for turn in range(8):
            new = ctx.tokenize(f" And on day {turn} the wolf said:", add_special=False)
            history += new
            distinct += len(new)
            n_prompts += len(history)
            requests = [
                Request(history, max_tokens=12, sampling=WARM),
                Request(history[: 20 + turn], max_tokens=5, sampling=WARM),
            ]
            result, beside = engine.generate(requests)
            check_alone(other_ctx, requests[0], result)
            check_alone(other_ctx, requests[1], beside)
            if turn:  # the answer's last token was never decoded
                assert result.cached == len(history) - len(new) - 1
            history += result.tokens
        # Every text is read once. A round reads the tokens that were not drafted, and drafts two.
        assert engine.stats.evaluated <= 1.05 * distinct + 9
        assert sum(n_read) < len(history) + 8 * (12 + 5) * 4 < n_prompts
        assert draft_ctx.prefix_cache is not None and draft_ctx.prefix_cache.n_hits >= 7
        assert draft_ctx.usage().cells_used == 0
        assert_clean(ctx)


# -- what a result has -----------------------------------------------------------------------------


def test_tokens_come_with_detail(ctx: Context, draft_ctx: Context, other_ctx: Context) -> None:
    engine = Engine(ctx, lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=3))
    request = Request(
        "Once upon a time", max_tokens=20, sampling=WARM, top_logprobs=3, prompt_logprobs=2
    )
    detailed, plain = engine.generate([request, Request("The wolf", max_tokens=3)])
    assert plain.logprobs is None
    details = detailed.logprobs
    assert details is not None
    assert [detail.token for detail in details] == detailed.tokens
    assert {detail.source for detail in details} & {"drafted", "bonus", "corrected"}
    with Branch.start(other_ctx, request.prompt) as branch:
        for detail, score in zip(details, branch.score(detailed.tokens, top=3), strict=True):
            assert detail.alternatives == score.alternatives
            assert (detail.logprob, detail.entropy) == (score.logprob, score.entropy)
    for rated in (*details, *(detailed.prompt_logprobs or ())[1:]):
        assert rated is not None and rated.alternatives
        for alternative in rated.alternatives:
            piece = ctx.model.piece(alternative.token).decode("utf-8", "replace")
            kept = pickle.loads(pickle.dumps(alternative))
            assert (kept, kept.text, alternative.text) == (alternative, piece, piece)
    record: Any = detailed.as_dict()
    assert len(record["logprobs"]) == 20
    first = details[0].alternatives[0]
    assert record["logprobs"][0]["alternatives"][0] == [*first, first.text]
    times = (detailed.queued_s, detailed.first_token_s, detailed.last_token_s)
    assert [0.0, *times] == sorted([0.0, *(t for t in times if t is not None)])
