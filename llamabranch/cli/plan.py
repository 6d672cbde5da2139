"""``llamabranch plan``: what a job on a cluster will take."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Annotated, ClassVar

import typer

from .bundles import option, with_bundles
from .console import print_json
from .options import OutputOptions, RuntimeOptions, TargetOptions


@dataclass(frozen=True)
class JobSizeOptions:
    """The fields of `JobNumbers`; the rates, and the streams to measure them with, of one worker."""

    panel: ClassVar[str] = "The job"

    rows: Annotated[int, typer.Option(help="How many rows.", min=1)]
    prompt_tokens: float = option(200.0, "Tokens of a prompt.")
    output_tokens: float = option(128.0, "Tokens of a text.")
    shared_tokens: float = option(0.0, "Of these, those other prompts begin with.")
    rows_per_prefix: float = option(1.0, "Rows that begin alike.", min=1)
    workers: int = option(1, "Worker processes.", min=1)
    price: float | None = option(None, "Of one worker for one hour.")
    mtbf_h: float | None = option(None, "Hours between a worker's deaths.", "--mtbf")
    block_rows: int | None = option(None, "Of a block. Default: the best.", min=1)
    decode_per_s: float | None = option(None, "Tokens/s generated.", "--decode-rate")
    prefill_per_s: float | None = option(None, "Tokens/s read.", "--prefill-rate")
    streams: int = option(16, "Texts at a time, at most.", min=1, max=255)


@with_bundles
def plan(
    *, size: JobSizeOptions, models: TargetOptions, runtime: RuntimeOptions, output: OutputOptions
) -> None:
    """Estimate the time and the cost of a job on a cluster; rates not given are measured here."""
    from llamabranch.scale import JobNumbers, measure

    with output.console() as console, ExitStack() as stack:
        given = {name: value for name, value in asdict(size).items() if value is not None}
        streams = given.pop("streams")
        measured = {"decode_per_s": 1.0, "prefill_per_s": 1.0}
        job = JobNumbers(**(measured | given))
        if not measured.keys() <= given.keys():
            name = str(models.find(models.announce(console)))
            n_ctx = max(2048, 512 * streams) if runtime.n_ctx is None else runtime.n_ctx
            runtime, begin = replace(runtime, n_ctx=n_ctx), perf_counter()
            context = runtime.open(name, console, stack, n_seq_max=streams, prefix_cache=True)
            measured["load_s"] = perf_counter() - begin
            measured["decode_per_s"], measured["prefill_per_s"], streams = measure(context)
            job = JobNumbers(**(measured | given))
        found = {**asdict(job), "streams": streams, **asdict(job.plan())}
        if output.as_json:
            print_json({k: None if v == math.inf else v for k, v in found.items()})
        else:
            lines = [(name, f"{n:,.10g}") for name, n in found.items() if n is not None]
            console.table(("job", ""), lines)
