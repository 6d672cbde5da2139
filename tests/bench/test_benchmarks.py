"""The benchmarks run, their arithmetic is right, models have the vocabulary they should."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llamabranch as lb
from benchmarks import answer_tasks, answers
from benchmarks.clocks import interleave
from benchmarks.llama_tools import LlamaTools, ToolError, parse_report
from benchmarks.paired import holm, mcnemar
from benchmarks.paired import interval as paired_interval
from benchmarks.readme import answer_in, questions
from llamabranch.bench import timing
from llamabranch.bench.timing import Interval, Maker, Series, Spread, Stopped, Timing

ROOT = Path(__file__).parents[2]
needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the extra `test` is not installed: gguf"
)

SIMPLE_REPORT = """
0.00.100.405 I encoded    5 tokens in    0.002 seconds, speed: 3203.075 t/s
0.00.100.422 I decoded   41 tokens in    0.032 seconds, speed: 1291.745 t/s
0.00.100.443 I n_draft   = 4
0.00.100.453 I n_predict = 41
0.00.100.463 I n_drafted = 102
0.00.100.473 I n_accept  = 15
0.00.100.483 I accept    = 14.706%
"""
LOOKUP_REPORT = """
0.00.057.446 I decoded   41 tokens in    0.012 seconds, speed: 3416.951 t/s
0.00.057.467 I n_draft      = 3
0.00.057.477 I n_predict    = 41
0.00.057.487 I n_drafted    = 18
0.00.057.529 I n_accept     = 1
"""


def program(name: str, cache: Path, *arguments: str) -> dict[str, Any]:
    """Run a benchmark at its smallest; return its JSON line."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--no-peers"]
    command += ["--cache", str(cache), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    *tables, line = done.stdout.splitlines()
    assert any(text.startswith("| ") for text in tables), "tables come before the line"
    line_json: dict[str, Any] = json.loads(line)
    return line_json


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what the benchmarks make."""
    return tmp_path_factory.mktemp("benchmarks")


# -- the programs ----------------------------------------------------------------------------------


TALE = ("--q8-0", "tale-target", "--bf16", "tale-target", "--only", "edit", "json", "vote")


def of_tasks(results: dict[str, Any]) -> None:
    assert list(results) == ["edit, T = 0.8", "free, T = 0.8"]
    for task in results.values():
        assert list(task["compared"]) == ["plain", "auto", "fixed 3", "fixed 7", "fixed 15"]
        assert set(task["auto_over"]) == {"plain", task["best_fixed"]}


def of_readme(results: dict[str, Any]) -> None:
    names = ["edit, Q8_0", "edit, BF16", "json, Q8_0", "json, BF16", "vote, Q8_0"]
    assert list(results) == names
    assert all(results[name]["same_texts"] == 1 for name in names[:4])


def of_length(results: dict[str, Any]) -> None:
    (result,) = results.values()
    bare = {name for name in result["tokens_per_s"] if name.startswith("bare")}
    contexts = {"default", "own cells", "exact"}
    assert set(result["tokens_per_s"]) == contexts | bare | {"Llama"} and len(bare) == 4
    for name in contexts | bare:
        assert all(rate["median"] > 0 for rate in result["tokens_per_s"][name].values())
    for figure, best in result["best_bare"].items():
        medians = {name: result["tokens_per_s"][name][figure]["median"] for name in bare}
        assert medians[best] == max(medians.values())
        turns = zip(result["runs"]["default"][figure], result["runs"][best][figure], strict=True)
        ratios = sorted(ours / theirs for ours, theirs in turns)
        assert len(ratios) == (1 if figure == "read" else 3)
        ratio = result["ratios"]["default"][f"{figure}, best bare"]["median"]
        assert ratio == pytest.approx(ratios[len(ratios) // 2])


def test_runs_of_long_prompts_are_merged_from_a_file(tmp_path: Path) -> None:
    """Runs with the same model, length and build are summed; a contestant missing in one is left out."""
    figures = {"read": [9.0], "one text": [6.0], "eight forks": [8.0], "eight texts": [math.nan]}
    bare = {name: [2 * rate for rate in rates] for name, rates in figures.items()}
    runs = {"default": figures, "bare f16, plain, 128": bare}
    entry = {"model": "m", "length": 500, "build": "AVX2", "runs": runs}
    faster = {"default": figures | {"read": [27.0]}, "bare f16, plain, 128": bare, "Llama": bare}
    entries = [entry, entry | {"length": 2000}, entry | {"runs": faster}]
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    results = program("length", tmp_path, "--merge", str(lines))["results"]
    assert set(results) == {"m, 500, AVX2", "m, 2000, AVX2"}
    both = results["m, 500, AVX2"]
    assert set(both["tokens_per_s"]) == {"default", "bare f16, plain, 128"}
    assert both["tokens_per_s"]["default"]["read"] == {"median": 18.0, "low": 9.0, "high": 27.0}
    ratio = both["ratios"]["default"]["read, best bare"]
    assert ratio == {"median": 1.0, "low": 0.5, "high": 1.5}
    assert both["tokens_per_s"]["default"]["eight texts"]["median"] is None


@needs_gguf
@pytest.mark.parametrize(
    ("name", "arguments", "check"),
    [
        ("tasks", ("--target", "tale-target", "--only", "edit", "free"), of_tasks),
        ("readme", TALE, of_readme),
        ("length", (), of_length),
    ],
)
def test_benchmark_ends_with_one_json_line(
    name: str, arguments: tuple[str, ...], check: Callable[[dict[str, Any]], object], cache: Path
) -> None:
    report = program(name, cache, *arguments)
    assert report["benchmark"] == name
    assert {"hardware", "versions", "models", "settings", "results"} <= set(report)
    assert all(len(model["hash"]) == 64 for model in report["models"].values())
    assert {"llamabranch", "llama_cpp_python", "llama_cpp"} <= set(report["versions"])
    assert report["results"]
    check(report["results"])


@needs_gguf
def test_answers_go_on_with_the_plan_of_the_file(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    first = program("answers", cache, "--out", str(out))["results"]
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [line["plan"] for line in lines[:5]] == list(answer_tasks.TASKS)
    asked = [(line["task"], line["item"]) for line in lines[5:]]
    assert asked == [(task, i) for i in (0, 1) for task in answer_tasks.TASKS]
    assert program("answers", cache, "--out", str(out))["results"] == first
    assert len(out.read_text("utf-8").splitlines()) == len(lines)
    for line in lines[5:]:
        methods = line["methods"]
        if line["task"] in answers.ANSWERS:  # the lossless stop changes no answer
            lossless, whole = methods["vote of 8, lossless stop"], methods[answers.VOTE]
            assert lossless["answer"] == whole["answer"]
            assert lossless["tokens"] <= 8 * whole["tokens"]
    assert len(first["planned"]) == len(answers.PLANNED)
    assert all(0.0 <= x["p"] <= x["p_holm"] <= 1.0 for x in first["planned"])


@pytest.mark.parametrize("task", answer_tasks.TASKS)
def test_items_have_a_right_answer_that_is_valid(task: str) -> None:
    prompts = set()
    for seed in range(40):
        level = answer_tasks.LEVELS[task][seed % 3]
        asked = answer_tasks.item(task, seed, level)
        prompts.add(asked.prompt)
        right = {
            "problems": f" 1 + 1 = {asked.answer}", "dates": f" so = {asked.answer}",
            "records": f" {asked.answer}",
        }.get(task, asked.answer)  # fmt: skip
        if asked.answer:
            assert asked.is_right(right) and asked.is_valid(right) and not asked.is_right("")
            if asked.constraint is not None:
                beginnings = [right[:n] for n in range(len(right) + 1)]
                assert all(map(asked.constraint.prefix, beginnings))
                assert asked.constraint.complete(right)
                assert not asked.constraint.complete(right[:-1])
        assert asked.answer == answer_tasks.item(task, seed, level).answer
    assert len(prompts) > 30


def test_statistics_of_answers_are_exact() -> None:
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0
    assert mcnemar(6, 0) == mcnemar(0, 6) == 2 / 64
    assert mcnemar(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert paired_interval([1.0] * 5) == (1.0, 1.0)
    low, high = paired_interval([0.0, 1.0] * 50)
    assert low == pytest.approx(0.4, abs=0.02) and high == pytest.approx(0.6, abs=0.02)
    asked = questions()
    assert len({question for question, _ in asked}) == len(asked) == 40
    assert all(answer_in(f"= {answer}.") == answer for _, answer in asked)


# -- timing ----------------------------------------------------------------------------------------


def test_contestants_take_turns_in_alternating_order_with_fresh_state() -> None:
    seen: list[str] = []
    calls: list[tuple[str, int]] = []

    def contestant(name: str) -> Maker:
        def make(run: int) -> object:
            calls.append((name, run))

            def work(item: int) -> Timing:
                seen.append(f"{name}{item}")
                return Timing(1, 0.5)

            return work

        return make  # type: ignore[return-value]

    timed = interleave({"a": contestant("a"), "b": contestant("b")}, n_runs=2, n_items=2)
    assert seen == ["a0", "b0", "a0", "b0", "b1", "a1", "b0", "a0", "a1", "b1"]
    assert calls == [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert timed["a"].rates == [2.0, 2.0]
    timing.interleave({"c": contestant("c")}, n_runs=2, n_items=1, first_run=3)
    assert calls[-2:] == [("c", 3), ("c", 4)]  # the numbers of the runs, which determine the seeds


def test_a_stopped_run_keeps_the_items_that_all_contestants_finished() -> None:
    def contestant(last: int) -> Maker:
        def work(item: int) -> Timing:
            if item > last:
                raise Stopped
            return Timing(1, 0.5)

        return lambda run: work

    timed = interleave({"a": contestant(2), "b": contestant(1)}, n_runs=2, n_items=4)
    assert [len(run) for run in timed["a"].runs] == [2]
    assert [len(run) for run in timed["b"].runs] == [2]
    at_once = timing.interleave({"a": contestant(-1)}, n_runs=2, n_items=4)
    assert at_once["a"].runs == []


def series(*runs: tuple[float, ...]) -> Series:
    """Return runs of texts of 12 tokens that took so many seconds."""
    return Series([[Timing(12, seconds) for seconds in run] for run in runs])


def test_ratio_is_the_median_of_ratios_within_a_run_and_the_interval_goes_by_items() -> None:
    fast, slow = series((1.0,), (4.0,), (1.0,)), series((2.0,), (8.0,), (3.0,))  # run 2 is slow
    assert fast.ratio(slow) == Spread(2.0, 2.0, 3.0)
    assert fast.rate == Spread(12.0, 3.0, 12.0)
    assert fast.total == Timing(36, 6.0) and fast.step_s == pytest.approx(1 / 6)
    assert math.isnan(Series().step_s)
    interval = series((1, 1, 1), (1, 1, 1)).interval(series((2, 2, 2), (3, 3, 3)))
    assert (interval.low, interval.median, interval.high, interval.n) == (2.0, 2.5, 3.0, 6)


@pytest.mark.parametrize("n", [6, 7, 8, 9, 12, 13, 20, 36, 100])
def test_interval_of_the_median_covers_it_in_95_of_100(n: int) -> None:
    """Each of n ratios is below the true median with probability 1/2, and this gives the coverage."""
    values = [float(i) for i in range(n)]
    interval = Interval.of(values[::-1])
    below, above = int(interval.low), int(interval.high)
    assert below == n - 1 - above

    def covered(low: int, high: int) -> float:
        """Return the chance that more than ``low`` and at most ``high`` of n tosses are heads."""
        return float(sum(math.comb(n, k) for k in range(low + 1, high + 1)) / 2**n)

    assert covered(below, above) >= 0.95
    assert covered(below + 1, above - 1) < 0.95  # a narrower interval would not
    assert interval.n == n
    assert interval.low <= interval.median <= interval.high


def test_too_few_pairs_have_no_interval_and_no_verdict() -> None:
    for n in range(6):
        interval = Interval.of([2.0] * n)
        assert math.isnan(interval.low) and math.isnan(interval.high)
        assert interval.verdict == "inconclusive"
    assert Interval.of([]).as_dict() == {"median": None, "low": None, "high": None, "n": 0}
    assert Interval.of([2.0] * 6).verdict == "faster"
    assert Interval.of([0.5] * 6).verdict == "slower"
    assert Interval.of([0.5] * 6 + [math.nan]).n == 6
    assert Spread.of([]).as_dict() == {"median": None, "low": None, "high": None}
    assert Spread.of([math.nan, 2.0]).median == 2.0


@needs_gguf
def test_wide_model_has_the_vocabulary_it_is_asked_for(tmp_path: Path) -> None:
    from benchmarks.wide import cached_wide

    path = cached_wide(tmp_path, 128_256)
    assert cached_wide(tmp_path, 128_256) == path
    with lb.Model(path) as model:
        assert model.n_vocab == 128_256
        assert model.detokenize(model.tokenize("a b")) == "a b"


# -- peers -----------------------------------------------------------------------------------------


def test_reports_of_the_programs_are_parsed_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    simple, lookup = parse_report(SIMPLE_REPORT), parse_report(LOOKUP_REPORT)
    assert simple.stats is not None and lookup.stats is not None
    assert simple.n_tokens == 41
    assert simple.n_tokens / simple.seconds == pytest.approx(1291.745)
    assert simple.stats.draft_acceptance_rate == pytest.approx(15 / 102)
    assert simple.stats.mean_acceptance_length == pytest.approx(41 / 26)
    assert (lookup.stats.num_draft_tokens, lookup.stats.num_accepted_tokens) == (18, 1)
    with pytest.raises(ToolError, match="no report"):
        parse_report("nothing of the kind")
    with pytest.raises(ToolError, match="llama-bench"):
        LlamaTools(tmp_path, threads=1, n_ctx=64)


# -- useless drafters, padded and useless models ------------------------------------------------------
