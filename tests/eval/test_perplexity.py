"""Perplexity by chunks, saved log-probabilities, and the divergence from them."""

from __future__ import annotations

import math
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.errors import CacheFullError, ConfigError, VocabularyMismatchError
from llamabranch.eval import LogitsFile, divergence, perplexity

TEXT = (
    "Once upon a time there was a king who had three sons. The eldest was proud, the second was lazy, "
    "and the youngest was kind. One day the old king fell ill, and no doctor could help him. Then an old "
    "woman came to the castle and said that only the water of life could make him well again. "
) * 3


def losses_by_hand(ctx: Context, tokens: list[int], first: int) -> list[float]:
    with Branch.create(ctx) as branch:
        rows = branch.extend(tokens, logits="all")
    wide = [row.astype(np.float64) for row in rows]
    return [
        float(np.logaddexp.reduce(wide[i]) - wide[i][tokens[i + 1]])
        for i in range(first, len(tokens) - 1)
    ]


def test_perplexity_is_that_of_raw_logits(ctx: Context) -> None:
    tokens = ctx.model.tokenize(TEXT)
    result = perplexity(ctx, TEXT, 32)
    assert result.n_done == result.n_chunks == len(tokens) // 32
    expected = [
        losses_by_hand(ctx, tokens[i * 32 : (i + 1) * 32], 16) for i in range(result.n_chunks)
    ]
    assert np.concatenate(result.losses) == pytest.approx(np.concatenate(expected), abs=1e-5)
    flat = np.concatenate(expected)
    assert result.value == pytest.approx(math.exp(flat.mean()), rel=1e-5)
    assert result.stderr == pytest.approx(
        result.value * flat.std() / math.sqrt(len(flat) - 1), rel=1e-5
    )
    assert result.running[-1] == pytest.approx(result.value)
    assert result.n_tokens == 15 * result.n_chunks
    assert ctx.usage().cells_used == 0


def test_bos_replaces_the_first_token_of_each_chunk(toy: lb.Model) -> None:
    assert toy.tokenize("a")[0] == toy.bos == 0
    text = "abcdefgh" * 8
    tokens = toy.tokenize(text)
    with lb.Context(toy, n_ctx=256, n_seq_max=1, n_threads=1) as ctx:
        result = perplexity(ctx, text, 8)
        for i, losses in enumerate(result.losses):
            chunk = [0, *tokens[8 * i + 1 : 8 * i + 8]]
            assert losses == pytest.approx(losses_by_hand(ctx, chunk, 4), abs=1e-3)


@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        ({"batch_invariant": True}, ((1, 3, 512), (4, 200, 512), (8, 8, 16))),
        # Results in f16 depend on the cells of a text.
        ({"batch_invariant": False, "kv_type": "f16"}, ((1, 512, 512), (4, 512, 512))),
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
            values.append(np.concatenate(perplexity(ctx, TEXT, 32).losses).tolist())
            ctx.audit()
    assert all(value == values[0] for value in values)


@pytest.mark.parametrize("kind", ["perplexity", "divergence"])
def test_an_interrupted_run_has_told_what_is_done(kind: str, ctx: Context, tmp_path: Path) -> None:
    base, path = tmp_path / "base", tmp_path / "path"
    whole = perplexity(ctx, TEXT, 32, save_to=base)
    kept: list[Any] = []

    def stop(done: Any) -> None:
        kept.append(done)
        if done.n_done == 2:
            raise KeyboardInterrupt

    with lb.Context(ctx.model, n_ctx=64, n_seq_max=2, n_batch=64, n_threads=1) as other:
        with pytest.raises(KeyboardInterrupt):
            if kind == "divergence":
                divergence(other, base, progress=stop)
            else:
                perplexity(other, TEXT, 32, save_to=path, progress=stop)
        assert other.n_seq_free == 2
    (result,) = {id(r): r for r in kept}.values()
    data = result.as_dict()
    assert (data["n_done"], data["n_tokens"], data["window"]) == (2, 2 * 15, 32)
    assert data["n_chunks"] == whole.n_chunks > 2
    if kind == "perplexity":
        assert data["perplexity"] == pytest.approx(whole.running[1])
        assert np.array_equal(data["losses"], whole.losses[:2])
        with pytest.raises(ConfigError, match="incomplete"):
            LogitsFile.open(path)


