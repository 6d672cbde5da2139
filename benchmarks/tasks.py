"""Five tasks on a real model: copied drafts, without a draft model, compared with plain decoding.

    python -m benchmarks.tasks --target smollm2-135m:BF16 [--peers-bin FOLDER]

For each task the same text is decoded plainly, with suffix drafts (length "auto" and each fixed length),
and by llama-lookup. A text ends where the model ends it, or after --tokens. The targets smollm2-135m,
smollm2-135m:Q8_0, :BF16 and :Q4_0 are one model in several types. `benchmarks.serve --only load` takes
them too, for 1 to 16 clients.
"""

from __future__ import annotations

from collections.abc import Mapping

import llamabranch as lb
from llamabranch.bench.pair import speculative
from llamabranch.bench.timing import Maker, Series, Timing, Work

from . import llama_tools
from .clocks import interleave
from .llama_tools import LlamaTools
from .prompts import TASKS
from .report import Settings, emit, number, parser, percent, pm, series_json, table, title

PLAIN, AUTO, LOOKUP = "plain", "auto", "llama-lookup"


def main() -> None:
    """Measure every task."""
    described = parser("tasks", runs=3, prompts=1, tokens=96)
    described.set_defaults(target="smollm2-135m")
    described.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    described.add_argument(
        "--lengths", type=int, nargs="+", default=[3, 7, 15], help="fixed draft lengths"
    )
    args = described.parse_args()
    settings = Settings.of(args)
    tools = None
    if settings.peers:
        folder = settings.peers_bin or llama_tools.build(settings.cache)
        tools = LlamaTools(folder, threads=settings.threads, n_ctx=settings.n_ctx)
    with settings.context(settings.target) as ctx:
        results = {
            f"{name}, T = {temperature:g}": _measure(
                name, ctx, settings, temperature, args.lengths, tools
            )
            for temperature in settings.temperatures
            for name in args.only
        }
        commit = tools.build_commit if tools else None
        emit("tasks", settings, {"target": ctx.model}, results, llama_cpp_commit=commit)


def _measure(
    name: str,
    ctx: lb.Context,
    settings: Settings,
    temperature: float,
    lengths: list[int],
    tools: LlamaTools | None,
) -> Mapping[str, object]:
    prompts, n = [ctx.tokenize(TASKS[name])], settings.tokens
    sampling = lb.SamplingParams(temperature=temperature)

    def drafting(k: int | str) -> Maker:
        def suffix() -> lb.Drafter:
            return lb.SuffixDrafter()

        return speculative(ctx, prompts, n, sampling, suffix, lb.SpeculativeConfig(draft_k=k))

    makers = {PLAIN: speculative(ctx, prompts, n, sampling), AUTO: drafting(AUTO)}
    makers |= {f"fixed {k}": drafting(k) for k in lengths}
    if tools is not None:
        makers[LOOKUP] = _lookup(tools, ctx, name, n, max(lengths), temperature)
    compared = interleave(makers, n_runs=settings.runs, n_items=1)
    _show(name, ctx, settings, temperature, compared)
    best = max((f"fixed {k}" for k in lengths), key=lambda name: compared[name].rate.median)
    over = {
        other: compared[AUTO].ratio(compared[other])
        for other in (PLAIN, best, LOOKUP)
        if other in compared
    }
    table(f"{name}: auto over", tuple(over), [tuple(pm(ratio) for ratio in over.values())])
    return {
        "compared": {
            key: series_json(one_series, compared[PLAIN]) for key, one_series in compared.items()
        },
        "best_fixed": best,
        "auto_over": {key: ratio.as_dict() for key, ratio in over.items()},
    }


def _lookup(
    tools: LlamaTools, ctx: lb.Context, name: str, n: int, k: int, temperature: float
) -> Maker:
    def make(run: int) -> Work:
        def work(item: int) -> Timing:
            return tools.lookup(
                ctx.model.path, TASKS[name], n, k=k, temperature=temperature, seed=run + 2
            )

        return work

    return make


def _show(
    name: str,
    ctx: lb.Context,
    settings: Settings,
    temperature: float,
    compared: Mapping[str, Series],
) -> None:
    rows = []
    for key, one_series in compared.items():
        stats = one_series.stats
        same, of = one_series.same_texts(compared[PLAIN])
        rows.append(
            (
                key,
                pm(one_series.rate, 1),
                pm(one_series.ratio(compared[PLAIN])),
                percent(stats.draft_acceptance_rate),
                number(stats.mean_acceptance_length),
                f"{same} of {of}" if of else "-",
            )
        )
    caption = (
        f"{name}, T = {temperature:g}. {title(ctx.model)}: {settings.threads} threads, at most "
        f"{settings.tokens} tokens, medians of {settings.runs} runs (lowest to highest)"
    )
    columns = ("", "tokens/s", "x plain", "accepted / drafted", "tokens a round", "same text")
    table(caption, columns, rows)


if __name__ == "__main__":
    main()
