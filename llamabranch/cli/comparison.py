"""The statistics of ``speculate``, and ``--compare``: the same requests with and without drafts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import llamabranch as lb
from llamabranch import Engine, Request, Result
from llamabranch.bench.speed import Spread
from llamabranch.errors import DecodeInterruptedError

from .console import Console, cell, number
from .interrupts import InterruptHandler

MOST_PAIRS = 9
_PAUSE_S = 0.01  # between two runs, because the threads of the first one still spin for a while


@dataclass(frozen=True)
class DraftComparison:
    """A comparison of decoding with and without drafts, for the same requests and seed.

    Attributes:
        drafted, plain: tokens a second of each run with and without drafts, in pairs.
        results, plain_results: the texts of the first run with and without drafts.
    """

    drafted: Sequence[float]
    plain: Sequence[float]
    results: Sequence[Result]
    plain_results: Sequence[Result]

    @property
    def speed_up(self) -> float:
        """The median speed with drafts divided by that without; nan if no token was generated."""
        return Spread.of(self.drafted).median / Spread.of(self.plain).median

    @property
    def range(self) -> Spread:
        """The 95 % interval of the speed-up by the sign test; with fewer than 6 pairs, the range."""
        ratios = sorted(a / b for a, b in zip(self.drafted, self.plain, strict=True))
        return Spread.of(ratios[1:-1] if len(ratios) == 9 else ratios)

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
    figures: dict[str, Any] = {
        "iterations": iterations,
        "drafted": drafted,
        "accepted": accepted,
        "accept_rate": counts.draft_acceptance_rate,
        "tokens_a_pass": 1 + accepted / iterations if iterations else math.nan,
        "decodes_of_target": stats.target_forward_passes,
        "decodes_of_draft": stats.draft_forward_passes,
        "tokens_a_second": stats.tokens_per_s
        if compared is None
        else Spread.of(compared.drafted).median,
    }
    rows = {name.replace("_", " "): cell(value) for name, value in figures.items()}
    if drafted:
        rows["accept rate"] = f"{accepted / drafted * 100:.0f} % ({accepted} of {drafted})"
    rows["tokens a pass"] = number(figures["tokens_a_pass"], 2)
    rows["tokens a second"] = number(figures["tokens_a_second"], 1)
    if compared is not None:
        ratio, low, high = compared.speed_up, compared.range.low, compared.range.high
        plain, parting = Spread.of(compared.plain).median, compared.parting
        figures |= {
            "plain_tokens_a_second": plain,
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
    """Time decoding with and without drafts; return None if interrupted. The caller warms up.

    There are at most 9 pairs of runs; no pair begins after ``budget_s`` seconds.
    """
    rates: dict[Engine, list[float]] = {drafting: [], plain: []}
    results: dict[Engine, Sequence[Result]] = {}
    seconds = 0.0
    try:
        while len(rates[plain]) < MOST_PAIRS and seconds < budget_s:
            progress(f"comparing: run {len(rates[plain]) + 1} of {MOST_PAIRS}")
            for engine in list(rates)[:: 1 if len(rates[plain]) % 2 == 0 else -1]:
                time.sleep(_PAUSE_S)
                if interrupts.requested:
                    return None
                before = engine.stats.elapsed_s
                texts = engine.generate(requests)
                took = engine.stats.elapsed_s - before
                n_tokens = sum(len(result.tokens) for result in texts)
                rates[engine].append(n_tokens / took if n_tokens else math.nan)
                results.setdefault(engine, texts)
                seconds += took
    except DecodeInterruptedError:
        return None
    progress("")
    if interrupts.requested:
        return None
    return DraftComparison(rates[drafting], rates[plain], results[drafting], results[plain])
