"""Options by the names of llama.cpp, vLLM and the papers; prompts from files; lists of numbers; help."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from llamabranch import hub
from llamabranch.cli import app
from llamabranch.cli.options import DRAFT_LENGTH_NAMES

TARGET, DRAFT = str(hub.resolve(hub.BUNDLED_TARGET)), str(hub.resolve(hub.BUNDLED_DRAFT))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def run_json(*arguments: str) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


def commands() -> dict[str, typer.core.TyperCommand]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_command_line_of_llama_cpp_gives_the_text_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("The old king\n")
    ours = run_json(
        "speculate", "The old king", "--target", TARGET, "--draft", DRAFT, "--draft-length", "3",
        "--max-tokens", "12", "--temperature", "0.7", "--seed", "5", "--n-ctx", "256",
        "--threads", "1", "--gpu-layers", "0",
    )  # fmt: skip
    short = run_json(
        "speculate", "-p", "The old king", "-m", TARGET, "-md", DRAFT, "--draft-max", "3",
        "-n", "12", "--temp", "0.7", "-s", "5", "-c", "256", "-t", "1", "-ngl", "0",
    )  # fmt: skip
    long = run_json(
        "speculate", "--file", str(path), "--model", TARGET, "--model-draft", DRAFT,
        "--spec-draft-n-max", "3", "--n-predict", "12", "--temp", "0.7", "--seed", "5",
        "--ctx-size", "256", "--threads", "1", "--n-gpu-layers", "0",
    )  # fmt: skip
    assert ours["tokens"] == short["tokens"] == long["tokens"]


@pytest.mark.parametrize("name", sorted(commands()))
def test_a_short_option_means_the_same_in_every_command(name: str) -> None:
    meant: dict[str, str] = {}
    for command in commands().values():
        for param in command.params:
            for option in param.opts:
                if not option.startswith("--"):
                    meant.setdefault(option, param.opts[0])
    alike = {"--prompts": "--prompt", "--prompt": "--prompt"}
    for param in commands()[name].params:
        for option in param.opts:
            if option.startswith("-") and not option.startswith("--"):
                first, here = meant[option], param.opts[0]
                assert alike.get(here, here) == alike.get(first, first), option


@pytest.mark.parametrize("name", DRAFT_LENGTH_NAMES)
def test_draft_length_has_one_meaning_under_every_name(name: str) -> None:
    table = run_json("theory", name, "3")["table"]
    assert isinstance(table, list)
    assert {row["draft_length"] for row in table} == {3}


def test_a_file_is_one_prompt_of_generate(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Once upon\na time\n\n")
    arguments = ("-n", "2", "--draft", "none", "-t", "1", "--n-ctx", "256")
    answer = run_json("generate", "-p", "A", "-f", str(path), *arguments)
    results = answer["results"]
    assert isinstance(results, list)
    prompts = {result["prompt"] for result in results}
    assert prompts == {"A", "Once upon\na time\n"}  # one newline is taken off, as llama.cpp does


def test_a_prompt_is_given_once() -> None:
    result = run("speculate", "a", "-p", "b")
    assert result.exit_code == 2
    assert "more than one prompt" in result.stderr


def test_select_takes_all_arguments_as_choices_after_a_prompt_option() -> None:
    arguments = ("-t", "1", "-c", "256")
    first = run_json("select", "The king was", " old", " ill", *arguments)
    other = run_json("select", " old", " ill", "-p", "The king was", *arguments)
    assert {**first, "stats": None} == {**other, "stats": None}  # they hold times
    assert run("select", "The king was").exit_code == 2


def test_score_takes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time\n")
    arguments = ("-t", "1", "-c", "256")
    assert run_json("score", "-f", str(path), *arguments) == run_json(
        "score", "Once upon a time", *arguments
    )


def test_theory_takes_lists() -> None:
    listed = run_json("theory", "-k", "4,8", "-a", "0.6,0.9", "--c", "0.1,0.3")
    repeated = run_json(
        "theory", "-k", "4", "-k", "8", "-a", "0.6", "-a", "0.9", "--c", "0.1", "--c", "0.3"
    )
    assert listed == repeated
    result = run("theory", "-k", "4,x")
    assert result.exit_code == 2
    assert "--draft-length" in result.stderr


def test_theory_takes_what_bench_measured(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    lengths = [{"draft_length": length} for length in (1, 2, "auto")]
    path.write_text(
        json.dumps({"a": 0.5, "c": 0.25, "v": {"1": 1.0, "3": 1.5}, "lengths": lengths})
    )
    measured = run_json("theory", str(path))
    given = run_json(
        "theory", "-a", "0.5", "--c", "0.25", "-k", "1,2", "--verify-cost", "1:1,3:1.5"
    )
    assert measured["table"] == given["table"] and measured["best"] == given["best"]
    table = run_json("theory", str(path), "-a", "0.9")["table"]
    assert isinstance(table, list)
    assert {row["acceptance"] for row in table} == {0.9}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"a": null, "c": 0.1, "v": {}, "lengths": []}', "no JSON"]
)
def test_theory_refuses_other_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    result = run("theory", str(path))
    assert result.exit_code == 2
    assert "bench" in result.stderr


def test_a_number_as_draft_is_refused_with_the_option_to_use() -> None:
    result = run("speculate", "--draft", "16")
    assert result.exit_code == 2
    assert "--draft-length 16" in result.stderr


@pytest.mark.parametrize("width", ["60", "120"])
def test_help_is_wrapped_at_the_width_of_the_terminal(
    width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("TERMINAL_WIDTH", width)
    shown = run("speculate", "--help").stdout
    above = shown.split("╭")[0]
    lines = [line.rstrip() for line in above.splitlines()]
    longest = max(map(len, lines))
    assert longest <= int(width)
    # A line that is not the last of its paragraph had no room for the next word.
    for line, after in pairwise(lines):
        if line.strip() and after.strip():
            assert len(line) + 1 + len(after.split()[0]) >= int(width) - 1


def test_help_names_one_long_name_and_lists_the_others() -> None:
    shown = run("speculate", "--help").stdout
    options, others = shown.split("Other names of these options:")
    for name in ("--gamma", "--ctx-size", "--n-predict", "--temp"):
        assert name in others.split()[-1] or f"{name}," in others
        assert name not in options.replace("--temperature", "").split()
