"""The engine: whatever runs beside a request, its text is the one it would have had alone.

"Alone" is ``Branch.generate`` in a context of its own, one decode a token: no engine, no drafter.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import pytest
import toys
from drafts import FIXED
from typing_extensions import TypedDict

import llamabranch as lb
from llamabranch import (
    AsyncEngine,
    Branch,
    Context,
    Engine,
    Event,
    Request,
    Result,
    SamplingParams,
    SpeculativeConfig,
)
from llamabranch.context.logits import LogitsRow
from llamabranch.errors import (
    CacheFullError,
    ConfigError,
    DecodeInterruptedError,
    GrammarError,
    SequencesExhaustedError,
    TokenizeError,
)
from llamabranch.generation.verify import RoundTrace

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, seed=42)
UNSEEDED = SamplingParams(temperature=0.8)
PENALISED = SamplingParams(temperature=0.7, seed=5, repeat_penalty=1.3)
TALE = "Once upon a time there was a king who had three daughters, and the youngest was so fair "
PROMPTS = [
    TALE,
    "“Who is there?” cried the old woman,",
    "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog",
    "The wolf",
    "In the middle of the forest there stood a little house, and in that house there lived",
]
DRAFTERS = ("none", "model", "lookup", "suffix", "chain")

Generated = tuple[list[int], str, str | None]


def make(which: str, draft: Context) -> lb.Drafter | None:
    makers: dict[str, lb.Drafter | None] = {
        "none": None,
        "model": lb.ModelDrafter(draft),
        "lookup": lb.speculative.PromptLookupDrafter(max_ngram=3, min_ngram=1),
        "suffix": lb.SuffixDrafter(8, 1, factor=4.0, offset=4.0, min_probability=0.0),
        "chain": lb.ChainDrafter([lb.speculative.PromptLookupDrafter(), lb.ModelDrafter(draft)]),
    }
    return makers[which]


@dataclass
class Alone:
    """Generates what requests give when nobody else is there, each one once."""

    ctx: Context
    known: dict[object, Generated] = field(default_factory=dict, repr=False)

    def generated(
        self, request: Request, result: Result, default: SamplingParams = UNSEEDED
    ) -> Generated:
        params = (request.sampling or default).replace(seed=result.seed)
        prompt, stop = request.prompt, tuple(request.stop)
        key = (str(prompt), repr(params), stop, request.grammar, request.max_tokens)
        if key not in self.known:
            grammar = request.grammar
            with Branch.start(self.ctx, prompt, sampling=params, grammar=grammar) as branch:
                text = "".join(t.text for t in branch.generate(request.max_tokens, stop))
                self.known[key] = branch.generated, text, branch.finish_reason
        return self.known[key]

    def check(self, request: Request, result: Result, default: SamplingParams = UNSEEDED) -> None:
        tokens, text, reason = self.generated(request, result, default)
        if request.max_tokens == 0:
            reason = "length"
        assert (result.tokens, result.text, result.finish_reason) == (tokens, text, reason), (
            request,
            result,
        )


@pytest.fixture(scope="module")
def alone(target: lb.Model) -> Iterator[Alone]:
    with Context(target, n_ctx=1024, n_seq_max=1, n_threads=1) as ctx:
        yield Alone(ctx)


def assert_clean(*contexts: Context) -> None:
    """Nothing is left: no cell, no sequence, and llama.cpp agrees."""
    for ctx in contexts:
        assert ctx.usage().cells_used == 0
        assert ctx.n_seq_free == ctx.n_seq_max
        ctx.audit()
        cell_order = ctx.kv_cache.order
        assert cell_order.in_order and cell_order.n_cells == 0, ctx


def by_name(results: Sequence[Result]) -> dict[tuple[str, int], Result]:
    found = {(result.id, result.sample): result for result in results}
    assert len(found) == len(results)
    return found


# -- the law: in company as alone ------------------------------------------------------------------


@pytest.mark.parametrize("which", ["none", "model"])
def test_seed_of_a_request_does_not_depend_on_its_place(
    which: str, ctx: Context, draft_ctx: Context
) -> None:
    requests = [Request(p, id=p[:5], max_tokens=16, sampling=UNSEEDED) for p in PROMPTS]
    texts = []
    for order in (requests, requests[::-1], requests[2:3]):
        engine = Engine(ctx, make(which, draft_ctx), FIXED, seed=3)
        texts.append({r.id: (r.seed, r.text) for r in engine.generate(order)})
    assert texts[0] == texts[1]
    assert texts[2].items() <= texts[0].items()
    engine.seed = engine.seed  # given, so that each call draws the same
    assert [r.text for r in engine.generate(requests[2:3])] == [
        text for _, text in texts[2].values()
    ]
    other = {r.id: r.text for r in Engine(ctx, seed=4).generate(requests)}
    assert other != {name: text for name, (_, text) in texts[0].items()}


# -- one prefill for many --------------------------------------------------------------------------


def test_shared_prefixes_are_forked_not_computed(
    ctx: Context, draft_ctx: Context, alone: Alone
) -> None:
    shared = TALE * 4
    requests = [Request(shared + p, max_tokens=12, sampling=WARM) for p in PROMPTS]
    n_shared = len(ctx.tokenize(shared)) - 1  # the last token may join with what follows
    engine = Engine(ctx, make("model", draft_ctx), SpeculativeConfig(draft_k=2))
    for request, result in zip(requests, engine.generate(requests), strict=True):
        alone.check(request, result)
        assert result.num_prompt_tokens == len(ctx.tokenize(str(request.prompt)))
    stats = engine.stats
    assert stats.shared_prompt_tokens >= 4 * n_shared
    total = sum(len(ctx.tokenize(str(request.prompt))) for request in requests)
    assert stats.prompt_tokens + stats.shared_prompt_tokens == total
    assert_clean(ctx, draft_ctx)


@pytest.mark.parametrize("sampling", [WARM, WARM.replace(repeat_penalty=1.2)])
@pytest.mark.parametrize("n", [1, 2])
def test_request_that_continues_a_running_one_is_drafted_for(
    n: int, sampling: SamplingParams, ctx: Context, draft_ctx: Context, alone: Alone
) -> None:
    """What the draft model has drafted for the first text is read by the others."""
    engine = Engine(ctx, make("model", draft_ctx), SpeculativeConfig(draft_k=4))
    requests = {"trunk": Request(ctx.tokenize(TALE), id="trunk", max_tokens=40, sampling=sampling)}
    engine.add_request(requests["trunk"])
    said: list[int] = []
    results = {}
    while engine.has_unfinished():
        for event in engine.step():
            if event.result is not None:
                results[event.id] = event.result
            elif event.id == "trunk" and event.emitted is not None:
                said.append(event.emitted.token)
        if len(said) >= 15 and len(requests) == 1:
            for i in range(n):
                prompt = [*ctx.tokenize(TALE), *said[:12], *ctx.tokenize(PROMPTS[1 + i])]
                request = Request(prompt, id=f"{i}", max_tokens=12, sampling=sampling)
                requests[engine.add_request(request)] = request
    assert engine.stats.shared_prompt_tokens >= n * (len(ctx.tokenize(TALE)) + 11)
    for name, request in requests.items():
        alone.check(request, results[name])
    assert_clean(ctx, draft_ctx)


@pytest.mark.parametrize("which", ["none", "suffix", "model"])
@pytest.mark.parametrize("n_seq_max", [2, 5, 12])
@pytest.mark.parametrize(
    "sampling", [GREEDY.replace(seed=3), WARM, PENALISED, WARM.replace(temperature=0.3)], ids=str
)
def test_samples_that_begin_alike_are_decoded_once(
    target: lb.Model,
    draft_ctx: Context,
    alone: Alone,
    which: str,
    n_seq_max: int,
    sampling: SamplingParams,
) -> None:
    counted = []

    def count(decode: Callable[[int], int], n: int) -> int:
        counted.append(n)
        return decode(n)

    requests = [
        Request("The wolf ran and the wolf", n=6, max_tokens=14, sampling=sampling, stop=["."]),
        Request(PROMPTS[3], n=2, max_tokens=9, sampling=sampling, top_logprobs=2),
    ]
    with Context(target, n_ctx=1024, n_seq_max=n_seq_max, n_threads=1, batch_invariant=True) as ctx:
        before = ctx.decoder.hook(count)
        engine = Engine(ctx, make(which, draft_ctx), FIXED)
        events = list(engine.stream(requests))
        ctx.decoder.hook(before)
        results = [event.result for event in events if event.result is not None]
        assert len(results) == 8
        n_prompts = 0
        decoded: set[tuple[int, ...]] = set()
        for i, request in enumerate(requests):
            prompt = ctx.tokenize(str(request.prompt))
            n_prompts += len(prompt)
            for result in (result for result in results if result.id == str(i)):
                alone.check(request, result)
                shown = [e for e in events if (e.id, e.sample) == (result.id, result.sample)]
                assert "".join(e.text for e in shown) == result.text
                ends = range(1, len(result.tokens) + 1)
                decoded |= {(i, *result.tokens[:end]) for end in ends}
        assert_clean(ctx, draft_ctx)
        if which == "none" and n_seq_max == 12:
            assert sum(counted) <= n_prompts + len(decoded)


def test_texts_that_are_there_are_left_out(ctx: Context) -> None:
    requests = [Request(p, n=2, max_tokens=6, sampling=WARM) for p in PROMPTS[:3]]
    whole = by_name(Engine(ctx).generate(requests))
    done = {("0", 1), ("2", 0), ("2", 1)}
    rest = by_name(Engine(ctx).generate(requests, skip=done))
    assert set(rest) == set(whole) - done
    assert all(rest[name].text == whole[name].text for name in rest)


# -- how texts end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["none", "model"])
def test_dead_end_of_a_grammar_is_one_requests_error(which: str, small_toy: lb.Model) -> None:
    """After "ab" only a letter may follow that the vocabulary lacks: neighbours keep their rows."""
    with (
        Context(small_toy, n_ctx=512, n_threads=1) as ctx,
        Context(small_toy, n_ctx=512, n_threads=1) as draft_ctx,
    ):
        plain = [Request("abc", max_tokens=20, sampling=SamplingParams(seed=i)) for i in range(6)]
        dead = Request(
            "abc",
            id="dead",
            max_tokens=20,
            grammar='root ::= "ab" "z"',
            sampling=WARM,
            stop=["abc"],
        )
        requests = [*plain[:2], dead, *plain[2:]]
        engine = Engine(ctx, make(which, draft_ctx), SpeculativeConfig(draft_k=3))
        results = engine.generate(requests)
        assert results[2].id == "dead"
        assert results[2].finish_reason == "error"
        assert isinstance(results[2].error, GrammarError)
        # All that was generated before, also if it was drafted, or held back for the stop string.
        assert results[2].text == "ab"
        with Branch.start(ctx, "abc", sampling=WARM, grammar='root ::= "ab" "z"') as branch:
            with pytest.raises(GrammarError):
                branch.generate(9, stop=["abc"]).finish()
            assert branch.text.endswith("ab")
        quiet = Alone(ctx)
        for request, result in zip(requests, results, strict=True):
            if request is not dead:
                quiet.check(request, result)
        assert_clean(ctx, draft_ctx)


# -- errors of one ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["none", "model"])
def test_request_that_cannot_be_served_gets_its_own_error(
    which: str, ctx: Context, draft_ctx: Context, alone: Alone
) -> None:
    bad: dict[str, tuple[Request, str, type[Exception]]] = {
        name: (request, reason, kind)
        for name, request, reason, kind in (
            ("long", Request([5] * 1025, id="long"), "capacity", CacheFullError),
            ("ids", Request([5, 10**6], id="ids", n=2), "error", TokenizeError),
            ("text", Request("half a pair: \ud800", id="text"), "error", TokenizeError),
            ("stop", Request("x", id="stop", stop=("",)), "error", ConfigError),
            ("grammar", Request("x", id="grammar", grammar="root ::= ("), "error", GrammarError),
            ("no root", Request("x", id="no root", grammar='a ::= "b"'), "error", GrammarError),
        )
    }
    good = [Request(p, max_tokens=10, sampling=WARM) for p in PROMPTS]
    mixed = [*good[:2], *(request for request, _, _ in bad.values()), *good[2:]]
    results = by_name(Engine(ctx, make(which, draft_ctx), FIXED).generate(mixed))
    assert len(results) == len(mixed) + 1
    for name, (_, reason, kind) in bad.items():
        result = results[name, 0]
        assert result.finish_reason == reason
        assert isinstance(result.error, kind)
        assert not result.tokens
    for number, request in enumerate(mixed):
        if request.id is None:
            alone.check(request, results[str(number), 0])
    assert_clean(ctx, draft_ctx)


def test_empty_prompt_without_a_beginning_token_is_that_requests_error(tmp_path: Path) -> None:
    tokens = tuple("@ABCDEFGHIJ")  # from 12 tokens on llama.cpp takes number 11 for the end
    names = {f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "eos")}
    metadata: dict[str, toys.Value | None] = {**names, "tokenizer.ggml.add_bos_token": None}
    path = toys.write_llama(tmp_path / "toy.gguf", vocab=toys.Vocabulary(tokens), metadata=metadata)
    with lb.Model(path) as model, Context(model, n_ctx=256, n_threads=1) as ctx:
        assert model.bos is model.eos is None
        with pytest.raises(ConfigError, match="no BOS token"):
            Branch.start(ctx, "")
        results = Engine(ctx).generate([Request([]), Request([5], max_tokens=3)])
        assert isinstance(results[0].error, ConfigError)
        assert results[0].error.hint
        assert (len(results[1].tokens), results[1].finish_reason) == (3, "length")
        assert_clean(ctx)


def test_ids_are_unique(ctx: Context) -> None:
    engine = Engine(ctx, max_tokens=2)
    jobs: list[list[Request | str]] = [
        ["a", Request("b", id="0")],
        [Request("a", id="x"), Request("b", id="x")],
    ]
    for twice in jobs:
        with pytest.raises(ConfigError, match="two requests have the id"):
            engine.generate(twice)
    ended = engine.generate(iter([Request("The wolf", id="a")] * 2))  # read one by one
    assert {result.finish_reason for result in ended} == {"length", "error"}
    assert engine.generate([]) == []
    assert_clean(ctx)


# -- the cache runs full -----------------------------------------------------------------------------


@pytest.mark.parametrize(("n_ctx", "n_seq_max"), [(256, 1), (256, 6), (2048, 2)])
def test_small_draft_context_slows_down_but_changes_nothing(
    n_ctx: int, n_seq_max: int, ctx: Context, draft: lb.Model, alone: Alone
) -> None:
    requests = [Request(TALE + p, max_tokens=40, sampling=WARM) for p in PROMPTS * 2]
    with Context(draft, n_ctx=n_ctx, n_seq_max=n_seq_max, n_threads=1) as small:
        engine = Engine(ctx, lb.ModelDrafter(small), SpeculativeConfig(draft_k=4))
        for request, result in zip(requests, engine.generate(requests), strict=True):
            alone.check(request, result)
        assert_clean(ctx, small)


# -- others take the sequences ---------------------------------------------------------------------


def take_all(ctx: Context) -> list[Branch]:
    return [Branch.create(ctx) for _ in range(ctx.n_seq_free)]


def test_others_may_not_hold_every_sequence(ctx: Context) -> None:
    guests = take_all(ctx)
    requests: list[Request | str] = [Request([5] * 2000), Request(TALE, n=2), "text"]
    for wait_s in (0, 0.05):
        results = Engine(ctx, wait_s=wait_s).generate(requests)
        assert [(r.id, r.sample) for r in results] == [("0", 0), ("1", 0), ("1", 1), ("2", 0)]
        kinds = (CacheFullError, *[SequencesExhaustedError] * 3)  # what never fits does not wait
        for result, kind in zip(results, kinds, strict=True):
            assert (result.finish_reason, result.tokens) == ("capacity", [])
            assert isinstance(result.error, kind)
            assert result.error.hint
    for guest in guests:
        guest.prune()
    assert_clean(ctx)


def test_preempted_text_whose_sequence_is_taken_is_not_lost(target: lb.Model, alone: Alone) -> None:
    endless = SamplingParams(temperature=0.8, seed=1, logit_bias={target.eos or 0: -1e9})
    request = Request(TALE, n=3, max_tokens=120, sampling=endless)
    guests: list[Branch] = []
    with Context(target, n_ctx=256, n_seq_max=3, n_threads=1) as ctx:
        engine = Engine(ctx, wait_s=0)

        def on_event(_event: Event) -> None:
            if engine.stats.preemptions:
                guests.extend(take_all(ctx))

        results = engine.generate([request], on_event=on_event)
        errors = [type(r.error) for r in results if r.error is not None]
        assert SequencesExhaustedError in errors
        assert set(errors) <= {SequencesExhaustedError, CacheFullError}
        for result in results:
            tokens, text, _ = alone.generated(request, result)
            assert result.tokens
            assert result.tokens == tokens[: len(result.tokens)]
            assert text.startswith(result.text)
            if result.error is not None:
                assert (result.finish_reason, result.num_preemptions > 0) == ("capacity", True)
        for guest in guests:
            guest.prune()
        assert_clean(ctx)


def on_wait(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[int], None], *, most: int = 1000
) -> None:
    """Let ``action`` happen instead of each wait for a sequence; it is given their number."""
    count = itertools.count(1)

    def no_sleep(_seconds: float) -> None:
        n = next(count)
        assert n < most, "it waits for ever"
        action(n)

    monkeypatch.setattr("llamabranch.engine.engine.sleep", no_sleep, raising=False)


def test_engine_waits_while_others_are_at_work(
    ctx: Context, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request(p, max_tokens=8, sampling=WARM) for p in PROMPTS]
    guests = take_all(ctx)
    guests[0].prefill([7])

    def work(n: int) -> None:
        if n < 100:
            guests[0].commit(7)
        elif n < 110:  # this long it may be still
            pass
        else:
            while guests:
                guests.pop().prune()

    on_wait(monkeypatch, work)
    results = Engine(ctx, wait_s=0.5).generate(requests)
    for request, result in zip(requests, results, strict=True):
        alone.check(request, result)
    assert_clean(ctx)


def test_engine_does_not_wait_where_nobody_works(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a request can be cancelled while it waits."""
    waits: list[int] = []
    on_wait(monkeypatch, waits.append)
    guests = take_all(ctx)
    (result,) = Engine(ctx, wait_s=0.5).generate(["text"])
    assert isinstance(result.error, SequencesExhaustedError)
    assert len(waits) == 25
    engine = Engine(ctx, wait_s=math.inf)
    on_wait(monkeypatch, lambda n: engine.abort("0") if n == 5 else None)
    (result,) = engine.generate(["text"])
    assert (result.finish_reason, result.error) == ("cancelled", None)
    for guest in guests:
        guest.prune()
    assert_clean(ctx)


