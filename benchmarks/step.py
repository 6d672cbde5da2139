"""What one plain step costs besides ``llama_decode``, part by part, down to the floor.

    python -m benchmarks.step [--target T]

The same text is decoded in loops that do more and more of a step: from ``llama_decode`` alone, the floor,
to ``Branch.generate``. The loops take turns, and each part is the difference of two of them within a run.
The parts are also timed alone, called again and again on the same row, where everything is in the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import llamabranch as lb
from llamabranch.bench import Sample, Series, Spread, interleave, median_time
from llamabranch.context.logits import LogitsRow
from llamabranch.sampling import Sampler
from llamabranch.sampling.noise import DRAW

from .prompts import PROMPTS
from .report import Settings, emit, number, parser, percent, pm, series_json, table, title

DECODE = "llama_decode"
DRAWN = "+ the draw, in the same call"
MEASURED = "+ log-sum-exp and entropy, in the same call"
STEP = "+ Branch.step: the text, the checks, the books"
GENERATE = "+ Branch.generate: limits, stop strings, the iterator"
RUNGS = (DECODE, DRAWN, MEASURED, STEP, GENERATE)

Loop = Callable[[lb.Branch, int], int]  # decodes that many tokens, returns how many it did


def main() -> None:
    """Measure the target and the draft."""
    described = parser("one step, part by part", runs=9, prompts=5, tokens=150, temperatures=(0.8,))
    settings = Settings.of(described.parse_args())
    results: dict[str, object] = {}
    with settings.context(settings.target) as target, settings.context(settings.draft) as draft:
        for role, ctx in (("target", target), ("draft", draft)):
            results[role] = {f"T = {t:g}": measure(ctx, t, settings) for t in settings.temperatures}
        models = {"target": target.model, "draft": draft.model}
        emit("step", settings, models, results)


def measure(ctx: lb.Context, temperature: float, settings: Settings) -> dict[str, object]:
    """Print the ladder and the parts alone; return both for JSON."""
    params = lb.SamplingParams(temperature=temperature, seed=1)
    prompts = PROMPTS[: settings.prompts]

    def work(loop: Loop) -> Callable[[int], Callable[[int], Sample]]:
        def timed(item: int) -> Sample:
            with lb.Branch.start(ctx, prompts[item], sampling=params) as branch:
                branch.produce()
                begin = perf_counter()
                n = loop(branch, settings.tokens)
                return Sample(n, perf_counter() - begin)

        return lambda run: timed

    loops: dict[str, Loop] = {
        DECODE: _decode,
        DRAWN: lambda branch, n: _fused(branch, n, measured=False),
        MEASURED: lambda branch, n: _fused(branch, n, measured=True),
        STEP: _steps,
        GENERATE: lambda branch, n: sum(1 for _ in branch.generate(n)),
    }
    series = interleave(
        {name: work(loop) for name, loop in loops.items()},
        n_runs=settings.runs,
        n_items=len(prompts),
    )
    rows = []
    for i, name in enumerate(RUNGS):
        added = _difference(series[RUNGS[i - 1]], series[name]) if i else Spread.of([])
        rows.append(
            (
                name,
                number(1e6 * _seconds(series[name]).median, 1),
                pm(added, 1),
                percent(series[DECODE].rate.median and series[name].ratio(series[DECODE]).median),
            )
        )
    caption = (
        f"A step of {title(ctx.model)}, T = {temperature:g}: {settings.threads} threads, "
        f"{len(prompts)} prompts x {settings.tokens} tokens, medians of {settings.runs} runs"
    )
    table(caption, ("what is done", "µs a token", "more than before", "speed"), rows)
    alone = parts_alone(ctx, params)
    table(
        "The parts alone, on one row again and again",
        ("part", "µs"),
        [(name, number(1e6 * spread.median, 1)) for name, spread in alone.items()],
    )
    return {
        "ladder": {name: series_json(series[name], series[DECODE]) for name in RUNGS},
        "alone_s": {name: spread.as_dict() for name, spread in alone.items()},
    }


# -- the loops -------------------------------------------------------------------------------------


def _decode(branch: lb.Branch, n: int) -> int:
    """Call ``llama_decode`` and nothing else, always with the same token."""
    handle, seq_id, token = branch.ctx.decoder.handle, branch.seq_id, branch.tokens[-1]
    start = branch.position
    for position in range(start, start + n):
        handle.tokens[0], handle.positions[0] = token, position
        handle.seqs[0], handle.wants_logits[0] = seq_id, 1
        if handle.decode(1):
            raise SystemExit("llama_decode failed")
    handle.remove(seq_id, start, -1)  # the branch's books know nothing of them
    return n


def _fused(branch: lb.Branch, n: int, *, measured: bool) -> int:
    """Decode and draw in the compiled core, and nothing else."""
    handle, seq_id, token = branch.ctx.decoder.handle, branch.seq_id, branch.produce().token
    sampler = _compiled(branch.sequence.sampler)
    start = branch.position
    for position in range(start, start + n):
        if handle.step(token, position, seq_id, sampler, branch.seed, DRAW, measured):
            raise SystemExit("llama_decode failed")
        token = max(0, sampler.choice.token)  # -1: Python would have decided; the time is the same
    handle.remove(seq_id, start, -1)
    return n


def _steps(branch: lb.Branch, n: int) -> int:
    for done in range(n):
        if branch.step().is_stop:
            return done
    return n


def _compiled(sampler: Sampler) -> Any:
    if sampler.row_sampler is None:
        raise SystemExit("this needs the compiled core, and settings that it knows")
    return sampler.row_sampler


# -- figures ---------------------------------------------------------------------------------------


def _seconds(series: Series) -> Spread:
    """Return the seconds a token of each run."""
    return Spread.of([1.0 / rate for rate in series.rates])


def _difference(before: Series, after: Series) -> Spread:
    """Return how many microseconds a token more ``after`` takes, within each run."""
    return Spread.of(
        [1e6 * (1.0 / a - 1.0 / b) for a, b in zip(after.rates, before.rates, strict=True)]
    )


def parts_alone(ctx: lb.Context, params: lb.SamplingParams) -> dict[str, Spread]:
    """Time the parts of a step on one row, in the compiled core and in NumPy."""
    with lb.Branch.start(ctx, PROMPTS[0], sampling=params) as branch:
        logits, token = branch.logits, branch.produce().token
        position, model = branch.position, ctx.model
    sampler = Sampler(model, params)
    compiled, address = _compiled(sampler), LogitsRow(logits).address
    distribution = sampler.distribution(logits, position, 1)
    return {
        "compiled: log-sum-exp and entropy": median_time(
            lambda: LogitsRow(logits, address).entropy(), 400
        ),
        "compiled: candidates and draw": median_time(
            lambda: compiled.sample(address, 1, position, DRAW, False), 400
        ),
        "NumPy: the draw from given candidates": median_time(
            lambda: distribution.draw(1, position), 400
        ),
        "the text of the token": median_time(lambda: model.text_after(token, b""), 400),
    }


if __name__ == "__main__":
    main()
