"""The packer: any runs of tokens, in as few decodes as possible, give the rows of one decode each."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from llamabranch import Context
from llamabranch.context.runner import Batch, decode_run
from llamabranch.errors import CacheFullError
from llamabranch.model import Model

TEXTS = {0: list(range(5, 18)), 1: list(range(9, 11)), 2: list(range(30, 50)), 3: [7]}
WANTS: dict[int, str | int] = {0: "all", 1: "last", 2: 0, 3: "none"}


def rows_of(ctx: Context, wants: Mapping[int, str | int]) -> list[list[int]]:
    batch = Batch()
    for seq_id, tokens in TEXTS.items():
        batch.add(seq_id, tokens, wants[seq_id])
    with ctx.lock:
        found = batch.decode(ctx.decoder)
        return [[row.best for row in rows] for rows in found]


@pytest.mark.parametrize(("n_batch", "n_rows"), [(64, 64), (8, 8), (8, 4), (5, 4)])
def test_runs_get_their_rows_however_small_a_decode_is(
    target: Model, n_batch: int, n_rows: int
) -> None:
    alone = []
    with Context(target, n_ctx=256, n_threads=1, n_seq_max=4) as ctx:
        for seq_id, tokens in TEXTS.items():
            with ctx.lock:
                rows = decode_run(ctx.decoder, tokens, seq_id, str(WANTS[seq_id] or "all"))
                alone.append([row.best for row in rows])
    with Context(
        target, n_ctx=256, n_threads=1, n_seq_max=4, n_batch=n_batch, n_outputs_max=n_rows
    ) as ctx:
        assert rows_of(ctx, WANTS) == alone
        assert [len(rows) for rows in alone] == [13, 1, 20, 0]
        sizes = [ctx.kv_cache.next_position(seq_id) for seq_id in TEXTS]
        assert sizes == [len(tokens) for tokens in TEXTS.values()]


def test_rows_from_a_token_on(target: Model) -> None:
    with Context(target, n_ctx=256, n_threads=1, n_seq_max=4, n_batch=8) as ctx:
        found = rows_of(ctx, {0: 10, 1: 0, 2: 20, 3: 9})
        assert [len(rows) for rows in found] == [3, 2, 0, 0]


def test_as_few_decodes_as_possible(target: Model) -> None:
    with Context(target, n_ctx=256, n_threads=1, n_seq_max=4, n_batch=10, n_outputs_max=10) as ctx:
        before = ctx.decoder.n_decodes
        rows_of(ctx, dict.fromkeys(TEXTS, "last"))
        assert ctx.decoder.n_decodes - before == 4  # 36 tokens
    with Context(target, n_ctx=256, n_threads=1, n_seq_max=4, n_batch=10, n_outputs_max=4) as ctx:
        before = ctx.decoder.n_decodes
        rows_of(ctx, dict.fromkeys(TEXTS, "all"))
        assert ctx.decoder.n_decodes - before == 9  # 36 rows


def test_rows_are_read_as_they_are_computed(target: Model) -> None:
    with Context(target, n_ctx=256, n_threads=1, n_seq_max=4, n_batch=8, n_outputs_max=4) as ctx:
        read: list[tuple[int, int]] = []
        batch = Batch()
        for seq_id, tokens in TEXTS.items():
            batch.add(seq_id, tokens, "all")
        with ctx.lock:
            batch.decode(ctx.decoder, read=lambda n, rows: read.append((n, len(rows))))
        assert read == [(n, 4) for n in range(0, 36, 4)]


def test_all_runs_or_none(target: Model) -> None:
    with Context(target, n_ctx=256, n_threads=1, n_seq_max=4, n_batch=8) as ctx:
        with ctx.lock:
            decode_run(ctx.decoder, [5] * 230, 3, "none")
            batch = Batch()
            for seq_id, tokens in TEXTS.items():
                batch.add(seq_id, tokens)
            with pytest.raises(CacheFullError):
                batch.decode(ctx.decoder)
            assert [ctx.kv_cache.next_position(seq_id) for seq_id in TEXTS] == [0, 0, 0, 230]
            ctx.audit()

        def fail(first: int, rows: object) -> None:
            raise KeyError

        batch = Batch()
        batch.add(0, TEXTS[0])
        with ctx.lock, pytest.raises(KeyError):
            batch.decode(ctx.decoder, read=fail)
        assert ctx.kv_cache.next_position(0) == 0