def test_engines_in_threads_share_the_sequences(target: lb.Model, alone: Alone) -> None:
    requests = [Request(p, max_tokens=12, sampling=WARM) for p in PROMPTS]
    with Context(target, n_ctx=1024, n_seq_max=2, n_threads=1) as ctx:
        with ThreadPoolExecutor(4) as pool:
            engines = [Engine(ctx, wait_s=math.inf) for _ in range(4)]
            for job in [pool.submit(engine.generate, requests) for engine in engines]:
                for request, result in zip(requests, job.result(), strict=True):
                    alone.check(request, result)
        assert_clean(ctx)


def test_what_has_ended_is_told_before_what_has_failed(ctx: Context) -> None:
    engine = Engine(ctx)
    stream = engine.stream([Request(p, max_tokens=30) for p in PROMPTS])
    next(stream)
    engine.abort("1")
    ctx.interrupt()
    ended: list[Result] = []
    with pytest.raises(DecodeInterruptedError):
        for event in stream:
            if event.result is not None:
                ended.append(event.result)
    # The others, which the interruption ends, come with what they have.
    assert ended[0].id == "1"
    assert sorted(result.id for result in ended) == [str(i) for i in range(len(PROMPTS))]
    assert {result.finish_reason for result in ended} == {"cancelled"}
    assert ended[1].tokens and ended[1].text
    assert_clean(ctx)


