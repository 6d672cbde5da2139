"""``llamabranch search``: every method, JSON, the tree, rewards, wrong usage, Ctrl-C."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
from commands import answer, run
from self_signal import signalled_at_decode

import llamabranch as lb

PROMPT = "Once upon a time"
REWARD = "wc -c"


@pytest.mark.parametrize("method", ["beam", "best-of", "vote", "smc", "steps", "mcts"])
def test_every_method_prints_its_best_text_and_its_cost(method: str) -> None:
    arguments = ["--method", method, "-n", "6", "-w", "2", "--seed", "3", "--step", "3"]
    if method in ("steps", "mcts"):
        arguments += ["--reward", REWARD, "--iterations", "4"]
    if method == "vote":
        arguments += ["--answer", r"\w+"]
    result = run("search", PROMPT, *arguments, "--tree")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith(PROMPT + "\n")  # the root of the tree
    assert "score " in result.stderr
    assert " decodes of " in result.stderr
    report = answer("search", PROMPT, *arguments)
    assert report["method"] == method
    assert report["prompt"] == PROMPT
    assert report["interrupted"] is False
    assert result.stdout == report["hypotheses"][0]["text"] + "\n"  # a pipe gets the text alone
    assert report["stats"]["decodes"] >= 5 or method == "smc"
    assert "tree" not in report
    assert "children" in answer("search", PROMPT, *arguments, "--tree")["tree"]


def test_search_is_that_of_the_library() -> None:
    report = answer("search", PROMPT, "-n", "8", "--best", "3")
    with lb.load(n_threads=1, n_seq_max=5) as ctx, lb.Branch.start(ctx, PROMPT) as branch:
        expected = lb.search.beam_search(branch, max_tokens=8, n=3)
    assert [h["tokens"] for h in report["hypotheses"]] == [h.tokens for h in expected.hypotheses]


def test_a_reward_program_orders_the_texts() -> None:
    arguments = ("--method", "best-of", "-n", "9", "-w", "3", "--reward", REWARD)
    hypotheses = answer("search", PROMPT, *arguments)["hypotheses"]
    lengths = [float(len(h["text"].encode())) for h in hypotheses]
    assert [h["score"] for h in hypotheses] == sorted(lengths, reverse=True)


def test_a_long_tree_is_cut_and_what_is_hidden_is_counted() -> None:
    result = run("search", PROMPT, "-n", "40", "-w", "8", "--tree")
    drawn = result.stderr.split("score ")[0].splitlines()
    assert len(drawn) < 60
    assert any("more pruned" in line for line in drawn)


def test_votes_are_counted_by_the_answers_that_the_expression_finds() -> None:
    arguments = ["--method", "vote", "-n", "6", "-w", "5", "--seed", "1", "--answer", r"^\W*(\w+)"]
    report = answer("search", PROMPT, *arguments)
    assert sum(report["votes"].values()) <= 5
    assert "votes: " in run("search", PROMPT, *arguments).stderr


def test_equal_numbers_are_one_vote(tmp_path: Path) -> None:
    grammar = tmp_path / "one.gbnf"
    grammar.write_text('root ::= " 1" ("." "0")? "\\n"')
    arguments = ["--method", "vote", "-n", "6", "-w", "12", "-s", "1", "--grammar", str(grammar)]
    assert "also" in run("search", PROMPT, *arguments).stderr
    assert list(answer("search", PROMPT, *arguments)["votes"].values()) == [12]


def test_a_search_that_finds_no_text_fails(tmp_path: Path) -> None:
    grammar = tmp_path / "long.gbnf"
    grammar.write_text('root ::= "x"{40}')
    arguments = ["--method", "smc", "-n", "3", "--grammar", str(grammar), "--seed", "1"]
    result = run("search", PROMPT, *arguments)
    assert result.exit_code == 1
    assert "found no text" in result.stderr and "raise -n" in result.stderr
    result = run("search", PROMPT, *arguments, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["hypotheses"] == []


def test_particles_are_not_truncated_and_have_an_evidence() -> None:
    report = answer("search", PROMPT, "--method", "smc", "-n", "3", "--seed", "1")
    assert report["log_evidence"] < 0
    assert sum(math.exp(h["score"]) for h in report["hypotheses"]) == pytest.approx(1.0)
    endless = answer("search", PROMPT, "--method", "smc", "-n", "3", "--ignore-eos")
    assert [len(h["tokens"]) for h in endless["hypotheses"]] == [3] * len(endless["hypotheses"])
    assert endless["hypotheses"]


def test_a_draft_changes_no_text() -> None:
    arguments = ["--method", "best-of", "-n", "12", "-w", "2", "--seed", "4", "--best", "2"]
    plain = answer("search", PROMPT, *arguments)
    for draft in ("suffix", "tale-draft"):
        drafted = answer("search", PROMPT, *arguments, "-d", draft)
        assert drafted["hypotheses"] == plain["hypotheses"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_ctrl_c_prints_the_best_so_far() -> None:
    arguments = ["search", PROMPT, "-n", "400", "-t", "1", "-m", "tale-target", "--json"]
    process = subprocess.run(
        [*signalled_at_decode("SIGINT", 30), *arguments],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert process.returncode == 130, process.stderr
    assert "best so far" in process.stderr
    report = json.loads(process.stdout)
    assert report["interrupted"] is True
    assert report["hypotheses"][0]["finish_reason"] == "cancelled"
    assert report["hypotheses"][0]["tokens"]
