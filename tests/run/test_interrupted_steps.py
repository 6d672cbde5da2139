"""A step that is interrupted anywhere loses nothing: the next steps continue to the same results.

Each place is a line of the package that a step passes. Ctrl-C is a real signal, sent at that place. The
exception of its handler comes at the end of the step. Other exceptions are raised at once, in any line of
the engine and in any call of a drafter.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from engine_runs import heard, write_tiny
from tracing import Place, Tracer

import llamabranch as lb
from llamabranch import Context, Engine, Event, Request, SamplingParams, SpeculativeConfig
from llamabranch.generation.drafter import DraftState
from llamabranch.model.text import StopStrings

PACKAGE = Path(lb.__file__).parent
WARM = SamplingParams(temperature=0.8)
NO_END = WARM.replace(logit_bias={1: -math.inf})  # it never draws the EOG token
TALE = "Once upon a time there was a king"
Seen = dict[tuple[str, int], tuple[list[int], str, str, int]]
MOST_STEPS = 400

REQUESTS = [
    Request(TALE, id="a", max_tokens=30, n=2, sampling=NO_END, top_logprobs=1),
    Request(TALE[::-1] * 2, id="b", max_tokens=34, sampling=NO_END),
    Request("xyz" * 200, id="long"),  # longer than the cache
    Request("The wolf", id="rated", max_tokens=2, sampling=WARM, prompt_logprobs=1),
    Request("the " * 20, id="c", max_tokens=50, sampling=NO_END, priority=-1),
    Request("A king " * 10, id="d", max_tokens=90, sampling=NO_END),
    Request("stops", id="e", sampling=WARM, stop=["\x00\x00", "e"]),
    Request("none", id="f", max_tokens=0),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lb.Model]:
    """A random model whose step takes a fraction of a millisecond."""
    path = tmp_path_factory.mktemp("toy") / "tiny.gguf"
    with lb.Model(write_tiny(path)) as opened:
        yield opened


def open_context(model: lb.Model, cells: str) -> Context:
    """Open a context in which not all texts have room, so that some are preempted."""
    unified = cells == "unified"
    return Context(
        model, n_ctx=256 if unified else 4 * 256, n_seq_max=4, n_batch=32, n_threads=1, exact=True,
        kv_unified=unified, prefix_cache=unified,
    )  # fmt: skip


@pytest.fixture(params=["unified", "own cells"])
def small_ctx(model: lb.Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    with open_context(model, request.param) as context:
        yield context
        context.audit()


def outcome(
    ctx: Context,
    interrupter: Tracer | None,
    error: type[BaseException],
    drafter: lb.Drafter | None = None,
) -> Seen:
    """Run the requests, interrupted at the place of ``interrupter``; return their outcome."""
    drafter = drafter or lb.SuffixDrafter()
    engine = Engine(ctx, drafter, SpeculativeConfig(draft_k=3), seed=5)
    for request in REQUESTS:
        engine.add_request(request)
    events: list[Event] = []
    for n_steps in range(MOST_STEPS):
        if not engine.has_unfinished():
            break
        if n_steps == 6:
            engine.client.pause("a")  # it is parked in a step that may be interrupted
        if n_steps == 12:
            engine.client.resume("a")
            engine.abort("d")
        if interrupter is not None and not interrupter.done:
            sys.settrace(interrupter)
        try:
            new_events = engine.step()
        except error:
            continue
        finally:
            sys.settrace(None)
        events += new_events
    else:
        pytest.fail("the engine does not come to an end")
    seen: Seen = {}
    for name, said in heard(events).items():
        result = said.result
        assert result is not None
        n_rated = len(result.prompt_logprobs or ()) + len(result.logprobs or ())
        tokens = [] if result.id == "d" else result.tokens  # aborted after some steps
        text = "" if result.id == "d" else result.text
        seen[name] = tokens, text, result.finish_reason, n_rated
    undisturbed = interrupter is not None and not interrupter.done
    assert engine.stats.preemptions or not (undisturbed and ctx.capabilities.can_share)
    engine.close()
    prefixes = ctx.prefix_cache
    if prefixes is not None:
        prefixes.clear()
    assert ctx.usage().cells_used == 0
    assert ctx.n_seq_free == ctx.n_seq_max
    return seen


def places(ctx: Context, files: Path) -> tuple[list[Place], Seen]:
    """Return all lines under ``files`` that the steps pass, and the results."""
    recorder = Tracer(files, lambda: None, ("", 0))
    expected = outcome(ctx, recorder, KeyboardInterrupt)
    assert len(expected) == len(REQUESTS) + 1
    return list(recorder.passed), expected


def failures(
    ctx: Context, files: Path, act: Callable[[], None], every: int, error: type[BaseException]
) -> list[str]:
    """Return every place at which ``act`` changes a result, with the difference."""
    messages = []
    passed, expected = places(ctx, files)
    assert len(passed) > 300
    handler = signal.getsignal(signal.SIGINT)
    for file, line in passed[::every]:
        where = f"{Path(file).relative_to(PACKAGE)}:{line}"
        interrupter = Tracer(files, act, (file, line))
        try:
            seen = outcome(ctx, interrupter, error)
            if seen != expected:
                messages.append(f"{where}: {[k for k in expected if seen.get(k) != expected[k]]}")
        except (Exception, pytest.fail.Exception) as failure:
            messages.append(f"{where}: {type(failure).__name__}: {failure}"[:300])
        # Between the beginning of a ``with`` block and its first line nothing but this test can raise.
        signal.signal(signal.SIGINT, handler)
    return messages


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


class Injected(BaseException):
    """An exception that is no error of the package and is never caught by mistake."""


def injected() -> None:
    raise Injected


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 97])
def test_ctrl_c_anywhere_in_a_step_loses_nothing(small_ctx: Context, every: int) -> None:
    assert not failures(small_ctx, PACKAGE, ctrl_c, every, KeyboardInterrupt)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 29])
def test_exception_anywhere_in_the_engine_loses_nothing(small_ctx: Context, every: int) -> None:
    assert not failures(small_ctx, PACKAGE / "run", injected, every, Injected)


def test_exception_at_its_last_token_does_not_let_a_text_run_on(
    model: lb.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = StopStrings.show
    raised: list[bool] = []

    def interrupted(self: StopStrings, text: str, *, last: bool = False) -> str:
        if last and not raised:
            raised.append(True)
            raise Injected
        return show(self, text, last=last)

    with open_context(model, "unified") as ctx:
        engine = Engine(ctx, seed=1, sampling=NO_END)
        expected = engine.generate(Request(TALE, max_tokens=8))[0]
        monkeypatch.setattr(StopStrings, "show", interrupted)
        engine.add_request(Request(TALE, max_tokens=8))
        with pytest.raises(Injected):
            while engine.has_unfinished():
                engine.step()
        events = engine.close(drain=True)
        assert events[-1].result is not None
        assert events[-1].result.tokens == expected.tokens
        assert events[-1].result.finish_reason == "length"


class Failing(lb.SuffixDrafter):
    """A drafter that raises ``error`` in call number ``at``, counting the calls of its states too."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.at = at
        self.error = error
        self.n_calls = 0

    def count(self) -> None:
        self.n_calls += 1
        if self.n_calls == self.at:
            raise self.error

    def start(self, target: lb.speculative.Text, rule: str) -> Any:
        self.count()
        return self.watched(super().start(target, rule))

    def watched(self, state: DraftState) -> Any:
        """Return a state whose calls are counted before their work, and ``propose`` after it."""

        def counted(name: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                if name != "propose":
                    self.count()
                answer = getattr(state, name)(*args)
                if name == "propose":
                    self.count()
                return self.watched(answer) if name == "fork" else answer

            return call

        names = ("propose", "fork", "observe", "close")
        return SimpleNamespace(**{name: counted(name) for name in names})


@pytest.mark.parametrize("error", [Injected(), KeyboardInterrupt(), ValueError("no")], ids=repr)
def test_drafter_that_raises_anything_at_any_call_costs_no_result(
    model: lb.Model, error: BaseException
) -> None:
    with open_context(model, "unified") as ctx:
        unharmed = Failing(0, error)
        expected = outcome(ctx, None, KeyboardInterrupt, unharmed)
        assert unharmed.n_calls > 60
        for at in range(1, unharmed.n_calls, 7):
            assert outcome(ctx, None, type(error), Failing(at, error)) == expected, at
        ctx.audit()


def test_handler_of_ctrl_c_is_the_users_again_after_a_step(model: lb.Model) -> None:
    """The handler runs at once, even in a step, and may be replaced there; its exception comes later."""
    seen: list[object] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append(signal.getsignal(signal.SIGINT))
        raise TimeoutError

    def function(tokens: list[int], k: int) -> list[int]:
        if not seen:
            signal.raise_signal(signal.SIGINT)
            assert len(seen) == 1
        return []

    before = signal.signal(signal.SIGINT, handler)
    try:
        with open_context(model, "unified") as ctx:
            drafter = lb.FunctionDrafter(function)
            engine = Engine(ctx, drafter, SpeculativeConfig(draft_k=2), seed=1, sampling=NO_END)
            engine.add_request("a king")
            with pytest.raises(TimeoutError):
                while engine.has_unfinished():
                    engine.step()
            assert signal.getsignal(signal.SIGINT) is handler
            assert [e.result for e in engine.close(drain=True)][-1] is not None
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupted_close_keeps_the_events_for_the_next_one(model: lb.Model) -> None:
    def function(tokens: list[int], k: int) -> list[int]:
        if len(tokens) == len(TALE) + 4:  # with the BOS token: in the third step
            signal.raise_signal(signal.SIGINT)
        return []

    with open_context(model, "unified") as ctx:
        drafter = lb.FunctionDrafter(function)
        engine = Engine(ctx, drafter, SpeculativeConfig(draft_k=2), max_tokens=6, sampling=NO_END)
        engine.add_request(TALE)
        with pytest.raises(KeyboardInterrupt):
            engine.close(drain=True)
        events = engine.close(drain=True)
        assert [e.emitted is not None for e in events] == [True] * 6 + [False]