def test_the_file_is_laid_out_as_llama_cpp_lays_it_out(ctx: Context, tmp_path: Path) -> None:
    path = tmp_path / "logits"
    perplexity(ctx, TEXT, 32, chunks=2, save_to=path)
    data, n_vocab = path.read_bytes(), ctx.n_vocab
    tokens = ctx.model.tokenize(TEXT)[:64]
    assert data[:20] == b"_logits_" + struct.pack("<3i", 32, n_vocab, 2)
    assert data[20 : 20 + 256] == struct.pack("<64i", *tokens)
    width = 2 * ((n_vocab + 1) // 2) + 4
    assert len(data) == 20 + 256 + 2 * 15 * width * 2
    with Branch.create(ctx) as branch:
        rows = branch.extend(tokens[:32], logits="all")
    body = np.frombuffer(data, dtype="<u2", offset=276).reshape(30, width)
    for codes, row in zip(body[:15], rows[16:], strict=False):
        scale, smallest = codes[:4].copy().view("<f4")
        decoded = scale * codes[4 : 4 + n_vocab] + smallest
        wide = row.astype(np.float64)
        exact = np.maximum(wide, wide.max() - 16) - np.logaddexp.reduce(wide)
        assert np.abs(decoded - exact).max() <= scale / 2 + 1e-5
        assert codes[4:].max() == 65535


def test_a_model_does_not_diverge_from_itself(ctx: Context, tmp_path: Path) -> None:
    path = tmp_path / "logits"
    saved = perplexity(ctx, TEXT, 32, save_to=path)
    result = divergence(ctx, path)
    assert result.n_tokens == saved.n_tokens
    assert result.statistics.perplexity.value == pytest.approx(saved.value, rel=1e-5)
    assert result.statistics.base_perplexity.value == pytest.approx(saved.value, rel=1e-3)
    assert abs(result.statistics.mean.value) < 1e-4 and result.statistics.same_top.value == 1.0
    assert abs(result.statistics.log_ratio.value) < 1e-3 and result.statistics.correlation > 0.9999


def test_divergence_is_that_of_the_distributions(
    ctx: Context, draft_ctx: Context, tmp_path: Path
) -> None:
    """Compared with float64 over the whole vocabulary. The codes have 16 bits and end 16 nats below."""
    path = tmp_path / "logits"
    perplexity(ctx, TEXT, 32, chunks=3, save_to=path)
    result = divergence(draft_ctx, path)
    tokens = ctx.model.tokenize(TEXT)
    kls, same, changes = [], [], []
    for c in range(3):
        chunk = tokens[c * 32 : (c + 1) * 32]
        logs = []
        for context in (ctx, draft_ctx):
            with Branch.create(context) as branch:
                rows = [row.astype(np.float64) for row in branch.extend(chunk, logits="all")]
            logs.append([row - np.logaddexp.reduce(row) for row in rows])
        for i in range(16, 31):
            p, q = logs[0][i], logs[1][i]
            kls.append(float(np.sum(np.exp(p) * (p - q))))
            same.append(p.argmax() == q.argmax())
            changes.append(math.exp(q[chunk[i + 1]]) - math.exp(p[chunk[i + 1]]))
    assert result.statistics.mean.value == pytest.approx(np.mean(kls), abs=2e-3)
    assert result.percentile(1.0) == pytest.approx(max(kls), abs=1e-2)
    assert result.percentile(0.5) == pytest.approx(np.median(kls), abs=5e-3)
    assert result.statistics.same_top.value == pytest.approx(np.mean(same))
    assert result.statistics.p_change.value == pytest.approx(np.mean(changes), abs=1e-4)
    assert result.statistics.p_change_rms.value == pytest.approx(
        math.sqrt(np.mean(np.square(changes))), abs=1e-4
    )
    assert result.statistics.mean.stderr == pytest.approx(
        np.std(kls) / math.sqrt(len(kls) - 1), rel=0.05
    )


def test_short_texts_and_small_contexts_are_refused(ctx: Context, tmp_path: Path) -> None:
    before = ctx.decoder.n_decodes
    for text, window, options, message in (
        ("", 32, {}, "empty"),
        ([5] * 63, 32, {}, "needs 64"),
        (TEXT, 4096, {}, "4096"),
        (TEXT, 3, {}, "window"),
        (TEXT, 32, {"chunks": 0}, "chunks"),
        (TEXT, 32, {"save_to": tmp_path / "no" / "folder"}, "cannot write"),
    ):
        error = CacheFullError if window == 4096 else ConfigError
        with pytest.raises(error, match=message):
            perplexity(ctx, text, window, **options)
    assert ctx.decoder.n_decodes == before


def test_files_of_other_kinds_and_models_are_refused(
    ctx: Context, toy: lb.Model, tmp_path: Path
) -> None:
    path = tmp_path / "logits"
    perplexity(ctx, TEXT, 32, chunks=2, save_to=path)
    whole = path.read_bytes()
    other = tmp_path / "other"
    for data, message in (
        (b"", "not a file of"),
        (b"GGUF" + whole[4:], "not a file of"),
        (whole[:15], "not a file of"),
        (whole[:40], "incomplete"),
        (whole[:-1], "incomplete"),
        (whole[:8] + struct.pack("<3i", -1, 4096, 2) + whole[20:], "damaged"),
        (whole[:8] + struct.pack("<3i", 32, 0, 2) + whole[20:], "damaged"),
    ):
        other.write_bytes(data)
        with pytest.raises(ConfigError, match=message):
            divergence(ctx, other)
    with pytest.raises(ConfigError, match="cannot read"):
        divergence(ctx, tmp_path / "none")
    with (
        lb.Context(toy, n_ctx=256, n_threads=1) as small,
        pytest.raises(VocabularyMismatchError, match=str(ctx.n_vocab)),
    ):
        divergence(small, path)


def test_a_header_is_checked_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "logits"
    path.write_bytes(b"_logits_" + struct.pack("<3i", 512, 49152, 2**31 - 1))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="incomplete"):
            LogitsFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


def test_a_file_that_cannot_be_begun_is_closed(tmp_path: Path) -> None:
    with pytest.raises(OverflowError) as caught:
        LogitsFile.create(tmp_path / "logits", 5, [[2**40] * 4])
    assert caught.traceback[1].locals["file"].closed


def test_an_odd_vocabulary_is_padded(tmp_path: Path) -> None:
    with (
        lb.Model(toys.write_llama(tmp_path / "odd.gguf", vocab=259)) as model,
        lb.Context(model, n_ctx=256, n_seq_max=1, n_threads=1) as ctx,
    ):
        path = tmp_path / "logits"
        perplexity(ctx, list(range(2, 42)), 8, save_to=path)
        assert path.stat().st_size == 20 + 4 * 40 + 5 * 3 * 2 * 264
        assert divergence(ctx, path).n_tokens == 15
