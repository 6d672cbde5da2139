"""Whole jobs on Ray Data: `generate` and `score` read files and write files, each row exactly once.

Ray Data reads, sorts, retries and writes. A file of results is either complete or missing. So the
ids in the output are the ids of the finished rows, and a resumed job runs all other rows.
``_job/job.json`` has the job's settings. ``_SUCCESS`` is written when the output has every row.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from typing import TYPE_CHECKING, TypedDict, cast

from typing_extensions import Unpack

from .. import hub
from ..arguments import bounded, items, whole
from ..errors import ConfigError, JobError
from ..files import digest
from ..loading import LoadOptions
from ..model import Model
from ..native import engine_versions
from ..sampling import Grammar, SamplingParams
from ..sampling.noise import random_seed
from .cluster import cluster, import_ray, translated
from .folder import Folder
from .rows import GenerateRows, RowOptions, ScoreRows
from .source import Source
from .stages import Generate, Score, WorkerOptions

if TYPE_CHECKING:
    import pyarrow.fs
    import ray.data

_MOST = 1e15
_WORKERS_PER_WRITER = 8  # the number of workers whose results one process writes
_ROWS_PER_STREAM = 4  # a batch has this many rows for each text that runs at a time
# How often a batch is retried if its worker dies. Ray takes half a minute to notice that a node is
# gone. Until then each attempt to reach a worker on that node counts as a retry.
MOST_RETRIES = 16
# How many blocks may fail. One more ends the job at once, because on a full disk all blocks fail.
_MOST_LOST = 8
_SETTINGS = "_job/job.json"


class JobOptions(TypedDict, total=False):
    """How a job runs. These options do not change the texts."""

    workers: int | tuple[int, int]
    cpus: float
    gpus: float
    streams: int
    draft: str | None
    address: str | None
    resume: bool
    block_rows: int
    id_column: str
    keep: Sequence[str]
    stall_s: float
    filesystem: pyarrow.fs.FileSystem | None


@dataclass(frozen=True)
class JobReport:
    """A finished job: its output has every row of its input, once.

    Args:
        output: the folder of the results.
        n_rows: rows of the output.
        n_errors: how many rows have no result; their column ``error`` has the reason.
        n_resumed: how many rows an earlier run of the job had finished.
        exact: whether the contexts of all workers were exact. If so, the same job
            gives the same bytes again.
        seed: the seed from which the rows' seeds are derived.
    """

    output: str
    n_rows: int
    n_errors: int
    n_resumed: int
    exact: bool
    seed: int

    def as_dict(self) -> dict[str, object]:
        """Return the report as JSON types."""
        return asdict(self)


class _GenerateOptions(RowOptions, JobOptions, total=False):
    """The keywords of `generate`."""


def generate(
    inputs: str | Sequence[str],
    output: str,
    *,
    model: str = hub.BUNDLED_TARGET,
    seed: int | None = None,
    load: LoadOptions | None = None,
    **options: Unpack[_GenerateOptions],
) -> JobReport:
    """Continue the prompts of files on a Ray cluster; each row's result is written exactly once.

    `Generate` describes the columns (or keys) of the input and of the output.

    Args:
        inputs: Parquet files or JSON lines: paths, folders or URIs that every node can read.
        output: a folder that every node can write to.
        model, max_tokens, sampling, stop, grammar, n, chat, parse_special: as for `Generate`.
        seed: the seed from which the rows' seeds are derived; None = a random one, kept in job.json.
        load: options of `lb.load` for the workers.
        options: how the job runs:

            - ``workers``: how many workers, or a pair of the fewest and the most. ``cpus`` and
              ``gpus``: how many each worker has (1 and 0). ``streams``: how many texts each
              worker runs at a time (8). ``draft``: a draft model.
            - ``address``: the address of a Ray cluster, or "auto"; "local" starts Ray for this
              process. None = the cluster that this process is connected to, or else "local".
            - ``resume``: continue a job that was interrupted.
            - ``block_rows`` (512): how many rows are written together, and run again together after
              a failure. With 1 a worker runs one row at a time.
            - ``id_column`` ("id"); ``keep``: columns to copy from the input to the output;
              ``filesystem``: a ``pyarrow.fs.FileSystem``.
            - ``stall_s`` (600): seconds without progress after which a worker ends its process.

    Raises:
        ConfigError: a setting or an input is invalid, or the output belongs to another job.
        JobError: the job failed; ``resume=True`` continues it.
        UnsupportedError: Ray is not installed.
    """
    of_rows = {name: value for name, value in options.items() if name in RowOptions.__annotations__}
    of_job = cast(JobOptions, {k: v for k, v in options.items() if k not in of_rows})
    rows = GenerateRows(**cast(RowOptions, of_rows))
    return _RayJob(rows, inputs, output, model, load, of_job).run(Generate, seed)


def score(
    inputs: str | Sequence[str],
    output: str,
    *,
    model: str = hub.BUNDLED_TARGET,
    parse_special: bool = True,
    load: LoadOptions | None = None,
    **options: Unpack[JobOptions],
) -> JobReport:
    """Score the texts of files on a Ray cluster; each row's result is written exactly once.

    `Score` describes the columns (or keys) of the input and of the output. The arguments and errors
    are the same as for `generate`.
    """
    rows = ScoreRows(parse_special=parse_special)
    return _RayJob(rows, inputs, output, model, load, options).run(Score, 0)


class _RayJob:
    """A job: its input, its output, its settings, and its plan for Ray Data."""

    def __init__(
        self,
        rows: GenerateRows | ScoreRows,
        inputs: str | Sequence[str],
        output: str,
        model: str,
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
        self._cpus = bounded("cpus", options.get("cpus", 1.0), 0.0, _MOST)
        self._gpus = bounded("gpus", options.get("gpus", 0.0), 0.0, _MOST)
        self._streams = whole("streams", options.get("streams", 8), 1, 255)
        self._block_rows = whole("block_rows", options.get("block_rows", 512), 1)
        self._stall_s = bounded("stall_s", options.get("stall_s", 600.0), 0.0, _MOST)
        self._model, self._load, self._options = model, LoadOptions(**(load or {})), options
        self._arguments = {field.name: getattr(rows, field.name) for field in fields(rows)}
        id_column, keep = options.get("id_column", "id"), items("keep", options.get("keep", ()))
        filesystem = options.get("filesystem")
        self._source = Source.find(inputs, filesystem, id_column, rows.columns, tuple(keep))
        self._output = Folder(output, filesystem)
        self._settings: dict[str, object] = {
            "format": 5,
            "kind": "generate" if isinstance(rows, GenerateRows) else "score",
            "input": digest(self._source.files),
            "id_column": id_column,
            "keep": keep,
            "load": _plain({k: v for k, v in self._load.items() if not k.startswith("n_threads")}),
            **cast("dict[str, object]", _plain(self._arguments)),
        }

    def run(self, stage: type[Generate | Score], seed: int | None) -> JobReport:
        """Run the rows that have no result yet; return the report."""
        output, id_column = self._output, self._source.id_column
        earlier = output.read_json(_SETTINGS)
        if output.files() or earlier is not None:
            if not self._options.get("resume", False):
                raise ConfigError(
                    f"{output.path} already exists",
                    hint="continue it with resume=True (--resume), or name another folder",
                )
            if earlier is None:
                raise ConfigError(f"{output.path} is not the folder of a job")
        connected = cluster(self._options.get("address"), self._most, self._cpus)
        with connected, translated(output):
            ray = import_ray()
            facts = ray.get(ray.remote(_model_facts).options(num_cpus=0).remote(self._model))
            if seed is None:
                before = None if earlier is None else earlier.get("seed")
                seed = before if isinstance(before, int) else random_seed()
            settings: dict[str, object] = {**self._settings, **facts, "seed": seed}
            if earlier is not None:
                settings["rows"] = whole("rows, in job.json,", earlier.get("rows"), 1)
                _check_same(earlier, settings, output.path)
            finished = output.finished(id_column)
            n_rows = n_resumed = len(finished)
            if n_resumed != settings.get("rows"):
                rows = self._source.rows(finished["id"], self._block_rows)
                settings["rows"] = n_rows = n_resumed + self._source.count(rows)
                if earlier is None:
                    output.write_json(_SETTINGS, settings)
                else:
                    _check_same(earlier, settings, output.path)
                worker = WorkerOptions(
                    self._streams, self._options.get("draft"), str(facts["model"]), self._stall_s
                )
                self._map(rows, stage, {**self._arguments, "seed": seed, "worker": worker})
                finished = output.finished(id_column)
            if len(finished) != n_rows:
                raise JobError(
                    f"{len(finished)} of {n_rows} rows are in {output.path}: the workers of the "
                    "others died, or their files could not be written",
                    hint="Ray's logs of the workers say why; is there enough memory for each of them? "
                    "Resume the job; with block_rows=1 only rows that end their process stay missing",
                )
            n_errors = sum(finished["is_error"].to_pylist())
            invariant = all(finished["exact"].to_pylist())
            report = JobReport(output.path, n_rows, n_errors, n_resumed, invariant, seed)
            output.write_json("_SUCCESS", report.as_dict())
            return report

    def _map(
        self, rows: ray.data.Dataset, stage: type[Generate | Score], arguments: dict[str, object]
    ) -> None:
        """Run rows and write their results."""
        import ray.data

        of_source = {"id_column": self._source.id_column, "keep": self._source.keep}
        rows.context.max_errored_blocks = _MOST_LOST
        is_alone = self._block_rows == 1  # then a row that crashes its worker affects only itself
        with warnings.catch_warnings():
            # Ray 2.64 and later may rename ``ray_remote_args``; those versions are excluded.
            warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")
            rows = rows.map_batches(
                stage,
                fn_constructor_args=(self._model,),
                fn_constructor_kwargs={**arguments, **of_source, **self._load},
                batch_size=min(self._block_rows, _ROWS_PER_STREAM * self._streams),
                batch_format="pyarrow",
                num_cpus=self._cpus,
                num_gpus=self._gpus,
                compute=ray.data.ActorPoolStrategy(
                    min_size=self._least,
                    max_size=self._most,
                    max_tasks_in_flight_per_actor=1 if is_alone else 3,
                    max_concurrent_calls_per_actor=1 if is_alone else 2,
                ),
                max_task_retries=MOST_RETRIES,
            )
            # Writing must not wait for a CPU, because workers may have all of them. Without a limit Ray
            # would start a process for each block.
            rows.write_datasink(
                self._output.sink(),
                ray_remote_args={"num_cpus": 0},
                concurrency=max(1, self._most // _WORKERS_PER_WRITER),
            )


def _model_facts(model: str) -> dict[str, object]:
    """Return a model's fingerprint and the software versions; runs on a node of the cluster."""
    try:
        own = metadata.version("llamabranch")
    except metadata.PackageNotFoundError:  # not installed
        own = "unknown"
    with Model(hub.resolve(model, download=True), vocab_only=True) as opened:
        fingerprint = opened.fingerprint
    return {"model": fingerprint, "versions": {"llamabranch": own, **engine_versions()}}


def _check_same(earlier: Mapping[str, object], settings: Mapping[str, object], path: str) -> None:
    """Raise ConfigError unless a job is resumed with the settings it was started with."""
    different = [
        name
        for name in sorted({*earlier, *settings})
        if json.dumps(earlier.get(name)) != json.dumps(settings.get(name))
    ]
    if different:
        raise ConfigError(
            f"{path} was made with other settings: {', '.join(different)}",
            hint="resume with the settings in its _job/job.json, or name another folder",
        )


def _plain(value: object) -> object:
    """Return a setting as it is after a round trip through JSON."""

    def as_dict(part: object) -> object:
        return part.as_dict() if isinstance(part, Grammar) else asdict(cast(SamplingParams, part))

    return json.loads(json.dumps(value, sort_keys=True, default=as_dict))
