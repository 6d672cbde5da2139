"""Timing generations, and explaining a speedup in numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from llamabranch import (
    CapacityError,
    DecodeInterruptedError,
    Generation,
    Produced,
    SpeculativeStats,
)
from llamabranch.bench import Interval

from .render import Interruption

_N_PAIRS = 12  # as many have a 95 % interval that two outliers on either side do not widen
_REPEAT_FOR_S = 6.0  # seconds after which no further pair is begun: long runs are not repeated


@dataclass(frozen=True)
class Run:
    """One generation, whole or interrupted."""

    text: str
    tokens: list[int]
    finish_reason: str | None
    seed: int
    elapsed_s: float  # neither the target's reading of the prompt nor the display is counted
    stats: SpeculativeStats
    interrupted: bool
    emitted: tuple[Produced, ...] = ()  # one for each of the tokens

    @property
    def tokens_per_s(self) -> float:
        """Return tokens over seconds; 0 for an empty run."""
        return len(self.tokens) / self.elapsed_s if self.elapsed_s > 0 else 0.0


def run(
    start: Callable[[], Generation],
    show: Callable[[Produced], None] | None,
    interruption: Interruption,
) -> Run:
    """Drain a generation, showing its tokens; stop early when an interrupt is asked for.

    A full context ends it too, as the finish reason then says.

    Raises:
        KeyboardInterrupt, DecodeInterruptedError: interrupted before it has said anything.
    """
    interruption.check()
    generation = start()
    events: list[Produced] = []
    try:
        for emitted in generation:
            events.append(emitted)
            if show is not None:
                show(emitted)
            if interruption.asked:
                break
    except CapacityError:
        if not generation.tokens:
            raise
    except DecodeInterruptedError:
        if not events or not interruption.asked:
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
        interrupted=interruption.asked,
        emitted=tuple(emitted for emitted in events if not emitted.is_stop),
    )


@dataclass(frozen=True)
class Comparison:
    """Speculative against plain decoding of the same prompt with the same seed.

    ``interval`` is of the speedup, by pairs of runs one right after the other.
    """

    speculative: Run
    plain: Run
    speculative_tokens_per_s: float  # medians over the repeats
    plain_tokens_per_s: float
    interval: Interval

    @property
    def speedup(self) -> float:
        """Return speculative over plain tokens a second."""
        if self.plain_tokens_per_s == 0:
            return 0.0
        return self.speculative_tokens_per_s / self.plain_tokens_per_s

    @property
    def verdict(self) -> str:
        """ "faster", "slower" or "inconclusive"; "nothing drafted" where both decoded plainly."""
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
    interruption: Interruption,
) -> Comparison | None:
    """Time plain decoding beside a speculative run, turn by turn; None if interrupted.

    Short runs are repeated, in one order and then in the other, and their medians compared.
    """
    drafted, undrafted = [first], []
    try:
        undrafted.append(run(plain, None, interruption))
        spent = first.elapsed_s + undrafted[0].elapsed_s
        while len(undrafted) < _N_PAIRS and spent < _REPEAT_FOR_S:
            rivals = [(drafted, speculative), (undrafted, plain)]
            for runs, start in rivals if len(drafted) % 2 == 0 else reversed(rivals):
                runs.append(run(start, None, interruption))
                spent += runs[-1].elapsed_s
    except (KeyboardInterrupt, DecodeInterruptedError):
        return None
    if interruption.asked:
        return None
    pairs = zip(drafted, undrafted, strict=True)
    ratios = [
        ours.tokens_per_s / theirs.tokens_per_s if theirs.tokens_per_s else math.nan
        for ours, theirs in pairs
    ]
    return Comparison(
        speculative=first,
        plain=undrafted[0],
        speculative_tokens_per_s=statistics.median(each.tokens_per_s for each in drafted),
        plain_tokens_per_s=statistics.median(each.tokens_per_s for each in undrafted),
        interval=Interval.of(ratios),
    )


@dataclass(frozen=True)
class RoundCost:
    """What a round cost and yielded, in the terms of Leviathan et al. (2211.17192), section 3.3.

    ``c`` is the time per drafted token, ``v`` that of a verification, both over a target step.
    """

    draft_step_s: float
    target_step_s: float
    verify_s: float
    draft_length: float  # mean
    tokens_a_round: float

    @property
    def c(self) -> float:
        """Return the time per drafted token over the time of a target step."""
        return self.draft_step_s / self.target_step_s

    @property
    def v(self) -> float:
        """Return the time of a verification pass over the time of a target step."""
        return self.verify_s / self.target_step_s

    @property
    def round_cost(self) -> float:
        """Return the time of a round in target steps."""
        return self.draft_length * self.c + self.v

    def explain(self) -> str:
        """Say in numbers what a round cost and what it yielded."""
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
