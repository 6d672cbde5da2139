"""Exactness by measurement: batches that are claimed to be exact are exact, with weights of many types.

The model is a toy that is wide enough for K-quants, quantized by llama.cpp. Which types are exact depends
on the processor and on how llama.cpp was built. So the tests ask the context and check its claims.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
import together
import toys
from divergence import first_divergence
from drafts import Eager
from rounding import rounding

import llamabranch as lb
from llamabranch import Branch, Context, Engine, SamplingParams
from llamabranch.agents.threads import event_loop
from llamabranch.errors import ExactnessWarning, UnsupportedError

TYPES = {
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "Q4_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
}
N_TOKENS = 80
N_SEQ = 6
N_BATCHES = 500


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantized")
    source = toys.write_toy(
        folder / "F32.gguf", weights="f32", vocab=512, n_embd=256, n_ff=512, seed=5
    )
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = 1
    files = {}
    for name, ftype in TYPES.items():
        params.ftype = ftype
        files[name] = folder / f"{name}.gguf"
        paths = str(source).encode(), str(files[name]).encode()
        assert llama_cpp.llama_model_quantize(*paths, params) == 0
    return files


@pytest.fixture(scope="module", params=TYPES)
def model(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[lb.Model]:
    with lb.Model(files[request.param]) as opened:
        yield opened


def tokens_of(seq: int) -> list[int]:
    return [2 + (31 * seq + 7 * i + i * i) % 500 for i in range(N_TOKENS)]


def test_claims_hold_in_random_batches(model: lb.Model) -> None:
    """500 batches of six sequences with 1 to 64 rows, some with up to 400 (or as many as are claimed).

    After every third batch, tokens of one sequence are decoded and dropped, like those of rejected
    drafts.
    """
    options: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": N_SEQ, "n_threads": 1, "kv_type": "bf16"}
    alone: dict[int, list[npt.NDArray[np.float32]]] = {}
    with Context(model, **options) as ctx:
        claimed = ctx.capabilities.exact_rows
        assert 1 <= claimed <= ctx.n_batch
        assert ctx.capabilities.batch_invariant == (claimed == ctx.n_batch)
        for seq in range(N_SEQ):
            rows = []
            for i, token in enumerate(tokens_of(seq)):
                ctx.decode([token], i, seq)
                rows.append(ctx.logits())
            ctx.kv_cache_remove(seq)
            alone[seq] = rows
        rng = np.random.default_rng(claimed)
        n_batches = 0
        while n_batches < N_BATCHES:
            branches = [Branch.create(ctx) for _ in range(N_SEQ)]
            unread = {seq: tokens_of(seq) for seq in range(N_SEQ)}
            while any(unread.values()) and n_batches < N_BATCHES:
                is_large = n_batches % 20 == 0  # more than was tried when the context opened
                left = min(claimed, int(rng.integers(65, 400) if is_large else rng.integers(1, 65)))
                batch: dict[Branch, list[int]] = {}
                for seq in rng.permutation(N_SEQ).tolist():
                    n = min(left, int(rng.integers(1, 81 if is_large else 20)), len(unread[seq]))
                    if n:
                        batch[branches[seq]] = unread[seq][:n]
                        del unread[seq][:n]
                        left -= n
                together.prefill(ctx, batch)
                n_batches += 1
                if n_batches % 3 == 0:
                    last = branches[max(seq for seq in range(N_SEQ) if branches[seq] in batch)]
                    end = last.position
                    last.extend([7] * min(claimed, 7))
                    last.rewind(end)
                for seq, branch in enumerate(branches):
                    if branch in batch:
                        assert np.array_equal(branch.logits, alone[seq][branch.position - 1])
            for branch in branches:
                branch.prune()


def test_how_far_batches_are_from_rows_alone_is_measured(model: lb.Model) -> None:
    """The total variation is 0 if all sizes agree. If not, it is at least that of 64 rows."""
    with Context(model, n_ctx=256, n_seq_max=1, n_threads=1, kv_type="bf16") as ctx:
        can = ctx.capabilities
        assert can.total_variation is not None and 0 <= can.total_variation < 0.5
        assert (can.total_variation == 0) == (can.exact_rows == ctx.n_batch)
        assert ("total variation of up to" in can.batch_invariant_reason) != can.batch_invariant
        own = [(7 * i + 3) % model.n_vocab for i in range(64)]
        rows = []
        for i, token in enumerate(own[:9]):
            ctx.decode([token], i)
            rows.append(np.exp(ctx.logits() - np.logaddexp.reduce(ctx.logits())))
        ctx.kv_cache_clear()
        ctx.decode(own[:9], 0, logits="all")
        for i, alone in enumerate(rows):
            together = np.exp(ctx.logits(i) - np.logaddexp.reduce(ctx.logits(i)))
            assert np.abs(together - alone).sum() / 2 <= can.total_variation + 1e-5
    with Context(model, n_ctx=256, n_threads=1) as ctx:  # told with another K/V type, too
        assert (ctx.capabilities.total_variation or 0.0) == can.total_variation
    with Context(model, n_ctx=256, n_threads=1, batch_invariant=False) as ctx:
        assert ctx.capabilities.total_variation is None


@pytest.mark.parametrize("weights", ["q8_0", "f32"])
def test_exact_rows_of_a_sliding_window_are_measured(tmp_path: Path, weights: str) -> None:
    """Drafts of at most this many rows give the plain text, beyond the window of 32 tokens too."""
    path = toys.write_gemma3(
        tmp_path / "toy.gguf", weights=weights, vocab=512, n_embd=256, n_ff=512, n_layer=4
    )
    with lb.Model(path) as model, Context(model, n_ctx=512, n_threads=1, kv_type="bf16") as ctx:
        can = ctx.capabilities
        assert can.sliding_window == 32 and not can.batch_invariant
        assert can.total_variation is not None and 1 <= can.exact_rows <= ctx.n_batch
        assert (can.total_variation == 0) == (can.exact_rows == ctx.n_batch)
        assert "sliding window" in can.batch_invariant_reason
        drafter = Eager(2.0)
        most = min(4, can.exact_rows - 1)
        for seed in range(4):
            params = SamplingParams(temperature=0.7, seed=seed, logit_bias={1: -np.inf})
            texts = []
            for which in (lb.speculative.NullDrafter(), drafter) if most else ():
                fixed = lb.SpeculativeConfig(draft_k=most)
                generated = lb.Speculator(ctx, which, fixed).generate(
                    tokens_of(seed)[:20], max_tokens=90, sampling=params
                )
                texts.append(generated.finish().tokens)
            assert not texts or texts[0] == texts[1]
    with lb.Model(path) as model, Context(model, n_ctx=512, n_threads=1, kv_type="f16") as ctx:
        assert ctx.capabilities.exact_rows == 0 and ctx.capabilities.total_variation is not None


DIFFERS: dict[str, Any] = {"exact_rows": 3, "total_variation": 0.026}
SEEDED = SamplingParams(temperature=0.9, seed=3)


def told(call: Callable[[], object]) -> list[str]:
    """Return the warnings of inexact texts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if warning.category is ExactnessWarning]


