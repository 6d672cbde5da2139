"""The timed work: a plain or speculative generation without its prompt, or a decode of n tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from time import perf_counter

from ..context import Context
from ..context.runner import DecodeHook
from ..sampling import SamplingParams
from ..speculative import Drafter, SpeculativeConfig, Speculator
from .timing import Maker, Stopped, Timing, Work

Prompts = Sequence[Sequence[int]]  # token ids
Stop = Callable[[], bool]  # called between tokens; True ends the measurement


def seed_of(run: int, item: int) -> int:
    """Return the seed of a prompt in a run: the same for all methods, different in each run."""
    return 1 + 1000 * (run + 1) + item


def speculative(
    ctx: Context,
    prompts: Prompts,
    n: int,
    sampling: SamplingParams,
    drafter: Callable[[], Drafter | None] = lambda: None,
    config: SpeculativeConfig | None = None,
    *,
    stop: Stop = lambda: False,
) -> Maker:
    """Return a method that decodes with a new drafter in every run, or plainly without a drafter.

    A drafter kept between runs would copy the text of the previous run. The draft length "auto"
    keeps in the context what it has learned, as it does in ordinary use. Each run sets its own
    seed. The time in which a draft model processes the prompt is included.
    """

    def make(run: int) -> Work:
        speculator = Speculator(ctx, drafter(), config)

        def work(item: int) -> Timing:
            seeded = sampling.replace(seed=seed_of(run, item))
            generation = speculator.generate(prompts[item], max_tokens=n, sampling=seeded)
            with closing(generation):
                start = perf_counter()
                for _ in generation:
                    if stop():
                        raise Stopped
                seconds = perf_counter() - start
            tokens = tuple(generation.tokens)
            return Timing(len(tokens), seconds, tokens, generation.stats)

        return work

    return make


# -- decodes -------------------------------------------------------------------------------------------


class DecodeClock:
    """Adds up the time of all decodes, logits included, from ``__enter__`` to ``__exit__``."""

    def __init__(self, ctx: Context) -> None:
        self._decoder = ctx.decoder
        self._before: DecodeHook | None = None
        self.seconds, self.n_calls = 0.0, 0

    def __enter__(self) -> DecodeClock:
        self._before = self._decoder.hook(self._timed)
        return self

    def _timed(self, decode: Callable[[int], int], n: int) -> int:
        start = perf_counter()
        code = decode(n) if self._before is None else self._before(decode, n)
        self.seconds += perf_counter() - start
        self.n_calls += 1
        return code

    def __exit__(self, *_: object) -> None:
        self._decoder.hook(self._before)


def verify_times(
    ctx: Context,
    sizes: Sequence[int],
    *,
    n_prefix: int = 128,
    repeats: int = 6,
    least_s: float = 0.0,
    stop: Stop = lambda: False,
) -> dict[int, list[float]]:
    """Return the seconds of decodes of n tokens of one sequence, with logits for all of them.

    The decoded tokens follow ``n_prefix`` other tokens, or fewer if there is no room. The sizes
    take turns, so a change of the machine's speed affects all sizes. Each size is decoded
    ``repeats`` times, and again until ``least_s`` seconds have passed. Only the time inside
    ``llama_decode`` counts.

    Raises:
        Stopped: ``stop()`` returned True. UnsupportedError: the memory cannot be truncated.
    """
    token = ctx.model.eos or 0
    n_prefix = max(1, min(n_prefix, ctx.n_ctx_seq - max(sizes) - 1))
    ctx.decode([token] * n_prefix, 0)
    times: dict[int, list[float]] = {n: [] for n in sizes}
    try:
        with DecodeClock(ctx) as clock:
            turn, start = 0, perf_counter()
            while turn < repeats + 2 or perf_counter() - start < least_s:
                for n in sizes:
                    # llama.cpp builds a new graph when the shape changes, so only the second decode
                    # is typical.
                    for _ in range(2):
                        before = clock.seconds
                        ctx.decode([token] * n, n_prefix, logits="all")
                        seconds = clock.seconds - before
                        ctx.kv_cache_remove(0, n_prefix)
                    times[n].append(seconds)
                    if stop():
                        raise Stopped
                turn += 1
    finally:
        ctx.kv_cache_clear()
    return {n: seconds[2:] for n, seconds in times.items()}
