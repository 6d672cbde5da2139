"""``llamabranch plan``: what a job on a cluster will take."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Annotated, ClassVar

import typer

from .bundles import with_bundles
from .console import print_json
from .options import OutputOptions, RuntimeOptions, TargetOptions


def _option(text: str, *names: str, least: int = 0, most: int | None = None) -> object:
    return typer.Option(*names, help=text, min=least, max=most)


@dataclass(frozen=True)
class JobSizeOptions:
    """The fields of `JobNumbers`; the rates, and the streams to measure them with, of one worker."""

    panel: ClassVar[str] = "The job"

    rows: Annotated[int, _option("How many rows.", least=1)]
    prompt_tokens: Annotated[float, _option("Tokens of a prompt.")] = 200.0
    output_tokens: Annotated[float, _option("Tokens of a text.")] = 128.0
    shared_tokens: Annotated[float, _option("Of these, those other prompts begin with.")] = 0.0
    rows_per_prefix: Annotated[float, _option("Rows that begin alike.", least=1)] = 1.0
    workers: Annotated[int, _option("Worker processes.", least=1)] = 1
    price: Annotated[float | None, _option("Of one worker for one hour.")] = None
    mtbf_h: Annotated[float | None, _option("Hours between a worker's deaths.", "--mtbf")] = None
    block_rows: Annotated[int | None, _option("Of a block. Default: the best.", least=1)] = None
    decode_per_s: Annotated[float | None, _option("Tokens/s generated.", "--decode-rate")] = None
    prefill_per_s: Annotated[float | None, _option("Tokens/s read.", "--prefill-rate")] = None
    streams: Annotated[int, _option("Texts at a time, at most.", least=1, most=255)] = 16


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
            name = str(models.find(models.target_name))
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
