"""``llamabranch score``: the numbers are those of the library, as a table and as JSON."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from commands import answer, run, said_by

import llamabranch as lb


def test_text_is_scored_as_the_library_does(ctx: lb.Context) -> None:
    text = "Once upon a time there was a king."
    (record,) = answer("score", text, "--exact")["scores"]
    tokens = ctx.tokenize(text)
    with lb.Branch.start(ctx, tokens[:1]) as branch:
        expected = branch.score(tokens[1:])
    shown = record["tokens"]
    assert [(t["token"], t["rank"]) for t in shown] == [(s.token, s.rank) for s in expected]
    for entry, score in zip(shown, expected, strict=True):
        assert entry["logprob"] == pytest.approx(score.logprob)
        assert entry["entropy"] == pytest.approx(score.entropy)
    total = math.fsum(score.logprob for score in expected)
    assert record["logprob"] == pytest.approx(total)
    assert record["perplexity"] == pytest.approx(math.exp(-total / len(expected)))
    first = ctx.detokenize(tokens[:1])
    assert record["given"] == {"token": tokens[0], "text": first}
    lines = run("score", text, "--exact").stdout.splitlines()
    assert lines[0].split() == ["token", "text", "logprob", "rank", "entropy"]
    assert lines[1].split() == [str(tokens[0]), repr(first), "given"]
    perplexity, logprob = f"{record['perplexity']:.4f}", f"{record['logprob']:.4f}"
    assert lines[-1].split() == [f"{len(expected)}", "tokens", "perplexity", perplexity, logprob]
    assert len(lines) == len(tokens) + 2
    both = run("score", text, "Once  upon", "--exact").stdout.splitlines()
    assert [line.split()[-3:] for line in both[:2]] == [
        ["tokens", "logprob", "perplexity"], [f"{len(expected)}", logprob, perplexity],
    ]  # fmt: skip
    assert len(both) == 3 and both[2].startswith("Once upon  ")


def test_a_file_has_the_perplexity_of_the_library_and_a_model_no_divergence_from_itself(
    tmp_path: Path,
) -> None:
    path, text = tmp_path / "text.txt", "The wolf said that the king was not at home. " * 16
    path.write_text(text + "\n", encoding="utf-8")
    found = answer("score", "-f", path, "-c", "64")["perplexity"]
    with lb.load(n_ctx=64, n_threads=1) as ctx:
        expected = lb.eval.perplexity(ctx, text, 64)
    assert found["value"] == pytest.approx(expected.value, rel=1e-3)
    shown = run("score", "-f", path, "-c", "64").stdout
    assert re.search(r"perplexity +\d+\.\d+ ± \d", shown)
    assert run("score", path, "-c", "64").stdout == shown  # a file that exists
    assert "is scored alone" in said_by("score", "-f", path, "text")
    short = run("score", path)  # without -c the chunks fit a short text
    assert short.exit_code == 0 and "a short text: chunks of " in short.stderr
    path.write_text("The wolf said that he was not at home.", encoding="utf-8")
    short = run("score", path, "--against", "tale-draft", "-S", "n_seq_max=16")
    assert short.exit_code == 0, short.stderr  # the chunks are shorter than 16 tokens
    path.write_text(text, encoding="utf-8")
    same = answer("score", "-f", path, "-c", "64", "--against", "tale-target")
    assert same["kl_divergence"]["value"] == pytest.approx(0, abs=1e-6)
    assert same["same_most_probable_token"]["value"] == 1
    other = answer("score", "-f", path, "-c", "64", "--against", "tale-draft")
    assert other["kl_divergence"]["value"] > 0 and other["against"] == "tale-draft"
    shown = run("score", path, "-c", "64", "--against", "tale-draft").stdout
    assert re.search(r"^same most probable token +\d\d\.\d % ± \d\.\d %$", shown, re.MULTILINE)


def test_files_without_a_perplexity_are_refused_by_what_they_have(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    for data, why in (
        (b"", "a text of 0 tokens is too short"), (b"Hi", "a text of 2 tokens is too short"),
        (b"\xb7\0", "text.txt: it is not UTF-8 text"),
    ):  # fmt: skip
        path.write_bytes(data)
        result = run("score", path)
        assert result.exit_code == 2 and why in " ".join(result.stderr.split())
        assert "chunks of" not in result.stderr
    result = run("score", "no-such-file.txt")  # it may be a text
    assert result.exit_code == 0
    assert "no-such-file.txt is not a file: these letters are scored\n" in result.stderr


def test_a_text_of_one_token_has_no_figures() -> None:
    lines = [line.split() for line in run("score", " the").stdout.splitlines()]
    assert lines[1][-1] == "given" and lines[2:] == [["0", "tokens", "perplexity", "-", "0.0000"]]
    assert answer("score", " the")["scores"][0]["n_tokens"] == 0
