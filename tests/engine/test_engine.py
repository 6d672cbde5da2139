"""The engine: whatever runs beside a request, its text is the one it would have had alone.

"Alone" is ``Branch.generate`` in a context of its own, one decode a token: no engine, no drafter.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest
import toys
from decodes import hooked
from drafts import FIXED, GREEDY, WARM, Knowing, make
from engine_runs import assert_clean, check_alone
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
from llamabranch.errors import (
    CacheFullError,
    ConfigError,
    DecodeInterruptedError,
    GrammarError,
    SequencesExhaustedError,
    TokenizeError,
)
from llamabranch.generation.verify import RoundTrace
from llamabranch.run.step import Step

UNSEEDED = SamplingParams(temperature=0.8)
TALE = "Once upon a time there was a king who had three daughters, and the youngest was so fair "
PROMPTS = [
    TALE,
    "“Who is there?” cried the old woman,",
    "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog",
    "The wolf",
    "In the middle of the forest there stood a little house, and in that house there lived",
]


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
    ctx: Context, draft_ctx: Context, other_ctx: Context
) -> None:
    """The texts draft together: eight that draft 4 tokens need 5 draft decodes a round, not 40."""
    shared = TALE * 4
    requests = [Request(shared + p, max_tokens=12, sampling=WARM) for p in PROMPTS]
    n_shared = len(ctx.tokenize(shared)) - 1  # the last token may join with what follows
    engine = Engine(ctx, make("model", draft_ctx), FIXED)
    for request, result in zip(requests, engine.generate(requests), strict=True):
        check_alone(other_ctx, request, result)
        assert result.num_prompt_tokens == len(ctx.tokenize(str(request.prompt)))
    stats = engine.stats
    assert stats.cached >= stats.shared >= 4 * n_shared
    total = sum(len(ctx.tokenize(str(request.prompt))) for request in requests)
    assert stats.evaluated + stats.cached == total
    engine = Engine(ctx, make("model", draft_ctx), FIXED)
    engine.generate([Request(TALE, n=8, max_tokens=25, sampling=WARM)])
    stats = engine.stats
    assert stats.draft_forward_passes <= 6 * stats.target_forward_passes
    assert stats.speculative.num_draft_tokens > 3 * stats.draft_forward_passes
    assert_clean(ctx, draft_ctx)


# -- how texts end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["none", "model"])
def test_dead_end_of_a_grammar_is_one_requests_error(which: str, small_toy: lb.Model) -> None:
    """After "ab" only a letter may follow that the vocabulary lacks: neighbours keep their rows."""
    with (
        Context(small_toy, n_ctx=512, n_threads=1, exact=True) as ctx,
        Context(small_toy, n_ctx=512, n_threads=1, exact=True) as draft_ctx,
    ):
        plain = [Request("abc", max_tokens=20, sampling=SamplingParams(seed=i)) for i in range(6)]
        grammar = 'root ::= "ab" "z"'
        dead = Request("abc", max_tokens=20, grammar=grammar, sampling=WARM, stop=["abc"])
        requests = [*plain[:2], dead, *plain[2:]]
        results = Engine(ctx, make(which, draft_ctx), FIXED).generate(requests)
        # All that was generated before, also if it was drafted, or held back for the stop string.
        assert (results[2].finish_reason, results[2].text) == ("error", "ab")
        assert isinstance(results[2].error, GrammarError)
        with Branch.start(ctx, "abc", sampling=WARM, grammar=grammar) as branch:
            shown = ""
            with pytest.raises(GrammarError):
                for produced in branch.generate(9, stop=["abc"]):
                    shown += produced.text
            assert shown == "ab" and branch.text.endswith("ab")
        for request, result in zip(requests, results, strict=True):
            if request is not dead:
                check_alone(ctx, request, result)
        assert_clean(ctx, draft_ctx)


# -- errors of one ---------------------------------------------------------------------------------

BAD: dict[str, tuple[Request, str, type[Exception]]] = {
    "long": (Request([5] * 1025), "capacity", CacheFullError),
    "ids": (Request([5, 10**6], n=2), "error", TokenizeError),
    "text": (Request("half a pair: \ud800"), "error", TokenizeError),
    "stop": (Request("x", stop=("",)), "error", ConfigError),
}


@pytest.mark.parametrize("grammar", ["root ::= (", 'a ::= "b"'])
def test_request_with_a_bad_grammar_is_refused_at_once(grammar: str) -> None:
    with pytest.raises(GrammarError):
        Request("x", grammar=grammar)


@pytest.mark.parametrize("which", ["none", "model"])
def test_request_that_cannot_be_served_gets_its_own_error(
    which: str, ctx: Context, draft_ctx: Context, other_ctx: Context
) -> None:
    good = [Request(p, max_tokens=10, sampling=WARM) for p in PROMPTS]
    bad = [request.replace(id=name) for name, (request, _, _) in BAD.items()]
    mixed = [*good[:2], *bad, *good[2:]]
    all_results = Engine(ctx, make(which, draft_ctx), FIXED).generate(mixed)
    results = {(result.id, result.sample): result for result in all_results}
    assert len(results) == len(all_results) == len(mixed) + 1
    for name, (_, reason, kind) in BAD.items():
        result = results[name, 0]
        assert (result.finish_reason, result.tokens) == (reason, [])
        assert isinstance(result.error, kind)
    for number, request in enumerate(mixed):
        if request.id is None:
            check_alone(other_ctx, request, results[str(number), 0])
    assert_clean(ctx, draft_ctx)


def test_empty_prompt_without_a_beginning_token_is_that_requests_error(tmp_path: Path) -> None:
    tokens = tuple("@ABCDEFGHIJ")  # from 12 tokens on llama.cpp takes number 11 for the end
    keys = ("bos_token_id", "eos_token_id", "add_bos_token")
    none: dict[str, toys.Value | None] = dict.fromkeys(f"tokenizer.ggml.{key}" for key in keys)
    path = toys.write_llama(tmp_path / "toy.gguf", vocab=toys.Vocabulary(tokens), metadata=none)
    with lb.Model(path) as model, Context(model, n_ctx=256, n_threads=1) as ctx:
        assert model.bos is model.eos is None
        with pytest.raises(ConfigError, match="no BOS token"):
            Branch.start(ctx, "")
        empty, other = Engine(ctx).generate([Request([]), Request([5], max_tokens=3)])
        assert isinstance(empty.error, ConfigError) and empty.error.hint
        assert (len(other.tokens), other.finish_reason) == (3, "length")
        assert_clean(ctx)


class Interrupted(Knowing):
    """Proposes one token; telling its state what was accepted of one prompt is interrupted."""

    is_chosen = False

    def start(self, target: lb.speculative.Text, rule: str) -> Any:
        state = Interrupted(self._drafted)
        state.is_chosen = target.tokens[:3] == [8, 9, 10]
        return state

    def observe(self, n_tokens: int) -> None:
        if self.is_chosen:
            raise DecodeInterruptedError("interrupted", code=2, memory_changed=True)


def test_error_of_one_requests_draft_state_does_not_end_the_others(ctx: Context) -> None:
    requests = [Request(p, sampling=GREEDY) for p in ([5, 6, 7], [8, 9, 10], [11, 12, 13])]
    alone = Engine(ctx, max_tokens=12).generate(requests)
    config = SpeculativeConfig(draft_k=1)
    results = Engine(ctx, Interrupted(lambda tokens, n: [5]), config, max_tokens=12).generate(
        requests
    )
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert isinstance(results[1].error, DecodeInterruptedError)
    assert [results[i].tokens for i in (0, 2)] == [alone[i].tokens for i in (0, 2)]
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


# -- too little room ---------------------------------------------------------------------------------


def test_engine_waits_while_others_are_at_work_and_no_longer(
    ctx: Context, other_ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others hold every sequence: it waits as long as they work; a request may be cancelled meanwhile."""
    guests, waits = [Branch.create(ctx) for _ in range(ctx.n_seq_free)], 0

    def generate(
        requests: Sequence[Request | str], wait_s: float, work: Callable[[Engine, int], None]
    ) -> list[Result]:
        """Let ``work`` happen instead of each wait; it is given their number."""
        nonlocal waits
        engine, waits = Engine(ctx, wait_s=wait_s), 0

        def no_sleep(_seconds: float) -> None:
            nonlocal waits
            waits += 1
            assert waits < 1000, "it waits for ever"
            work(engine, waits)

        monkeypatch.setattr("llamabranch.run.core.sleep", no_sleep)
        return engine.generate(requests)

    unfit: list[Request | str] = [Request([5] * 2000), Request(TALE, n=2), "text"]
    for wait_s, n_waits in ((0, 0), (0.5, 25)):
        results = generate(unfit, wait_s, lambda engine, n: None)
        assert [(r.id, r.sample) for r in results] == [("0", 0), ("1", 0), ("1", 1), ("2", 0)]
        kinds = (CacheFullError, *[SequencesExhaustedError] * 3)  # what never fits does not wait
        for result, kind in zip(results, kinds, strict=True):
            assert (result.finish_reason, result.tokens, result.evaluated) == ("capacity", [], 0)
            assert isinstance(result.error, kind) and result.error.hint
        assert waits == n_waits
    (result,) = generate(
        ["text"], math.inf, lambda engine, n: engine.abort("0") if n == 5 else None
    )
    assert (result.finish_reason, result.error, result.evaluated) == ("cancelled", None, 0)
    guests[0].prefill([7])

    def work(_engine: Engine, n: int) -> None:
        if n < 100:
            guests[0].commit(7)
        elif n >= 110:  # this long it may be still
            while guests:
                guests.pop().prune()

    requests = [Request(p, max_tokens=8, sampling=WARM) for p in PROMPTS]
    for request, result in zip(requests, generate(requests, 0.5, work), strict=True):
        check_alone(other_ctx, request, result)
    assert_clean(ctx)


