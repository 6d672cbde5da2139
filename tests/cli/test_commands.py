"""The command line on the bundled pair: output, JSON, colours, errors, pipes, Ctrl-C."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from self_signal import signalled_at_decode
from toys import CHAT_TEMPLATE, write_split, write_toy
from typer.testing import CliRunner, Result

import llamabranch as lb
from llamabranch import hub
from llamabranch.cli import app
from llamabranch.cli.comparison import Comparison, RoundCost, compare

COMMAND = [sys.executable, "-m", "llamabranch.cli"]
TIMEOUT_S = 600  # for a machine that is busy with other things
ENDLESS = [
    "speculate", "--max-tokens", "100000", "--ignore-end", "--n-ctx", "16384", "--threads", "1",
]  # fmt: skip
SPECULATE = "llamabranch.cli.speculate"
ESCAPE = "\x1b["
FIXED = ("--draft-length", "4")  # where a test needs drafts: "auto" drafts where it pays
STATISTICS = (
    "iterations",
    "drafted",
    "accepted",
    "accept rate",
    "tokens a drafted round",
    "tokens a second",
)


def run(*arguments: str, stdin: str | None = None, **environment: str) -> Result:
    if arguments[:1] == ("speculate",):
        arguments = (*arguments, "--threads", "1")  # fastest for models this small
    return CliRunner().invoke(app, list(arguments), input=stdin, env=environment)


def run_json(*arguments: str) -> dict[str, object]:
    result = run("speculate", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.endswith("}\n")
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


# -- speculate -------------------------------------------------------------------------------------


def test_speculate_tells_a_tale_with_no_options() -> None:
    result = run("speculate", "--max-tokens", "24")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()
    for label in STATISTICS:
        assert label in result.stderr  # a pipe gets the text alone
        assert label not in result.stdout


@pytest.mark.filterwarnings("always::llamabranch.ContextLengthWarning")
def test_warning_is_one_line_on_standard_error() -> None:
    given = ("--max-tokens", "2", "--draft", "none", "--n-ctx", "2048")
    result = run("speculate", *given, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith("warning: n_ctx=2048 is more than the 1024 tokens")
    assert result.stderr.count("\n") == 1


def test_speculate_writes_no_colour_codes_to_a_pipe() -> None:
    assert ESCAPE not in run("speculate", "--max-tokens", "8").output


def test_speculate_colours_tokens_by_source_on_a_terminal() -> None:
    arguments = ("speculate", "--max-tokens", "48", "--seed", "1", *FIXED)
    colored = run(*arguments, FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert "drafted and accepted" in colored
    assert "\x1b[32m" in colored  # drafted: green
    assert "\x1b[33m" in colored  # corrected: yellow
    for plain in (
        run(*arguments, "--no-color", FORCE_COLOR="1").stdout,
        run(*arguments, FORCE_COLOR="1", NO_COLOR="1").stdout,
    ):
        assert ESCAPE not in plain
        assert "drafted and accepted" not in plain


def test_speculate_streams_the_text_that_json_gives() -> None:
    arguments = ("A prince", "--max-tokens", "32", "--seed", "3")
    text = str(run_json(*arguments)["text"])
    assert run("speculate", *arguments).stdout == text + "\n"
    shown = run("speculate", *arguments, "--display-prompt").stdout
    assert shown == "A prince" + text + "\n"
    shown = run("speculate", *arguments, FORCE_COLOR="1", TERM="dumb", NO_COLOR="1").stdout
    assert shown.startswith("A prince" + text + "\n\n")  # a terminal shows the table too
    assert "tokens a second" in shown
    hidden = run("speculate", *arguments, "--no-display-prompt", FORCE_COLOR="1", NO_COLOR="1")
    assert hidden.stdout.startswith(text)


def test_json_has_the_names_of_the_field() -> None:
    answer = run_json("--max-tokens", "20", "--seed", "5", *FIXED)
    assert set(answer) == {
        *("text", "tokens", "finish_reason", "tokens_per_s", "seed", "rule", "explain", "stats")
    }
    assert answer["rule"] == "seeded"
    assert "tale-draft" in str(answer["explain"])
    assert answer["seed"] == 5
    assert answer["finish_reason"] in ("length", "stop")
    tokens, stats = answer["tokens"], answer["stats"]
    assert isinstance(tokens, list)
    assert isinstance(stats, dict)
    assert len(tokens) <= 20
    for name in (
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_accepted_tokens_per_pos",
        "draft_acceptance_rate",
        "mean_acceptance_length",
    ):
        assert name in stats
    assert set(stats) == set(lb.SpeculativeStats().as_dict())
    assert 0 < stats["num_accepted_tokens"] <= stats["num_draft_tokens"]


def test_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    one, again, other = (run_json("--max-tokens", "32", "--seed", seed) for seed in "112")
    assert one["tokens"] == again["tokens"]
    assert one["tokens"] != other["tokens"]


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_compare_gives_the_text_of_plain_decoding(temperature: str) -> None:
    answer = run_json(
        "--compare", "--temperature", temperature, "--max-tokens", "40", "--seed", "7", *FIXED
    )
    plain, speed = answer["plain"], answer["tokens_per_s"]
    assert isinstance(plain, dict)
    assert isinstance(speed, float)
    assert set(plain) == {"text", "tokens", "tokens_per_s"}
    assert answer["same_text"] is True
    assert plain["text"] == answer["text"]
    assert plain["tokens"] == answer["tokens"]
    assert answer["speedup"] == pytest.approx(speed / plain["tokens_per_s"])
    assert answer["same_text_expected"] is True
    assert answer["batch_invariant"] is True
    assert answer["divergence"] is None


def test_compare_without_a_seed_picks_one_and_prints_it() -> None:
    first = run_json("--compare", "--max-tokens", "24", *FIXED)
    assert first["same_text"] is True
    assert isinstance(first["seed"], int)
    again = run_json("--seed", str(first["seed"]), "--max-tokens", "24")
    assert again["tokens"] == first["tokens"]


def test_compare_prints_speedup_and_says_why_when_it_is_below_one() -> None:
    result = run("speculate", "--compare", "--max-tokens", "40", "--seed", "7", *FIXED)
    assert result.exit_code == 0, result.stderr
    lines = {line[:15].strip(): line.split()[-2:] for line in result.stderr.splitlines()}
    assert lines["same text"][-1] == "yes"
    speedup = float(lines["speedup"][0])
    # 1.00 may be a rounded 0.998.
    if speedup != 1:
        assert ("c = " in result.stderr and "v(" in result.stderr) == (speedup < 1)


def test_round_cost_explains_a_loss_in_numbers() -> None:
    cost = RoundCost(
        draft_step_s=0.1e-3,
        target_step_s=0.4e-3,
        verify_s=0.8e-3,
        draft_length=4.0,
        tokens_a_round=2.4,
    )
    assert cost.c == pytest.approx(0.25)
    assert cost.v == pytest.approx(2.0)
    assert cost.round_cost == pytest.approx(3.0)
    text = cost.explain()
    for number in ("c = 0.25", "v(5) = 2.00", "= 3.00 target steps", "2.40 tokens", "0.80 times"):
        assert number in text


def test_draft_none_decodes_plainly() -> None:
    arguments = ("--max-tokens", "24", "--seed", "7")
    plain = run_json("--draft", "none", *arguments)
    assert plain["tokens"] == run_json(*arguments, *FIXED)["tokens"]
    assert plain["stats"]["num_draft_tokens"] == 0  # type: ignore[index]
    assert "iterations" not in run("speculate", "--draft", "none", *arguments).stderr


def test_draft_length_bounds_what_a_round_drafts() -> None:
    stats = run_json("--draft-length", "2", "--max-tokens", "24", "--seed", "7")["stats"]
    assert isinstance(stats, dict)
    assert stats["num_draft_tokens"] <= 2 * stats["num_drafts"]
    assert len(stats["num_accepted_tokens_per_pos"]) <= 2


def test_draft_length_auto_gives_the_same_text() -> None:
    arguments = ("--max-tokens", "24", "--seed", "7")
    auto = run_json("--draft-length", "auto", *arguments)["tokens"]
    assert auto == run_json(*arguments, *FIXED)["tokens"]


def test_draft_length_is_auto_unless_given_and_the_table_says_why_drafts_ended() -> None:
    arguments = ("speculate", "--max-tokens", "48", "--seed", "7")
    shown = run(*arguments).stderr
    rows = {line[:17].strip(): line[17:].strip() for line in shown.splitlines()}
    for label in ("drafted", "accepted", "plain steps", "drafts ended by"):
        assert rows[label]
    assert int(rows["plain steps"]) > 0  # "auto" measures plain steps first
    reasons = [
        line for line in shown.splitlines() if line.startswith(("drafting is o", "still me"))
    ]
    assert len(reasons) == 1  # one sentence; v(n) and where it comes from are for --explain
    assert "v = " not in shown
    fixed = run(*arguments, *FIXED).stderr
    assert "\nalways 4 tokens a draft" in fixed
    assert "length " in next(row for row in fixed.splitlines() if row.startswith("drafts ended by"))
    assert "drafting" not in run(*arguments, "--draft", "none").stderr


def test_entropy_stop_ends_drafts_early() -> None:
    arguments = ("--entropy-stop", "0", "--max-tokens", "16", "--seed", "7")
    stats = run_json(*arguments)["stats"]
    assert isinstance(stats, dict)
    assert stats["num_draft_tokens"] == 0
    assert stats["draft_acceptance_rate"] is None
    shown = run("speculate", *arguments).stderr
    assert [line.split()[-1] for line in shown.splitlines() if "accept rate" in line] == ["-"]


def test_full_context_ends_the_text_and_says_what_to_raise() -> None:
    arguments = ("--n-ctx", "256", "--max-tokens", "400", "--ignore-end", "--seed", "1")
    answer = run_json(*arguments)
    assert answer["finish_reason"] == "capacity"
    assert len(answer["tokens"]) > 200  # type: ignore[arg-type]
    assert "--n-ctx" in run("speculate", *arguments).stderr


def test_prompt_that_does_not_fit_fails_before_anything_is_printed() -> None:
    result = run("speculate", "word " * 400, "--n-ctx", "256")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")


def test_chat_wraps_the_prompt_in_the_template(tmp_path: Path) -> None:
    template = {"tokenizer.chat_template": CHAT_TEMPLATE}
    model = write_toy(tmp_path / "chat.gguf", vocab="bytes", metadata=template)
    arguments = ("Hi", "--target", str(model), "--draft", "none", "--seed", "1")
    with_template = run_json(*arguments, "--chat", "--max-tokens", "8")
    with lb.load(model, n_ctx=256) as context:
        text = context.model.apply_chat_template([("user", "Hi")])
        tokens = context.model.tokenize(text, add_special=True, parse_special=True)
        sampling = lb.SamplingParams(seed=1)
        plain = lb.Speculator(context).generate(tokens, max_tokens=8, sampling=sampling).finish()
    assert with_template["tokens"] == plain.tokens


@pytest.mark.parametrize("command", ["speculate", "generate", "search"])
def test_chat_prints_the_answer_on_a_line_of_its_own(command: str, tmp_path: Path) -> None:
    template = {"tokenizer.chat_template": CHAT_TEMPLATE}
    model = write_toy(tmp_path / "chat.gguf", vocab="bytes", metadata=template)
    arguments = (
        "-p",
        "Hi there",
        "--target",
        str(model),
        "--draft",
        "none",
        "--seed",
        "1",
        "-n",
        "4",
        "--display-prompt",
    )
    assert "Hi there\n" not in run(command, *arguments).stdout
    assert "Hi there\n" in run(command, *arguments, "--chat").stdout


def test_chat_without_a_template_fails() -> None:
    result = run("speculate", "Hi", "--chat")
    assert result.exit_code == 1
    assert "no chat template" in result.stderr


def test_prompt_comes_from_standard_input() -> None:
    arguments = ("--max-tokens", "4", "--display-prompt")
    result = run("speculate", "-", *arguments, stdin="The old king")
    assert result.stdout.startswith("The old king")


def test_grammar_file_limits_the_text(tmp_path: Path) -> None:
    path = tmp_path / "answer.gbnf"
    path.write_text('root ::= " yes" | " no"')
    assert run_json("--grammar", str(path))["text"] in (" yes", " no")


def test_json_schema_is_taken_inline_or_from_a_file(tmp_path: Path) -> None:
    schema = '{"enum": ["king", "queen"]}'
    path = tmp_path / "schema.json"
    path.write_text(schema)
    for given in (schema, str(path)):
        text = run_json("--json-schema", given, "--seed", "1")["text"]
        assert json.loads(str(text)) in ("king", "queen")


def test_stop_text_ends_the_generation() -> None:
    answer = run_json("--stop", " ", "--seed", "1", "--max-tokens", "64")
    assert answer["finish_reason"] == "stop"
    assert " " not in str(answer["text"])


def test_models_are_taken_by_name_and_by_path() -> None:
    arguments = ("--max-tokens", "8", "--seed", "1")
    by_path = run_json(
        "--target",
        str(hub.resolve(hub.BUNDLED_TARGET)),
        "--draft",
        str(hub.resolve(hub.BUNDLED_DRAFT)),
        *arguments,
    )
    by_name = run_json("--target", "tale-target", "--draft", "tale-draft", *arguments)
    assert by_path["tokens"] == by_name["tokens"]


# -- drafters and rules ----------------------------------------------------------------------------

REFRAIN = "Mirror, mirror on the wall, who is the fairest of them all?\n\n" * 4


@pytest.mark.parametrize("draft", ["lookup", "suffix", "suffix+tale-draft", "lookup+suffix"])
def test_every_drafter_gives_the_text_of_plain_decoding(draft: str) -> None:
    arguments = (REFRAIN, "--max-tokens", "48", "--seed", "7", "--temperature", "0")
    drafted = run_json("--draft", draft, *arguments, *FIXED)
    assert drafted["tokens"] == run_json("--draft", "none", *arguments)["tokens"]
    assert drafted["stats"]["num_accepted_tokens"] > 0  # type: ignore[index]
    files = draft.replace("tale-draft", "tale-draft-q8_0")  # models are named by their files
    assert str(drafted["explain"]).startswith(f"drafter: {files};")


def test_repeated_runs_of_a_comparison_do_not_copy_each_other() -> None:
    # With an index shared by all runs the second one would find its own text and accept all of it.
    arguments = ("A prince", "--draft", "suffix", "--seed", "3", "--max-tokens", "40", *FIXED)
    alone, again = run_json(*arguments), run_json(*arguments, "--compare")
    counts = [run["stats"]["num_accepted_tokens"] for run in (alone, again)]  # type: ignore[index]
    assert counts[0] == counts[1]
    assert counts[0] < 20


def test_file_with_a_plus_in_its_name_is_no_chain(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "a+b.gguf", vocab="bytes")
    arguments = ("Hi", "--target", str(path), "--draft", str(path), "--max-tokens", "8")
    assert run_json(*arguments, *FIXED, "--seed", "1")["stats"]["draft_acceptance_rate"] == 1.0  # type: ignore[index]


def test_draft_of_another_vocabulary_goes_through_the_text_and_says_so(tmp_path: Path) -> None:
    other = write_toy(tmp_path / "other.gguf", vocab="bytes")
    arguments = ("speculate", "--max-tokens", "16", "--seed", "7", "--json", *FIXED)
    result = run(*arguments, "--draft", str(other))
    assert result.exit_code == 0, result.stderr
    assert "another vocabulary" in result.stderr
    plain = json.loads(run(*arguments, "--draft", "none").stdout)
    assert json.loads(result.stdout)["tokens"] == plain["tokens"]


@pytest.mark.parametrize("arguments", [("--draft-width", "3"), ("--rule", "seeded")])
def test_trees_and_the_seeded_rule_promise_the_same_text(arguments: tuple[str, ...]) -> None:
    answer = run_json(*arguments, *FIXED, "--max-tokens", "32", "--compare")
    assert answer["rule"] == "seeded"
    assert answer["same_text_expected"] is True
    assert answer["same_text"] is True


def test_tree_drafts_more_than_one_candidate_a_place() -> None:
    arguments = ("--max-tokens", "24", "--seed", "7", "--draft-length", "3")
    tree = run_json("--draft-width", "4", *arguments)
    stats = tree["stats"]
    assert isinstance(stats, dict)
    assert len(stats["num_tested_tokens_per_pos"]) <= 3
    assert stats["num_draft_tokens"] > 3 * stats["num_drafts"]
    assert tree["tokens"] == run_json(*arguments)["tokens"]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rule_lossless_in_distribution_expects_no_equal_text(rule: str) -> None:
    arguments = ("--rule", rule, "--compare", "--max-tokens", "32", "--seed", "7", *FIXED)
    answer = run_json(*arguments)
    assert (answer["rule"], answer["same_text_expected"]) == (rule, False)
    assert answer["divergence"] is None
    shown = run("speculate", *arguments).stderr
    expected = f"same text: not expected (rule {rule} is lossless in distribution)"
    assert expected in shown.splitlines()


def test_every_rule_gives_the_same_text_at_temperature_0() -> None:
    arguments = ("--compare", "--max-tokens", "32", "--temperature", "0", *FIXED)
    for rule in ("seeded", "token", "block"):
        answer = run_json("--rule", rule, *arguments)
        assert (answer["rule"], answer["same_text_expected"]) == (rule, True)
        assert answer["same_text"] is True


def test_rule_without_a_seed_is_block() -> None:
    assert run_json("--max-tokens", "8")["rule"] == "block"


def test_explain_is_printed_on_request() -> None:
    arguments = ("speculate", "--max-tokens", "16", "--seed", "7", *FIXED)
    for others in ((), ("--compare",)):
        assert "drafter: " not in run(*arguments, *others).stderr
    shown = run(*arguments, "--explain").stderr
    assert "drafter: tale-draft-q8_0; always 4 tokens a draft" in shown
    plain = run(*arguments, "--draft", "none", "--explain").stderr
    assert "plain decoding: there is no drafter" in plain


def test_explain_counts_the_run_that_is_shown() -> None:
    answer = run_json("--max-tokens", "24", "--seed", "7", "--compare", *FIXED)
    assert f"\n{answer['stats']['num_drafts']} drafts: " in str(answer["explain"])  # type: ignore[index]


def test_top_logprobs_are_those_of_plain_decoding() -> None:
    arguments = ("--top-logprobs", "3", "--max-tokens", "24", "--seed", "7", *FIXED)
    drafted = run_json(*arguments)["logprobs"]
    plain = run_json(*arguments, "--draft", "none")["logprobs"]
    assert isinstance(drafted, list)
    assert isinstance(plain, list)
    assert {entry["source"] for entry in drafted} >= {"drafted", "corrected"}
    assert len(drafted) == 24
    for ours, theirs in zip(drafted, plain, strict=True):
        assert {**ours, "source": "plain"} == theirs
        assert len(ours["top"]) == 3
        assert ours["logprob"] <= ours["top"][0]["logprob"] <= 0


def test_top_logprobs_list_exactly_the_tokens_that_were_generated() -> None:
    answer = run_json("--top-logprobs", "1", "--stop", "the", "--seed", "1", "--max-tokens", "64")
    logprobs = answer["logprobs"]
    assert isinstance(logprobs, list)
    assert [entry["token"] for entry in logprobs] == answer["tokens"]


def _compare_with_a_flaw(*arguments: Any) -> Comparison | None:
    """Compare as usual, then pretend that plain decoding had generated another token 5."""
    found = compare(*arguments)
    if found is None:
        return None
    tokens = [*found.plain.tokens[:5], 0, *found.plain.tokens[6:]]
    return replace(found, plain=replace(found.plain, tokens=tokens))


def test_texts_that_differ_are_reported_with_place_and_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[SPECULATE], "compare", _compare_with_a_flaw)
    arguments = ("--compare", "--max-tokens", "12", "--seed", "7", *FIXED)
    answer = run_json(*arguments)
    divergence, tokens = answer["divergence"], answer["tokens"]
    assert answer["same_text"] is False
    assert isinstance(divergence, dict)
    assert isinstance(tokens, list)
    assert divergence["position"] == 5
    assert divergence["tokens"] == [0, tokens[5]]
    assert divergence["gap"] > 0
    shown = run("speculate", *arguments).stderr
    assert "First difference at token 5: " in shown
    assert f"(a factor of {math.exp(divergence['gap']):.3g} in probability)" in shown
    assert f"logits must change by {divergence['gap']:.3g} relative to each other" in shown
    assert (divergence["difference"], divergence["explained"]) == (0.0, False)
    assert "batch-invariant (measured" in shown
    assert "bug in llamabranch" in shown


def test_texts_that_differ_by_more_than_rounding_are_a_bug_anywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[SPECULATE], "compare", _compare_with_a_flaw)
    arguments = (
        "--compare",
        "--max-tokens",
        "12",
        "--temperature",
        "0",
        "--kv-type",
        "f16",
        *FIXED,
    )
    shown = run("speculate", *arguments).stderr
    assert "not batch-invariant (the K/V type is f16, not bf16 or q8_0)" in shown
    assert "rounding of this size does not explain it: this is a bug in llamabranch" in shown


@pytest.mark.parametrize(
    ("given", "exact"), [((), True), (("--exact",), True), (("--fast",), False)]
)
def test_fast_gives_up_exact_batches(given: tuple[str, ...], exact: bool) -> None:
    shown = run_json(
        "speculate", "--compare", "--max-tokens", "4", "--temperature", "0", *given, *FIXED
    )
    assert shown["batch_invariant"] is exact


# -- theory ----------------------------------------------------------------------------------------


def test_theory_prints_the_table_of_the_documents() -> None:
    result = run("theory")
    assert result.exit_code == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["0.7", "4", "2.11", "2.77", "2.31", "1.98", "1.54", "0.44"] in lines
    assert ["0.8", "8", "3.33", "4.33", "3.09", "2.40", "1.66", "0.42"] in lines
    assert ["0.7", "6:", "2.35", "4:", "1.98", "3:", "1.58"] in lines


def test_theory_json_holds_what_the_library_computes() -> None:
    arguments = ("--acceptance", "0.6", "--draft-length", "3", "--c", "0.1", "--c", "0.3")
    answer = json.loads(run("theory", "--json", *arguments, "--verify-cost", "1:1,5:1.8").stdout)
    (row,) = answer["table"]
    cost = 1.6  # v(4), between the points
    assert row["expected_tokens"] == pytest.approx(1 + 0.6 + 0.36 + 0.216)
    assert row["amdahl"] == pytest.approx(1 / (0.4 + 0.2))
    assert row["speedups"] == pytest.approx([2.176 / (0.3 + cost), 2.176 / (0.9 + cost)])
    for best in answer["best"]:
        speedups = [
            lb.theory.speedup(0.6, k, best["draft_cost"], lambda n: 1 + 0.2 * (n - 1))
            for k in range(17)
        ]
        assert best["speedup"] == pytest.approx(max(speedups))
        assert best["draft_length"] == speedups.index(max(speedups))


@pytest.mark.parametrize(
    ("given", "v"),
    [("1.5", 1.5), ("1:1,3:2", 1.5), ("3:2", 1.5), ("2:1.5,3:9", 1.5)],
)
def test_theory_takes_the_cost_of_verifying_two_tokens(given: str, v: float) -> None:
    arguments = ("-a", "0.5", "-k", "1", "--c", "0", "--verify-cost", given, "--json")
    (row,) = json.loads(run("theory", *arguments).stdout)["table"]
    assert row["speedups"] == pytest.approx([1.5 / v])


def test_theory_goes_straight_on_after_the_last_point() -> None:
    arguments = ("-a", "1", "-k", "9", "--c", "0", "--verify-cost", "1:1,5:3", "--json")
    (row,) = json.loads(run("theory", *arguments).stdout)["table"]
    assert row["speedups"] == pytest.approx([10 / 5.5])


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("speculate", "--draft-length", "four"), "neither a number nor auto"),
        (("speculate", "--draft-length", "-1"), "draft"),
        (("speculate", "--draft", "suffix+"), "not a chain of drafters"),
        (("speculate", "--draft", "none+suffix"), "not a chain of drafters"),
        (("speculate", "--draft", "suffix+tale-dratf"), "did you mean tale-draft?"),
        (("speculate", "--rule", "best"), "unknown rule 'best'"),
        (("speculate", "--draft-width", "2", "--rule", "block"), "need the rule seeded"),
        (("speculate", "--draft-width", "2", "--draft", "lookup"), "needs a draft model"),
        (("speculate", "--top-logprobs", "2"), "--json only"),
        (("theory", "--acceptance", "1.5"), "from 0 to 1"),
        (("theory", "--draft-length", "0"), "from 1 to"),
        (("theory", "--verify-cost", "2:1.5,x"), "neither a number nor points"),
        (("theory", "--verify-cost", "1:2,5:3"), "v(1) = 1"),
        (("speculate", "--temperature", "1e5"), "temperature"),
        (("speculate", "--max-tokens", "0"), "max-tokens"),
        (("speculate", "--target", "tale-targte"), "did you mean tale-target?"),
        (("speculate", "--target", "absent.gguf", "--draft", "none"), "no file absent.gguf"),
        (("speculate", "--grammar", "absent.gbnf"), "cannot read absent.gbnf"),
        (("speculate", "--grammar", "a", "--json-schema", "{}"), "exclude each other"),
        (("speculate", "--kv-type", "f7"), "f7"),
        (("speculate", "--no-such-option"), "--no-such-option"),
        (("inspect", "tale-dratf"), "did you mean tale-draft?"),
        (("no-such-command",), "no-such-command"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...], complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_target_without_a_listed_draft_runs_and_says_what_drafts(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "other.gguf", vocab="bytes")
    result = run("speculate", "--target", str(path), "-n", "4")
    assert result.exit_code == 0, result.stderr
    assert f"no smaller model here drafts for {path}: copying from the text" in " ".join(
        result.stderr.split()
    )
    (tmp_path / "empty.gguf").touch()
    result = run("speculate", "--target", str(tmp_path / "empty.gguf"))
    assert result.exit_code == 1
    assert "the file is empty" in result.stderr


def test_failure_exits_with_1_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "garbage.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    result = run("speculate", "--target", str(path), "--draft", "none")
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    assert sum(not line.startswith("hint: ") for line in result.stderr.splitlines()) == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    path = tmp_path / "garbage.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    result = run("speculate", "--target", str(path), "--draft", "none", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "ModelLoadError" in result.stderr


def test_bug_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[hub.CatalogueEntry]:
        raise ZeroDivisionError("by accident")

    monkeypatch.setattr(hub, "catalogue", fail)
    result = run("models")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: unexpected ZeroDivisionError: by accident\n")
    assert "Traceback" not in result.stderr


def test_draft_without_a_vocabulary_fails_with_a_reason(tmp_path: Path) -> None:
    other = write_toy(tmp_path / "other.gguf", vocab="none")
    result = run("speculate", "--draft", str(other), "--max-tokens", "4")
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "message"),
    [
        (("theory", "--c", "inf"), 2, "ConfigError", "cannot cost inf"),
        (("theory", "--verify-cost", "inf"), 2, "ConfigError", "cannot cost inf"),
        (("theory", "-k", "9" * 400), 2, "ConfigError", "from 0 to"),
        (("theory", "-k", "x"), 2, "BadParameter", "--draft-length"),
        (("theory", "--nope"), 2, "NoSuchOption", "--nope"),
        (("speculate", "--gpu-layers"), 2, "", "--gpu-layers"),
        (("speculate", "--target", "tale-targte"), 2, "ConfigError", "tale-targte"),
        (("speculate", "--grammar", "a", "--json-schema", "{}"), 2, "BadParameter", "exclude"),
        (("speculate", "-hff", "name"), 2, "UsageError", "-hff"),
        (("generate", "-p", "a", "--samples", "100000000"), 2, "ConfigError", "from 1 to"),
        (("inspect", "GARBAGE"), 1, "ModelLoadError", "garbage.gguf"),
        (("bench", "--target", "GARBAGE", "--draft", "none"), 1, "ModelLoadError", "garbage.gguf"),
        (("nope",), 2, "UsageError", "nope"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_failed_command_with_json_prints_its_error_as_json(
    arguments: tuple[str, ...], code: int, kind: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "garbage.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    given = [str(path) if argument == "GARBAGE" else argument for argument in arguments]
    result = run(*given, "--json")
    assert result.exit_code == code, result.output
    (error,) = json.loads(result.stdout).values()
    assert set(error) == {"type", "message", "hint"}
    assert error["type"] == kind or not kind
    assert message in error["message"]
    assert result.stderr
    assert run(*given).stdout == ""


def test_json_has_no_number_that_json_does_not_know() -> None:
    # The speedup overflows: the cost is a number, if a useless one.
    result = run("theory", "--json", "--verify-cost", "1e-323", "--c", "0")
    assert result.exit_code == 0, result.stderr

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    answer = json.loads(result.stdout, parse_constant=refuse)
    assert answer["table"][0]["speedups"] == [None]


def test_theory_of_very_long_drafts_ends() -> None:
    answer = json.loads(
        run("theory", "-k", "99999999999", "-a", "0.75", "-a", "1", "--json").stdout
    )
    assert [row["expected_tokens"] for row in answer["table"]] == [pytest.approx(4), 1e11]


def test_layers_for_the_gpu_have_the_name_of_llama_cpp() -> None:
    for arguments in (
        ("speculate", "-n", "2"),
        ("generate", "-p", "a", "b", "-n", "2"),
        ("inspect",),
    ):
        result = run(*arguments, "-ngl", "0")
        assert result.exit_code == 0, result.stderr
    assert run("speculate", "-ngl", "many").exit_code == 2
    result = run("speculate", "-m", "tale-target", "-md", "lookup", "-n", "2", "--explain")
    assert "drafter: lookup" in result.stderr
    answer = json.loads(
        run("generate", "-m", "tale-draft", "-md", "none", "-p", "a", "--json").stdout
    )
    assert answer["explain"] == "plain decoding: there is no drafter"


@pytest.mark.parametrize(
    "command", ["speculate", "generate", "bench", "inspect", "models", "pull", "theory"]
)
@pytest.mark.parametrize(
    ("option", "instead"),
    [
        *(
            ("-hff", "user/repo/file.gguf"),
            ("-hft", "HF_TOKEN"),
        ),
        *(("-ns", "--samples"), ("-tb", "--threads"), ("-ngld", "-ngl")),
        *(("-ts", "--gpu-layers"), ("--color", "--no-color"), ("--mirostat", "--min-p")),
        *(("--host", "llamabranch serve"), ("--image", "not supported")),
        ("--reverse-prompt", "--stop"),
    ],
)
def test_other_options_of_llama_cpp_are_refused_by_name(
    command: str, option: str, instead: str
) -> None:
    result = run(command, option, "x")
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert f"No such option: {option}" in said
    assert instead in said


def test_value_that_looks_like_an_option_of_llama_cpp_is_a_value() -> None:
    assert run("speculate", "--stop", "-hf", "-n", "2").exit_code == 0
    assert run("speculate", "-n2", "-k2", "-dlookup").exit_code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        ("theory",),
        ("theory", "--json"),
        ("models",),
        ("--help",),
        ("speculate", "-n", "4"),
        ("speculate", "-n", "4", "--json"),
        ("generate", "-p", "The king", "-n", "4"),
    ],
    ids=" ".join,
)
def test_full_standard_output_is_an_error_in_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1, done.stderr
    first, *rest = done.stderr.splitlines()
    assert first == "error: cannot write to standard output: No space left on device"
    assert all(line.startswith("hint: ") for line in rest)


@pytest.mark.skipif(os.name == "nt", reason="closes descriptors as POSIX has them")
@pytest.mark.parametrize(
    ("arguments", "number", "code", "message"),
    [
        (("speculate", "-", "-n", "4"), 0, 2, "standard input is closed"),
        (("generate", "-i", "-", "-n", "4"), 0, 2, "standard input is closed"),
        (("bench", "--quick", "-i", "-"), 0, 2, "standard input is closed"),
        (("theory",), 1, 1, "standard output is closed"),
        (("theory", "--json"), 1, 1, "standard output is closed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_closed_stream_is_an_error_in_one_line(
    arguments: tuple[str, ...], number: int, code: int, message: str
) -> None:
    done = subprocess.run(
        [*COMMAND, *arguments],
        preexec_fn=lambda: os.close(number),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    first, *rest = done.stderr.splitlines()
    assert first == f"error: {message}"
    assert len(rest) == 1
    assert rest[0].startswith("hint: ")


def test_standard_input_that_is_not_utf8_is_wrong_usage() -> None:
    done = subprocess.run(
        [*COMMAND, "speculate", "-"], input=b"a\xffb", capture_output=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: cannot read standard input: ")


def test_output_that_is_not_utf8_loses_nothing() -> None:
    def lines_of(*arguments: str) -> tuple[str, str]:
        done = subprocess.run(
            [
                *COMMAND,
                "speculate",
                "Die Königin ♕",
                "-m",
                "tale-target",
                "-n",
                "8",
                "--seed",
                "1",
                "--display-prompt",
                *arguments,
            ],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    whole = run_json("Die Königin ♕", "-n", "8", "--seed", "1")
    out, _ = lines_of("--json")
    assert json.loads(out)["text"] == whole["text"]
    out, err = lines_of()
    assert out.startswith("Die K\\xf6nigin \\u2655")
    assert "PYTHONIOENCODING=utf-8" in err


@pytest.mark.parametrize("depth", [20, 200, 20_000])
def test_schema_that_nests_too_deep_is_wrong_usage(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    inside, ends = '{"type": "array", "items": ' * depth, "}" * depth
    path.write_text(inside + '{"type": "integer"}' + ends, encoding="utf-8")
    result = run("speculate", "--json-schema", str(path), "-n", "4")
    assert result.exit_code == (0 if depth == 20 else 2), result.output
    if depth > 20:
        assert result.stderr == "error: the JSON schema is nested too deep\n"


@pytest.mark.parametrize("schema", ['{"properties": 5}', '{"anyOf": 5}', '{"format": [1]}', "{"])
def test_schema_that_is_none_is_wrong_usage(schema: str) -> None:
    result = run("speculate", "--json-schema", schema)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert "bug" not in result.stderr


# -- inspect ---------------------------------------------------------------------------------------


def test_inspect_describes_a_model() -> None:
    result = run("inspect", "tale-target")
    assert result.exit_code == 0, result.stderr
    for label in ("architecture", "parameters", "size", "vocabulary", "memory", "can truncate"):
        assert label in result.stdout
    assert "llama" in result.stdout
    assert "Q8_0" in result.stdout


def test_inspect_shows_the_names_of_files_not_their_paths(tmp_path: Path) -> None:
    paths = [write_toy(tmp_path / f"{name}.gguf") for name in ("large", "small")]
    result = run("inspect", *map(str, paths))
    assert result.exit_code == 0, result.stderr
    assert str(tmp_path) not in result.stdout
    assert result.stdout.split()[:2] == ["large.gguf", "small.gguf"]


def test_inspect_json_holds_the_facts() -> None:
    result = run("inspect", "tale-target", "--json")
    (facts,) = json.loads(result.stdout)["models"]
    assert facts["architecture"] == "llama"
    assert facts["memory_type"] == "attention"
    assert facts["capabilities"]["can_truncate"] is True
    assert facts["capabilities"]["can_share"] is True
    with lb.Model(hub.resolve("tale-target")) as model:
        assert facts["n_params"] == model.n_params
        assert facts["n_vocab"] == model.n_vocab


def test_inspect_says_that_the_bundled_pair_can_speculate() -> None:
    result = run("inspect", "tale-target", "tale-draft")
    assert result.exit_code == 0, result.stderr
    assert "can speculate together, token by token: the same 4096 tokens" in result.stdout
    answer = json.loads(run("inspect", "tale-target", "tale-draft", "--json").stdout)
    assert (answer["compatible"], answer["path"]) == (True, "tokens")
    assert len(answer["models"]) == 2


def test_inspect_says_that_two_vocabularies_meet_in_the_text(tmp_path: Path) -> None:
    other = write_toy(tmp_path / "other.gguf", vocab="bytes")
    result = run("inspect", "tale-target", str(other))
    assert result.exit_code == 0, result.stderr
    assert "through the text only: " in result.stdout
    answer = json.loads(run("inspect", "tale-target", str(other), "--json").stdout)
    assert (answer["compatible"], answer["path"]) == (False, "text")


def test_inspect_says_why_a_model_is_not_batch_invariant(tmp_path: Path) -> None:
    other = write_toy(tmp_path / "other.gguf", "mamba")
    result = run("inspect", str(other))
    shown = " ".join(result.stdout.split())
    assert "is not batch-invariant: not established for recurrent memory." in shown
    (facts,) = json.loads(run("inspect", str(other), "--json").stdout)["models"]
    assert facts["capabilities"]["batch_invariant"] is False
    assert "recurrent" in facts["capabilities"]["batch_invariant_reason"]


def test_inspect_says_why_two_models_cannot_speculate(tmp_path: Path) -> None:
    other = write_toy(tmp_path / "other.gguf", vocab="none")
    result = run("inspect", "tale-target", str(other))
    assert result.exit_code == 0, result.stderr
    assert "cannot speculate together: " in result.stdout
    answer = json.loads(run("inspect", "tale-target", str(other), "--json").stdout)
    assert (answer["compatible"], answer["path"]) == (False, "none")
    assert answer["reason"] in result.stdout.replace("\n", " ")


# -- models ----------------------------------------------------------------------------------------


def test_models_lists_every_entry_in_order_and_whole() -> None:
    result = run("models")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["name", "role", "repository", "file", "licence", "size", "here"]
    for line, entry in zip(lines[1:], hub.catalogue(), strict=False):
        assert line.startswith(entry.name)
        for field in (entry.role, entry.repository, entry.file, entry.licence, entry.size):
            assert field in line
    assert lines[1].rstrip().endswith("yes")


def test_models_of_a_folder_are_described_and_bad_files_named(tmp_path: Path) -> None:
    whole = hub.resolve("tale-draft").read_bytes()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "draft.gguf").write_bytes(whole)
    (tmp_path / "cut.gguf").write_bytes(whole[:-1000])
    (tmp_path / "text.gguf").write_text("a tale")
    split = write_split(hub.resolve("tale-draft"), tmp_path)
    lone = tmp_path / "lone-00001-of-00002.gguf"
    lone.write_bytes(split.read_bytes())
    result = run("models", "--local", str(tmp_path), "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    described = {model["name"]: model for model in answer["models"]}
    assert list(described) == ["more/draft.gguf", split.name]
    assert len(described[split.name]["files"]) == 2
    with lb.Model(tmp_path / "more" / "draft.gguf") as model:
        for name in ("architecture", "n_params", "n_vocab", "vocab_type", "file_type"):
            assert described["more/draft.gguf"][name] == getattr(model, name)
    errors = {each["name"]: each["error"] for each in answer["failed"]}
    assert set(errors) == {"cut.gguf", "text.gguf", lone.name}
    assert "truncated" in errors["cut.gguf"]
    shown = run("models", "--local", str(tmp_path))
    assert shown.exit_code == 0
    assert "more/draft.gguf" in shown.stdout and "Q8_0" in shown.stdout
    assert "text.gguf: " in shown.stderr
    for arguments in (("models", str(tmp_path)), ("models", "--local", str(tmp_path / "none"))):
        assert run(*arguments).exit_code == 2


def test_models_marks_what_is_present(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-0.6B-Q8_0.gguf").touch()
    caches = {"LLAMABRANCH_CACHE": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "none")}
    listed = json.loads(run("models", "--json", **caches).stdout)["models"]
    present = {entry["name"] for entry in listed if entry["present"]}
    assert present - {"smollm2-135m"} == {"tale-target", "tale-draft", "tale-eagle", "qwen3-0.6b"}
    assert "llamabranch pull" in run("models", **caches).stdout


# -- the process -----------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("llamabranch 0.")
    for command in ("demo", "doctor", "speculate", "generate", "inspect", "models", "pull"):
        assert command in run("--help").stdout
        assert run(command, "--help").exit_code == 0


def test_pipe_that_closes_early_ends_the_command_quietly() -> None:
    process = subprocess.Popen(
        [
            *COMMAND,
            "speculate",
            "-m",
            "tale-target",
            "--max-tokens",
            "900",
            "--ignore-end",
            "--threads",
            "1",
            "--display-prompt",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(20).startswith(b"Once upon a time")
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=TIMEOUT_S) != 0


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_interrupt_prints_what_there_is_and_exits_with_130() -> None:
    process = subprocess.Popen(
        [*COMMAND, *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seen = process.stdout.read(60)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert len(seen + out) > 60
    for label in STATISTICS:
        assert label in err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
@pytest.mark.parametrize("moment", ["atexit, first", "atexit, last", "threads", "modules", "sys"])
def test_ctrl_c_in_the_last_moments_never_ends_the_process_by_the_signal(moment: str) -> None:
    """Python restores the system's SIGINT handler before it frees its modules."""
    program = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
