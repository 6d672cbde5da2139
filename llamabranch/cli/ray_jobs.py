"""``--ray``: the options of a job on a Ray cluster, and how it runs and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from llamabranch import ConfigError

from ..arguments import nearest
from .bundles import option
from .console import Console
from .interrupts import EXIT_FAILURE
from .options import setting_value

if TYPE_CHECKING:
    from llamabranch.scale import JobOptions, JobReport, Progress

_NAMES = ("workers", "cpus", "gpus", "block_rows", "price", "format", "keep")


@dataclass(frozen=True)
class RayOptions:
    """Where a job runs, and on how much."""

    panel: ClassVar[str] = "Cluster"

    ray: str | None = option(
        None,
        "Run as a job on a Ray cluster: `auto`, `local` or an address, then workers=2:8, cpus, gpus, "
        "block_rows, price, format, keep. --input is Parquet or JSON lines, --output a folder.",
        "--ray",
        metavar="ADDRESS[,NAME=VALUE...]",
    )

    def ray_options(self, console: Console, *, resume: bool, streams: int) -> JobOptions:
        """Return them as `llamabranch.scale` takes them; progress goes to ``console``.

        Raises:
            ConfigError: an unknown option.
        """
        from llamabranch.scale import JobOptions

        address, *given = (self.ray or "").split(",")
        options = JobOptions(
            address=address,
            resume=resume,
            streams=streams,
            on_progress=lambda progress: console.progress(_line(progress)),
        )
        for text in given:
            name, _, value = text.partition("=")
            if name not in _NAMES:
                raise ConfigError(f"--ray has no {name!r}", hint=nearest(name, _NAMES, "options"))
            options[name] = _option(name, value)  # type: ignore[literal-required]
        return options

    @staticmethod
    def paths(
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


def _option(name: str, value: str) -> object:
    """Return the value of an option of a job: ``workers`` is N or LEAST:MOST, ``keep`` has names."""
    if name == "keep":
        return value.split("+")
    if name == "workers" and ":" in value:
        least, _, most = value.partition(":")
        if least.isdecimal() and most.isdecimal():
            return int(least), int(most)
        raise ConfigError(f"workers is a number or LEAST:MOST, not {value!r}")
    return setting_value(value)


def finish_job(console: Console, report: JobReport) -> None:
    """Print what a job has done; exit with 1 if rows of it are errors."""
    console.progress("")
    last = report.last
    console.line(f"{report.n_rows} rows in {report.output}, {report.n_errors} of them errors")
    if report.n_resumed:
        console.line(f"{report.n_resumed} rows were there already")
    console.line(_line(last))
    if last.prompt_tokens:
        share = 1 - last.evaluated_tokens / last.prompt_tokens
        console.line(f"{last.prompt_tokens} prompt tokens, {share:.0%} of them from caches")
    if not report.batch_invariant:
        console.note("the contexts were not batch-invariant: the job may give other texts again")
    console.answer(report.as_dict())
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
