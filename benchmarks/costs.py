"""What a decode costs, and how much of a token's time is llama.cpp's and how much is ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType

import llamabranch as lb

from .timing import Spread

__all__ = ["DecodeClock", "StepCost", "step_cost", "verify_costs"]


class DecodeClock:
    """Adds up the seconds a context spends inside ``llama_decode``, while it is entered.

    On the CPU that is all of llama.cpp's part: the call returns when the logits are there.
    """

    def __init__(self, ctx: lb.Context) -> None:
        self._handle = ctx.decoder.handle
        self.seconds = 0.0
        self.n_decodes = 0

    def __enter__(self) -> DecodeClock:
        inner: Callable[[int], int] = self._handle.decode

        def decode(n: int) -> int:
            start = perf_counter()
            code = inner(n)
            self.seconds += perf_counter() - start
            self.n_decodes += 1
            return code

        vars(self._handle)["decode"] = decode  # shadows the method
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del vars(self._handle)["decode"]


@dataclass(frozen=True)
class StepCost:
    """Seconds of a plain step, taken apart: medians over the steps of a branch."""

    decode: Spread  # inside llama_decode
    produce: Spread  # from the logits to the token and its text
    commit: Spread  # taking it, without the decode

    @property
    def ours(self) -> float:
        """Seconds that are not llama.cpp's."""
        return self.produce.median + self.commit.median

    @property
    def share(self) -> float:
        """Our part of the whole."""
        return self.ours / (self.ours + self.decode.median)

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "decode_s": self.decode.as_dict(),
            "produce_s": self.produce.as_dict(),
            "commit_s": self.commit.as_dict(),
            "share": self.share,
        }


def step_cost(branch: lb.Branch, n: int, warm_up: int = 4) -> StepCost:
    """Time ``n`` steps of ``branch`` after some untimed ones; end tokens are taken like others."""
    decodes, produces, commits = [], [], []
    with DecodeClock(branch.ctx) as clock:
        for i in range(warm_up + n):
            inside = clock.seconds
            start = perf_counter()
            token = branch.produce().token
            produced = perf_counter()
            branch.commit(token)
            end = perf_counter()
            inside = clock.seconds - inside
            if i >= warm_up:
                decodes.append(inside)
                produces.append(produced - start)
                commits.append(end - produced - inside)
    return StepCost(Spread.of(decodes), Spread.of(produces), Spread.of(commits))


def verify_costs(
    ctx: lb.Context, sizes: Sequence[int], *, n_prefix: int, repeats: int
) -> dict[int, float]:
    """Return t(n): median seconds of one decode of n tokens of one sequence, all rows of logits.

    The sizes take turns, so that a machine that changes speed changes it for all. Only the time inside
    ``llama_decode`` counts. v(n) is t(n) / t(1).
    """
    token = ctx.model.eos or 0
    ctx.decode([token] * n_prefix, 0)
    times: dict[int, list[float]] = {n: [] for n in sizes}
    try:
        with DecodeClock(ctx) as clock:
            for turn in range(repeats + 2):
                for n in sizes:
                    # llama.cpp builds a graph when the shape changes: the second decode is the usual one.
                    for _ in range(2):
                        before = clock.seconds
                        ctx.decode([token] * n, n_prefix, logits="all")
                        seconds = clock.seconds - before
                        ctx.kv_cache_remove(0, n_prefix)
                    if turn >= 2:
                        times[n].append(seconds)
    finally:
        ctx.kv_cache_clear()
    return {n: Spread.of(seconds).median for n, seconds in times.items()}
