"""Functions of the user that use the same context while a step runs: no other text may change."""

from __future__ import annotations

import gc
import math
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import toys
from engine_runs import results_of, run

import llamabranch as lb
from llamabranch import Branch, Context, Engine, FunctionDrafter, Request, SamplingParams
from llamabranch.context.runner import Batch
from llamabranch.errors import BranchStateError, CacheFullError, ClosedError, UsageError

PROMPTS = ["Once upon a time", "The old king had three", "The wolf ", "The princess said"]
GUESTS = ["A little mouse", "In the dark wood", "Come here", "My dear", "Who is it"]
Use = Callable[[], object]


def opened(model: lb.Model, **options: Any) -> Context:
    return Context(
        model, **{"n_ctx": 1024, "n_seq_max": 12, "n_threads": 1, "exact": True, **options}
    )


@pytest.fixture
def both(target: lb.Model) -> Iterator[tuple[Context, Context]]:
    """Two equal contexts: one for texts whose functions use it, one for the same texts without."""
    with opened(target) as ctx, opened(target) as clean:
        yield ctx, clean


def once_at_a_time(use: Use) -> Use:
    """Return ``use``; a call from inside it does nothing."""
    busy: list[bool] = []

    def outer() -> None:
        if not busy:
            busy.append(True)
            try:
                use()
            finally:
                busy.pop()

    return outer


def uses(ctx: Context) -> dict[str, Use]:
    """Return functions that decode on ``ctx``."""
    guest = Branch.start(ctx, "A sad story.")

    def grow() -> None:
        with Branch.start(ctx, "Little Red", sampling=SamplingParams(seed=1)) as branch:
            branch.generate_text(3)
            branch.fork().prune()

    return {
        "complete": lambda: ctx.complete(GUESTS, max_tokens=3, temperature=0),
        "score": lambda: guest.score(" It was a dark night.", 0),
        "grow": grow,
    }


class Wish:
    """A constraint that allows everything, and calls ``use`` first."""

    def __init__(self, use: Use) -> None:
        self.prefix = self.complete = lambda text: use() is None or True


