"""The statistics of ``speculate``, and ``--compare``: the same requests with and without drafts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import llamabranch as lb
from llamabranch import Engine, Request

from .console import Console, number, percent
from .interrupts import InterruptHandler

MOST_PAIRS = 9
_PAUSE_S = 0.01  # between two runs, because the first one's threads still spin for a while


class Pair(NamedTuple):
    """Tokens a second with drafts and without, and whether all texts were equal."""

    drafted: float
    plain: float
    is_equal: bool


def pairs(
    drafting: Engine,
    plain: Engine,
    requests: Sequence[Request],
    interrupts: InterruptHandler,
    budget_s: float = 60.0,
) -> Iterator[Pair]:
    """Run requests with and without drafts, in turn, and yield each pair. The caller warms up.

    There are at most 9 pairs. None begins after ``budget_s`` seconds, or after Ctrl-C.
    """
    spent_s = 0.0
    for i in range(MOST_PAIRS):
        rates, texts = dict[Engine, float](), list[list[list[int]]]()
        for engine in (drafting, plain)[:: -1 if i % 2 else 1]:
            time.sleep(_PAUSE_S)
            before = engine.stats.elapsed_s
            try:
                texts.append([result.tokens for result in engine.generate(requests)])
            except lb.DecodeInterruptedError:
                if not interrupts.requested:
                    raise
            if interrupts.requested:
                return
            seconds, n_tokens = engine.stats.elapsed_s - before, sum(map(len, texts[-1]))
            spent_s += seconds
            rates[engine] = n_tokens / seconds if n_tokens and seconds > 0 else math.nan
        yield Pair(rates[drafting], rates[plain], texts[0] == texts[1])
        if spent_s >= budget_s:
            return


def speed_up(compared: Sequence[Pair]) -> tuple[float, float, float]:
    """Return the median speed with drafts over the one without, the lowest and the highest ratio."""
    ratios = [pair.drafted / pair.plain for pair in compared]
    drafted, plain, _ = zip(*compared, strict=True)
    return median(drafted) / median(plain), min(ratios), max(ratios)


def report(
    console: Console, title: str, stats: lb.engine.EngineStats, compared: Sequence[Pair]
) -> dict[str, Any]:
    """Print how well drafts worked to standard error; return the figures by name.

    An iteration is a pass of the target for one text: it checks a draft, if there is one, and adds
    a token of its own. ``tokens_a_pass`` is the mean number of tokens that it adds.
    """
    counts = stats.speculative
    figures: dict[str, Any] = {
        "iterations": (n := counts.num_drafts + counts.num_plain_steps),
        "drafted": (drafted := counts.num_draft_tokens),
        "accepted": (accepted := counts.num_accepted_tokens),
        "accept_rate": counts.draft_acceptance_rate,
        "tokens_a_pass": 1 + accepted / n if n else math.nan,
        "decodes_of_target": (by_target := stats.target_forward_passes),
        "decodes_of_draft": (by_draft := stats.draft_forward_passes),
        "tokens_per_second": stats.tokens_per_second,
    }
    rows = {
        "accept rate": percent(accepted, drafted) if drafted else "nothing was drafted",
        "tokens a pass": f"{number(figures['tokens_a_pass'], 2)} ({accepted + n} in {n})",
        "decodes": f"{by_target} of the target, {by_draft} of the draft",
        "tokens/s": number(stats.tokens_per_second, 1),
    }
    if compared:
        ratio, *ends = speed_up(compared)
        figures |= {
            "tokens_per_second": (drafted_rate := median(pair.drafted for pair in compared)),
            "plain_tokens_per_second": (plain_rate := median(pair.plain for pair in compared)),
            "speed_up": ratio,
            "speed_up_range": ends,
            "texts_equal": all(pair.is_equal for pair in compared),
        }
        rows |= {
            "tokens/s": f"{number(drafted_rate, 1)}, {number(plain_rate, 1)} without drafts",
            "speed-up": "{:.2f} ({:.2f} to {:.2f})".format(ratio, *ends),
            "texts equal": "yes" if figures["texts_equal"] else "no",
        }
    if not console.silent:
        console.note(title, "bold")
        for label, value in rows.items():
            console.note(f"  {label:<13}  {value}", "")
    return figures