def test_warns_once_where_texts_may_differ(target: lb.Model) -> None:
    prompt = "the king and the queen and the king and the"
    with Context(target, n_ctx=512, n_threads=1) as ctx:
        able = ctx.capabilities
        cases: list[tuple[int, dict[str, Any], SamplingParams, int]] = [
            (4, {"exact_rows": 3, "total_variation": None}, SEEDED, 0),  # not known
            (4, {"exact_rows": ctx.n_batch, "total_variation": 0.0}, SEEDED, 0),
            (1, DIFFERS, SEEDED, 0),
            (4, DIFFERS, SEEDED.replace(seed=None), 1),  # its seed would be reported
            (4, DIFFERS, SEEDED, 0),
        ]
        for k, changes, sampling, n in cases:
            ctx.capabilities = replace(able, batch_invariant=False, **changes)
            speculator = lb.Speculator(ctx, Eager(2.0), lb.SpeculativeConfig(draft_k=k))
            generation = speculator.generate(prompt, max_tokens=40, sampling=sampling)
            messages = told(generation.finish)
            assert speculator.stats.num_drafts > 0
            assert len(messages) == n
            assert all("0.026" in text and "batch_invariant=True" in text for text in messages)
    for temperature in (0.0, 0.9):  # a batch
        with Context(target, n_ctx=512, n_threads=1) as ctx:
            differs: dict[str, Any] = {"exact_rows": 1, "total_variation": 0.1}
            ctx.capabilities = replace(able, batch_invariant=False, **differs)
            engine = Engine(ctx, max_tokens=4, sampling=SamplingParams(temperature=temperature))
            assert len(told(partial(engine.generate, ["one", "two"]))) == 1


def test_warning_of_a_thread_shows_the_line_that_started_it(target: lb.Model) -> None:
    """In the thread of an ``AsyncEngine``, or of an agent's event loop, no line is the user's."""
    differs: dict[str, Any] = {"exact_rows": 1, "total_variation": 0.1}

    async def texts(ctx: Context) -> None:
        with ctx:
            ctx.capabilities = replace(ctx.capabilities, batch_invariant=False, **differs)
            async with lb.AsyncEngine(ctx) as engine:
                await engine.complete(["one", "two"], max_tokens=4)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(texts(Context(target, n_ctx=512, n_threads=1)))
        with event_loop() as call:
            call(texts(Context(target, n_ctx=512, n_threads=1)))
    (first, other) = (each for each in caught if each.category is ExactnessWarning)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert {first.filename, other.filename} == {__file__}
    assert "lb.AsyncEngine(ctx)" in lines[first.lineno - 1]
    assert "lb.AsyncEngine(ctx)" in lines[other.lineno - 1]


