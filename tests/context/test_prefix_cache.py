"""The prefix cache: what is shared, what is evicted; and no text depends on what is cached."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import toys

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams
from llamabranch.context.prefix_cache import CachedPrefix, PrefixCache, longest_prefix
from llamabranch.errors import CacheFullError

WARM = SamplingParams(temperature=0.8, seed=42)


def random_tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(2, 4000, n)]


def prefixes_of(ctx: Context) -> PrefixCache:
    cache = ctx.prefix_cache
    assert cache is not None
    return cache


@pytest.fixture
def cached(target: lb.Model) -> Iterator[Context]:
    with Context(target, n_ctx=512, n_seq_max=4, n_threads=1, prefix_cache=True, exact=True) as ctx:
        yield ctx
        ctx.audit()


@pytest.fixture
def clean(target: lb.Model) -> Iterator[Context]:
    with Context(target, n_ctx=512, n_seq_max=1, n_threads=1, exact=True) as ctx:
        yield ctx


def check(branch: Branch, clean: Context, n: int = 8) -> None:
    """Assert that the branch continues as in a clean context, with the same logits to the bit."""
    with Branch.start(clean, branch.tokens, sampling=branch.sampling) as again:
        assert np.array_equal(branch.logits, again.logits)
        assert [t.token for t in branch.generate(n)] == [t.token for t in again.generate(n)]


def test_longest_prefix_is_not_read_again(cached: Context, clean: Context) -> None:
    rng, prefixes = np.random.default_rng(0), prefixes_of(cached)
    tokens, ends = random_tokens(rng, 100), [random_tokens(rng, 20) for _ in range(2)]
    Branch.start(clean, tokens).prune()
    assert (clean.prefix_cache, clean.usage().cells_cached) == (None, 0)
    Branch.start(cached, [5] * 7).prune()
    assert len(prefixes) == 0  # too short to be kept
    for n in (30, 70, 100):  # a text that continues another replaces it
        Branch.start(cached, tokens[:n]).prune()
        usage = cached.usage()
        assert (usage.cells_used, usage.cells_cached, usage.sequences) == (0, n, {})
        assert (len(prefixes), usage.cells_free, cached.n_seq_free) == (1, 512, 4)
    for text, n_hit, n_cells in (
        (tokens, 99, 100),  # the last one's logits are needed
        (tokens[:60] + ends[0], 60, 120),
        (tokens[:60] + ends[0][:10] + ends[1], 70, 140),
    ):
        before = prefixes.n_hit_tokens
        branch = Branch.start(cached, text, sampling=WARM)
        assert prefixes.n_hit_tokens - before == n_hit
        assert cached.usage().cells_used == len(text)
        check(branch, clean)
        branch.prune()
        assert cached.usage().cells_cached == n_cells
    cached.kv_cache_clear()
    assert (len(prefixes), cached.usage().cells_cached) == (0, 0)
    n_hits = prefixes.n_hits
    Branch.start(cached, tokens).prune()
    assert prefixes.n_hits == n_hits


def test_least_recently_used_text_gives_up_its_end_first(cached: Context, clean: Context) -> None:
    rng = np.random.default_rng(3)
    texts = [random_tokens(rng, 100) for _ in range(4)]
    for tokens in texts:
        Branch.start(cached, tokens).prune()
    Branch.start(cached, [*texts[0][:90], 7]).prune()  # now the second is the oldest
    branch = Branch.start(cached, random_tokens(rng, 150), sampling=WARM)  # 111 cells were vacant
    prefixes = prefixes_of(cached)
    n = prefixes.n_evicted
    assert 38 <= n <= 64
    assert [prefixes.n_common(tokens) for tokens in texts] == [100, 100 - n, 100, 100]
    check(branch, clean)
    again = Branch.start(cached, texts[1], sampling=WARM)
    check(again, clean)
    branch.prune()
    again.prune()
    assert cached.usage().cells_used == 0
    branch = Branch.start(cached, random_tokens(rng, 512))  # all cells can be used by others
    assert cached.usage().cells_free == 0
    with pytest.raises(CacheFullError):
        branch.commit(5)
    branch.prune()
    assert cached.usage().cells_free == 512


def test_more_texts_than_ids_can_be_kept_in_turn(toy: lb.Model) -> None:
    rng = np.random.default_rng(7)
    with Context(toy, n_ctx=4096, n_seq_max=200, n_threads=1, prefix_cache=True, exact=True) as ctx:
        for i in range(70):
            Branch.start(ctx, [2 + i, *(int(t) for t in rng.integers(2, 250, 9))]).prune()
        assert len(prefixes_of(ctx)) == 254 - 200
        assert ctx.usage().cells_cached == 540
        ctx.audit()


@pytest.mark.parametrize("n", [60, 99])
def test_a_kept_text_longer_than_the_window_serves_its_beginnings(n: int, tmp_path: Path) -> None:
    """llama.cpp writes later tokens into cells that have left the window (32) of their only sequence."""
    path = toys.write_gemma3(tmp_path / "toy.gguf", vocab="bytes", weights="f32")
    rng = np.random.default_rng(8)
    tokens, others = ([int(t) for t in rng.integers(2, 250, 100)] for _ in range(2))
    with (
        lb.Model(path) as model,
        Context(model, n_ctx=256, n_seq_max=2, n_threads=1, prefix_cache=True) as ctx,
        Context(model, n_ctx=256, n_seq_max=1, n_threads=1) as clean,
    ):
        # Its cells come first, so they are free below the others.
        Branch.start(ctx, others[:20]).prune()
        Branch.start(ctx, tokens).prune()
        prefixes_of(ctx).evict(20)
        Branch.start(ctx, others[20:90]).prune()
        n_hit = prefixes_of(ctx).n_hit_tokens
        with (
            Branch.start(ctx, [*tokens[:n], 7]) as branch,
            Branch.start(clean, branch.tokens) as again,
        ):
            assert prefixes_of(ctx).n_hit_tokens - n_hit == n
            assert np.abs(branch.logits - again.logits).max() < 0.05
            ctx.audit()


# -- how prefixes are found --------------------------------------------------------------------------


def n_same(left: list[int], right: list[int]) -> int:
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    return n


def test_what_is_found_is_what_a_comparison_of_all_finds() -> None:
    """Also where only a whole text or a part of it can be shared, as in recurrent memory."""
    rng = random.Random(1)
    for _ in range(500):
        texts = [
            CachedPrefix(rng.choices((0, 1, 2), k=rng.randint(1, 9)), i)
            for i in range(rng.randint(0, 8))
        ]
        wanted = rng.choices((0, 1, 2), k=rng.randint(0, 9))
        points = [{rng.randint(0, 9), len(text.tokens)} for text in texts]

        def usable(i: int, n: int, points: list[set[int]] = points) -> int:
            return max((point for point in points[i] if point <= n), default=0)

        for share in (lambda _i, n: n, usable):
            lengths = [share(text.seq_id, n_same(text.tokens, wanted)) for text in texts]
            n, text = longest_prefix(texts, wanted, share)
            assert n == max(lengths, default=0)
            assert (0 if text is None else lengths[text.seq_id]) == n
