"""Exactness on the command line: ``--exact``."""

from __future__ import annotations

from commands import answer, run

FIXED = ("-p", "Once upon a time", "-n", "4", "-c", "256", "-s", "1")


def test_exact_is_a_short_form_of_a_setting() -> None:
    plain, exact = (answer("generate", *FIXED, *more)["exact"] for more in ((), ("--exact",)))
    assert (plain, exact) == (False, True)
    assert "no such option" in run("models", "list", "--exact").stderr.lower()
