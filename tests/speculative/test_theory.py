"""The arithmetic of speculation: an example's function beside enumeration, and the tables of the page."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "speculation.md").read_text(encoding="utf-8")
EXAMPLE = TOP / "examples" / "optimized_speculative.py"
speedup: Callable[..., float] = runpy.run_path(str(EXAMPLE))["speedup"]


def expected_tokens(a: float, gamma: int) -> float:
    """Return the mean over all ends of a round."""
    ends = [(n + 1) * a**n * (1 - a) for n in range(gamma)] + [(gamma + 1) * a**gamma]
    return sum(ends)


def accepted_share(a: float, gamma: int) -> float:
    return (expected_tokens(a, gamma) - 1) / gamma


@pytest.mark.parametrize("a", [0.0, 0.3, 0.7, 0.999, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 5, 16])
def test_speedup_counts_tokens_drafting_and_verification(a: float, gamma: int) -> None:
    assert speedup(a, gamma, 0.0) == pytest.approx(expected_tokens(a, gamma), rel=1e-12)
    cost = gamma * 0.1 + 1.5 if gamma else 1.0  # without a draft it is plain decoding
    assert speedup(a, gamma, 0.1, 1.5) == pytest.approx(expected_tokens(a, gamma) / cost)


def rows(start: str) -> list[list[str]]:
    """Return the cells of the page's table whose header line begins with ``start``."""
    lines = PAGE.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    table = takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def amdahl(a: float, gamma: int) -> float:
    return 1.0 / (1.0 - a + a / gamma)


def test_page_has_the_tables_of_the_formulas() -> None:
    table, best = [], []
    for gamma in (4, 8):
        for a in (0.7, 0.8):
            figures = [amdahl(a, gamma), expected_tokens(a, gamma)]
            figures += [speedup(a, gamma, c) for c in (0.05, 0.10, 0.20)]
            figures.append(accepted_share(a, gamma))
            table.append([f"{a:.2f}", str(gamma), *(f"{figure:.2f}" for figure in figures)])
    assert rows("| a | γ | Amdahl") == table
    for a in (0.5, 0.6, 0.7, 0.8, 0.9):
        cells = []
        for c in (0.05, 0.10, 0.20):
            speeds = [speedup(a, gamma, c) for gamma in range(17)]
            cells.append(f"{speeds.index(max(speeds))}: {max(speeds):.2f}")
        best.append([f"{a:.2f}", *cells])
    assert rows("| a | c = 0.05") == best
    prose = re.sub(r"\s+", " ", PAGE)
    assert f"0.70 means {accepted_share(0.7, 4):.2f} accepted / drafted at `γ` = 4" in prose
    low, high = speedup(0.7, 8, 0.2), speedup(0.7, 4, 0.2)
    assert f"lowers the speedup from {high:.2f} to {low:.2f}" in prose
    assert f"rises from {amdahl(0.7, 4):.2f} to {amdahl(0.7, 8):.2f}" in prose
    assert f"gives {amdahl(0.7, 1):.2f} for every `a`" in prose
