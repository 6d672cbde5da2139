"""fork() of the process, and its end: errors instead of crashes and hangs, and nothing freed twice.

Each case is a separate program. A child that hangs is ended by its alarm, which the parent detects.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from programs import run_python

import llamabranch as lb

DATA = Path(lb.__file__).parent / "data"

BEGIN = """
    import gc, os, random, signal, sys, threading, time, traceback
    import numpy as np
    import llamabranch as lb
    from llamabranch.errors import ClosedError, LlamaBranchError, UsageError

    TARGET, DRAFT = sys.argv[1:3]

    def child_says(act):
        "Run act in a child of fork(); return how it ended."
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            status = 1
            try:
                act()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status) if status else sys.exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def refused(*calls):
        for call in calls:
            try:
                result = call()
            except ClosedError as error:
                assert "fork" in str(error), error
            else:
                raise AssertionError(f"{call} gave {result!r}")
"""


def run(program: str, *arguments: str, code: int = 0) -> str:
    """Run a program after ``BEGIN``; return what it printed."""
    source = textwrap.dedent(BEGIN) + textwrap.dedent(program)
    pair = (DATA / f"tale-{name}-q8_0.gguf" for name in ("target", "draft"))
    done = run_python("-X", "faulthandler", "-c", source, *pair, *arguments, code=code)
    for complaint in ("Exception ignored", "Traceback", "Fatal Python error"):
        assert complaint not in done.stderr, done.stderr[-3000:]
    return done.stdout


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")

# -- fork() ----------------------------------------------------------------------------------------


@forks
@pytest.mark.parametrize("n_threads", ["1", "2"])
def test_everything_inherited_through_fork_raises_and_the_parent_goes_on(n_threads: str) -> None:
    run(
        """
        model = lb.Model(TARGET)
        ctx = lb.Context(model, n_ctx=512, n_seq_max=6, n_threads=int(sys.argv[3]))
        branch = lb.Branch.start(ctx, "Once upon a time", temperature=0.8, seed=1)
        fork = branch.fork()
        other = branch.fork()
        whole = [other.step().token for _ in range(20)]
        other.prune()
        drafter = lb.ModelDrafter(ctx)
        speculator = lb.Speculator(ctx, drafter)
        engine = lb.Engine(ctx, drafter)
        session = lb.InferenceSession(ctx, "The king")
        sampler = lb.SamplingParams(temperature=1.0, repeat_penalty=1.2)
        penal = lb.Branch.start(ctx, "The", sampling=sampler)
        stream = penal.generate(10)
        next(stream)
        generated = [branch.step().token for _ in range(5)]

        def child():
            assert ctx.closed and model.closed
            refused(
                lambda: branch.step(), lambda: branch.produce(), lambda: branch.fork(),
                lambda: branch.logits, lambda: branch.text, lambda: branch.rewind(1),
                lambda: branch.entropy(),
                lambda: fork.prefill([5]), lambda: branch.save("nowhere"), lambda: next(stream),
                lambda: lb.Branch.create(ctx), lambda: lb.Branch.start(ctx, "a"),
                lambda: ctx.decode([1], 0), lambda: ctx.kv_seq_copy(0, 1), lambda: ctx.usage(),
                lambda: ctx.audit(), lambda: ctx.tokenize("a"), lambda: ctx.kv_cache_clear(),
                lambda: ctx.kv_cache_remove(0), lambda: ctx.logits(),
                lambda: model.tokenize("a b c"), lambda: model.detokenize([5, 6]),
                lambda: lb.Context(model, n_ctx=256), lambda: model.chat_template,
                lambda: speculator.generate("a").finish(), lambda: session.next_token(drafter),
                lambda: penal.resample(lb.SamplingParams(top_k=3)),
            )
            assert isinstance(engine.generate(["a"])[0].error, ClosedError)
            repr((ctx, branch, model))
            branch.tokens, branch.position
            ctx.interrupt()
            fork.prune()
            branch.prune_subtree()
            ctx.close()
            model.close()
            gc.collect()

        assert child_says(child) == 0
        assert child_says(lambda: None) == 0  # frees nothing when it ends
        generated += [branch.step().token for _ in range(15)]
        assert generated == whole, (generated, whole)
        ctx.audit()
        next(stream)
        assert [r.finish_reason for r in engine.generate(["The king"])] in (["stop"], ["length"])
        """,
        n_threads,
    )


@forks
def test_locks_that_were_held_at_the_fork_do_not_hang_the_child() -> None:
    run(
        """
        model = lb.Model(TARGET)
        ctx = lb.Context(model, n_ctx=2048, n_batch=2048, n_seq_max=4, n_threads=1)
        branch = lb.Branch.start(ctx, "Once upon a time", seed=1)
        reading = lb.Branch.create(ctx)
        thread = threading.Thread(target=lambda: reading.prefill([5 + i % 900 for i in range(1500)]))
        thread.start()
        while ctx.lock.acquire(blocking=False):  # until the other thread decodes
            ctx.lock.release()

        def child():
            refused(lambda: branch.step(), lambda: ctx.decode([1], 0), lambda: reading.fork())
            ctx.close()
            model.close()

        assert child_says(child) == 0
        thread.join()
        assert reading.position == 1500
        branch.step()
        with ctx.lock:  # and what the forking thread itself holds it still holds
            assert child_says(lambda: refused(lambda: branch.step())) == 0
        def child():
            with ctx.lock:
                refused(lambda: branch.step())
        assert child_says(child) == 0
        ctx.audit()
        """
    )


@forks
def test_fork_inside_a_with_block_leaves_it_in_both_processes() -> None:
    out = run(
        """
        with lb.Model(TARGET) as model, lb.Context(model, n_ctx=256, n_threads=1) as ctx:
            with lb.Branch.start(ctx, "Once", seed=1) as branch, ctx.lock:
                before = branch.produce()
                pid = os.fork()
                if pid:
                    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
                    assert branch.step() == before
        print("parent" if pid else "child")
        """
    )
    assert sorted(out.split()) == ["child", "parent"]


@forks
def test_child_opens_models_of_its_own() -> None:
    run(
        """
        def say(n_threads):
            with lb.Model(TARGET) as model:
                with lb.Context(model, n_ctx=256, n_threads=n_threads) as ctx:
                    return lb.Branch.start(ctx, "Once upon a time", temperature=0.0).step().token

        model = lb.Model(TARGET)
        ctx = lb.Context(model, n_ctx=256, n_threads=1)
        word = lb.Branch.start(ctx, "Once upon a time", temperature=0.0).step().token

        def child():
            assert say(1) == word
            assert say(2) == word  # the parent has used one thread so far

        assert child_says(child) == 0
        assert say(2) == word

        def grandchild():
            assert say(1) == word
            try:
                say(2)
            except UsageError as error:
                assert "several threads" in str(error) and "spawn" in error.hint
            else:
                raise AssertionError("OpenMP would have waited for ever")

        assert child_says(grandchild) == 0
        """
    )


# -- the end of the interpreter ----------------------------------------------------------------------

ALIVE = """
    model, draft = lb.Model(TARGET), lb.Model(DRAFT)
    ctx = lb.Context(model, n_ctx=512, n_threads=1)
    draft_ctx = lb.Context(draft, n_ctx=512, n_threads=1)
    branch = lb.Branch.start(ctx, "Once", seed=1, repeat_penalty=1.2)
    child = branch.fork()
    grammar = lb.Branch.start(ctx, "Once", grammar='root ::= "abc"')
    drafter = lb.ModelDrafter(draft_ctx)
    speculator = lb.Speculator(ctx, drafter)
    generation = speculator.generate("The king", max_tokens=50)
    next(generation)
    engine = lb.Engine(ctx, drafter)
    events = engine.stream(["The queen", "A wolf"])
    next(events)
    session = lb.InferenceSession(ctx, "The")
    session.next_token(drafter)
    tokens = child.generate(20)
    next(tokens)
    snapshot = branch.snapshot()
    row = ctx.decoder
