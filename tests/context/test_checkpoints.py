"""Checkpoints: memory whose tail cannot be dropped returns to earlier states; nothing else changes.

`test_memory_kinds.py` has the laws of every kind of memory, with and without checkpoints. The tests here
are about what checkpoints save, what they cost, and what happens without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from drafts import counting
from llama_cpp import llama_cpp as C
from random_programs import N_CELLS, N_SEQ, TEMPLATE, Alone, Program
from rounding import rounding

import llamabranch as lb
from llamabranch import Branch, Context, Engine, Request, SamplingParams
from llamabranch.context.checkpoints import Checkpoint, Checkpoints
from llamabranch.context.memory import States
from llamabranch.errors import SnapshotError

ENDLESS = {1: -np.inf}
OPTIONS: dict[str, Any] = {
    "n_ctx": 4096,
    "n_seq_max": 6,
    "n_batch": 64,
    "n_threads": 1,
    "swa_full": False,
}
KINDS = ("mamba", "rwkv7", "lfm2", "qwen35", "gemma3")
TEXT = [2 + (7 * i + i * i) % 250 for i in range(900)]


@pytest.fixture(scope="module", params=KINDS)
def ctx(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("checkpoints") / f"{request.param}.gguf"
    model = lb.Model(toys.write_toy(path, request.param, vocab="bytes"))
    with Context(model, owns_model=True, **OPTIONS) as context:
        yield context


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "ctx" in request.fixturenames:
        ctx = request.getfixturevalue("ctx")
        ctx.audit()
        ctx.kv_cache_clear()
        assert ctx.kv_cache.checkpoints.n_bytes == 0


def lfm2(folder: Path, **options: Any) -> Context:
    path = toys.write_lfm2(folder / "toy.gguf", vocab="bytes")
    return Context(lb.Model(path), owns_model=True, **{**OPTIONS, **options})


# -- the collection --------------------------------------------------------------------------------


def point(n: int, n_bytes: int = 100) -> Checkpoint:
    return Checkpoint(n, np.zeros(n_bytes, np.uint8), None)


def positions(points: Checkpoints, seq_id: int, n: int = 1000) -> list[int]:
    """Return the positions of a sequence's checkpoints."""
    ends = []
    while (checkpoint := points.find(seq_id, n)) is not None:
        ends.append(checkpoint.n_tokens)
        n = checkpoint.n_tokens - 1
    return ends[::-1]


def test_shared_checkpoints_count_once_and_stay_until_the_last_user_is_gone() -> None:
    points = Checkpoints(10_000)
    for n in (10, 20, 30):
        points.add(0, point(n))
    points.share(0, 1)
    points.add(1, point(40))
    assert (points.n_bytes, points.last(0), points.last(1), points.last(2)) == (400, 30, 40, 0)
    points.cut(0, 15)
    assert (positions(points, 0), positions(points, 1)) == ([10], [10, 20, 30, 40])
    assert points.n_bytes == 400
    points.cut(1, 0)
    assert points.n_bytes == 100
    last = points.find(0, 10)
    assert last is not None
    last.row = np.zeros(5, np.float32)
    points.thin()
    assert points.n_bytes == 120
    points.cut(0, 0)
    assert (points.n_bytes, points.find(0, 1000)) == (0, None)


def test_checkpoints_are_thinned_out_from_the_beginning_and_never_exceed_the_limit() -> None:
    points = Checkpoints(1000)
    for n in range(10, 2010, 10):
        points.add(0, point(n))
        assert points.n_bytes <= 1000
        assert points.last(0) == n
    kept = positions(points, 0, 3000)
    gaps = np.diff([0, *kept])
    assert len(kept) == 10
    assert gaps[-1] == 10
    assert gaps[0] > 10 * gaps[-1]
    assert 2 * max(gaps) < 2000  # some checkpoints of every part are kept
    points.add(1, point(7))  # another text: the last checkpoint of each text is dropped last
    assert (points.last(0), points.last(1)) == (2000, 7)
    points.add(2, point(9, 1000))
    assert (points.last(0), points.last(1), points.last(2), points.n_bytes) == (0, 0, 9, 1000)


