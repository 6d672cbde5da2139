"""The arithmetic of speculation compared with enumeration, and the page that prints it."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest

from llamabranch.errors import ConfigError
from llamabranch.theory import (
    accepted_share,
    best_draft_length,
    expected_tokens,
    speedup,
)

PAGE = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text(encoding="utf-8")


# -- tokens and time -------------------------------------------------------------------------------


@pytest.mark.parametrize("a", [0.0, 0.3, 0.7, 0.999, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 5, 16])
def test_expected_tokens_is_the_mean_over_all_ends_of_a_round(a: float, gamma: int) -> None:
    """The accepted share is not the acceptance rate: tokens after a rejected one are not accepted."""
    ends = [(n + 1) * a**n * (1 - a) for n in range(gamma)] + [(gamma + 1) * a**gamma]
    assert expected_tokens(a, gamma) == pytest.approx(sum(ends), rel=1e-12)
    if gamma:
        assert accepted_share(a, gamma) == pytest.approx((sum(ends) - 1) / gamma, rel=1e-9)


def test_speedup_counts_drafting_and_verification() -> None:
    assert speedup(0.8, 4) == pytest.approx(expected_tokens(0.8, 4))
    assert speedup(0.8, 4, 0.1) == pytest.approx(expected_tokens(0.8, 4) / 1.4)
    assert speedup(0.8, 4, 0.1, 1.5) == pytest.approx(expected_tokens(0.8, 4) / 1.9)
    assert speedup(0.8, 4, 0.1, lambda n: 1 + n / 10) == pytest.approx(
        expected_tokens(0.8, 4) / 1.9
    )
    assert speedup(0.8, 0, 0.3, 5.0) == 1.0  # no draft: plain decoding


@pytest.mark.parametrize("v", [1.0, 20.0, lambda n: 1 + 0.05 * n], ids=["1", "20", "slope"])
def test_best_length_is_the_shortest_of_the_fastest(v: float | Callable[[int], float]) -> None:
    for a in (0.0, 0.3, 0.4, 0.7, 0.9, 1.0):
        for c in (0.0, 0.05, 0.1, 0.3, 0.5, 1.0):
            speeds = [speedup(a, gamma, c, v) for gamma in range(13)]
            assert best_draft_length(a, c, v, limit=12) == speeds.index(max(speeds))


def test_values_out_of_range_are_refused() -> None:
    for call in (
        lambda: expected_tokens(1.1, 4),
        lambda: expected_tokens(float("nan"), 4),
        lambda: expected_tokens(0.5, -1),
        lambda: accepted_share(0.5, 0),
        lambda: speedup(0.5, 4, -0.1),
        lambda: speedup(0.5, 4, 0.1, 0.0),
        lambda: best_draft_length(0.5, 0.1, limit=-1),
    ):
        with pytest.raises(ConfigError):
            call()


# -- the page --------------------------------------------------------------------------------------


def rows(start: str) -> list[list[str]]:
    """Return the cells of the page's table whose header line begins with ``start``."""
    lines = PAGE.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    table = takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def amdahl(a: float, gamma: int) -> float:
    return 1.0 / (1.0 - a + a / gamma)


def test_page_prints_the_tables_the_code_makes() -> None:
    table, best = [], []
    for gamma in (4, 8):
        for a in (0.7, 0.8):
            figures = [amdahl(a, gamma), expected_tokens(a, gamma)]
            figures += [speedup(a, gamma, c) for c in (0.05, 0.10, 0.20)]
            figures.append(accepted_share(a, gamma))
            table.append([f"{a:.2f}", str(gamma), *(f"{figure:.2f}" for figure in figures)])
    assert rows("| a | γ | Amdahl") == table
    for a in (0.5, 0.6, 0.7, 0.8, 0.9):
        lengths = [(best_draft_length(a, c), c) for c in (0.05, 0.10, 0.20)]
        best.append([f"{a:.2f}", *(f"{n}: {speedup(a, n, c):.2f}" for n, c in lengths)])
    assert rows("| a | c = 0.05") == best


def test_page_quotes_its_figures_rightly() -> None:
    prose = re.sub(r"\s+", " ", PAGE)
    assert f"0.70 means {accepted_share(0.7, 4):.2f} accepted / drafted at `γ` = 4" in prose
    low, high = speedup(0.7, 8, 0.2), speedup(0.7, 4, 0.2)
    assert f"lowers the speedup from {high:.2f} to {low:.2f}" in prose
    assert f"rises from {amdahl(0.7, 4):.2f} to {amdahl(0.7, 8):.2f}" in prose
    assert f"gives {amdahl(0.7, 1):.2f} for every `a`" in prose