def with_use(kind: str, use: Use) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return sampling settings and request options by which a text calls ``use``."""
    if kind == "logits_processor":
        return {"logits_processor": lambda tokens, logits: (use(), logits)[1]}, {}
    if kind == "constraint":
        return {}, {"constraint": Wish(use)}
    if kind == "on_prompt_progress":
        return {}, {kind: lambda progress: use()}
    return {}, {"on_round": lambda trace: use()}


@pytest.mark.parametrize(
    ("kind", "drafts"),
    [
        *product(("logits_processor", "constraint"), (False, True)),
        ("on_prompt_progress", False), ("on_round", True), ("drafter", True),
    ],
)  # fmt: skip
def test_texts_that_share_decodes(kind: str, drafts: bool, both: tuple[Context, Context]) -> None:
    def run(ctx: Context, use: Use | None) -> list[lb.Result]:
        requests = []
        for i, prompt in enumerate(PROMPTS):
            settings, options = ({}, {}) if use is None or i else with_use(kind, use)
            sampling = SamplingParams(temperature=0.8, seed=i, **settings)
            requests.append(
                Request(
                    prompt, max_tokens=12, sampling=sampling, id=str(i), top_logprobs=2, **options
                )
            )

        def propose(tokens: Any, n: int) -> list[int]:
            if use is not None and kind == "drafter":
                use()
            return [12] * n

        drafter = FunctionDrafter(propose) if drafts else None
        return Engine(ctx, drafter, lb.SpeculativeConfig(draft_k=3)).generate(requests)

    ctx, clean = both
    expected = run(clean, None)
    for name, use in uses(ctx).items():
        for result, wanted in zip(run(ctx, once_at_a_time(use)), expected, strict=True):
            assert result.tokens == wanted.tokens, (name, result.error)
            for mine, its in zip(result.logprobs or [], wanted.logprobs or [], strict=True):
                assert mine[:5] == its[:5]  # the log-probability and the entropy too
            assert result.exact


@pytest.mark.parametrize("rule", ["seeded", "token", "block"])
@pytest.mark.parametrize("kind", ["logits_processor", "constraint"])
def test_a_branch(kind: str, rule: str, both: tuple[Context, Context]) -> None:
    """It is drafted, or drawn token by token, and the functions also read the branch itself."""

    def run(ctx: Context, use: Callable[[Branch], object], drafter: lb.Drafter | None) -> Any:
        branch = Branch.start(ctx, PROMPTS[0])
        settings, options = with_use(kind, once_at_a_time(lambda: use(branch)))
        branch.resample(SamplingParams(temperature=0.8, seed=5, **settings))
        config = lb.SpeculativeConfig(rule=rule, draft_k=3)
        drawn = branch.generate(16, drafter=drafter, config=config, top_logprobs=2, **options)
        found = [(p.token, p.logprob, p.entropy, p.alternatives) for p in drawn]
        score = branch.score(" and")
        branch.prune()
        return found, score

    ctx, clean = both
    own: dict[str, Callable[[Branch], object]] = {
        "score it": lambda branch: branch.score(" and"),
        "fork it": lambda branch: branch.fork().prune(),
    }
    for drafter in (None, FunctionDrafter(lambda tokens, n: [12, 346, 915][:n])):
        expected = run(clean, lambda branch: None, drafter)
        others = {name: lambda _, use=use: use() for name, use in uses(ctx).items()}
        for name, use in (others | own).items():
            assert run(ctx, use, drafter) == expected, name


@pytest.mark.parametrize("rule", ["seeded", "token", "block"])
def test_a_drafter_that_reads_the_branch_it_drafts_for(
    rule: str, both: tuple[Context, Context]
) -> None:
    config = lb.SpeculativeConfig(rule=rule, draft_k=3)

    def run(ctx: Context, use: Callable[[Branch], object]) -> Any:
        def propose(tokens: Any, n: int) -> list[int]:
            use(branch)
            return [12, 346, 915][:n]

        branch = Branch.start(ctx, PROMPTS[0], sampling=SamplingParams(temperature=0.8, seed=5))
        drawn = branch.generate(16, drafter=FunctionDrafter(propose), config=config)
        return [(p.token, p.logprob, p.entropy, p.source) for p in drawn]

    ctx, clean = both
    expected = run(clean, lambda branch: None)
    assert run(ctx, lambda branch: branch.score(" and")) == expected
    assert run(ctx, lambda branch: branch.fork().prune()) == expected
    with pytest.raises(BranchStateError, match="has changed the branch"):
        run(ctx, lambda branch: branch.extend([5]))


def test_a_prompt_that_is_scored_beside_such_a_text(both: tuple[Context, Context]) -> None:
    ctx, clean = both
    tokens = [5 + i * 37 % 900 for i in range(60)]

    def run(ctx: Context, use: Use) -> Any:
        settings, _ = with_use("logits_processor", use)
        first = Request("The wolf", max_tokens=8, sampling=SamplingParams(seed=1, **settings))
        later = Request(
            tokens, max_tokens=2, sampling=SamplingParams(temperature=0), prompt_logprobs=2
        )
        engine, results = Engine(ctx, None, seed=1), []
        engine.add_request(first)
        for _ in range(3):
            engine.step()
        engine.add_request(later)
        while engine.has_unfinished():
            results += [event.result for event in engine.step() if event.result]
        return [(r.tokens, r.prompt_logprobs) for r in results]

    expected = run(clean, lambda: None)
    for use in uses(ctx).values():
        assert run(ctx, once_at_a_time(use)) == expected


def test_a_row_whose_buffer_was_overwritten_cannot_be_read(ctx: Context) -> None:
    """A row that nobody has counted is empty after the next decode; it is not another text's."""
    batches = Batch(), Batch()
    for seq_id, batch in enumerate(batches):
        batch.add(seq_id, [5])
    ((first,),), _ = map(ctx.decoder.decode, batches)
    assert not first.is_valid