def test_an_engine_waits_for_cells_that_another_one_holds(
    target: lb.Model, other_ctx: Context
) -> None:
    """Any two of the prompts are longer than the context."""
    prompts = [[5 + i] * 150 for i in range(4)]
    requests = [Request(prompt, max_tokens=8, sampling=WARM) for prompt in prompts]
    with Context(target, n_ctx=256, n_threads=1, exact=True) as ctx, ThreadPoolExecutor(3) as pool:
        stream = Engine(ctx, None, wait_s=60).stream([requests[0]])
        events = [next(stream)]
        engines = [Engine(ctx, None, wait_s=math.inf) for _ in range(3)]
        jobs = [
            pool.submit(engine.generate, [request])
            for engine, request in zip(engines, requests[1:], strict=True)
        ]
        events += stream
        results = [events[-1].result, *(job.result(120)[0] for job in jobs)]
        for request, result in zip(requests, results, strict=True):
            assert result is not None
            check_alone(other_ctx, request, result)


@pytest.mark.parametrize("place", ["stream", "constraint"])
def test_an_engine_does_not_wait_for_another_one_of_its_thread(
    place: str, target: lb.Model
) -> None:
    """It runs the other one's texts too; but not those whose function it is called by."""
    with Context(target, n_ctx=256, n_threads=1, exact=True) as ctx:
        inner = Engine(ctx, None, wait_s=math.inf)
        results, ended = list[Result](), list[Result]()

        def run(*_: object) -> bool:
            if not results:
                results.extend(inner.generate([Request([5] * 180, max_tokens=4)]))
            return True

        outer = Engine(ctx, None)
        if place == "stream":
            for event in outer.stream([Request([6] * 120, max_tokens=8)]):
                ended += [event.result] if event.result is not None else []
                run()
        else:
            outer.generate([Request([6] * 120, max_tokens=8, constraint=run)])
        if place == "stream":
            assert results[0].finish_reason == "length" and len(ended) == 1
        else:
            assert results[0].finish_reason == "capacity"
            assert isinstance(results[0].error, CacheFullError)


