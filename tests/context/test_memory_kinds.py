"""The same laws for every kind of memory: whatever was done, a branch has the logits of its text alone.

Memories that cannot be cut decode again or refuse. The law is that they never give wrong logits silently.
Wrong states move logits by 0.2 and more. Rounding moves them by less than what is measured here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import together
import toys
from decodes import Decodes
from rounding import rounding

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams
from llamabranch.context.memory import Memory, NonUnified, RollingBack, States, Windowed
from llamabranch.errors import (
    CacheFullError,
    DecodeInterruptedError,
    SequencesExhaustedError,
    UnsupportedError,
)

TOKENS = [2 + (5 * i + i * i) % 200 for i in range(100)]  # beyond the window of 32
ENDLESS = {1: -np.inf}
OPTIONS: dict[str, Any] = {"n_seq_max": 6, "n_batch": 32, "n_threads": 1}
GEMMA = {"swa_full": False, "kv_type": "bf16"}
OFTEN = (7, 3)  # tokens from one checkpoint to the next, so that short texts have some

# Architecture, options, class, and whether a part of a sequence can be kept or shared.
KINDS: dict[str, tuple[str, dict[str, Any], type[Memory], bool]] = {
    "unified": ("llama", {"exact": True}, Memory, True),
    "transposed": ("llama", {"flash_attention": False}, Memory, True),
    "q8_0": ("llama", {"kv_type": "q8_0"}, Memory, True),
    "q4_1": ("llama", {"kv_type": "q4_1"}, Memory, True),
    "f32": ("llama", {"kv_type": "f32"}, Memory, True),
    "two types": ("llama", {"kv_type": "q8_0/f16"}, Memory, True),
    "non-unified": ("llama", {"kv_unified": False, "exact": True}, NonUnified, True),
    "non-unified, transposed": (
        "llama",
        {"kv_unified": False, "flash_attention": False},
        NonUnified,
        True,
    ),
    "non-unified, two types": (
        "llama",
        {"kv_unified": False, "kv_type": "q8_0/f16"},
        NonUnified,
        True,
    ),
    "window": ("gemma3", {"kv_type": "bf16"}, Windowed, True),
    "window, cells used again": ("gemma3", GEMMA, States, False),
    "window, checkpoints": ("gemma3", GEMMA, States, False),
    "recurrent": ("mamba", {}, States, False),
    "recurrent, none": ("mamba", {"checkpoint_ram": 0}, States, False),
    "recurrent, checkpoints": ("mamba", {}, States, False),
    "recurrent, rwkv": ("rwkv7", {}, States, False),
    "recurrent, rwkv, checkpoints": ("rwkv7", {}, States, False),
    "hybrid": ("lfm2", {}, RollingBack, False),
    "hybrid, nothing undone": ("lfm2", {"n_rs_seq": 0}, States, False),
    "hybrid, checkpoints": ("lfm2", {}, RollingBack, False),
    "hybrid, few checkpoints": ("lfm2", {"checkpoint_ram": 12_000}, RollingBack, False),
    "hybrid, qwen": ("qwen35", {}, RollingBack, False),
    "hybrid, qwen, nothing undone": ("qwen35", {"n_rs_seq": 0}, States, False),
    "hybrid, qwen, checkpoints": ("qwen35", {}, RollingBack, False),
}


@dataclass
class World:
    """A context of one kind of memory, in which nothing is left after a test."""

    ctx: Context
    name: str
    gives_parts: bool
    allowed: float  # in logits, for rounding

    def close(self, branch: Any, other: Any) -> None:
        np.testing.assert_allclose(branch, other, atol=self.allowed)

    def check(self, *branches: Branch) -> None:
        """Assert that each branch has the logits of its tokens read from the start, now and later."""
        self.ctx.audit()
        for branch in branches:
            for more in ([], [70]):
                for token in more:
                    branch.commit(token)
                with Branch.create(self.ctx) as again:
                    again.prefill(branch.tokens)
                    self.close(branch.logits, again.logits)
            branch.rewind(branch.position - 1)
        self.ctx.audit()


@pytest.fixture(scope="module", params=KINDS)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    architecture, options, kind, gives_parts = KINDS[request.param]
    path = tmp_path_factory.mktemp("kinds") / "toy.gguf"
    toys.write_toy(path, architecture, vocab="bytes")
    n_ctx = 512 * (6 if kind is NonUnified else 1)
    with Context(lb.Model(path), n_ctx=n_ctx, owns_model=True, **OPTIONS, **options) as ctx:
        if "checkpoints" in request.param:
            assert isinstance(ctx.kv_cache, States)
            ctx.kv_cache.every, ctx.kv_cache.apart = OFTEN
        yield World(ctx, request.param, gives_parts, rounding(ctx, 0.1))


@pytest.fixture
def world(opened: World) -> Iterator[World]:
    yield opened
    opened.ctx.audit()
    opened.ctx.kv_cache_clear()


def test_memory_is_the_one_that_fits(world: World) -> None:
    memory, kind = world.ctx.kv_cache, KINDS[world.name][2]
    assert type(memory) is kind
    assert memory.can_draft == world.ctx.capabilities.can_truncate == world.gives_parts
    assert bool(memory.spare_seq_ids) == (world.gives_parts and kind is not NonUnified)
    assert world.ctx.kv_cache.fits(4, world.ctx.sequences.count_free) == 4
    world.ctx.decode(TOKENS[:9], 0)
    assert memory.usable(0, 9) == 9
    assert memory.usable(0, 5) == (5 if world.gives_parts else 0)


# -- what is done to branches ----------------------------------------------------------------------


def rewound(w: World, folder: Path) -> Iterator[Branch]:
    branch = Branch.start(w.ctx, TOKENS[:90])
    for position in (89, 70, 45, 9, 1):
        branch.rewind(position)
        yield branch
        branch.extend(TOKENS[position : position + 3])
        yield branch
    branch.rewind(0)
    branch.prefill(TOKENS[:50])
    yield branch


def forked(w: World, folder: Path) -> Iterator[Branch]:
    """Rewinds before and after the fork point, while the parent and a sibling move on."""
    root = Branch.start(w.ctx, TOKENS[:40])
    child, sibling = root.fork_many(2)
    child.prefill(TOKENS[50:56])
    root.commit(90)
    sibling.extend(TOKENS[60:75])
    for position in (45, 38, 12, 5):
        child.rewind(position)
        yield child
        child.extend(TOKENS[position : position + 20])
        with child.fork() as twin:
            child.rewind(child.position - 2)
            yield twin
        yield child
    root.rewind(35)
    yield root
    sibling.prune()
    child.rewind(4)
    yield child
    yield root


def appended(w: World, folder: Path) -> Iterator[Branch]:
    branch = Branch.start(w.ctx, TOKENS[:7], temperature=0.8, seed=1, logit_bias=ENDLESS)
    list(branch.generate(4))
    branch.append([8, 9, 10])
    yield branch
    list(branch.generate(40))
    branch.rewind(14)
    assert branch.generated_tokens == branch.tokens[7:11]
    yield branch


def saved(w: World, folder: Path) -> Iterator[Branch]:
    """It is also loaded in another context, next to another branch, and then extended and rewound."""
    branch = Branch.start(w.ctx, TOKENS[:71], seed=3, logit_bias=ENDLESS)
    branch.save(folder / "x.branch")
    options = KINDS[w.name][1]
    with Context(w.ctx.model, n_ctx=1024, **{**OPTIONS, "n_seq_max": 2}, **options) as other:
        neighbour = Branch.start(other, TOKENS[:10], seed=4)
        away, loaded = (Branch.load(c, folder / "x.branch") for c in (other, w.ctx))
        np.testing.assert_array_equal(away.logits, branch.logits)
        neighbour.step()
        texts = [[t.token for t in b.generate(10)] for b in (branch, away, loaded)]
        assert texts[0] == texts[1] == texts[2]
        for position in (75, 70, 50, 5):
            for branch_copy in (branch, away, loaded):
                branch_copy.rewind(position)
            w.close(away.logits, branch.logits)
            yield loaded
        other.audit()


def scored(w: World, folder: Path) -> Iterator[Branch]:
    branch = Branch.start(w.ctx, TOKENS[:40])
    texts = [TOKENS[40:50], TOKENS[60:63], [5]]
    scored_texts = [branch.score(tokens) for tokens in texts]
    for tokens, scores in zip(texts, scored_texts, strict=True):
        with branch.fork() as fork:
            fork.extend(tokens)
            total = sum(score.logprob for score in scores)
            assert total == pytest.approx(fork.log_likelihood("fork"), abs=len(tokens) * w.allowed)
    yield branch
    guests = [Branch.create(w.ctx) for _ in range(5)]
    if not w.gives_parts:  # they are rated on a fork
        with pytest.raises(SequencesExhaustedError):
            branch.score([5, 6])
    assert len(branch.score([5])) == 1
    for guest in guests:
        guest.prune()
    yield branch


def refused_for_room(w: World, folder: Path) -> Iterator[Branch]:
    """A prompt that does not fit, alone and together with others."""
    ctx = w.ctx
    branch, rival = (Branch.start(ctx, TOKENS[i:] + TOKENS[:i]) for i in (0, 50))
    if not ctx.capabilities.recurrent or w.name == "hybrid":
        for more in ({}, {Branch.create(ctx): [6] * 20}):
            with pytest.raises(CacheFullError):
                together.prefill(ctx, {branch: [5] * 500, **more})
            assert (branch.position, rival.position) == (100, 100)
            yield branch
            yield rival
    rival.prune()
    branch.prefill([5])
    yield branch


ACTS = (rewound, forked, appended, saved, scored, refused_for_room)


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_text_in_company_is_the_text_alone(
    act: Callable[[World, Path], Iterator[Branch]], world: World, tmp_path: Path
) -> None:
    for branch in act(world, tmp_path):
        world.check(branch)


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("how", ["ctrl-c", "interrupt"])
@pytest.mark.parametrize("call", [0, 1, 2])
def test_no_kind_of_memory_loses_a_branch(
    call: int, how: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted branch stays right, and so do branches that share its cells or the cache."""
    ctx = world.ctx
    with Branch.create(ctx) as root, Branch.start(ctx, TOKENS[3:11]) as beside:
        root.prefill(TOKENS[:40])
        children = root.fork_many(2)
        children[0].prefill([80, 81])
        with monkeypatch.context() as patch:
            decodes = Decodes(patch)
            if how == "ctrl-c":
                decodes.after = lambda number: ctrl_c() if number == call else None
            else:
                decodes.on_call(call, ctx.interrupt)
            with pytest.raises((KeyboardInterrupt, DecodeInterruptedError)):
                children[1].prefill(TOKENS)
        # An unfinished graph would leave wrong states in sequences outside the batch.
        assert decodes.codes[call] == (
            2 if how == "interrupt" and not ctx.capabilities.recurrent else 0
        )
        assert [b.position for b in (root, *children, beside)] == [40, 42, 40, 8]
        world.check(children[1], root, children[0], beside)