# -- what is saved -----------------------------------------------------------------------------------


def test_a_rewind_decodes_what_follows_the_last_checkpoint(ctx: Context) -> None:
    assert ctx.capabilities.checkpoints, ctx.capabilities.checkpoints_reason
    allowed = rounding(ctx, 0.1)
    with Branch.start(ctx, TEXT, temperature=0.8, seed=1, logit_bias=ENDLESS) as branch:
        list(branch.generate(300))
        for position in (1190, 1000, 905, 700, 300):
            with counting(ctx) as counts:
                branch.rewind(position)
                row = branch.logits
            assert 0 < sum(counts) <= States.every + 64  # a prompt's come at the ends of decodes
            with counting(ctx) as counts, Branch.create(ctx) as again:
                again.prefill(branch.tokens)
                np.testing.assert_allclose(row, again.logits, atol=allowed)
            assert sum(counts) == position


def test_a_rewind_to_the_end_of_a_turn_costs_nothing_and_never_happened(ctx: Context) -> None:
    """After the prompt, after an answer, and after what was read behind it."""
    settings: dict[str, Any] = {"temperature": 0.8, "seed": 3, "logit_bias": ENDLESS}
    with Branch.start(ctx, TEXT[:100], **settings) as branch:
        first = [t.token for t in branch.generate(40)]
        branch.append(TEXT[200:250])
        rows, second = branch.logits, [t.token for t in branch.generate(40)]
        for position, expected in ((190, second), (100, first)):
            with counting(ctx) as counts:
                branch.rewind(position)
                logits = branch.logits
            assert not counts
            if position == 190:
                np.testing.assert_array_equal(logits, rows)
            assert [t.token for t in branch.generate(40)] == expected
        with branch.fork() as child:  # which has them too
            list(branch.generate(60))
            with counting(ctx) as counts:
                child.rewind(100)
                assert not counts
            assert [t.token for t in child.generate(40)] == first


def test_a_prefix_that_was_read_is_forked_from_its_checkpoint(ctx: Context) -> None:
    """The prefix cache shares it, and the engine does, from a running text."""
    with Context(ctx.model, prefix_cache=True, **OPTIONS) as cached:
        assert cached.prefix_cache is not None
        Branch.start(cached, TEXT[:600]).prune()
        with counting(cached) as counts:
            branch = Branch.start(cached, [*TEXT[:500], 9, 9, 9])
        assert sum(counts) <= 503 - 256
        with Branch.start(ctx, branch.tokens) as again:
            np.testing.assert_allclose(branch.logits, again.logits, atol=rounding(ctx, 0.1))
        branch.prune()
        cached.audit()
    with Engine(ctx) as engine:
        prompts = [[*TEXT[:600], 5], [*TEXT[:600], 6, 6]]
        requests = [Request(p, max_tokens=8, sampling=SamplingParams(seed=2)) for p in prompts]
        with counting(ctx) as counts:
            together = [r.tokens for r in engine.generate(requests)]
        n_both = sum(counts)
        alone = [engine.generate([r])[0].tokens for r in requests]
    assert [len(tokens) for tokens in together] == [len(tokens) for tokens in alone]
    assert n_both <= 601 + 602 + 2 * 8