def test_an_abort_stops_no_decode_of_another_thread(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aborted request waits for its decode while another thread decodes on the context."""
    engine = Engine(ctx, None)
    name = engine.add_request(Request([5] * (ctx.n_batch + 20), max_tokens=4))
    engine.step()
    waits, is_inside, may_decode = threading.Event(), threading.Event(), threading.Event()

    decode_step = Step._decode

    def noted(step: Step) -> None:
        waits.set()
        decode_step(step)  # it takes the context's lock first

    def held(decode: Callable[[int], int], n: int) -> int:
        is_inside.set()
        assert may_decode.wait(60)
        return decode(n)

    monkeypatch.setattr(Step, "_decode", noted)
    branch = Branch.create(ctx)
    with ThreadPoolExecutor(2) as pool, hooked(ctx, held):
        innocent = pool.submit(branch.prefill, [5, 6, 7])
        assert is_inside.wait(60)
        step = pool.submit(engine.step)
        assert waits.wait(60)
        engine.abort(name)
        may_decode.set()
        innocent.result(60)
        events = step.result(60)
    assert branch.tokens == [5, 6, 7]
    while engine.has_unfinished():
        events += engine.step()
    (result,) = (event.result for event in events if event.result is not None)
    assert result.finish_reason == "cancelled"
    branch.commit(8)  # nothing is left to stop
    branch.prune()
    engine.close()


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


# -- streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["closed", "forgotten", "failed"])
def test_stream_that_ends_early_frees_everything(
    end: str, ctx: Context, draft_ctx: Context
) -> None:
    def on_event(event: Event) -> None:
        raise OSError("the listener has gone")

    engine = Engine(ctx, make("model", draft_ctx), FIXED)
    stream = engine.stream([Request(p, max_tokens=30) for p in PROMPTS])
    next(stream)
    assert ctx.usage().cells_used > 0
    if end == "closed":
        stream.close()
    del stream
    gc.collect()
    if end == "failed":
        with pytest.raises(OSError, match="has gone"):
            engine.generate(PROMPTS, on_event=on_event)
    assert_clean(ctx, draft_ctx)


@pytest.mark.parametrize("when", ["begins", "is made", "ends", "is closed", "fails"])
def test_cancelling_reaches_every_open_stream_and_no_other(when: str, ctx: Context) -> None:
    """What is cancelled belongs to a stream: others begin and end between the call and the step."""

    def reason(stream: Iterator[Event]) -> str:
        return [event.result for event in stream][-1].finish_reason  # type: ignore[union-attr]

    engine = Engine(ctx, seed=1)
    request = Request(TALE, id="a", max_tokens=40)
    streams = [engine.stream([request]) for _ in range(3)]
    other = engine.stream([Request(TALE, id="b", max_tokens=3)])
    next(streams[0])  # two of them have not begun
    if when != "begins":
        next(other)
    engine.abort("a")
    match when:
        case "begins":
            next(other)
        case "is made":
            engine.stream(["never begun"])
        case "ends":
            assert reason(other) == "length"
        case "is closed":
            other.close()
        case "fails":
            with pytest.raises(ConfigError):
                engine.stream([request, request])
    later = engine.stream([Request(TALE, id="a", max_tokens=4)])
    assert [*map(reason, streams)] == ["cancelled"] * 3
    assert reason(later) == "length"
    if when in ("begins", "is made", "fails"):  # it was not meant
        assert reason(other) == "length"
    assert_clean(ctx)


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["none", "model", "suffix", "chain"])
def test_forward_passes_are_counted(which: str, ctx: Context, draft_ctx: Context) -> None:
    before = ctx.decoder.n_decodes, draft_ctx.decoder.n_decodes
    engine = Engine(ctx, make(which, draft_ctx), SpeculativeConfig(draft_k=4))
    results = engine.generate([Request(p, max_tokens=24, sampling=WARM) for p in PROMPTS])
    stats = engine.stats
    assert stats.target_forward_passes == ctx.decoder.n_decodes - before[0]
    assert stats.draft_forward_passes == draft_ctx.decoder.n_decodes - before[1]
    assert (stats.draft_forward_passes > 0) == (which in ("model", "chain"))
    n_generated = sum(len(result.tokens) for result in results)
    assert stats.generated == stats.speculative.num_emitted_tokens == n_generated
    # 24 tokens each: the longest alone needs 24 passes, and reading shares them.
    assert stats.target_forward_passes <= 24 + 2
    if which == "model":
        assert stats.target_forward_passes < 20
    assert stats.tokens_per_second > 0
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
    (ended,) = engine.generate([requests[0].replace(stop='"')])
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


# -- engines that open a model -----------------------------------------------------------------------


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

    async def ask() -> tuple[str, Context]:
        async with AsyncEngine(target, parallel=3, seed=3) as engine:
            result = await engine.complete(PROMPTS[0], max_tokens=12)
            return result.text, engine.engine.target

    text, own = asyncio.run(ask())
    assert own.closed and own.n_seq_max == 3 and not own.params.kv_unified
    assert text == expected[0]
    Engine(ctx).close()
    assert not ctx.closed


def test_engine_keeps_one_cache_where_a_model_drafts_or_memory_cannot_be_divided(
    target: lb.Model, draft_ctx: Context, tmp_path: Path
) -> None:
    model = lb.ModelDrafter(draft_ctx)
    chain = lb.ChainDrafter([lb.SuffixDrafter(), model])
    for drafter in (model, chain, lb.GrammarDrafter(model), lb.SuffixDrafter()):
        with Engine(target, drafter, parallel=2) as engine:
            assert engine.target.params.kv_unified == (not isinstance(drafter, lb.SuffixDrafter))
    path = toys.write_toy(tmp_path / "mamba.gguf", "mamba", vocab="bytes")
    with Engine(path, parallel=2, max_tokens=4) as engine:
        assert engine.target.params.kv_unified
        assert len(engine.generate(["a", "b", "c"])) == 3
        assert "plain decoding" in engine.explain()


def test_engine_that_cannot_open_leaves_nothing_open(
    target: lb.Model, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[lb.Model] = []

    class Watched(lb.Model):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            opened.append(self)

    monkeypatch.setattr("llamabranch.engine.engine.Model", Watched)
    for source, parallel, words in (
        (target.path, 0, "parallel"), (target.path, 1000, "parallel"), (ctx, 0, "parallel"),
        ("no-such-model", 1, "no-such-model"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            Engine(source, parallel=parallel)
    assert [model.closed for model in opened] == [True, True]
