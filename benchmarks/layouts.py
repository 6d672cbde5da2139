"""Many texts at a time: in a unified cache, each in cells of its own, and one after another.

The texts are timed with several lengths. All times include the prompts, which have a few tokens each.

python -m benchmarks.layouts --lengths 50 400
"""

from __future__ import annotations

from time import perf_counter

import llamabranch as lb
from llamabranch.bench.timing import Maker, Timing

from . import llama_tools
from .clocks import interleave
from .llama_tools import LlamaTools
from .report import Settings, emit, parser, pm, series_json, table, title

OWN, UNIFIED, IN_TURN = "Engine, own cells", "Engine, unified cache", "one after another"
BATCHED, BATCHED_UNIFIED = "llama-batched-bench", "llama-batched-bench, unified cache"
# With the Engine's K/V type texts are exact in any batch.
BATCHED_KV = "llama-batched-bench, K/V as the Engine's"
_PROMPT = 8


def main() -> None:
    """Measure every number of streams with every length."""
    described = parser("layouts of the cache", runs=3, prompts=1, tokens=64)
    described.add_argument("--streams", type=int, nargs="+", help="default: 1 2 4 8 16")
    described.add_argument("--lengths", type=int, nargs="+", help="default: 50 400 850")
    args = described.parse_args()
    settings = Settings.of(args)
    streams = args.streams or ([1, 2] if settings.quick else [1, 2, 4, 8, 16])
    lengths = args.lengths or ([20] if settings.quick else [50, 400, 850])
    tools = None
    if settings.peers:
        folder = settings.peers_bin or llama_tools.build(settings.cache)
        tools = LlamaTools(folder, threads=settings.threads, n_ctx=settings.n_ctx)
    results: dict[str, object] = {}
    rows = []
    with lb.Model(lb.hub.resolve(settings.target)) as model:
        for length in lengths:
            for n in streams:
                n_ctx = -(-(length + _PROMPT + 1) // 256) * 256 * n
                options: list[tuple[str, bool]] = [
                    (UNIFIED, True),
                    *([(OWN, False)] if n > 1 else []),
                ]
                contexts = {
                    name: lb.Context(
                        model,
                        n_ctx=n_ctx,
                        n_seq_max=n,
                        n_threads=settings.threads,
                        n_threads_batch=settings.threads,
                        kv_unified=unified,
                    )
                    for name, unified in options
                }
                makers: dict[str, Maker] = {
                    name: _engine(ctx, n, length) for name, ctx in contexts.items()
                }
                makers[IN_TURN] = _engine(contexts[UNIFIED], n, length, parallel=1)
                kv_type = contexts[UNIFIED].kv_type
                if tools is not None:
                    makers[BATCHED] = _batched(tools, settings, n, length)
                    makers[BATCHED_UNIFIED] = _batched(tools, settings, n, length, unified=True)
                    makers[BATCHED_KV] = _batched(tools, settings, n, length, kv_type=kv_type)
                series = interleave(makers, n_runs=settings.runs, n_items=1)
                ours = max(
                    (UNIFIED, OWN), key=lambda k: series[k].rate.median if k in series else 0
                )
                others = [k for k in series if k not in (UNIFIED, OWN, BATCHED_KV)]
                best = max(others, key=lambda k: series[k].rate.median)
                ratio = series[ours].ratio(series[best])
                results[f"{n} x {length}"] = {
                    "compared": {k: series_json(s, series[IN_TURN]) for k, s in series.items()},
                    "best_engine": ours,
                    "best_other": best,
                    "ratio": ratio.as_dict(),
                }
                names = (UNIFIED, OWN, IN_TURN, BATCHED, BATCHED_UNIFIED, BATCHED_KV)
                rates = [pm(series[k].rate, 0) if k in series else "-" for k in names]
                rows.append((f"{n} x {length}", *rates, pm(ratio)))
                for ctx in contexts.values():
                    ctx.close()
        columns = (
            "streams x tokens", UNIFIED, OWN, IN_TURN, BATCHED, BATCHED_UNIFIED, BATCHED_KV,
            "better Engine over the best other",
        )  # fmt: skip
        caption = f"Tokens a second, {title(model)}, {settings.threads} threads, T = 0"
        table(caption, columns, rows)
        emit("layouts", settings, {"target": model}, results)


def _engine(ctx: lb.Context, n: int, length: int, parallel: int | None = None) -> Maker:
    endless = dict.fromkeys(ctx.model.eog_tokens, -1e9)
    sampling = lb.SamplingParams(temperature=0.0, logit_bias=endless, logprobs=False)
    engine = lb.Engine(ctx, sampling=sampling, max_tokens=length, parallel=parallel)
    requests = [lb.Request([2 + i, *range(30, 29 + _PROMPT)], id=str(i)) for i in range(n)]

    def work(item: int) -> Timing:
        start = perf_counter()
        results = engine.generate(requests)
        return Timing(sum(len(result.tokens) for result in results), perf_counter() - start)

    return lambda run: work


def _batched(
    tools: LlamaTools,
    settings: Settings,
    n: int,
    length: int,
    *,
    unified: bool = False,
    kv_type: str = "f16",
) -> Maker:
    path = lb.hub.resolve(settings.target)

    def work(item: int) -> Timing:
        return tools.batched(
            path,
            [n],
            n_prompt=_PROMPT,
            n=length,
            unified=unified,
            kv_type=kv_type,
            with_prompts=True,
        )[n]

    return lambda run: work


if __name__ == "__main__":
    main()