# -- what such a function cannot do --------------------------------------------------------------------


CHANGES: list[Callable[[Branch], object]] = [
    lambda branch: branch.prune(), lambda branch: branch.rewind(2),
    lambda branch: branch.extend([5]), lambda branch: branch.append(" and"),
]  # fmt: skip
READS: list[Callable[[Branch], object]] = [
    lambda branch: branch.score(" and"), lambda branch: branch.fork(),
]  # fmt: skip


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("change", [*CHANGES, lambda branch: branch.steer({5: 1.0})])
def test_a_function_cannot_change_the_branch_that_calls_it(
    change: Callable[[Branch], object], drafts: bool, ctx: Context
) -> None:
    def use() -> None:
        if branch.position == 7:
            change(branch)

    settings, _ = with_use("logits_processor", once_at_a_time(use))
    branch = Branch.start(ctx, PROMPTS[0], sampling=SamplingParams(seed=2, **settings))
    drafter = FunctionDrafter(lambda tokens, n: [12] * n) if drafts else None
    with pytest.raises(BranchStateError, match="has changed the branch") as caught:
        branch.generate(12, drafter=drafter).finish()
    assert caught.value.hint
    ctx.audit()
    if branch.state != "pruned":
        branch.resample(SamplingParams(temperature=0))
        tokens = list(branch.tokens)
        with Branch.start(ctx, tokens, sampling=SamplingParams(temperature=0)) as again:
            assert again.generate(4).finish().tokens == branch.generate(4).finish().tokens


@pytest.mark.parametrize("use", [*CHANGES, *READS])
def test_on_prompt_progress_cannot_use_the_branch_that_reads(
    use: Callable[[Branch], object], target: lb.Model
) -> None:
    tokens = [5 + i * 37 % 900 for i in range(100)]
    with opened(target, n_ctx=256, n_seq_max=2, n_batch=32) as ctx:
        branch = Branch.start(ctx, PROMPTS[0], sampling=SamplingParams(temperature=0))
        with pytest.raises(BranchStateError, match="the branch reads text") as caught:
            branch.append(tokens, on_prompt_progress=lambda progress: use(branch))
        assert caught.value.hint
        ctx.audit()
        with Branch.start(ctx, PROMPTS[0], sampling=SamplingParams(temperature=0)) as again:
            assert again.generate(4).finish().tokens == branch.generate(4).finish().tokens


@pytest.mark.parametrize("call", [lambda engine: engine.step(), lambda engine: engine.close()])
def test_a_step_of_an_engine_cannot_be_entered_again(
    call: Callable[[Engine], object], ctx: Context
) -> None:
    """The text whose function tried it ends with the error; the others finish, and nothing is held."""
    engine, caught = Engine(ctx), list[str]()

    def use() -> None:
        try:
            call(engine)
        except UsageError as error:
            assert error.hint
            caught.append(error.message)
            raise

    _, options = with_use("constraint", use)
    engine.add_request(Request(PROMPTS[0], max_tokens=8, **options))
    engine.add_request(Request(PROMPTS[1], max_tokens=8))
    results = results_of(run(engine))
    assert "cannot step or close this engine" in caught[0]
    assert [results[name].finish_reason for name in "01"] == ["error", "length"]
    engine.close()
    assert ctx.n_seq_free == ctx.n_seq_max