# -- events ----------------------------------------------------------------------------------------


def test_stream_that_is_closed_or_forgotten_and_listener_that_fails_free_everything(
    ctx: Context, draft_ctx: Context
) -> None:
    engine = Engine(ctx, make("model", draft_ctx), FIXED)
    stream = engine.stream([Request(p, max_tokens=30) for p in PROMPTS])
    next(stream)
    assert ctx.usage().cells_used > 0
    stream.close()
    assert_clean(ctx, draft_ctx)
    stream = engine.stream([Request(p, max_tokens=30) for p in PROMPTS])
    next(stream)
    del stream
    gc.collect()
    assert_clean(ctx, draft_ctx)

    def on_event(event: Event) -> None:
        raise OSError("the listener has gone")

    with pytest.raises(OSError, match="has gone"):
        engine.generate(PROMPTS, on_event=on_event)
    assert_clean(ctx, draft_ctx)


def test_cancelled_request_keeps_what_it_generated(
    ctx: Context, draft_ctx: Context, alone: Alone
) -> None:
    requests = [Request(p, max_tokens=30, sampling=WARM) for p in PROMPTS * 3]
    engine = Engine(ctx, make("model", draft_ctx), SpeculativeConfig(draft_k=2))

    def on_event(event: Event) -> None:
        if event.id == "1" and event.emitted is not None:
            engine.abort("1")
            engine.abort("14")  # it still waits

    results = engine.generate(requests, on_event=on_event)
    assert results[1].finish_reason == results[14].finish_reason == "cancelled"
    assert 0 < len(results[1].tokens) < 8
    assert alone.generated(requests[1], results[1])[1].startswith(results[1].text)
    assert results[14].tokens == []
    for i, (request, result) in enumerate(zip(requests, results, strict=True)):
        if i not in (1, 14):
            alone.check(request, result)
    assert_clean(ctx, draft_ctx)
    engine.abort("0")  # too late, and not meant for the next job
    assert engine.generate(requests[:1])[0].finish_reason == "length"


