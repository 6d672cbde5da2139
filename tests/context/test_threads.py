"""Many threads: one context serialises them, contexts run side by side, decoding frees the GIL."""

from __future__ import annotations

import faulthandler
import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from decodes import Decodes

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.errors import ClosedError, DecodeInterruptedError

WARM = lb.SamplingParams(temperature=0.8, seed=2)
PROMPTS = ("Once upon a time", "The king", "The queen had", "A wolf")


@pytest.fixture(autouse=True)
def switching() -> Iterator[None]:
    """Let Python change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*calls: Callable[[], object]) -> list[object]:
    """Run all calls in threads of their own, begun at the same time; return their results."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(run, call) for call in calls]]


def write_text(ctx: Context, prompt: str, seed: int, n: int = 40) -> list[int]:
    """Generate a text, with forks, rewinds and commits in between."""
    with Branch.start(ctx, prompt, temperature=0.9, seed=seed) as branch:
        texts = []
        for i in range(n):
            texts.append(branch.step().token)
            if i % 5 == 0:
                fork = branch.fork()
                fork.extend([7, 8, 9])
                fork.prune()
            if i % 7 == 0:
                branch.rewind(branch.position - 1)
                branch.commit(texts[-1])
        assert branch.generated_tokens == texts
        return texts


def test_all_kinds_of_users_share_a_context(ctx: Context, draft_ctx: Context) -> None:
    """Each context is also the other one's drafter."""
    config = lb.SpeculativeConfig(draft_k=3)
    engines = {
        ctx: lb.Engine(ctx, lb.ModelDrafter(draft_ctx), config, seed=4, max_tokens=40),
        draft_ctx: lb.Engine(draft_ctx, lb.ModelDrafter(ctx), config, seed=4, max_tokens=40),
    }

    def speculate(ctx: Context, other: Context) -> object:
        speculator = lb.Speculator(ctx, lb.ModelDrafter(other), config)
        return speculator.generate("The king", max_tokens=40, sampling=WARM).finish().text

    def session(ctx: Context, other: Context) -> object:
        with lb.InferenceSession(ctx, "A wolf", sampling=WARM) as generation:
            drafter = lb.ModelDrafter(other)
            while len(generation.tokens) < 30 and generation.next_token(drafter) is not None:
                pass
            return generation.text

    def batch(ctx: Context, _: Context) -> object:
        return [result.text for result in engines[ctx].generate(["The queen"])]

    def raw() -> object:
        for i in range(20):
            ctx.decode([100 + i], i, seq_id=0, logits="none")
        size = ctx.kv_cache_size(0)
        ctx.kv_cache_remove(0)
        return size

    drafting = [partial(act, ctx, draft_ctx) for act in (speculate, session, batch)]
    mutual = [partial(act, draft_ctx, ctx) for act in (speculate, session, batch)]
    writing = [partial(write_text, ctx, prompt, i, 25) for i, prompt in enumerate(PROMPTS)]
    faulthandler.dump_traceback_later(500, exit=True)  # a deadlock ends here, and shows where
    groups: list[list[Callable[[], object]]] = [[*drafting, raw], [*drafting, *mutual]]
    groups.append([*writing])
    try:
        for acts in groups:
            alone = [act() for act in acts]
            for _ in range(3):
                assert together(*acts) == alone
                for context in (ctx, draft_ctx):
                    context.audit()
                    assert context.usage().cells_used == 0
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_contexts_of_one_model_run_side_by_side(target: lb.Model) -> None:
    def work(seed: int) -> list[int]:
        with Context(target, n_ctx=512, n_seq_max=4, n_threads=1, exact=True) as ctx:
            return [t for prompt in PROMPTS for t in write_text(ctx, prompt, seed, 20)]

    alone = [work(seed) for seed in range(4)]
    assert together(*(partial(work, seed) for seed in range(4))) == alone


