"""``--ray``: the options of a job on a Ray cluster, and how it runs and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from llamabranch import ConfigError

from .bundles import option
from .console import Console, print_json
from .reporting import EXIT_FAILURE

if TYPE_CHECKING:
    from llamabranch.scale import JobOptions, JobReport, Progress

__all__ = ["RayOptions", "finish_job", "job_paths"]

RAY = "On a Ray cluster"


@dataclass(frozen=True)
class RayOptions:
    """Where a job runs, and on how much."""

    panel: ClassVar[str] = RAY

    ray: str | None = option(
        None,
        "Run as a job on a Ray cluster (auto: this machine's, or RAY_ADDRESS; local: one that "
        "is started for it). --input is then Parquet or JSON lines, --output a folder.",
        "--ray",
        metavar="ADDRESS|local",
    )
    workers: str = option("1", "Worker processes, with --ray.", metavar="N|LEAST:MOST")
    cpus_per_worker: float = option(1.0, "CPUs, and threads, of each worker.", min=0)
    gpus_per_worker: float = option(0.0, "GPUs of each worker.", min=0)
    block_rows: int = option(512, "Rows that are written, or repeated, together.", min=1)
    price: float | None = option(None, "Of one worker for one hour: shows the cost.", min=0)
    job_format: str = option("parquet", "Of the results.", "--format", metavar="parquet|jsonl")
    keep: list[str] | None = option(
        None, "A column of the input that the output has too; may be repeated."
    )

    def options(self, console: Console, *, resume: bool, streams: int) -> JobOptions:
        """Return them as `llamabranch.scale` takes them; progress goes to ``console``."""
        from llamabranch.scale import JobOptions

        return JobOptions(
            address=self.ray,
            workers=_parse_workers(self.workers),
            cpus=self.cpus_per_worker,
            gpus=self.gpus_per_worker,
            block_rows=self.block_rows,
            price=self.price,
            format=self.job_format,
            keep=self.keep or (),
            resume=resume,
            streams=streams,
            on_progress=lambda progress: console.progress(_line(progress)),
        )


def job_paths(
    input_file: str | None, output: Path | None, prompts: Sequence[str] | None
) -> tuple[str, str]:
    """Return the input and the output of a job.

    Raises:
        ConfigError: one is missing, or there are prompts besides.
    """
    if prompts:
        raise ConfigError("a job on Ray reads its rows from files", hint="give --input")
    if input_file is None or input_file == "-":
        raise ConfigError("a job on Ray needs --input: a file, a folder or a pattern")
    if output is None:
        raise ConfigError("a job on Ray needs --output: a folder")
    return input_file, str(output)


def finish_job(console: Console, report: JobReport, *, as_json: bool) -> None:
    """Print what a job has done; exit with 1 if rows of it are errors."""
    console.progress("")
    if as_json:
        print_json(report.as_dict())
    else:
        last = report.last
        console.line(f"{report.n_rows} rows in {report.output}, {report.n_errors} of them errors")
        if report.n_resumed:
            console.line(f"{report.n_resumed} rows were there already")
        console.line(_line(last))
        if last.prompt_tokens:
            share = 1 - last.evaluated_tokens / last.prompt_tokens
            console.line(f"{last.prompt_tokens} prompt tokens, {share:.0%} of them from caches")
        if not report.batch_invariant:
            console.note(
                "the contexts were not batch-invariant: the job may give other texts again"
            )
    if report.n_errors:
        raise typer.Exit(EXIT_FAILURE)


def _line(progress: Progress) -> str:
    parts = [
        f"{progress.rows}/{progress.n_rows} rows, {progress.n_rows - progress.rows} left",
        f"{progress.tokens_per_s:.0f} tokens/s",
        f"{progress.errors} errors",
        f"{progress.workers} workers",
    ]
    if progress.deaths:
        parts.append(f"{progress.deaths} died")
    if progress.cost is not None:
        parts.append(f"cost {progress.cost:.2f}")
    return ", ".join(parts)


def _parse_workers(text: str) -> int | tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        return (int(least), int(most)) if most else int(least)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a number nor LEAST:MOST", param_hint="--workers"
        ) from None
