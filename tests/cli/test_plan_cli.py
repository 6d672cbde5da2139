"""``llamabranch plan``: the numbers are those of the library; a profile is measured once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamabranch.cli import app
from llamabranch.scale import JobNumbers, WorkerProfile, plan, simulate


def test_plan_is_that_of_the_library(tmp_path: Path) -> None:
    worker = WorkerProfile(140.0, 1500.0, load_s=20.0)
    path = tmp_path / "worker.json"
    path.write_text(json.dumps(worker.as_dict()), encoding="utf-8")
    arguments = [
        "plan", "--rows", "100000", "--prompt-tokens", "400", "--shared-tokens", "300",
        "--rows-per-prefix", "50", "--output-tokens", "150", "--workers", "16", "--price", "0.5",
        "--mtbf", "4", "--row-overhead", "2", "--profile",
    ]  # fmt: skip
    result = CliRunner().invoke(app, [*arguments, str(path), "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    worker = WorkerProfile(140.0, 1500.0, load_s=20.0, row_s=0.002)
    job = JobNumbers(
        100_000, 400, 150, shared_tokens=300, rows_per_prefix=50, workers=16, price=0.5, mtbf_h=4
    )
    assert found["profile"] == worker.as_dict()
    assert {name: found[name] for name in plan(worker, job).as_dict()} == plan(
        worker, job
    ).as_dict()
    assert found["simulated_s"] == simulate(worker, job)
    shown = CliRunner().invoke(app, [*arguments, str(path)])
    assert shown.exit_code == 0
    assert f"{plan(worker, job).cost:,.2f}" in shown.stdout


def test_profile_is_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    arguments = ["plan", "--rows", "10", "--streams", "2", "--threads", "1", "--profile", str(path)]
    first = CliRunner().invoke(app, [*arguments, "--json"])
    assert first.exit_code == 0, first.stderr
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept == json.loads(first.stdout)["profile"]
    again = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(again.stdout)["profile"] == kept


@pytest.mark.parametrize(
    "damaged", ["{", '{"a": 1}', "[]", '{"decode_per_s": 0, "prefill_per_s": 1}']
)
def test_damaged_profile_is_refused(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "worker.json"
    path.write_text(damaged, encoding="utf-8")
    result = CliRunner().invoke(app, ["plan", "--rows", "10", "--profile", str(path)])
    assert result.exit_code == 2
    assert "is no profile" in result.stderr