@pytest.mark.parametrize("when", ["begins", "is made", "ends", "is closed", "fails"])
def test_cancelling_survives_other_streams_of_the_engine(
    when: str, ctx: Context, alone: Alone
) -> None:
    """What is cancelled belongs to a stream: others begin and end between the call and the step."""
    engine = Engine(ctx)
    request = Request(TALE, id="a", max_tokens=60, sampling=WARM)
    stream = engine.stream([request])
    other = engine.stream([Request(TALE, id="b", max_tokens=3, sampling=WARM)])
    generated = [next(stream)]
    if when != "begins":
        next(other)
    engine.abort("a")
    match when:
        case "begins":
            next(other)
        case "is made":
            engine.stream(["never begun"])
        case "ends":
            assert list(other)[-1].result is not None
        case "is closed":
            other.close()
        case "fails":
            with pytest.raises(ConfigError):
                engine.stream([request, request])
    generated += stream
    result = generated[-1].result
    assert result is not None
    assert (result.finish_reason, len(result.tokens)) == ("cancelled", 1)
    assert alone.generated(request, result)[0][:1] == result.tokens
    if when in ("begins", "is made", "fails"):  # it was not meant
        assert [e.result.finish_reason for e in other if e.result is not None] == ["length"]
    assert_clean(ctx)