def test_a_function_may_close_the_context(target: lb.Model) -> None:
    with opened(target, n_ctx=256, n_seq_max=4) as ctx:
        engine = Engine(ctx)
        engine.add_request(Request(PROMPTS[0], constraint=Wish(ctx.close)))
        engine.add_request(Request(PROMPTS[1]))
        with pytest.raises(lb.LlamaBranchError, match="the context is closed"):
            for _ in range(9):
                engine.step()
        assert engine.close() == []


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba"])
def test_an_engine_whose_context_is_closed_generates_no_more(kind: str, tmp_path: Path) -> None:
    """Its prompt is in the prefix cache, which is asked first."""
    path = toys.write_toy(tmp_path / "toy.gguf", kind, vocab="bytes", window=16)
    with lb.Model(path) as model, opened(model, exact=False, prefix_cache=True) as ctx:
        engine = Engine(ctx, None, max_tokens=4)
        engine.generate([Request([5] * 40)])
        engine.add_request(Request([5] * 40))
        ctx.close()
        for _ in range(3):
            with suppress(lb.LlamaBranchError):
                assert all(event.result is None or event.result.error for event in engine.step())
        assert engine.close() == []


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "qwen35"])
def test_a_context_that_another_thread_closes_meanwhile(kind: str, tmp_path: Path) -> None:
    """A call that has found it open changes nothing, or raises ClosedError."""
    path, tokens = toys.write_toy(tmp_path / "toy.gguf", kind, vocab="bytes"), [5] * 40
    with lb.Model(path) as model, opened(model, exact=False, prefix_cache=True) as ctx:
        Engine(ctx, None, max_tokens=4).generate([Request(tokens)])
        branch, other = Branch.start(ctx, tokens), Branch.create(ctx)
        handle = ctx.decoder.handle
        ctx.close()
        with suppress(ClosedError):
            assert other.sequence.take_cached(tokens) == len(tokens)
        for change in (handle.clear, lambda: handle.copy(0, 1, 0, -1), branch.prune, other.prune):
            change()
        assert handle.remove(0, 0, -1) and handle.position_range(0) == (-1, -1)


def test_a_forgotten_engine_is_freed_though_a_function_of_its_request_refers_to_it(
    ctx: Context,
) -> None:
    def leave() -> None:
        engine = Engine(ctx, None, seed=1)
        use = Wish(lambda: engine.abort("another"))
        engine.add_request(Request(PROMPTS[0], max_tokens=20, constraint=use))
        engine.step()
        engine.step()
        assert ctx.n_seq_free < ctx.n_seq_max

    leave()
    gc.collect()
    assert ctx.n_seq_free == ctx.n_seq_max


def test_the_prefix_cache_is_asked_while_no_other_thread_changes_it(ctx: Context) -> None:
    ctx.complete([5] * 40, max_tokens=1, drafter=None)
    prefixes, found = ctx.prefix_cache, list[int]()
    assert prefixes is not None
    thread = threading.Thread(target=lambda: found.append(prefixes.n_common([5] * 40)))
    with ctx.lock:
        thread.start()
        thread.join(0.1)
        assert not found
        prefixes.clear()
    thread.join()
    assert found == [0]


# -- what such a function may do -------------------------------------------------------------------------


class Fault(Exception):
    """What a function raises."""


KINDS = ["logits_processor", "constraint", "on_prompt_progress", "on_round", "drafter"]


