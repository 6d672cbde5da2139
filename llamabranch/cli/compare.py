"""Generations timed against plain decoding, and a speedup explained in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from llamabranch import (
    CapacityError,
    DecodeInterruptedError,
    Generation,
    Produced,
    SpeculativeStats,
)
from llamabranch.bench import Interval, Sample, Series, Stopped, Work, interleave

from .interrupts import InterruptHandler

__all__ = ["Comparison", "RoundCost", "Run", "compare", "round_cost", "run"]

_N_PAIRS = 12  # with 12 pairs, two outliers on either side do not widen the 95 % interval
_BUDGET_S = 6.0  # no pair is started after this many seconds: long runs are not repeated


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

    ``speculative`` and ``plain`` are the first runs; the series hold the times of all of them.
    """

    speculative: Run
    plain: Run
    speculative_series: Series
    plain_series: Series

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
        """The speedup by pairs of runs, one right after the other."""
        return self.speculative_series.interval(self.plain_series)

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
) -> Comparison | None:
    """Time plain decoding against ``first`` and further speculative runs; None if interrupted."""
    undrafted: list[Run] = []

    def timed(start: Callable[[], Generation]) -> Run:
        if interrupts.requested:
            raise Stopped
        done = run(start, None, interrupts)
        if done.interrupted:
            raise Stopped
        return done

    def drafting(number: int) -> Work:
        return lambda item: (first if number == 0 else timed(speculative)).sample

    def decoding(number: int) -> Work:
        def work(item: int) -> Sample:
            undrafted.append(timed(plain))
            return undrafted[-1].sample

        return work

    series = interleave(
        {"speculative": drafting, "plain": decoding},
        n_runs=_N_PAIRS,
        n_items=1,
        budget_s=_BUDGET_S,
        warm_up=False,
        progress=lambda text: None,
    )
    if interrupts.requested or not series["plain"].runs:
        return None
    return Comparison(first, undrafted[0], series["speculative"], series["plain"])


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
    if not speculative.num_draft_tokens or not plain.num_plain_steps or not plain.plain_time_s:
        return None
    return RoundCost(
        draft_step_s=speculative.draft_time_s / speculative.num_draft_tokens,
        target_step_s=plain.plain_time_s / plain.num_plain_steps,
        verify_s=speculative.verify_time_s / speculative.num_drafts,
        draft_length=speculative.num_draft_tokens / speculative.num_drafts,
        tokens_a_round=speculative.mean_acceptance_length,
    )
