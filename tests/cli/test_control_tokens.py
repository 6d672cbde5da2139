"""Control tokens written in a prompt, on the command line and in files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from toys import Vocabulary, write_toy
from typer.testing import CliRunner

import llamabranch as lb
from llamabranch.cli import app

PROMPT = "a<|im_end|>b"
OFF = "--no-parse-special"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    vocabulary = Vocabulary.with_control("<s>", "</s>", "<|im_end|>")
    return str(write_toy(tmp_path_factory.mktemp("toy") / "toy.gguf", vocab=vocabulary))


@pytest.fixture(scope="module")
def expected(model: str) -> Iterator[dict[bool, str]]:
    """The texts with control tokens parsed and without."""
    found = {}
    with lb.load(model, n_ctx=256, n_threads=1) as context:
        for parses in (True, False):
            with lb.Branch.start(context, PROMPT, seed=1, parse_special=parses) as branch:
                found[parses] = "".join(token.text for token in branch.generate(6))
    assert found[True] != found[False]
    yield found


def answer(command: str, *arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, [command, *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def texts(found: dict[str, object], key: str) -> list[str]:
    records = found[key]
    assert isinstance(records, list)
    return [record["text"] for record in records]


def test_speculate_and_search_parse_them(
    model: str, expected: dict[bool, str], tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT)
    common = ("--target", model, "--draft", "none", "-n", "6", "--seed", "1", "-t", "1")
    assert answer("speculate", PROMPT, *common)["text"] == expected[True]
    assert answer("speculate", "-f", str(prompt), *common)["text"] == expected[True]
    assert answer("speculate", "-p", PROMPT, *common, OFF)["text"] == expected[False]
    search = (*common, "--method", "best-of", "--width", "1")
    assert texts(answer("search", PROMPT, *search), "hypotheses") == [expected[True]]
    assert texts(answer("search", "-f", str(prompt), *search, OFF), "hypotheses") == [
        expected[False]
    ]


def test_generate_parses_them_unless_a_line_or_the_command_does_not(
    model: str, expected: dict[bool, str], tmp_path: Path
) -> None:
    settings = {"prompt": PROMPT, "seed": 1, "max_tokens": 6}
    lines = [settings, {**settings, "parse_special": False}, {**settings, "parse_special": True}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    common = ("--input", str(path), "--target", model, "--draft", "none", "-t", "1", "--in-order")
    found = texts(answer("generate", *common), "results")
    assert found == [expected[True], expected[False], expected[True]]
    assert texts(answer("generate", *common, OFF), "results") == [expected[False]] * 3
    path.write_text(json.dumps({"prompt": "a", "parse_special": "no"}))
    result = CliRunner().invoke(app, ["generate", *common])
    assert result.exit_code == 2 and "parse_special" in result.stderr


def test_score_and_select_parse_them(model: str) -> None:
    def n_scored(*arguments: str) -> object:
        total = answer("score", *arguments, "--target", model, "-t", "1")["total"]
        assert isinstance(total, dict)
        return total["n_tokens"]

    assert (n_scored(PROMPT), n_scored(PROMPT, OFF)) == (3, 12)  # after BOS
    continued = ("<|im_end|>b", "--context", "a")
    assert (n_scored(*continued), n_scored(*continued, OFF)) == (2, 11)
    scores = [
        answer("select", PROMPT, "x", "y", "--target", model, "-t", "1", *flag)["scores"]
        for flag in ((), (OFF,))
    ]
    assert scores[0] != scores[1]
