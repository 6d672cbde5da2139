"""The cost of a constraint in Python that takes no time itself and refuses one token in five.

    python -m benchmarks.constraints --target smollm2-135m:Q8_0

The same prompts are continued freely and under the constraint, in turn: by one text with the default
settings, by one text with the whole vocabulary, and by eight particles. Ratios are taken within a run.
Each token takes one decode with or without the constraint, so only the time of drawing differs.
"""

from __future__ import annotations

import math
from time import perf_counter
from zlib import crc32

import llamabranch as lb
from llamabranch import search
from llamabranch.bench.timing import Maker, Timing, Work

from .clocks import interleave
from .prompts import PROMPTS
from .report import Settings, emit, number, parser, pm, series_json, table, title

TEMPERATURE, PARTICLES = 0.8, 8
WHOLE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class FourOfFive:
    """Refuses a fifth of all texts, by their hash."""

    def prefix(self, text: str) -> bool:
        """Return whether a valid text can begin like this."""
        return crc32(text.encode()) % 5 != 0

    def complete(self, text: str) -> bool:
        """Return True: every text that was allowed is valid."""
        return True


def main() -> None:
    """Measure all of them."""
    described = parser("constraints in Python", runs=9, prompts=2, tokens=96)
    args = described.parse_args()
    settings = Settings.of(args)
    with settings.context(settings.target, n_seq_max=PARTICLES + 2) as ctx:
        endless = dict.fromkeys(ctx.model.eog_tokens, -math.inf)
        sampling = lb.SamplingParams(temperature=TEMPERATURE, seed=1, logit_bias=endless)
        whole = sampling.replace(**WHOLE)  # type: ignore[arg-type]
        counts = {"calls": 0, "rejections": 0, "tokens": 0}
        results = {}
        for name, params, particles in (
            ("one text", sampling, 0),
            ("one text, whole vocabulary", whole, 0),
            (f"smc, {PARTICLES} particles", whole, PARTICLES),
        ):
            makers = {
                key: _maker(ctx, settings, params, particles, constraint, counts)
                for key, constraint in (("free", None), ("constraint", FourOfFive()))
            }
            results[name] = interleave(makers, n_runs=settings.runs, n_items=settings.prompts)
        table(
            f"A constraint that refuses one token in five, T = {TEMPERATURE:g}. {title(ctx.model)}: "
            f"{settings.threads} threads, {settings.tokens} tokens, medians of {settings.runs} runs",
            ("", "free, tokens/s", "constraint, tokens/s", "seconds over free"),
            [
                (
                    name, pm(series["free"].rate, 1), pm(series["constraint"].rate, 1),
                    pm(series["free"].ratio(series["constraint"])),
                )
                for name, series in results.items()
            ],
        )  # fmt: skip
        calls = counts["calls"] / max(1, counts["tokens"])
        refused = counts["rejections"] / max(1, counts["tokens"])
        print(f"\nOne text: {number(calls)} calls a token, {number(refused)} refused.")
        emit(
            "constraints", settings, {"target": ctx.model},
            {
                name: {key: series_json(series) for key, series in of_setting.items()}
                for name, of_setting in results.items()
            },
            counts=counts,
        )  # fmt: skip


def _maker(
    ctx: lb.Context,
    settings: Settings,
    sampling: lb.SamplingParams,
    particles: int,
    constraint: FourOfFive | None,
    counts: dict[str, int],
) -> Maker:
    def work(item: int) -> Timing:
        with lb.Branch.start(ctx, PROMPTS[item], sampling=sampling) as branch:
            start = perf_counter()
            if particles:
                search.smc(
                    branch, particles, settings.tokens, constraint=constraint, force_end=False
                )
                return Timing(particles * settings.tokens, perf_counter() - start)
            generation = branch.generate(settings.tokens, constraint=constraint).finish()
            seconds = perf_counter() - start
        if constraint is not None:
            counts["calls"] += generation.stats.constraint_calls
            counts["rejections"] += generation.stats.constraint_rejections
            counts["tokens"] += len(generation.tokens)
        return Timing(len(generation.tokens), seconds)

    def make(run: int) -> Work:
        return work

    return make


if __name__ == "__main__":
    main()
