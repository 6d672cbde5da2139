"""One timed generation, plain or speculative; the prompt's prefill is never timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import llamabranch as lb

from .timing import Maker, Sample, Work

__all__ = ["plain", "seed_of", "speculative"]

Prompts = Sequence[Sequence[int]]  # token ids


def seed_of(run: int, item: int) -> int:
    """Return the seed of a prompt in a run: the same for all rivals, another in each run."""
    return 1 + 1000 * (run + 1) + item


def plain(ctx: lb.Context, prompts: Prompts, n: int, temperature: float) -> Maker:
    """Return plain decoding: one branch, token by token, with text."""

    def make(run: int) -> Work:
        def work(item: int) -> Sample:
            sampling = lb.SamplingParams(temperature=temperature, seed=seed_of(run, item))
            with lb.Branch.start(ctx, prompts[item], sampling=sampling) as branch:
                start = perf_counter()
                said = [produced.token for produced in branch.generate(n)]
                seconds = perf_counter() - start
            return Sample(len(said), seconds, tuple(said))

        return work

    return make


def speculative(
    ctx: lb.Context,
    prompts: Prompts,
    n: int,
    temperature: float,
    drafter: Callable[[], lb.Drafter | None],
    config: lb.SpeculativeConfig,
    *,
    cold: bool = False,
) -> Maker:
    """Return decoding with a drafter, new in every run (``cold``: for every prompt).

    New, because a drafter that copies would else find the very text of the run before, and the draft
    length would have been learned in untimed runs. The draft model's reading of the prompt is timed.
    """

    def make(run: int) -> Work:
        speculator = lb.Speculator(ctx, drafter(), config)

        def work(item: int) -> Sample:
            nonlocal speculator
            if cold:
                speculator = lb.Speculator(ctx, drafter(), config)
            sampling = lb.SamplingParams(temperature=temperature, seed=seed_of(run, item))
            generation = speculator.generate(prompts[item], max_tokens=n, sampling=sampling)
            start = perf_counter()
            generation.finish()
            seconds = perf_counter() - start
            said = tuple(generation.tokens)
            return Sample(len(said), seconds, said, generation.stats)

        return work

    return make
