"""``llamabranch demo``: what it prints on terminals, into a pipe and as JSON, all of it measured."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from typer.testing import CliRunner, Result

from llamabranch.cli import app, demo

HEADINGS = (
    "1. One prompt of",
    "2. Speculative decoding, 4 tokens drafted a round",
    "3. Three endings, ranked by the model",
)
# A smaller demo, in a process of its own.
SMALL = """
import sys
from llamabranch.cli import compare, demo
from llamabranch.cli.app import main
demo.N_PROMPT, demo.N_STEPS, demo.N_TOKENS, compare.MOST_PAIRS = 100, 8, 24, 1
sys.argv[0] = "llamabranch"
main()
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller demo: fewer tokens, and one pair of timed runs."""
    monkeypatch.setattr("llamabranch.cli.demo.N_PROMPT", 100)
    monkeypatch.setattr("llamabranch.cli.demo.N_STEPS", 8)
    monkeypatch.setattr("llamabranch.cli.demo.N_TOKENS", 24)
    monkeypatch.setattr("llamabranch.cli.compare.MOST_PAIRS", 1)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", "--threads", "1", *arguments])


def on_a_terminal(columns: int) -> str:
    """Return what a smaller demo writes to a terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    with subprocess.Popen(
        [sys.executable, "-c", SMALL, "demo", "--threads", "1"],
        stdin=follower, stdout=follower, stderr=follower, env=environment,
    ) as process:  # fmt: skip
        os.close(follower)
        shown = b""
        while True:
            try:
                part = os.read(leader, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
    os.close(leader)
    assert process.returncode == 0, shown
    return shown.decode().replace("\r\n", "\n")


def test_demo_fits_terminals_of_any_width_and_colours_tokens_by_source() -> None:
    stories = []
    for columns in (60, 80, 140):
        shown = on_a_terminal(columns)
        assert "\x1b[32m" in shown  # drafted and accepted
        assert "\x1b[33m" in shown  # corrected by the target
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n")
        for heading in HEADINGS:
            assert heading in text
        assert max(map(len, text.splitlines())) <= columns
        assert "├──" in text
        stories.append(text[text.index("Once upon a time") : text.index("position in the draft")])
    assert len({story.strip().count("\n") for story in stories}) > 1
    assert len({tuple(story.split()) for story in stories}) == 1  # no word is broken


def test_demo_in_a_pipe_is_plain_text_and_says_what_to_type_next(small: None) -> None:
    result = run()
    assert result.exit_code == 0, result.stderr
    assert "\x1b" not in result.stdout
    for heading in HEADINGS:
        assert heading in result.stdout
    rows = {line.split("  ")[0]: line.split()[-2:] for line in result.stdout.splitlines() if line}
    assert rows["tokens evaluated"] == ["164", "864"]
    assert re.search(r"^same texts +yes$", result.stdout, re.MULTILINE)
    assert "The K/V cache held 100 tokens before them and 100 after: nothing was copied." in (
        result.stdout
    )
    assert "the same text as plain decoding" in result.stdout
    commands = re.findall(r"^  llamabranch ([a-z]+)", result.stdout, re.MULTILINE)
    assert commands == ["speculate", "speculate", "generate", "bench", "doctor"]


def test_demo_as_json_holds_the_figures_and_a_tree_whose_paths_are_eight_texts() -> None:
    result = run("--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    forks = answer["forks"]
    assert forks["n_prompt"] == 500
    assert forks["same_texts"] is True
    assert forks["kv_cells_before_forks"] == forks["kv_cells_after_forks"] == 500
    together, alone = forks["together"], forks["one_by_one"]
    assert together["tokens_evaluated"] == 500 + 8 * demo.N_STEPS
    assert alone["tokens_evaluated"] == 8 * (500 + demo.N_STEPS)
    assert forks["speedup"] == pytest.approx(alone["seconds"] / together["seconds"])

    def leaves(node: dict[str, object]) -> int:
        children = node["children"]
        assert isinstance(children, list)
        assert 0 < float(str(node["probability"])) <= 1
        return sum(map(leaves, children)) or 1

    assert 1 < leaves(forks["tree"]) <= 8
    drafts = answer["speculative"]
    assert drafts["same_text"] is True
    assert drafts["stats"]["num_draft_tokens"] > 0
    assert drafts["why"]
    found = [each["perplexity"] for each in answer["ranking"]]
    assert found == sorted(found)
    assert all(math.isfinite(each) for each in found)
    assert "tax reports" in answer["ranking"][-1]["text"]