def test_exact_mode_keeps_to_the_rows_that_are_exact(model: lb.Model) -> None:
    options: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, "n_threads": 1}
    with Context(model, kv_type="bf16", **options) as ctx:
        rows = ctx.capabilities.exact_rows
    if rows < 2:
        with pytest.raises(UnsupportedError, match="cannot be batch-invariant: measured"):
            Context(model, batch_invariant=True, **options)
        return
    with Context(model, batch_invariant=True, **options) as ctx:
        assert ctx.capabilities.batch_invariant
        assert (ctx.params.n_ubatch, ctx.kv_type) == (rows, "bf16")
        if rows < ctx.n_batch:
            assert f"{rows} tokens at a time" in ctx.capabilities.batch_invariant_reason
        prompts = [tokens_of(seq)[: 10 + 17 * seq] for seq in range(4)]
        params = SamplingParams(temperature=0.9, seed=3)
        drafter = Eager(2.0)
        together = Engine(ctx, drafter, sampling=params, max_tokens=40).generate(
            [lb.Request(p) for p in prompts]
        )
        for prompt, result in zip(prompts, together, strict=True):
            alone = SamplingParams(temperature=0.9, seed=result.seed)
            with Branch.start(ctx, prompt, sampling=alone) as branch:
                assert [t.token for t in branch.generate(40)] == list(result.tokens)


def test_differences_where_nothing_is_claimed_are_explained(model: lb.Model) -> None:
    with Context(model, n_ctx=512, n_seq_max=4, n_threads=1) as ctx:
        if ctx.capabilities.batch_invariant:
            assert ctx.kv_type == "bf16"
            return
        assert ctx.kv_type == "f16"
        assert ctx.capabilities.batch_invariant_reason.startswith("measured: logits of batches of ")
        params, allowed = SamplingParams(temperature=0.9, seed=3), rounding(ctx)
        drafter = Eager(2.0)
        for seq in range(6):
            prompt = tokens_of(seq)
            with Branch.start(ctx, prompt, sampling=params) as branch:
                plain = [t.token for t in branch.generate(60)]
            drafted = lb.Speculator(ctx, drafter).generate(prompt, max_tokens=60, sampling=params)
            difference = first_divergence(ctx, prompt, plain, drafted.finish().tokens, params, 3)
            assert difference is None or difference.gap <= allowed, difference


def test_models_that_take_long_to_measure_are_measured_when_asked(
    model: lb.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The measurements are kept in the profile."""
    monkeypatch.setattr("llamabranch.context.exactness._found", WeakKeyDictionary())
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(tmp_path / "profile.json"))
    with Context(model, kv_type="bf16", **options) as ctx:
        first = ctx.capabilities
    with monkeypatch.context() as patch:
        patch.setattr("llamabranch.context.exactness._measure", None)  # nothing is measured again
        patch.setattr("llamabranch.context.exactness._found", WeakKeyDictionary())
        with Context(model, kv_type="bf16", **options) as ctx:
            assert ctx.capabilities == first
    monkeypatch.setenv("LLAMABRANCH_PROFILE", "0")
    monkeypatch.setattr("llamabranch.context.exactness._found", WeakKeyDictionary())
    monkeypatch.setattr("llamabranch.context.exactness._SOME", 1.0)
    with Context(model, **options) as ctx:
        assert not ctx.capabilities.batch_invariant
        assert "batch_invariant=True" in ctx.capabilities.batch_invariant_reason
        assert ctx.kv_type == "f16"


def test_context_of_small_batches_says_nothing_about_larger_ones(
    model: lb.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp cuts batches at ``n_ubatch``, so that larger ones were not tried there."""
    options: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 2, "n_threads": 1, "kv_type": "bf16"}

    def forget(name: str) -> None:
        monkeypatch.setenv("LLAMABRANCH_PROFILE", str(tmp_path / name))
        monkeypatch.setattr("llamabranch.context.exactness._found", WeakKeyDictionary())

    forget("first.json")
    with Context(model, **options) as ctx:
        first = ctx.capabilities.exact_rows
    forget("second.json")
    for small in ({"n_ubatch": 3}, {"n_batch": 3}, {"n_ubatch": 1}):
        with Context(model, **{**options, **small}) as ctx:
            assert ctx.capabilities.batch_invariant or first < 3
    with Context(model, **options) as ctx:
        assert ctx.capabilities.exact_rows == first
