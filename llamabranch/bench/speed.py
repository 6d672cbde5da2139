"""How fast a context reads and generates after prompts of several lengths."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from ..branch import Branch
from ..context import Context
from ..sampling import SamplingParams
from ..speculative import Drafter, Speculator

# Tokens before a measurement: the first step has another shape, and drafters read the prompt.
_WARM_UP = 4


def median(values: Sequence[float]) -> float:
    """Return the median without the values that are nan; nan if there are no others."""
    return statistics.median([x for x in values if not math.isnan(x)] or [math.nan])


@dataclass
class Speeds:
    """Tokens a second of one setting. Each list has one value for each run.

    ``read`` is the prompt, up to the first token after it; ``plain`` and ``drafted`` are generation
    without and with drafts. The keys are the lengths of the prompt in tokens.
    """

    read: dict[int, list[float]] = field(default_factory=dict)
    plain: dict[int, list[float]] = field(default_factory=dict)
    drafted: dict[int, list[float]] = field(default_factory=dict)

    @property
    def drafts_pay(self) -> bool:
        """True if generation with drafts is faster, over all lengths."""
        return bool(self.drafted) and _mean(self.drafted, self.plain) > 1

    def over(self, other: Speeds) -> float:
        """Return the speed relative to another setting: the median of the runs.

        A run's value is the geometric mean of reading and generating (with drafts if they pay) at all
        lengths.
        """
        written = self.drafted if self.drafts_pay else self.plain
        theirs = other.drafted if other.drafts_pay else other.plain
        parts = (*_ratios(self.read, other.read), *_ratios(written, theirs))
        return median([statistics.geometric_mean(run) for run in zip(*parts, strict=True)])


def _ratios(own: dict[int, list[float]], other: dict[int, list[float]]) -> Iterator[list[float]]:
    for length in own:
        yield [a / b for a, b in zip(own[length], other[length], strict=False)]


def _mean(own: dict[int, list[float]], other: dict[int, list[float]]) -> float:
    runs = zip(*_ratios(own, other), strict=True)
    return median([statistics.geometric_mean(run) for run in runs])


def fastest(speeds: dict[str, Speeds]) -> str:
    """Return the name of the setting that is the fastest by `Speeds.over`; "" without measurements.

    All are compared with the first one.
    """
    measured = {name: each for name, each in speeds.items() if each.read}
    base = next(iter(measured.values()), None)
    if base is None:
        return ""
    return max(measured, key=lambda name: measured[name].over(base))


def measure(
    ctx: Context,
    drafter: Drafter | None,
    tokens: Sequence[int],
    lengths: Sequence[int],
    n_tokens: int,
    sampling: SamplingParams,
    speeds: Speeds,
) -> None:
    """Read ``tokens`` up to each of ``lengths``, generate there, and add a run to ``speeds``.

    Args:
        drafter: drafts in a second generation of the same length; None = only plain decoding.
        lengths: in increasing order, none greater than the number of ``tokens``.
        n_tokens: how many tokens are generated and timed each time.

    Raises:
        CapacityError: the longest prompt and its continuation do not fit into the context.
        DecodeInterruptedError: a decode was interrupted. Then nothing is added.
    """
    read, plain, drafted = (dict[int, float]() for _ in range(3))
    speculators = [(plain, Speculator(ctx))]
    if drafter is not None:
        speculators.append((drafted, Speculator(ctx, drafter)))
    with Branch.start(ctx, tokens[:1], sampling=sampling) as text:
        at, seconds = 1, 0.0
        for length in lengths:
            start = perf_counter()
            text.append(tokens[at:length])
            text.step()
            seconds += perf_counter() - start
            at, read[length] = length, length / seconds
            for rates, speculator in speculators:
                _generate(speculator, text, _WARM_UP)
                with text.fork() as fork:
                    rates[length] = _generate(speculator, fork, n_tokens)
    for own, rates in ((speeds.read, read), (speeds.plain, plain), (speeds.drafted, drafted)):
        for length, rate in rates.items():
            own.setdefault(length, []).append(rate)


def _generate(speculator: Speculator, text: Branch, n_tokens: int) -> float:
    """Continue ``text``; return tokens a second."""
    generation = speculator.generate(text, max_tokens=n_tokens).finish()
    return generation.tokens_per_second if generation.tokens else math.nan
