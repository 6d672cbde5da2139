"""Exactness by measurement: batches that are claimed to be exact are exact, with weights of many types.

The model is a toy that is wide enough for K-quants, quantized by llama.cpp. Which types are exact depends
on the processor and on how llama.cpp was built. So the tests ask the context and check its claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
import together
import toys
from drafts import Eager
from rounding import gumbel_noise, rounding

import llamabranch as lb
from llamabranch import Branch, Context, Engine, SamplingParams
from llamabranch.errors import UnsupportedError
from llamabranch.native.context import ContextHandle

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


def exact_context(model: lb.Model, **options: Any) -> Context:
    """Return an exact context; skip the test where this processor rounds batches differently."""
    try:
        return Context(model, n_threads=1, exact=True, **options)
    except UnsupportedError as error:
        assert "cannot be exact: measured: logits of batches of more than 1" in str(error)
        pytest.skip(str(error))


def test_claims_hold_in_random_batches(model: lb.Model) -> None:
    """500 batches of six sequences with 1 to 64 rows, some with up to 400 (or as many as are claimed).

    After every third batch, tokens of one sequence are decoded and dropped, like those of rejected
    drafts.
    """
    alone: dict[int, list[npt.NDArray[np.float32]]] = {}
    with exact_context(model, n_ctx=1024, n_seq_max=N_SEQ) as ctx:
        claimed = ctx.n_batch
        assert ctx.capabilities.exact
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


def test_exact_mode_keeps_to_the_rows_that_are_exact(model: lb.Model) -> None:
    with exact_context(model, n_ctx=1024, n_seq_max=4) as ctx:
        assert ctx.capabilities.exact and ctx.kv_type == "bf16"
        rows = ctx.params.n_ubatch
        assert f"batches of {rows} tokens are equal" in ctx.capabilities.exact_reason
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
    """Where two texts first differ, their tokens were so close that rounding decides between them."""
    with Context(model, n_ctx=512, n_seq_max=4, n_threads=1) as ctx:
        assert ctx.kv_type == "f16" and not ctx.capabilities.exact
        params = SamplingParams(
            temperature=0.9, seed=3, top_k=0, top_p=1.0, min_p=0.0,
            logit_bias=dict.fromkeys(model.eog_tokens, -math.inf),
        )  # fmt: skip
        allowed, drafter, ids = rounding(ctx), Eager(2.0), np.arange(ctx.n_vocab, dtype=np.int32)
        for seq in range(6):
            prompt = tokens_of(seq)
            with Branch.start(ctx, prompt, sampling=params) as branch:
                plain = [t.token for t in branch.generate(60)]
            drafted = lb.Speculator(ctx, drafter).generate(prompt, max_tokens=60, sampling=params)
            with Branch.start(ctx, prompt, sampling=params) as branch:
                for pair in zip(plain, drafted.finish().tokens, strict=True):
                    if pair[0] != pair[1]:
                        keys = branch.logits / 0.9 + gumbel_noise(3, branch.position, ids)
                        assert 0.9 * abs(keys[pair[0]] - keys[pair[1]]) <= allowed
                        break
                    branch.commit(pair[0])


def test_context_of_small_batches_says_nothing_about_larger_ones(
    model: lb.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp cuts batches at ``n_ubatch``, so that larger ones were not tried there."""
    options: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 2, "n_threads": 1}

    def rows(**more: int) -> int | None:
        try:
            with Context(model, exact=True, **{**options, **more}) as ctx:
                return ctx.params.n_ubatch
        except UnsupportedError:
            return None

    monkeypatch.setattr("llamabranch.context.exactness._found", WeakKeyDictionary())
    alone = rows()
    monkeypatch.setattr("llamabranch.context.exactness._found", WeakKeyDictionary())
    for small in ({"n_ubatch": 3}, {"n_batch": 3}, {"n_ubatch": 1, "n_batch": 2}):
        assert rows(**small) == small.get("n_ubatch", 3) or (alone or 1) < 3
    assert rows() == alone


def test_nothing_is_tried_or_promised_unless_asked(
    target: lb.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is llama.cpp's: f16, and flash attention wherever it can. The context opens once."""
    opened: list[object] = []

    def create(*arguments: Any, **options: Any) -> ContextHandle:
        opened.append(arguments)
        return ContextHandle(*arguments, **options)

    monkeypatch.setattr("llamabranch.context.opening.ContextHandle", create)
    with Context(
        target, n_ctx=256, n_threads=1, exact=True
    ):  # these weights are exact in any batch
        assert len(opened) == 1
    monkeypatch.setattr("llamabranch.context.opening.most_exact_rows", None)
    with Context(target, n_ctx=256, n_threads=1) as ctx:
        assert len(opened) == 2
        assert (ctx.kv_type, ctx.params.flash_attention) == ("f16", "auto")
        assert not ctx.capabilities.exact and "exact=True" in ctx.capabilities.exact_reason
        assert not ctx.complete("Once", max_tokens=2).exact


def test_exact_is_a_flag(target: lb.Model) -> None:
    with pytest.raises(lb.ConfigError, match="exact must be True or False"):
        Context(target, exact="auto")  # type: ignore[arg-type]
