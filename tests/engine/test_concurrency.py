"""How many texts run at a time, chosen by measured throughput."""

from __future__ import annotations

import pytest

import llamabranch as lb
from llamabranch import Context, Engine, Request, SamplingParams
from llamabranch.engine.concurrency import Concurrency
from llamabranch.generation.length.curve import Curve


def run(
    n_texts: int, length: int, *, skipped_us: float, found: Concurrency, most: int = 16
) -> list[int]:
    """Let texts of one length go through the engine in waves; return how many ran in each."""
    sizes = []
    while n_texts:
        size = min(n_texts, found.limit or most)
        n_texts -= size
        sizes.append(size)
        for position in range(length):
            for _ in range(size if position == length - 1 else 0):
                found.note_end(length)
            cells = size * position
            seconds = 1e-6 * (900 + 300 * size + 1.5 * cells + skipped_us * size * cells)
            found.note_step(size, size, cells, seconds, most=most, waits=n_texts > 0)
    return sizes


def test_long_texts_run_few_at_a_time() -> None:
    found = Concurrency()
    sizes = run(200, 850, skipped_us=0.2, found=found)
    assert sizes[:4] == [16, 8, 4, 2]
    # A token's time is 900 / n + 300 + 1.5 L + 0.2 n L, with L = 425 on average: n = 3 is best.
    assert sizes[-2] in (2, 4)
    run(100, 30, skipped_us=0.2, found=found)  # short ones come
    assert found.limit is None
    run(100, 850, skipped_us=0.2, found=found)
    assert found.limit in (2, 4)


def test_all_run_where_that_costs_nothing() -> None:
    for skipped_us in (0.0, 0.001):
        found = Concurrency()
        sizes = run(200, 850, skipped_us=skipped_us, found=found)
        assert sizes.count(16) >= len(sizes) - 3
        assert found.limit is None


def test_nothing_is_tried_with_few_or_short_texts() -> None:
    found = Concurrency()
    assert set(run(160, 100, skipped_us=9.0, found=found)) == {16}
    assert set(run(16, 850, skipped_us=9.0, found=found)) == {16}  # none waits
    assert set(run(20, 850, skipped_us=9.0, found=found, most=2)) <= {1, 2}


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
        limited.core.learning.concurrency.limit = (None, 2, 4)[n_steps // 8 % 3]  # type: ignore[union-attr]
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


def stairs(*, beyond: float = 3.7) -> Curve:
    """Return a curve on which four rows more cost little, and the first one after them much."""
    block = {1: 4.7, 2: 8.0, 3: 11.1, 4: 10.2, 5: 12.9, 6: 14.1, 7: 16.9, 8: 12.0}
    curve = Curve(block | {8 + n: 12.0 + beyond * (n > 0) for n in range(1, 9)})
    curve.fills = True
    return curve


@pytest.mark.parametrize(
    ("most", "n_texts", "expected"),
    [
        (9, 8, 8),  # no more than there are
        (9, 9, 9),  # 15.7 against 12 and then 4.7
        (9, 16, 8),  # two waves of 12 against 15.7 and 12
        (9, 1000, 8),
        (16, 16, 16),  # one wave of 15.7
        (16, 8, 8),
        (8, 16, 8),
        (3, 100, 3),
        (1, 5, 1),
        (40, 100, 40),  # not known
    ],
)
def test_texts_run_in_numbers_that_end_on_an_edge(most: int, n_texts: int, expected: int) -> None:
    found = Concurrency(stairs())
    assert min(n_texts, found.on_edge(most, min(n_texts, 2 * most))) == expected


def test_where_nothing_is_measured_all_run() -> None:
    assert Concurrency(Curve()).on_edge(9, 16) == 9
    assert Concurrency().on_edge(9, 16) == 9


@pytest.mark.parametrize("n", [1, 16])
def test_engine_runs_as_many_texts_as_end_on_an_edge(n: int, target: lb.Model) -> None:
    """Sixteen texts on nine sequences: eight at a time, whether they are of one request or of many."""
    with Context(target, n_ctx=1024, n_seq_max=9, n_threads=1, batch_invariant=True) as ctx:
        requests = [
            Request(f"The wolf {i}", max_tokens=12, n=n, sampling=SamplingParams(seed=i))
            for i in range(16 // n)
        ]
        expected = [result.tokens for result in Engine(ctx, seed=1).generate(requests)]
        engine = Engine(ctx, seed=1)
        assert engine.explain() == "plain decoding: there is no drafter"
        engine.core.learning.loop.curve = stairs()
        assert "9 tokens v = 3.34" in engine.explain() and "5 to 8" in engine.explain()
        engine.core.learning.loop.curve = None
        engine.core.learning.concurrency = Concurrency(stairs())
        for request in requests:
            engine.add_request(request)
        texts: dict[tuple[str, int], list[int]] = {}
        most = 0
        while engine.has_unfinished():
            events = engine.step()
            most = max(most, len({(e.id, e.sample) for e in events if e.result is None}))
            texts |= {(e.id, e.sample): e.result.tokens for e in events if e.result is not None}
        assert most == 8
        assert [texts[str(i), k] for i in range(16 // n) for k in range(n)] == expected


def test_limit_must_be_a_positive_number(ctx: Context) -> None:
    with pytest.raises(lb.ConfigError, match="parallel"):
        Engine(ctx, parallel=0)