def test_branches_that_threads_forget_come_back(ctx: Context) -> None:
    """The garbage collector runs in whichever thread it likes, also in the middle of a call."""

    def scatter(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            branch = Branch.start(ctx, "The king", seed=seed)
            if rng.random() < 0.5:
                branch.fork().step()
            if rng.random() < 0.3:
                branch.cycle = branch  # type: ignore[attr-defined]  # only the collector ends it
            branch.step()
            if rng.random() < 0.2:
                gc.collect()

    root = Branch.start(ctx, "The king", temperature=0.0)
    child, text = root.fork(), [token.token for token in root.generate(5)]
    del root
    together(*(partial(scatter, seed) for seed in range(3)))
    assert [token.token for token in child.generate(5)] == text  # it outlives its parent
    del child
    gc.collect()
    assert ctx.n_seq_free == 8
    assert ctx.usage().cells_used == 0


def test_free_sequences_are_counted_while_another_thread_decodes(target: lb.Model) -> None:
    decoding, counted, waited = threading.Event(), threading.Event(), []

    def hold(ctx: Context) -> None:
        with ctx.lock:
            decoding.set()
            waited.append(counted.wait(60))

    with Context(target, n_ctx=256, n_seq_max=3, n_threads=1, exact=True) as ctx:
        thread = threading.Thread(target=hold, args=[ctx])
        thread.start()
        decoding.wait()
        assert ctx.n_seq_free == 3
        counted.set()
        thread.join()
    assert waited == [True]


# -- the GIL ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::llamabranch.errors.ContextLengthWarning")
@pytest.mark.parametrize("n", [1, 64, 1900], ids=["one token", "a batch", "watched for signals"])
def test_decoding_frees_the_gil(n: int, target: lb.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread counts while llama.cpp decodes.

    No thread is forced to release the GIL (the switch interval is 1000 s). So the count can grow during
    the decode only if the decode releases the GIL.
    """
    counter, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counter[0] += 1
            time.sleep(0)  # releases the GIL

    counted: list[int] = []
    thread = threading.Thread(target=count, daemon=True)
    with Context(target, n_ctx=2048, n_batch=2048, n_seq_max=2, n_threads=1, exact=True) as ctx:
        decodes = Decodes(monkeypatch)
        decodes.before = lambda _: counted.append(-counter[0])
        decodes.after = lambda _: counted.append(counted.pop() + counter[0])
        sys.setswitchinterval(1000)
        thread.start()
        try:
            for _ in range(1000):  # a short decode may end before the other thread has woken up
                ctx.decode([5] * n, 0)
                ctx.kv_cache_clear()
                if counted[-1]:
                    break
        finally:
            stop.set()
            sys.setswitchinterval(1e-6)
        thread.join()
    assert counted[-1] > 0


# -- closing while others work ---------------------------------------------------------------------


@pytest.mark.parametrize("close", ["context", "model", "branches"])
def test_closing_while_threads_decode_is_an_error_for_them_and_no_crash(
    close: str, target: lb.Model
) -> None:
    def work(branch: Branch, started: threading.Barrier) -> lb.LlamaBranchError:
        started.wait()
        while True:
            try:
                branch.step()
                if branch.position > 100:
                    branch.rewind(20)
            except lb.LlamaBranchError as error:
                return error

    for seed in range(4):
        model = lb.Model(target.path)
        ctx = Context(model, n_ctx=512, n_seq_max=6, n_threads=1)
        branches = [Branch.start(ctx, prompt, seed=seed) for prompt in PROMPTS]
        started = threading.Barrier(len(branches) + 1)
        with ThreadPoolExecutor(len(branches)) as pool:
            futures = [pool.submit(work, branch, started) for branch in branches]
            started.wait()
            if close == "context":
                ctx.close()
            elif close == "model":
                model.close()
            else:
                for branch in branches:
                    branch.prune()
            errors = [future.result() for future in futures]
        expected = (ClosedError, DecodeInterruptedError, lb.errors.BranchStateError)
        assert all(isinstance(error, expected) for error in errors), errors
        if close == "branches":
            ctx.audit()
            assert ctx.usage().cells_used == 0
        model.close()


# -- drafting across threads -----------------------------------------------------------------------


class Watched(lb.Drafter):
    """Forwards all calls. A draft state may have one caller at a time, and none after it is closed."""

    def __init__(self, drafter: lb.Drafter) -> None:
        self._drafter = drafter
        self.asked: set[str] = set()

    @property
    def name(self) -> str:
        return self._drafter.name

    def check(self, target: lb.Model) -> None:
        self._drafter.check(target)

    def start(self, target: lb.speculative.Text, rule: str) -> Any:
        return WatchedState(self, self._drafter.start(target, rule))


class WatchedState:
    """Forwards the calls of a draft state."""

    def __init__(self, drafter: Watched, state: Any) -> None:
        self._drafter = drafter
        self._state = state
        self._busy = threading.Lock()
        self._closed = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            assert self._busy.acquire(blocking=False), "two threads use one draft state"
            try:
                assert not self._closed, "a closed draft state is used"
                self._drafter.asked.add(name)
                self._closed = name == "close"
                result = getattr(self._state, name)(*arguments)
                return WatchedState(self._drafter, result) if name == "fork" else result
            finally:
                self._busy.release()

        return call


@pytest.mark.parametrize("kind", ["model", "chain"])
@pytest.mark.parametrize("draft_k", [3, "auto"])
def test_threads_share_a_speculator(
    draft_k: int | str, kind: str, ctx: Context, draft: lb.Model
) -> None:
    """Each gets its text alone, also where draft states must be closed to make room for others."""
    with Context(draft, n_ctx=512, n_seq_max=3, n_threads=1, exact=True) as small:
        drafter: lb.Drafter = lb.ModelDrafter(small)
        if kind == "chain":
            drafter = lb.ChainDrafter([lb.SuffixDrafter(min_match=1), drafter])
        watched = Watched(drafter)
        config = lb.SpeculativeConfig(draft_k=draft_k)
        speculator = lb.Speculator(ctx, watched, config)
        n_emitted = [0]
        count = threading.Lock()

        def drafted(prompt: str, seed: int) -> list[list[int]]:
            texts, params = [], WARM.replace(seed=seed)
            for n in (3, 12):
                with Branch.start(ctx, prompt, sampling=params) as root:
                    texts.append(speculator.generate(root, max_tokens=n).finish().tokens)
                    with root.fork() as child:
                        texts.append(speculator.generate(child, max_tokens=n).finish().tokens)
                    speculator.generate(root, max_tokens=2).finish()
                    root.rewind(root.position - 1)
                    texts.append(speculator.generate(root, max_tokens=n).finish().tokens)
                    assert speculator.explain()
                with count:
                    n_emitted[0] += 3 * n + 2
            return texts

        def plain(prompt: str, seed: int) -> list[list[int]]:
            texts, params = [], WARM.replace(seed=seed)
            for n in (3, 12):
                with Branch.start(ctx, prompt, sampling=params) as root:
                    text = [t.token for t in root.generate(2 * n + 1)]
                    texts += [text[:n], text[n : 2 * n], text[n + 1 : 2 * n + 1]]
            return texts

        jobs = [(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
        expected = [plain(*job) for job in jobs]
        for _ in range(4):
            assert together(*(partial(drafted, *job) for job in jobs)) == expected
        assert speculator.stats.num_emitted_tokens == n_emitted[0]
        assert watched.asked >= {"propose", "observe", "fork", "close"}
        gc.collect()
        speculator.forget(Branch.create(ctx))  # nothing is kept for it
        with Branch.start(ctx, "The king", sampling=WARM) as last:
            # Closes the draft states of pruned branches.
            speculator.generate(last, max_tokens=2).finish()
            speculator.forget(last)
        assert small.usage().cells_used == 0
        small.audit()


def test_model_is_tokenized_with_from_many_threads(target: lb.Model) -> None:
    texts = [f"{prompt} {i} ." for prompt in PROMPTS for i in range(50)]
    alone = [target.tokenize(text) for text in texts]

    def spell() -> object:
        return [target.tokenize(target.detokenize(tokens, special=True)) for tokens in alone]

    tokenize = partial(map, target.tokenize, texts)
    first, other, *spelled = together(lambda: [*tokenize()], lambda: [*tokenize()], spell, spell)
    assert first == alone == other
    assert spelled[0] == spelled[1]


def test_interrupts_from_many_threads_change_no_text(ctx: Context) -> None:
    """Whenever the interrupts come, a branch that continues generates the same text."""
    with Branch.start(ctx, "The king", temperature=0.9, seed=1) as branch:
        whole = [produced.token for produced in branch.generate(60)]

    def disturb() -> None:
        for _ in range(30):
            time.sleep(0.003)
            ctx.interrupt()

    threads = [threading.Thread(target=disturb) for _ in range(3)]
    branch = Branch.start(ctx, "The king", temperature=0.9, seed=1)
    for thread in threads:
        thread.start()
    n_stopped = 0
    try:
        while any(thread.is_alive() for thread in threads) or len(branch.generated_tokens) < 60:
            if len(branch.generated_tokens) == 60:  # the other threads are slow: generate it again
                branch.rewind(branch.n_prompt)
            try:
                branch.step()
            except DecodeInterruptedError:
                n_stopped += 1
    finally:
        for thread in threads:
            thread.join()
    assert n_stopped > 0
    assert branch.generated_tokens == whole
    with Branch.create(ctx) as again:
        ctx.decoder.stops.resume()
        again.prefill(branch.tokens)
        assert np.array_equal(again.logits, branch.logits)
