"""``llamabranch generate`` and its name ``speculate``: texts, drafters, output, comparisons."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from commands import COMMAND, answer, on_terminal, run, said_by, texts
from toys import CHAT_TEMPLATE, Vocabulary, write_toy

import llamabranch as lb
from llamabranch.cli.comparison import DraftComparison, compare
from llamabranch.cli.interrupts import InterruptHandler
from llamabranch.context import Capabilities, opening

ESCAPE = "\x1b["
FIXED = ("--draft-length", "4")  # where a test needs drafts: "auto" drafts where it pays
PROMPTS = ("What is random forest?", "Explain black holes", "What is the capital of France?")
REFRAIN = "Mirror, mirror on the wall, who is the fairest of them all?\n\n" * 4
# The names of the statistics of speculate, in order, and those that --compare adds.
STATISTICS = (
    "iterations", "drafted", "accepted", "accept rate", "tokens a pass", "decodes of target",
    "decodes of draft", "tokens a second",
)  # fmt: skip
COMPARED = ("speed-up", "texts equal")


def speculate(*arguments: object) -> dict[str, Any]:
    return answer("speculate", *arguments)


# -- progress ------------------------------------------------------------------------------------------


def test_reading_of_a_long_prompt_is_a_line_that_goes(tmp_path: Path) -> None:
    prompt = "A king had three daughters, and " * 150
    (tmp_path / "long.txt").write_text(prompt)
    program = "import sys; from llamabranch.cli.app import main; main()"
    command = [sys.executable, "-c", program, "generate", "-m", "tale-target", "--temp", "0"]
    command += ["-f", str(tmp_path / "long.txt"), "-n", "4", "-c", "2048", "-t", "1"]
    command += ["-S", "rope_freq_scale=0.5"]
    shown, _ = on_terminal(command, 80)
    counts = re.findall(r"reading the prompt: ([0-9,]+) of ([0-9,]+) tokens", shown)
    assert counts[0][0] == "0" and len(counts) > 2 and len({total for _, total in counts}) == 1
    assert "loading tale-target: 100%" in shown
    assert "measuring tale-target: which batches are exact, 0 of 17" in shown
    before, _, after = shown.partition("A king had three daughters")
    assert before.endswith("\r\x1b[2K") or "\x1b[2K" in before.rpartition("tokens")[2]
    assert "reading" not in after
    piped = run(*command[3:])
    assert piped.exit_code == 0 and "reading" not in piped.output
    assert piped.stdout and ESCAPE not in piped.stdout


# -- texts ---------------------------------------------------------------------------------------------


def test_command_of_the_seed_runs_as_it_is_written() -> None:
    command = ["speculate", "--target_model", "tale-target", "--draft_model", "tale-draft"]
    command += ["--prompts", *PROMPTS]
    command += ["--gamma", "5", "--max_tokens", "12", "--temperature", "0.75"]
    result = run(*command)
    assert result.exit_code == 0, result.stderr
    for label in STATISTICS:
        assert f"\n  {label} " in result.stderr  # a pipe gets the texts alone
        assert f"\n  {label} " not in result.stdout
    assert ESCAPE not in result.output
    plain = run(*command, "--auto_regressive")
    assert plain.exit_code == 0 and "accept rate        -\n" in plain.stderr


def test_drafts_and_neighbours_change_no_text() -> None:
    common = ("generate", "-p", *PROMPTS, "-s", "5", "-n", "20", "--samples", "2")
    several = answer(*common)
    assert set(several) == {
        *("requests", "skipped", "failed", "interrupted", "seed", "batch_invariant"),
        *("explain", "stats", "results"),
    }
    assert several["seed"] == 5 and several["batch_invariant"] is True
    assert texts(several) == texts(answer(*common, "--draft", "none", "--parallel", "1"))
    assert len(texts(several)) == 6
    few = answer("generate", "-p", *PROMPTS[:2], *common[-6:], "--draft", "lookup", "--gamma", "3")
    assert texts(few).items() <= texts(several).items()


def test_a_pipe_gets_the_texts_alone_in_the_order_of_the_prompts() -> None:
    common = ("-s", 2, "-n", 9, "-np", 2, "-d", "none")
    arguments = ("generate", "--prompts=- Once", "The old", "-p", "A", *common)
    results = sorted(answer(*arguments)["results"], key=lambda record: int(record["id"]))
    assert [record["prompt"] for record in results] == ["- Once", "The old", "A"]
    in_order = [record["text"] for record in results]
    labels = ("0: - Once", "1: The old", "2: A")
    expected = [f"==> {label} <==\n{text}\n" for label, text in zip(labels, in_order, strict=True)]
    assert run(*arguments).stdout == "\n".join(expected)
    samples = run("generate", "-p", "A", "--samples", "2", *common).stdout
    assert samples.startswith("==> 0: A <==\n") and "\n==> 0, sample 1: A <==\n" in samples
    shown = run(*arguments, FORCE_COLOR="1", NO_COLOR="1").stdout
    assert f"[1] The old{in_order[1]}\n\n" in shown


def test_one_text_is_streamed_and_coloured_by_source_on_a_terminal() -> None:
    arguments = ("A prince", "-n", "48", "-s", "3", *FIXED)
    text = speculate(*arguments)["text"]
    for command in ("speculate", "generate"):
        assert run(command, *arguments).stdout.count("\n\n") == 0
    assert run("speculate", *arguments).stdout == text + "\n"
    terminal = run("speculate", *arguments, FORCE_COLOR="1", TERM="dumb", NO_COLOR="1")
    assert terminal.stdout.startswith("A prince" + text + "\n\n")
    assert "tokens a second" in terminal.stdout and ESCAPE not in terminal.stdout
    colored = run("speculate", *arguments, FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert "drafted and accepted" in colored
    assert "\x1b[32m" in colored and "\x1b[33m" in colored  # drafted: green; corrected: yellow


def test_json_of_one_text_has_the_names_of_the_field() -> None:
    report = speculate("-n", "20", "-s", "5", *FIXED)
    flat = {"text", "tokens", "finish_reason", "tokens_per_s", "seed", "rule", "explain", "stats"}
    assert flat <= set(report)
    names = set(answer("generate", "-p", "Once", "-n", "2"))
    assert names | {label.replace(" ", "_") for label in STATISTICS} == set(report)
    assert (report["rule"], report["seed"]) == ("seeded", 5)
    assert report["finish_reason"] in ("length", "stop") and len(report["tokens"]) <= 20
    assert "tale-draft" in report["explain"]
    stats = report["stats"]
    assert set(stats) >= set(lb.SpeculativeStats().as_dict())
    assert 0 < stats["num_accepted_tokens"] <= stats["num_draft_tokens"]
    with lb.load(n_threads=1) as ctx:
        plain = lb.Speculator(ctx).generate(
            "Once upon a time", max_tokens=20, sampling=lb.SamplingParams(seed=5)
        )
        assert report["tokens"] == plain.finish().tokens
    assert speculate("-n", "8")["rule"] == "seeded"
    assert speculate("-n", "8", "--temp", "0")["rule"] == "seeded"


@pytest.mark.parametrize("compares", [False, True])
def test_speculate_always_drafts_and_says_how_well_in_words_on_fourteen_lines(
    compares: bool,
) -> None:
    # Nothing is said about the length: it is 4, also where `auto` would stop drafting.
    arguments = ("speculate", "Once upon a time", "-n", "32", "-s", "3", *["--compare"] * compares)
    report = answer(*arguments)
    assert 0 < report["accepted"] <= report["drafted"] <= 4 * report["iterations"]
    assert report["stats"]["num_draft_tokens"] == report["drafted"]
    assert report["accept_rate"] == pytest.approx(report["accepted"] / report["drafted"])
    passes = report["accepted"] + report["iterations"]
    assert report["tokens_a_pass"] == pytest.approx(passes / report["iterations"])
    assert report["decodes_of_target"] > 0 < report["decodes_of_draft"]
    command = [*COMMAND, *arguments, "-t", "1"]
    shown, _ = on_terminal([*command, "-m", "tale-target"], 80)
    lines = re.sub("[^\n]*\x1b\\[2K|\x1b\\[[0-9;]*m", "", shown).rpartition("\n\n")[2].splitlines()
    assert len(lines) <= 14 and all(len(line) <= 80 for line in lines)
    assert "tale-target, 4 tokens a draft by tale-draft" in lines
    rows = {line[2:21].strip(): line[21:] for line in lines if line.startswith("  ")}
    assert tuple(rows) == (*STATISTICS, *COMPARED * compares)
    assert {name.replace(" ", "_").replace("-", "_") for name in rows} <= set(report)
    rate = f"{report['accept_rate'] * 100:.0f} % ({report['accepted']} of {report['drafted']})"
    assert rows["accept rate"] == rate
    for word in ("nconclusive", "xact", "attention", "warning"):
        assert word not in "".join(lines)
    if compares:
        number = r"\d+\.\d\d"
        assert re.match(rf"{number} \({number} to {number}\); plain decoding: ", rows["speed-up"])
        assert rows["texts equal"] == ("yes" if report["texts_equal"] else rows["texts equal"])


def test_speculate_finds_a_drafter_for_any_model(tmp_path: Path) -> None:
    bundled = "model: tale-target, drafts: tale-draft"
    assert bundled in said_by("speculate", "Once", "-n", "4")
    assert bundled in said_by("speculate", "Once", "-n", "4", "-d", "auto")
    assert "drafts: tale-draft" in said_by("speculate", "Once", "-n", "4", "-m", "tale-target")
    alone = write_toy(tmp_path / "alone.gguf", vocab="bytes")
    said = said_by("speculate", "aaaa", "-n", "8", "-m", alone)
    assert "drafts are copied from the text" in said and "4 tokens a draft by suffix" in said
    report = answer("speculate", "Once", "-n", "24", "--grammar", "/ [a-z ]{9,}\\./")
    assert "tale-draft" in report["explain"] and "grammar" in report["explain"]
    # `auto` is for those who ask for it, and `generate` is quiet.
    assert "4 tokens a draft" not in said_by("speculate", "Once", "-n", "4", "-k", "auto")
    quiet = run("generate", "-p", "Once", "-n", "4", "-s", "1", "-m", "tale-target").stderr
    assert quiet.count("\n") == 1


def test_figures_are_printed_where_drafting_was_asked_for() -> None:
    arguments = ("generate", "-p", "The king", "-n", "8", "-s", "1")
    plain = run(*arguments, "-d", "none")
    assert re.fullmatch(
        r"8 tokens, ended by length, \d+\.\d a second, seed 1\n",
        plain.stderr.replace("model: tale-target (the default; -m names another)\n", ""),
    )
    # The grammar drafts although no option asks for drafts.
    grammar = run(*arguments, "--grammar", "/ is [a-z ]{40}/").stderr
    assert "decodes of target" not in grammar
    for more in ((), ("-d", "suffix"), ("-d", "none", "-v"), ("-d", "none", "--compare")):
        shown = run(*arguments, *more).stderr
        assert ("decodes of target" in shown) == ("--compare" in more)
        assert ("plain decoding: there is no drafter" in shown) == ("-v" in more)
    two = run("generate", "-p", "A", "B", "-n", "3", "-d", "none", "-s", "1").stderr
    assert "2 texts, 6 tokens, ended by length 2, " in two


def test_what_is_piped_in_is_the_prompt_if_none_is_given(tmp_path: Path) -> None:
    for name in ("generate", "speculate", "search"):
        arguments = (name, "-n", "2", "-s", "1")
        piped, named = (
            answer(*arguments, *more, stdin="A\r\nking\n") for more in ((), ("-p", "Once"))
        )
        prompts = [
            report["prompt"] if name == "search" else report["results"][0]["prompt"]
            for report in (piped, named)
            if name != "speculate"
        ]
        assert prompts == ["A\r\nking", "Once"][: len(prompts)]
        first, second = (
            run(*arguments, *more, stdin="A\r\nking\n") for more in ((), ("A\r\nking",))
        )
        assert first.stdout == second.stdout
    assert "pipe it in" in said_by("generate", "-n", "2")
    text = answer("score", stdin="Once upon a time\n")["items"][0]["scores"][0]["text"]
    assert text == "Once upon a time"


@pytest.mark.filterwarnings("always::llamabranch.errors.ExactnessWarning")
def test_a_warning_waits_for_the_end_of_a_text_and_is_one_line_once_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pretend that batches were measured as inexact, which depends on the processor."""
    inner = opening.open_native

    def opened(*arguments: Any) -> Any:
        resolved, can, decoder = inner(*arguments)
        return resolved, pretended(can), decoder

    def pretended(can: Capabilities) -> Capabilities:
        return dataclasses.replace(can, batch_invariant=False, exact_rows=0, total_variation=0.01)

    monkeypatch.setattr("llamabranch.context.context.open_native", opened)
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(tmp_path / "profile.json"))
    arguments = ("generate", "-p", "The king", "-n", "24", "-s", "1", *FIXED)
    terminal = {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "dumb"}
    first = run(*arguments, **terminal)
    text = answer(*arguments)["results"][0]["text"]
    assert f"The king{text}\n\n" in first.output  # standard output and error as they come
    (line,) = [line for line in first.stderr.splitlines() if "warning" in line]
    line = line.removeprefix("\x1b[2K")  # this clears a line of progress
    assert line.startswith("warning: drafted or batched texts can differ") and len(line) < 80
    assert "warning" not in run(*arguments).stderr
    assert "total variation" in " ".join(run(*arguments, "-v").stderr.split())
    (tmp_path / "profile.json").unlink()
    chat = run("chat", "-p", "Hi", "-n", "24", "-s", "1", *FIXED, **terminal)
    lines = chat.output.splitlines()
    assert sum("warning: drafted" in line for line in lines) == 1
    assert lines[[line.startswith("warning: drafted") for line in lines].index(True) - 1]


