"""``llamabranch theory``: what drafting can gain, from acceptance and costs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Annotated

import typer

from llamabranch import theory as formulas

from .bundles import with_bundles
from .console import print_json
from .options import OutputOptions

ACCEPTANCES = (0.7, 0.8)
DRAFT_LENGTHS = (4, 8)
DRAFT_COSTS = (0.05, 0.10, 0.20)
LONGEST = 16  # the longest draft that is considered the best


@with_bundles
def theory(
    *,
    acceptance: Annotated[
        list[float] | None,
        typer.Option(
            "--acceptance",
            "-a",
            help="Probability that a drafted token is accepted if those before it were; may be "
            "repeated.",
        ),
    ] = None,
    draft_length: Annotated[
        list[int] | None,
        typer.Option("--draft-length", "-k", help="Tokens drafted a round; may be repeated."),
    ] = None,
    draft_cost: Annotated[
        list[float] | None,
        typer.Option("--c", "-c", help="Time of a draft step over a target step; may be repeated."),
    ] = None,
    verify_cost: Annotated[
        str,
        typer.Option(
            metavar="V|N:V,N:V,...",
            help="Time to verify, in target steps: one number, or points to interpolate between.",
        ),
    ] = "1",
    output: OutputOptions,
) -> None:
    """Print tokens a round, speedup and best draft length that the theory expects.

    E is the tokens a round; "often seen" is a formula that is wrong, for comparison.
    """
    with output.console() as console:
        cost = _parse_cost(verify_cost)
        rates, costs = acceptance or ACCEPTANCES, draft_cost or DRAFT_COSTS
        rows = formulas.table(rates, draft_length or DRAFT_LENGTHS, costs, cost)
        best = [[_best(a, c, cost) for c in costs] for a in rates]
        if output.as_json:
            print_json(
                {
                    "verify_cost": verify_cost,
                    "draft_costs": list(costs),
                    "table": [
                        {
                            "acceptance": row.acceptance,
                            "draft_length": row.draft_length,
                            "often_seen": row.naive,
                            "expected_tokens": row.expected_tokens,
                            "accepted_share": row.accepted_share,
                            "speedups": list(row.speedups),
                        }
                        for row in rows
                    ],
                    "best": [
                        {"acceptance": a, "draft_cost": c, "draft_length": k, "speedup": speedup}
                        for a, line in zip(rates, best, strict=True)
                        for c, (k, speedup) in zip(costs, line, strict=True)
                    ],
                }
            )
            return
        headings = [f"c = {c:g}" for c in costs]
        console.line("Speedup over plain decoding, by the cost c of a draft step in target steps:")
        console.table(
            ("a", "length", "often seen", "E", *headings, "accepted / drafted"),
            [
                (
                    f"{row.acceptance:g}",
                    str(row.draft_length),
                    *(f"{x:.2f}" for x in (row.naive, row.expected_tokens, *row.speedups)),
                    f"{row.accepted_share:.2f}",
                )
                for row in rows
            ],
        )
        console.line()
        console.line(f"Best draft length, at most {LONGEST}, and its speedup (0: do not draft):")
        console.table(
            ("a", *headings),
            [
                (f"{a:g}", *(f"{k}: {speedup:.2f}" for k, speedup in line))
                for a, line in zip(rates, best, strict=True)
            ],
        )


def _best(a: float, c: float, cost: Callable[[int], float]) -> tuple[int, float]:
    k = formulas.best_draft_length(a, c, cost, LONGEST)
    return k, formulas.speedup(a, k, c, cost)


def _parse_cost(text: str) -> Callable[[int], float]:
    """Return v(n), the cost of verifying n tokens, from one number or from points n:v.

    Linear between points, and after the last as between the last two; v(1) is 1.
    """
    try:
        if ":" not in text:
            constant = float(text)
            return lambda n: constant
        pairs = (point.split(":") for point in text.split(","))
        points = {1: 1.0} | {int(n): float(v) for n, v in pairs}
    except ValueError:
        points = {}
    if len(points) < 2 or min(points) < 1 or points[1] != 1.0:
        raise typer.BadParameter(
            f"{text!r} is neither a number nor points such as 1:1,5:1.65 with v(1) = 1",
            param_hint="--verify-cost",
        )
    known = sorted(points.items())

    def cost(n: int) -> float:
        above = min(max(bisect_left(known, (n, 0.0)), 1), len(known) - 1)
        (n0, v0), (n1, v1) = known[above - 1], known[above]
        return v0 + (v1 - v0) * (n - n0) / (n1 - n0)

    return cost
