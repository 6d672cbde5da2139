"""Contexts in which each sequence has cells of its own (``kv_unified=False``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import together
import toys

import llamabranch as lb
from llamabranch import Branch, Context, Engine, Request, SamplingParams
from llamabranch.errors import CacheFullError

WARM = SamplingParams(temperature=0.8, seed=42)
PROMPTS = ["Once upon a time", "The wolf", "In the forest there stood", "A king had a daughter"]


@pytest.fixture
def own(target: lb.Model) -> Iterator[Context]:
    """Four sequences with 256 cells each."""
    with Context(
        target, n_ctx=1024, n_seq_max=4, n_threads=1, kv_unified=False, exact=True
    ) as context:
        yield context
        context.audit()


def test_cells_are_divided_among_the_sequences(own: Context, target: lb.Model) -> None:
    assert (own.n_ctx, own.n_ctx_seq) == (1024, 256)
    assert not own.capabilities.can_share
    assert own.capabilities.can_truncate
    usage = own.usage()
    assert (usage.cells_total, usage.cells_per_sequence) == (1024, 256)
    own.decode([5] * 256, 0, 0)
    with pytest.raises(CacheFullError, match="each has 256 cells of its own"):
        own.decode([5], 256, 0)
    own.decode([5], 0, 1)  # the others have theirs
    with Context(target, n_seq_max=2, n_threads=1, kv_unified=False, exact=True) as default:
        # Each has what the model was trained for.
        assert (default.n_ctx_seq, default.n_ctx) == (1024, 2048)
    with Context(
        target, n_ctx=256, n_seq_max=1, n_threads=1, kv_unified=False, exact=True
    ) as single:
        assert single.capabilities.can_share and single.params.kv_unified


def test_auto_divides_the_memory_where_it_can_be(target: lb.Model, tmp_path: Path) -> None:
    options: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "kv_unified": "auto"}
    with Context(target, n_seq_max=4, **options) as ctx:
        assert (ctx.params.kv_unified, ctx.n_ctx, ctx.n_ctx_seq) == (False, 1024, 256)
    for n_seq_max, n_ubatch in ((1, 512), (4, 2)):
        with Context(target, n_seq_max=n_seq_max, n_ubatch=n_ubatch, **options) as ctx:
            assert ctx.params.kv_unified and ctx.n_ctx_seq == 1024
    for architecture in ("mamba", "gemma3"):
        path = toys.write_toy(tmp_path / f"{architecture}.gguf", architecture)
        with lb.Model(path) as model, Context(model, n_seq_max=4, **options) as ctx:
            assert ctx.params.kv_unified and ctx.capabilities.can_share


def test_forks_copy_and_generate_the_same_to_the_bit(own: Context, ctx: Context) -> None:
    outcomes = []
    for context in (own, ctx):
        root = Branch.start(context, "Once upon a time there was", sampling=WARM)
        forks = root.fork_many(3)
        for i, fork in enumerate(forks):
            fork.reseed(i)
        for i in range(30):  # the order within a decode does not matter
            together.step(context, forks if i % 3 else forks[::-1])
        forks[0].rewind(20)
        late = [t.token for t in forks[0].generate(12)]
        outcomes.append(([fork.tokens for fork in forks], late, [fork.logits for fork in forks]))
        lengths = sum(branch.position for branch in (root, *forks))
        usage = context.usage()
        if context is own:
            assert (usage.cells_used, usage.cells_shared, usage.cells_reserved) == (lengths, 0, 0)
            assert usage.in_order
    assert outcomes[0][:2] == outcomes[1][:2]
    for mine, theirs in zip(outcomes[0][2], outcomes[1][2], strict=True):
        assert np.array_equal(mine, theirs)


def test_raw_calls_at_random_leave_the_accounts_in_step(own: Context) -> None:
    rng = np.random.default_rng(7)
    for _ in range(200):
        seq, other = (int(x) for x in rng.choice(4, 2, replace=False))
        end = own.kv_cache_size(seq)
        match int(rng.integers(4)):
            case 0 | 1 if end < 200:
                own.decode(rng.integers(2, 90, int(rng.integers(1, 40))).tolist(), end, seq)
            case 2:
                own.kv_cache_remove(seq, int(rng.integers(0, end + 1)))
            case _:
                own.kv_seq_copy(seq, other)
        own.audit()
    assert own.usage().in_order
    own.kv_cache_clear()
    own.decode([5] * 20, 0, 0)
    own.kv_cache_remove(0, 5, 8)
    own.kv_seq_copy(0, 1)
    own.kv_cache_remove(0)
    assert not own.usage().in_order  # a hole in the middle
    own.kv_cache_remove(1)
    assert own.usage().in_order


def test_snapshots_fit_both_layouts(own: Context, ctx: Context, tmp_path: Path) -> None:
    with Branch.start(ctx, "The wolf and the seven", sampling=WARM) as branch:
        branch.save(tmp_path / "unified")
        text = [t.token for t in branch.generate(10)]
    guard = Branch.start(own, "Once")  # so that it is restored into another sequence than the first
    for context, name in ((own, "unified"), (ctx, "own")):
        branch = Branch.load(context, tmp_path / name)
        branch.save(tmp_path / "own")
        assert [t.token for t in branch.generate(10)] == text
        branch.prune()
    guard.prune()


# -- the engine ------------------------------------------------------------------------------------


def alone(ctx: Context, request: Request, seed: int) -> list[int]:
    params = (request.sampling or SamplingParams()).replace(seed=seed)
    with Branch.start(ctx, request.prompt, sampling=params) as branch:
        return [t.token for t in branch.generate(request.max_tokens)]


def test_text_that_fills_its_sequence_ends_alone(own: Context, other_ctx: Context) -> None:
    endless = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(own.model.eog_tokens, -1e9))
    long = Request([5, 6, 7, 8] * 60, id="long", max_tokens=100, sampling=endless)
    short = Request("The wolf", id="short", max_tokens=60, sampling=endless)
    whole = Request([5] * 300, id="whole")
    results = {result.id: result for result in Engine(own, seed=1).generate([long, short, whole])}
    assert results["whole"].finish_reason == "capacity"
    assert results["long"].finish_reason == "capacity"
    assert len(results["long"].tokens) == 256 - 240 + 1  # the last one is not decoded
    assert results["short"].tokens == alone(other_ctx, short, results["short"].seed)
    assert results["short"].num_preemptions == 0


@pytest.fixture
def kept(target: lb.Model) -> Iterator[Context]:
    """Three sequences of 256 cells with a prefix cache."""
    with Context(
        target, n_ctx=768, n_seq_max=3, n_threads=1, kv_unified=False, prefix_cache=True,
        exact=True,
    ) as context:  # fmt: skip
        yield context
        context.audit()


def test_kept_texts_take_sequences_until_others_need_them(
    kept: Context, other_ctx: Context
) -> None:
    assert kept.prefix_cache is not None
    engine = Engine(kept, seed=1)
    rules = "Once upon a time there was a king who had three clever daughters. "
    for i in range(8):
        request = Request(f"{rules}{PROMPTS[i % 4]}", max_tokens=6, sampling=WARM)
        (result,) = engine.generate([request])
        assert result.tokens == alone(other_ctx, request, result.seed)
        n_rules = len(kept.tokenize(rules)) - 1  # the last one is another token before a word
        assert result.cached >= (n_rules if i else 0)
    requests = [Request(p, max_tokens=9, sampling=WARM) for p in PROMPTS]  # on all sequences
    for request, result in zip(requests, engine.generate(requests), strict=True):
        assert result.tokens == alone(other_ctx, request, result.seed)
    assert kept.n_seq_free == 3
    guests = [Branch.start(kept, "Once") for _ in range(3)]  # they take them
    assert len(kept.prefix_cache) == 0
    for guest in guests:
        guest.prune()
    kept.prefix_cache.clear()
    assert kept.usage().cells_cached == 0


def test_chats_on_all_sequences_go_on_in_their_own(kept: Context, other_ctx: Context) -> None:
    """Finished texts keep their sequences while all are taken."""
    assert kept.prefix_cache is not None
    engine = Engine(kept, seed=1)
    chats = [kept.tokenize(f"{name} had a daughter who was proud, and ") for name in "ABC"]
    for turn in range(4):
        requests = [Request(text, max_tokens=8, sampling=WARM) for text in chats]
        n_read = len(chats[0]) - 3 if turn else 0  # but the new ones, and the last one drawn
        for i, result in enumerate(engine.generate(requests)):
            assert result.tokens == alone(other_ctx, requests[i], result.seed)
            assert result.cached == n_read
            chats[i] += [*result.tokens, 20, 21]
        assert (len(kept.prefix_cache), kept.usage().cells_used, kept.n_seq_free) == (3, 0, 3)