def test_cancelling_reaches_every_open_stream_and_no_later_one(ctx: Context) -> None:
    engine = Engine(ctx, seed=1)
    streams = [engine.stream([Request(TALE, id="a", max_tokens=40)]) for _ in range(3)]
    next(streams[0])
    engine.abort("a")  # two of them have not begun
    later = engine.stream([Request(TALE, id="a", max_tokens=4)])
    reasons = []
    for stream in (*streams, later):
        reasons += [event.result.finish_reason for event in stream if event.result is not None]
    assert reasons == ["cancelled"] * 3 + ["length"]
    assert_clean(ctx)


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", DRAFTERS)
def test_forward_passes_are_counted(which: str, ctx: Context, draft_ctx: Context) -> None:
    before = ctx.decoder.n_decodes, draft_ctx.decoder.n_decodes
    engine = Engine(ctx, make(which, draft_ctx), SpeculativeConfig(draft_k=4))
    results = engine.generate([Request(p, max_tokens=24, sampling=WARM) for p in PROMPTS])
    stats = engine.stats
    assert stats.target_forward_passes == ctx.decoder.n_decodes - before[0]
    assert stats.draft_forward_passes == draft_ctx.decoder.n_decodes - before[1]
    assert (stats.draft_forward_passes > 0) == (which in ("model", "chain"))
    n_generated = sum(len(result.tokens) for result in results)
    assert stats.generated_tokens == stats.speculative.num_emitted_tokens == n_generated
    # 24 tokens each: the longest alone needs 24 passes, and reading shares them.
    assert stats.target_forward_passes <= 24 + 2
    if which == "model":
        assert stats.target_forward_passes < 20
    assert stats.tokens_per_s > 0
    record = stats.as_dict()
    assert record["target_forward_passes"] == stats.target_forward_passes
    assert record["num_draft_tokens"] == sum(r.stats.num_draft_tokens for r in results)
    assert engine.explain()


