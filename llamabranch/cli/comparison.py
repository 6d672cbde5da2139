"""``--compare``: the same requests with drafts and plainly, in turn, and what that tells."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from llamabranch import Engine, Request, Result, SpeculativeStats
from llamabranch.bench import Interval, Maker, Sample, Series, Stopped, Work, interleave

from .formats import interval_text
from .interrupts import InterruptHandler

MOST_PAIRS = 9  # the fewest with which one outlier on either side does not widen the 95 % interval


@dataclass(frozen=True)
class Runs:
    """The runs of one way to generate the same texts, and the texts of the first of them."""

    series: Series
    results: Sequence[Result]

    @property
    def rate(self) -> float:
        """Tokens a second: the median of the runs; nan without a token."""
        return self.series.rate.median

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each text."""
        return [list(result.tokens) for result in self.results]

    @property
    def stats(self) -> SpeculativeStats:
        """The statistics of all texts together."""
        total = SpeculativeStats()
        for result in self.results:
            total.add(result.stats)
        return total


@dataclass(frozen=True)
class Comparison:
    """Drafted against plain decoding of the same requests with the same seed."""

    drafted: Runs
    plain: Runs

    @property
    def speedup(self) -> float:
        """The drafted median divided by the plain one, nan without a token."""
        return self.drafted.rate / self.plain.rate

    @property
    def interval(self) -> Interval:
        """The speedup by pairs of runs, one right after the other."""
        return self.drafted.series.interval(self.plain.series)

    @property
    def verdict(self) -> str:
        """ "faster", "slower" or "inconclusive"; "nothing drafted" where both were plain decoding."""
        if self.drafted.stats.num_draft_tokens == 0:
            return "nothing drafted"
        return self.interval.verdict

    @property
    def same_text(self) -> bool:
        """Whether both gave the same tokens."""
        return self.drafted.tokens == self.plain.tokens

    @property
    def divergence(self) -> dict[str, Any] | None:
        """Where the first two texts that differ part: ``position`` and ``tokens``, plain and drafted.

        A token is None where that text had ended.
        """
        for pair in zip(self.plain.tokens, self.drafted.tokens, strict=True):
            for position, tokens in enumerate(zip_longest(*pair)):
                if tokens[0] != tokens[1]:
                    return {"position": position, "tokens": tokens}
        return None

    def explain(self) -> str:
        """Return what the verdict means, and where there is none what to do about it."""
        interval, verdict = self.interval, self.verdict
        if verdict == "nothing drafted":
            return (
                "Inconclusive: nothing was drafted, so both are plain decoding and differ by noise."
            )
        if verdict != "inconclusive":
            return "Drafting is slower than plain decoding here." * (verdict == "slower")
        told = f"the 95 % interval of {interval.n} pairs of runs is {interval_text(interval)}"
        if math.isnan(interval.low):
            told = f"fewer than 6 pairs of runs ({interval.n}) have no interval: generate less (-n)"
        return (
            f"Inconclusive: {told}. Stop other programs on the machine, or measure several prompts with "
            "`llamabranch bench`."
        )


def compare(
    drafting: Engine,
    plain: Engine,
    requests: Sequence[Request],
    interrupts: InterruptHandler,
    *,
    budget_s: float = 60.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison | None:
    """Time drafted against plain decoding; both have been warmed up. None if interrupted.

    There are 9 pairs of runs at most; none begins after ``budget_s`` seconds.
    """
    results: dict[Engine, Sequence[Result]] = {}

    def maker(engine: Engine) -> Maker:
        def work(_: int) -> Sample:
            if interrupts.requested:
                raise Stopped
            before = engine.stats.elapsed_s
            found = engine.generate(requests)
            results.setdefault(engine, found)
            n_tokens = sum(len(result.tokens) for result in found)
            return Sample(n_tokens, engine.stats.elapsed_s - before)

        def make(_: int) -> Work:
            return work

        return make

    found = interleave(
        {"drafted": maker(drafting), "plain": maker(plain)},
        n_runs=MOST_PAIRS, n_items=1, budget_s=budget_s, warm_up=False,
        progress=lambda text: progress(text and f"comparing: {text.partition(',')[0]}"),
    )  # fmt: skip
    if interrupts.requested or not found["plain"].runs:
        return None
    return Comparison(
        Runs(found["drafted"], results[drafting]), Runs(found["plain"], results[plain])
    )