sys.argv = ["llamabranch", "theory", "--json"]
moment = MOMENT
def ctrl_c(kill=os.kill, pid=os.getpid()):
    kill(pid, 2)
class Late:
    def __del__(self, ctrl_c=ctrl_c):
        ctrl_c()
import atexit, threading
if moment == "atexit, last":
    atexit.register(ctrl_c)
from llamabranch.cli import main
if moment == "atexit, first":
    atexit.register(ctrl_c)
elif moment == "threads":
    threading._register_atexit(ctrl_c)
elif moment == "modules":
    sys.modules["late"] = Late()
elif moment == "sys":
    sys.late = Late()
main()
"""
    command = [sys.executable, "-c", program.replace("MOMENT", repr(moment))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 130), done.stderr
    assert done.stdout.startswith("{"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_ctrl_c_at_any_moment_after_the_output_never_ends_the_process_by_the_signal() -> None:
    for n_spins in range(0, 60_000, 10_000):  # some milliseconds, in steps
        with subprocess.Popen(
            [*COMMAND, "theory", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_take_ctrl_c,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.read(20)
            for _ in range(n_spins):
                pass
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=TIMEOUT_S)
            assert process.returncode in (0, 130)


def _take_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it


@pytest.mark.skipif(os.name == "nt", reason="Windows reads arguments as Unicode")
def test_arguments_are_utf8_whatever_the_locale(tmp_path: Path) -> None:
    page = tmp_path / "König.html"
    done = subprocess.run(
        [*COMMAND, "speculate", "König", "-n", "2", "--threads", "1", "--json", "--html", str(page)],
        capture_output=True, check=False, env={**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "König" in page.read_text("utf-8")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_interrupt_with_json_writes_what_there_is_and_exits_with_130() -> None:
    process = subprocess.run(
        [*signalled_at_decode("SIGINT", 100), *ENDLESS, "--json"],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert process.returncode == 130, process.stderr
    assert "Traceback" not in process.stderr
    answer = json.loads(process.stdout)
    assert answer["finish_reason"] is None
    assert answer["tokens"]


def test_text_follows_an_expression_or_a_choice() -> None:
    options = ("-p", "The king", "-n", "20", "--seed", "3")
    text = str(run_json(*options, "--regex", r" is \d{2} years old\.")["text"])
    assert re.fullmatch(r" is \d{2} years old\.", text)
    choices = [" yes, he is", " no, he is not"]
    found = run_json(*options, "--choice", choices[0], "--choice", choices[1])
    assert found["text"] in choices
    result = run("speculate", "--regex", "a", "--choice", "b")
    assert result.exit_code == 2
    assert "--regex and --choice exclude each other" in result.output.replace("\n", " ")


LONG_TEXT = "The king was old. " * 400


@pytest.mark.parametrize("n_ctx", [None, "256"])
@pytest.mark.parametrize(
    "command",
    [("speculate", "-n", "4"), ("search", "-n", "4"), ("score",), ("select",)],
    ids=lambda c: c[0],
)
def test_prompt_that_is_too_long_is_refused_before_the_model_loads(
    command: tuple[str, ...], n_ctx: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("llamabranch.load", load)
    name, *options = command
    given = [name, LONG_TEXT, *([" Old"] if name == "select" else []), *options]
    result = run(*given, *([] if n_ctx is None else ["--n-ctx", n_ctx]))
    assert result.exit_code == 1
    most = "the model is made for 1,024" if n_ctx is None else "--n-ctx is 256"
    assert re.search(rf"the prompt has [\d,]+ tokens, {most}", result.stderr.replace("\n", " "))


def test_context_is_as_large_as_a_long_prompt_needs(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "long.gguf", vocab="bytes", n_ctx_train=8192)
    result = run("speculate", "a" * 3000, "-m", str(path), "--draft", "none", "-n", "4", "-t", "1")
    assert result.exit_code == 0, result.stderr


@pytest.mark.smollm2
def test_commands_agree_on_the_model_and_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate and select took the tale model in silence, chat and demo SmolLM2."""
    catalogue = sys.modules["llamabranch.hub.catalogue"]
    few = ("--max-tokens", "1", "--temperature", "0", "--threads", "1")
    commands = (
        ("generate", "-p", "The capital of France is", *few),
        ("select", "The capital of France is", " Paris", " Rome", "--threads", "1"),
        ("speculate", "The capital of France is", *few),
        ("chat", "-p", "Hello", *few),
        ("inspect",),
    )
    for name in ("smollm2-135m", "tale-target"):
        monkeypatch.setattr(catalogue, "DEFAULT_MODEL", name)
        for command in commands:
            assert f"model: {name}" in run(*command).stderr, command
    monkeypatch.setattr(catalogue, "DEFAULT_MODEL", "not-installed")
    assert "model: tale-target" in run(*commands[0]).stderr
    assert "model: " not in run(*commands[1], "-m", "tale-target").stderr