def test_rounds_are_told_with_what_became_of_the_draft(
    ctx: Context, draft_ctx: Context, other_ctx: Context
) -> None:
    rounds: list[RoundTrace] = []
    request = Request(TALE, max_tokens=40, sampling=WARM, on_round=rounds.append)
    engine = Engine(ctx, lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=4))
    (result, *_) = engine.generate([request, Request("The wolf", max_tokens=20, sampling=WARM)])
    text = [*ctx.tokenize(TALE), *result.tokens]
    assert sum(trace.n_accepted for trace in rounds) > 0 < sum(t.n_rejected for t in rounds)
    assert len(rounds) == result.stats.num_drafts
    for trace in rounds:
        n = trace.n_accepted
        judged = trace.draft[: n + trace.n_rejected]
        assert trace.following is not None
        said = [*trace.draft[:n], trace.following.token]
        assert text[trace.position :][: n + 1] == said[: len(text) - trace.position]
        with Branch.start(other_ctx, text[: trace.position]) as branch:
            for token, logprob in zip(judged, trace.logprobs, strict=True):
                assert logprob == -branch.surprisal(token)
                branch.commit(token)


def test_streams_draft_in_one_decode(ctx: Context, draft_ctx: Context) -> None:
    """Eight streams that draft 4 tokens need 5 draft decodes a round, not 40."""
    requests = [Request(TALE, n=8, max_tokens=25, sampling=WARM)]
    engine = Engine(ctx, make("model", draft_ctx), SpeculativeConfig(draft_k=4))
    engine.generate(requests)
    stats = engine.stats
    assert stats.draft_forward_passes <= 6 * stats.target_forward_passes
    assert stats.speculative.num_draft_tokens > 3 * stats.draft_forward_passes


# -- interrupts ------------------------------------------------------------------------------------


