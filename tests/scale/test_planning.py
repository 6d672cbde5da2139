"""The model on paper: what it says by hand, and what a simulation of the same job takes."""

from __future__ import annotations

import math

import pytest

import llamabranch as lb
from llamabranch.scale import JobNumbers, WorkerProfile, measure, plan, simulate

WORKER = WorkerProfile(
    decode_per_s=140, prefill_per_s=1000, load_s=5, row_s=0.001, block_s=0.5, start_s=20
)


def test_times_are_those_computed_by_hand() -> None:
    job = JobNumbers(
        1000, prompt_tokens=300, output_tokens=140, shared_tokens=200, rows_per_prefix=20,
        workers=4, price=3.6, block_rows=50,
    )  # fmt: skip
    found = plan(WORKER, job)
    row_s = (200 / 20 + 100) / 1000 + 1 + 0.001
    assert found.row_s == pytest.approx(row_s)
    assert found.block_s == pytest.approx(50 * row_s + 0.5)
    assert found.n_blocks == 20
    seconds = 20 + 5 + (1000 * row_s + 10) / 4  # 20 blocks: five for each worker
    assert found.seconds == pytest.approx(seconds)
    assert found.cost == pytest.approx(4 * seconds / 1000)
    assert found.cost_per_million == pytest.approx(4 * seconds / 1000 / 0.14)
    assert found.efficiency == pytest.approx(1000 * row_s / (4 * seconds))
    assert found.lost_s == found.deaths == 0
    assert found.id_bytes == 16_000


def test_block_is_that_of_young() -> None:
    job = JobNumbers(10_000_000, 0, 140, workers=10, mtbf_h=2)
    found = plan(WORKER, job)
    assert found.block_s - WORKER.block_s == pytest.approx(math.sqrt(2 * 0.5 * 7200), rel=0.02)
    for rows in (found.block_rows // 3, found.block_rows * 3):
        other = plan(WORKER, JobNumbers(10_000_000, 0, 140, workers=10, mtbf_h=2, block_rows=rows))
        assert other.seconds > found.seconds


def test_small_jobs_have_blocks_for_all_workers() -> None:
    found = plan(WORKER, JobNumbers(1000, 0, 100, workers=10))
    assert found.block_rows == 13


@pytest.mark.parametrize("workers", [1, 4, 32])
@pytest.mark.parametrize("mtbf_h", [math.inf, 3.0])
@pytest.mark.parametrize("block_rows", [None, 40])
def test_simulation_takes_what_the_plan_says(
    workers: int, mtbf_h: float, block_rows: int | None
) -> None:
    job = JobNumbers(
        20_000, prompt_tokens=200, output_tokens=100, shared_tokens=150, rows_per_prefix=200,
        workers=workers, mtbf_h=mtbf_h, block_rows=block_rows,
    )  # fmt: skip
    played = [simulate(WORKER, job, seed=seed) for seed in range(3)]
    assert plan(WORKER, job).seconds == pytest.approx(sum(played) / 3, rel=0.05)


def test_simulation_of_a_seed_is_the_same_again() -> None:
    job = JobNumbers(2000, 100, 100, workers=3, mtbf_h=1)
    assert simulate(WORKER, job, seed=4) == simulate(WORKER, job, seed=4)
    assert simulate(WORKER, job, seed=4) != simulate(WORKER, job, seed=5)


def test_workers_that_die_too_often_are_an_error() -> None:
    with pytest.raises(lb.ConfigError, match="dies every"):
        plan(WORKER, JobNumbers(10_000, 0, 140, mtbf_h=0.01, block_rows=5000))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"workers": 0},
        {"prompt_tokens": -1},
        {"shared_tokens": 11},
        {"rows_per_prefix": 0.5},
        {"price": -1},
        {"mtbf_h": 0},
        {"block_rows": 0},
        {"output_tokens": math.nan},
        {"output_tokens": math.inf},
    ],
)
def test_impossible_numbers_are_refused(wrong: dict[str, float]) -> None:
    numbers = {"rows": 10, "prompt_tokens": 10, "output_tokens": 10, **wrong}
    with pytest.raises(lb.ConfigError):
        JobNumbers(**numbers)  # type: ignore[arg-type]


def test_profile_is_measured(ctx: lb.Context) -> None:
    found = measure(ctx, 1.5, output_tokens=4, rounds=1)
    assert found.load_s == 1.5
    assert found.streams in (1, 2, 4, 8)
    assert found.decode_per_s > 0 and found.prefill_per_s > 0
    assert WorkerProfile(**found.as_dict()) == found  # type: ignore[arg-type]
    with pytest.raises(lb.ConfigError, match="decode_per_s"):
        WorkerProfile(0, 1)