def test_prompt_comes_from_standard_input_and_files(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Once upon\na time\n\n")
    results = answer("generate", "-p", "A", "-f", path, "-n", "2", "-d", "none")["results"]
    # One newline is taken off, as llama.cpp does.
    assert {result["prompt"] for result in results} == {"A", "Once upon\na time\n"}
    (read,) = answer("generate", "-", "-n", "2", "-s", "1", stdin="The king")["results"]
    assert read["prompt"] == "The king"


def test_stop_text_and_full_context_end_the_generation() -> None:
    report = speculate("--stop", " ", "-s", "1", "-n", "64")
    assert report["finish_reason"] == "stop" and " " not in report["text"]
    arguments = ("-c", "256", "-n", "400", "--ignore-eos", "-s", "1")
    assert speculate(*arguments)["finish_reason"] == "capacity"
    assert "raise --ctx-size" in said_by("speculate", *arguments)


def test_structure_that_the_limit_cuts_is_warned_of() -> None:
    common = ("generate", "-p", "The king", "--grammar", "/ is [0-9]{8}/")
    cut = run(*common, "-n", "3")
    assert cut.exit_code == 0, cut.stderr
    assert "-n ended the text before its grammar" in cut.stderr
    assert ", ended by length, " in cut.stderr
    whole = run(*common, "-n", "40")
    assert "warning" not in whole.stderr and ", ended by stop, " in whole.stderr
    (result,) = answer(*common, "-n", "40", "-s", "1")["results"]
    assert re.fullmatch(r" is [0-9]{8}", result["text"])


def test_one_bad_request_does_not_stop_the_others() -> None:
    stdin = '{"prompt": "The king"}\n{"prompt": [5, 99999999], "id": "bad"}\n'
    result = run("generate", "--input", "-", "-n", "4", stdin=stdin)
    assert result.exit_code == 1
    assert "bad: token 99999999" in result.stderr and "failed" in result.stderr
    assert result.stdout.strip()


def test_lines_have_priorities_and_ask_for_detail(tmp_path: Path) -> None:
    lines = [
        {"id": "later", "prompt": "The wolf", "priority": 3},
        {"id": "sooner", "prompt": "The king", "prompt_logprobs": 2, "max_tokens": 3},
    ]
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    done = run(
        "generate", "-i", source, "-o", results, "-np", "1", "-n", "4", "--top-logprobs", "1",
        "-s", "1", "-S", "prefix_cache=true",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    sooner, later = (json.loads(line) for line in results.read_text("utf-8").splitlines())
    assert [sooner["id"], later["id"]] == ["sooner", "later"]
    assert [entry["token"] for entry in sooner["logprobs"]] == sooner["tokens"]
    assert [len(entry["alternatives"]) for entry in later["logprobs"]] == [1] * len(later["tokens"])
    assert sooner["prompt_logprobs"][0] is None and sooner["prompt_logprobs"][1]["rank"] >= 1
    assert "prompt_logprobs" not in later


def test_control_tokens_of_a_prompt_are_parsed_unless_a_line_says_not(tmp_path: Path) -> None:
    vocabulary = Vocabulary.with_control("<s>", "</s>", "<|im_end|>")
    model, prompt = write_toy(tmp_path / "toy.gguf", vocab=vocabulary), "a<|im_end|>b"
    settings = {"prompt": prompt, "seed": 1, "max_tokens": 6}
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, [settings, {**settings, "parse_special": False}])))
    by_name = texts(answer("generate", "-i", path, "-m", model, "-d", "none"))
    with lb.load(model, n_ctx=256, n_threads=1) as ctx:
        for name, parses in (("0.0", True), ("1.0", False)):
            with lb.Branch.start(ctx, prompt, seed=1, parse_special=parses) as branch:
                assert by_name[name] == "".join(token.text for token in branch.generate(6))
    assert by_name["0.0"] != by_name["1.0"]
    assert answer("score", prompt, "-m", model)["total"]["n_tokens"] == 3  # after BOS