def test_error_of_one_requests_draft_state_does_not_end_the_others(ctx: Context) -> None:
    chosen = [8, 9, 10]

    class State:
        """Proposes one token; telling that of one prompt what was accepted is interrupted."""

        def __init__(self, text: lb.speculative.Text) -> None:
            self.is_chosen = text.tokens[:3] == chosen
            self.close = lambda: None

        def propose(self, *_: object) -> lb.speculative.Draft:
            return lb.speculative.Draft(tokens=[5], drafter="interrupted")

        def observe(self, n_tokens: int) -> None:
            if self.is_chosen:
                raise DecodeInterruptedError("interrupted", code=2, memory_changed=True)

        def fork(self, target: lb.speculative.Text) -> State:
            return State(target)

    class Interrupted(lb.Drafter):
        name = "interrupted"

        def check(self, target: lb.Model) -> None:
            """Any target."""

        def start(self, target: lb.speculative.Text, rule: str) -> State:
            return State(target)

    requests = [Request(p, sampling=GREEDY) for p in ([5, 6, 7], chosen, [11, 12, 13])]
    alone = Engine(ctx, max_tokens=12).generate(requests)
    config = SpeculativeConfig(draft_k=1)
    results = Engine(ctx, Interrupted(), config, max_tokens=12).generate(requests)
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert isinstance(results[1].error, DecodeInterruptedError)
    assert [results[i].tokens for i in (0, 2)] == [alone[i].tokens for i in (0, 2)]
    assert_clean(ctx)


def test_nothing_is_measured_that_nobody_reads(
    ctx: Context, draft_ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        Request(prompt, sampling=params)
        for prompt, params in zip(PROMPTS, (WARM, GREEDY), strict=False)
    ]
    engine = Engine(ctx, lb.ModelDrafter(draft_ctx), FIXED, max_tokens=12)
    heard: list[Event] = []
    expected = [result.tokens for result in engine.generate(requests, on_event=heard.append)]
    emitted = [event.emitted for event in heard if event.emitted is not None]
    assert [one.token for one in emitted if not one.is_stop]
    assert not any(math.isnan(one.logprob) or math.isnan(one.entropy) for one in emitted)

    def measured(*_: object) -> float:
        raise AssertionError("a row was measured")

    for name in ("logprob", "entropy", "_measure"):
        monkeypatch.setattr(LogitsRow, name, measured)
    assert [result.tokens for result in engine.generate(requests)] == expected


def test_result_is_parsed_by_the_type_it_was_made_for(ctx: Context) -> None:
    class Hero(pydantic.BaseModel):
        name: Annotated[str, pydantic.Field(max_length=8)]
        brave: bool

    class Wolf(TypedDict):
        teeth: Literal[1, 2, 3]

    grammars = [
        lb.Grammar.from_json_schema(Hero), lb.Grammar.from_json_schema(Wolf),
        lb.Grammar.from_json_schema({"enum": ["a", None]}), lb.Grammar.from_choices(["yes", "no"]), None,
    ]  # fmt: skip
    requests = [Request("The hero: ", grammar=g, max_tokens=80 if g else 4) for g in grammars]
    engine = Engine(ctx, seed=1)
    hero, wolf, value, choice, free = engine.generate(requests)
    assert isinstance(hero.parsed, Hero)
    assert wolf.parsed == json.loads(wolf.text)
    assert value.parsed in ("a", None)
    assert choice.parsed == choice.text in ("yes", "no")
    assert free.parsed is None
    (cut,) = engine.generate([Request("A", grammar=grammars[0], max_tokens=3)])
    assert (cut.finish_reason, cut.parsed_or("none")) == ("length", "none")
    with pytest.raises(lb.errors.ParseError, match="'length'") as caught:
        assert cut.parsed
    assert pickle.loads(pickle.dumps(caught.value)).text == cut.text != ""
    (ended,) = engine.generate([replace(requests[0], stop='"')])
    with pytest.raises(lb.errors.ParseError, match="not valid for"):
        assert ended.parsed
    assert (ended.finish_reason, ended.parsed_or(None)) == ("stop", None)


