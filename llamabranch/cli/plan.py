"""``llamabranch plan``: what a job on a cluster will take."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, replace
from time import perf_counter
from typing import Annotated

import typer

from .bundles import with_bundles
from .console import print_json
from .options import OutputOptions, RuntimeOptions, TargetOptions


def _option(text: str, **bounds: int) -> object:
    return typer.Option(help=text, rich_help_panel="The job", **{"min": 0, **bounds})


@with_bundles
def plan(
    *,
    rows: Annotated[int, _option("How many rows.", min=1)],
    prompt_tokens: Annotated[float, _option("Tokens of a prompt.")] = 200.0,
    output_tokens: Annotated[float, _option("Tokens of a text.")] = 128.0,
    shared_tokens: Annotated[float, _option("Of these, those other prompts begin with.")] = 0.0,
    rows_per_prefix: Annotated[float, _option("Rows that begin alike.", min=1)] = 1.0,
    workers: Annotated[int, _option("Worker processes.", min=1)] = 1,
    price: Annotated[float | None, _option("Of one worker for one hour.")] = None,
    mtbf: Annotated[float | None, _option("Mean hours between a worker's deaths.")] = None,
    block_rows: Annotated[int | None, _option("Rows of a block. Default: the best.", min=1)] = None,
    decode_rate: Annotated[float | None, _option("Tokens a worker generates a second.")] = None,
    prefill_rate: Annotated[float | None, _option("Tokens a worker reads a second.")] = None,
    streams: Annotated[int, _option("Texts at a time to measure at most.", min=1, max=255)] = 16,
    models: TargetOptions,
    runtime: RuntimeOptions,
    output: OutputOptions,
) -> None:
    """Estimate the time and the cost of a job on a cluster; rates not given are measured here."""
    from llamabranch.scale import JobNumbers, measure

    with output.console() as console, ExitStack() as stack:
        job = JobNumbers(
            rows, prompt_tokens, output_tokens, 1.0 if decode_rate is None else decode_rate,
            1.0 if prefill_rate is None else prefill_rate, shared_tokens, rows_per_prefix, workers,
            math.inf if mtbf is None else mtbf, block_rows=block_rows, price=price,
        )  # fmt: skip
        if decode_rate is None or prefill_rate is None:
            name = str(models.find(models.target_name))
            n_ctx = max(2048, 512 * streams) if runtime.n_ctx is None else runtime.n_ctx
            runtime, begin = replace(runtime, n_ctx=n_ctx), perf_counter()
            context = runtime.open(name, console, stack, n_seq_max=streams, prefix_cache=True)
            job = replace(job, load_s=perf_counter() - begin)
            decode, prefill, streams = measure(context)
            job = replace(job, decode_per_s=decode_rate or decode)
            job = replace(job, prefill_per_s=prefill_rate or prefill)
        found = {**asdict(job), "streams": streams, **asdict(job.plan())}
        if output.as_json:
            print_json({k: None if v == math.inf else v for k, v in found.items()})
        else:
            lines = [(name, f"{n:,.10g}") for name, n in found.items() if n is not None]
            console.table(("job", ""), lines)
