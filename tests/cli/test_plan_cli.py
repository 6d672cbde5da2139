"""``llamabranch plan``: the numbers are those of the library; rates that are not given are measured."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from typer.testing import CliRunner

from llamabranch.cli import app
from llamabranch.scale import JobNumbers

GIVEN = [
    "plan", "--rows", "100000", "--prompt-tokens", "400", "--shared-tokens", "300",
    "--rows-per-prefix", "50", "--output-tokens", "150", "--workers", "16", "--price", "0.5",
    "--mtbf", "4",
]  # fmt: skip
JOB = JobNumbers(
    100_000, 400, 150, 140.0, 1500.0, shared_tokens=300, rows_per_prefix=50, workers=16, price=0.5,
    mtbf_h=4,
)  # fmt: skip


def test_plan_is_that_of_the_library() -> None:
    arguments = [*GIVEN, "--decode-rate", "140", "--prefill-rate", "1500"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == {**asdict(JOB), **asdict(JOB.plan()), "streams": 16}
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert f"{JOB.plan().n_blocks:,}" in shown.stdout


def test_rates_are_measured_unless_given() -> None:
    arguments = [*GIVEN, "--streams", "2", "--threads", "1", "--decode-rate", "140", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["decode_per_s"] == 140
    assert found["prefill_per_s"] > 0
    job = replace(JOB, prefill_per_s=found["prefill_per_s"], load_s=found["load_s"])
    assert found["seconds"] == job.plan().seconds


def test_rates_of_nothing_are_refused() -> None:
    result = CliRunner().invoke(app, [*GIVEN, "--decode-rate", "-1", "--prefill-rate", "1"])
    assert result.exit_code == 2
