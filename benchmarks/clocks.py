"""Clocks: for calls of methods, for repeated work, for decodes, and for methods that take turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from llamabranch.bench import timing
from llamabranch.bench.timing import Maker, Series, Spread
from llamabranch.context import Context
from llamabranch.context.runner import DecodeHook

__all__ = [
    "CallClock", "DecodeClock", "interleave", "median_time", "verify_costs", "verify_times",
]  # fmt: skip


class CallClock:
    """Adds up the seconds inside some methods of one object, from ``__enter__`` to ``__exit__``."""

    def __init__(self, owner: object, *names: str) -> None:
        self._owner = owner
        self._names = names
        self.seconds = 0.0
        self.n_calls = 0

    def __enter__(self) -> CallClock:
        for name in self._names:
            vars(self._owner)[name] = self._timed(getattr(self._owner, name))  # shadows the method
        return self

    def _timed(self, inner: Callable[..., object]) -> Callable[..., object]:
        def timed(*arguments: object) -> object:
            start = perf_counter()
            result = inner(*arguments)
            self.seconds += perf_counter() - start
            self.n_calls += 1
            return result

        return timed

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            del vars(self._owner)[name]


def median_time(work: Callable[[], object], n: int, warm_up: int = 3) -> Spread:
    """Return the seconds of ``work()``: ``n`` calls after ``warm_up`` untimed ones."""
    for _ in range(warm_up):
        work()
    seconds = []
    for _ in range(n):
        start = perf_counter()
        work()
        seconds.append(perf_counter() - start)
    return Spread.of(seconds)


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
) -> dict[int, list[float]]:
    """Return the seconds of decodes of n tokens of one sequence, with logits for all of them.

    The decoded tokens follow ``n_prefix`` other tokens, or fewer if there is no room. The sizes
    take turns, so a change of the machine's speed affects all sizes. Each size is decoded
    ``repeats`` times, and again until ``least_s`` seconds have passed. Only the time inside
    ``llama_decode`` counts.

    Raises:
        UnsupportedError: the memory cannot be truncated.
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
                turn += 1
    finally:
        ctx.kv_cache_clear()
    return {n: seconds[2:] for n, seconds in times.items()}


def verify_costs(
    ctx: Context, sizes: Sequence[int], *, n_prefix: int, repeats: int
) -> dict[int, float]:
    """Return t(n) in seconds: the median of `verify_times` for each n. v(n) = t(n) / t(1)."""
    times = verify_times(ctx, sizes, n_prefix=n_prefix, repeats=repeats)
    return {n: Spread.of(seconds).median for n, seconds in times.items()}


def interleave(makers: Mapping[str, Maker], *, n_runs: int, n_items: int) -> dict[str, Series]:
    """Time all methods in turns, after each has warmed up on item 0, untimed and with separate state."""
    for name, maker in makers.items():
        show_progress(f"warming up: {name}")
        maker(-1)(0)
    return timing.interleave(makers, n_runs=n_runs, n_items=n_items, progress=show_progress)


def show_progress(text: str) -> None:
    """Show progress on one line of standard error, if that is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