def test_a_second_ctrl_c_while_memory_is_read_again_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Branch.start(world.ctx, TOKENS[:90]) as branch, branch.fork() as sibling:
        with monkeypatch.context() as patch:
            Decodes(patch).after = lambda _: ctrl_c()
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    branch.commit(90)
        assert branch.tokens == TOKENS[:90]
        world.check(branch, sibling)


# -- raw sequences ---------------------------------------------------------------------------------


def test_an_interrupted_raw_sequence_is_as_before_or_shorter(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = world.ctx
    ctx.decode(TOKENS[:10], 0)
    with monkeypatch.context() as patch:
        # In its second batch: the tokens of the first are dropped as well.
        Decodes(patch).on_call(1, ctx.interrupt)
        with pytest.raises(DecodeInterruptedError) as caught:
            ctx.decode(TOKENS, 10)
    assert caught.value.memory_changed
    is_kept = world.gives_parts or "checkpoints" in world.name  # there is one after 10 tokens
    assert ctx.kv_cache_size(0) == (10 if is_kept else 0)


@pytest.mark.parametrize("drop", [1, 10, 29, 40, 90])
def test_a_removed_tail_is_gone_or_refused(drop: int, world: World) -> None:
    ctx, kept = world.ctx, 100 - drop
    ctx.decode(TOKENS, 0)
    try:
        ctx.kv_cache_remove(0, kept)
    except UnsupportedError:
        kept = 100
    assert ctx.kv_cache_size(0) in (1, kept)  # a state counts as one cell
    ctx.decode([7], kept)
    row = ctx.logits()
    ctx.kv_cache_remove(0)
    ctx.decode([*TOKENS[:kept], 7], 0)
    world.close(row, ctx.logits())
    ctx.kv_cache_remove(0)
    ctx.decode(TOKENS[:20], 0)
    ctx.decode([60, 61], 0, 1)
    ctx.kv_seq_copy(0, 1)  # what the target held is dropped
    rows = []
    for seq_id in (0, 1):
        ctx.decode([7], 20, seq_id)
        rows.append(ctx.logits())
    world.close(*rows)


# -- the prefix cache ------------------------------------------------------------------------------


def test_cached_prefixes_are_shared_in_part_or_as_wholes(world: World) -> None:
    _, options, kind, _ = KINDS[world.name]
    if kind is NonUnified:
        pytest.skip("its cached prefixes take sequences: test_own_cells")
    all_options = {**OPTIONS, **options, "n_seq_max": 9, "n_batch": 512}
    with Context(world.ctx.model, n_ctx=512, prefix_cache=True, **all_options) as ctx:
        prefixes, warm = ctx.prefix_cache, SamplingParams(temperature=0.8, seed=42)
        assert prefixes is not None
        for n, hit in ((30, (0, 0)), (40, (30, 30)), (35, (34, 30)), (20, (19, 0))):
            before = prefixes.n_hit_tokens
            Branch.start(ctx, TOKENS[:n]).prune()
            assert prefixes.n_hit_tokens - before == hit[not world.gives_parts]
            before = prefixes.n_hit_tokens
            branch = Branch.start(ctx, [*TOKENS[:n], 7], sampling=warm)
            assert prefixes.n_hit_tokens - before == n
            with Branch.start(world.ctx, branch.tokens, sampling=warm) as again:
                world.close(branch.logits, again.logits)
            branch.prune()
            assert ctx.n_seq_free == 9
            ctx.audit()
        guests = [Branch.create(ctx) for _ in range(9)]  # cached prefixes make room for them
        with pytest.raises(SequencesExhaustedError):
            Branch.create(ctx)
        for guest in guests:
            guest.prune()
        prefixes.clear()
        assert ctx.usage().cells_used == 0
        ctx.audit()
