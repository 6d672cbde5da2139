"""The examples are short, use only the public package, and their claims are true when they are run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from programs import run_python
from scripts import call, write_script

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
NAMES = [path.stem for path in EXAMPLES]
CLIENTS = ("door_openai", "door_anthropic")  # of a server


@lru_cache
def output(name: str) -> str:
    """Run an example as a user would, and return its output; standard error must be empty."""
    (path,) = (path for path in EXAMPLES if path.stem == name)
    command = [sys.executable, str(path)]
    if name in CLIENTS:
        pytest.importorskip(name.removeprefix("door_"))
        from serving import serving  # skips the test without the extra serve

    with serving() if name in CLIENTS else nullcontext() as running:
        command += [running.url] if running is not None else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def figure(name: str, label: str) -> float:
    """Return the number after "label: " in what an example prints."""
    match = re.search(rf"{re.escape(label)}: ([\d.]+)", output(name))
    assert match, f"{name} prints no {label!r}"
    return float(match[1])


@pytest.mark.parametrize("path", EXAMPLES, ids=NAMES)
def test_example_is_short_and_stands_alone(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    searches = ("particles", "power_sampling", "mcts", "rejection")
    assert len(source.splitlines()) <= (90 if path.stem in searches else 60)
    tree = ast.parse(source)
    assert ast.get_docstring(tree)
    assert source.endswith('\n\nif __name__ == "__main__":\n    main()\n')
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    tops = {module.split(".")[0] for module in modules}
    allowed = {"llamabranch", "numpy", *sys.stdlib_module_names}  # NumPy comes with it
    if path.stem.startswith("door_"):
        allowed |= {"pydantic", path.stem.removeprefix("door_")}
        assert ("llamabranch" in tops) == (path.stem not in CLIENTS)
    assert tops <= allowed


# What they print, whatever the model writes. SmolLM2's text depends on the processor.
SHOWN: dict[str, tuple[str, ...]] = {
    "baseline_autoregressive": (r"\AOnce upon a time",),
    "batched_engine": (r"(?s)^\[0\] .*^\[5\] ", "Same texts as alone: yes"),
    "agent": (r"^ended with '\w+' after \d+ calls\nTokens read: \d+, from the cache: \d+\n",),
    "agents_document": ("(?s)When does it end.*Who pays.*What is the risk",),
    "agents_vote": (r"^\d of 5: ", r"^(no answer: |Answer)"),
    "chat": (r"(?s)(branch .*){3}",),
    **dict.fromkeys(("door_python", *CLIENTS), (r"^Fox\(is_animal=\w+, colour='(red|blue)'\)",)),
    "entropy": (r"(^ +\d+\.\d\d +\d+\.\d\d  .+%.+%.+%.*\n){20}",),
    "fork": (
        r"3 forks of \d+ tokens: 0 new cells", "(?s)(perplexity.*){3}",
        r"sequences: \{\d+: \d+\}$",  # the best one took the parent's place
    ),
    "grammar": (r"(^- the [a-z]{3,7} [a-z]{3,7}\n){3}",),
    "copying": ("the same text every time: yes",),
    "optimized_speculative": (
        "Same text: yes", r"by position in the draft: [\d.]+(, [\d.]+){3}\n",
        r"c = \d+\.\d\d target steps, verifying a draft v = \d+\.\d\d",
    ),
    "session": (r"\AThe old king had three sons\.", "the same tokens every time: yes"),
    "speculative": (r"\AThe quick brown fox",),
    "speculative_kv": (r"\AThe quick brown fox",),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_example_runs_and_prints(name: str) -> None:
    # A door prints little more than what the model writes.
    assert len(output(name).split()) > (1 if name.startswith("door_") else 12)
    for pattern in SHOWN.get(name, ()):
        assert re.search(pattern, output(name), re.MULTILINE), pattern


def test_agent_calls_its_function_and_reads_the_result(tmp_path: Path) -> None:
    """On a model that plays a script; whether SmolLM2 ends its call depends on the processor."""
    (path,) = (path for path in EXAMPLES if path.stem == "agent")
    lines = path.read_text("utf-8").splitlines(keepends=True)
    free = [line for line in lines if "tool_choice=" not in line]  # a script cannot be forced
    assert len(free) == len(lines) - 1
    (tmp_path / "agent.py").write_text("".join(free), "utf-8")
    turns = [call("weather", city="Oslo"), "Yes, it snows."]
    model = write_script(tmp_path / "script.gguf", {"Oslo?": turns})
    text = run_python(tmp_path / "agent.py", model).stdout
    for pattern in (
        r"^\[call\] weather ",
        r"^\[result\] weather ",
        "after 1 calls",
        "read again: 0",
    ):
        assert re.search(pattern, text, re.MULTILINE), (pattern, text)


def rows(name: str, pattern: str) -> list[Any]:
    """Return the groups of the lines of this pattern in what an example prints: text, if there is one."""
    return re.findall(f"^{pattern}$", output(name), re.MULTILINE)


@pytest.mark.parametrize("name", ["speculative", "speculative_kv", "optimized_speculative"])
def test_speculative_loops_count_their_tokens(name: str) -> None:
    drafted, accepted = figure(name, "Tokens drafted"), figure(name, "Tokens accepted")
    rounds, n_tokens = figure(name, "Iterations"), figure(name, "Output tokens")
    assert 0 < accepted <= drafted
    assert figure(name, "Accept rate") == pytest.approx(100 * accepted / drafted, abs=0.06)
    assert rounds < n_tokens, "no decode was saved"
    # Each round yields its accepted tokens and one token of the target; the first may add one.
    assert abs(rounds + accepted - n_tokens) <= 5
    if name == "optimized_speculative":
        assert n_tokens == 128 and drafted <= 4 * rounds
        assert figure(name, "Target decodes") < n_tokens


def test_baseline_decodes_once_a_token_and_drafts_change_no_text() -> None:
    name = "baseline_autoregressive"
    assert output("optimized_speculative").startswith(output(name).split("\n====")[0] + "\n====")
    assert figure(name, "Output tokens") == figure(name, "Target decodes") == 128


def test_records_follow_their_schema() -> None:
    (parsed,) = rows("grammar", "parsed: (.+)")
    record = ast.literal_eval(parsed)
    assert set(record) == {"name", "age", "kind"}
    assert record["kind"] in ("king", "fairy", "wolf")
    beams = re.findall(
        r"(\d+) beams, \d+ decodes:\n +(-[\d.]+) nats  (\{.+\})", output("beam_json")
    )
    assert [int(n) for n, *_ in beams] == [1, 8]
    assert float(beams[0][1]) < float(beams[1][1])  # wider beams find a more probable one
    assert set(ast.literal_eval(beams[1][2])) == {"hero", "place", "is_happy"}


def test_engines_and_chats_share_what_was_read() -> None:
    name = "batched_engine"
    assert 6 * 20 < figure(name, "Output tokens") <= 6 * 40
    assert figure(name, "Target forward passes") < figure(name, "Output tokens") / 3
    assert figure(name, "Prompt tokens shared") > 10
    assert 0 < figure(name, "Accept rate") < 100
    assert figure("chat", "Read") < figure("chat", "Tokens of all prompts") / 5


def test_searches_find_what_they_claim() -> None:
    found = rows("particles", r" \w.+?  +([\d.]+) +([\d.]+) +([\d.]+)")
    assert len(found) == 2
    for exact, masking, steered in [tuple(map(float, row)) for row in found]:
        assert abs(steered - exact) < 0.2 and abs(masking - exact) > 0.5
    samples, power = map(float, rows("power_sampling", r".*mean log p: (-[\d.]+) nats"))
    assert power > samples / 2
    text = rows("rejection", r"A sentence with at most one e: Once upon a time(.*)")[0]
    assert text.count("e") <= 1 and figure("rejection", "Texts drawn") < 200
    n, fewer = [*map(int, rows("vote", r".*: (\d+) texts"))]
    winners = re.findall(r"votes: (\w+) \d+", output("vote"))
    assert n == 32 >= fewer
    assert len(winners) == 2 and len(set(winners)) == 1
    assert figure("mcts", "Texts evaluated") < 1000


def test_a_rule_is_kept() -> None:
    (text,) = rows("constraint", "without an e: Once upon a time(.*)")
    assert text and "e" not in text
