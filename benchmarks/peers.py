"""Comparison with llama.cpp's speculative programs and with ``Llama``, on the same pair.

    python -m benchmarks.peers [--target T --draft D]

All use the same prompts, number of tokens, draft length, temperature, sampling settings and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import llamabranch as lb
from llamabranch.bench.pair import seed_of, speculative
from llamabranch.bench.timing import Maker, Series, Timing

from . import llama_tools
from .clocks import interleave
from .llama_python import LlamaPython
from .llama_tools import LlamaTools
from .prompts import PROMPTS
from .report import Settings, emit, number, parser, percent, pm, series_json, table, title

SIMPLE, LOOKUP = "llama-speculative-simple", "llama-lookup"
BENCH = "llama-bench (no sampling)"
COMPLETION, COMPLETION_LOOKUP = "Llama.create_completion", "Llama.create_completion, lookup"
PLAIN, MODEL, MODEL_BLOCK, MODEL_AUTO = (
    "ours, plain",
    "ours, draft model",
    "ours, draft model, block rule",
    "ours, draft model, auto length",
)
COPY, COPY_AUTO = "ours, lookup", "ours, lookup, auto length"
# Pairs whose ratio is shown.
COMPARED = (
    (MODEL, SIMPLE),
    (MODEL_BLOCK, SIMPLE),
    (MODEL_AUTO, SIMPLE),
    (COPY, LOOKUP),
    (COPY_AUTO, LOOKUP),
    (PLAIN, BENCH),
    (PLAIN, COMPLETION),
    (COPY, COMPLETION_LOOKUP),
    (COPY_AUTO, COMPLETION_LOOKUP),
)


def main() -> None:
    """Measure one pair."""
    described = parser("peers", runs=5, prompts=10, tokens=200, temperatures=(0.0, 0.8))
    described.add_argument(
        "--k", type=int, default=4, help="tokens that every program drafts per round"
    )
    described.add_argument(
        "--llama-lookup-tokens", type=int, default=2,
        help="tokens that Llama's lookup proposes; default: 2, which its documentation advises for CPUs",
    )  # fmt: skip
    args = described.parse_args()
    settings = Settings.of(args)
    tools = None
    if settings.peers:
        tools = LlamaTools(
            settings.peers_bin or llama_tools.build(settings.cache),
            threads=settings.threads,
            n_ctx=settings.n_ctx,
        )
    with settings.context(settings.target) as target, settings.context(settings.draft) as draft:
        options = {"n_ctx": settings.n_ctx, "threads": settings.threads}
        llamas = {
            COMPLETION: LlamaPython(target.model.path, **options),
            COMPLETION_LOOKUP: LlamaPython(
                target.model.path, lookup=args.llama_lookup_tokens, **options
            ),
        }
        try:
            results = {
                f"{temperature:g}": _measure(
                    target, draft, settings, temperature, args.k, tools, llamas
                )
                for temperature in settings.temperatures
            }
        finally:
            for llama in llamas.values():
                llama.close()
        commit = tools.build_commit if tools else None
        models = {"target": target.model, "draft": draft.model}
        emit("peers", settings, models, results, k=args.k, llama_cpp_commit=commit)


def _measure(
    target: lb.Context,
    draft: lb.Context,
    settings: Settings,
    temperature: float,
    k: int,
    tools: LlamaTools | None,
    llamas: Mapping[str, LlamaPython],
) -> dict[str, object]:
    texts = PROMPTS[: settings.prompts]
    n = settings.tokens
    makers = _ours(target, draft, texts, n, temperature, k)
    if tools is not None:
        makers |= _programs(target, draft, texts, n, temperature, k, tools)
    prompts = [target.tokenize(text) for text in texts]
    for name, llama in llamas.items():
        makers[name] = _completion(llama, prompts, n, temperature)
    compared = interleave(makers, n_runs=settings.runs, n_items=len(texts))
    where = (
        f"T = {temperature:g}. {title(target.model, draft.model)}: {settings.threads} threads, "
        f"{len(texts)} prompts x {n} tokens, {k} drafted, medians of {settings.runs} runs "
        f"(lowest to highest)"
    )
    _show(where, compared)
    ratios = _show_ratios(where, compared)
    base = compared[PLAIN]
    return {
        "compared": {name: series_json(series, base) for name, series in compared.items()},
        "ratios": ratios,
    }


def _ours(
    target: lb.Context,
    draft: lb.Context,
    texts: tuple[str, ...],
    n: int,
    temperature: float,
    k: int,
) -> dict[str, Maker]:
    prompts = [target.tokenize(text) for text in texts]
    sampling = lb.SamplingParams(temperature=temperature)

    def cell(drafter: Callable[[], lb.Drafter], k: int | str, rule: str = "seeded") -> Maker:
        config = lb.SpeculativeConfig(draft_k=k, rule=rule)
        return speculative(target, prompts, n, sampling, drafter, config)

    makers = {
        PLAIN: speculative(target, prompts, n, sampling),
        MODEL: cell(lambda: lb.ModelDrafter(draft), k),
        MODEL_AUTO: cell(lambda: lb.ModelDrafter(draft), "auto"),
        COPY: cell(lb.speculative.PromptLookupDrafter, k),
        COPY_AUTO: cell(lb.speculative.PromptLookupDrafter, "auto"),
    }
    if temperature > 0:
        makers[MODEL_BLOCK] = cell(lambda: lb.ModelDrafter(draft), k, "block")
    return makers


def _programs(
    target: lb.Context,
    draft: lb.Context,
    texts: tuple[str, ...],
    n: int,
    temperature: float,
    k: int,
    tools: LlamaTools,
) -> dict[str, Maker]:
    model, small = target.model.path, draft.model.path
    return {
        BENCH: _each(lambda run, item: tools.bench(model, n)),
        SIMPLE: _each(
            lambda run, item: tools.speculative(
                model, small, texts[item], n, k=k, temperature=temperature, seed=seed_of(run, item)
            )
        ),
        LOOKUP: _each(
            lambda run, item: tools.lookup(
                model, texts[item], n, k=k, temperature=temperature, seed=seed_of(run, item)
            )
        ),
    }


def _each(work: Callable[[int, int], Timing]) -> Maker:
    return lambda run: lambda item: work(run, item)


def _completion(
    llama: LlamaPython, prompts: Sequence[Sequence[int]], n: int, temperature: float
) -> Maker:
    return _each(
        lambda run, item: llama.complete(prompts[item], n, temperature, seed_of(run, item))
    )


def _show(where: str, compared: Mapping[str, Series]) -> None:
    base = compared[PLAIN]
    rows = []
    for name, series in compared.items():
        stats = series.stats
        rows.append(
            (
                name,
                pm(series.rate, 0),
                "1" if name == PLAIN else pm(series.ratio(base)),
                percent(stats.draft_acceptance_rate),
                number(stats.mean_acceptance_length if stats.num_draft_tokens else float("nan")),
            )
        )
    columns = ("", "tokens/s", "x our plain", "accepted / drafted", "tokens a round")
    table(f"Peers, {where}", columns, rows)


def _show_ratios(where: str, compared: Mapping[str, Series]) -> dict[str, object]:
    ratios = {
        f"{ours} / {theirs}": compared[ours].ratio(compared[theirs])
        for ours, theirs in COMPARED
        if ours in compared and theirs in compared
    }
    table(f"Ours over theirs, {where}", ("", "ratio"), [(n, pm(r)) for n, r in ratios.items()])
    return {name: ratio.as_dict() for name, ratio in ratios.items()}


if __name__ == "__main__":
    main()