"""


ENDINGS = [
    "", "cycle = [branch, engine, events, ctx]; cycle.append(cycle)", "gc.disable()",
    "ctx.keep = branch; model.keep = ctx; branch.keep = model", "lb.Branch.keep = branch",
    "import builtins; builtins.kept = (branch, generation, events, session)",
    "import atexit; atexit.register(lambda: ctx.closed)",
    "import atexit; atexit.register(branch.prune_subtree)",
    "threading.main_thread().keep = (branch, events)", "sys.exit(3)",
]  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_interpreter_ends_with_everything_alive(ending: str) -> None:
    run(f"{textwrap.dedent(ALIVE)}\n{ending}", code=3 * (ending == "sys.exit(3)"))


def test_everything_is_closed_and_dropped_in_any_order() -> None:
    run(
        """
        closers = {
            "model": "close", "draft": "close", "ctx": "close", "draft_ctx": "close",
            "branch": "prune_subtree", "child": "prune_subtree", "grammar": "prune",
            "generation": "close", "events": "close", "session": "close", "tokens": "close",
        }
        lines = os.environ["SCENE"]
        for seed in range(30):
            rng = random.Random(seed)
            world = {"lb": lb, "TARGET": TARGET, "DRAFT": DRAFT}
            exec(lines, world)
            names = [n for n in world if n not in ("lb", "TARGET", "DRAFT", "__builtins__")]
            rng.shuffle(names)
            for name in names:
                if name in closers and rng.random() < 0.6:
                    try:
                        getattr(world[name], closers[name])()
                    except LlamaBranchError:
                        pass  # it has children, or what it depends on is closed
                if rng.random() < 0.7:
                    del world[name]
                if rng.random() < 0.2:
                    gc.collect()
            del world
            gc.collect()
        assert not lb.native.context._open, "a context outlived all that knew it"
        print("fine")
        """.replace('os.environ["SCENE"]', repr(textwrap.dedent(ALIVE)))
    )


@pytest.mark.parametrize("daemon", [True, False])
def test_interpreter_ends_while_threads_decode(daemon: bool) -> None:
    """Daemon threads may be anywhere: in llama.cpp, in a sampler, in Python."""
    run(
        """
        daemon = sys.argv[3] == "True"
        model = lb.Model(TARGET)
        ctx = lb.Context(model, n_ctx=2048, n_batch=2048, n_seq_max=8, n_threads=1)
        stop = time.monotonic() + 0.3
        started = threading.Barrier(6)

        def step(branch):
            branch.step()
            if branch.position > 60:
                branch.rewind(20)

        def read(branch):
            branch.rewind(0)
            branch.prefill([5 + i % 900 for i in range(1200)])

        def work(act, seed):
            branch = lb.Branch.start(ctx, "Once", temperature=0.9, repeat_penalty=1.1, seed=seed)
            started.wait()
            try:
                while daemon or time.monotonic() < stop:
                    act(branch)
            except LlamaBranchError:
                pass

        for arguments in [(step, i) for i in range(4)] + [(read, 4)]:
            threading.Thread(target=work, args=arguments, daemon=daemon).start()
        started.wait()
        """,
        str(daemon),
    )
