"""One run of a job on Ray Data: from files to files, each row exactly once.

Of each block Ray Data first writes its ids as pending, then the data file, then renames the ids. A job
that is resumed deletes the data of pending ids and skips the rows of the others. What a job was made with
is in ``_job/job.json``; ``_SUCCESS`` is written when every row is there.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from time import monotonic
from typing import TYPE_CHECKING, Literal, cast

from .. import hub
from ..arguments import real, whole
from ..branch.branch import random_seed
from ..errors import ConfigError, JobError
from ..loading import LoadOptions
from ..model import Model
from ..native import engine_versions
from .cluster import check_plan, cluster, data_context, import_ray, make_ledger, translated
from .folder import File, Folder, input_files
from .ledger import Totals
from .settings import JobOptions, JobReport, Progress
from .sink import make_sink
from .stages import Generate, LedgerHandle, Score, WorkerOptions
from .staging import SORT_KEY, Layout, id_type, normalize, stage_locally, staged_ids, unique_ids

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.fs

__all__ = ["JobRun", "plain"]

_STAGED = "staged.json"
_LOCAL_BYTES = 256 << 20  # an input up to this size is sorted by the driver, a larger one by Ray
_MOST_CHECKED_IDS = 100_000_000  # 8 bytes and a hash each, on the driver
_POLL_S = 1.0
_PART_BYTES = 64 << 20  # of the input, for each part of Ray's sort
_WORKERS_A_HELPER = 8  # workers for each process that reads, and each that writes
_FILES_A_TASK = 256  # that one task counts at the end
_ROWS_AT_A_TIME = 4  # batches of a worker, times its streams


class JobRun:
    """A job: its folders, what it was made with, its plan for Ray Data."""

    def __init__(
        self,
        kind: Literal["generate", "score"],
        inputs: str | Sequence[str],
        output: str,
        model: str,
        settings: Mapping[str, object],
        columns: tuple[str, ...],
        load: LoadOptions | None,
        options: JobOptions,
    ) -> None:
        unknown = sorted(set(options) - set(JobOptions.__annotations__))
        if unknown:
            raise ConfigError(f"a job has no option {unknown[0]!r}")
        import_ray()
        workers = options.get("workers", 1)
        least, most = (workers, workers) if isinstance(workers, int) else workers
        self._least = whole("workers", least, 1)
        self._most = whole("workers", most, self._least)
        self._cpus = _amount("cpus", options.get("cpus", 1.0))
        self._gpus = _amount("gpus", options.get("gpus", 0.0))
        self._streams = whole("streams", options.get("streams", 8), 1, 255)
        self._block_rows = whole("block_rows", options.get("block_rows", 512), 1)
        self._local_bytes = whole("local_bytes", options.get("local_bytes", _LOCAL_BYTES), 0)
        price = options.get("price")
        self._price = None if price is None else _amount("price", price)
        self._format = options.get("format", "parquet")
        if self._format not in ("parquet", "jsonl"):
            raise ConfigError(f"format must be 'parquet' or 'jsonl', not {self._format!r}")
        self._sort = bool(options.get("sort", True))
        self._resume = bool(options.get("resume", False))
        self._address = options.get("address")
        self._draft = options.get("draft")
        self._stall_s = _amount("stall_s", options.get("stall_s", 600.0))
        self._on_progress = options.get("on_progress")
        self._model = model
        self._load = LoadOptions(**(load or {}))
        self._layout = Layout(
            options.get("id_column", "id"), columns, tuple(options.get("keep", ()))
        )
        filesystem = options.get("filesystem")
        self._files, self._input_format, self._input_filesystem = input_files(inputs, filesystem)
        self._output = Folder(output, filesystem)
        self._folder = self._output / "_job"
        self._kind = kind
        self._settings: dict[str, object] = {
            "format": 1,
            "kind": kind,
            "input": _digest(self._files),
            "id_column": self._layout.id_column,
            "keep": list(self._layout.keep),
            "output_format": self._format,
            "load": plain({k: v for k, v in self._load.items() if not k.startswith("n_threads")}),
            **settings,
        }

    def run(
        self,
        stage: type[Generate] | type[Score],
        arguments: Callable[[WorkerOptions, int], dict[str, object]],
        seed: int | None,
    ) -> JobReport:
        """Run what is left of the job."""
        known = self._folder.read_json("job.json")
        success = self._output.read_json("_SUCCESS")
        if not self._resume and (known is not None or success is not None or self._output.names()):
            raise ConfigError(
                f"{self._output.path} already exists",
                hint="continue it with resume=True (--resume), or name another folder",
            )
        if known is None and self._output.names():
            raise ConfigError(f"{self._output.path} is not the folder of a job")
        with cluster(self._address, self._most, self._cpus):
            return self._run_connected(stage, arguments, seed, known)

    def _run_connected(
        self,
        stage: type[Generate] | type[Score],
        arguments: Callable[[WorkerOptions, int], dict[str, object]],
        seed: int | None,
        known: Mapping[str, object] | None,
    ) -> JobReport:
        ray = import_ray()
        with translated(self._output):
            facts = ray.get(ray.remote(_model_facts).options(num_cpus=0).remote(self._model))
        if seed is None:
            before = None if known is None else known.get("seed")
            seed = before if isinstance(before, int) else random_seed()
        settings = {**self._settings, **facts, "seed": seed}
        if known is not None:
            _check_same(known, settings, self._output.path)
        with translated(self._output):
            if known is None:
                self._folder.delete()  # of a job that never began
            n_rows = self._stage_input()
            if known is None:
                self._folder.write_json("job.json", settings)
            n_before = self._count_committed()
            book = make_ledger()
            worker = WorkerOptions(
                streams=self._streams,
                draft=self._draft,
                ledger=book,
                fingerprint=str(facts["model"]),
                stall_s=self._stall_s,
            )
            begin = monotonic()
            last = Progress(n_before, n_rows, 0, 0, 0, 0, 0, 0, 0.0, None)
            if n_before < n_rows:
                with self._reporting(book, n_rows, n_before, begin):
                    self._map(stage, {**arguments(worker, seed), "worker": worker})
                totals = cast(Totals, ray.get(book.totals.remote()))
                last = self._progress(totals, n_rows, n_before, begin)
            n_written = self._count_committed()
            if n_written != n_rows:
                raise JobError(
                    f"{n_written} of {n_rows} rows are in {self._output.path}",
                    hint="resume the job; please report this",
                )
            n_errors, invariant = self._summary()
        report = JobReport(self._output.path, n_rows, n_errors, n_before, invariant, last, seed)
        self._output.write_json("_SUCCESS", report.as_dict())
        return report

    # -- the input -----------------------------------------------------------------------------------

    def _stage_input(self) -> int:
        """Write the blocks of the job, unless an earlier run has; return how many rows they hold."""
        done = self._folder.read_json(_STAGED)
        n_rows = None if done is None else done.get("rows")
        if isinstance(n_rows, int):
            return n_rows
        prompts = self._folder / "prompts"
        if sum(file.size for file in self._files) <= self._local_bytes:
            n_rows = stage_locally(
                self._files,
                self._input_format,
                self._input_filesystem,
                self._layout,
                prompts,
                block_rows=self._block_rows,
                sort=self._sort,
            )
        else:
            n_rows = self._stage_on_ray(prompts)
        if not n_rows:
            raise ConfigError("the input has no rows")
        self._folder.write_json(_STAGED, {"rows": n_rows})
        return n_rows

    def _stage_on_ray(self, prompts: Folder) -> int:
        ray = import_ray()
        layout, size = self._layout, sum(file.size for file in self._files)
        ids = id_type(self._files[0], self._input_format, self._input_filesystem, layout)
        prompts.delete()
        paths = [file.path for file in self._files]

        def normalized(batch: pyarrow.Table) -> pyarrow.Table:
            return normalize(batch.to_pylist(), layout, ids)

        # A shuffle of Ray has 200 parts if it is not told.
        with data_context(default_hash_shuffle_parallelism=max(2, size // _PART_BYTES)):
            if self._input_format == "parquet":
                rows = ray.data.read_parquet(paths, filesystem=self._input_filesystem)
            else:
                rows = ray.data.read_json(paths, filesystem=self._input_filesystem, lines=True)
            rows = rows.map_batches(normalized, batch_format="pyarrow", batch_size=4096)
            if self._sort:
                rows = rows.sort(SORT_KEY)
            rows.drop_columns([SORT_KEY]).write_parquet(
                prompts.path,
                filesystem=prompts.filesystem,
                min_rows_per_file=self._block_rows,
                max_rows_per_file=self._block_rows,
            )
        n_rows = _count_rows(prompts)
        if n_rows <= _MOST_CHECKED_IDS:
            unique_ids(staged_ids(prompts, layout.id_column))
        return n_rows

    # -- the plan --------------------------------------------------------------------------------------

    def _map(self, stage: type[Generate] | type[Score], arguments: Mapping[str, object]) -> None:
        ray = import_ray()
        from ray.data.checkpoint import CheckpointConfig

        prompts = self._folder / "prompts"
        paths = [f"{prompts.path}/{name}" for name in prompts.names() if name.endswith(".parquet")]
        checkpoint = self._folder / "checkpoint"
        config = CheckpointConfig(
            id_column=self._layout.id_column,
            checkpoint_path=checkpoint.path,
            delete_checkpoint_on_success=False,
            override_filesystem=checkpoint.filesystem,
        )
        # One filter is fast enough, and each is a CPU and a GiB that no worker can have.
        config.checkpoint_actor_pool_max_size = 1
        config.checkpoint_actor_memory_bytes = 64 << 20
        # Ray's newer reader packs small files into one block; here a file is a block.
        with data_context(checkpoint_config=config, use_datasource_v2=False):
            # Workers may hold all CPUs of the cluster: reading and writing must not wait for one.
            # Ray would start as many processes for such tasks as there are tasks.
            n_helpers = max(1, self._most // _WORKERS_A_HELPER)
            rows = ray.data.read_parquet(
                paths,
                filesystem=prompts.filesystem,
                num_cpus=0,
                concurrency=n_helpers,
                override_num_blocks=len(paths),
            )
            rows = rows.map_batches(
                stage,
                fn_constructor_args=(self._model,),
                fn_constructor_kwargs={
                    **arguments,
                    "id_column": self._layout.id_column,
                    "keep": self._layout.keep,
                    **self._load,
                },
                batch_size=min(self._block_rows, _ROWS_AT_A_TIME * self._streams),
                batch_format="pyarrow",
                num_cpus=self._cpus,
                num_gpus=self._gpus,
                compute=ray.data.ActorPoolStrategy(
                    min_size=self._least,
                    max_size=self._most,
                    max_tasks_in_flight_per_actor=3,
                    max_concurrent_calls_per_actor=2,
                ),
            )
            check_plan(rows)
            with warnings.catch_warnings():
                # Should a later version of Ray drop checkpoints for another reason.
                warnings.filterwarnings("error", message="You've enabled checkpointing")
                sink = make_sink(self._output, self._format)
                rows.write_datasink(sink, ray_remote_args={"num_cpus": 0}, concurrency=n_helpers)

    def _count_committed(self) -> int:
        """Return how many rows are written for good."""
        return _count_rows(self._folder / "checkpoint")

    def _summary(self) -> tuple[int, bool]:
        """Return how many rows of the output are errors, and whether all of it is batch-invariant."""
        names = [name for name in self._output.names() if name.endswith(f".{self._format}")]
        paths = [f"{self._output.path}/{name}" for name in names]
        filesystem = self._output.filesystem
        if len(paths) <= _FILES_A_TASK:
            counts = [_count_errors(paths, filesystem)]
        else:
            ray = import_ray()
            count = ray.remote(_count_errors).options(num_cpus=0)
            starts = range(0, len(paths), _FILES_A_TASK)
            counts = ray.get(
                [count.remote(paths[i : i + _FILES_A_TASK], filesystem) for i in starts]
            )
        return sum(n for n, _ in counts), all(invariant for _, invariant in counts)

    # -- progress --------------------------------------------------------------------------------------

    @contextmanager
    def _reporting(
        self, book: LedgerHandle, n_rows: int, n_before: int, begin: float
    ) -> Iterator[None]:
        """Call ``on_progress`` about once a second."""
        if self._on_progress is None:
            yield
            return
        ray, report, ended = import_ray(), self._on_progress, threading.Event()

        def poll() -> None:
            while not ended.wait(_POLL_S):
                with suppress(Exception):  # the ledger may be starting again
                    totals = ray.get(book.totals.remote(), timeout=10)
                    report(self._progress(totals, n_rows, n_before, begin))

        thread = threading.Thread(target=poll, name="job progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _progress(self, totals: Totals, n_rows: int, n_before: int, begin: float) -> Progress:
        seconds = monotonic() - begin
        cost = None
        if self._price is not None:
            cost = self._price * max(totals["workers"], 1) * seconds / 3600
        return Progress(
            rows=min(n_rows, n_before + totals["rows"]),
            n_rows=n_rows,
            errors=totals["errors"],
            generated_tokens=totals["generated_tokens"],
            prompt_tokens=totals["prompt_tokens"],
            evaluated_tokens=totals["evaluated_tokens"],
            deaths=totals["deaths"],
            workers=totals["workers"],
            seconds=seconds,
            cost=cost,
        )


def _model_facts(model: str) -> dict[str, object]:
    """Return what identifies a model and the code that runs it; runs on a node of the cluster."""
    try:
        own = metadata.version("llamabranch")
    except metadata.PackageNotFoundError:  # run from its source
        own = "unknown"
    with Model(hub.resolve(model, download=True), vocab_only=True) as opened:
        fingerprint = opened.fingerprint
    return {"model": fingerprint, "versions": {"llamabranch": own, **engine_versions()}}


def _count_rows(folder: Folder) -> int:
    """Return the rows of a folder's Parquet files; ids that are pending do not count."""
    import pyarrow.parquet as pq

    return sum(
        pq.read_metadata(f"{folder.path}/{name}", filesystem=folder.filesystem).num_rows
        for name in folder.names()
        if name.endswith(".parquet") and not name.endswith(".pending.parquet")
    )


