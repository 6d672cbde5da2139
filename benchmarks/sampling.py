"""The time of sampling with a vocabulary of 128k tokens: from the logits to the token.

    python -m benchmarks.sampling

The model has random weights and one narrow layer, so that decoding takes little time.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
import numpy.typing as npt

import llamabranch as lb
from llamabranch.bench.timing import Spread
from llamabranch.context.logits import LogitsRow

from .clocks import median_time
from .report import Settings, emit, number, parser, table, title
from .step import step_cost
from .wide import cached_wide

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS: dict[str, dict[str, float]] = {
    "T = 0": {"temperature": 0.0},
    "top-k 40": {**OFF, "top_k": 40},
    "top-k 40, top-p 0.95, min-p 0.05 (the defaults)": {},
    "top-k 40 and a repeat penalty over 64 tokens": {**OFF, "top_k": 40, "repeat_penalty": 1.1},
    "top-p 0.95 of everything": {**OFF, "top_p": 0.95},
    "min-p 0.05 of everything": {**OFF, "min_p": 0.05},
    "temperature 0.8 only": {**OFF, "temperature": 0.8},
    "T = 0 and a repeat penalty over 64 tokens": {"temperature": 0.0, "repeat_penalty": 1.1},
}


def main() -> None:
    """Measure every setting."""
    described = parser("sampling with a large vocabulary", runs=1, prompts=1, tokens=200)
    described.add_argument("--vocabulary", type=int, help="tokens; default: 128256")
    args = described.parse_args()
    settings = Settings.of(args)
    n_vocab = args.vocabulary or (20_000 if settings.quick else 128_256)
    path = cached_wide(settings.cache, n_vocab)
    with settings.context(str(path)) as ctx:
        logits = _rows(ctx, 16)
        rows: list[tuple[str, ...]] = []
        results: dict[str, object] = {}
        for name, changes in SETTINGS.items():
            params = lb.SamplingParams(seed=1).replace(**changes)  # type: ignore[arg-type]
            drawing = _drawing(ctx.model, params, logits, settings.tokens)
            with lb.Branch.start(ctx, [2, 3, 4], sampling=params) as branch:
                step = step_cost(branch, settings.tokens)
            rows.append(
                (
                    name,
                    number(1e3 * drawing.median, 3),
                    number(1e3 * drawing.high, 3),
                    number(1e3 * step.produce.median, 3),
                    number(1e3 * step.decode.median, 3),
                )
            )
            results[name] = {"sampling_s": drawing.as_dict(), "step": step.as_dict()}
        measuring = median_time(lambda: LogitsRow(logits[0]).entropy(), settings.tokens)
        figures = [number(1e3 * seconds, 3) for seconds in (measuring.median, measuring.high)]
        rows.append(("log-probability and entropy", *figures, "-", "-"))
        results["measuring"] = {"sampling_s": measuring.as_dict()}
        columns = (
            "settings", "sampling, ms", "slowest, ms", "produce, ms", "llama_decode, ms",
        )  # fmt: skip
        caption = (
            f"Sampling from {n_vocab:,} tokens, {title(ctx.model)}, random weights: medians of "
            f"{settings.tokens} tokens; produce is sampling, log-probability, entropy and text"
        )
        table(caption, columns, rows)
        emit("sampling", settings, {"target": ctx.model}, results, n_vocab=n_vocab)


def _rows(ctx: lb.Context, n: int) -> list[npt.NDArray[np.float32]]:
    """Return some of the model's own rows of logits."""
    ctx.decode(list(range(2, 2 + n)), 0, logits="all")
    rows = [ctx.logits(i) for i in range(n)]
    ctx.kv_cache_clear()
    return rows


def _drawing(
    model: lb.Model,
    params: lb.SamplingParams,
    logits: list[npt.NDArray[np.float32]],
    n: int,
) -> Spread:
    """Time the sampler alone: from a row of logits to the accepted token."""
    sampler = lb.sampling.Sampler(model, params)
    seconds = []
    for i in range(n + 3):
        row = logits[i % len(logits)]
        start = perf_counter()
        token = sampler.distribution(row, i, 1).draw(1, i)
        sampler.accept(token)
        if i >= 3:
            seconds.append(perf_counter() - start)
    return Spread.of(seconds)


if __name__ == "__main__":
    main()
