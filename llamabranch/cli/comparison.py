"""The statistics of ``speculate``, and ``--compare``: the same requests with and without drafts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from typing import Any

import llamabranch as lb
from llamabranch import Engine, Request, Result

from .console import Console, cell, number
from .interrupts import InterruptHandler

MOST_PAIRS = 9  # with fewer, a single outlier would widen the 95 % interval of the speed-up
_PAUSE_S = 0.01  # between two runs, because the first one's threads still spin for a while


@dataclass
class DraftComparison:
    """A comparison of decoding with and without drafts, for the same requests and seed.

    Attributes:
        drafted, plain: tokens a second of each pair of runs, with and without drafts.
        results, plain_results: the texts of the last run with and without drafts.
    """

    drafted: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    results: Sequence[Result] = ()
    plain_results: Sequence[Result] = ()

    @property
    def speed_up(self) -> float:
        """The median speed with drafts over the median without; nan if no token was generated."""
        return median(self.drafted) / median(self.plain)

    @property
    def range(self) -> tuple[float, float]:
        """The 95 % interval of the speed-up, by the sign test: the range; of 9 pairs, without both ends.

        With fewer than 6 pairs the range covers the median less often.
        """
        ratios = sorted(a / b for a, b in zip(self.drafted, self.plain, strict=True))
        n_outside = len(ratios) // 9
        return ratios[n_outside], ratios[-1 - n_outside]

    @property
    def parting(self) -> int | None:
        """The first token at which the texts with and without drafts differ; None if all are equal."""
        pairs = zip(self.results, self.plain_results, strict=True)
        texts = (enumerate(zip_longest(a.tokens, b.tokens)) for a, b in pairs)
        return next((i for text in texts for i, (a, b) in text if a != b), None)


def report(
    console: Console, title: str, stats: lb.engine.EngineStats, compared: DraftComparison | None
) -> dict[str, Any]:
    """Print how well drafts worked, in aligned lines to standard error; return the figures by name.

    An iteration is a pass of the target for one text: it checks a draft, if there is one, and adds
    a token of its own. ``tokens_a_pass`` is the mean number of tokens that it adds.
    """
    counts = stats.speculative
    iterations = counts.num_drafts + counts.num_plain_steps
    drafted, accepted = counts.num_draft_tokens, counts.num_accepted_tokens
    rate = stats.tokens_per_second if compared is None else median(compared.drafted)
    figures: dict[str, Any] = {
        "iterations": iterations,
        "drafted": drafted,
        "accepted": accepted,
        "accept_rate": counts.draft_acceptance_rate,
        "tokens_a_pass": 1 + accepted / iterations if iterations else math.nan,
        "decodes_of_target": stats.target_forward_passes,
        "decodes_of_draft": stats.draft_forward_passes,
        "tokens_per_second": rate,
    }
    rows = {name.replace("_", " "): cell(value) for name, value in figures.items()}
    if drafted:
        rows["accept rate"] = f"{accepted / drafted * 100:.0f} % ({accepted} of {drafted})"
    rows["tokens a pass"] = number(figures["tokens_a_pass"], 2)
    rows["tokens per second"] = number(rate, 1)
    if compared is not None:
        ratio, (low, high) = compared.speed_up, compared.range
        plain, parting = median(compared.plain), compared.parting
        figures |= {
            "plain_tokens_per_second": plain,
            "speed_up": ratio,
            "speed_up_range": [low, high],
            "texts_equal": parting is None,
        }
        shown = f"{number(ratio, 2)} ({number(low, 2)} to {number(high, 2)})"
        rows["speed-up"] = f"{shown}; plain decoding: {number(plain, 1)} a second"
        rows["texts equal"] = "yes" if parting is None else f"no, from token {parting} on"
    if not console.silent:
        console.note(title, "bold")
        for label, value in rows.items():
            console.note(f"  {label:<17}  {value}", "")
    return figures


def compare(
    drafting: Engine,
    plain: Engine,
    requests: Sequence[Request],
    interrupts: InterruptHandler,
    *,
    budget_s: float = 60.0,
    progress: Callable[[str], None] = lambda text: None,
) -> DraftComparison | None:
    """Time decoding with and without drafts, in turns; return None if interrupted. The caller warms up.

    There are at most 9 pairs of runs; no pair begins once they have taken ``budget_s`` seconds.
    """
    compared, spent_s = DraftComparison(), 0.0
    while len(compared.plain) < MOST_PAIRS and spent_s < budget_s:
        progress(f"comparing: run {len(compared.plain) + 1} of {MOST_PAIRS}")
        runs: dict[Engine, tuple[float, list[Result]]] = {}
        for engine in (drafting, plain)[:: 1 if len(compared.plain) % 2 == 0 else -1]:
            time.sleep(_PAUSE_S)
            before = engine.stats.elapsed_s
            try:
                results = engine.generate(requests)
            except lb.DecodeInterruptedError:
                if not interrupts.requested:
                    raise
            if interrupts.requested:
                return None
            seconds = engine.stats.elapsed_s - before
            spent_s += seconds
            n_tokens = sum(len(result.tokens) for result in results)
            runs[engine] = (n_tokens / seconds if n_tokens and seconds > 0 else math.nan, results)
        for rates, engine in ((compared.drafted, drafting), (compared.plain, plain)):
            rates.append(runs[engine][0])
        compared.results, compared.plain_results = runs[drafting][1], runs[plain][1]
    progress("")
    return compared
