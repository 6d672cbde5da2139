"""The curve of the target's decodes: steps and edges; decodes that are filled change no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams, SpeculativeConfig, SpeculativeStats
from llamabranch.generation.length.auto import AutoLength
from llamabranch.generation.length.base import FixedLength, RoundReport
from llamabranch.generation.length.curve import Curve
from llamabranch.generation.length.known import Known
from llamabranch.generation.length.stop_rule import StopRule
from llamabranch.generation.loop import Loop

# Blocks of four rows, and what is left of them row by row: SmolLM2, Q4_0, two cores with AVX-512.
STAIRS = {
    1: 4.7, 2: 8.0, 3: 11.1, 4: 10.2, 5: 12.9, 6: 14.1, 7: 16.9, 8: 12.0, 9: 15.7, 10: 16.5, 11: 18.0,
    12: 15.4, 13: 19.1, 14: 19.5, 15: 20.0, 16: 15.4, 17: 19.4,
}  # fmt: skip
ROWS = dict(
    zip(range(1, 18), (1, 2, 4, 4, 8, 8, 8, 8, 9, 12, 12, 12, 16, 16, 16, 16, 17), strict=True)
)
WARM = SamplingParams(temperature=0.8, seed=4)
PROMPTS = ("Once upon a time", "The king", "In the wood there was a wolf", "A fox", "One day")
REFRAIN = "the king said to the wolf, the wolf said to the king, and " * 3


def stairs(pace: float = 1.0) -> Curve:
    curve = Curve({n: pace * seconds for n, seconds in STAIRS.items()})
    curve.fills = True
    return curve


# -- the curve --------------------------------------------------------------------------------------


def test_decodes_are_filled_up_to_the_edge_that_is_fastest() -> None:
    curve = stairs()
    assert {n: curve.rows(n) for n in ROWS} == ROWS
    assert curve.rows(40) == 40
    assert curve.filled(5) == curve.of(8) < curve.of(5)
    assert "5 to 8" in curve.explain()
    curve.fills = False  # batches are not exact
    assert curve.rows(5) == 5


def test_no_decode_is_filled_for_a_small_gain_or_by_times_of_this_run_alone() -> None:
    curve = Curve({1: 1.0, 2: 2.0, 3: 1.98})
    curve.fills = True
    assert curve.rows(2) == 2
    for n, seconds in STAIRS.items():
        curve.learn(n, seconds)
    assert [curve.rows(n) for n in (5, 6, 7)] == [5, 6, 7]


def test_no_decode_is_filled_by_times_of_few_decodes() -> None:
    curve = Curve({1: 1.0, 5: 5.5, 6: 0.49, 7: 7.06}, {1: 40, 5: 1, 6: 1, 7: 2})
    curve.fills = True
    assert [curve.rows(n) for n in (1, 5, 7)] == [1, 5, 7]
    assert "from fewer than 4 decodes: 5 to 7" in curve.explain()
    curve.measure(6, 0.49, 4)
    assert curve.rows(1) == 6
    assert "from fewer than 4 decodes: 5, 7; padded: 1 to 6" in curve.explain()


def test_edges_follow_what_is_measured() -> None:
    """Eight rows are not as fast as an earlier run has found."""
    curve = stairs()
    for _ in range(40):
        curve.learn(8, 18.0)
        curve.learn(1, 4.7)
    assert curve.rows(5) != 8
    assert curve.of(8) == pytest.approx(18.0, rel=0.05)


def test_sizes_that_are_not_decoded_keep_pace_with_those_that_are() -> None:
    curve = stairs()
    for _ in range(60):
        curve.learn(1, 3 * 4.7)
    assert curve.of(8) / curve.of(1) == pytest.approx(12.0 / 4.7, rel=0.02)
    curve.learn(8, 3 * 12.0)
    for _ in range(60):  # the text gets longer, or the machine slower, while only 1 is decoded
        curve.learn(1, 6 * 4.7)
    assert curve.of(8) / curve.of(1) == pytest.approx(12.0 / 4.7, rel=0.05)


def test_first_decode_of_a_size_that_is_slow_moves_little() -> None:
    curve = stairs()
    curve.learn(20, 900.0)
    assert curve.of(20) < 5 * STAIRS[17]


def test_last_step_of_the_curve_is_no_slope() -> None:
    assert stairs().of(33) < 1.6 * STAIRS[17]


# -- how long ---------------------------------------------------------------------------------------


def rule(**changes: object) -> StopRule:
    costs = [stairs().filled(1 + k) for k in range(17)]
    fields = {"edges": (0.5,), "acceptance": (0.8, 0.3, 0.5), "costs": costs, "rate": 1 / 4.7}
    return StopRule(float("inf"), **(fields | changes))  # type: ignore[arg-type]


def test_weighed_drafts_end_on_an_edge() -> None:
    assert rule(acceptance=(0.9, 0.3, 0.5)).longest([0.1] * 16) == 15
    assert rule().longest([0.1] * 16) == 7
    assert rule(acceptance=(0.2, 0.1, 0.5)).longest([0.1] * 16) == 0
    assert rule(most_tokens=3).longest([0.1] * 16) == 3
    # Whatever follows costs nothing up to the edge, however improbable it is.
    assert rule().longest([0.1] * 4 + [2.0] * 12) == 7
    assert rule(rate=0.0).longest([0.1] * 4) == 4


@pytest.mark.parametrize("seed", range(20))
def test_weighed_drafts_gain_the_most_on_any_curve(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.uniform(1.0, 4.0, 12).tolist()
    entropies = rng.uniform(0.0, 1.0, 11).tolist()
    found = rule(costs=costs, rate=0.6)
    n = found.longest(entropies)

    def gain(k: int) -> float:
        chances = [0.8 if entropy < 0.5 else 0.3 for entropy in entropies]
        return float(np.cumprod(chances)[:k].sum()) - 0.6 * float(costs[k] - costs[0])

    best = max(range(len(costs)), key=gain)
    assert n == (best if gain(best) > 0.2 else 0)


def test_auto_drafts_up_to_the_edge() -> None:
    """Where five tokens take longer than eight, no draft ends between."""
    length = AutoLength(16, known=Known(STAIRS, "a claim"))
    length.curve.fills = True
    rng, drafts = np.random.default_rng(1), []
    for _ in range(300):
        n = accepted = 0
        while n < 16 and length.consider("model") and length.goes_on(n, 0.3):
            n += 1
        while accepted < n and rng.random() < 0.8:
            accepted += 1
        shown, rows = [0.3] * (n + (n < 16)), length.curve.rows(1 + n)
        report = RoundReport("model", True, shown, n, accepted, 1 + n, 0.01, STAIRS[rows])
        length.learn(report._replace(n_rows=rows))
        drafts.append(n)
    assert set(drafts[20:]) <= {0, 3, 7, 15}
    assert drafts.count(7) > 200


def test_drafts_of_many_streams_fill_what_is_left() -> None:
    """Five streams are decoded with eight rows: three copied tokens cost nothing, whoever has them."""
    length = AutoLength(16, known=Known(STAIRS, "a claim", estimates=frozenset({"suffix"})))
    length.curve.fills = True
    streams = [length.stream(shares_decode=True) for _ in range(5)]
    for stream in streams:
        stream.learn(RoundReport.plain(1, 0.0, 0.0))
    length.learn_decode(streams, 8, STAIRS[8])

    def drafted(surprisals: Sequence[float]) -> list[int]:
        found = []
        for stream in streams:
            assert stream.plain_steps(1) == 0 and stream.consider("suffix")
            weighing = stream.stop_rule(0)
            assert weighing.weighs
            found.append(weighing.longest(surprisals))
        length.learn_decode(streams, 8, STAIRS[8])
        return found

    assert drafted([0.7, 0.7]) == [2, 1, 0, 0, 0]  # each is accepted in half of the cases
    assert drafted([0.7]) == [1, 1, 1, 0, 0]
    assert drafted([3.0]) == [0] * 5


def test_tokens_that_are_not_drafted_show_whether_they_would_have_been_accepted() -> None:
    """After copies that were wrong nothing is drafted, until what follows is seen to be copied."""
    times = {n: 0.5 + 0.5 * n for n in range(1, 18)}
    length = AutoLength(16, known=Known(times, "a claim", estimates=frozenset({"suffix"})))
    surprisals = [0.05] * 16

    def drafted(n_accepted: int, *, followed: bool | None) -> int:
        assert length.consider("suffix")
        n = length.stop_rule(0).longest(surprisals)
        shown, accepted = surprisals[: n + 1], min(n, n_accepted)
        report = RoundReport("suffix", True, shown, n, accepted, 1 + n, 0.0, times[1 + n])
        length.learn(report._replace(followed=None if accepted < n else followed))
        return n

    assert drafted(0, followed=None) > 4
    assert drafted(0, followed=None) > 0  # a single one that is wrong does not end drafting
    while drafted(0, followed=False):
        pass
    assert [drafted(0, followed=False) for _ in range(3)] == [0] * 3
    found = [drafted(16, followed=True) for _ in range(30)]
    assert found[0] == 0 and found[-1] > 4


def test_copied_drafts_grow_with_the_decodes_that_have_a_time() -> None:
    """Nothing is known at first: no draft relies on a time far beyond those that were seen."""
    length = AutoLength(32, known=Known(estimates=frozenset({"suffix"})))
    length.learn(RoundReport.plain(3, 1.0, 0.0))
    assert length.plain_steps(1) == 0
    found, surprisals = [], [0.01] * 32
    for _ in range(4):
        assert length.consider("suffix")
        n = length.stop_rule(0).longest(surprisals)
        seconds = 1.0 + n / 100
        length.learn(RoundReport("suffix", True, surprisals[: n + 1], n, n, 1 + n, 0.0, seconds))
        found.append(n)
    assert found == [7, 15, 31, 32]


def test_measured_sizes_decide_as_those_of_earlier_runs_do() -> None:
    curve = Curve()
    curve.fills = True
    for n, seconds in STAIRS.items():
        curve.measure(n, seconds, 4)
    assert {n: curve.rows(n) for n in ROWS} == ROWS
    assert curve.of(8) == STAIRS[8]
    curve.learn(20, 40.0)
    said = curve.explain()
    assert "measured while nothing ran: 1 to 17; learned from this run's decodes: 20" in said
    assert "others: interpolated" in said and "profile" not in said


def test_a_copy_that_is_cut_short_is_tested_by_the_token_in_its_place(ctx: Context) -> None:
    reports: list[RoundReport] = []

    class Watched(AutoLength):
        def learn(self, report: RoundReport) -> None:
            reports.append(report)
            claimed = float(report.n_verified)  # seconds, whatever the machine does meanwhile
            super().learn(report._replace(draft_s=0.0, verify_s=claimed, overhead_s=0.0))

    known = Known({n: float(n) for n in range(1, 18)}, "a claim", estimates=frozenset({"suffix"}))
    length = Watched(16, known=known)  # a drafted token costs what it costs alone
    generate(ctx, Loop(ctx, length, lb.SuffixDrafter(min_match=1)), [REFRAIN], 30)
    tested = [report for report in reports if report.followed is not None]
    assert {report.followed for report in tested} == {True, False}


# -- filled decodes change nothing ------------------------------------------------------------------


def on_stairs(ctx: Context, *, drafts: bool) -> Loop:
    loop = Loop(ctx, FixedLength(4), lb.SuffixDrafter(min_match=1) if drafts else None)
    loop.curve = stairs()
    return loop


def generate(ctx: Context, loop: Loop, prompts: Sequence[str], n: int) -> list[list[int]]:
    branches = [Branch.start(ctx, prompt, sampling=WARM) for prompt in prompts]
    running = [loop.open(branch.sequence, "seeded", SpeculativeStats()) for branch in branches]
    texts = [[each.draw().token] for each in running]
    while min(map(len, texts)) < n:
        loop.step([(each, 16) for each in running])
        for tokens, each in zip(texts, running, strict=True):
            assert each.error is None
            tokens += [one.token for one in each.emitted]
        ctx.audit()
        assert ctx.usage().in_order
        for branch in branches:
            assert branch.sequence.n_cached == branch.position - 1
    for each in running:
        each.close()
    for branch in branches:
        branch.prune()
    return [tokens[:n] for tokens in texts]


def plain(ctx: Context, prompt: str, n: int) -> list[int]:
    with Branch.start(ctx, prompt, sampling=WARM) as branch:
        return [one.token for one in branch.generate(n)]


@pytest.fixture
def decoded(ctx: Context) -> Iterator[list[int]]:
    """The tokens of each decode."""
    sizes: list[int] = []

    def note(decode: Callable[[int], int], n: int) -> int:
        sizes.append(n)
        return decode(n)

    before = ctx.decoder.hook(note)
    yield sizes
    ctx.decoder.hook(before)


@pytest.mark.parametrize("n_streams", [1, 3, 5])
@pytest.mark.parametrize("drafts", [False, True])
def test_filled_decodes_change_no_text(
    n_streams: int, drafts: bool, ctx: Context, decoded: list[int]
) -> None:
    loop = on_stairs(ctx, drafts=drafts)
    prompts = [REFRAIN + prompt if drafts else prompt for prompt in PROMPTS[:n_streams]]
    expected = [plain(ctx, prompt, 14) for prompt in prompts]
    decoded.clear()
    assert generate(ctx, loop, prompts, 14) == expected
    sizes = decoded[n_streams:]  # without those of the prompts
    assert {ROWS.get(n, n) for n in sizes} == set(sizes)
    assert drafts or set(sizes) == {ROWS[n_streams]}


def test_without_free_cells_no_decode_is_filled(target: lb.Model) -> None:
    with Context(target, n_ctx=256, n_seq_max=4, n_threads=1) as ctx:
        loop = on_stairs(ctx, drafts=False)
        branch = Branch.start(ctx, [5, 6] * 124, sampling=WARM)
        others = [Branch.start(ctx, [9], sampling=WARM) for _ in range(2)]
        texts = [each.sequence for each in (branch, *others)]
        running = [loop.open(text, "seeded", SpeculativeStats()) for text in texts]
        for each in running:
            each.draw()
        sizes = []
        while (step := loop.step([(each, 0) for each in running])).no_room is None:
            sizes.append(step.n_tokens)
        assert sizes == [4, 3]  # six cells are free, then three
        ctx.audit()


def test_speculator_fills_what_it_drafts(ctx: Context, decoded: list[int]) -> None:
    prompt = REFRAIN + PROMPTS[0]
    expected = plain(ctx, prompt, 60)
    config = SpeculativeConfig(draft_k=4)
    speculator = lb.Speculator(ctx, lb.SuffixDrafter(min_match=1), config)
    speculator.drafting.loop.curve = stairs()
    decoded.clear()
    generation = speculator.generate(prompt, max_tokens=60, sampling=WARM).finish()
    assert generation.tokens == expected
    assert generation.stats.num_draft_tokens > 0
    assert set(decoded[1:]) == {1, 2, 4, 8}
    assert generation.stats.target_decodes_by_n.keys() == {1, 2, 4, 8}
