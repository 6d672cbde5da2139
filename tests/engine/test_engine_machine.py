"""Any interleaving of add, abort, step, preemption, eviction and compaction.

Each text equals that of its request alone, to the token, and so do the scores of its prompt. At the end
nothing is left.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import toys

import llamabranch as lb
from llamabranch import Branch, Context, Engine, Event, Request, SamplingParams
from llamabranch.context.logits import TokenScore
from llamabranch.errors import CapacityError, DecodeInterruptedError

N_CELLS = 256
N_RUNS, N_STEPS = 10, 40
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.9, seed=4, repeat_penalty=1.3),
)
# By whether there is a window; flash attention uses f16.
OPTIONS: tuple[dict[str, Any], dict[str, Any]] = (
    {"exact": True},
    {"exact": False, "kv_type": "f32", "flash_attention": False},
)
GRAMMAR = "root ::= [^\\x00] root?"


def no_letters(text: str) -> bool:
    """Return whether a text has no small letters, about every tenth character of these models."""
    return not any(map(str.islower, text))


RULES: tuple[dict[str, Any], ...] = (  # that a text follows
    {}, {"grammar": GRAMMAR}, {"grammar": GRAMMAR}, {"constraint": no_letters},
    {"min_tokens": 20},
)  # fmt: skip
STEMS = [[2 + (7 * i + 3 * k) % 200 for i in range(90)] for k in range(3)]


@dataclass
class World:
    """Shared by all runs; ``clean`` tells what a request must generate."""

    model: lb.Model
    clean: Context
    drafting: Context | None
    cached: bool
    unified: bool
    window: bool
    known: dict[str, list[int]]
    tally: Counter[str]

    def alone(self, request: Request, seed: int) -> list[int]:
        params = (request.sampling or SAMPLINGS[0]).replace(seed=seed)
        prompt, grammar, constraint = request.prompt, request.grammar, request.constraint
        n, least = request.max_tokens or 0, request.min_tokens
        key = repr((prompt, n, least, params, grammar is None, constraint is None))
        if key not in self.known:
            with Branch.start(self.clean, prompt, sampling=params, grammar=grammar) as branch:
                if least:
                    ends = dict.fromkeys(self.model.eog_tokens, -math.inf)
                    branch.resample(params.replace(logit_bias=ends))
                    branch.generate(min(n, least)).finish()
                    branch.resample(params)
                branch.generate(max(0, n - least), constraint=constraint).finish()
                self.known[key] = branch.generated_tokens
        return self.known[key]

    def scores(self, prompt: Any) -> list[TokenScore | None]:
        with Branch.start(self.clean, prompt[:1]) as branch:
            return [None, *branch.score(prompt[1:], top=1)] if prompt[1:] else [None]


class Run:
    """Requests and guests in a small cache."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.tally = world.tally
        self.draw = Random(seed).randint
        self.ctx = Context(
            world.model, n_ctx=N_CELLS if world.unified else 4 * N_CELLS, n_seq_max=4, n_batch=48,
            n_threads=1, **OPTIONS[world.window], prefix_cache=world.cached, kv_unified=world.unified,
        )  # fmt: skip
        drafter = None if world.drafting is None else lb.ModelDrafter(world.drafting)
        self.most = 4 if seed % 5 else 2
        config = lb.SpeculativeConfig(draft_k=2)
        self.engine = Engine(self.ctx, drafter, config, seed=5, wait_s=0, parallel=self.most)
        self.requests: dict[str, Request] = {}
        self.emitted: dict[tuple[str, int], list[int]] = {}
        self.ended: set[tuple[str, int]] = set()
        self.guests: list[Branch] = []

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
            self.tally["cached"] += result.cached
            assert self.emitted.get(key, []) == result.tokens
            expected = self.world.alone(request, result.seed)
            if result.finish_reason in ("stop", "length"):
                assert result.tokens == expected
                if request.prompt_logprobs is not None and not self.world.window:
                    assert result.prompt_logprobs == self.world.scores(request.prompt)
                    self.tally["rated"] += 1
            else:
                assert result.finish_reason in ("cancelled", "capacity"), result
                if result.finish_reason == "capacity":
                    assert isinstance(result.error, CapacityError) and result.error.hint
                assert result.tokens == expected[: len(result.tokens)]

    # -- what is done ----------------------------------------------------------------------------------

    def add(self) -> None:
        draw = self.draw
        stem, a = STEMS[draw(0, 2)], draw(0, 99)
        prompt = stem[: draw(1, 90)] + [2 + (a * 31 + i) % 200 for i in range(draw(0, 20))]
        sampling, rule = SAMPLINGS[draw(0, 2)], RULES[draw(0, 4)]
        if "min_tokens" in rule:  # it ends as soon as it may
            ends = dict.fromkeys(self.ctx.model.eog_tokens, 1e9)
            sampling = sampling.replace(logit_bias=ends)
        request = Request(
            prompt, max_tokens=draw(0, 90), sampling=sampling, n=(1, 1, 1, 3)[draw(0, 3)],
            priority=draw(0, 2), prompt_logprobs=None if draw(0, 3) else 1, **rule,
        )  # fmt: skip
        self.requests[self.engine.add_request(request)] = request

    def step(self) -> None:
        for _ in range(self.draw(1, 12)):
            self.one_step()

    def one_step(self) -> None:
        try:
            events = self.engine.step()
            running = {(event.id, event.sample) for event in events if event.emitted is not None}
            assert len(running) <= self.most
            self.tally["in parallel"] += len(running) == self.most
            self.hear(events)
        except DecodeInterruptedError:  # reported after the events of the interrupted step
            self.tally["interrupted"] += 1

    def abort(self) -> None:
        self.engine.abort(str(self.draw(0, len(self.requests))))

    def interrupt(self) -> None:
        if self.engine.has_unfinished():
            self.ctx.interrupt()
            self.one_step()
            self.ctx.decoder.stops.resume()

    def visit(self) -> None:
        """A guest takes cells and a sequence, for a while or for ever."""
        a, n = self.draw(0, 99), self.draw(1, 250)
        try:
            guest = Branch.start(self.ctx, [2 + (a + i * i) % 200 for i in range(n)])
        except CapacityError:
            self.tally["full"] += 1
            return
        if self.draw(0, 1) and len(self.guests) < 2:
            self.guests.append(guest)
        else:
            guest.prune()

    def leave(self) -> None:
        if self.guests:
            self.guests.pop(0).prune()

    def reclaim(self) -> None:
        """The cache is compacted, and texts of the prefix cache are evicted."""
        with self.ctx.lock:
            if self.ctx.prefix_cache is not None:
                if self.world.unified:
                    self.ctx.prefix_cache.evict(self.draw(1, 200))
                else:
                    self.ctx.prefix_cache.evict_text()
            # A window loses cells, so that memory is not compacted.
            assert self.ctx.kv_cache.compact() == (self.world.unified and not self.world.window)
            self.tally["compacted"] += 1

    def act(self) -> None:
        """Do one of these, mostly adding and stepping, and check the accounting."""
        acts = (
            self.add, self.add, self.add, self.step, self.step, self.step, self.abort, self.interrupt,
            self.visit, self.leave, self.reclaim,
        )  # fmt: skip
        acts[self.draw(0, len(acts) - 1)]()
        self.ctx.audit()
        usage = self.ctx.usage()
        assert usage.in_order
        total = usage.cells_used + usage.cells_cached + usage.cells_reserved
        assert total <= usage.cells_total
        if not self.world.unified:
            assert (usage.cells_shared, usage.cells_reserved) == (0, 0)

    def finish(self) -> None:
        while self.guests:
            self.guests.pop().prune()
        self.hear(self.engine.close(drain=True))
        assert self.ended == {(name, i) for name, r in self.requests.items() for i in range(r.n)}
        assert (self.ctx.usage().cells_used, self.ctx.n_seq_free) == (0, 4)
        if self.ctx.prefix_cache is not None:
            self.ctx.prefix_cache.clear()
        usage = self.ctx.usage()
        assert (usage.cells_cached, usage.cells_reserved) == (0, 0)
        self.ctx.audit()
        if self.world.drafting is not None:
            assert self.world.drafting.usage().cells_used == 0


