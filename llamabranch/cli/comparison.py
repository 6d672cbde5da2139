"""``--compare``: the same requests with drafts and plainly, in turn, and what that tells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from llamabranch import DecodeInterruptedError, Engine, Request, Result, SpeculativeStats
from llamabranch.bench import Interval, Sample

from .formats import interval_text
from .interrupts import InterruptHandler

MOST_PAIRS = 12  # with 12 pairs, two outliers on either side do not widen the 95 % interval
# Where both are equally fast, all of the first seven pairs lie on one side of 1 with a probability of
# 2 / 2^7 = 1.6 %. With the interval of twelve pairs, which is wrong at most once in twenty, a verdict is
# wrong with a probability of 4.6 %.
_CLEAR_PAIRS = 7
# The 97.5 % quantile of Student's t distribution by the number of values: for fewer pairs.
_T_QUANTILES = {3: 4.303, 4: 3.182, 5: 2.776}


@dataclass
class Runs:
    """The runs of one way to generate the same texts: each as one sample; the texts of the first."""

    samples: list[Sample] = field(default_factory=list)
    results: Sequence[Result] = ()

    @property
    def rate(self) -> float:
        """Tokens a second: the median of the runs; nan without a token."""
        return statistics.median(sample.rate for sample in self.samples)

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


@dataclass
class Comparison:
    """Drafted against plain decoding of the same requests with the same seed."""

    drafted: Runs = field(default_factory=Runs)
    plain: Runs = field(default_factory=Runs)

    @property
    def speedup(self) -> float:
        """The drafted median divided by the plain one, nan without a token."""
        return self.drafted.rate / self.plain.rate

    @property
    def ratios(self) -> list[float]:
        """The speedup of each pair of runs, in their order."""
        pairs = zip(self.drafted.samples, self.plain.samples, strict=True)
        return [drafted.rate / plain.rate for drafted, plain in pairs]

    @property
    def interval(self) -> Interval:
        """The speedup by pairs of runs, one right after the other.

        The interval is one of order statistics from 6 pairs on. From 3 to 5 pairs it is that of Student's
        t distribution for the logarithms of the ratios, which takes their noise to be normal.
        """
        ratios = self.ratios
        found, quantile = Interval.of(ratios), _T_QUANTILES.get(len(ratios))
        if quantile is None or found.n != len(ratios):
            return found
        logs = [math.log(ratio) for ratio in ratios]
        half, middle = quantile * statistics.stdev(logs) / len(logs) ** 0.5, statistics.fmean(logs)
        return Interval(found.median, math.exp(middle - half), math.exp(middle + half), found.n)

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
    def is_clear(self) -> bool:
        """Whether so many pairs agree that no more are needed."""
        ratios = self.ratios
        n_above, n_below = sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)
        return len(ratios) >= _CLEAR_PAIRS and len(ratios) in (n_above, n_below)

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
            told = (
                f"{interval.n} pairs of runs, and fewer than 3 have no interval: generate less (-n)"
            )
        return (
            f"Inconclusive: {told}. Stop other programs on the machine, or measure several prompts with "
            "`llamabranch bench`."
        )


def run(engine: Engine, requests: Sequence[Request]) -> tuple[Sample, Sequence[Result]]:
    """Generate all texts, and time it."""
    before = engine.stats.elapsed_s
    results = engine.generate(requests)
    n_tokens = sum(len(result.tokens) for result in results)
    return Sample(n_tokens, engine.stats.elapsed_s - before), results


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

    There are 12 pairs of runs at most. Seven suffice if all of them have the same sign. No pair begins
    that would probably end later than ``budget_s`` seconds after the first; there is always one.
    """
    found, begun = Comparison(), perf_counter()
    try:
        for number in range(MOST_PAIRS):
            spent = perf_counter() - begun
            if number and (found.is_clear or spent * (1 + 1 / number) > budget_s):
                break
            so_far = f", speedup {statistics.median(found.ratios):.2f} so far" if number else ""
            progress(f"comparing: pair {number + 1} of {MOST_PAIRS}{so_far}")
            turns = [(drafting, found.drafted), (plain, found.plain)]
            for engine, runs in turns if number % 2 == 0 else reversed(turns):
                interrupts.check()
                sample, results = run(engine, requests)
                runs.samples.append(sample)
                runs.results = runs.results or results
    except (DecodeInterruptedError, KeyboardInterrupt):
        if not interrupts.requested:
            raise
        return None
    finally:
        progress("")
    return found
