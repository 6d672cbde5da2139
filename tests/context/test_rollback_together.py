"""Rolling back when several texts share decodes, and when something fails."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import toys
from drafts import Knowing

import llamabranch as lb
from llamabranch import Branch, Context, Engine, Request, SamplingParams
from llamabranch.context.memory import RollingBack
from llamabranch.context.runner import Batch, decode_run
from llamabranch.errors import DecodeError
from llamabranch.generation.verify import RoundTrace
from llamabranch.speculative import SpeculativeConfig

OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 5, "n_threads": 1, "n_rs_seq": 4}
# With weights of float32 a wrong state moves logits 100 times as much as rounding does.
EXACT: dict[str, Any] = {"kv_type": "f32", "batch_invariant": False}
ALLOWED = 0.01
TEXT = [2 + (7 * i + i * i) % 250 for i in range(60)]


@pytest.fixture(scope="module", params=["lfm2", "qwen35", "nemotron_h"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("together") / f"{request.param}.gguf"
    with lb.Model(toys.write_toy(path, request.param, vocab="bytes", weights="f32")) as opened:
        yield opened


@pytest.fixture(params=[512 << 20, 0], ids=["checkpoints", "no checkpoints"])
def ctx(model: lb.Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    with Context(model, checkpoint_ram=request.param, **EXACT, **OPTIONS) as context:
        assert type(context.kv_cache) is RollingBack
        yield context
        context.audit()


def knowing(texts: Sequence[list[int]]) -> Knowing:
    """Return a drafter that knows the coming texts; its drafts have several lengths and some errors."""
    rng = random.Random(1)

    def drafted(tokens: Sequence[int], limit: int) -> list[int]:
        n = len(tokens)
        known = next((text for text in texts if text[:n] == list(tokens)), list(tokens))
        following = known[n : n + rng.randint(min(1, limit), min(4, limit))]
        return [token if rng.random() < 0.8 else 99 for token in following]

    return Knowing(drafted)


def check(ctx: Context, texts: dict[int, list[int]]) -> None:
    """Assert that each sequence continues as its tokens do in a sequence of their own."""
    for seq_id, tokens in sorted(texts.items()):
        logits = decode_run(ctx.decoder, [77], seq_id, "last")[0].array.copy()
        ctx.kv_cache.drop(4, 0)
        decode_run(ctx.decoder, [*tokens, 77][:-1], 4, "none")
        expected = decode_run(ctx.decoder, [77], 4, "last")[0].array
        np.testing.assert_allclose(logits, expected, atol=ALLOWED)
    ctx.kv_cache.clear()


@pytest.mark.parametrize("seed", range(6))
def test_drafts_of_one_length_are_undone_together(ctx: Context, seed: int) -> None:
    """Next to single tokens too, in any order, wherever llama.cpp moves the states."""
    rng, memory = random.Random(seed), ctx.kv_cache
    texts: dict[int, list[int]] = {}
    n_undone = 0
    for step in range(50):
        batch, n = Batch(), rng.randint(2, 5)
        drafts: dict[int, int] = {}
        for seq_id in rng.sample(range(4), rng.randint(1, 4)):
            n_new = n if rng.random() < 0.7 else 1
            n_new = 9 if seq_id not in texts and step < 3 else n_new
            new = [rng.randrange(2, 250) for _ in range(n_new)]
            batch.add(seq_id, new, "all")
            texts.setdefault(seq_id, []).extend(new)
            drafts[seq_id] = n_new
        batch.decode(ctx.decoder)
        is_one_length = len({n_new for n_new in drafts.values() if n_new > 1}) < 2
        is_short = max(drafts.values()) <= 5
        for seq_id, n_new in drafts.items():
            n_kept = len(texts[seq_id]) - rng.randint(0, min(4, n_new - 1))
            n_left = memory.cut(seq_id, n_kept)
            if is_one_length and is_short:
                assert n_left == n_kept
                n_undone += n_kept < len(texts[seq_id])
            texts[seq_id] = texts[seq_id][:n_left]
            if not n_left:
                del texts[seq_id]
        if rng.random() < 0.1 and len(texts) > 1:
            source, target = rng.sample(sorted(texts), 2)
            texts[target] = texts[source][: memory.fork(source, target)]
    assert n_undone > 10
    check(ctx, texts)


def test_nothing_is_undone_of_a_decode_before_the_last(ctx: Context) -> None:
    """A single token after a draft has no earlier states, and neither has a restored state."""
    memory, text = ctx.kv_cache, TEXT[:20]
    decode_run(ctx.decoder, text, 0, "none")
    decode_run(ctx.decoder, [30, 31, 32], 0, "none")
    ctx.decoder.advance(0, 33, None)
    n_left = memory.cut(0, 22)
    assert n_left in (0, 20) or n_left < 22
    expected = {0: [*text, 30, 31][:n_left]}
    if n_left:
        check(ctx, expected)
    memory.clear()
    decode_run(ctx.decoder, TEXT[:40], 1, "none")
    state = memory.state(1)
    decode_run(ctx.decoder, text, 0, "none")
    memory.drop(0, 0)
    assert memory.set_state(0, state, 40)
    n_left = memory.cut(0, 38)
    assert n_left < 38
    check(ctx, {0: TEXT[:n_left], 1: TEXT[:40]} if n_left else {1: TEXT[:40]})


def test_an_undone_sequence_that_was_dropped_can_be_forked(ctx: Context) -> None:
    memory = ctx.kv_cache
    decode_run(ctx.decoder, TEXT[:20], 0, "none")
    assert memory.cut(0, 18) == 18
    memory.drop(0, 0)
    assert memory.fork(0, 1) == 0
    decode_run(ctx.decoder, TEXT[:9], 0, "none")
    assert memory.fork(0, 1) == 9
    check(ctx, {0: TEXT[:9], 1: TEXT[:9]})


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
    before = ctx.decoder.hook(fail)
    try:
        with pytest.raises(DecodeError):
            decode_run(ctx.decoder, [40 + i for i in range(n_new)], 0, "none")
    finally:
        ctx.decoder.hook(before)
    end = ctx.kv_cache.next_position(0)
    assert end < start
    check(ctx, {0: TEXT[:end]} if end else {})


def test_texts_of_an_engine_are_drafted_together(model: lb.Model) -> None:
    """All of them draft in the same decodes. Accepted tokens have the probabilities of plain decoding."""
    params = SamplingParams(temperature=0.3, logit_bias={1: -np.inf})
    prompt = TEXT[:12] * 4
    shapes: list[int] = []
    with Context(model, **EXACT, **OPTIONS) as ctx:
        plain = []
        for seed in (1, 2, 3):
            with Branch.start(ctx, prompt, sampling=params.replace(seed=seed)) as branch:
                branch.generate(max_tokens=40).finish()
                plain.append(branch.tokens)

        def around(decode: Any, n: int) -> int:
            shapes.append(n)
            return int(decode(n))

        engine = Engine(ctx, knowing(plain), SpeculativeConfig(draft_k=4, rule="seeded"))
        traces: list[list[RoundTrace]] = [[], [], []]
        requests = [
            Request(
                prompt, max_tokens=40, sampling=params.replace(seed=seed), on_round=trace.append
            )
            for seed, trace in zip((1, 2, 3), traces, strict=True)
        ]
        before = ctx.decoder.hook(around)
        results = engine.generate(requests)
        ctx.decoder.hook(before)
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
        ctx.audit()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafts_that_are_drawn_are_not_cut_by_their_length(model: lb.Model, rule: str) -> None:
    """They are left out of shared decodes: which drafts are cut would depend on the drawn tokens."""
    params = SamplingParams(temperature=0.9, logit_bias={1: -np.inf})
    with Context(model, **EXACT, **OPTIONS) as ctx, Context(model, **EXACT, **OPTIONS) as other:
        drafter = lb.ModelDrafter(other)
        engine = Engine(ctx, drafter, SpeculativeConfig(draft_k=3, rule=rule))
        results = engine.generate(
            [Request(TEXT[:9], max_tokens=12, sampling=params.replace(seed=i)) for i in (1, 2)]
        )
        assert [len(result.tokens) for result in results] == [12, 12]
        assert sum(result.stats.num_draft_tokens for result in results) == 0
        ctx.audit()


def test_what_fits_into_a_decode_of_several(ctx: Context) -> None:
    memory = ctx.kv_cache
    assert memory.fit_together([3], 0) == [3]
    assert memory.fit_together([3], 1) == [0]
    assert memory.fit_together([4, 4, 1], 0) == [4, 4, 0]
    assert memory.fit_together([4, 2, 2], 0) == [2, 2, 2]
    assert memory.fit_together([1, 0, 0], 0) == [1, 0, 0]
    assert memory.fit_together([0, 0], 0) == [0, 0]
    n = memory.handle.n_chunk // 5 + 1
    assert max(memory.fit_together([4] * n, 0)) < 4
