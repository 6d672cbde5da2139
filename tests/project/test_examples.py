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


# What they print, whatever the numbers are.
SHOWN: dict[str, tuple[str, ...]] = {
    "baseline_autoregressive": (r"\AOnce upon a time",),
    "batched_engine": (r"(?s)^\[0\] .*^\[5\] ", "Same texts as alone: yes"),
    "chat": (r"(?s)(branch .*){3}",),
    "fork": (
        r"3 forks of \d+ tokens: 0 new cells", "(?s)(perplexity.*){3}",
        r"sequences: \{\d+: \d+\}$",  # the best one took the parent's place
    ),
    "grammar": (r"(^- the [a-z]{3,7} [a-z]{3,7}\n){3}",),
    "lookup": ("the same text every time: yes",),
    "optimized_speculative": (
        "Same text: yes", r"by position in the draft: [\d.]+(, [\d.]+){3}\n",
        r"c = \d+\.\d\d target steps, verifying a draft v = \d+\.\d\d",
    ),
    "puzzle": ("The number of the lock is 7203",),
    "session": (r"\AThe old king had three sons\.", "the same tokens every time: yes"),
    "speculative": (r"\AThe quick brown fox",),
    "speculative_kv": (r"\AThe quick brown fox",),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_example_runs_and_prints(name: str) -> None:
    assert len(output(name).split()) > 20
    for pattern in SHOWN.get(name, ()):
        assert re.search(pattern, output(name), re.MULTILINE), pattern


@pytest.mark.parametrize("name", ["speculative", "speculative_kv"])
def test_speculative_loops_count_their_tokens(name: str) -> None:
    drafted, accepted = figure(name, "Tokens drafted"), figure(name, "Tokens accepted")
    iterations, n_tokens = figure(name, "Iterations"), figure(name, "Output tokens")
    assert 0 < accepted <= drafted
    assert figure(name, "Accept rate") == pytest.approx(100 * accepted / drafted, abs=0.06)
    # Each round yields its accepted tokens and one of the target's own; the first may add one.
    assert abs(iterations + accepted - n_tokens) <= 5
    assert iterations < n_tokens, "no decode was saved"


def test_entropy_shows_surprisal_and_alternatives() -> None:
    rows = re.findall(r"^ +(\d+\.\d\d) +(\d+\.\d\d)  (.+)$", output("entropy"), re.MULTILINE)
    assert len(rows) == 20
    assert all(0 <= float(entropy) <= 12 and rest.count("%") == 3 for entropy, _, rest in rows)


def test_grammar_example_follows_its_schema() -> None:
    found = re.search(r"^parsed: (.+)$", output("grammar"), re.MULTILINE)
    assert found
    record = ast.literal_eval(found[1])
    assert set(record) == {"name", "age", "kind"}
    assert record["kind"] in ("king", "fairy", "wolf")


def test_baseline_and_speculative_example_generate_the_same_text() -> None:
    baseline, speculative = output("baseline_autoregressive"), output("optimized_speculative")
    assert speculative.startswith(baseline.split("\n====")[0] + "\n====")


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
    speeds = re.search(r"Tokens a second: ([\d.]+) speculative, ([\d.]+) plain", output(name))
    assert speeds
    ratio = float(speeds[1]) / float(speeds[2])
    assert figure(name, "Speedup") == pytest.approx(ratio, abs=0.01)


def test_session_generates_the_same_with_and_without_a_drafter() -> None:
    pattern = r"^(\w[\w ]+?) +(\d+) +(\d+) +(\d+)/(\d+)  (\w+)$"
    rows = re.findall(pattern, output("session"), re.MULTILINE)
    ways = {way: tuple(map(int, counts)) for way, *counts, _ in rows}
    assert list(ways) == ["standard", "speculative", "only the second half"]
    assert ways["standard"][2:] == (0, 0)
    assert ways["speculative"][1] < ways["only the second half"][1] < ways["standard"][1]
    assert len({tokens for tokens, *_ in ways.values()}) == 1


def test_lookup_copies_and_saves_decodes() -> None:
    pattern = r"^(\w[\w, ]+?) +(\d+) +(\d+) +(\d+) +(\d+) +\d+$"
    rows = re.findall(pattern, output("lookup"), re.MULTILINE)
    ways = {way: tuple(map(int, counts)) for way, *counts in rows}
    assert list(ways) == ["no drafter", "lookup", "suffix", "suffix, then model"]
    decodes = {way: counts[3] for way, counts in ways.items()}
    assert ways["no drafter"][:3] == (0, 0, 0)
    for way in ("lookup", "suffix", "suffix, then model"):
        assert 0 < ways[way][2] <= ways[way][1]
        assert decodes[way] < decodes["no drafter"]


def test_batched_engine_generates_what_each_prompt_gets_alone() -> None:
    name = "batched_engine"
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
    assert figure("puzzle", "Texts evaluated") < 1000


def test_turn_of_the_chat_reads_only_what_is_new() -> None:
    assert figure("chat", "Read") < figure("chat", "Tokens of all prompts") / 5


def test_a_rule_is_kept_in_three_ways() -> None:
    texts = [line.split(": ", 1)[1] for line in output("constraint").splitlines() if "Once" in line]
    assert len(texts) == 3
    assert all("e" not in text.removeprefix("Once upon a time") for text in texts[:2])
    assert "cat" in texts[2]
