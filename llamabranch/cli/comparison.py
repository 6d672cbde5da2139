"""Generations timed against plain decoding, and a speedup explained in numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from llamabranch import (
    CapacityError,
    DecodeInterruptedError,
    Generation,
    Produced,
    SpeculativeStats,
)
from llamabranch.bench import Interval, Sample, Series, Stopped, Total, Work, interleave

from .interrupts import InterruptHandler

__all__ = [
    "LEAST_PAIRS",
    "MOST_PAIRS",
    "Comparison",
    "RoundCost",
    "Run",
    "compare",
    "round_cost",
    "run",
]

MOST_PAIRS = 12  # with 12 pairs, two outliers on either side do not widen the 95 % interval
LEAST_PAIRS = 6  # with fewer, no interval of order statistics has 95 %
# Where both are equally fast, all of the first seven pairs lie on one side of 1 with a probability of
# 2 / 2^7 = 1.6 %. With the interval of twelve pairs, which is wrong at most once in twenty, a verdict is
# wrong with a probability of 4.6 %.
_CLEAR_PAIRS = 7
# The 97.5 % quantile of Student's t distribution by the number of values: for fewer pairs.
_T_QUANTILES = {3: 4.303, 4: 3.182, 5: 2.776}


@dataclass(frozen=True)
class Run:
    """One generation, whole or interrupted."""

    text: str
    tokens: list[int]
    finish_reason: str | None
    seed: int
    elapsed_s: float  # without the target's prefill and without the display
    stats: SpeculativeStats
    interrupted: bool
    emitted: tuple[Produced, ...] = ()  # one for each of the tokens

    @property
    def sample(self) -> Sample:
        """Its time and tokens, as the measurement functions take them."""
        return Sample(len(self.tokens), self.elapsed_s, tuple(self.tokens), self.stats)


def run(
    start: Callable[[], Generation],
    show: Callable[[Produced], None] | None,
    interrupts: InterruptHandler,
) -> Run:
    """Run a generation to its end, showing its tokens; stop early at a Ctrl-C.

    A full context ends it too; the finish reason is then "capacity".

    Raises:
        KeyboardInterrupt, DecodeInterruptedError: interrupted before the first token.
    """
    interrupts.check()
    generation = start()
    events: list[Produced] = []
    try:
        for emitted in generation:
            events.append(emitted)
            if show is not None:
                show(emitted)
            if interrupts.requested:
                break
    except CapacityError:
        if not generation.tokens:
            raise
    except DecodeInterruptedError:
        if not events or not interrupts.requested:
            raise
    finally:
        generation.close()
    return Run(
        text=generation.text,
        tokens=list(generation.tokens),
        finish_reason=generation.finish_reason,
        seed=generation.seed,
        elapsed_s=generation.elapsed_s,
        stats=generation.stats,
        interrupted=interrupts.requested,
        emitted=tuple(emitted for emitted in events if not emitted.is_stop),
    )


@dataclass(frozen=True)
class Comparison:
    """Speculative against plain decoding of the same prompt with the same seed.

    ``speculative`` and ``plain`` are the first runs; the series hold the times of all of them. A pair of
    runs takes about ``pair_s`` seconds, their prompts included.
    """

    speculative: Run
    plain: Run
    speculative_series: Series
    plain_series: Series
    pair_s: float

    @property
    def speculative_tokens_per_s(self) -> float:
        """Tokens a second with drafts: the median of the runs."""
        return self.speculative_series.rate.median

    @property
    def plain_tokens_per_s(self) -> float:
        """Tokens a second of plain decoding: the median of the runs."""
        return self.plain_series.rate.median

    @property
    def speedup(self) -> float:
        """The speculative median divided by the plain one, nan without a token."""
        plain = self.plain_tokens_per_s
        return self.speculative_tokens_per_s / plain if plain else math.nan

    @property
    def interval(self) -> Interval:
        """The speedup by pairs of runs, one right after the other.

        The interval is one of order statistics from 6 pairs on. From 3 to 5 pairs it is that of Student's
        t distribution for the logarithms of the ratios, which takes their noise to be normal.
        """
        found = self.speculative_series.interval(self.plain_series)
        ratios = [ratio for ratio in self.ratios if ratio > 0]
        quantile = _T_QUANTILES.get(len(ratios))
        if quantile is None or found.n != len(ratios):
            return found
        logs = [math.log(ratio) for ratio in ratios]
        half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
        middle = statistics.fmean(logs)
        return replace(found, low=math.exp(middle - half), high=math.exp(middle + half))

    @property
    def ratios(self) -> list[float]:
        """The speedup of each pair of runs, in their order."""
        return _ratios(self.speculative_series.runs, self.plain_series.runs)

    @property
    def verdict(self) -> str:
        """ "faster", "slower" or "inconclusive"; "nothing drafted" where both were plain decoding."""
        if self.speculative.stats.num_draft_tokens == 0:
            return "nothing drafted"
        return self.interval.verdict

    @property
    def same_text(self) -> bool:
        """Whether both gave the same tokens."""
        return self.speculative.tokens == self.plain.tokens


def compare(
    first: Run,
    speculative: Callable[[], Generation],
    plain: Callable[[], Generation],
    interrupts: InterruptHandler,
    budget_s: float = 60.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison | None:
    """Time plain decoding against ``first`` and further speculative runs; None if interrupted.

    There are 12 pairs of runs at most. Seven suffice if all of them have the same sign. No pair begins
    that would probably end later than ``budget_s`` seconds after the first; there is always one.
    """
    undrafted: list[Run] = []
    drafted = [first]
    begun = perf_counter() - first.elapsed_s

    def spent() -> float:
        timed_s = sum(run.elapsed_s for run in (*drafted, *undrafted))
        return max(timed_s, perf_counter() - begun)  # the latter has the prompts too

    def timed(start: Callable[[], Generation]) -> Run:
        if interrupts.requested:
            raise Stopped
        done = run(start, None, interrupts)
        if done.interrupted:
            raise Stopped
        return done

    def drafting(number: int) -> Work:
        # It is asked for the work of each pair before that begins, and the first to be asked.
        ratios = _ratios([run.sample for run in drafted], [run.sample for run in undrafted])
        if number and (_is_clear(ratios) or spent() * (1 + 1 / number) > budget_s):
            raise Stopped
        progress(f"comparing: pair {number + 1} of {MOST_PAIRS}" + _so_far(ratios))

        def work(item: int) -> Sample:
            if number:
                drafted.append(timed(speculative))
            return drafted[-1].sample

        return work

    def decoding(number: int) -> Work:
        def work(item: int) -> Sample:
            undrafted.append(timed(plain))
            return undrafted[-1].sample

        return work

    series = interleave(
        {"speculative": drafting, "plain": decoding},
        n_runs=MOST_PAIRS,
        n_items=1,
        warm_up=False,
        progress=lambda text: None,
    )
    progress("")
    if interrupts.requested or not series["plain"].runs:
        return None
    pair_s = spent() / len(series["plain"].runs)
    return Comparison(first, undrafted[0], series["speculative"], series["plain"], pair_s)


def _ratios(fast: Sequence[Sample | Total], slow: Sequence[Sample | Total]) -> list[float]:
    return [a.rate / b.rate if b.rate else math.nan for a, b in zip(fast, slow, strict=False)]


def _is_clear(ratios: Sequence[float]) -> bool:
    above = sum(ratio > 1 for ratio in ratios)
    below = sum(ratio < 1 for ratio in ratios)
    return len(ratios) >= _CLEAR_PAIRS and len(ratios) in (above, below)


def _so_far(ratios: Sequence[float]) -> str:
    return f", speedup {statistics.median(ratios):.2f} so far" if ratios else ""


@dataclass(frozen=True)
class RoundCost:
    """What a round cost and yielded, in the terms of Leviathan et al. (2211.17192), section 3.3."""

    draft_step_s: float
    target_step_s: float
    verify_s: float
    draft_length: float  # mean
    tokens_a_round: float

    @property
    def c(self) -> float:
        """The time per drafted token over the time of a target step."""
        return self.draft_step_s / self.target_step_s

    @property
    def v(self) -> float:
        """The time of a verification over the time of a target step."""
        return self.verify_s / self.target_step_s

    @property
    def round_cost(self) -> float:
        """The time of a round in target steps."""
        return self.draft_length * self.c + self.v

    def explain(self) -> str:
        """Return in numbers what a round cost and what it yielded."""
        k, rows = f"{self.draft_length:.3g}", f"{self.draft_length + 1:.3g}"
        draft_ms, target_ms = 1e3 * self.draft_step_s, 1e3 * self.target_step_s
        gain = self.tokens_a_round / self.round_cost
        return (
            f"Drafting a token takes c = {self.c:.2f} of a target step ({draft_ms:.2f} of "
            f"{target_ms:.2f} ms), and verifying {rows} tokens at once takes v({rows}) = "
            f"{self.v:.2f} target steps. A round of {k} drafted tokens so costs {k} x {self.c:.2f} "
            f"+ {self.v:.2f} = {self.round_cost:.2f} target steps and yields "
            f"{self.tokens_a_round:.2f} tokens: {gain:.2f} times plain decoding at best. "
            "Drafting pays where the target is much larger than the draft (small c) and bound by "
            "memory rather than arithmetic (v near 1)."
        )


def round_cost(speculative: SpeculativeStats, plain: SpeculativeStats) -> RoundCost | None:
    """Measure what a round cost from the statistics of both runs; None if there was no round."""
    drafted = speculative.num_drafts and speculative.num_draft_steps
    if not drafted or not plain.num_plain_steps or not plain.plain_time_s:
        return None
    return RoundCost(
        draft_step_s=speculative.draft_step_s,
        target_step_s=plain.plain_time_s / plain.num_plain_steps,
        verify_s=speculative.verify_time_s / speculative.num_drafts,
        draft_length=speculative.num_draft_tokens / speculative.num_drafts,
        tokens_a_round=speculative.mean_acceptance_length,
    )
