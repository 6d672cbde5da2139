"""The packer: it puts runs of tokens into few decodes, and the rows equal those of one decode per run."""

from __future__ import annotations

import pytest

from llamabranch import Context
from llamabranch.context.runner import Batch, decode_run
from llamabranch.errors import CacheFullError
from llamabranch.model import Model

TEXTS = {0: list(range(5, 18)), 1: list(range(9, 11)), 2: list(range(30, 50)), 3: [7]}
MIXED: dict[int, str | int] = {0: "all", 1: "last", 2: 0, 3: "none"}
FROM: dict[int, str | int] = {0: 10, 1: 0, 2: 20, 3: 9}


@pytest.mark.parametrize(
    ("n_batch", "n_rows", "wants", "n_decodes", "sizes"),
    [
        (64, 64, MIXED, 1, [13, 1, 20, 0]),
        (8, 8, MIXED, 5, [13, 1, 20, 0]),
        (8, 4, MIXED, None, [13, 1, 20, 0]),
        (5, 4, MIXED, None, [13, 1, 20, 0]),
        (8, 8, FROM, 5, [3, 2, 0, 0]),
        (10, 10, dict.fromkeys(TEXTS, "last"), 4, [1, 1, 1, 1]),  # 36 tokens
        (10, 4, dict.fromkeys(TEXTS, "all"), 9, [13, 2, 20, 1]),  # 36 rows
    ],
)
def test_runs_get_their_rows_in_as_few_decodes_as_possible(
    target: Model,
    n_batch: int,
    n_rows: int,
    wants: dict[int, str | int],
    n_decodes: int | None,
    sizes: list[int],
) -> None:
    alone = []
    with Context(target, n_ctx=256, n_threads=1, n_seq_max=4, exact=True) as ctx, ctx.lock:
        for seq_id, tokens in TEXTS.items():
            rows = [row.best for row in decode_run(ctx.decoder, tokens, seq_id, "all")]
            alone.append(rows[len(rows) - sizes[seq_id] :])
    with (
        Context(
            target,
            n_ctx=256,
            n_threads=1,
            n_seq_max=4,
            n_batch=n_batch,
            n_outputs_max=n_rows,
            exact=True,
        ) as ctx,
        ctx.lock,
    ):
        batch, read = Batch(), []
        for seq_id, tokens in TEXTS.items():
            batch.add(seq_id, tokens, wants[seq_id])
        before = ctx.decoder.n_decodes
        if n_decodes == 9:  # rows may be read as they are computed
            batch.decode(ctx.decoder, read=lambda n, rows: read.append((n, len(rows))))
            assert read == [(n, 4) for n in range(0, 36, 4)]
        else:
            assert [[row.best for row in rows] for rows in batch.decode(ctx.decoder)] == alone
        assert n_decodes in (None, ctx.decoder.n_decodes - before)
        ends = [ctx.kv_cache.next_position(seq_id) for seq_id in TEXTS]
        assert ends == [len(tokens) for tokens in TEXTS.values()]


def test_all_runs_or_none(target: Model) -> None:
    def fail(first: int, rows: object) -> None:
        raise KeyError

    with (
        Context(target, n_ctx=256, n_threads=1, n_seq_max=4, n_batch=8, exact=True) as ctx,
        ctx.lock,
    ):
        decode_run(ctx.decoder, [5] * 230, 3, "none")
        batch = Batch()
        for seq_id, tokens in TEXTS.items():
            batch.add(seq_id, tokens)
        with pytest.raises(CacheFullError):
            batch.decode(ctx.decoder)
        assert [ctx.kv_cache.next_position(seq_id) for seq_id in TEXTS] == [0, 0, 0, 230]
        ctx.audit()
        batch = Batch()
        batch.add(0, TEXTS[0])
        with pytest.raises(KeyError):
            batch.decode(ctx.decoder, read=fail)
        assert ctx.kv_cache.next_position(0) == 0
