"""Ctrl-C, ``interrupt`` and time limits: a decode stops at once, and nothing else has changed.

Signals are sent at a known point of a decode. Logits are compared with those from before, or with a
clean replay.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from decodes import Decodes, hooked
from llama_cpp import llama_cpp as C
from programs import run_code, run_python
from self_signal import signalled
from tracing import Place, Tracer

import llamabranch as lb
from llamabranch import Branch, Context, DecodeInterruptedError, SamplingParams

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="signals are sent as POSIX has them"),
    # The text that long prompts produce does not matter here.
    pytest.mark.filterwarnings("ignore::llamabranch.errors.ContextLengthWarning"),
]

PACKAGE = Path(lb.__file__).parent
N_LONG = 2600  # tokens: long enough for the bundled target that a decode is watched for signals


@pytest.fixture(autouse=True)
def default_ctrl_c() -> Iterator[None]:
    """Handle Ctrl-C, here and in the programs that are started: background jobs ignore it by default."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Decodes:
    return Decodes(monkeypatch)


@pytest.fixture(scope="module")
def long_ctx(target: lb.Model) -> Iterator[Context]:
    """A context that decodes thousands of tokens in one micro-batch."""
    with Context(target, n_ctx=3072, n_seq_max=4, n_batch=3072, n_threads=1, exact=True) as context:
        yield context


def long_prompt(n: int = N_LONG) -> list[int]:
    return [(7 * i + 3) % 4096 for i in range(n)]


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def check_goes_on(branch: Branch, ctx: Context, n: int = 12) -> None:
    """Fail unless the branch continues bit for bit like a new one prefilled with its tokens."""
    ctx.audit()
    tokens = branch.tokens
    again = Branch.create(ctx, branch.sampling.replace(seed=branch.seed))
    with again, branch.fork() as fork:
        again.prefill(tokens)
        assert np.array_equal(fork.logits, again.logits)
        assert [fork.step().token for _ in range(n)] == [again.step().token for _ in range(n)]
    ctx.audit()


# -- what stops a decode ---------------------------------------------------------------------------


class Alarm(Exception):
    """An exception that a signal handler raises."""


def twice(ctx: Context) -> None:
    ctrl_c()
    while not ctx.decoder.handle._stop[0]:
        pass  # until the first one has been handled
    ctrl_c()
    ctrl_c()


def time_limit() -> None:
    """Let the newest time limit pass now."""
    alarms = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    alarms[-1].function()


STOPS: dict[str, tuple[type[BaseException], Callable[[Context], object]]] = {
    "ctrl-c": (KeyboardInterrupt, lambda _: ctrl_c()),
    # The context must not be used while llama.cpp still decodes, also after a second one.
    "ctrl-c, twice": (KeyboardInterrupt, twice),
    "a handler of one's own": (Alarm, lambda _: os.kill(os.getpid(), signal.SIGUSR1)),
    "interrupt": (DecodeInterruptedError, lambda ctx: ctx.interrupt()),
    "interrupt of another thread": (
        DecodeInterruptedError,
        lambda ctx: threading.Thread(target=ctx.interrupt).start(),
    ),
    "time limit": (DecodeInterruptedError, lambda _: time_limit()),
}


