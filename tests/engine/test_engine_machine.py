"""Any interleaving of add, abort, step, preemption, eviction and compaction.

Each text is that of its request alone, to the token, and the accounts are clean at the end.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
import toys
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import llamabranch as lb
from llamabranch import Branch, Context, Engine, Event, Request, SamplingParams
from llamabranch.errors import CapacityError, DecodeInterruptedError

N_CELLS = 256
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.9, seed=4, repeat_penalty=1.3),
)
# By whether there is a window: flash attention uses f16.
KV_TYPE: tuple[str, str] = ("auto", "f32")
FLASH_ATTENTION: tuple[str | bool, str | bool] = ("auto", False)
GRAMMAR = "root ::= [^\\x00] root?"
STEMS = [[2 + (7 * i + 3 * k) % 200 for i in range(90)] for k in range(3)]


class EngineMachine(RuleBasedStateMachine):
    """Requests and guests in a small cache; ``alone`` says what a request must generate."""

    model: ClassVar[lb.Model]
    clean: ClassVar[Context]
    cached: ClassVar[bool]
    drafting: ClassVar[Context | None]
    unified: ClassVar[bool]
    window: ClassVar[bool]
    known: ClassVar[dict[str, list[int]]]
    tally: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.ctx = Context(
            self.model,
            n_ctx=N_CELLS if self.unified else 4 * N_CELLS,
            n_seq_max=4,
            n_batch=48,
            n_threads=1,
            batch_invariant=not self.window,
            kv_type=KV_TYPE[self.window],
            flash_attention=FLASH_ATTENTION[self.window],
            prefix_cache=self.cached,
            cache_ram=100_000 if self.cached and not self.window else 0,
            kv_unified=self.unified,
        )
        drafter = None if self.drafting is None else lb.ModelDrafter(self.drafting)
        self.engine = Engine(self.ctx, drafter, lb.SpeculativeConfig(draft_k=2), seed=5, wait_s=0)
        self.requests: dict[str, Request] = {}
        self.emitted: dict[tuple[str, int], list[int]] = {}
        self.ended: set[tuple[str, int]] = set()
        self.guests: list[Branch] = []

    def alone(self, request: Request, seed: int) -> list[int]:
        params = (request.sampling or SAMPLINGS[0]).replace(seed=seed)
        key = repr((request.prompt, request.max_tokens, params, request.grammar is None))
        if key not in self.known:
            prompt, grammar = request.prompt, request.grammar
            with Branch.start(self.clean, prompt, sampling=params, grammar=grammar) as branch:
                self.known[key] = [t.token for t in branch.generate(request.max_tokens)]
        return self.known[key]

    def hear(self, events: list[Event]) -> None:
        for event in events:
            key = event.id, event.sample
            assert key not in self.ended
            if event.emitted is not None and not event.emitted.is_stop:
                self.emitted.setdefault(key, []).append(event.emitted.token)
            if event.result is None:
                continue
            self.ended.add(key)
            result, request = event.result, self.requests[event.id]
            self.tally[result.finish_reason] += 1
            self.tally["preempted"] += result.num_preemptions
            self.tally["cached"] += result.num_cached_tokens
            assert self.emitted.get(key, []) == result.tokens
            expected = self.alone(request, result.seed)
            if result.finish_reason in ("stop", "length"):
                assert result.tokens == expected
            else:
                assert result.finish_reason in ("cancelled", "capacity"), result
                assert result.tokens == expected[: len(result.tokens)]

    @rule(
        stem=st.integers(0, 2),
        n_shared=st.integers(1, 90),
        a=st.integers(0, 99),
        n_own=st.integers(0, 20),
        most=st.integers(0, 40),
        sampling=st.integers(0, 2),
        n=st.sampled_from([1, 1, 1, 3]),
        priority=st.integers(0, 2),
        bound=st.booleans(),
        scored=st.sampled_from([None, None, None, 1]),
    )
    def add(
        self, stem: int, n_shared: int, a: int, n_own: int, most: int, sampling: int, n: int,
        priority: int, bound: bool, scored: int | None,
    ) -> None:  # fmt: skip
        prompt = STEMS[stem][:n_shared] + [2 + (a * 31 + i) % 200 for i in range(n_own)]
        request = Request(
            prompt, max_tokens=most, sampling=SAMPLINGS[sampling], n=n, priority=priority,
            grammar=GRAMMAR if bound else None, prompt_logprobs=scored,
        )  # fmt: skip
        name = self.engine.add_request(request)
        self.requests[name] = request

    @rule(n=st.integers(1, 12))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.one_step()

    def one_step(self) -> None:
        try:
            self.hear(self.engine.step())
        except DecodeInterruptedError:  # reported after the events of the interrupted step
            self.tally["interrupted"] += 1

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        self.engine.abort(str(which % len(self.requests)))

    @precondition(lambda self: self.engine.has_unfinished())
    @rule()
    def interrupt(self) -> None:
        self.ctx.interrupt()
        self.one_step()
        self.ctx.decoder.handle.resume()

    @rule(a=st.integers(0, 99), n=st.integers(1, 120), keep=st.booleans())
    def visit(self, a: int, n: int, keep: bool) -> None:
        """A guest takes cells and a sequence, for a while or for ever."""
        try:
            guest = Branch.start(self.ctx, [2 + (a + i * i) % 200 for i in range(n)])
        except CapacityError:
            self.tally["full"] += 1
            return
        if keep and len(self.guests) < 2:
            self.guests.append(guest)
        else:
            guest.prune()

    @precondition(lambda self: self.guests)
    @rule()
    def leave(self) -> None:
        self.guests.pop(0).prune()

    @rule(n=st.integers(1, 200))
    def reclaim(self, n: int) -> None:
        """The cache is compacted, and texts of the prefix cache are evicted."""
        with self.ctx.lock:
            if self.ctx.prefix_cache is not None:
                if self.unified:
                    self.ctx.prefix_cache.evict(n)
                else:
                    self.ctx.prefix_cache.evict_text()
            assert self.ctx.compact()
            self.tally["compacted"] += 1

    @invariant()
    def check(self) -> None:
        self.ctx.audit()
        self.ctx.decoder.read_s = 1.0  # what is saved in host memory is always worth restoring
        usage = self.ctx.usage()
        assert usage.in_order
        total = usage.cells_used + usage.cells_cached + usage.cells_reserved
        assert total <= usage.cells_total
        if not self.unified:
            assert (usage.cells_shared, usage.cells_reserved) == (0, 0)

    def teardown(self) -> None:
        try:
            while self.guests:
                self.guests.pop().prune()
            self.hear(self.engine.close(drain=True))
            texts = {(name, i) for name, r in self.requests.items() for i in range(r.n)}
            assert self.ended == texts
            assert self.ctx.usage().cells_used == 0
            assert self.ctx.n_seq_free == 4
            if self.ctx.prefix_cache is not None:
                self.ctx.prefix_cache.clear()
                self.tally["restored"] += self.ctx.prefix_cache.n_restored
            usage = self.ctx.usage()
            assert (usage.cells_cached, usage.cells_reserved) == (0, 0)
            self.ctx.audit()
            if self.drafting is not None:
                assert self.drafting.usage().cells_used == 0
        finally:
            self.ctx.close()


@pytest.mark.parametrize(
    "which", ["plain", "cached", "drafted", "own cells", "window", "window drafted"]
)
def test_every_text_is_that_of_its_request_alone(which: str) -> None:
    """A window is 32 tokens: prompts, texts and what is kept of them are longer.

    Its memory is not batch-invariant, but in f32 all roundings are far below what changes a draw.
    """
    window = which.startswith("window")
    with tempfile.TemporaryDirectory() as folder:
        write = toys.write_gemma3 if window else toys.write_llama
        path = write(
            Path(folder) / "tiny.gguf", vocab="bytes", weights="f32" if window else "q8_0",
            n_layer=2, n_embd=32, n_head=1, n_ff=32,
        )  # fmt: skip
        with (
            lb.Model(path) as model,
            Context(
                model,
                n_ctx=N_CELLS,
                n_seq_max=1,
                n_threads=1,
                kv_type=KV_TYPE[window],
                flash_attention=FLASH_ATTENTION[window],
            ) as clean,
            Context(model, n_ctx=N_CELLS, n_seq_max=4, n_threads=1) as draft_ctx,
        ):
            members = {
                "model": model,
                "clean": clean,
                "cached": which != "plain",
                "drafting": draft_ctx if which.endswith("drafted") else None,
                "unified": which != "own cells",
                "window": window,
                "known": {},
                "tally": Counter(),
            }
            kind = type("Machine", (EngineMachine,), members)
            run_state_machine_as_test(
                kind,
                settings=settings(
                    max_examples=10,
                    stateful_step_count=40,
                    derandomize=True,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                    phases=(Phase.generate,),
                ),
            )
            tally: Counter[str] = members["tally"]  # type: ignore[assignment]
            expected = {"length", "cancelled", "interrupted", "compacted"}
            if which in ("plain", "cached"):
                expected |= {"preempted", "full"}
            assert expected <= {name for name, n in tally.items() if n}, tally
            if which != "plain":
                assert tally["cached"] > 0, tally
                assert (tally["restored"] > 0) != window, tally
