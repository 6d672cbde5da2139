"""Plain decoding against llama.cpp's own benchmark and against llama-cpp-python's Llama.

    python -m benchmarks.decode

``llama-bench`` is the upper bound: it only decodes, without sampling or text. The last table
shows the parts of a step of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llamabranch as lb
from llamabranch.bench.pair import seed_of, speculative
from llamabranch.bench.timing import Maker, Series, Timing

from . import llama_tools
from .clocks import interleave
from .llama_python import LlamaPython
from .llama_tools import LlamaTools
from .prompts import PROMPTS
from .report import Settings, emit, number, parser, percent, pm, series_json, table, title
from .step import StepCost, step_cost

CEILING, SAME_KV = "llama-bench", "llama-bench, our K/V type"
OURS = "plain decoding"
COMPLETION = "Llama.create_completion"


def main() -> None:
    """Measure the target and the draft."""
    args = parser(
        "plain decoding", runs=5, prompts=5, tokens=200, temperatures=(0.0, 0.8)
    ).parse_args()
    settings = Settings.of(args)
    tools = None
    if settings.peers:
        tools = LlamaTools(
            settings.peers_bin or llama_tools.build(settings.cache),
            threads=settings.threads,
            n_ctx=settings.n_ctx,
        )
    with settings.context(settings.target) as target, settings.context(settings.draft) as draft:
        results = {
            "target": _measure(target, settings, tools),
            "draft": _measure(draft, settings, tools),
        }
        commit = tools.build_commit if tools else None
        models = {"target": target.model, "draft": draft.model}
        emit("decode", settings, models, results, llama_cpp_commit=commit)


def _measure(ctx: lb.Context, settings: Settings, tools: LlamaTools | None) -> dict[str, object]:
    prompts = [ctx.tokenize(prompt) for prompt in PROMPTS[: settings.prompts]]
    options = {"n_ctx": settings.n_ctx, "threads": settings.threads}
    llama = LlamaPython(ctx.model.path, **options)
    series: dict[float, dict[str, Series]] = {}
    steps: dict[float, StepCost] = {}
    try:
        for temperature in settings.temperatures:
            makers = _compared(ctx, prompts, settings.tokens, temperature, tools, llama)
            series[temperature] = interleave(makers, n_runs=settings.runs, n_items=len(prompts))
            with lb.Branch.start(ctx, prompts[0], temperature=temperature, seed=1) as branch:
                steps[temperature] = step_cost(branch, settings.tokens)
    finally:
        llama.close()
    _show(ctx, settings, series)
    _show_steps(ctx, steps)
    return {
        "kv_type": ctx.kv_type,
        "temperatures": {
            f"{temperature:g}": {
                "compared": {
                    name: series_json(s, compared.get(CEILING)) for name, s in compared.items()
                },
                "ours_over_completion": compared[OURS].ratio(compared[COMPLETION]).as_dict(),
                "step": steps[temperature].as_dict(),
            }
            for temperature, compared in series.items()
        },
    }


def _compared(
    ctx: lb.Context,
    prompts: Sequence[Sequence[int]],
    n: int,
    temperature: float,
    tools: LlamaTools | None,
    llama: LlamaPython,
) -> dict[str, Maker]:
    makers: dict[str, Maker] = {}
    sampling = lb.SamplingParams(temperature=temperature)
    path = ctx.model.path
    if tools is not None:
        makers[CEILING] = _each(lambda run, item: tools.bench(path, n))
        if ctx.kv_type != "f16":
            makers[SAME_KV] = _each(lambda run, item: tools.bench(path, n, ctx.kv_type))
    makers[OURS] = speculative(ctx, prompts, n, sampling)
    makers["Llama.generate"] = _each(
        lambda run, item: llama.generate(prompts[item], n, temperature, seed_of(run, item))
    )
    makers[COMPLETION] = _each(
        lambda run, item: llama.complete(prompts[item], n, temperature, seed_of(run, item))
    )
    return makers


def _each(work: Callable[[int, int], Timing]) -> Maker:
    return lambda run: lambda item: work(run, item)


def _show(ctx: lb.Context, settings: Settings, series: dict[float, dict[str, Series]]) -> None:
    rows = []
    for temperature, compared in series.items():
        ours = compared[OURS]
        for name, other in compared.items():
            of_ceiling = pm(other.ratio(compared[CEILING])) if CEILING in compared else "-"
            ours_over = "-" if name == OURS else pm(ours.ratio(other))
            rows.append((f"{temperature:g}", name, pm(other.rate, 0), of_ceiling, ours_over))
    caption = (
        f"Plain decoding of {title(ctx.model)}: {settings.threads} threads, {settings.prompts} prompts "
        f"x {settings.tokens} tokens, medians of {settings.runs} runs (lowest to highest); "
        f"our K/V type {ctx.kv_type}, theirs f16"
    )
    columns = ("T", "", "tokens/s", f"of {CEILING}", f"{OURS} over it")
    table(caption, columns, rows)


def _show_steps(ctx: lb.Context, steps: dict[float, StepCost]) -> None:
    rows = [
        (
            f"{temperature:g}",
            number(1e6 * step.decode.median, 1),
            number(1e6 * step.produce.median, 1),
            number(1e6 * step.commit.median, 1),
            percent(step.share),
        )
        for temperature, step in steps.items()
    ]
    columns = ("T", "llama_decode, µs", "our produce, µs", "our commit, µs", "our share")
    table(f"One step of {title(ctx.model)}, medians", columns, rows)


if __name__ == "__main__":
    main()