@pytest.mark.parametrize(
    "which", ["plain", "cached", "drafted", "own cells", "window", "window drafted"]
)
def test_every_text_is_that_of_its_request_alone(which: str, tmp_path: Path) -> None:
    """The window has 32 tokens; prompts, texts and cached prefixes are longer.

    This memory is not exact, but in f32 rounding is far too small to change a draw.
    """
    window = which.startswith("window")
    write = toys.write_gemma3 if window else toys.write_llama
    path = write(
        tmp_path / "tiny.gguf", vocab="bytes", weights="f32" if window else "q8_0",
        n_layer=2, n_embd=32, n_head=1, n_ff=32,
    )  # fmt: skip
    tally: Counter[str] = Counter()
    with (
        lb.Model(path) as model,
        Context(model, n_ctx=N_CELLS, n_seq_max=1, n_threads=1, **OPTIONS[window]) as clean,
        Context(model, n_ctx=N_CELLS, n_seq_max=4, n_threads=1) as draft_ctx,
    ):
        world = World(
            model, clean, draft_ctx if which.endswith("drafted") else None, which != "plain",
            which != "own cells", window, {}, tally,
        )  # fmt: skip
        for seed in range(N_RUNS):
            run = Run(world, seed)
            with run.ctx:
                for _ in range(N_STEPS):
                    run.act()
                run.finish()
    expected = {"length", "cancelled", "interrupted", "compacted", "in parallel"}
    expected |= set() if window else {"rated"}
    if which in ("plain", "cached"):
        expected |= {"preempted", "full", "capacity"}
    assert expected <= {name for name, n in tally.items() if n}, tally
    if which != "plain":
        assert tally["cached"] > 0, tally
