"""Rolling back: memory with states verifies drafts in place, also when several texts share decodes.

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
from decodes import hooked
from drafts import Knowing, counting

import llamabranch as lb
from llamabranch import Branch, Context, Engine, Request, SamplingParams
from llamabranch.context import opening
from llamabranch.context.memory import RollingBack, States
from llamabranch.context.runner import Batch, decode_run
from llamabranch.errors import DecodeError
from llamabranch.generation.verify import RoundTrace
from llamabranch.native.context import ContextHandle
from llamabranch.speculative import SpeculativeConfig

OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 5, "n_threads": 1}
# With weights of float32 a wrong state moves logits 100 times as much as rounding does.
EXACT: dict[str, Any] = {**OPTIONS, "kv_type": "f32", "exact": False}
ALLOWED = 0.01
TEXT = [2 + (7 * i + i * i) % 250 for i in range(60)]
FIXED = SpeculativeConfig(draft_k=4, rule="seeded")
WARM = SamplingParams(temperature=0.9, logit_bias={1: -np.inf})


@pytest.fixture(scope="module", params=["lfm2", "qwen35", "nemotron_h"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("rollback") / f"{request.param}.gguf"
    with lb.Model(toys.write_toy(path, request.param, vocab="bytes", weights="f32")) as opened:
        yield opened


@pytest.fixture(params=[512 << 20, 0], ids=["checkpoints", "no checkpoints"])
def ctx(model: lb.Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    with Context(model, checkpoint_ram=request.param, n_rs_seq=4, **EXACT) as context:
        assert type(context.kv_cache) is RollingBack
        yield context
        context.audit()


def knowing(texts: Sequence[list[int]], seed: int = 1) -> Knowing:
    """Return a drafter that knows the coming texts; its drafts have several lengths and some errors."""
    rng = random.Random(seed)

    def drafted(tokens: Sequence[int], limit: int) -> list[int]:
        n = len(tokens)
        known = next((text for text in texts if text[:n] == list(tokens)), list(tokens))
        following = known[n : n + rng.randint(min(1, limit), min(4, limit))]
        return [token if rng.random() < 0.8 else 99 for token in following]

    return Knowing(drafted)


def plain(ctx: Context, prompt: list[int], sampling: SamplingParams, n: int) -> list[int]:
    with Branch.start(ctx, prompt, sampling=sampling) as branch:
        branch.generate(max_tokens=n).finish()
        return branch.tokens


def check(ctx: Context, texts: dict[int, list[int]]) -> None:
    """Assert that each sequence continues as its tokens do in a sequence of their own."""
    for seq_id, tokens in sorted(texts.items()):
        logits = decode_run(ctx.decoder, [77], seq_id, "last")[0].array.copy()
        ctx.kv_cache.drop(4, 0)
        decode_run(ctx.decoder, [*tokens, 77][:-1], 4, "none")
        expected = decode_run(ctx.decoder, [77], 4, "last")[0].array
        np.testing.assert_allclose(logits, expected, atol=ALLOWED)
    ctx.kv_cache.clear()


# -- texts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_texts_with_drafts_are_those_without(model: lb.Model, ctx: Context, seed: int) -> None:
    """Snapshots go between contexts that roll back and others, too."""
    sampling = WARM.replace(seed=seed)
    expected = plain(ctx, TEXT[:30], sampling, 60)
    with Context(model, **EXACT, n_rs_seq=0) as without:
        assert type(without.kv_cache) is States
        for context, other in ((ctx, without), (without, ctx)):
            with Branch.start(context, TEXT[:30], sampling=sampling) as branch:
                saved = branch.snapshot()
                with counting(context) as counts:
                    generation = branch.generate(
                        max_tokens=60, drafter=knowing([expected], seed), config=FIXED
                    ).finish()
                assert branch.tokens == expected
                stats = generation.stats
                assert stats.num_draft_tokens > stats.num_accepted_tokens > 10
                n_rounds = stats.num_drafts + stats.num_plain_steps
                # Where states roll back nothing is decoded twice.
                assert (len(counts) <= n_rounds + 1) == (context is ctx)
            with Branch.restore(other, saved) as restored:
                restored.generate(max_tokens=60).finish()
                assert restored.tokens == expected


def test_texts_of_an_engine_are_drafted_together(model: lb.Model) -> None:
    """All of them draft in the same decodes. Accepted tokens have the probabilities of plain decoding."""
    prompt = TEXT[:12] * 4
    with Context(model, n_rs_seq=4, **EXACT) as ctx:
        all_params = [WARM.replace(temperature=0.3, seed=seed) for seed in (1, 2, 3)]
        texts = [plain(ctx, prompt, params, 40) for params in all_params]
        traces: list[list[RoundTrace]] = [[], [], []]
        requests = [
            Request(prompt, max_tokens=40, sampling=params, on_round=trace.append)
            for params, trace in zip(all_params, traces, strict=True)
        ]
        with counting(ctx) as shapes:
            results = Engine(ctx, knowing(texts), FIXED).generate(requests)
        n_compared = 0
        for result, rounds in zip(results, traces, strict=True):
            assert result.stats.num_draft_tokens > result.stats.num_accepted_tokens > 0
            with Branch.start(ctx, prompt) as branch:
                scores = [score.logprob for score in branch.score(result.tokens)]
            for trace in rounds:
                start = trace.position - len(prompt)
                kept = trace.logprobs[: trace.n_accepted]
                np.testing.assert_allclose(kept, scores[start : start + len(kept)], atol=ALLOWED)
                n_compared += len(kept)
        assert n_compared > 20
        assert max(shapes[1:]) > 6  # drafts of several texts in one decode
        for params in all_params:  # alone they are the plain texts
            request = Request(prompt, max_tokens=40, sampling=params)
            (result,) = Engine(ctx, knowing(texts), FIXED).generate([request])
            assert result.stats.num_draft_tokens
            assert [*prompt, *result.tokens] in texts
        ctx.audit()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafts_that_are_drawn_are_not_cut_by_their_length(model: lb.Model, rule: str) -> None:
    """They are left out of shared decodes: which drafts are cut would depend on the drawn tokens."""
    with Context(model, **EXACT) as ctx, Context(model, **EXACT) as other:
        drafter = lb.ModelDrafter(other)
        engine = Engine(ctx, drafter, SpeculativeConfig(draft_k=3, rule=rule))
        results = engine.generate(
            [Request(TEXT[:9], max_tokens=12, sampling=WARM.replace(seed=i)) for i in (1, 2)]
        )
        assert [len(result.tokens) for result in results] == [12, 12]
        assert sum(result.stats.num_draft_tokens for result in results) == 0
        ctx.audit()


# -- the memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_done_logits_are_those_of_the_tokens(ctx: Context, seed: int) -> None:
    """Drafts of one length are undone together, next to single tokens too, in any order.

    In between sequences are forked, cut later, and dropped, wherever llama.cpp moves the states.
    """
    rng, memory = random.Random(seed), ctx.kv_cache
    assert isinstance(memory, RollingBack)
    memory.every, memory.apart = 16, 4
    texts: dict[int, list[int]] = {}
    n_undone = 0

    def cut(seq_id: int, n_kept: int) -> int:
        n_left = memory.cut(seq_id, n_kept)
        texts[seq_id] = texts[seq_id][:n_left]
        if not n_left:
            del texts[seq_id]
        return n_left

    for step in range(80):
        act = rng.choice(["decode", "decode", "decode", "decode", "cut", "fork", "drop"])
        if act == "decode" or not texts:
            batch, n = Batch(), rng.randint(2, 5)
            drafts: dict[int, int] = {}
            for seq_id in rng.sample(range(4), rng.randint(1, 4)):
                n_new = n if rng.random() < 0.7 else 1
                n_new = 9 if seq_id not in texts and step < 3 else n_new
                new = [rng.randrange(2, 250) for _ in range(n_new)]
                batch.add(seq_id, new, "all")
                texts.setdefault(seq_id, []).extend(new)
                drafts[seq_id] = n_new
            ctx.decoder.decode(batch)
            is_one_length = len({n_new for n_new in drafts.values() if n_new > 1}) < 2
            for seq_id, n_new in drafts.items():
                n_kept = len(texts[seq_id]) - rng.randint(0, min(4, n_new - 1))
                was = len(texts[seq_id])
                n_left = cut(seq_id, n_kept)
                if is_one_length and max(drafts.values()) <= 5:
                    assert n_left == n_kept
                    n_undone += n_kept < was
        elif act == "cut":
            seq_id = rng.choice(sorted(texts))
            cut(seq_id, max(1, len(texts[seq_id]) - rng.randint(1, 6)))
        elif act == "fork":
            source, target = rng.choice(sorted(texts)), rng.randrange(4)
            if source != target:
                texts[target] = texts[source][: memory.fork(source, target)]
                if not texts[target]:
                    del texts[target]
        else:
            seq_id = rng.choice(sorted(texts))
            memory.drop(seq_id, 0)
            del texts[seq_id]
        ctx.audit()
    assert n_undone > 10
    check(ctx, texts)


def test_nothing_is_undone_of_a_decode_before_the_last(ctx: Context) -> None:
    """A single token after a draft has no earlier states, and neither has a restored state."""
    memory, text = ctx.kv_cache, TEXT[:20]
    decode_run(ctx.decoder, text, 0, "none")
    decode_run(ctx.decoder, [30, 31, 32], 0, "none")
    ctx.decoder.advance(0, 33)
    n_left = memory.cut(0, 22)
    assert n_left in (0, 20) or n_left < 22
    expected = {0: [*text, 30, 31][:n_left]}
    if n_left:
        check(ctx, expected)
    memory.clear()
    decode_run(ctx.decoder, TEXT[:40], 1, "none")
    state = memory.handle.state(1)
    decode_run(ctx.decoder, text, 0, "none")
    memory.drop(0, 0)
    assert memory.set_state(0, state, 40)
    n_left = memory.cut(0, 38)
    assert n_left < 38
    check(ctx, {0: TEXT[:n_left], 1: TEXT[:40]} if n_left else {1: TEXT[:40]})


@pytest.mark.parametrize("n_new", [1, 2, 4, 5, 12])
@pytest.mark.parametrize("code", [-2, -3])
def test_a_failed_decode_leaves_no_state_that_was_not_computed(
    ctx: Context, n_new: int, code: int
) -> None:
    """After a failure llama.cpp undoes the tokens itself, even if it has not written their states."""
    handle, start = ctx.decoder.handle, 20

    def fail(decode: Any, n: int) -> int:
        assert decode(n) == 0
        handle.remove(0, start, -1)
        return code

    decode_run(ctx.decoder, TEXT[:12], 0, "none")
    ctx.kv_cache.mark(0)
    decode_run(ctx.decoder, TEXT[12:start], 0, "none")
    with hooked(ctx, fail), pytest.raises(DecodeError):
        decode_run(ctx.decoder, [40 + i for i in range(n_new)], 0, "none")
    end = ctx.kv_cache.next_position(0)
    assert end < start
    check(ctx, {0: TEXT[:end]} if end else {})


# -- whether and how far -----------------------------------------------------------------------------


def test_what_it_costs_is_told(model: lb.Model) -> None:
    with Context(model, **OPTIONS) as context:
        capabilities = context.capabilities
    assert capabilities.rollback == 8
    assert capabilities.state_bytes > 0
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