def with_one_that_uses(
    ctx: Context, kind: str, use: Use, prepare: Callable[[Engine], object] = lambda engine: None
) -> tuple[dict[str, lb.Result], list[Fault]]:
    """Let four texts share an engine; the functions of the first call ``use``.

    Return the results, and what steps raised.
    """

    def propose(tokens: Any, n: int) -> list[int]:
        if kind == "drafter":
            use()
        return [12] * n

    engine = Engine(ctx, FunctionDrafter(propose), lb.SpeculativeConfig(draft_k=3), seed=3)
    prepare(engine)
    for i, prompt in enumerate(PROMPTS):
        settings, options = ({}, {}) if i or kind == "drafter" else with_use(kind, use)
        sampling = SamplingParams(temperature=0.8, seed=i, **settings)
        engine.add_request(Request(prompt, id=str(i), max_tokens=12, sampling=sampling, **options))
    events, raised = list[lb.Event](), list[Fault]()
    while engine.has_unfinished():
        try:
            events += engine.step()
        except Fault as fault:
            raised.append(fault)
    assert engine.close() == []
    return results_of(events), raised


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_may_add_requests_to_the_engine_that_calls_it(
    kind: str, both: tuple[Context, Context]
) -> None:
    ctx, clean = both
    engines, added = list[Engine](), list[str]()

    def use() -> None:
        if len(added) < 9:
            sampling = SamplingParams(temperature=0.8, seed=len(added))
            request = Request(
                GUESTS[len(added) % 5], id=f"guest {len(added)}", max_tokens=6, sampling=sampling
            )
            added.append(engines[0].add_request(request))

    results, _ = with_one_that_uses(ctx, kind, use, engines.append)
    expected, _ = with_one_that_uses(clean, kind, lambda: None)
    assert {name: results[name].tokens for name in expected} == {
        name: result.tokens for name, result in expected.items()
    }
    assert added and results.keys() == {*expected, *added}
    for i, name in enumerate(added):
        sampling = SamplingParams(temperature=0.8, seed=i)
        assert (
            results[name].tokens
            == clean.complete(GUESTS[i % 5], max_tokens=6, sampling=sampling, drafter=None).tokens
        )


@pytest.mark.parametrize("kind", ["on_prompt_progress", "on_round", "drafter"])
def test_a_function_may_wait_for_another_thread_that_uses_branches(
    kind: str, both: tuple[Context, Context]
) -> None:
    ctx, clean = both
    grow, ended = once_at_a_time(uses(ctx)["grow"]), list[bool]()

    def use() -> None:
        thread = threading.Thread(target=grow, daemon=True)
        thread.start()
        thread.join(0 if False in ended else 60)
        ended.append(not thread.is_alive())

    results, _ = with_one_that_uses(ctx, kind, use)
    assert ended and all(ended)
    expected, _ = with_one_that_uses(clean, kind, lambda: None)
    assert [each.tokens for each in results.values()] == [each.tokens for each in expected.values()]


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_function_raises_costs_no_other_text(
    kind: str, at: int, both: tuple[Context, Context]
) -> None:
    """The step raises it, and the text goes on; or it is the error of the text."""
    ctx, clean = both
    n_calls = 0

    def use() -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == at:
            raise Fault

    results, raised = with_one_that_uses(ctx, kind, use)
    expected, _ = with_one_that_uses(clean, kind, lambda: None)
    for name, result in results.items():
        if result.finish_reason != "error":
            assert result.tokens == expected[name].tokens
        else:
            assert name == "0" and result.error is not None
            assert "raised Fault()" in result.error.message
    n_failed = sum(result.finish_reason == "error" for result in results.values())
    assert len(raised) + n_failed == (at <= n_calls)
    assert ctx.n_seq_free == ctx.n_seq_max


# -- many, and more than fits ---------------------------------------------------------------------------


def test_ten_thousand_requests_wait(target: lb.Model) -> None:
    """A waiting request is small, and an urgent one passes all of them."""
    n, n_traced = 10_000, 1000
    with opened(target, n_seq_max=4) as ctx, Engine(ctx, None, seed=1, max_tokens=2) as engine:
        requests = [Request(GUESTS[i % 5], id=str(i)) for i in range(n)]
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            names = [engine.add_request(request) for request in requests[:n_traced]]
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (after - before) / n_traced < 3000  # bytes
        names += [engine.add_request(request) for request in requests[n_traced:]]
        events = engine.step()
        urgent = engine.add_request(Request("The end", priority=-1))
        while urgent not in results_of(events):
            events += engine.step()
        for name in names[5:]:
            engine.abort(name)
        while engine.has_unfinished():
            events += engine.step()
    results = results_of(events)
    assert results.keys() == {*names, urgent}
    assert [*results].index(urgent) < 20
    reasons = Counter(result.finish_reason for result in results.values())
    assert reasons["cancelled"] > n - 50 and reasons.keys() <= {"cancelled", "length", "stop"}


