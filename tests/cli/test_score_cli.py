"""``llamabranch score``: the numbers are those of the library, as a table and as JSON."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import commands
import pytest
from typer.testing import Result

import llamabranch as lb


def run(*arguments: object) -> Result:
    return commands.run("score", *arguments)


def answer(*arguments: object) -> dict[str, Any]:
    return commands.answer("score", *arguments)


def test_text_is_scored_as_the_library_does(ctx: lb.Context) -> None:
    text = "Once upon a time there was a king."
    report = answer(text, "--top", "2")
    (record,) = report["items"][0]["scores"]
    tokens = ctx.tokenize(text)
    with lb.Branch.start(ctx, tokens[:1]) as branch:
        expected = branch.score(tokens[1:], top=2)
    shown = record["tokens"]
    assert [(t["token"], t["rank"]) for t in shown] == [(s.token, s.rank) for s in expected]
    for entry, score in zip(shown, expected, strict=True):
        assert entry["logprob"] == pytest.approx(score.logprob)
        assert entry["entropy"] == pytest.approx(score.entropy)
        assert [t["token"] for t in entry["top"]] == [t for t, _ in score.alternatives]
    total = math.fsum(score.logprob for score in expected)
    assert record["logprob"] == pytest.approx(total)
    assert record["perplexity"] == pytest.approx(math.exp(-total / len(expected)))
    assert report["total"] == {
        "n_tokens": len(expected), "logprob": record["logprob"], "perplexity": record["perplexity"]
    }  # fmt: skip


def test_continuations_share_their_context(ctx: lb.Context) -> None:
    report = answer("--context", "The king", " said", " computer")
    likely, unlikely = (record["logprob"] for record in report["items"][0]["scores"])
    with lb.Branch.start(ctx, "The king") as branch:
        (score,) = branch.score(ctx.tokenize(" said", add_special=False))
    assert likely == pytest.approx(score.logprob)
    assert unlikely < likely


def test_texts_of_files_are_scored_with_a_total(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("The wolf said\n", encoding="utf-8")
    report = answer("The king wept", "--file", path)
    assert [item["id"] for item in report["items"]] == ["0", "1"]
    records = [record for item in report["items"] for record in item["scores"]]
    assert [record["text"] for record in records] == ["The king wept", "The wolf said"]
    assert report["total"]["logprob"] == pytest.approx(sum(record["logprob"] for record in records))
    table = run("The king wept", "--file", path).stdout
    assert "[1]" in table and "perplexity" in table
    path.write_text("The wolf said that the king was not at home.\nHe ran.", encoding="utf-8")
    assert "\nThe wolf said that the king was not a..." in run("--file", path).stdout


def test_table_has_a_row_for_each_token(ctx: lb.Context) -> None:
    result = run("Once upon a time", "--top", "1")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    columns = ["token", "text", "logprob", "rank", "entropy"]
    assert lines[0].split() == [*columns, "most", "probable"]
    assert run("Once upon a time").stdout.splitlines()[0].split() == columns
    end = lines.index("")
    assert end == 1 + len(ctx.tokenize("Once upon a time")) - 1
    assert lines[end + 1].endswith("worst rank")
    worst = max(int(re.findall(r"-\d+\.\d+ +(\d+) ", line)[0]) for line in lines[1:end])
    assert int(lines[end + 2].split()[-1]) == worst


def test_best_prints_the_choice_that_the_model_prefers_first() -> None:
    arguments = ("--context", "The king's daughter was very", " telephone", " beautiful")
    result = run(*arguments, "--best", "mean")
    assert result.exit_code == 0, result.stderr
    first, second = result.stdout.splitlines()[:2]
    assert first.startswith("choice") and second.startswith(" beautiful")
    (item,) = answer(*arguments, "--best", "sum")["items"]
    assert (item["choice"], item["index"], item["method"]) == (" beautiful", 1, "sum")
    assert item["scores"][1] == pytest.approx(sum(item["logprobs"][1]))
    assert "[" not in run(*arguments, "--best", "bytes").stdout


def test_a_text_of_one_token_says_why_it_has_no_figures() -> None:
    shown = run(" the").stdout
    assert "'the' is a single token" in shown and "--context" in shown
    both = run(" the", "Once upon").stdout
    assert both.count("single token") == 1 and "worst rank" in both
    assert answer(" the")["items"][0]["scores"][0]["n_tokens"] == 0
    several = run(" the", " the").stdout
    assert "0 tokens, log-probability 0.000 nats, perplexity -" in several


def test_best_says_nothing_of_decodes_that_it_did_not_need() -> None:
    arguments = ("--context", "The king was", " old", " ill", "--best", "mean")
    assert "decodes" not in run(*arguments).stdout
    assert "decodes" in run(*arguments, "-v").stdout
