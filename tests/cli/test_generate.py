"""``llamabranch generate`` and its name ``speculate``: texts, drafters, output, comparisons."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import ENDLESS, answer, on_terminal, run, said_by, texts
from toys import write_toy

import llamabranch as lb
from llamabranch.cli.comparison import pairs, speed_up
from llamabranch.cli.interrupts import InterruptHandler

ESCAPE = "\x1b["
FIXED = ("--draft-length", "4")  # where a test needs drafts: "auto" drafts where it pays
PROMPTS = ("What is random forest?", "Explain black holes", "What is the capital of France?")
REFRAIN = "Mirror, mirror on the wall, who is the fairest of them all?\n\n" * 4
# The names of the statistics of speculate, in order, and those that --compare adds.
STATISTICS = ("accept rate", "tokens a pass", "decodes", "tokens/s")
COMPARED = ("speed-up", "texts equal")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare two pairs of runs."""
    monkeypatch.setattr("llamabranch.cli.comparison.MOST_PAIRS", 2)


def speculate(*arguments: object) -> dict[str, Any]:
    return answer("speculate", *arguments)


def test_reading_of_a_long_prompt_is_a_line_that_goes(tmp_path: Path) -> None:
    prompt = "A king had three daughters, and " * 150
    program = "import sys; from llamabranch.cli.app import main; main()"
    command = [sys.executable, "-c", program, "generate", "-m", "tale-target", "--temp", "0"]
    command += ["-p", prompt, "-n", "4", "-c", "2048", "-t", "1"]
    command += ["-S", "rope_freq_scale=0.5"]
    shown, _ = on_terminal(command, 80)
    counts = re.findall(r"reading the prompt: ([0-9,]+) of ([0-9,]+) tokens", shown)
    assert counts[0][0] == "0" and len(counts) > 2 and len({total for _, total in counts}) == 1
    assert "loading tale-target: 100%" in shown
    before, _, after = shown.partition("A king had three daughters")
    assert before.endswith("\r\x1b[2K") or "\x1b[2K" in before.rpartition("tokens")[2]
    assert "reading" not in after
    piped = run(*command[3:])
    assert piped.exit_code == 0 and "reading" not in piped.output
    assert piped.stdout and ESCAPE not in piped.stdout


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
    assert plain.exit_code == 0 and "accept rate    nothing was drafted\n" in plain.stderr


