"""A node without grace, a driver by SIGKILL: what was written stays, the rest is done once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra `scale` (Ray) is not installed")

import clusters
from clusters import alone, assert_equal, prompts, read_output, wait_for, write_rows

import llamabranch as lb
from llamabranch import scale
from llamabranch.scale import job as job_module

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SEED = 11
TARGET = str(Path(lb.__file__).parent / "data" / "tale-target-q8_0.gguf")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    with clusters.cluster(num_cpus=2) as found:
        yield found


def options(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": TARGET, "seed": SEED, "block_rows": 8, "streams": 4, "load": {"n_ctx": 1024},
    }  # fmt: skip


def test_node_that_goes_without_grace_loses_nothing(
    ray_cluster: Any, ctx: lb.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, seen = prompts(40), tmp_path / "seen"
    seen.mkdir()
    monkeypatch.setattr(job_module, "Generate", clusters.gated(seen))
    node = ray_cluster.add_node(num_cpus=2, object_store_memory=80 * clusters.MIB)
    inputs = write_rows(tmp_path / "in.jsonl", rows)
    reports: list[scale.JobReport] = []

    def run() -> None:
        # Workers of 1.5 CPUs: one for each node.
        out = str(tmp_path / "out")
        reports.append(scale.generate(inputs, out, workers=2, cpus=1.5, **options(tmp_path)))

    job = threading.Thread(target=run)
    job.start()
    wait_for(lambda: list(seen.glob(f"{node.node_id}-*")))  # it has a batch that is not written
    ray_cluster.remove_node(node, allow_graceful=False)
    (seen / "go").touch()
    job.join(120)
    (report,) = reports
    assert_equal(read_output(tmp_path / "out"), alone(ctx, rows, SEED))
    assert report.n_errors == 0


def test_driver_that_is_killed_is_resumed_where_it_was(
    ray_cluster: Any, ctx: lb.Context, tmp_path: Path
) -> None:
    rows, out = prompts(200), tmp_path / "out"
    inputs = write_rows(tmp_path / "in.jsonl", rows)
    settings = options(tmp_path)
    code = "scale.generate(inputs, out, **settings)"

    def committed() -> set[str]:
        names = {path.name for path in (out / "_job" / "checkpoint").glob("*.parquet")}
        return {name for name in names if not name.endswith(".pending.parquet")}

    with clusters.driver(
        ray_cluster.address, code, inputs=inputs, out=str(out), settings=settings
    ) as process:
        wait_for(lambda: len(committed()) >= 2)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not (out / "_SUCCESS").exists()
    report = scale.generate(inputs, str(out), resume=True, **settings)
    assert 16 <= report.n_resumed < 200
    assert_equal(read_output(out), alone(ctx, rows, SEED))
    again = scale.generate(inputs, str(out), resume=True, **settings)
    assert (again.n_resumed, again.n_rows) == (200, 200)