@pytest.mark.parametrize("how", STOPS)
def test_a_long_prefill_ends_inside_its_micro_batch(
    how: str, long_ctx: Context, decodes: Decodes
) -> None:
    """The user gets the exception that a handler raises. A handler that raises nothing stops nothing."""
    kind, act = STOPS[how]
    raises = [False]

    def handler(_number: int, _frame: FrameType | None) -> None:
        if raises[0]:
            raise Alarm

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        if kind is Alarm:
            decodes.on_call(0, lambda: act(long_ctx))
            with Branch.create(long_ctx) as branch:
                branch.prefill(long_prompt(1800))
            assert (decodes.sizes[-1], decodes.codes[-1]) == (1800, 0)
            raises[0] = True
        with Branch.start(long_ctx, "Once upon a time", temperature=0.9, seed=3) as branch:
            before = branch.tokens, branch.logits
            decodes.on_call(0, lambda: act(long_ctx))
            with pytest.raises(kind) as caught, long_ctx.time_limit(3600):
                branch.prefill(long_prompt())
            if isinstance(caught.value, DecodeInterruptedError):
                assert (caught.value.code, caught.value.memory_changed) == (2, True)
            assert (decodes.sizes[-1], decodes.codes[-1]) == (N_LONG, 2), "it was broken off"
            assert branch.tokens == before[0]
            assert np.array_equal(branch.logits, before[1])
            check_goes_on(branch, long_ctx)
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_ctrl_c_when_no_thread_can_be_had_comes_after_the_decode(
    long_ctx: Context, decodes: Decodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    with Branch.start(long_ctx, "Once upon a time", seed=3) as branch:
        decodes.on_call(0, ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            branch.prefill(long_prompt(1800))
        check_goes_on(branch, long_ctx)


SCENES = ("plain", "forks", "history", "speculative")


@pytest.mark.parametrize("scene", SCENES)
def test_ctrl_c_at_any_line_leaves_a_branch_that_goes_on(
    scene: str,
    ctx: Context,
    draft_ctx: Context,
    other_ctx: Context,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of an engine: `run/test_interrupted_steps.py`. Python loses what a finalizer raises."""
    lost: set[object] = set()
    monkeypatch.setattr(sys, "unraisablehook", lambda report: lost.add(report.exc_type))
    drafter, config = lb.ModelDrafter(draft_ctx), lb.SpeculativeConfig(draft_k=3)
    settings = SamplingParams(temperature=0.8, repeat_penalty=1.3 if scene == "history" else 1.0)

    def act(branch: Branch) -> None:
        if scene == "speculative":
            lb.Speculator(ctx, drafter, config).generate(branch, max_tokens=12).finish()
            return
        for _ in range(4):
            branch.step()
            if scene == "forks":
                branch.fork().prune()
        branch.rewind(branch.position - 3)
        branch.step()

    def run(number: int, target: Place | None) -> dict[Place, None]:
        branch = Branch.start(ctx, "Once upon a time", sampling=settings.replace(seed=number))
        tracer = Tracer(PACKAGE, ctrl_c, target)
        sys.settrace(tracer)
        with suppress(KeyboardInterrupt):
            act(branch)
        sys.settrace(None)
        ctx.audit()
        draft_ctx.audit()
        tokens, logits = branch.tokens, branch.logits
        other_ctx.decode(tokens, 0)
        assert np.array_equal(other_ctx.logits(), logits)
        with Branch.create(other_ctx, branch.sampling) as replay:
            replay.prefill(tokens[: branch.n_prompt])
            for token in tokens[branch.n_prompt :]:
                replay.commit(token)
            for _ in range(3):
                assert branch.step() == replay.step()
            assert branch.text == replay.text
            if scene != "speculative":
                assert math.isclose(branch.log_likelihood(), replay.log_likelihood(), rel_tol=1e-6)
        other_ctx.kv_cache_clear()
        branch.prune_subtree()
        del branch
        assert ctx.n_seq_free == 8, "a sequence leaked"
        return tracer.passed

    places = run(0, None)
    assert len(places) > 150
    for number, place in enumerate(list(places)[::4]):
        run(number, place)
    assert lost <= {KeyboardInterrupt}


# -- interrupt() and time limits -------------------------------------------------------------------


def test_interrupt_without_a_decode_stops_the_next_one_and_only_that(ctx: Context) -> None:
    branch = Branch.start(ctx, "Once upon a time", temperature=0.9, seed=3)
    before = branch.produce()
    ctx.interrupt()
    ctx.interrupt()
    with pytest.raises(DecodeInterruptedError):
        branch.commit(before.token)
    assert branch.produce() == before
    check_goes_on(branch, ctx)


def test_interrupted_generation_holds_what_it_yielded_and_goes_on(
    ctx: Context, decodes: Decodes
) -> None:
    branch = Branch.start(ctx, "Once upon a time", temperature=0.9, seed=3)
    with branch.fork() as fork:
        whole = [produced.token for produced in fork.generate(40)]
    decodes.on_call(17, ctx.interrupt)
    yielded: list[int] = []
    with pytest.raises(DecodeInterruptedError):
        for produced in branch.generate(40):
            yielded.append(produced.token)
    # The last one was given out before it was decoded.
    assert branch.generated_tokens == yielded == whole[:18]
    assert [produced.token for produced in branch.generate(22)] == whole[18:]


@pytest.mark.parametrize("call", range(6))
def test_interrupted_engine_leaves_clean_contexts_and_generates_the_same_again(
    call: int, ctx: Context, draft_ctx: Context, decodes: Decodes
) -> None:
    """A branch whose speculation is interrupted can be continued, too."""
    drafter, config = lb.ModelDrafter(draft_ctx), lb.SpeculativeConfig(draft_k=3)
    engine, victim = lb.Engine(ctx, drafter, config, seed=5), (ctx, draft_ctx)[call % 2]
    prompts = ["The king", "The queen had a daughter"]
    whole = [result.text for result in engine.generate(prompts)]
    decodes.on_call(3 * call, victim.interrupt)
    with pytest.raises(DecodeInterruptedError):
        engine.generate(prompts)
    for context in (ctx, draft_ctx):
        assert context.n_seq_free == 8
        assert context.usage().cells_used == 0
        context.audit()
    assert [result.text for result in engine.generate(prompts)] == whole
    branch = Branch.start(ctx, "Once upon a time", temperature=0.9, seed=3)
    decodes.on_call(2 * call, victim.interrupt)
    with pytest.raises(DecodeInterruptedError):
        lb.Speculator(ctx, drafter, config).generate(branch, max_tokens=60).finish()
    draft_ctx.audit()
    check_goes_on(branch, ctx)


def test_function_of_a_search_is_interrupted_at_once(ctx: Context) -> None:
    is_late: list[bool] = []

    def answer(text: str) -> None:
        ctrl_c()
        is_late.append(True)

    with Branch.start(ctx, "Once upon a time", temperature=0.9, seed=3) as branch:
        with pytest.raises(KeyboardInterrupt):
            lb.search.vote(branch, answer, 3, 20, confidence=1.0)
        assert not is_late
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        check_goes_on(branch, ctx)
        assert ctx.n_seq_free == ctx.n_seq_max - 1


@pytest.mark.parametrize("call", [3, 9])
def test_texts_so_far_come_with_the_error(ctx: Context, decodes: Decodes, call: int) -> None:
    """This holds for ``complete``, ``chat`` and ``generate``. A text that had ended is complete."""
    prompts, limits = ["Once upon a time", "One day"], (2, 40)
    requests = [
        lb.Request(prompt, id=prompt, max_tokens=n, sampling=SamplingParams(seed=1))
        for prompt, n in zip(prompts, limits, strict=True)
    ]
    whole = [result.tokens for result in lb.Engine(ctx, None).generate(requests)]
    decodes.on_call(call, ctx.interrupt)
    with pytest.raises(DecodeInterruptedError) as caught:
        lb.Engine(ctx, None).generate(requests)
    first, second = caught.value.results
    assert (first.id, first.tokens, first.finish_reason) == (prompts[0], whole[0], "length")
    assert (second.id, second.finish_reason) == (prompts[1], "cancelled")
    assert 0 < len(second.tokens) < 40
    assert second.tokens == whole[1][: len(second.tokens)]
    for again in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert [result.text for result in again.results] == [first.text, second.text]
    decodes.on_call(call, ctx.interrupt)
    with pytest.raises(DecodeInterruptedError) as caught:
        ctx.complete(prompts, max_tokens=40, seed=1, drafter=None)
    for result, prompt in zip(caught.value.results, prompts, strict=True):
        assert (result.prompt, result.finish_reason) == (prompt, "cancelled")
        assert 0 < len(result.tokens) < 40
    decodes.on_call(0, ctx.interrupt)
    with pytest.raises(DecodeInterruptedError) as caught:
        ctx.complete("And so", max_tokens=40, drafter=None)
    assert [result.tokens for result in caught.value.results] == [[]]
    assert ctx.n_seq_free == ctx.n_seq_max


def test_time_that_ran_out_without_a_decode_stops_nothing_after_the_block(ctx: Context) -> None:
    """A generation that is kept does not, either."""
    for seconds in (3600, math.inf):
        with ctx.time_limit(seconds):
            branch = Branch.start(ctx, "Once upon a time", seed=3)
        branch.step()
    check_goes_on(branch, ctx)
    with ctx.time_limit(0.001):
        while not ctx.decoder.handle.stops._threads:
            pass
    Branch.start(ctx, "Once upon a time", seed=3).step()


def test_a_time_limit_stops_no_decode_of_another_thread(ctx: Context) -> None:
    """It runs out while the other thread decodes, and stops the next decode of its own thread."""
    is_inside, may_decode = threading.Event(), threading.Event()

    def held(decode: Callable[[int], int], n: int) -> int:
        is_inside.set()
        assert may_decode.wait(60)
        return decode(n)

    branches = [Branch.create(ctx) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool, hooked(ctx, held), ctx.time_limit(0.01):
        innocent = pool.submit(branches[0].prefill, [5, 6, 7])
        assert is_inside.wait(60)
        while not ctx.decoder.handle.stops._threads:
            pass
        may_decode.set()
        innocent.result(60)
        with pytest.raises(DecodeInterruptedError):
            branches[1].prefill([5, 6, 7])
        branches[1].prefill([5, 6, 7])
    assert np.array_equal(branches[0].logits, branches[1].logits)


def test_ctrl_c_while_a_decode_is_interrupted_is_not_lost(
    target: lb.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp then logs, in the main thread, before Python has run the handler of the signal."""
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    decode, begun = C.llama_decode, threading.Event()

    def noted(*arguments: object) -> object:
        begun.set()
        return decode(*arguments)

    def stop() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)
        ctx.interrupt()

    monkeypatch.setattr(C, "llama_decode", noted)
    with (
        Context(target, n_ctx=1024, n_batch=1024, n_threads=1, exact=True) as ctx,
        Branch.create(ctx) as branch,
    ):
        # In this thread, as short ones are.
        monkeypatch.setattr(ctx.decoder.handle, "n_watched", 1 << 30)
        for _ in range(3):
            begun.clear()
            thread = threading.Thread(target=stop)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                branch.prefill([5] * 1000)
            thread.join()
            assert branch.position == 0
        monkeypatch.setattr(C, "llama_decode", decode)
        branch.prefill([5] * 10)  # nothing is left to interrupt
    assert unraisable == []


# -- while a model loads ---------------------------------------------------------------------------

LOADING = ("loaded meta data", "load_tensors", "llama_context: constructing", "llama_kv_cache")


@pytest.mark.parametrize("at", [*LOADING, 0.0, 0.5, 1.0])
def test_ctrl_c_while_a_model_loads_reaches_the_caller_and_frees_everything(
    at: str | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while llama.cpp logs (ctypes would only print the exception) or reports progress."""
    pointers: list[object] = []
    freed: list[object] = []
    for name, into in (
        ("llama_model_load_from_file", pointers),
        ("llama_init_from_model", pointers),
        ("llama_model_free", freed),
        ("llama_free", freed),
    ):
        real = getattr(C, name)

        def counted(*arguments: object, real: Any = real, into: Any = into) -> object:
            result = real(*arguments)
            if result or into is freed:
                into.append(result)
            return result

        monkeypatch.setattr(C, name, counted)

    def progress(fraction: float) -> None:
        if not isinstance(at, str) and fraction >= at:
            ctrl_c()

    sent: list[str] = []

    def write(text: str) -> int:
        if isinstance(at, str) and at in text and not sent:
            sent.append(text)
            ctrl_c()
        return len(text)

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    lb.set_log_level("debug")
    try:
        with pytest.raises(KeyboardInterrupt):
            lb.load("tale-target", n_ctx=256, n_threads=1, progress=progress)
    finally:
        lb.set_log_level("none")
    assert bool(sent) == isinstance(at, str), "llama.cpp did not log such a line"
    gc.collect()
    assert len(freed) == len(pointers)
    with lb.load("tale-target", n_ctx=256, n_threads=1) as ctx:
        assert Branch.start(ctx, "Once upon a time", seed=1).step().text


# -- the command line ------------------------------------------------------------------------------

LONG_TALE = "Once upon a time there was a king who had a daughter . " * 700
LONG = ["--n-ctx", "16384", "--threads", "1"]
BEGIN = """
import os, signal, sys
from llamabranch import hub
from llamabranch.cli.app import app
def stop():
    os.kill(os.getpid(), signal.SIGINT)
"""
LOADING_COMMAND = """
class Interrupting:
    encoding, sent = "utf-8", False
    def write(self, text):
        if "load_tensors" in text and not self.sent:
            Interrupting.sent = True
            stop()
        return real.write(text)
    def __getattr__(self, name):
        return getattr(real, name)
real, sys.stderr = sys.stderr, Interrupting()
"""
FINALIZER = """
class Interrupting:
    def __del__(self):
        stop()
        for _ in range(1000):
            pass
real = hub.resolve
def resolve(*arguments, **options):
    Interrupting()
    hub.resolve = real
    return real(*arguments, **options)
hub.resolve = resolve
"""
# Python loses what is raised in a finalizer.
COMMANDS: dict[str, tuple[str, list[str]]] = {
    "speculate": ("", ["speculate", LONG_TALE, *LONG]),
    "generate": ("", ["generate", "--prompts", LONG_TALE, "The king", *LONG]),
    "speculate, loading": (LOADING_COMMAND, ["speculate", "--verbose"]),
    "doctor, loading": (LOADING_COMMAND, ["doctor", "--verbose"]),
    "generate, loading": (LOADING_COMMAND, ["generate", "-p", "The king", "--verbose"]),
    "speculate, finalizer": (FINALIZER, ["speculate", "-n", "100"]),
    "generate, finalizer": (FINALIZER, ["generate", "-p", "a"]),
    "models, finalizer": (FINALIZER, ["models", "show"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_while_a_command_reads_or_loads_ends_it(name: str) -> None:
    program, arguments = COMMANDS[name]
    command = ["-c", f"{BEGIN}{program}app(sys.argv[1:])"]
    if not program:
        command = signalled(3)[1:]
    done = run_python(*command, *arguments, code=130)
    assert "Traceback" not in done.stderr
    if program != FINALIZER:
        assert done.stderr.strip().splitlines()[-1] == "interrupted"
    if program == LOADING_COMMAND:
        assert done.stdout == ""


IMPORTING = """
import os, signal, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""
ENDING = """
import atexit, os, signal
atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""
MODULES = [
    "llamabranch.branch", "numpy", "llama_cpp", "llamabranch.engine", "llamabranch.cli", "typer",
    "rich.console", "llamabranch.cli.generate",
]  # fmt: skip


def customised(folder: Path, code: str) -> str:
    """Return the path on which the interpreter finds this code, and runs it before all else."""
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    return os.pathsep.join([str(folder), str(Path(lb.__file__).parents[1])])


@pytest.mark.parametrize("module", MODULES)
def test_ctrl_c_while_the_command_is_imported_ends_it(module: str, tmp_path: Path) -> None:
    # This command imports all of the modules.
    command = ("-m", "llamabranch.cli", "generate", "--prompts", "Once", "-n", "1")
    path = customised(tmp_path, IMPORTING)
    done = run_python(*command, code=130, PYTHONPATH=path, INTERRUPTED_AT=module)
    assert (done.stderr, done.stdout) == ("interrupted\n", "")


def test_ctrl_c_when_the_command_has_ended_shows_no_traceback(tmp_path: Path) -> None:
    """The output is complete and the exit functions have run, so the exit code does not change."""
    done = run_python("-m", "llamabranch.cli", "models", PYTHONPATH=customised(tmp_path, ENDING))
    assert done.stderr == ""
    assert "tale-target" in done.stdout


def test_program_that_imports_the_library_keeps_its_ctrl_c() -> None:
    code = "import signal, llamabranch; print(signal.getsignal(signal.SIGINT).__name__)"
    assert run_code(code) == "default_int_handler\n"
