"""Ctrl-C, ``interrupt`` and time limits: a decode stops at once, and nothing else has changed.

Signals are sent from inside ``llama_decode``'s stand-in, which records the real call's code, so that they
come at a known point. Logits are compared with those from before, or with a clean replay.
"""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import toys
from llama_cpp import llama_cpp as C

import llamabranch as lb
from llamabranch import Branch, Context, DecodeInterruptedError, SamplingParams
from llamabranch.errors import ConfigError
from llamabranch.sampling.sampler import Sampler

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="signals are sent as POSIX has them"),
    # The text that long prompts produce does not matter here.
    pytest.mark.filterwarnings("ignore::llamabranch.errors.ContextLengthWarning"),
]

N_LONG = 2600  # tokens: long enough for the bundled target that a decode is watched for signals


class Decodes:
    """What llama.cpp was asked to decode (tokens) and its answers; ``during`` runs inside a call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[tuple[int, int]] = []
        self.n_calls = 0
        self.during: Callable[[int], None] = lambda call: None
        self.after: Callable[[int], None] = lambda call: None
        self._real = C.llama_decode
        monkeypatch.setattr(C, "llama_decode", self._decode)

    def _decode(self, ctx: object, batch: C.llama_batch) -> int:
        call, self.n_calls = self.n_calls, self.n_calls + 1
        self.during(call)
        code = int(self._real(ctx, batch))
        self.answers.append((batch.n_tokens, code))
        self.after(call)
        return code

    def on_call(self, number: int, action: Callable[[], object]) -> None:
        """Do ``action`` inside the call of this number from now on, and only there."""
        wanted = self.n_calls + number
        self.during = lambda call: (action(), None)[1] if call == wanted else None


@pytest.fixture(autouse=True)
def default_ctrl_c() -> Iterator[None]:
    """Handle Ctrl-C, here and in the programs that are started: background jobs ignore it by default."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


class Interrupter:
    """A timer that interrupts once, wherever the main thread is.

    Python only reports exceptions raised in a finalizer or in a callback of the garbage collector: then
    the timer is set again. The code in its block gets at most one ``KeyboardInterrupt``.
    """

    def __init__(self) -> None:
        self.n_lost = 0
        self._is_set = False
        self._report = sys.unraisablehook

    def __enter__(self) -> Interrupter:
        self._previous = signal.signal(signal.SIGALRM, self._ring)
        self._report, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        sys.unraisablehook = self._report
        signal.signal(signal.SIGALRM, self._previous)

    def start(self, seconds: float) -> None:
        self._is_set = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def stop(self) -> None:
        self._is_set = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_set:
            self._is_set = False
            raise KeyboardInterrupt

    def _on_unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is KeyboardInterrupt:
            self.n_lost += 1
            self.start(0.002)
        else:
            self._report(lost)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Decodes:
    return Decodes(monkeypatch)


@pytest.fixture(scope="module")
def long_ctx(target: lb.Model) -> Iterator[Context]:
    """A context that decodes thousands of tokens in one micro-batch."""
    with Context(
        target, n_ctx=3072, n_seq_max=4, n_batch=3072, n_threads=1, batch_invariant=True
    ) as context:
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


