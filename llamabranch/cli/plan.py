"""``llamabranch plan``: what a job on a cluster will take, from a measured profile."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from llamabranch import ConfigError

from .bundles import with_bundles
from .console import print_json
from .files import check_new_file, write_new_file
from .formats import number
from .options import OutputOptions, RuntimeOptions, TargetOptions

if TYPE_CHECKING:
    from llamabranch.scale import WorkerProfile

JOB = "The job"
PROFILE = "A worker"


@with_bundles
def plan(
    *,
    rows: Annotated[int, typer.Option(min=1, help="How many rows.", rich_help_panel=JOB)],
    prompt_tokens: Annotated[
        float, typer.Option(min=0, help="Tokens of a prompt.", rich_help_panel=JOB)
    ] = 200.0,
    output_tokens: Annotated[
        float, typer.Option(min=0, help="Tokens of a text.", rich_help_panel=JOB)
    ] = 128.0,
    shared_tokens: Annotated[
        float,
        typer.Option(
            min=0,
            help="Of a prompt's tokens, those that others begin with too.",
            rich_help_panel=JOB,
        ),
    ] = 0.0,
    rows_per_prefix: Annotated[
        float, typer.Option(min=1, help="Rows that begin alike.", rich_help_panel=JOB)
    ] = 1.0,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.", rich_help_panel=JOB)] = 1,
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Of one worker for one hour.", rich_help_panel=JOB),
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(min=0, help="Mean hours between two deaths of a worker.", rich_help_panel=JOB),
    ] = None,
    block_rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of a block. Default: the best.", rich_help_panel=JOB),
    ] = None,
    text_ids: Annotated[
        bool, typer.Option("--text-ids", help="Ids are text, not numbers.", rich_help_panel=JOB)
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Read what a worker can do from this file; measure and write it if it is missing.",
            rich_help_panel=PROFILE,
        ),
    ] = None,
    streams: Annotated[
        int,
        typer.Option(min=1, max=255, help="Texts at a time at most.", rich_help_panel=PROFILE),
    ] = 16,
    row_overhead: Annotated[
        float | None,
        typer.Option(min=0, help="Milliseconds that Ray adds to a row.", rich_help_panel=PROFILE),
    ] = None,
    models: TargetOptions,
    runtime: RuntimeOptions,
    output: OutputOptions,
) -> None:
    """Estimate the time, the cost and the best block of a job on a cluster.

    What a worker can do is measured on this machine, with as many texts at a time as give most tokens.
    The estimate is checked by a simulation with lengths and deaths drawn at random.
    """
    from llamabranch.scale import JobNumbers, WorkerProfile, measure, simulate
    from llamabranch.scale import plan as make_plan

    with output.console() as console, ExitStack() as stack:
        job = JobNumbers(
            rows=rows,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            shared_tokens=shared_tokens,
            rows_per_prefix=rows_per_prefix,
            workers=workers,
            price=price,
            mtbf_h=math.inf if mtbf is None else mtbf,
            block_rows=block_rows,
            text_ids=text_ids,
        )
        worker = None if profile is None else _read(profile)
        if worker is None:
            if profile is not None:
                check_new_file(profile)
            models.find(models.target_name)
            if runtime.n_ctx is None:
                runtime = replace(runtime, n_ctx=max(2048, 512 * streams))
            begin = perf_counter()
            context = runtime.open(
                models.target_name, console, stack, n_seq_max=streams, prefix_cache=True
            )
            worker = measure(context, perf_counter() - begin)
            if profile is not None:
                written = json.dumps(worker.as_dict(), indent=1)
                stack.callback(write_new_file, profile, written)  # after the plan is printed
        if row_overhead is not None:
            worker = WorkerProfile(**{**worker.as_dict(), "row_s": row_overhead / 1000})  # type: ignore[arg-type]
        found = make_plan(worker, job)
        played = None
        if found.n_blocks <= 1_000_000 and rows <= 10_000_000:
            played = simulate(worker, job)
        if output.as_json:
            print_json({"profile": worker.as_dict(), **found.as_dict(), "simulated_s": played})
            return
        console.table(
            ("a worker", ""),
            [
                ("texts at a time", str(worker.streams)),
                ("tokens generated a second", number(worker.decode_per_s, 0)),
                ("prompt tokens read a second", number(worker.prefill_per_s, 0)),
                ("seconds to start", number(worker.load_s, 1)),
            ],
        )
        console.line()
        lines = [
            ("time", _duration(found.seconds)),
            ("simulated", "-" if played is None else _duration(played)),
            ("rows of a block", str(found.block_rows)),
            ("time of a block", _duration(found.block_s)),
            ("blocks, files", str(found.n_blocks)),
            ("output tokens a second", number(found.tokens_per_s, 0)),
            ("deaths of workers", number(found.deaths, 1)),
            ("lost to them", _duration(found.lost_s)),
            ("share of useful time", f"{found.efficiency:.1%}"),
            ("ids in memory on resume", f"{found.id_bytes / 2**30:.2f} GiB"),
        ]
        if found.cost is not None and found.cost_per_million is not None:
            lines += [
                ("cost", f"{found.cost:,.2f}"),
                ("cost of a million output tokens", f"{found.cost_per_million:.3f}"),
            ]
        console.table(("the job", ""), lines)


def _read(path: Path) -> WorkerProfile | None:
    from llamabranch.scale import WorkerProfile

    if not path.exists():
        return None
    try:
        return WorkerProfile(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no profile of a worker: {error}") from None


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
