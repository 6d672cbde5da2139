"""``llamabranch demo``: what it prints on terminals, into a pipe and as JSON, all of it measured.

Most tests run it on the bundled pair, as where SmolLM2 is not installed.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace

import commands
import pytest
from typer.testing import CliRunner

from llamabranch.cli import app, demo
from llamabranch.context.threads import ThreadTuner
from llamabranch.native import ContextHandle, available_cores

HEADINGS = (  # on the bundled pair
    "1. One prompt of",
    "2. Speculative decoding, 4 tokens drafted a round",
    "3. Three endings, ranked by the model",
)
REAL_HEADINGS = (
    "1. One prompt of",
    "2. A function edited",
    "3. A text as JSON under a schema",
    "4. Four answers, ranked by the model",
)
# A smaller demo, in a process of its own.
SMALL = """
import sys
from llamabranch.cli import comparison, demo
from llamabranch.cli.app import main
comparison.MOST_PAIRS = 1
vars(demo).update({!r})
sys.argv[0] = "llamabranch"
main()
"""
BUNDLED = {"MODEL": "", "N_PROMPT": 100, "N_STEPS": 8, "N_TOKENS": 24}
REAL = {  # the weights as they come
    "WEIGHTS": "smollm2-135m", "NOTICE": "A fair.", "N_FORKS": 2, "N_STEPS": 4, "MOST_TOKENS": 16,
}  # fmt: skip


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled pair, as if SmolLM2 were not there."""
    monkeypatch.setattr("llamabranch.cli.demo.MODEL", "")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A smaller demo: fewer tokens, and one pair of timed runs."""
    settings = REAL if request.node.get_closest_marker("smollm2") else BUNDLED
    for name, value in settings.items():
        monkeypatch.setattr(f"llamabranch.cli.demo.{name}", value)
    monkeypatch.setattr("llamabranch.cli.comparison.MOST_PAIRS", 1)


def on_a_terminal(columns: int, settings: dict[str, object]) -> str:
    """Return what a smaller demo writes to a terminal."""
    program = [sys.executable, "-c", SMALL.format(settings), "demo", "--threads", "1"]
    return commands.on_terminal(program, columns)[0]


def test_demo_fits_terminals_of_any_width_and_colours_tokens_by_source() -> None:
    stories = []
    for columns in (60, 80, 140):
        shown = on_a_terminal(columns, BUNDLED)
        assert "\x1b[32m" in shown  # drafted and accepted
        assert "\x1b[33m" in shown  # corrected by the target
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n")
        for heading in HEADINGS:
            assert heading in text
        story = text[text.index("Once upon a time") : text.index("tokens a second")]
        assert max(map(len, text.replace(story, "").splitlines())) <= columns
        assert "├──" in text
        stories.append(story.split("drafted")[0])
    assert len(set(stories)) == 1


def test_demo_in_a_pipe_is_plain_text_and_says_what_to_type_next(small: None) -> None:
    result = commands.run("demo")
    assert result.exit_code == 0, result.stderr
    assert "\x1b" not in result.stdout
    for heading in HEADINGS:
        assert heading in result.stdout
    rows = {line.split("  ")[0]: line.split()[-2:] for line in result.stdout.splitlines() if line}
    assert rows["tokens evaluated"] == ["164", "864"]
    assert re.search(r"^same texts +yes$", result.stdout, re.MULTILINE)
    assert re.search(r"^same text +yes$", result.stdout, re.MULTILINE)
    assert "The K/V cache held 100 tokens before them and 100 after: nothing was copied." in (
        " ".join(result.stdout.split())
    )
    shown = re.findall(r"^  llamabranch ([a-z]+)", result.stdout, re.MULTILINE)
    assert shown == ["generate", "generate", "generate", "chat", "doctor"]


@pytest.mark.skipif(available_cores() < 2, reason="needs two cores")
def test_demo_on_busy_cores_takes_as_many_threads_as_batches_do(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(tuner: ThreadTuner, handle: ContextHandle) -> None:
        if tuner.params.n_threads != 1:  # not given
            tuner.params = replace(tuner.params, n_threads=2, n_threads_batch=1)
            handle.set_threads(2, 1)

    monkeypatch.setattr(ThreadTuner, "tune", busy)
    result = CliRunner().invoke(app, ["demo", "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["n_threads"] == 1


def test_demo_as_json_holds_the_figures_and_a_tree_whose_paths_are_eight_texts(
    bundled: None,
) -> None:
    answer = commands.answer("demo")
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


@pytest.mark.smollm2
def test_demo_on_smollm2_fits_a_narrow_terminal() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_a_terminal(60, REAL)).replace("\r", "\n")
    for heading in REAL_HEADINGS:
        assert heading in text
    assert max(map(len, text.splitlines())) <= 60
    assert "def report(orders, customer):\n    amount = 0.0\n    for order in orders:\n" in text


@pytest.mark.smollm2
def test_demo_on_smollm2_as_json_holds_the_figures(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["llamabranch.hub.catalogue"], "DEFAULT_MODEL", "smollm2-135m")
    answer = commands.answer("demo")
    assert answer["model"] == "smollm2-135m"
    assert answer["forks"]["kv_cells_before_forks"] == answer["forks"]["kv_cells_after_forks"]
    for name in ("edit", "json"):
        figures = answer[name]
        assert figures["verdict"] in ("faster", "slower", "inconclusive", "nothing drafted")
        assert figures["speedup"] == pytest.approx(
            figures["tokens_per_s"] / figures["plain_tokens_per_s"]
        )
    assert answer["json"]["text"].startswith('{"full_name": "')
    assert answer["ranking"][0]["text"] == "Paris"
