"""The report of ``llamabranch eval --against MODEL``: two models compared on one text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llamabranch.eval import KLDivergence, Uncertain

from .console import Console, decimal_size, number

if TYPE_CHECKING:
    from llamabranch.eval.comparison import Comparison

Rows = list[tuple[str, ...]]
_FRACTIONS = {
    "minimum": 0.0, "1 %": 0.01, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "95 %": 0.95, "99 %": 0.99,
    "99.9 %": 0.999, "maximum": 1.0,
}  # fmt: skip  # of tokens


def print_comparison(console: Console, found: Comparison) -> None:
    """Print the tables of the report, and its advice."""
    for rows in _tables(found):
        console.table(rows[0], rows[1:])
        console.line()
    console.line(found.advice)


def _tables(found: Comparison) -> Iterator[Rows]:
    """Yield the tables of the report. The first row of each has the headings."""
    yield [
        ("", "name", "type", "size", "vocabulary", "K/V"),
        *(
            (side, str(m["name"]), str(m["type"]), decimal_size(float(str(m["bytes"]))),
             str(m["n_vocab"]), str(m["kv_type"]))
            for side, m in zip("AB", found.models, strict=True)
        ),
    ]  # fmt: skip
    if found.divergence is None:
        t = {name: math.nan if x is None else x for name, x in found.totals.items()}
        yield [
            ("", "bits", "bits per byte"),
            *((s, number(t[f"bits{s}"], 1), number(t[f"bpb{s}"], 4)) for s in "AB"),
            ("bytes", number(t["bytes"], 0), ""),
            ("greedy next texts agree, %", number(100 * t["agreement"], 1), ""),
        ]  # fmt: skip
        return
    (names, *numbers), percentiles = divergence_tables(found.divergence)
    reverse = ("mean KL(B, A), nats", number(found.reverse, 6), "")
    yield [("A is the base", *names[1:]), *numbers, reverse]
    yield percentiles
    yield [
        ("KL", "before", "token", "after", "A's top", "B's top"),
        *((number(t.kl, 3), t.before, t.text, t.after, t.top_a, t.top_b) for t in found.worst),
    ]  # fmt: skip
    groups = [*found.by(lambda t: f"quarter {t.quarter}").items()]
    groups += found.by(lambda t: t.kind).items()
    yield [
        ("", "tokens", "mean KL(A, B)"), *((name, str(n), number(kl, 5)) for name, (n, kl) in groups)
    ]  # fmt: skip
    if found.forks:
        yield [
            ("", "tokens until they part"), ("median", f"{found.median_fork:g}"),
            ("each", ", ".join(map(str, found.forks))),
        ]  # fmt: skip


def divergence_tables(found: KLDivergence) -> list[list[tuple[str, ...]]]:
    """Return the statistics and the percentiles as tables, each with a first row of headings."""
    statistics = found.statistics
    natural = {
        "perplexity": statistics.perplexity,
        "perplexity of the base": statistics.base_perplexity,
        "log of their ratio": statistics.log_ratio,
        "ratio": statistics.ratio,
        "difference": statistics.difference,
        "correlation of the losses": Uncertain(statistics.correlation, math.nan),
        "mean KL divergence, nats": statistics.mean,
    }
    percent = {
        "same most probable token, %": statistics.same_top,
        "mean change of probability, %": statistics.p_change,
        "root mean square change, %": statistics.p_change_rms,
    }
    return [
        [
            ("", "value", "±"),
            *((name, *(number(v, 6) for v in values)) for name, values in natural.items()),
            *((name, *(number(100 * v, 3) for v in values)) for name, values in percent.items()),
        ],
        [
            ("percentile", "KL divergence", "change of probability, %"),
            *(
                (
                    name,
                    number(found.percentile(f), 6),
                    number(100 * found.p_change_percentile(f), 3),
                )
                for name, f in _FRACTIONS.items()
            ),
        ],
    ]