# -- limits and failures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"checkpoint_ram": 0, "n_rs_seq": 0}, "checkpoint_ram is 0"),
        ({"checkpoint_ram": 10, "n_rs_seq": 0}, "a state takes"),
    ],
)
def test_why_there_are_no_checkpoints_is_told(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with lfm2(tmp_path, **options) as ctx:
        assert not ctx.capabilities.checkpoints
        assert reason in ctx.capabilities.checkpoints_reason
        with Branch.start(ctx, TEXT[:300]) as branch, counting(ctx) as counts:
            branch.rewind(299)
            branch.logits  # noqa: B018
            assert sum(counts) == 299


@pytest.mark.parametrize("how", ["ignored", "refused"])
def test_a_model_that_does_not_return_to_a_state_is_found_out_when_it_opens(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignored(_ctx: Any, _data: Any, n: int, *_rest: Any) -> int:
        return n if how == "ignored" else 0

    monkeypatch.setattr(C, "llama_state_seq_set_data_ext", ignored)
    with lfm2(tmp_path) as ctx:
        assert not ctx.capabilities.checkpoints
        assert ctx.capabilities.checkpoints_reason != "checkpoint_ram is 0"
        with Branch.start(ctx, TEXT[:90]) as branch:
            branch.rewind(80)
            with Branch.start(ctx, TEXT[:80]) as again:
                np.testing.assert_allclose(branch.logits, again.logits, atol=rounding(ctx))


@pytest.mark.parametrize(
    ("call", "error"),
    [("partial_state", MemoryError()), ("set_partial_state", SnapshotError("no cells"))],
    ids=["kept", "put back"],
)
def test_a_state_that_cannot_be_kept_or_put_back_is_read_again(
    call: str, error: Exception, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ctx.kv_cache
    assert isinstance(memory, States)
    max_bytes = memory.checkpoints.max_bytes

    def refuse(*_: Any) -> Any:
        raise error

    with Branch.start(ctx, TEXT[:100]) as branch:
        with monkeypatch.context() as patch, counting(ctx) as counts:
            patch.setattr(memory.handle, call, refuse)
            branch.append(TEXT[100:400])
            branch.rewind(100)
            row = branch.logits
        is_kept = call == "partial_state"  # from before
        assert sum(counts) >= (300 if is_kept else 400)
        with Branch.start(ctx, TEXT[:100]) as again:
            np.testing.assert_allclose(row, again.logits, atol=0 if is_kept else rounding(ctx, 0.1))
    memory.checkpoints.max_bytes = max_bytes


# -- any order ---------------------------------------------------------------------------------------


class Walk(Program):
    """A program that mostly grows, forks and rewinds branches, in a context with few checkpoints."""

    def __init__(self, ctx: Context, alone: Alone, seed: int, tally: Counter[str]) -> None:
        super().__init__(ctx, alone, seed, tally)
        del self.users[1:]
        (self.user,) = self.users
        user = self.user
        user.acts = [user.start, user.serve, *[user.on_a_branch] * 5, *[self.rewind] * 4]
        memory = ctx.kv_cache
        assert isinstance(memory, States)
        self.states = memory
        memory.every, memory.apart = 9, 4

    def rewind(self) -> None:
        user = self.user
        if user.branches:
            branch = user.random.choice(user.branches)
            for token in user.tokens(12):
                branch.commit(token)
            position = user.random.randint(1, branch.position)
            usable = self.states.usable(branch.seq_id, position)
            self.tally["returned"] += 0 < usable < branch.position
            branch.rewind(position)
        assert 0 <= self.states.checkpoints.n_bytes <= self.ctx.params.checkpoint_ram


@pytest.mark.parametrize("n_kept", [5, 1000])
def test_any_order_of_steps_leaves_each_text_as_it_is_alone(ctx: Context, n_kept: int) -> None:
    """``n_kept``: how many checkpoints there is room for."""
    with Branch.start(ctx, TEXT[:64]):
        size = ctx.kv_cache.checkpoints.n_bytes  # type: ignore[attr-defined]
    tight = {"n_ctx": N_CELLS, "n_seq_max": N_SEQ, "checkpoint_ram": n_kept * size}
    alone, tally = Alone(ctx, rounding(ctx, 0.1)), Counter[str]()
    for seed in range(6):
        with (
            lb.Model(ctx.model.path, chat_template=TEMPLATE) as model,
            Context(model, **{**OPTIONS, **tight}) as small,
        ):
            walk = Walk(small, alone, seed, tally)
            walk.run(40)
            assert small.closed or walk.states.checkpoints.n_bytes == 0
    assert tally["returned"] > 10 and tally["comparisons"] > 100, tally
