"""The formula for a job: what it says by hand, and what a simulation of the same job takes."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest

import llamabranch as lb
from benchmarks.plan_job import BLOCK_S, ROW_S, START_S, JobNumbers, measure

JOB = JobNumbers(10_000, 0, 140, decode_per_s=140, prefill_per_s=1000)


def simulated(job: JobNumbers, seed: int, spread: float = 0.5) -> float:
    """Return the seconds of a job that is played through, block by block.

    The lengths of texts vary by ``spread`` times their mean, workers die at random moments, their blocks
    go to the others at once, and a worker that has died comes back after ``load_s``.
    """
    block_rows = job.plan().block_rows
    rng = np.random.default_rng(seed)
    shared_s = job.shared_tokens / job.prefill_per_s
    own_s = (job.prompt_tokens - job.shared_tokens) / job.prefill_per_s + ROW_S
    left: list[float] = []
    for begin in range(0, job.rows, block_rows):
        n = min(block_rows, job.rows - begin)
        tokens = rng.gamma(1 / spread**2, job.output_tokens * spread**2, n)
        prefixes = math.ceil(n / job.rows_per_prefix)
        left.append(n * own_s + prefixes * shared_s + float(tokens.sum()) / job.decode_per_s)
    left.reverse()  # taken from the end
    mean_s, begin_s, end = job.mtbf_h * 3600, START_S + job.load_s, 0.0

    def death(after: float) -> float:
        return after + (float(rng.exponential(mean_s)) if math.isfinite(mean_s) else math.inf)

    deaths = [death(begin_s) for _ in range(job.workers)]
    workers = [(begin_s, i) for i in range(job.workers)]
    while left:
        now, worker = heapq.heappop(workers)
        # The two blocks in hand share the worker: they end one after the other in the same time.
        fair = max(1, math.ceil(len(left) / job.workers))
        mine = [left.pop() for _ in range(min(2, fair))]
        share, finished = now, 0
        for block in mine:
            share += block + BLOCK_S
            if share > deaths[worker]:
                break
            finished += 1
            end = max(end, share)
        now = share
        if finished < len(mine):
            left += mine[finished:]
            now = deaths[worker] + job.load_s
            deaths[worker] = death(now)
        heapq.heappush(workers, (now, worker))
    return end


def test_times_are_those_computed_by_hand() -> None:
    job = JobNumbers(
        1000, prompt_tokens=300, output_tokens=140, decode_per_s=140, prefill_per_s=1000,
        shared_tokens=200, rows_per_prefix=20, workers=4, price=3.6, block_rows=50,
    )  # fmt: skip
    plan = job.plan()
    row_s = (200 / 20 + 100) / 1000 + 1 + ROW_S
    assert plan.row_s == pytest.approx(row_s)
    assert plan.block_s == pytest.approx(50 * row_s + BLOCK_S)
    assert plan.n_blocks == 20
    seconds = START_S + 5 + (1000 * row_s + 20 * BLOCK_S) / 4  # 20 blocks: five for each worker
    assert plan.seconds == pytest.approx(seconds)
    assert plan.cost == pytest.approx(4 * seconds / 1000)
    assert plan.efficiency == pytest.approx(1000 * row_s / (4 * seconds))
    assert plan.tokens_per_s == pytest.approx(140_000 / seconds)
    assert plan.deaths == 0


def test_block_is_that_of_young() -> None:
    job = replace(JOB, rows=10_000_000, workers=10, mtbf_h=2)
    plan = job.plan()
    assert plan.block_s - BLOCK_S == pytest.approx(math.sqrt(2 * BLOCK_S * 7200), rel=0.03)
    for rows in (plan.block_rows // 3, plan.block_rows * 3):
        assert replace(job, block_rows=rows).plan().seconds > plan.seconds


def test_small_jobs_have_blocks_for_all_workers() -> None:
    assert replace(JOB, rows=1000, workers=10).plan().block_rows == 13


@pytest.mark.parametrize("workers", [1, 4, 32])
@pytest.mark.parametrize("mtbf_h", [math.inf, 3.0])
@pytest.mark.parametrize("block_rows", [None, 40])
def test_simulation_takes_what_the_plan_says(
    workers: int, mtbf_h: float, block_rows: int | None
) -> None:
    job = JobNumbers(
        20_000, prompt_tokens=200, output_tokens=100, decode_per_s=140, prefill_per_s=1000,
        shared_tokens=150, rows_per_prefix=200, workers=workers, mtbf_h=mtbf_h, block_rows=block_rows,
    )  # fmt: skip
    played = [simulated(job, seed) for seed in range(3)]
    assert job.plan().seconds == pytest.approx(sum(played) / 3, rel=0.05)


def test_workers_that_die_too_often_are_an_error() -> None:
    with pytest.raises(lb.ConfigError, match="dies every"):
        replace(JOB, mtbf_h=0.01, block_rows=5000).plan()


def test_rates_of_a_worker_are_measured(ctx: lb.Context) -> None:
    decode, prefill, streams = measure(ctx)
    assert streams in (1, 2, 4, 8)
    assert decode > 0 and prefill > 0
    assert JobNumbers(10, 10, 10, decode, prefill).plan().seconds > 0
