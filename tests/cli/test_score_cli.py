"""``llamabranch score``: the numbers are those of the library, as a table and as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import commands
import pytest
from typer.testing import Result

import llamabranch as lb


def run(*arguments: str, stdin: str | None = None) -> Result:
    return commands.run("score", *arguments, stdin=stdin)


def answer(*arguments: str, stdin: str | None = None) -> dict[str, Any]:
    return commands.answer("score", *arguments, stdin=stdin)


def test_text_is_scored_as_the_library_does(ctx: lb.Context) -> None:
    text = "Once upon a time there was a king."
    found = answer(text, "--top", "2")
    (record,) = found["items"][0]["scores"]
    tokens = ctx.tokenize(text)
    with lb.Branch.start(ctx, tokens[:1]) as branch:
        expected = branch.score(tokens[1:], top=2)
    shown = record["tokens"]
    assert [(t["token"], t["rank"]) for t in shown] == [(s.token, s.rank) for s in expected]
    for one, score in zip(shown, expected, strict=True):
        assert one["logprob"] == pytest.approx(score.logprob)
        assert one["entropy"] == pytest.approx(score.entropy)
        assert [t["token"] for t in one["top"]] == [t for t, _ in score.alternatives]
    total = math.fsum(score.logprob for score in expected)
    assert record["logprob"] == pytest.approx(total)
    assert record["perplexity"] == pytest.approx(math.exp(-total / len(expected)))
    assert found["total"] == {
        "n_tokens": len(expected), "logprob": record["logprob"], "perplexity": record["perplexity"]
    }  # fmt: skip


def test_continuations_share_their_context(ctx: lb.Context) -> None:
    found = answer("--context", "The king", " said", " computer")
    likely, unlikely = (record["logprob"] for record in found["items"][0]["scores"])
    with lb.Branch.start(ctx, "The king") as branch:
        (score,) = branch.score(ctx.tokenize(" said", add_special=False))
    assert likely == pytest.approx(score.logprob)
    assert unlikely < likely


def test_lines_of_a_file_are_scored(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "text": "The wolf"},
        {"context": "The king", "continuations": [" said", " wept"]},
    ]
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    found = answer("--input", str(path))
    assert found == answer("--input", "-", stdin=path.read_text(encoding="utf-8"))
    items = found["items"]
    assert [item["id"] for item in items] == ["a", "2"]
    assert [len(item["scores"]) for item in items] == [1, 2]
    table = run("--input", str(path)).stdout
    assert "[a]" in table
    assert "perplexity" in table


def test_table_has_a_row_for_each_token(ctx: lb.Context) -> None:
    result = run("Once upon a time", "--top", "1")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:4] == ["token", "logprob", "rank", "entropy"]
    assert len(lines) == 1 + len(ctx.tokenize("Once upon a time")) - 1 + 3


@pytest.mark.parametrize(
    "line",
    ["[]", "{", '{"text": 5}', '{"context": "a"}', '{"context": "a", "continuations": [5]}',
     '{"text": "a", "x": 1}', '{"text": "a", "context": "b"}', '{"text": "\\ud83d"}',
     '{"text": "a", "id": true}', '{"text": "a", "id": [1]}'],
)  # fmt: skip
def test_bad_line_is_named(line: str) -> None:
    result = run("--input", "-", stdin='{"text": "a b"}\n' + line)
    assert result.exit_code == 2
    assert "line 2: invalid item" in result.stderr
    assert result.stdout == ""


def test_a_bad_line_is_named_before_a_model_loads(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('\ufeff{"text": "a"}\n[]\n', encoding="utf-8")
    result = run("--input", str(path), "--target", "no-such-model")
    assert result.exit_code == 2
    assert "line 2: invalid item" in result.stderr


def test_best_prints_the_choice_that_the_model_prefers_first(tmp_path: Path) -> None:
    given = ("--context", "The king's daughter was very", " telephone", " beautiful")
    result = run(*given, "--best", "mean")
    assert result.exit_code == 0, result.stderr
    first, second = result.stdout.splitlines()[:2]
    assert first.startswith("choice") and second.startswith(" beautiful")
    items = answer(*given, "--best", "sum")["items"]
    (found,) = items
    assert (found["choice"], found["index"], found["method"]) == (" beautiful", 1, "sum")
    assert found["scores"][1] == pytest.approx(sum(found["logprobs"][1]))
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps({"context": "The king", "continuations": [" said", " zebra"]}))
    assert "[" not in run("--input", str(path), "--best", "bytes").stdout
