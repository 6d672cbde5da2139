"""``llamabranch demo``: what it prints on terminals, into a pipe and as JSON, all of it measured."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from commands import on_terminal

HEADINGS = (
    "1. Eight answers that share one prompt",
    "2. A function edited",
    "3. A text as JSON",
)
# A smaller demo of the bundled model, run in another process.
SETTINGS = {"N_STEPS": 8, "MOST_TOKENS": 24, "TEXT_S": 1e3}  # however slow this machine is
SMALL = f"""
import sys
import llamabranch.hub
from llamabranch.cli import comparison, demo
from llamabranch.cli.app import main
sys.modules["llamabranch.hub.catalogue"].DEFAULT_MODEL = "tale-target"
comparison.MOST_PAIRS = 1
vars(demo).update({SETTINGS!r})
sys.argv[0] = "llamabranch"
main()
"""


PROGRAM = [sys.executable, "-c", SMALL, "demo", "--threads", "1"]


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_demo_fits_terminals_of_any_width_and_colours_tokens_by_source(columns: int) -> None:
    shown, _ = on_terminal(PROGRAM, columns)
    assert "\x1b[35m" in shown  # forced by the grammar
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n")
    assert all(heading in text for heading in HEADINGS)
    generated = text[text.index(HEADINGS[1]) : text.index("This took ")]
    assert max(map(len, text.replace(generated, "").splitlines())) <= columns
    if columns == 80:
        assert len(text[text.index(HEADINGS[0]) :].splitlines()) <= 80
    assert "def report(orders, customer):\n    amount = 0.0\n    for order in orders:" in text


def test_demo_in_a_pipe_is_plain_text_and_says_what_to_type_next() -> None:
    result = subprocess.run(PROGRAM, capture_output=True, text=True, check=True)
    assert "\x1b" not in result.stdout
    assert all(heading in result.stdout for heading in HEADINGS)
    n_prompt = int(re.findall(r"share one prompt of (\d+)", result.stdout)[0])
    output = " ".join(result.stdout.split())
    assert f"a text costs {n_prompt // 8 + 8} tokens instead of {n_prompt + 8}," in output
    forked = r"\d\.\d times as fast as one by one, the same texts: \d\.\d\d s per text instead of "
    assert len(re.findall(forked, output)) == 1
    number, decodes = r"\d\.\d", r"\d+ decodes instead of \d+, no draft model\."
    drafted = rf"{number} times as fast \({number} to {number}\), the same text\. {decodes}"
    assert len(re.findall(drafted, output)) == 2
    for word in ("warning", "nconclusive", "interval", "other programs"):  # one page, and calm
        assert word not in result.stdout + result.stderr
    shown = re.findall(r"^  llamabranch ([a-z]+)", result.stdout, re.MULTILINE)
    assert shown == ["speculate", "generate", "chat", "doctor"]