def test_a_prompt_that_never_fits_keeps_nobody_waiting(target: lb.Model) -> None:
    tokens: Any = [5] * 257
    with opened(target, n_ctx=256, n_seq_max=4) as ctx, opened(target) as clean:
        engine = Engine(ctx, None, wait_s=math.inf)
        sampling = SamplingParams(temperature=0.8, seed=1)
        for i, prompt in enumerate([tokens, *PROMPTS, tokens]):
            engine.add_request(
                Request(prompt, id=str(i), max_tokens=6, sampling=sampling, priority=i)
            )
        results = results_of(run(engine))
        for name in ("0", "5"):
            assert isinstance(results[name].error, CacheFullError)
            assert (results[name].finish_reason, results[name].tokens) == ("capacity", [])
        for name, prompt in zip("1234", PROMPTS, strict=True):
            alone = clean.complete(prompt, max_tokens=6, sampling=sampling, drafter=None)
            assert results[name].tokens == alone.tokens
        with pytest.raises(CacheFullError):
            ctx.complete([PROMPTS[0], tokens])
        with pytest.raises(CacheFullError):
            ctx.complete([PROMPTS[0], tokens], stream=True)
        with pytest.raises(CacheFullError):
            Branch.start(ctx, tokens)


@pytest.mark.parametrize("n_seq_max", [2, 6])
def test_engines_of_two_threads_share_a_cache_that_is_too_small(
    n_seq_max: int, target: lb.Model
) -> None:
    def requests(number: int) -> list[Request]:
        return [
            Request(
                [5 + number + i] * 90,
                id=f"{number} {i}",
                max_tokens=40,
                sampling=SamplingParams(seed=i),
            )
            for i in range(4)
        ]

    with opened(target, n_ctx=256, n_seq_max=n_seq_max) as ctx, ThreadPoolExecutor(2) as pool:
        engines = [Engine(ctx, None, wait_s=math.inf) for _ in range(2)]
        jobs = [pool.submit(engine.generate, requests(i)) for i, engine in enumerate(engines)]
        results = [result for job in jobs for result in job.result()]
    with opened(target, n_ctx=256) as clean:
        for request, result in zip(requests(0) + requests(1), results, strict=True):
            alone = clean.complete(
                request.prompt, max_tokens=40, sampling=request.sampling, drafter=None
            )
            assert (result.tokens, result.finish_reason) == (alone.tokens, alone.finish_reason)


# -- exactness ------------------------------------------------------------------------------------------


def test_a_result_is_not_exact_if_order_was_lost_while_the_text_was_generated(
    target: lb.Model,
) -> None:
    """A compaction has restored the order before the text ends."""
    with opened(target, n_ctx=512, n_seq_max=8, prefix_cache=False) as ctx:
        tokens = [5 + i * 37 % 900 for i in range(200)]
        guest = Branch.start(ctx, tokens)
        ctx.decode(tokens[:20], 0, seq_id=0)
        stream = ctx.complete(
            PROMPTS[0], max_tokens=330, temperature=0.8, seed=3, drafter=None, stream=True,
            min_tokens=330,
        )  # fmt: skip
        results = []
        for i, event in enumerate(stream):
            if i == 40:
                guest.prune()
            results += [event.result] if event.result else []
            if (
                not ctx.usage().in_order
            ):  # the cache became full, and the raw sequence blocks compaction
                ctx.kv_cache_remove(0)
                with ctx.lock:
                    assert ctx.kv_cache.compact()
        assert ctx.usage().in_order and ctx.kv_cache.disorders
        assert len(results[0].tokens) == 330 and not results[0].exact
        assert ctx.complete(PROMPTS[1], max_tokens=4, seed=3).exact