def test_one_text_is_streamed_and_coloured_by_source_on_a_terminal() -> None:
    arguments = ("A prince", "-n", "48", "-s", "3", *FIXED)
    text = speculate(*arguments)["text"]
    (written,) = texts(answer("generate", *arguments)).values()
    assert run("speculate", *arguments).stdout == text + "\n"
    assert run("generate", *arguments).stdout == written + "\n"
    terminal = run("speculate", *arguments, FORCE_COLOR="1", TERM="dumb", NO_COLOR="1")
    assert terminal.stdout.startswith("A prince" + text + "\n\n")
    assert "tokens/s" in terminal.stderr and ESCAPE not in terminal.stdout
    colored = run("speculate", *arguments, FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert "drafted and accepted" in colored
    assert "\x1b[32m" in colored and "\x1b[33m" in colored  # drafted: green; corrected: yellow


@pytest.mark.parametrize("compares", [False, True])
def test_speculate_always_drafts_and_says_how_well_in_words_on_nine_lines(
    compares: bool,
) -> None:
    # Nothing is said about the length: it is 4, also where `auto` would stop drafting.
    arguments = ["speculate", "Once upon a time", "-n", "16", "-s", "3", "--exact"]
    arguments += ["--compare"] * compares
    report = answer(*arguments)
    assert 0 < report["accepted"] <= report["drafted"] <= 4 * report["iterations"]
    assert report["stats"]["num_draft_tokens"] == report["drafted"]
    assert report["accept_rate"] == pytest.approx(report["accepted"] / report["drafted"])
    passes = report["accepted"] + report["iterations"]
    assert report["tokens_a_pass"] == pytest.approx(passes / report["iterations"])
    assert report["decodes_of_target"] > 0 < report["decodes_of_draft"]
    terminal = {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}
    shown = run(*arguments, "-m", "tale-target", **terminal).stderr
    lines = re.sub("[^\n]*\x1b\\[2K", "", shown).splitlines()
    assert len(lines) <= 9 and all(len(line) <= 80 for line in lines)
    assert "tale-target, drafts of 4 tokens by tale-draft" in lines
    rows = {line[2:17].strip(): line[17:] for line in lines if line.startswith("  ")}
    assert tuple(rows) == (*STATISTICS, *COMPARED * compares) and report["seed"] == 3
    assert {*answer("generate", "-p", "Once", "-n", "2")} < set(report)
    rate = f"{report['accept_rate'] * 100:.0f} % ({report['accepted']} of {report['drafted']})"
    assert rows["accept rate"] == rate
    n, mean = report["iterations"], report["tokens_a_pass"]
    assert rows["tokens a pass"] == f"{mean:.2f} ({report['accepted'] + n} in {n})"
    decodes = "{decodes_of_target} of the target, {decodes_of_draft} of the draft"
    assert rows["decodes"] == decodes.format(**report)
    for word in ("nconclusive", "xact", "attention", "warning", "verdict", "goodput"):
        assert word not in "".join(lines)
    if compares:
        number = r"\d+\.\d\d"
        assert re.fullmatch(rf"{number} \({number} to {number}\)", rows["speed-up"])
        assert rows["tokens/s"].endswith(" without drafts")
        assert rows["texts equal"] == "yes" and report["texts_equal"] is True
        plain = report["plain_tokens_per_second"]
        assert report["speed_up"] == pytest.approx(report["tokens_per_second"] / plain)
        low, high = report["speed_up_range"]
        assert 0 < low <= high


def test_speculate_finds_a_drafter_for_any_model(tmp_path: Path) -> None:
    bundled = "model: tale-target, drafts: tale-draft"
    assert bundled in said_by("speculate", "Once", "-n", "4")
    assert bundled in said_by("speculate", "Once", "-n", "4", "-d", "auto")
    assert "by tale-draft" in said_by("speculate", "Once", "-n", "4", "-m", "tale-target")
    alone = write_toy(tmp_path / "alone.gguf", vocab="bytes")
    said = said_by("speculate", "aaaa", "-n", "8", "-m", alone)
    assert "drafts are copied from the text" in said
    assert "drafts of 4 tokens by suffix" in said
    # Whatever the model writes occurred in the prompt, so each draft is copied.
    only = ("--grammar", "root ::= [ab ]+")
    assert answer("speculate", "a b a b a", "-n", "8", "-m", alone, *only)["drafted"] > 0
    report = answer("speculate", "Once", "-n", "24", "--grammar", "/ [a-z ]{9,}\\./")
    assert "tale-draft" in report["drafter"] and "grammar" in report["drafter"]
    # `auto` is for those who ask for it, and `generate` is quiet.
    assert "drafts of 4 tokens" not in said_by("speculate", "Once", "-n", "4", "-k", "auto")
    quiet = run("generate", "-p", "Once", "-n", "4", "-s", "1", "-m", "tale-target").stderr
    assert quiet.count("\n") == 1


def test_stop_text_and_full_context_end_the_generation() -> None:
    report = speculate("-S", "stop= ", "-s", "1", "-n", "64")
    assert report["finish_reason"] == "stop" and " " not in report["text"]
    arguments = ("Once " * 110, "-c", "256", "-n", "400", *ENDLESS, "-s", "1")
    assert "ended by the full context (-c)" in said_by("speculate", *arguments)


@pytest.mark.filterwarnings("always::llamabranch.errors.ContextLengthWarning")
def test_warning_is_one_line_on_standard_error() -> None:
    arguments = ("-n", "24", "-d", "none", "-c", "2048", *ENDLESS, "--json")
    result = run("speculate", "Once " * 510, *arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith("warning: ") and "1024 tokens" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("more", [("--temp", "0"), ("-s", "5"), ("-s", "5", "--temp", "1.5")])
def test_neighbours_drafts_and_batches_change_no_text(more: tuple[str, ...]) -> None:
    """The law of the command: in an exact context each text is the one it is alone."""
    common = ("-n", "16", "--exact", *more)
    several = texts(answer("generate", *PROMPTS, *common, "-S", "n=2"))
    drafted = answer("generate", *PROMPTS, *common, "-S", "n=2", "-md", "tale-draft", "-k", "3")
    alone = answer("generate", *PROMPTS, *common, "-S", "n=2", "-S", "n_seq_max=1", "-md", "none")
    assert several == texts(drafted) == texts(alone) and len(several) == 6
    few = answer("generate", *PROMPTS[:2], *common, "-md", "suffix")
    assert texts(few).items() <= several.items()


def test_a_pipe_gets_the_texts_alone_in_the_order_of_the_prompts() -> None:
    fixed = ("-s", 2, "-n", 9, "-d", "none")
    arguments = ("generate", "--prompts=- Once", "The old", "-p", "A", *fixed)
    results = answer(*arguments)["results"]
    assert [record["prompt"] for record in results] == ["The old", "- Once", "A"]
    labels = ("0: The old", "1: - Once", "2: A")
    expected = [
        f"==> {label} <==\n{record['text']}\n"
        for label, record in zip(labels, results, strict=True)
    ]
    assert run(*arguments).stdout == "\n".join(expected)
    one = run("generate", "A", "-n", 4, "-s", 1, "-d", "none")
    text = answer("generate", "A", "-n", 4, "-s", 1, "-d", "none")["text"]
    assert one.stdout == text + "\n"
    note = one.stderr.replace("model: tale-target (the default; -m names another)\n", "")
    assert re.fullmatch(r"4 tokens, ended by the limit -n, \d+\.\d tokens/s, seed 1\n", note)
    for name in ("generate", "speculate"):
        command = (name, "-n", "2", "-s", "1", "-d", "none")
        shown = [
            run(*command, *more, stdin="A king\n").stdout for more in ((), ("-",), ("A king",))
        ]
        assert shown == [shown[0]] * 3
    assert "pipe it in" in said_by("generate", "-n", "2")


def test_a_file_of_requests_becomes_results_in_its_order(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"id": "a", "prompt": "The wolf", "max_tokens": 3, "temperature": 0},
        {"prompt": "The king", "json_schema": {"enum": ["yes"]}},
        {"id": "bad", "prompt": [5, 99999999]},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    done = run("generate", "-i", source, "-n", "8", "-s", "1")
    assert done.exit_code == 1 and "bad: token 99999999" in done.stderr
    assert '"yes"' in done.stdout
    found = json.loads(run("generate", "-i", source, "-n", "8", "--json").stdout)["results"]
    assert [record["id"] for record in found] == ["a", "1", "bad"]
    assert len(found[0]["tokens"]) == 3 and found[1]["text"] == '"yes"'
    for line, message in (("{", "line 1: invalid request"), ("5", "must be an object")):
        source.write_text(line)
        assert message in said_by("generate", "-i", source)


def test_chains_files_with_a_plus_no_drafter_and_the_length_of_drafts(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "a+b.gguf", vocab="bytes")  # no chain
    report = speculate("Hi", "-m", path, "-d", path, "-n", "8", *FIXED, "-s", "1")
    assert report["stats"]["draft_acceptance_rate"] == 1.0
    arguments = ("-n", "24", "-s", "7")
    for chain in ("suffix", "suffix+tale-draft"):
        copied = speculate("-d", chain, REFRAIN, "-n", "48", "-s", "7", "--temp", "0", *FIXED)
        assert copied["stats"]["num_accepted_tokens"] > 0
        assert chain.replace("tale-draft", "tale-draft-q8_0") in copied["drafter"]
    plain, fixed = speculate("-d", "none", *arguments), speculate("-k", "2", *arguments)
    assert plain["tokens"] == fixed["tokens"] == speculate(*arguments)["tokens"]
    assert plain["stats"]["num_draft_tokens"] == 0
    assert plain["explain"] == "plain decoding: there is no drafter"
    assert fixed["stats"]["num_draft_tokens"] <= 2 * fixed["stats"]["num_drafts"]
    stopped = speculate("-S", "entropy_stop=0", *arguments)["stats"]
    assert (stopped["num_draft_tokens"], stopped["draft_acceptance_rate"]) == (0, None)
    shown = run("speculate", "-S", "entropy_stop=0", *arguments).stderr
    assert re.search("^  accept rate +nothing was drafted$", shown, re.MULTILINE)


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
        ([0.15] * 9, [0.1, *[0.2] * 8], 9, (4 / 3, 2 / 3, 4 / 3)),  # a pair that disagrees
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llamabranch.cli.comparison.MOST_PAIRS", 9)
    config = lb.SpeculativeConfig(draft_k=2)
    drafters = lb.ModelDrafter(draft_ctx), lb.speculative.NullDrafter()
    fast, slow = (TimedEngine(ctx, drafter, config) for drafter in drafters)
    fast.seconds, slow.seconds = iter(drafted), iter(plain)
    request = lb.Request("Once upon", max_tokens=4)
    compared = list(pairs(fast, slow, [request], InterruptHandler()))
    assert len(compared) == n_pairs
    assert speed_up(compared) == pytest.approx(expected)
