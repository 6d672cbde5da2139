"""Rolling back: memory with states verifies drafts in place, and texts are the same as without.

`test_memory_kinds.py` has the laws of every kind of memory, this one among them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from drafts import Knowing, counting
from rounding import rounding

import llamabranch as lb
from llamabranch import Branch, Context, Engine, Request, SamplingParams
from llamabranch.context import opening
from llamabranch.context.memory import RollingBack, States
from llamabranch.context.runner import Batch, decode_run
from llamabranch.native import ContextHandle
from llamabranch.speculative import SpeculativeConfig

ARCHITECTURES = ("lfm2", "qwen35", "nemotron_h")
OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 5, "n_threads": 1}
TEXT = [2 + (7 * i + i * i) % 250 for i in range(400)]
FIXED = SpeculativeConfig(draft_k=4, rule="seeded")
ENDLESS = {1: -np.inf}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("rollback") / f"{request.param}.gguf"
    with lb.Model(toys.write_toy(path, request.param, vocab="bytes")) as opened:
        yield opened


@pytest.fixture
def ctx(model: lb.Model) -> Iterator[Context]:
    with Context(model, **OPTIONS) as context:
        yield context
        context.audit()


def knowing(text: Sequence[int], seed: int) -> Knowing:
    """Return a drafter that knows the coming text, with errors at places that the seed chooses."""
    rng = random.Random(seed)

    def drafted(tokens: Sequence[int], limit: int) -> list[int]:
        following = text[len(tokens) : len(tokens) + rng.randint(0, limit)]
        return [t if rng.random() < 0.7 else rng.randrange(2, 250) for t in following]

    return Knowing(drafted)


def plain(ctx: Context, seed: int, n: int = 60) -> list[int]:
    params = SamplingParams(temperature=0.9, seed=seed, logit_bias=ENDLESS)
    with Branch.start(ctx, TEXT[:30], sampling=params) as branch:
        branch.generate(max_tokens=n).finish()
        return branch.tokens


@pytest.mark.parametrize("seed", range(4))
def test_texts_with_drafts_are_those_without(model: lb.Model, ctx: Context, seed: int) -> None:
    expected = plain(ctx, seed)
    params = SamplingParams(temperature=0.9, seed=seed, logit_bias=ENDLESS)
    with Context(model, **OPTIONS, n_rs_seq=0) as without:
        assert type(without.kv_cache) is States
        for context in (ctx, without):
            drafter = knowing(expected, seed)
            with Branch.start(context, TEXT[:30], sampling=params) as branch:
                with counting(context) as counts:
                    generation = branch.generate(
                        max_tokens=60, drafter=drafter, config=FIXED
                    ).finish()
                assert branch.tokens == expected
                assert generation.stats.num_draft_tokens > generation.stats.num_accepted_tokens > 10
                n_rounds = generation.stats.num_drafts + generation.stats.num_plain_steps
                if context is ctx:  # nothing is decoded twice
                    assert len(counts) <= n_rounds + 1
                else:
                    assert len(counts) > n_rounds


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_done_logits_are_those_of_the_tokens(
    model: lb.Model, ctx: Context, seed: int
) -> None:
    """Decodes of one and of several sequences, cuts, forks, drops. Each gives what it gives alone."""
    rng, memory = random.Random(seed), ctx.kv_cache
    assert isinstance(memory, RollingBack)
    memory.every, memory.apart = 16, 4
    allowed = rounding(ctx, 0.15)
    texts: dict[int, list[int]] = {}
    n_undone = 0
    for _ in range(60):
        act = rng.choice(["one", "one", "one", "many", "cut", "cut", "fork", "drop"])
        if act == "one" or not texts:
            seq = rng.randrange(4)
            new = [rng.randrange(2, 250) for _ in range(rng.randint(1, 7))]
            decode_run(ctx.decoder, new, seq, "none")
            texts.setdefault(seq, []).extend(new)
        elif act == "many":
            batch = Batch()
            for seq in rng.sample(sorted(texts), rng.randint(1, len(texts))):
                new = [rng.randrange(2, 250) for _ in range(rng.randint(1, 5))]
                batch.add(seq, new, "none")
                texts[seq] += new
            batch.decode(ctx.decoder)
        elif act == "cut":
            seq = rng.choice(sorted(texts))
            n = max(1, len(texts[seq]) - rng.randint(1, 6))
            n_left = memory.cut(seq, n)
            n_undone += n_left == n
            texts[seq] = texts[seq][:n_left]
            if not n_left:
                del texts[seq]
        elif act == "fork":
            source, target = rng.choice(sorted(texts)), rng.randrange(4)
            if source != target:
                n_left = memory.fork(source, target)
                assert n_left == len(texts[source])
                texts[target] = texts[source][:]
        else:
            seq = rng.choice(sorted(texts))
            memory.drop(seq, 0)
            del texts[seq]
        ctx.audit()
    assert n_undone > 3
    for seq, tokens in sorted(texts.items()):
        logits = decode_run(ctx.decoder, [77], seq, "last")[0].array.copy()
        memory.drop(4, 0)
        decode_run(ctx.decoder, tokens, 4, "none")
        expected = decode_run(ctx.decoder, [77], 4, "last")[0].array
        np.testing.assert_allclose(logits, expected, atol=allowed)
    memory.clear()


def test_a_text_of_an_engine_is_drafted_in_place(ctx: Context) -> None:
    params = SamplingParams(temperature=0.9, logit_bias=ENDLESS)
    prompt = TEXT[:12] * 4
    engine = Engine(ctx, lb.SuffixDrafter(), SpeculativeConfig(draft_k=4))
    n_drafted = 0
    for seed in (1, 2, 3):
        request = Request(prompt, max_tokens=40, sampling=params.replace(seed=seed))
        (result,) = engine.generate([request])
        n_drafted += result.stats.num_draft_tokens
        with Branch.start(ctx, prompt, sampling=params.replace(seed=seed)) as branch:
            branch.generate(max_tokens=40).finish()
            assert result.tokens == branch.tokens[len(prompt) :]
    assert n_drafted > 0


def test_a_snapshot_goes_between_contexts_that_roll_back_and_not(
    model: lb.Model, ctx: Context, tmp_path: Path
) -> None:
    with Context(model, **OPTIONS, n_rs_seq=0) as without:
        for i, (source, other) in enumerate([(ctx, without), (without, ctx)]):
            path = tmp_path / f"{i}.branch"
            with Branch.start(source, TEXT[:50]) as branch:
                expected = branch.logits.copy()
                branch.save(path)
            with Branch.load(other, path) as loaded:
                loaded.commit(TEXT[50])
                with Branch.start(other, TEXT[:51]) as again:
                    np.testing.assert_allclose(loaded.logits, again.logits, atol=rounding(other))
            assert np.isfinite(expected).all()


def test_what_it_costs_is_told(model: lb.Model, ctx: Context) -> None:
    capabilities = ctx.capabilities
    assert capabilities.rollback == 8
    assert capabilities.rollback_bytes == 8 * capabilities.state_bytes > 0
    assert "8 tokens were undone" in capabilities.rollback_reason
    with Context(model, **OPTIONS, n_rs_seq=3) as context:
        assert context.capabilities.rollback == 3
    bad: Any
    for bad in (-1, 65, 1.5, "many"):
        with pytest.raises(lb.ConfigError, match="n_rs_seq"):
            Context(model, **OPTIONS, n_rs_seq=bad)


def test_what_llama_cpp_would_abort_on_is_refused(model: lb.Model) -> None:
    small: dict[str, Any] = {**OPTIONS, "n_batch": 6}
    with pytest.raises(lb.ConfigError, match="n_ubatch"):
        Context(model, **small, n_rs_seq=5)
    cases: list[tuple[dict[str, Any], int]]
    cases = [({}, 4), ({"n_ubatch": 5}, 0), ({"n_rs_seq": 2, "n_ubatch": 5}, 2)]
    for options, expected in cases:
        with Context(model, **small, **options) as context:
            assert context.capabilities.rollback == expected
            for seq in range(5):
                context.decode(TEXT[:20], 0, seq_id=seq)
            context.audit()


def test_states_that_do_not_fit_are_left_out(
    model: lb.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Context(model, **OPTIONS) as context:
        n_bytes = context.capabilities.state_bytes * 5
    for room, expected in ((8 * 8 * n_bytes, 8), (8 * 5 * n_bytes, 4), (8 * 3 * n_bytes, 0)):
        monkeypatch.setattr(opening, "memory_bytes", lambda room=room: room)
        with Context(model, **OPTIONS) as context:
            assert context.capabilities.rollback == expected


def test_a_model_that_only_claims_to_roll_back_does_not(
    model: lb.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = ContextHandle.remove

    def keeps_one_too_many(self: ContextHandle, seq_id: int, start: int, end: int) -> bool:
        return remove(self, seq_id, start + (start > 1 and end == -1), end)

    monkeypatch.setattr(ContextHandle, "remove", keeps_one_too_many)
    with Context(model, **OPTIONS) as context:
        capabilities = context.capabilities
        assert (capabilities.rollback, type(context.kv_cache)) == (0, States)
        assert "undone" in capabilities.rollback_reason


def test_other_architectures_say_that_they_cannot(tmp_path: Path) -> None:
    path = toys.write_toy(tmp_path / "mamba.gguf", "mamba", vocab="bytes")
    with Context(lb.Model(path), owns_model=True, **OPTIONS) as context:
        assert context.capabilities.rollback == 0
        assert "mamba" in context.capabilities.rollback_reason
    path = toys.write_toy(tmp_path / "llama.gguf", "llama", vocab="bytes")
    with Context(lb.Model(path), owns_model=True, **OPTIONS, n_rs_seq=4) as context:
        assert context.capabilities.rollback == 0
        assert "can be dropped" in context.capabilities.rollback_reason
