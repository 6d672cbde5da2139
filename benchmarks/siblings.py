"""Suffix drafts for texts that are sampled together: no drafts, from each text alone, from all texts.

    python -m benchmarks.siblings --target smollm2-135m:Q8_0 --threads 1

The texts are the same in each case. "together" = all at a time. "in fours" = four at a time, so that
later texts can copy from earlier ones. Plain texts that are equal so far are decoded once.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import llamabranch as lb
from llamabranch import search
from llamabranch.bench.timing import Maker, Timing, Work

from .clocks import interleave
from .prompts import TASKS
from .report import Settings, emit, parser, pm, series_json, table, title

DRAFTERS: dict[str, Callable[[], lb.Drafter | None]] = {
    "plain": lambda: None,
    "own": lambda: lb.SuffixDrafter(shared_tokens=0),
    "shared": lambda: lb.SuffixDrafter(),
}
WIDTHS = {"together": None, "in fours": 4}
STOP = {"edit": ("\n\n", "\n```")}


def main() -> None:
    """Measure every number of texts."""
    described = parser("siblings", runs=3, prompts=1, tokens=64, temperatures=(0.0, 0.7))
    described.add_argument("--only", nargs="+", choices=TASKS, default=["edit", "extract", "free"])
    described.add_argument("--counts", type=int, nargs="+", default=[1, 4, 8, 16])
    args = described.parse_args()
    settings = Settings.of(args)
    counts = [2] if settings.quick else args.counts
    results: dict[str, object] = {}
    with settings.context(settings.target, n_ctx=8192, n_seq_max=max(counts) + 1) as ctx:
        for task in args.only:
            for temperature in settings.temperatures:
                rows = []
                for n in counts:
                    for order, width in WIDTHS.items():
                        if width is not None and width >= n:
                            continue
                        makers = {
                            name: _maker(ctx, task, temperature, n, width, settings.tokens, make)
                            for name, make in DRAFTERS.items()
                        }
                        compared = interleave(makers, n_runs=settings.runs, n_items=1)
                        plain = compared["plain"]
                        rows.append(
                            (
                                str(n), order, pm(plain.rate, 1), pm(compared["own"].ratio(plain)),
                                pm(compared["shared"].ratio(plain)),
                            )
                        )  # fmt: skip
                        results[f"{task}, T = {temperature:g}, {n} {order}"] = {
                            name: series_json(series, plain) for name, series in compared.items()
                        }
                table(
                    f"{task}, T = {temperature:g}. {title(ctx.model)}: {settings.threads} threads, at "
                    f"most {settings.tokens} tokens, medians of {settings.runs} runs",
                    ("texts", "", "plain, tokens/s", "own index, x plain", "shared, x plain"),
                    rows,
                )
        emit("siblings", settings, {"target": ctx.model}, results)


def _maker(
    ctx: lb.Context,
    task: str,
    temperature: float,
    n: int,
    width: int | None,
    n_tokens: int,
    drafter: Callable[[], lb.Drafter | None],
) -> Maker:
    def make(run: int) -> Work:
        def work(item: int) -> Timing:
            with lb.Branch.start(ctx, TASKS[task], temperature=temperature, seed=1 + run) as root:
                start = perf_counter()
                result = search.vote(
                    root, len, n, n_tokens, width=width, drafter=drafter(), stop=STOP.get(task, ())
                )
                seconds = perf_counter() - start
            tokens = tuple(token for text in result.hypotheses for token in text.tokens)
            return Timing(len(tokens), seconds, tuple(sorted(tokens)))

        return work

    return make


if __name__ == "__main__":
    main()
