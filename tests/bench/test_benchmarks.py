"""The benchmarks run, and their arithmetic is right."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toys

from benchmarks import answer_tasks, answers
from benchmarks.answers import holm, mcnemar
from benchmarks.timing import Maker, Series, Spread, Timing, interleave

ROOT = Path(__file__).parents[2]


def program(name: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark at its smallest; return its JSON line."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    *tables, line = done.stdout.splitlines()
    assert any(text.startswith("| ") for text in tables), "tables come before the line"
    line_json: dict[str, Any] = json.loads(line)
    return line_json


# -- the programs ----------------------------------------------------------------------------------


WARM = ("--temperatures", "0.8")


def of_drafts(results: dict[str, Any]) -> None:
    assert list(results) == ["edit, T = 0.8", "people, T = 0.8"]
    for task in results.values():
        assert list(task["compared"]) == ["plain", "auto", "fixed 3", "fixed 7", "fixed 15"]
        assert set(task["auto_over"]) == {"plain", task["best_fixed"]}
        assert task["same_texts"][1] == 1


def of_length(results: dict[str, Any]) -> None:
    (result,) = results.values()
    bare = {name for name in result["tokens_per_second"] if name.startswith("bare")}
    contexts = {"default", "plain", "exact"}
    assert set(result["tokens_per_second"]) == contexts | bare and len(bare) == 4
    for rates in result["tokens_per_second"].values():
        assert all(rate["median"] > 0 for rate in rates.values())
    for figure, best in result["best_bare"].items():
        medians = {name: result["tokens_per_second"][name][figure]["median"] for name in bare}
        assert medians[best] == max(medians.values())
        turns = zip(result["runs"]["default"][figure], result["runs"][best][figure], strict=True)
        ratios = sorted(ours / theirs for ours, theirs in turns)
        assert len(ratios) == (1 if figure == "read" else 3)
        ratio = result["ratios"]["default"][figure]["median"]
        assert ratio == pytest.approx(ratios[len(ratios) // 2])


def of_answers(results: dict[str, Any]) -> None:
    assert list(results["plans"]) == list(answer_tasks.TASKS)
    asked = [(line["task"], line["item"]) for line in results["lines"]]
    assert asked == [(task, i) for i in (0, 1) for task in answer_tasks.TASKS]
    assert len(results["planned"]) == len(answers.PLANNED)
    assert all(0.0 <= x["p"] <= x["p_holm"] <= 1.0 for x in results["planned"])


@pytest.mark.parametrize(
    ("name", "arguments", "check"),
    [
        ("drafts", ("--target", "tale-target", "--only", "edit", "people", *WARM), of_drafts),
        ("length", (), of_length),
        ("answers", (), of_answers),
    ],
)
def test_benchmark_ends_with_one_json_line(
    name: str, arguments: tuple[str, ...], check: Callable[[dict[str, Any]], object]
) -> None:
    report = program(name, *arguments)
    assert report["benchmark"] == name
    assert {"hardware", "versions", "models", "settings", "results"} <= set(report)
    assert all(len(model["hash"]) == 64 for model in report["models"].values())
    assert {"llamabranch", "llama_cpp_python", "llama_cpp"} <= set(report["versions"])
    assert report["results"]
    check(report["results"])


def test_a_replayed_day_reads_nothing_twice(tmp_path: Path) -> None:
    """Not even after the restart."""
    toy, vocab = tmp_path / "toy.gguf", toys.Vocabulary.with_control("<s>", "<|end|>", "<|begin|>")
    template = (
        "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
        "<|begin|>assistant\n"
    )
    toys.write_toy(toy, vocab=vocab, metadata={"tokenizer.chat_template": template})
    phases = program("agents", "--target", str(toy))["results"]
    day = phases.pop("the day")
    assert day["distinct"] == sum(phase["distinct"] for phase in phases.values())
    for name, phase in phases.items():
        (asked,), (n_read,) = phase["asked"].values(), phase["read"].values()
        assert 0 < n_read <= phase["distinct"] <= asked, name


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
        assert asked.is_right(right) and not asked.is_right("")
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


def series(*runs: tuple[float, ...]) -> Series:
    """Return runs of texts of 12 tokens that took so many seconds."""
    return Series([[Timing(12, seconds) for seconds in run] for run in runs])


def test_ratio_is_the_median_of_ratios_within_a_run() -> None:
    fast, slow = series((1.0,), (4.0,), (1.0,)), series((2.0,), (8.0,), (3.0,))  # run 2 is slow
    assert fast.ratio(slow) == Spread(2.0, 2.0, 3.0)
    assert fast.rate == Spread(12.0, 3.0, 12.0)
    assert fast.total == Timing(36, 6.0)


def test_a_spread_needs_a_number() -> None:
    assert Spread.of([]).as_dict() == {"median": None, "low": None, "high": None}
    assert Spread.of([math.nan, 2.0]).median == 2.0
