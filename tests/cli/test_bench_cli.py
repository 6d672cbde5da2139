"""``llamabranch bench`` on the bundled pair: what it prints, plots and writes. Speed is not tested."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from self_signal import signalled_at_decode
from toys import write_toy
from typer.testing import Result

import llamabranch as lb
from llamabranch.bench.machine import Machine
from llamabranch.bench.pair import Cell, PairBench, PairReport
from llamabranch.bench.timing import Series, Timing
from llamabranch.cli.console import Console

TIMEOUT_S = 600  # for a machine that is busy with other things
SMALL = ("-p", "Once upon a time", "-r", "1", "--longest", "2", "--max-tokens", "12")


def run(*arguments: str) -> Result:
    return commands.run("bench", *SMALL, *arguments)


def run_json(*arguments: str) -> dict[str, Any]:
    return commands.answer("bench", *SMALL, *arguments)


# -- the command -----------------------------------------------------------------------------------


def test_bench_prints_a_table_and_the_machine() -> None:
    result = run()
    assert result.exit_code == 0 and result.stderr == "", result.stderr
    out, machine = result.stdout, Machine.now()
    for label in (
        "plain decoding: ",
        "draft length",
        "tokens a pass",
        "\n1  ",
        "\n2  ",
        "\nauto  ",
    ):
        assert label in out
    assert f"processor {' '.join(machine.processor.split())}" in " ".join(out.split())


def test_json_holds_what_was_measured() -> None:
    answer = run_json("-S", "rule=block")
    assert set(answer) == {
        *("target", "drafters", "n_threads", "interrupted", "plain", "lengths", "best"),
        *("machine", "confirmed", "verdict"),
    }
    assert (answer["n_threads"], answer["drafters"]) == (1, ["tale-draft"])
    assert [cell["draft_length"] for cell in answer["lengths"]] == [1, 2, "auto"]
    assert all(cell["speed_up"] > 0 for cell in answer["lengths"])
    # What is fastest depends on the machine.
    assert (answer["best"] is None) == (answer["verdict"] != "faster")


def test_draft_none_measures_the_target_alone() -> None:
    answer = run_json("--draft", "none")
    assert answer["lengths"] == [] and answer["best"] is None
    assert answer["plain"]["tokens_a_second"]["median"] > 0
    assert "There is no drafter" in run("--draft", "none").stdout


def test_other_drafters_and_memories_are_measured_too(tmp_path: Path) -> None:
    answer = run_json("--draft", "suffix+tale-draft", "--temperature", "0", "--longest", "1")
    assert answer["drafters"] == ["suffix", "tale-draft"]
    path = str(write_toy(tmp_path / "mamba.gguf", "mamba", vocab="bytes"))
    answer = run_json("--target", path, "--draft", path, "--longest", "1")
    assert [cell["draft_length"] for cell in answer["lengths"]] == [1, "auto"]


# -- errors and interruption -----------------------------------------------------------------------


def test_prompt_that_does_not_fit_is_an_error() -> None:
    result = run("word " * 400, "--n-ctx", "256")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_interrupt_prints_what_was_measured_and_exits_with_130() -> None:
    arguments = ["bench", "--json", "-t", "1", "--runs", "100000", "-m", "tale-target"]
    process = subprocess.run(
        [*signalled_at_decode("SIGINT", 8000), *arguments],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    out, err = process.stdout, process.stderr
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    answer = json.loads(out)
    assert answer["interrupted"] is True


def test_what_was_measured_before_a_stop_is_kept(ctx: lb.Context, draft_ctx: lb.Context) -> None:
    prompts = [ctx.tokenize("Once upon a time"), ctx.tokenize("The old king")]
    left = 130  # tokens until it stops: in the middle of the sweep over lengths

    def stop() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    bench = PairBench(
        ctx,
        lambda: lb.ModelDrafter(draft_ctx),
        prompts,
        lb.SamplingParams(temperature=0.8),
        lengths=(1, 2),
        n_tokens=12,
        n_runs=50,
        stop=stop,
    )
    report = bench.run()
    assert report.stopped
    n_items = [len(run) for run in report.plain.runs]
    assert 1 <= sum(n_items) < 100
    for cell in report.lengths:
        assert [len(run) for run in cell.series.runs] == n_items
    assert ctx.usage().cells_used == 0
    left = 3
    assert bench.run() == PairReport(stopped=True)


# -- the advice ------------------------------------------------------------------------------------


def _cell(length: int | str, *speedups: float, n_drafted: int = 50) -> Cell:
    """A setting, measured with one text per run, that is so many times as fast as plain decoding."""

    def series(rates: list[float], drafted: int) -> Series:
        stats = lb.speculative.SpeculativeStats(num_drafts=drafted, num_draft_tokens=drafted)
        return Series([[Timing(100, 100 / rate, stats=stats)] for rate in rates])

    base = [10.0] * len(speedups)
    return Cell(length, series([10 * x for x in speedups], n_drafted), series(base, 0))


def test_the_candidate_is_the_fastest_that_drafts() -> None:
    slow, fast, tied = _cell(1, 1.1), _cell(3, 1.5), _cell(4, 1.5)
    silent = _cell(8, 2.5, n_drafted=0)
    assert PairReport(lengths=[slow, fast, silent, tied]).candidate is fast
    assert PairReport(lengths=[silent]).candidate is None
    assert PairReport().candidate is None


def _decided(*speedups: float, n_drafted: int = 50) -> PairReport:
    """A report whose sweep found 1.5, and whose second measurement found ``speedups``."""
    confirmed = _cell(3, *speedups, n_drafted=n_drafted)
    return PairReport(lengths=[_cell(3, 1.5)], confirmed=confirmed)


@pytest.mark.parametrize(
    ("speedups", "verdict"),
    [
        ((1.07,), "inconclusive"),  # what 0.1 called the best
        ((1.02,) * 6, "faster"),
        ((1.5,) * 10 + (0.6, 0.7), "faster"),  # 12 pairs: two may be outliers
        ((0.7,) * 10 + (1.6, 1.7), "slower"),
        ((0.9, 1.1) * 6, "inconclusive"),
    ],
)
def test_a_best_is_named_only_where_the_whole_interval_is_above_1(
    speedups: tuple[float, ...], verdict: str
) -> None:
    report = _decided(*speedups)
    assert report.verdict == verdict
    assert report.best is (report.confirmed if verdict == "faster" else None)


def test_what_drafted_nothing_is_never_the_best() -> None:
    """Plain decoding compared with itself. Noise may favour one side in every pair."""
    assert _decided(*[1.3] * 20, n_drafted=0).verdict == "inconclusive"
    silent = _cell("auto", *[1.3] * 20, n_drafted=0)
    report = PairReport(lengths=[silent])
    assert (report.verdict, report.best) == ("nothing drafted", None)


def test_noise_between_equals_rarely_names_a_best() -> None:
    """Nine settings as fast as plain decoding, 400 times: at most 5 % may be called faster.

    The design gives 1.9 % (12 pairs, one side). The seed is fixed, so the outcome is fixed, too.
    """
    rng = np.random.default_rng(7)

    def noise(n: int) -> list[float]:
        return [float(x) for x in np.exp(0.4 * rng.standard_normal(n))]

    named = 0
    for _ in range(400):
        lengths = [_cell(k, *noise(3)) for k in range(1, 10)]
        report = PairReport(lengths=lengths)
        assert report.candidate is not None
        report.confirmed = _cell(report.candidate.length, *noise(12))
        named += report.best is not None
    assert named <= 20


def test_progress_reaches_a_pipe_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("llamabranch.cli.console.monotonic", lambda: now[0])
    console = Console()
    for n in range(40):
        console.progress(f"run {n}")
        console.progress("")
        now[0] += 1.0
    assert capsys.readouterr() == ("", "run 15\nrun 30\n")
