"""One timed generation, plain or speculative; the prefill of the target is never timed."""

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
    """Return the seed of a prompt in a run: the same for all methods, different in each run."""
    return 1 + 1000 * (run + 1) + item


def never() -> bool:
    """Return False: never stop."""
    return False


def plain(
    ctx: Context,
    prompts: Prompts,
    n: int,
    sampling: SamplingParams,
    *,
    stop: Callable[[], bool] = never,
) -> Maker:
    """Return plain decoding: one branch, token by token, with text. Each run sets its own seed."""

    def make(run: int) -> Work:
        def work(item: int) -> Sample:
            generated = []
            seeded = sampling.replace(seed=seed_of(run, item))
            with Branch.start(ctx, prompts[item], sampling=seeded) as branch:
                start = perf_counter()
                for produced in branch.generate(n):
                    generated.append(produced.token)
                    if stop():
                        raise Stopped
                seconds = perf_counter() - start
            return Sample(len(generated), seconds, tuple(generated))

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
    """Return decoding with a drafter that is new in every run (``cold``: for every prompt).

    A drafter kept between runs would copy the text of the previous run, and the draft length would have
    been tuned in untimed runs. Evaluating the prompt with the draft model is timed.
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
            tokens = tuple(generation.tokens)
            return Sample(len(tokens), seconds, tokens, generation.stats)

        return work

    return make
