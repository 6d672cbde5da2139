"""The examples: short, over the public package only, and true when they are run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
NAMES = [path.stem for path in EXAMPLES]


@lru_cache
def output(name: str) -> str:
    """Run an example as a user would, and return its output; standard error must be empty."""
    (path,) = (path for path in EXAMPLES if path.stem == name)
    command = [sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def figure(name: str, label: str) -> float:
    """Return the number after "label: " in what an example prints."""
    found = re.search(rf"{re.escape(label)}: ([\d.]+)", output(name))
    assert found, f"{name} prints no {label!r}"
    return float(found[1])


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 9


@pytest.mark.parametrize("path", EXAMPLES, ids=NAMES)
def test_example_is_short_and_stands_alone(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 60
    tree = ast.parse(source)
    assert ast.get_docstring(tree)
    assert "main" in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert source.endswith('\n\nif __name__ == "__main__":\n    main()\n')
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add((node.module or "").split(".")[0])
    assert modules <= {"llamabranch", "numpy", *sys.stdlib_module_names}  # comes with it


@pytest.mark.parametrize("name", NAMES)
def test_example_runs_and_prints(name: str) -> None:
    assert len(output(name).split()) > 20


@pytest.mark.parametrize("name", ["speculative", "speculative_kv"])
def test_speculative_loops_count_their_tokens(name: str) -> None:
    assert output(name).startswith("The quick brown fox")
    drafted, accepted = figure(name, "Tokens drafted"), figure(name, "Tokens accepted")
    iterations, n_tokens = figure(name, "Iterations"), figure(name, "Output tokens")
    assert 0 < accepted <= drafted
    assert figure(name, "Accept rate") == pytest.approx(100 * accepted / drafted, abs=0.06)
    # Each round yields its accepted tokens and one of the target's own; the first may add one.
    assert abs(iterations + accepted - n_tokens) <= 5
    assert iterations < n_tokens, "no decode was saved"


def test_fork_copies_no_cells() -> None:
    shown = output("fork")
    assert re.search(r"3 forks of \d+ tokens: 0 new cells", shown)
    assert shown.count("perplexity") == 3
    assert re.search(
        r"sequences: \{\d+: \d+\}$", shown, re.MULTILINE
    )  # the best one took the parent's place


def test_entropy_shows_surprisal_and_alternatives() -> None:
    rows = re.findall(r"^ +(\d+\.\d\d) +(\d+\.\d\d)  (.+)$", output("entropy"), re.MULTILINE)
    assert len(rows) == 20
    assert all(0 <= float(entropy) <= 12 and rest.count("%") == 3 for entropy, _, rest in rows)


def test_grammar_example_follows_its_grammar_and_schema() -> None:
    shown = output("grammar")
    assert len(re.findall(r"^- the [a-z]{3,7} [a-z]{3,7}$", shown, re.MULTILINE)) == 3
    found = re.search(r"^parsed: (.+)$", shown, re.MULTILINE)
    assert found
    record = ast.literal_eval(found[1])
    assert set(record) == {"name", "age", "kind"}
    assert record["kind"] in ("king", "fairy", "wolf")


def test_baseline_and_speculative_example_generate_the_same_text() -> None:
    baseline, speculative = output("baseline_autoregressive"), output("optimized_speculative")
    text = baseline.split("\n====")[0]
    assert text.startswith("Once upon a time")
    assert speculative.startswith(text + "\n====")
    assert "Same text: yes" in speculative


def test_baseline_decodes_once_a_token() -> None:
    name = "baseline_autoregressive"
    assert figure(name, "Output tokens") == figure(name, "Target decodes") == 128
    speed, time_ms = figure(name, "Tokens a second"), figure(name, "Time a token")
    assert speed > 0
    # Printed with one and with three digits: on a busy machine the speed is small, its rounding is not.
    slowest, fastest = max(0.001, speed - 0.051), speed + 0.051
    assert 1e3 / fastest - 0.001 <= time_ms <= 1e3 / slowest + 0.001


def test_speculative_example_measures_what_it_reports() -> None:
    name = "optimized_speculative"
    drafted, accepted = figure(name, "Tokens drafted"), figure(name, "Tokens accepted")
    rounds, n_tokens = figure(name, "Iterations"), figure(name, "Output tokens")
    assert n_tokens == 128
    assert 0 < accepted < drafted <= 4 * rounds
    assert figure(name, "Accept rate") == pytest.approx(100 * accepted / drafted, abs=0.06)
    assert figure(name, "Tokens a round") == pytest.approx(1 + accepted / rounds, abs=0.006)
    assert figure(name, "Target decodes") < n_tokens
    found = re.search(r"by position in the draft: ([\d., ]+)\n", output(name))
    assert found
    assert len(found[1].split(", ")) == 4
    speeds = re.search(r"Tokens a second: ([\d.]+) speculative, ([\d.]+) plain", output(name))
    assert speeds
    ratio = float(speeds[1]) / float(speeds[2])
    assert figure(name, "Speedup") == pytest.approx(ratio, abs=0.01)
    assert re.search(r"c = \d+\.\d\d target steps, verifying a draft v = \d+\.\d\d", output(name))


def test_session_generates_the_same_with_and_without_a_drafter() -> None:
    shown = output("session")
    assert shown.startswith("The old king had three sons.")
    rows = re.findall(r"^(\w[\w ]+?) +(\d+) +(\d+) +(\d+)/(\d+)  (\w+)$", shown, re.MULTILINE)
    ways = {way: tuple(map(int, counts)) for way, *counts, _ in rows}
    assert list(ways) == ["standard", "speculative", "only the second half"]
    assert ways["standard"][2:] == (0, 0)
    assert ways["speculative"][1] < ways["only the second half"][1] < ways["standard"][1]
    assert len({tokens for tokens, *_ in ways.values()}) == 1
    assert "the same tokens every time: yes" in shown


def test_lookup_copies_and_saves_decodes() -> None:
    shown = output("lookup")
    pattern = r"^(\w[\w, ]+?) +(\d+) +(\d+) +(\d+) +(\d+) +\d+$"
    rows = re.findall(pattern, shown, re.MULTILINE)
    ways = {way: tuple(map(int, counts)) for way, *counts in rows}
    assert list(ways) == ["no drafter", "lookup", "suffix", "suffix, then model"]
    decodes = {way: counts[3] for way, counts in ways.items()}
    assert ways["no drafter"][:3] == (0, 0, 0)
    for way in ("lookup", "suffix", "suffix, then model"):
        assert 0 < ways[way][2] <= ways[way][1]
        assert decodes[way] < decodes["no drafter"]
    assert "the same text every time: yes" in shown


def test_batched_engine_generates_what_each_prompt_gets_alone() -> None:
    name = "batched_engine"
    shown = output(name)
    assert re.findall(r"^\[(\d)\] ", shown, re.MULTILINE) == list("012345")
    assert "Same texts as alone: yes" in shown
    assert 6 * 20 < figure(name, "Output tokens") <= 6 * 40
    assert figure(name, "Target forward passes") < figure(name, "Output tokens") / 3
    assert figure(name, "Prompt tokens shared") > 10
    assert 0 < figure(name, "Accept rate") < 100


def test_particles_follow_the_model_where_masking_does_not() -> None:
    rows = re.findall(r"^( \w.+?)  +([\d.]+) +([\d.]+) +([\d.]+)$", output("smc"), re.MULTILINE)
    assert len(rows) == 2
    for _, exact, masking, steered in rows:
        assert abs(float(steered) - float(exact)) < 0.2
        assert abs(float(masking) - float(exact)) > 0.5


def test_wider_beams_find_a_more_probable_record() -> None:
    shown = output("beam_json")
    found = re.findall(r"(\d+) beams, \d+ decodes:\n +(-[\d.]+) nats  (\{.+\})", shown)
    assert [int(beams) for beams, *_ in found] == [1, 8]
    assert float(found[0][1]) < float(found[1][1])
    assert set(ast.literal_eval(found[1][2])) == {"hero", "place", "is_happy"}


def test_votes_that_stop_need_fewer_texts_for_the_same_winner() -> None:
    shown = output("vote")
    counts = [int(n) for n in re.findall(r": (\d+) texts$", shown, re.MULTILINE)]
    winners = re.findall(r"votes: (\w+) \d+", shown)
    assert 32 == counts[0] >= counts[1] >= counts[2] and counts[2] < 32
    assert winners[0] == winners[1] == winners[2]


def test_the_puzzle_is_solved_by_few_texts() -> None:
    assert "The number of the lock is 7203" in output("puzzle")
    assert figure("puzzle", "Texts evaluated") < 1000


def test_turn_of_the_chat_reads_only_what_is_new() -> None:
    assert figure("chat", "Read") < figure("chat", "Tokens of all prompts") / 5
    assert output("chat").count("branch ") == 3


def test_a_rule_is_kept_in_three_ways() -> None:
    texts = [line.split(": ", 1)[1] for line in output("constraint").splitlines() if "Once" in line]
    assert len(texts) == 3
    assert all("e" not in text.removeprefix("Once upon a time") for text in texts[:2])
    assert "cat" in texts[2]
