"""Exactness on the command line: ``--exact``, and both of its costs in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import answer, run
from costs import forget, write_costs

import llamabranch as lb

FIXED = ("-p", "Once upon a time", "-n", "4", "-c", "256", "-s", "1")


@pytest.fixture
def dear(target: lb.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact attention takes nine times as long to read as plain attention, and four times to generate."""
    profile = tmp_path / "profile.json"
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(profile))
    forget()
    with lb.Context(target, n_ctx=256, n_threads=1):
        pass
    exact, plain = [4e-6, 4e-6, 9e-6], [1e-6, 1e-6, 1e-6]
    write_costs(
        profile, {"bf16, flash": exact, "f16, plain": plain, "f16, flash": exact}, [1e-12] * 3
    )


def test_exact_is_a_short_form_of_a_setting(dear: None) -> None:
    plain, exact = (answer("generate", *FIXED, *more)["exact"] for more in ((), ("--exact",)))
    assert (plain, exact) == (False, True)
    assert "no such option" in run("models", "list", "--exact").stderr.lower()


def test_what_exactness_costs_is_told_in_words(dear: None) -> None:
    words = "would read prompts 9.0 x slower and generate 4.0 x slower on this processor"
    (facts,) = answer("models", "show", "tale-target")["models"]
    can = facts["capabilities"]
    assert can["exact_read_ratio"] == pytest.approx(9)
    assert can["exact_write_ratio"] == pytest.approx(4)
    context = answer("doctor", "-t", "1")["context"]
    assert context["batch-invariant"].startswith(f"no: exact {words}")
    assert (context["K/V type"], context["flash attention"]) == ("f16", "off")
