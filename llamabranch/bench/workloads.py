"""One timed generation, plain or speculative; the prompt's prefill is never timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from ..branch import Branch
from ..context import Context
from ..sampling import SamplingParams
from ..speculative import Drafter, SpeculativeConfig, Speculator
from .timing import Maker, Sample, Stopped, Work

__all__ = ["plain", "seed_of", "speculative"]

Prompts = Sequence[Sequence[int]]  # token ids


def seed_of(run: int, item: int) -> int:
    """Return the seed of a prompt in a run: the same for all rivals, another in each run."""
    return 1 + 1000 * (run + 1) + item


def never() -> bool:
    """Do not stop."""
    return False


def plain(
    ctx: Context,
    prompts: Prompts,
    n: int,
    sampling: SamplingParams,
    *,
    stop: Callable[[], bool] = never,
) -> Maker:
    """Return plain decoding: one branch, token by token, with text. ``sampling`` gets other seeds."""

    def make(run: int) -> Work:
        def work(item: int) -> Sample:
            said = []
            seeded = sampling.replace(seed=seed_of(run, item))
            with Branch.start(ctx, prompts[item], sampling=seeded) as branch:
                start = perf_counter()
                for produced in branch.generate(n):
                    said.append(produced.token)
                    if stop():
                        raise Stopped
                seconds = perf_counter() - start
            return Sample(len(said), seconds, tuple(said))

        return work

    return make


def speculative(
    ctx: Context,
    prompts: Prompts,
    n: int,
    sampling: SamplingParams,
    drafter: Callable[[], Drafter | None],
    config: SpeculativeConfig,
    *,
    cold: bool = False,
    stop: Callable[[], bool] = never,
) -> Maker:
    """Return decoding with a drafter, new in every run (``cold``: for every prompt).

    New, because a drafter that copies would else find the very text of the run before, and the draft
    length would have been learned in untimed runs. The draft model's reading of the prompt is timed.
    """

    def make(run: int) -> Work:
        speculator = Speculator(ctx, drafter(), config)

        def work(item: int) -> Sample:
            nonlocal speculator
            if cold:
                speculator = Speculator(ctx, drafter(), config)
            seeded = sampling.replace(seed=seed_of(run, item))
            generation = speculator.generate(prompts[item], max_tokens=n, sampling=seeded)
            start = perf_counter()
            try:
                for _ in generation:
                    if stop():
                        raise Stopped
            finally:
                generation.close()
            seconds = perf_counter() - start
            said = tuple(generation.tokens)
            return Sample(len(said), seconds, said, generation.stats)

        return work

    return make