def test_value_that_the_type_refuses_ends_no_batch(ctx: Context) -> None:
    class Price(pydantic.BaseModel):
        kind: Literal["net", "gross"]

        @pydantic.field_validator("kind")
        @classmethod
        def check(cls, value: str) -> str:
            return {"net": value}[value]  # KeyError, which pydantic lets through

    grammar = lb.Grammar.from_json_schema(Price)
    requests = [Request(f"Price {i}: ", grammar=grammar, max_tokens=40) for i in range(12)]
    results = Engine(ctx, seed=1).generate(requests)
    found = [result.parsed_or(None) for result in results]
    assert None in found and Price(kind="net") in found
    with pytest.raises(lb.errors.ParseError, match="'gross'") as caught:
        assert results[found.index(None)].parsed
    assert caught.value.text == '{"kind": "gross"}'
    amount = lb.Grammar.from_json_schema(list[Decimal])
    assert amount.parse('["1.5"]') == [Decimal("1.5")]
    with pytest.raises(lb.errors.ParseError, match="valid decimal") as refused:
        amount.parse('["1.2.3"]')
    assert refused.value.text == '["1.2.3"]' and "\n" not in str(refused.value)
    with pytest.raises(lb.errors.ParseError):
        lb.Grammar.from_json_schema({}).parse("[" * 100_000)


def test_engine_opens_a_model_and_gives_each_text_a_part_of_the_cache(
    target: lb.Model, ctx: Context
) -> None:
    """By its path, and as a model that stays open; the texts are those of one cache."""
    expected = [r.text for r in Engine(ctx, seed=3, max_tokens=12).generate(PROMPTS)]
    for source in (target.path, target):
        with Engine(source, parallel=3, seed=3, max_tokens=12) as engine:
            own = engine.target
            assert (own.n_seq_max, own.n_ctx_seq) == (3, target.n_ctx_train)
            assert not own.capabilities.can_share
            assert [r.text for r in engine.generate(PROMPTS)] == expected
        assert own.closed
        assert own.model.closed == (source is not target)
    engine = Engine(ctx)
    engine.close()
    assert not ctx.closed


def test_no_more_texts_run_than_in_parallel_and_they_are_the_same(
    ctx: Context, other_ctx: Context
) -> None:
    requests = [Request(f"The wolf number {i}", max_tokens=30, sampling=WARM) for i in range(7)]
    expected = [result.tokens for result in Engine(ctx).generate(requests)]
    limited, most = Engine(other_ctx, parallel=5), 0
    names = [limited.add_request(request) for request in requests]
    found: dict[str, list[int]] = {}
    while limited.has_unfinished():
        events = limited.step()
        most = max(most, len({event.id for event in events}))
        found |= {event.id: event.result.tokens for event in events if event.result is not None}
    assert [found[name] for name in names] == expected
    assert most == 5
    assert other_ctx.usage().cells_used == 0
    with pytest.raises(ConfigError, match="parallel"):
        Engine(ctx, parallel=0)


async def _ask(model: lb.Model, prompt: str) -> tuple[str, Context]:
    async with AsyncEngine(model, parallel=2, seed=3) as engine:
        result = await engine.complete(prompt, max_tokens=12)
        return result.text, engine.engine.target


def test_asynchronous_engine_opens_a_model(target: lb.Model, ctx: Context) -> None:
    text, own = asyncio.run(_ask(target, "The wolf"))
    assert own.closed and own.n_seq_max == 2 and not own.params.kv_unified
    seeded = Request("The wolf", max_tokens=12, id="0")
    assert text == Engine(ctx, seed=3).generate([seeded])[0].text


def test_engine_keeps_one_cache_where_a_model_drafts_or_memory_cannot_be_divided(
    target: lb.Model, draft_ctx: Context, tmp_path: Path
) -> None:
    drafters = {
        "model": lb.ModelDrafter(draft_ctx),
        "chain": lb.ChainDrafter([lb.SuffixDrafter(), lb.ModelDrafter(draft_ctx)]),
        "grammar": lb.GrammarDrafter(lb.ModelDrafter(draft_ctx)),
    }
    for drafter in drafters.values():
        with Engine(target, drafter, parallel=2) as engine:
            assert engine.target.params.kv_unified
    with Engine(target, lb.SuffixDrafter(), parallel=2) as engine:
        assert not engine.target.params.kv_unified
    path = toys.write_toy(tmp_path / "mamba.gguf", "mamba", vocab="bytes")
    with Engine(path, parallel=2, max_tokens=4) as engine:
        assert engine.target.params.kv_unified
        assert len(engine.generate(["a", "b", "c"])) == 3
        assert "plain decoding" in engine.explain()


def test_engine_that_cannot_open_leaves_nothing_open(
    target: lb.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[lb.Model] = []

    class Watched(lb.Model):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            opened.append(self)

    monkeypatch.setattr("llamabranch.engine.job.Model", Watched)
    for parallel in (0, 1000):
        with pytest.raises(ConfigError, match="parallel"):
            Engine(target.path, parallel=parallel)
    assert [model.closed for model in opened] == [True, True]
    with pytest.raises(ConfigError, match="no-such-model"):
        Engine("no-such-model")