@pytest.mark.parametrize("command", ["generate", "search"])
def test_chat_prints_the_answer_on_a_line_of_its_own(command: str, tmp_path: Path) -> None:
    template = {"tokenizer.chat_template": CHAT_TEMPLATE}
    model = write_toy(tmp_path / "chat.gguf", vocab="bytes", metadata=template)
    arguments = (command, "-p", "Hi there", "-m", model, "-d", "none", "-s", "1", "-n", "4")
    terminal = {"FORCE_COLOR": "1", "NO_COLOR": "1"}
    assert "Hi there\n" not in run(*arguments, **terminal).stdout
    assert "Hi there\n" in run(*arguments, "--chat", **terminal).stdout


@pytest.mark.filterwarnings("always::llamabranch.errors.ContextLengthWarning")
def test_warning_is_one_line_on_standard_error() -> None:
    arguments = ("-n", "1040", "-d", "none", "-c", "2048", "--ignore-eos", "--json")
    result = run("speculate", *arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith("warning: ") and "1024 tokens" in result.stderr
    assert result.stderr.count("\n") == 1


# -- drafters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["lookup", "suffix", "suffix+tale-draft", "lookup+suffix"])
def test_every_drafter_gives_the_text_of_plain_decoding(draft: str) -> None:
    arguments = (REFRAIN, "-n", "48", "-s", "7", "--temp", "0")
    drafted = speculate("-d", draft, *arguments, *FIXED)
    assert drafted["tokens"] == speculate("-d", "none", *arguments)["tokens"]
    assert drafted["stats"]["num_accepted_tokens"] > 0
    files = draft.replace("tale-draft", "tale-draft-q8_0")  # models are named by their files
    assert files in drafted["explain"]


def test_draft_none_decodes_plainly_and_a_length_bounds_what_a_round_drafts() -> None:
    arguments = ("-n", "24", "-s", "7")
    plain, fixed = speculate("-d", "none", *arguments), speculate("-k", "2", *arguments)
    assert plain["tokens"] == fixed["tokens"] == speculate(*arguments)["tokens"]
    assert plain["stats"]["num_draft_tokens"] == 0
    assert plain["explain"] == "plain decoding: there is no drafter"
    assert fixed["stats"]["num_draft_tokens"] <= 2 * fixed["stats"]["num_drafts"]
    stopped = speculate("-S", "entropy_stop=0", *arguments)["stats"]
    assert (stopped["num_draft_tokens"], stopped["draft_acceptance_rate"]) == (0, None)
    shown = run("speculate", "-S", "entropy_stop=0", *arguments).stderr
    for row in ("drafted +0", "accepted +0", "accept rate +-"):
        assert re.search(f"^  {row}$", shown, re.MULTILINE), row


def test_file_with_a_plus_in_its_name_is_no_chain(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "a+b.gguf", vocab="bytes")
    report = speculate("Hi", "-m", path, "-d", path, "-n", "8", *FIXED, "-s", "1")
    assert report["stats"]["draft_acceptance_rate"] == 1.0


def test_draft_of_another_vocabulary_drafts_through_the_text(tmp_path: Path) -> None:
    other = write_toy(tmp_path / "other.gguf", vocab="bytes")
    arguments = ("speculate", "-n", "16", "-s", "7", "--json", *FIXED)
    result = run(*arguments, "-d", other)
    assert "another vocabulary" in result.stderr
    assert json.loads(result.stdout)["tokens"] == speculate(*arguments[1:], "-d", "none")["tokens"]


# -- compared with plain decoding ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_compare_gives_the_text_of_plain_decoding(temperature: str) -> None:
    report = speculate("--compare", "--temp", temperature, "-n", "40", "-s", "7", *FIXED)
    plain = report["plain"]
    assert set(plain) == {"text", "tokens", "tokens_per_s", "results"}
    assert (plain["text"], plain["tokens"]) == (report["text"], report["tokens"])
    assert report["speed_up"] == pytest.approx(report["tokens_per_s"] / plain["tokens_per_s"])
    assert report["plain_tokens_a_second"] == plain["tokens_per_s"]
    assert report["texts_equal"] is report["same_text_expected"] is report["batch_invariant"]
    low, high = report["speed_up_range"]
    assert report["divergence"] is None and 0 < low <= high


def test_compare_takes_several_prompts_and_picks_a_seed() -> None:
    report = answer("generate", *PROMPTS, "--compare", "-n", "12", *FIXED)
    assert report["texts_equal"] is True and len(report["plain"]["results"]) == 3
    again = answer("generate", *PROMPTS, "-s", report["seed"], "-n", "12")
    assert texts(again) == texts(report) == texts(report["plain"])
    shown = run("generate", *PROMPTS, "--compare", "-n", "12", *FIXED).stderr
    assert re.search(r"^  texts equal +yes$", shown, re.MULTILINE)
    assert all(f"\n  {label}  " in shown for label in (*STATISTICS, *COMPARED))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rule_lossless_in_distribution_expects_no_equal_text(rule: str) -> None:
    arguments = ("-S", f"rule={rule}", "--compare", "-n", "32", "-s", "7", *FIXED)
    report = speculate(*arguments)
    assert (report["rule"], report["same_text_expected"]) == (rule, False)
    assert report["divergence"] is None
    if not report["texts_equal"]:
        assert f"no, as rule {rule} keeps only the" in said_by("speculate", *arguments)
    assert speculate(*arguments, "--temp", "0")["texts_equal"] is True


def test_repeated_runs_of_a_comparison_do_not_copy_each_other() -> None:
    # With an index shared by all runs the second one would find its own text and accept all of it.
    arguments = ("A prince", "-d", "suffix", "-s", "3", "-n", "40", *FIXED)
    alone, again = speculate(*arguments), speculate(*arguments, "--compare")
    counts = [run["stats"]["num_accepted_tokens"] for run in (alone, again)]
    assert counts[0] == counts[1] < 20


def _flawed(
    drafting: lb.Engine, plain: lb.Engine, *rest: Any, **options: Any
) -> DraftComparison | None:
    """Compare as usual, but pretend that plain decoding generates another token 5."""
    generate = plain.generate

    def flawed(requests: Any) -> list[lb.Result]:
        (result,) = results = generate(requests)
        result.tokens = [*result.tokens[:5], 0, *result.tokens[6:]]
        return results

    with mock.patch.object(plain, "generate", flawed):
        return compare(drafting, plain, *rest, **options)


@pytest.mark.parametrize("more", [(), ("--temp", "0", "--kv-type", "f16")])
def test_texts_that_differ_are_reported_with_place_tokens_and_probabilities(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("llamabranch.cli.generate"), "compare", _flawed)
    arguments = ("--compare", "-n", "12", "-s", "7", *FIXED, *more)
    report = speculate(*arguments)
    assert report["texts_equal"] is False
    divergence, is_exact = report["divergence"], "f16" not in more
    assert (divergence["position"], divergence["tokens"]) == (5, [0, report["tokens"][5]])
    assert divergence["logprobs"][0] < divergence["logprobs"][1] <= 0
    shown = said_by("speculate", *arguments)
    assert "texts equal no, from token 5 on" in shown
    assert ("bug in llamabranch" in shown) == is_exact
    if is_exact:  # without room for the text, the place and the figures are still shown
        monkeypatch.setattr(lb.Branch, "start", mock.Mock(side_effect=lb.errors.CacheFullError("")))
        report = speculate(*arguments)
        assert report["divergence"] == {**divergence, "logprobs": [None, None]}


class TimedEngine(lb.Engine):
    """An engine whose runs take the next of these numbers of seconds, by its clock."""

    seconds: Iterator[float]

    def generate(self, *arguments: Any, **options: Any) -> list[lb.Result]:
        before = self.stats.elapsed_s
        results = super().generate(*arguments, **options)
        self.stats.elapsed_s = before + next(self.seconds)
        return results


@pytest.mark.parametrize(
    ("drafted", "plain", "n_pairs", "expected"),
    [
        ([0.15] * 9, [0.1, *[0.2] * 8], 9, (4 / 3, 4 / 3, 4 / 3)),  # a pair that disagrees
        ([3.0] * 6, [9.0] * 6, 5, (3, 3, 3)),  # no pair begins after the time
        ([40.0], [90.0], 1, (2.25, 2.25, 2.25)),  # longer than the time: not repeated
        ([3.0] * 9, [9.0, *[10.0] * 8], 5, (10 / 3, 3, 10 / 3)),  # too few pairs: all of them
    ],
)
def test_a_speed_up_has_the_range_of_its_pairs(
    drafted: list[float],
    plain: list[float],
    n_pairs: int,
    expected: tuple[float, float, float],
    ctx: lb.Context,
    draft_ctx: lb.Context,
) -> None:
    config = lb.SpeculativeConfig(draft_k=2)
    drafters = lb.ModelDrafter(draft_ctx), lb.speculative.NullDrafter()
    fast, slow = (TimedEngine(ctx, drafter, config) for drafter in drafters)
    fast.seconds, slow.seconds = iter(drafted), iter(plain)
    comparison = compare(fast, slow, [lb.Request("Once upon", max_tokens=4)], InterruptHandler())
    assert comparison is not None and len(comparison.plain.runs) == n_pairs
    found = comparison.speed_up, comparison.range.low, comparison.range.high
    assert found == pytest.approx(expected)


def test_a_constraint_is_a_function_of_a_file(tmp_path: Path) -> None:
    rules = tmp_path / "rules.py"
    rules.write_text(
        "import re\n"
        "def no_e(text):\n    return not re.search('e', text)\n"
        "def broken(text):\n    return 1 // 0\n"
    )
    arguments = ["-n", "24", "--seed", "3", "--constraint", f"{rules}:no_e"]
    report = answer("generate", "-p", "Once upon a time", *arguments)
    assert "e" not in report["results"][0]["text"] and report["results"][0]["text"]
    both = answer(
        "generate", "-p", "Once upon a time", *arguments, "--grammar", "/ [a-z ]{8,12}\\./"
    )
    assert re.fullmatch(r" [a-df-z ]{8,12}\.", both["results"][0]["text"])
    for wrong, message in (
        (["--constraint", f"{rules}:no_f"], "has no 'no_f'"),
        (["--constraint", f"{tmp_path}/absent.py:no_e"], "cannot read"),
        (["--constraint", "no_e"], "FILE.py:NAME"),
        (["--constraint", f"{rules}:broken"], "ZeroDivisionError"),
    ):
        result = run("generate", "-p", "Once upon a time", "-n", "3", *wrong)
        assert result.exit_code != 0 and message in result.stderr
