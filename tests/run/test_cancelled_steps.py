"""A cancel, or a close, at any line that a step passes, as the handler of a signal may make it.

A cancelled request keeps the text that it has, and the others are what they are. After a close of the
context there is nothing but errors of the package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from engine_runs import heard, write_tiny
from tracing import Place, Tracer

import llamabranch as lb
from llamabranch import Context, Engine, Event, Request, SamplingParams
from llamabranch.errors import LlamaBranchError

RUN = Path(lb.__file__).parent / "run"
WARM = SamplingParams(temperature=0.8)
REQUESTS = [
    Request([5 + i for i in range(40)], id="a", max_tokens=20, n=2, sampling=WARM),
    Request([9 + i for i in range(70)], id="b", max_tokens=30, sampling=WARM),
    Request([5] * 300, id="never fits"),
    Request([7] * 20, id="c", max_tokens=12, sampling=WARM, prompt_logprobs=1),
    Request([5 + i for i in range(90)], id="d", max_tokens=40, sampling=WARM, priority=-1),
]
Texts = dict[tuple[str, int], list[int]]
MOST_STEPS = 1000
EVERY = [pytest.param(1, marks=pytest.mark.slow), 23]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lb.Model]:
    """A random model whose step takes a fraction of a millisecond."""
    with lb.Model(write_tiny(tmp_path_factory.mktemp("toy") / "tiny.gguf")) as opened:
        yield opened


def opened(model: lb.Model) -> Context:
    """Open a context in which not all texts have room."""
    return Context(model, n_ctx=256, n_seq_max=4, n_batch=32, n_threads=1, exact=True)


def texts(engine: Engine, tracer: Tracer) -> Texts:
    """Step until all requests have ended; return their tokens."""
    for request in REQUESTS:
        engine.add_request(request)
    events: list[Event] = []
    for _ in range(MOST_STEPS):
        if not engine.has_unfinished():
            break
        sys.settrace(tracer)
        try:
            events += engine.step()
        finally:
            sys.settrace(None)
    else:
        pytest.fail("the engine does not come to an end")
    found = {name: said.result for name, said in heard(events).items()}
    return {name: result.tokens for name, result in found.items() if result is not None}


def new_engine(ctx: Context) -> Engine:
    return Engine(ctx, lb.SuffixDrafter(), lb.SpeculativeConfig(draft_k=3), seed=5, wait_s=0)


def places(model: lb.Model) -> tuple[list[Place], Texts]:
    """Return the lines that the steps pass, and the texts."""
    recorder = Tracer(RUN, lambda: None, ("", 0))
    with opened(model) as ctx:
        found = texts(new_engine(ctx), recorder)
    assert len(recorder.passed) > 200 and len(found) == 6
    return list(recorder.passed), found


@pytest.mark.parametrize("every", EVERY)
def test_a_cancel_at_any_line_ends_one_request(every: int, model: lb.Model) -> None:
    passed, expected = places(model)
    for place in passed[::every]:
        with opened(model) as ctx:
            engine = new_engine(ctx)
            found = texts(engine, Tracer(RUN, partial(engine.abort, "b"), place))
            cancelled = found.pop(("b", 0))
            assert cancelled == expected["b", 0][: len(cancelled)], place
            assert found == {name: expected[name] for name in found}, place
            assert engine.close() == [] and ctx.n_seq_free == 4
            ctx.audit()


@pytest.mark.parametrize("every", EVERY)
def test_a_close_of_the_context_at_any_line_is_an_error_at_most(
    every: int, model: lb.Model
) -> None:
    passed, expected = places(model)
    for place in passed[::every]:
        with opened(model) as ctx:
            engine, tracer = new_engine(ctx), Tracer(RUN, ctx.close, place)
            try:
                found = texts(engine, tracer)
            except LlamaBranchError:
                found = {}
            assert tracer.done, place
            for name, tokens in found.items():
                assert tokens == expected[name][: len(tokens)], place
            assert engine.close() == []
