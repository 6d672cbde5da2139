"""Exactness on the command line: ``--exact``."""

from __future__ import annotations

from commands import answer, run

FIXED = ("-p", "Once upon a time", "-n", "4", "-c", "256", "-s", "1")


def test_exact_is_a_short_form_of_a_setting() -> None:
    assert not answer("generate", *FIXED)["exact"]
    assert answer("generate", "--exact", *FIXED)["exact"]
    assert answer("generate", *FIXED, "--exact")["exact"]
    # The same text as a prompt, or in another option, is not changed.
    assert answer("generate", *FIXED[2:], "--prompt=--exact")["results"][0]["prompt"] == "--exact"
    assert "no such option" in run("models", "list", "--exact").stderr.lower()
    assert "unless --exact asks for it" in run("generate", "--fast", *FIXED).stderr