# -- Ctrl-C ----------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_long_prefill_inside_its_micro_batch(
    long_ctx: Context, decodes: Decodes
) -> None:
    with Branch.start(long_ctx, "Once upon a time", temperature=0.9, seed=3) as branch:
        before = branch.tokens, branch.logits
        decodes.on_call(0, ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            branch.prefill(long_prompt())
        assert decodes.answers[-1] == (N_LONG, 2), "llama.cpp broke the decode off"
        assert branch.tokens == before[0]
        assert np.array_equal(branch.logits, before[1])
        check_goes_on(branch, long_ctx)


def test_second_ctrl_c_waits_for_the_decode_too(long_ctx: Context, decodes: Decodes) -> None:
    """The context must not be used while llama.cpp still decodes, also after a second Ctrl-C."""

    def twice() -> None:
        ctrl_c()
        while not long_ctx.decoder.handle._stop[0]:
            pass  # until the first one has been handled
        ctrl_c()
        ctrl_c()

    with Branch.start(long_ctx, "Once upon a time", seed=3) as branch:
        decodes.on_call(0, twice)
        with pytest.raises(KeyboardInterrupt):
            branch.prefill(long_prompt())
        assert decodes.answers[-1] == (N_LONG, 2)
        check_goes_on(branch, long_ctx)


def test_what_a_handler_raises_is_what_the_user_gets(long_ctx: Context, decodes: Decodes) -> None:
    class Alarm(Exception):
        pass

    signals = []

    def handler(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) == 2:
            raise Alarm

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        decodes.on_call(0, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        with Branch.create(long_ctx) as branch:
            branch.prefill(long_prompt(1800))
        assert decodes.answers[-1] == (1800, 0), "a handler that raises nothing stops nothing"
        with Branch.start(long_ctx, "Once upon a time", seed=3) as branch:
            decodes.on_call(0, lambda: os.kill(os.getpid(), signal.SIGUSR1))
            with pytest.raises(Alarm):
                branch.prefill(long_prompt())
            assert decodes.answers[-1] == (N_LONG, 2)
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


def test_ctrl_c_while_a_rewind_reads_the_history_again_changes_nothing(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SamplingParams(temperature=0.8, repeat_penalty=1.3, seed=3)
    with Branch.start(ctx, "Once upon a time", sampling=settings) as branch:
        for _ in range(30):
            branch.step()
        tokens = branch.tokens

        def interrupted(*_: object) -> Sampler:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(Sampler, "replay", interrupted)
        with pytest.raises(KeyboardInterrupt):
            branch.rewind(20)
        assert branch.tokens == tokens
        check_goes_on(branch, ctx)
        branch.rewind(20)
        assert branch.tokens == tokens[:20]
        check_goes_on(branch, ctx)


SCENES = ("plain", "forks", "history", "speculative", "engine")


@pytest.mark.parametrize("scene", SCENES)
def test_ctrl_c_at_any_moment_leaves_a_branch_that_goes_on(
    scene: str, ctx: Context, draft_ctx: Context, other_ctx: Context
) -> None:
    """A timer interrupts at random times, in llama.cpp and between any two steps in Python."""
    rng = random.Random(SCENES.index(scene))
    drafter = lb.ModelDrafter(draft_ctx)
    config = lb.SpeculativeConfig(draft_k=3)
    settings = SamplingParams(temperature=0.8, repeat_penalty=1.3 if scene == "history" else 1.0)

    def act(branch: Branch) -> None:
        if scene == "engine":
            lb.Engine(ctx, drafter, config, seed=1).generate(["The king", "The queen"] * 4)
        elif scene == "speculative":
            lb.Speculator(ctx, drafter, config).generate(branch, max_tokens=300).finish()
        else:
            for _ in range(300):
                branch.step()
                if branch.position > 60:
                    branch.rewind(20)
                if scene == "forks":
                    branch.fork().prune()

    n_interrupted = 0
    with Interrupter() as alarm:
        for i in range(40):
            branch = Branch.start(ctx, "Once upon a time", sampling=settings.replace(seed=i))
            try:
                alarm.start(rng.uniform(0.0005, 0.03))
                act(branch)
                alarm.stop()
            except KeyboardInterrupt:
                n_interrupted += 1
            ctx.audit()
            draft_ctx.audit()
            tokens, logits = branch.tokens, branch.logits
            other_ctx.decode(tokens, 0)
            assert np.array_equal(other_ctx.logits(), logits)
            replay = Branch.create(other_ctx, branch.sampling)
            replay.prefill(tokens[: branch.n_prompt])
            for token in tokens[branch.n_prompt :]:
                replay.commit(token)
            for _ in range(3):
                assert branch.step() == replay.step()
            assert branch.text == replay.text
            if scene != "speculative":
                assert math.isclose(branch.log_likelihood(), replay.log_likelihood(), rel_tol=1e-6)
            replay.prune()
            other_ctx.kv_cache_clear()
            branch.prune_subtree()
            del branch
            assert ctx.n_seq_free == 8, "a sequence leaked"
    assert n_interrupted >= 10


# -- interrupt() -----------------------------------------------------------------------------------


def in_thread(call: Callable[[], object]) -> list[BaseException]:
    """Run ``call`` in a thread; return what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def test_interrupt_stops_the_decode_of_another_thread(long_ctx: Context, decodes: Decodes) -> None:
    with Branch.start(long_ctx, "Once upon a time", temperature=0.9, seed=3) as branch:
        before = branch.logits
        decodes.on_call(0, lambda: threading.Thread(target=long_ctx.interrupt).start())
        (error,) = in_thread(lambda: branch.prefill(long_prompt()))
        assert isinstance(error, DecodeInterruptedError)
        assert (error.code, error.memory_changed) == (2, True)
        assert decodes.answers[-1] == (N_LONG, 2)
        assert np.array_equal(branch.logits, before)
        check_goes_on(branch, long_ctx)


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
    tokens_so_far = []
    with pytest.raises(DecodeInterruptedError):
        for produced in branch.generate(40):
            tokens_so_far.append(produced.token)
    # The last one was given out before it was decoded.
    assert branch.generated == tokens_so_far == whole[:18]
    tokens_so_far += [produced.token for produced in branch.generate(22)]
    assert tokens_so_far == whole


@pytest.mark.parametrize("call", range(6))
def test_interrupted_engine_leaves_clean_contexts_and_generates_the_same_again(
    call: int, ctx: Context, draft_ctx: Context, decodes: Decodes
) -> None:
    engine = lb.Engine(ctx, lb.ModelDrafter(draft_ctx), lb.SpeculativeConfig(draft_k=3), seed=5)
    prompts = ["The king", "The queen had a daughter"]
    whole = [result.text for result in engine.generate(prompts)]
    decodes.on_call(3 * call, (draft_ctx if call % 2 else ctx).interrupt)
    with pytest.raises(DecodeInterruptedError):
        engine.generate(prompts)
    for context in (ctx, draft_ctx):
        assert context.n_seq_free == 8
        assert context.usage().cells_used == 0
        context.audit()
    assert [result.text for result in engine.generate(prompts)] == whole


@pytest.mark.parametrize("call", range(6))
def test_interrupted_speculation_leaves_a_branch_that_goes_on(
    call: int, ctx: Context, draft_ctx: Context, decodes: Decodes
) -> None:
    drafter = lb.ModelDrafter(draft_ctx)
    speculator = lb.Speculator(ctx, drafter, lb.SpeculativeConfig(draft_k=3))
    branch = Branch.start(ctx, "Once upon a time", temperature=0.9, seed=3)
    decodes.on_call(2 * call, (draft_ctx if call % 2 else ctx).interrupt)
    with pytest.raises(DecodeInterruptedError):
        speculator.generate(branch, max_tokens=60).finish()
    draft_ctx.audit()
    check_goes_on(branch, ctx)


# -- time limits -----------------------------------------------------------------------------------


def test_time_limit_stops_what_takes_longer(long_ctx: Context, decodes: Decodes) -> None:
    with Branch.start(long_ctx, "Once upon a time", seed=3) as branch:
        before = branch.logits
        start = branch.position
        with pytest.raises(DecodeInterruptedError), long_ctx.time_limit(0.01):
            while True:  # on a busy machine the first may be over before the timer's thread runs
                branch.prefill(long_prompt())
                branch.rewind(start)
        assert np.array_equal(branch.logits, before)
        check_goes_on(branch, long_ctx)


@pytest.mark.parametrize("seconds", [3600, math.inf])
def test_time_limit_that_is_kept_stops_nothing(seconds: float, ctx: Context) -> None:
    with ctx.time_limit(seconds):
        branch = Branch.start(ctx, "Once upon a time", seed=3)
    branch.step()
    check_goes_on(branch, ctx)


def test_time_that_ran_out_without_a_decode_stops_nothing_after_the_block(ctx: Context) -> None:
    with ctx.time_limit(0.001):
        while not ctx.decoder.handle._stop[0]:
            pass
    Branch.start(ctx, "Once upon a time", seed=3).step()


# -- every kind of memory --------------------------------------------------------------------------


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
        Context(target, n_ctx=1024, n_batch=1024, n_threads=1) as ctx,
        Branch.create(ctx) as branch,
    ):
        monkeypatch.setattr(
            ctx.decoder.handle, "n_watched", 1 << 30
        )  # in this thread, as short ones are
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


class InterruptingStderr:
    """Sends the process a Ctrl-C when llama.cpp logs a given line."""

    def __init__(self, line: str) -> None:
        self.line = line
        self.n_sent = 0

    def write(self, text: str) -> int:
        if self.line in text and not self.n_sent:
            self.n_sent += 1
            ctrl_c()
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("line", LOADING)
def test_ctrl_c_while_a_model_loads_reaches_the_caller_and_frees_everything(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while llama.cpp logs: ctypes would print the exception and go on without it."""
    made: list[str] = []
    freed: list[str] = []

    def count(name: str, into: list[str], made_one: bool) -> None:
        real = getattr(C, name)

        def counted(*arguments: object) -> object:
            result = real(*arguments)
            if result or not made_one:
                into.append(name)
            return result

        monkeypatch.setattr(C, name, counted)

    count("llama_model_load_from_file", made, True)
    count("llama_init_from_model", made, True)
    count("llama_model_free", freed, False)
    count("llama_free", freed, False)
    stderr = InterruptingStderr(line)
    monkeypatch.setattr(sys, "stderr", stderr)
    lb.set_log_level("debug")
    try:
        with pytest.raises(KeyboardInterrupt):
            lb.load("tale-target", n_ctx=256, n_threads=1)
    finally:
        lb.set_log_level("none")
    assert stderr.n_sent == 1, "llama.cpp did not log such a line"
    gc.collect()
    assert len(freed) == len(made)
    with lb.load("tale-target", n_ctx=256, n_threads=1) as ctx:
        assert Branch.start(ctx, "Once upon a time", seed=1).step().text


# -- the command line ------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "llamabranch.cli"]
LONG_TALE = "Once upon a time there was a king who had a daughter . " * 700
READING = """
import os, signal, sys, threading
from llama_cpp import llama_cpp as C
from llamabranch.cli.app import app
real, calls = C.llama_decode, []
def decode(ctx, batch):
    if batch.n_tokens > 200:
        calls.append(batch.n_tokens)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
    if len(calls) > 4:
        os._exit(99)  # it reads on
    return real(ctx, batch)
C.llama_decode = decode
app(sys.argv[1:])
"""


def run_interrupted(program: str, *arguments: str) -> str:
    """Run a program that interrupts a command; return its output, after checks of how it ended."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "interrupted"
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["speculate", LONG_TALE],
        ["speculate", LONG_TALE, "--json", "--compare"],
        ["speculate", LONG_TALE, "--draft", "none"],
        ["generate", "--prompts", LONG_TALE, "The king"],
    ],
    ids=["speculate", "json", "plain", "generate"],
)
def test_ctrl_c_while_a_prompt_is_read_ends_the_command(arguments: list[str]) -> None:
    run_interrupted(READING, *arguments, "--n-ctx", "16384", "--threads", "1")


LOADING_COMMAND = """
import os, signal, sys
from llamabranch.cli.app import app
class Interrupting:
    encoding, sent = "utf-8", False
    def write(self, text):
        if "load_tensors" in text and not self.sent:
            Interrupting.sent = True
            os.kill(os.getpid(), signal.SIGINT)
        return real.write(text)
    def __getattr__(self, name):
        return getattr(real, name)
real, sys.stderr = sys.stderr, Interrupting()
app(sys.argv[1:])
"""


@pytest.mark.parametrize("command", ["speculate", "doctor", "generate"])
def test_ctrl_c_while_a_model_loads_ends_the_command(command: str) -> None:
    arguments = ["-p", "The king"] if command == "generate" else []
    printed = run_interrupted(LOADING_COMMAND, command, *arguments, "--verbose")
    # doctor tells what it knows as it goes
    assert printed.startswith("\nversions\n") if command == "doctor" else printed == ""


FINALIZER = """
import os, signal, sys
from llamabranch import hub
from llamabranch.cli.app import app
class Interrupting:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
real = hub.resolve
def resolve(*arguments, **options):
    Interrupting()
    hub.resolve = real
    return real(*arguments, **options)
hub.resolve = resolve
app(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "arguments",
    [["speculate", "-n", "100"], ["generate", "-p", "a"], ["models", "show"]],
    ids=" ".join,
)
def test_ctrl_c_that_python_loses_in_a_finalizer_ends_the_command(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FINALIZER, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr


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


def run_with_customisation(
    code: str, folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    paths = [str(folder), str(Path(lb.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "module",
    [
        "llamabranch.branch",
        "numpy",
        "llama_cpp",
        "llamabranch.engine",
        "llamabranch.cli",
        "typer",
        "rich.console",
        "llamabranch.cli.generate",
    ],
)
def test_ctrl_c_while_the_command_is_imported_ends_it(module: str, tmp_path: Path) -> None:
    command = ("generate", "--prompts", "Once", "-n", "1")  # it needs all of them
    done = run_with_customisation(IMPORTING, tmp_path, *command, INTERRUPTED_AT=module)
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")


def test_ctrl_c_when_the_command_has_ended_shows_no_traceback(tmp_path: Path) -> None:
    """Its output is complete and its exit functions have run: it ends as it would have ended."""
    done = run_with_customisation(ENDING, tmp_path, "models")
    assert (done.returncode, done.stderr) == (0, "")
    assert "tale-target" in done.stdout


def test_program_that_imports_the_library_keeps_its_ctrl_c() -> None:
    code = "import signal, llamabranch; print(signal.getsignal(signal.SIGINT).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "default_int_handler\n"


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_ctrl_c_in_the_progress_of_a_load_reaches_the_caller(at: float) -> None:
    def progress(fraction: float) -> None:
        if fraction >= at:
            ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        lb.load("tale-target", n_ctx=256, n_threads=1, progress=progress)