def _count_errors(paths: Sequence[str], filesystem: pyarrow.fs.FileSystem) -> tuple[int, bool]:
    """Return how many rows of some files of results are errors, and whether all are batch-invariant."""
    import pyarrow.parquet as pq

    n_errors, invariant = 0, True
    for path in paths:
        if path.endswith(".parquet"):
            columns = ["error", "batch_invariant"]
            table = pq.read_table(path, filesystem=filesystem, columns=columns)
            n_errors += table.num_rows - table.column("error").null_count
            invariant = invariant and all(table.column("batch_invariant").to_pylist())
            continue
        with filesystem.open_input_stream(path) as file:
            for line in file.read().splitlines():
                row = json.loads(line)
                n_errors += row["error"] is not None
                invariant = invariant and row["batch_invariant"] is True
    return n_errors, invariant


def _check_same(known: Mapping[str, object], settings: Mapping[str, object], path: str) -> None:
    """Check that a job is resumed with what it was made with."""
    different = [
        name
        for name in sorted({*known, *settings})
        if json.dumps(known.get(name)) != json.dumps(settings.get(name))
    ]
    if different:
        raise ConfigError(
            f"{path} was made with other settings: {', '.join(different)}",
            hint="resume with the settings in its _job/job.json, or name another folder",
        )


def _digest(files: Sequence[File]) -> str:
    """Return a digest of the input's files: their names and sizes."""
    text = json.dumps([[file.path, file.size] for file in files])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def plain(value: object) -> object:
    """Return a setting as JSON gives it back."""
    return json.loads(json.dumps(value, sort_keys=True))


def _amount(name: str, value: object) -> float:
    found = real(name, value)
    if not 0 <= found < math.inf:
        raise ConfigError(f"{name} must be at least 0 and finite, not {found}")
    return found
