"""Whole jobs on Ray Data: `generate` and `score` take files to files, each row exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import cast

from typing_extensions import Unpack

from .. import hub
from ..loading import LoadOptions
from ..sampling.grammar import Grammar
from .rows import GenerateRows, RowOptions
from .run import JobRun, plain
from .settings import JobOptions, JobReport
from .stages import Generate, Score

__all__ = ["generate", "score"]


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

    The input has the columns (or keys) ``id`` and ``prompt``, the output those that `Generate`
    describes.

    Args:
        inputs: Parquet files or JSON lines: paths, folders, patterns or URIs that every node can read.
        output: a folder that every node can write to.
        model, max_tokens, sampling, stop, grammar, n, chat, parse_special: as for `Generate`.
        seed: the seed from which those of the rows are derived; None = a random one, kept in job.json.
        load: options of `lb.load` for the workers.
        options: how the job runs:

            - ``workers``: how many, or the least and the most; ``cpus`` and ``gpus`` of each (1 and 0);
              ``streams``: texts at a time of each (8); ``draft``: a draft model.
            - ``address``: of the Ray cluster, "auto", or "local" for one of this process. None = the one
              that is connected, else a local one.
            - ``resume``: continue a job that was interrupted.
            - ``sort`` (True): sort the rows by prompt, for the prefix cache. ``block_rows`` (512):
              rows that are written, or after a failure repeated, together. ``local_bytes``: up to
              this size (256 MiB) the input is sorted here, beyond by Ray.
            - ``format``: "parquet" or "jsonl"; ``id_column`` ("id"); ``keep``: columns of the input
              that the output has too; ``filesystem``: a ``pyarrow.fs.FileSystem``.
            - ``price``: of one worker for one hour, for the cost; ``on_progress``: called about once a
              second with a `Progress`.
            - ``stall_s``: a worker without progress for so long ends itself (600).

    Raises:
        ConfigError: an invalid setting or input, an output that belongs to another job.
        JobError: the job failed; ``resume=True`` continues it.
        UnsupportedError: Ray is not installed.
    """
    of_rows = RowOptions.__annotations__
    given = {name: value for name, value in options.items() if name in of_rows}
    rows = GenerateRows.of(cast(RowOptions, given))
    settings: dict[str, object] = {
        "max_tokens": rows.max_tokens,
        "sampling": plain(asdict(rows.sampling)),
        "stop": list(rows.stop),
        "grammar": rows.grammar.as_dict() if isinstance(rows.grammar, Grammar) else None,
        "n": rows.n,
        "chat": rows.chat,
        **({} if rows.parse_special else {"parse_special": False}),
    }
    layout = ("prompt", "max_tokens", "stop", "grammar", "seed", "parse_special")
    of_job = cast(JobOptions, {k: v for k, v in options.items() if k not in of_rows})
    job = JobRun("generate", inputs, output, model, settings, layout, load, of_job)
    arguments = {field.name: getattr(rows, field.name) for field in fields(rows)}
    return job.run(Generate, lambda worker, job_seed: {**arguments, "seed": job_seed}, seed)


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

    The input has the columns (or keys) ``id``, ``text`` and optionally ``context``, the output those that
    `Score` describes.

    Arguments and errors are those of `generate`.
    """
    settings: dict[str, object] = {} if parse_special else {"parse_special": False}
    layout = ("text", "context", "parse_special")
    job = JobRun("score", inputs, output, model, settings, layout, load, options)
    return job.run(Score, lambda worker, seed: {"parse_special": parse_special}, 0)
