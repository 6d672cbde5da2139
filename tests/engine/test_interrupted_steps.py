"""A step that is interrupted anywhere loses nothing: the next ones go on, to the same results.

Each place is a line of the package that a step passes. Ctrl-C is a real signal, sent at that place; an
exception is raised there, as a trace function or another thread can (only in the engine's own files).
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import state_machine

import llamabranch as lb
from llamabranch import Context, Engine, Event, Request, SamplingParams, SpeculativeConfig

PACKAGE = Path(lb.__file__).parent
WARM = SamplingParams(temperature=0.8)
NO_END = WARM.replace(logit_bias={1: -math.inf})  # it never draws the EOG token
TALE = "Once upon a time there was a king"
Place = tuple[str, int]  # file, line
Seen = dict[tuple[str, int], tuple[list[int], str, str, int]]
MOST_STEPS = 400

REQUESTS = [
    Request(TALE, id="a", max_tokens=9, n=2, sampling=WARM, top_logprobs=1),
    Request(TALE[::-1] * 2, id="b", max_tokens=12, sampling=WARM, stop=["\x00\x00", "e"]),
    Request("xyz" * 200, id="long"),  # longer than the cache
    Request("The wolf", id="rated", max_tokens=2, sampling=WARM, prompt_logprobs=1),
    Request("the " * 20, id="c", max_tokens=14, sampling=WARM, priority=-1),
    Request("A king " * 10, id="d", max_tokens=90, sampling=NO_END),
    Request("none", id="e", max_tokens=0),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lb.Model]:
    """A random model whose step takes a fraction of a millisecond."""
    path = state_machine.tiny(tmp_path_factory.mktemp("toy") / "tiny.gguf")
    with lb.Model(path) as opened:
        yield opened


@pytest.fixture(params=["unified", "own cells"])
def small_ctx(model: lb.Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    """A context in which not all texts have room, so that some are preempted."""
    unified = request.param == "unified"
    with Context(
        model,
        n_ctx=256 if unified else 4 * 256,
        n_seq_max=4,
        n_batch=32,
        n_threads=1,
        batch_invariant=True,
        kv_unified=unified,
        prefix_cache=unified,
    ) as context:
        yield context
        context.audit()


class Interrupter:
    """Does ``act`` once, when a step reaches line ``target``; notes which lines it passes."""

    def __init__(self, files: Path, act: Callable[[], None], target: Place | None = None) -> None:
        self.files = str(files)
        self.act = act
        self.target = target
        self.passed: dict[Place, None] = {}
        self.done = False

    def __call__(self, frame: FrameType, event: str, _arg: object) -> Interrupter | None:
        if self.done or not frame.f_code.co_filename.startswith(self.files):
            return None
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            self.passed[place] = None
            if place == self.target and not self.done:
                self.done = True
                self.act()
        return self


def outcome(ctx: Context, interrupter: Interrupter, error: type[BaseException]) -> Seen:
    """Run the requests with every step interrupted that reaches the place; return what came of them."""
    engine = Engine(ctx, lb.PromptLookupDrafter(), SpeculativeConfig(draft_k=3), seed=5)
    for request in REQUESTS:
        engine.add_request(request)
    events: list[Event] = []
    for n_steps in range(MOST_STEPS):
        if not engine.has_unfinished():
            break
        if n_steps == 12:
            engine.abort("d")
        sys.settrace(None if interrupter.done else interrupter)
        try:
            found = engine.step()
        except error:
            continue
        finally:
            sys.settrace(None)
        events += found
    else:
        pytest.fail("the engine does not come to an end")
    seen: Seen = {}
    for event in events:
        if event.result is not None:
            result = event.result
            assert (result.id, result.sample) not in seen, "a text ended twice"
            its = [e.emitted for e in events if (e.id, e.sample) == (result.id, result.sample)]
            shown = [one for one in its if one is not None]
            assert [one.token for one in shown if not one.is_stop] == result.tokens
            assert "".join(one.text for one in shown) == result.text
            n_rated = len(result.prompt_logprobs or ()) + len(result.logprobs or ())
            tokens = [] if result.id == "d" else result.tokens  # aborted after some steps
            text = "" if result.id == "d" else result.text
            seen[result.id, result.sample] = tokens, text, result.finish_reason, n_rated
    engine.close()
    prefixes = ctx.prefix_cache
    if prefixes is not None:
        prefixes.clear()
    assert ctx.usage().cells_used == 0
    assert ctx.n_seq_free == ctx.n_seq_max
    return seen


def places(ctx: Context, files: Path) -> tuple[list[Place], Seen]:
    """Return all lines under ``files`` that the steps pass, and the results."""
    recorder = Interrupter(files, lambda: None)
    expected = outcome(ctx, recorder, KeyboardInterrupt)
    assert len(expected) == len(REQUESTS) + 1
    return list(recorder.passed), expected


def failures(
    ctx: Context, files: Path, act: Callable[[], None], every: int, error: type[BaseException]
) -> list[str]:
    """Return every place at which ``act`` changes a result, with what goes wrong."""
    found = []
    passed, expected = places(ctx, files)
    assert len(passed) > 300
    for file, line in passed[::every]:
        where = f"{Path(file).relative_to(PACKAGE)}:{line}"
        interrupter = Interrupter(files, act, (file, line))
        try:
            seen = outcome(ctx, interrupter, error)
            if seen != expected:
                found.append(f"{where}: {[k for k in expected if seen.get(k) != expected[k]]}")
        except (Exception, pytest.fail.Exception) as failure:
            found.append(f"{where}: {type(failure).__name__}: {failure}"[:300])
    return found


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


class Injected(BaseException):
    pass


def injected() -> None:
    raise Injected


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 23])
def test_ctrl_c_anywhere_in_a_step_loses_nothing(small_ctx: Context, every: int) -> None:
    assert not failures(small_ctx, PACKAGE, ctrl_c, every, KeyboardInterrupt)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_exception_anywhere_in_the_engine_loses_nothing(small_ctx: Context, every: int) -> None:
    assert not failures(small_ctx, PACKAGE / "engine", injected, every, Injected)
