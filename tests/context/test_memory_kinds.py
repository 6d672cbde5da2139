"""Each kind of memory forks, cuts and makes room as well as it can, and says what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import toys
from rounding import rounding

import llamabranch as lb
from llamabranch import Context
from llamabranch.context.memory import END, Memory, NonUnified, States, Windowed

TOKENS = [(5 * i + 2) % 90 + 2 for i in range(60)]  # beyond the window of 32


class Kind(NamedTuple):
    """A memory, and what it can do."""

    write: Callable[..., Path]
    memory: type[Memory]
    gives_parts: bool = True
    has_spare_ids: bool = True
    options: dict[str, Any] = {}  # noqa: RUF012  (not changed)


KINDS = {
    "unified": Kind(toys.write_llama, Memory),
    "non-unified": Kind(
        toys.write_llama, NonUnified, has_spare_ids=False, options={"kv_unified": False}
    ),
    "window": Kind(toys.write_gemma3, Windowed),
    "window, cells used again": Kind(
        toys.write_gemma3, States, gives_parts=False, options={"swa_full": False}
    ),
    "recurrent": Kind(toys.write_mamba, States, gives_parts=False, has_spare_ids=False),
    "hybrid": Kind(toys.write_lfm2, States, gives_parts=False, has_spare_ids=False),
}


@pytest.fixture(scope="module", params=KINDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Kind, Context]]:
    kind = KINDS[request.param]
    path = kind.write(tmp_path_factory.mktemp("kinds") / "toy.gguf", vocab="bytes")
    with Context(
        lb.Model(path), n_ctx=1024, n_seq_max=4, n_threads=1, owns_model=True, **kind.options
    ) as ctx:
        yield kind, ctx


@pytest.fixture
def kind(world: tuple[Kind, Context]) -> Kind:
    return world[0]


@pytest.fixture
def ctx(world: tuple[Kind, Context]) -> Iterator[Context]:
    yield world[1]
    world[1].audit()
    world[1].kv_cache_clear()


def continued(ctx: Context, seq_id: int, n: int) -> np.ndarray[Any, Any]:
    """Return the logits after all tokens, of which the sequence holds the first ``n``."""
    ctx.decode(TOKENS[n:], n, seq_id)
    return ctx.logits()


def test_probe_makes_the_memory_that_fits(kind: Kind, ctx: Context) -> None:
    memory = ctx.kv_cache
    assert type(memory) is kind.memory
    assert memory.can_draft == ctx.capabilities.can_truncate == kind.gives_parts
    assert bool(memory.spare_seq_ids) == kind.has_spare_ids
    assert memory.usable(5, 5) == 5
    assert memory.usable(5, 9) == memory.usable(5, END) == (5 if kind.gives_parts else 0)


@pytest.mark.parametrize("n", [5, 45])
def test_fork_of_a_part_gives_it_or_nothing(n: int, kind: Kind, ctx: Context) -> None:
    expected = continued(ctx, 3, 0)
    ctx.decode(TOKENS, 0, 0)
    ctx.decode([7, 8, 9], 0, 1)  # what the target held before is dropped
    held = ctx.kv_cache.fork(0, 1, n)
    assert held == ctx.kv_cache_size(1) == (n if kind.gives_parts else 0)
    assert ctx.kv_cache.fork(0, 2, 0) == ctx.kv_cache_size(2) == 0
    assert ctx.kv_cache.next_position(0) == len(TOKENS)
    assert np.abs(continued(ctx, 1, held) - expected).max() <= rounding(ctx)


def test_whole_fork_goes_on_like_its_source(ctx: Context) -> None:
    expected = continued(ctx, 3, 0)
    ctx.decode(TOKENS[:40], 0, 0)
    assert ctx.kv_cache.fork(0, 1) == ctx.kv_cache.fork(0, 2, 40) == 40
    for seq_id in (1, 2):
        assert np.abs(continued(ctx, seq_id, 40) - expected).max() <= rounding(ctx)
    ctx.kv_cache_remove(0)
    assert ctx.kv_cache.next_position(1) == len(TOKENS)


@pytest.mark.parametrize("n", [0, 7, 50])
def test_cut_says_what_is_left(n: int, kind: Kind, ctx: Context) -> None:
    expected = continued(ctx, 0, 0)
    assert ctx.kv_cache.cut(0, len(TOKENS)) == len(TOKENS)  # nothing to drop
    left = ctx.kv_cache.cut(0, n)
    assert left == ctx.kv_cache.next_position(0) == (n if kind.gives_parts else 0)
    assert ctx.kv_cache.cut(0, n + 1) == left  # it holds fewer
    assert np.abs(continued(ctx, 0, left) - expected).max() <= rounding(ctx)


def test_room_is_that_of_a_sequence_or_of_all(kind: Kind, ctx: Context) -> None:
    memory = ctx.kv_cache
    ctx.decode(TOKENS, 0, 0)
    is_divided = kind.memory is NonUnified
    assert memory.room(0, 300) == (ctx.n_ctx_seq - len(TOKENS) if is_divided else 300)
    assert memory.has_room(2000, 0) == is_divided
    assert memory.has_room(500, 400)
    assert not memory.reclaim(10)  # nothing is cached or quarantined
    full = str(memory.full_error(10))
    assert ("a sequence is full" in full) == is_divided


def test_drafts_fit_where_they_can_be_verified(kind: Kind, ctx: Context) -> None:
    n_free = ctx.n_seq_free
    assert ctx.fits(0, 4) == 4
    holders = [type("Holder", (), {})() for _ in range(n_free)]
    leases = [ctx.sequences.allocate(holder) for holder in holders]
    try:
        assert ctx.fits(0, 4) == (4 if kind.gives_parts else 0)
    finally:
        for seq_id in leases:
            ctx.sequences.free(seq_id)
