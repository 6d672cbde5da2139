"""How many texts run at a time, learned from the times of decodes."""

from __future__ import annotations

import pytest

import llamabranch as lb
from llamabranch import Context, Engine, Request, SamplingParams
from llamabranch.engine.concurrency import Concurrency


def decode_s(n: int, n_cells: int, n_used: int, *, skipped_us: float) -> float:
    """Return the seconds of a decode of ``n`` texts, by the rule that is to be found."""
    return 1e-6 * (900 + 300 * n + 1.5 * n_cells + skipped_us * n * n_used)


def learn(skipped_us: float, *, most: tuple[int, ...] = (16, 6)) -> Concurrency:
    """Let texts grow, all or some of them at a time; so many are in the cache."""
    found = Concurrency()
    for position in range(180, 480):
        n_texts = most[position // 25 % len(most)]
        n = found.n_probed(n_texts, n_texts * position)
        n_cells, n_used = n * position, n_texts * position
        seconds = decode_s(n, n_cells, n_used, skipped_us=skipped_us)
        found.learn(n, n_cells, lambda n_used=n_used: n_used, seconds)  # type: ignore[misc]
        if position % 37 == 0:  # something else held it up
            found.learn(n, n_cells, lambda n_used=n_used: n_used, 5 * seconds)  # type: ignore[misc]
    return found


def test_long_texts_run_few_at_a_time() -> None:
    found = learn(0.2)
    assert found.has_news
    found.update(850, 16)
    best = (900 / (0.2 * 850)) ** 0.5  # 2.3
    assert found.limit == round(best)
    found.update(10, 16)  # short ones come
    assert found.limit is None
    found.update(850, 2)
    assert found.limit is None  # no more can run anyway


def test_nothing_is_concluded_from_one_number_of_texts() -> None:
    found = learn(0.2, most=(16,))
    found.update(850, 16)
    assert found.limit is None


def test_all_run_where_that_costs_nothing() -> None:
    found = learn(0.0)
    found.update(850, 16)
    assert found.limit is None
    found = learn(0.001)
    found.update(850, 16)
    assert found.limit is None


def test_nothing_is_tried_with_few_or_short_texts() -> None:
    found = Concurrency()
    for _ in range(500):
        assert found.n_probed(16, 1000) == 16
        found.learn(16, 200, lambda: 200, 0.001)
    assert not found.has_news
    assert found.n_probed(3, 5000) == 3


def test_limited_texts_are_the_same(ctx: Context, other_ctx: Context) -> None:
    engine, limited = Engine(ctx, seed=1), Engine(other_ctx, seed=1, parallel=5)
    warm = SamplingParams(temperature=0.8)
    requests = [Request(f"The wolf number {i}", max_tokens=30, sampling=warm) for i in range(7)]
    expected = [result.tokens for result in engine.generate(requests)]
    found: list[list[int]] = []
    n_running = set()
    for i, request in enumerate(requests):
        limited.add_request(Request(request.prompt, id=str(i), max_tokens=30, sampling=warm))
    results = {}
    while limited.has_unfinished():
        n_steps = limited.stats.target_forward_passes
        # Whatever is learned meanwhile changes no text.
        limited.core.settings.concurrency.limit = (None, 2, 4)[n_steps // 8 % 3]  # type: ignore[union-attr]
        tokens_of = set()
        for event in limited.step():
            tokens_of.add(event.id)
            if event.result is not None:
                results[event.id] = event.result
        n_running.add(len(tokens_of))
    found = [results[str(i)].tokens for i in range(7)]
    assert found == expected
    assert max(n_running) == 5
    assert other_ctx.usage().cells_used == 0


def test_limit_must_be_a_positive_number(ctx: Context) -> None:
    with pytest.raises(lb.ConfigError, match="parallel"):
        Engine(ctx, parallel=0)
