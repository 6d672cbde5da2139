"""``llamabranch theory``: what drafting can gain, from acceptance and costs."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

import typer

from llamabranch import ConfigError
from llamabranch import theory as formulas

from .bundles import option, with_bundles
from .console import print_json
from .jsonl import read_text
from .options import DRAFT_LENGTH_NAMES, OutputOptions

LONGEST = 16  # the longest draft that is considered the best
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class _Measured:
    """What the formulas need; by default usual values."""

    acceptances: Sequence[float] = (0.7, 0.8)
    draft_lengths: Sequence[int] = (4, 8)
    draft_costs: Sequence[float] = (0.05, 0.10, 0.20)
    verify_cost: str = "1"


@dataclass(frozen=True)
class TheoryOptions:
    """What is put into the formulas."""

    panel: ClassVar[str] = "Options"

    measured: Annotated[
        Path | None,
        typer.Argument(
            metavar="BENCH.JSON",
            help="File written by `bench --output`; supplies values not given.",
            rich_help_panel="Arguments",
        ),
    ] = None
    acceptance: list[str] | None = option(
        None,
        "Probability that a drafted token is accepted if those before it were. Default: 0.7,0.8.",
        "--acceptance",
        "-a",
        metavar="A,A,...",
    )
    draft_length: list[str] | None = option(
        None, "Tokens drafted a round. Default: 4,8.", *DRAFT_LENGTH_NAMES, metavar="N,N,..."
    )
    draft_cost: list[str] | None = option(
        None,
        "Time of a draft step over a target step. Default: 0.05,0.1,0.2.",
        "--c",
        metavar="C,C,...",
    )
    verify_cost: str | None = option(
        None,
        "Time to verify, in target steps: one number, or points to interpolate between. Default: 1.",
        metavar="V|N:V,N:V,...",
    )


@with_bundles
def theory(*, given: TheoryOptions, output: OutputOptions) -> None:
    """Print tokens a round, speedup and best draft length that the theory expects.

    E is the tokens a round; "Amdahl" is Amdahl's law, too simple here, for comparison.
    """
    with output.console() as console:
        found = _Measured() if given.measured is None else _read(given.measured)
        rates = _numbers(given.acceptance, float, "--acceptance") or found.acceptances
        lengths = _numbers(given.draft_length, int, "--draft-length") or found.draft_lengths
        costs = _numbers(given.draft_cost, float, "--c") or found.draft_costs
        verify_cost = found.verify_cost if given.verify_cost is None else given.verify_cost
        cost = _parse_cost(verify_cost)
        rows = formulas.table(rates, lengths, costs, cost)
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
                            "amdahl": row.naive,
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
        headings = [f"c = {c:.3g}" for c in costs]
        console.line("Speedup over plain decoding, by the cost c of a draft step in target steps:")
        console.table(
            ("a", "length", "Amdahl", "E", *headings, "accepted / drafted"),
            [
                (
                    f"{row.acceptance:.3g}",
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
                (f"{a:.3g}", *(f"{k}: {speedup:.2f}" for k, speedup in line))
                for a, line in zip(rates, best, strict=True)
            ],
        )


def _read(path: Path) -> _Measured:
    """Return what a file of ``bench`` has measured.

    Raises:
        ConfigError: it cannot be read, is not such a file, or nothing was drafted.
    """
    try:
        report = json.loads(read_text(path))
        lengths = [cell["draft_length"] for cell in report["lengths"]]
        return _Measured(
            (float(report["a"]),),
            [length for length in lengths if isinstance(length, int)],
            (float(report["c"]),),
            ",".join(f"{int(n)}:{float(ratio)}" for n, ratio in report["v"].items()),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(
            f"{path} has no measured acceptance and costs of drafting",
            hint="`llamabranch bench --output DIR` writes DIR/bench.json",
        ) from None


def _numbers(given: list[str] | None, kind: type[Number], option: str) -> list[Number]:
    """Return the numbers of an option that may be repeated, and that takes several between commas."""
    try:
        return [kind(part) for text in given or () for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{', '.join(given or ())!r} is not a list of numbers such as 4,8", param_hint=option
        ) from None


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
