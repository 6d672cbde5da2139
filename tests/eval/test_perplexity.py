"""Perplexity by chunks, and the divergence of two models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.errors import CacheFullError, ConfigError, VocabularyMismatchError
from llamabranch.eval import divergence, perplexity

TEXT = (
    "Once upon a time there was a king who had three sons. The eldest was proud, the second was lazy, "
    "and the youngest was kind. One day the old king fell ill, and no doctor could help him. Then an old "
    "woman came to the castle and said that only the water of life could make him well again. "
) * 3


def log_probs_by_hand(ctx: Context, tokens: list[int]) -> list[Any]:
    """Return the log-probabilities of all tokens after each of ``tokens``, in float64."""
    with Branch.create(ctx) as branch:
        rows = [row.astype(np.float64) for row in branch.extend(tokens, logits="all")]
    return [row - np.logaddexp.reduce(row) for row in rows]


def losses_by_hand(ctx: Context, tokens: list[int], first: int) -> list[float]:
    rows = log_probs_by_hand(ctx, tokens)
    return [-float(rows[i][tokens[i + 1]]) for i in range(first, len(tokens) - 1)]


def test_perplexity_is_that_of_raw_logits(ctx: Context) -> None:
    tokens = ctx.model.tokenize(TEXT)
    result = perplexity(ctx, TEXT, 32)
    assert result.n_done == result.n_chunks == len(tokens) // 32
    expected = [
        losses_by_hand(ctx, tokens[i * 32 : (i + 1) * 32], 16) for i in range(result.n_chunks)
    ]
    assert np.concatenate(result.rows) == pytest.approx(np.concatenate(expected), abs=1e-5)
    flat = np.concatenate(expected)
    assert result.value == pytest.approx(math.exp(flat.mean()), rel=1e-5)
    assert result.stderr == pytest.approx(
        result.value * flat.std() / math.sqrt(len(flat) - 1), rel=1e-5
    )
    assert result.n_tokens == 15 * result.n_chunks
    assert ctx.usage().cells_used == 0


def test_bos_replaces_the_first_token_of_each_chunk(toy: lb.Model) -> None:
    assert toy.tokenize("a")[0] == toy.bos == 0
    text = "abcdefgh" * 8
    tokens = toy.tokenize(text)
    with lb.Context(toy, n_ctx=256, n_seq_max=1, n_threads=1, exact=True) as ctx:
        result = perplexity(ctx, text, 8)
        for i, losses in enumerate(result.rows):
            chunk = [0, *tokens[8 * i + 1 : 8 * i + 8]]
            assert losses == pytest.approx(losses_by_hand(ctx, chunk, 4), abs=1e-3)


@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        ({"exact": True}, ((1, 3, 512), (4, 200, 512), (8, 8, 16))),
        # Results in f16 depend on the cells of a text.
        ({"exact": False, "kv_type": "f16"}, ((1, 512, 512), (4, 512, 512))),
    ],
    ids=["invariant", "f16"],
)
def test_few_rows_at_a_time_and_chunks_side_by_side_change_nothing(
    target: lb.Model, options: dict[str, Any], layouts: tuple[tuple[int, int, int], ...]
) -> None:
    values = []
    for n_seq_max, n_outputs_max, n_batch in layouts:
        with lb.Context(
            target, n_ctx=512, n_seq_max=n_seq_max, n_outputs_max=n_outputs_max, n_batch=n_batch,
            n_threads=1, **options,
        ) as ctx:  # fmt: skip
            values.append(np.concatenate(perplexity(ctx, TEXT, 32).rows).tolist())
            ctx.audit()
    assert all(value == values[0] for value in values)


@pytest.mark.parametrize("kind", ["perplexity", "divergence"])
def test_an_interrupted_run_has_told_what_is_done(kind: str, ctx: Context) -> None:
    whole = perplexity(ctx, TEXT, 32)
    kept: list[Any] = []

    def stop(done: Any) -> None:
        kept.append(done)
        if done.n_done == 2:
            raise KeyboardInterrupt

    with lb.Context(ctx.model, n_ctx=64, n_seq_max=2, n_batch=64, n_threads=1, exact=True) as other:
        with pytest.raises(KeyboardInterrupt):
            if kind == "divergence":
                divergence(ctx, other, TEXT, 32, progress=stop)
            else:
                perplexity(other, TEXT, 32, progress=stop)
        assert other.n_seq_free == 2
    (result,) = {id(r): r for r in kept}.values()
    assert (result.n_done, result.n_tokens, result.window) == (2, 2 * 15, 32)
    assert result.n_chunks == whole.n_chunks > 2
    if kind == "perplexity":
        losses = np.concatenate(whole.rows[:2])
        assert result.value == pytest.approx(math.exp(losses.mean()), rel=1e-5)


def test_a_model_does_not_diverge_from_itself(ctx: Context) -> None:
    alone = perplexity(ctx, TEXT, 32)
    result = divergence(ctx, ctx, TEXT, 32)
    assert result.n_tokens == alone.n_tokens
    assert result.statistics.perplexity.value == pytest.approx(alone.value, rel=1e-5)
    assert result.statistics.base_perplexity == result.statistics.perplexity
    assert abs(result.statistics.mean.value) < 1e-9 and result.statistics.same_top.value == 1.0
    assert ctx.usage().cells_used == 0


def test_divergence_is_that_of_the_distributions(ctx: Context, draft_ctx: Context) -> None:
    """Compared with float64 over the whole vocabulary. Terms that end 16 nats below are left out."""
    result = divergence(ctx, draft_ctx, TEXT, 32, chunks=3)
    tokens = ctx.model.tokenize(TEXT)
    kls, same, changes = [], [], []
    for c in range(3):
        chunk = tokens[c * 32 : (c + 1) * 32]
        logs = [log_probs_by_hand(context, chunk) for context in (ctx, draft_ctx)]
        for i in range(16, 31):
            p, q = logs[0][i], logs[1][i]
            kls.append(float(np.sum(np.exp(p) * (p - q))))
            same.append(p.argmax() == q.argmax())
            changes.append(math.exp(q[chunk[i + 1]]) - math.exp(p[chunk[i + 1]]))
    assert result.statistics.mean.value == pytest.approx(np.mean(kls), abs=1e-4)
    assert result.statistics.same_top.value == pytest.approx(np.mean(same))
    assert result.statistics.p_change_rms.value == pytest.approx(
        math.sqrt(np.mean(np.square(changes))), abs=1e-4
    )
    assert result.statistics.mean.stderr == pytest.approx(
        np.std(kls) / math.sqrt(len(kls) - 1), rel=0.05
    )


def test_short_texts_small_contexts_and_other_vocabularies_are_refused(
    ctx: Context, toy: lb.Model
) -> None:
    before = ctx.decoder.n_decodes
    texts: list[tuple[str | list[int], int, int | None, str]] = [
        ("", 32, None, "empty"),
        ([5] * 63, 32, None, "needs 64"),
        (TEXT, 4096, None, "4096"),
        (TEXT, 3, None, "window"),
        (TEXT, 32, 0, "chunks"),
    ]
    for text, window, chunks, message in texts:
        error = CacheFullError if window == 4096 else ConfigError
        with pytest.raises(error, match=message):
            perplexity(ctx, text, window, chunks=chunks)
        with pytest.raises(error, match=message):
            divergence(ctx, ctx, text, window, chunks=chunks)
    with (
        lb.Context(toy, n_ctx=256, n_threads=1, exact=True) as small,
        pytest.raises(VocabularyMismatchError, match="different vocabularies"),
    ):
        divergence(ctx, small, TEXT, 32)
    with (
        lb.Context(ctx.model, n_ctx=256, n_threads=1, exact=True) as short,
        pytest.raises(CacheFullError, match="larger n_ctx"),
    ):
        divergence(ctx, short, TEXT * 5, 300, chunks=1)
    assert ctx.decoder.n_decodes == before
