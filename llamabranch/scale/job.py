"""Whole jobs on Ray Data: `generate` and `score` take files to files, each row exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from typing_extensions import Unpack

from .. import hub
from ..arguments import whole
from ..loading import LoadOptions
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from .run import JobRun, plain
from .settings import JobOptions, JobReport
from .stages import Generate, Score, WorkerOptions

__all__ = ["generate", "score"]


def generate(
    inputs: str | Sequence[str],
    output: str,
    *,
    model: str = hub.BUNDLED_TARGET,
    max_tokens: int | None = 128,
    seed: int | None = None,
    sampling: SamplingParams | None = None,
    stop: Sequence[str] = (),
    grammar: Grammar | str | None = None,
    n: int = 1,
    chat: bool = False,
    parse_special: bool = True,
    load: LoadOptions | None = None,
    **options: Unpack[JobOptions],
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
        JobError: the job failed; with ``resume=True`` it goes on from there.
        UnsupportedError: Ray is not installed.
    """
    if isinstance(grammar, str):
        grammar = Grammar(grammar)
    settings: dict[str, object] = {
        "max_tokens": None if max_tokens is None else whole("max_tokens", max_tokens, 0),
        "sampling": plain(asdict(sampling or SamplingParams())),
        "stop": list(stop),
        "grammar": None if grammar is None else grammar.as_dict(),
        "n": whole("n", n, 1),
        "chat": chat,
        **({} if parse_special else {"parse_special": False}),
    }
    layout = ("prompt", "max_tokens", "stop", "grammar", "seed", "parse_special")
    job = JobRun("generate", inputs, output, model, settings, layout, load, options)

    def stage(worker: WorkerOptions, job_seed: int) -> dict[str, object]:
        return {
            "max_tokens": max_tokens,
            "seed": job_seed,
            "sampling": sampling,
            "stop": tuple(stop),
            "grammar": grammar,
            "n": n,
            "chat": chat,
            "parse_special": parse_special,
        }

    return job.run(Generate, stage, seed)


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
