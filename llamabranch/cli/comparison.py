"""The statistics of ``speculate``, and ``--compare``: the same requests with and without drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import llamabranch as lb
from llamabranch import Engine, Request, Result
from llamabranch.bench.timing import Series, Spread, Stopped, Timing, interleave

from .console import Console, cell, number
from .interrupts import InterruptHandler

MOST_PAIRS = 9  # with fewer pairs a single outlier would widen the 95 % interval


@dataclass(frozen=True)
class DraftComparison:
    """A comparison of decoding with and without drafts, for the same requests and seed.

    Attributes:
        drafted, plain: the timed runs with and without drafts.
        results, plain_results: the texts of the first run with and without drafts.
    """

    drafted: Series
    plain: Series
    results: Sequence[Result]
    plain_results: Sequence[Result]

    @property
    def speed_up(self) -> float:
        """The median speed with drafts divided by that without; nan if no token was generated."""
        return self.drafted.rate.median / self.plain.rate.median

    @property
    def range(self) -> Spread:
        """The 95 % interval of the speed-up; with fewer than 6 pairs of runs, the range."""
        interval = self.drafted.interval(self.plain)
        return interval if interval.n >= 6 else self.drafted.ratio(self.plain)

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
        "tokens_a_second": stats.tokens_per_s if compared is None else compared.drafted.rate.median,
    }
    rows = {name.replace("_", " "): cell(value) for name, value in figures.items()}
    if drafted:
        rows["accept rate"] = f"{accepted / drafted * 100:.0f} % ({accepted} of {drafted})"
    rows["tokens a pass"] = number(figures["tokens_a_pass"], 2)
    rows["tokens a second"] = number(figures["tokens_a_second"], 1)
    if compared is not None:
        ratio, low, high = compared.speed_up, compared.range.low, compared.range.high
        plain, parting = compared.plain.rate.median, compared.parting
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
    results: dict[Engine, Sequence[Result]] = {}

    def work(engine: Engine, _: int) -> Timing:
        if interrupts.requested:
            raise Stopped
        before = engine.stats.elapsed_s
        texts = engine.generate(requests)
        results.setdefault(engine, texts)
        n_tokens = sum(len(result.tokens) for result in texts)
        return Timing(n_tokens, engine.stats.elapsed_s - before)

    timings = interleave(
        {"drafted": lambda _: partial(work, drafting), "plain": lambda _: partial(work, plain)},
        n_runs=MOST_PAIRS, n_items=1, budget_s=budget_s,
        progress=lambda text: progress(text and f"comparing: {text.partition(',')[0]}"),
    )  # fmt: skip
    if interrupts.requested or not timings["plain"].runs:
        return None
    return DraftComparison(timings["drafted"], timings["plain"], results[drafting], results[plain])
