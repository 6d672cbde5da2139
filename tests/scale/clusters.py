"""A small Ray cluster, a full disk, the oracle of jobs, and jobs in processes of their own."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

import llamabranch as lb
from llamabranch import scale

Row = dict[str, Any]

MIB = 1 << 20
WORDS = ("wolf", "king", "forest", "bread", "river", "horse", "crown")


class SmallDisk(LocalFileSystem):  # type: ignore[misc]
    """The local file system, where a folder has room for so many Parquet files."""

    cachable = False

    def __init__(self, folder: str, n_files: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._small, self._n_files = Path(folder), n_files

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        is_data = Path(path).parent == self._small and ".parquet" in path
        if is_data and "w" in mode and len(list(self._small.glob("*.parquet"))) >= self._n_files:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return super()._open(path, mode, **kwargs)


@contextmanager
def cluster(num_cpus: int = 3) -> Iterator[Any]:
    """Start a head node without a dashboard and connect to it."""
    from ray.cluster_utils import Cluster

    # Ray's processes import what tests define.
    paths = [str(Path(__file__).parent), str(Path(lb.__file__).parents[1])]
    os.environ.update(
        PYTHONPATH=os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_memory_monitor_refresh_ms="0",  # a machine that other tests fill kills no worker
        RAY_worker_niceness="0",  # 15 otherwise: beside other programs its workers would starve
        RAY_AUTH_MODE="disabled",
    )
    import ray

    head = {"num_cpus": num_cpus, "object_store_memory": 80 * MIB, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def prompts(n: int, **more: Any) -> list[Row]:
    """Return ``n`` rows, some of which begin alike, of different lengths."""
    begin = "Once upon a time a {} met a {}, and then {}"
    texts = [begin.format(WORDS[i % 3], WORDS[i % len(WORDS)], i) for i in range(n)]
    return [
        {"id": i, "prompt": text, "max_tokens": 2 + 5 * (i % 4), **more}
        for i, text in enumerate(texts)
    ]


def write_rows(path: Path, rows: Sequence[Row]) -> str:
    """Write rows as JSON lines; return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_output(folder: Path | str) -> list[Row]:
    """Return the rows of a job's output, sorted by id."""
    import pyarrow.parquet as pq

    rows: list[Row] = []
    for path in Path(folder).glob("*.parquet"):
        rows += pq.read_table(path).to_pylist()
    return sorted(rows, key=lambda row: str(row["id"]).zfill(12))


def alone(context: lb.Context, rows: Sequence[Row], seed: int) -> dict[Any, Row]:
    """Return what one process generates for good rows, by id."""
    engine = lb.Engine(context, seed=seed)
    ids = {str(row["id"]): row["id"] for row in rows}
    requests = [lb.Request(x["prompt"], id=str(x["id"]), max_tokens=x["max_tokens"]) for x in rows]
    names = ("text", "tokens", "finish_reason")
    return {
        ids[result.id]: {"seed": result.seed % 2**64, **{n: getattr(result, n) for n in names}}
        for result in engine.generate(requests)
    }


def assert_equal(output: Sequence[Row], expected: Mapping[Any, Row]) -> None:
    """Check that every row is there once, with the text that one process generates."""
    assert [row["id"] for row in output] == sorted(expected, key=lambda i: str(i).zfill(12))
    for row in output:
        assert {name: row[name] for name in expected[row["id"]]} == expected[row["id"]]
        assert row["error"] is None
        assert row["exact"] is True


def fatal(number: int, ids: Collection[int], *, once: Path | None = None) -> type[scale.Generate]:
    """Return a stage whose process gets a signal as soon as its engine has one of some rows.

    Args:
        number: the signal.
        ids: those of the rows.
        once: a file that is created then; while it exists, nothing happens.
    """
    names = {str(i) for i in ids}

    class Fatal(scale.Generate):
        async def _results(self, request: lb.Request) -> list[lb.Result]:
            running = asyncio.ensure_future(super()._results(request))
            await asyncio.sleep(0)  # the engine has it
            if request.id in names and not (once is not None and once.exists()):
                if once is not None:
                    once.touch()
                # In this thread: Ray's handler of SIGABRT takes seconds on some machines, and the
                # event loop would go on meanwhile and deliver the row.
                signal.raise_signal(number)
            return await running

    return Fatal


class Stillborn(scale.Generate):
    """A stage whose process ends while it opens the model."""

    def _open(self) -> None:
        os._exit(1)


def gated(folder: Path) -> type[scale.Generate]:
    """Return a stage that leaves a file for each batch it has, and goes on once ``go`` exists."""

    class Gated(scale.Generate):
        async def __call__(self, batch: object) -> Any:
            import ray

            result = await super().__call__(batch)
            node = ray.get_runtime_context().get_node_id()
            (folder / f"{node}-{os.getpid()}-{time.monotonic_ns()}").touch()
            while not (folder / "go").exists():
                await asyncio.sleep(0.02)
            return result

    return Gated


def wait_for(condition: Callable[[], Any], seconds: float = 240.0) -> Any:
    """Return what ``condition`` returns once that is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


@contextmanager
def driver(address: str, code: str, **names: object) -> Iterator[subprocess.Popen[str]]:
    """Run a job in a process of its own, connected to the cluster; kill it at the end."""
    lines = [
        "import llamabranch as lb",
        "from llamabranch import scale",
        "import ray",
        f"ray.init(address={address!r}, log_to_driver=False, logging_level='ERROR')",
        *(f"{name} = {value!r}" for name, value in names.items()),
        code,
    ]
    process = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
