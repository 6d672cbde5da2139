"""``llamabranch bench`` on the bundled pair: what it measures, prints and writes. Speed is not tested."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import commands
import pytest
from self_signal import signalled
from toys import write_toy

import llamabranch as lb
from llamabranch.bench.speed import Speeds, fastest, measure

TIMEOUT_S = 600  # for a machine that is busy with other things
SMALL = ("--lengths", "40,8,6000", "-n", "6", "-r", "1", "-t", "1")
SET = ("-ctk", "f16", "-fa", "on", "-S", "exact=false")


def test_bench_measures_each_setting_and_length_that_fits_and_names_flags_that_work() -> None:
    result = commands.run("bench", *SMALL, "-ctk", "f16")
    assert result.exit_code == 0, result.stderr
    for label in ("with drafts", "\n-fa 1  ", "\n-fa 0  ", "\nfastest here: "):
        assert label in result.stdout
    assert "processor" not in result.output and "noisy" not in result.output
    answer = commands.answer("bench", *SMALL, "-r", "2", "-ctk", "f16")
    assert set(answer) == {
        *("model", "drafters", "machine", "interrupted", "tokens_per_second", "fastest")
    }
    settings = answer["tokens_per_second"]
    assert set(settings) - {"-S exact=true"} == {"-fa 1", "-fa 0"}
    for speeds in settings.values():
        for name in ("read", "plain", "drafted"):
            assert list(speeds[name]) == ["8", "40"]  # it was not trained for 6,000
            assert all(len(rates) == 2 and min(rates) > 0 for rates in speeds[name].values())
    again = commands.run("generate", "Once", "-n", "4", *answer["fastest"].split())
    assert again.exit_code == 0, again.stderr


def test_what_is_set_is_not_varied_and_any_drafter_or_memory_is_measured(tmp_path: Path) -> None:
    answer = commands.answer("bench", *SMALL, *SET, "-md", "none", "-c", "512")
    ((name, speeds),) = answer["tokens_per_second"].items()
    assert list(speeds["read"]) == ["8", "40"]  # 6,000 tokens do not fit
    assert speeds["drafted"] == {} and "-md" not in answer["fastest"] and name == "as set"
    path = str(write_toy(tmp_path / "mamba.gguf", "mamba", vocab="bytes"))
    for more in (("--draft", "suffix+tale-draft"), ("--target", path, "--draft", path)):
        answer = commands.answer("bench", *SMALL, *SET, *more)
        assert answer["drafters"] == more[-1].split("+")
        assert all(speeds["drafted"] for speeds in answer["tokens_per_second"].values())


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_interrupt_prints_what_was_measured_and_exits_with_130() -> None:
    arguments = ["bench", "--json", *SMALL, *SET, "--runs", "100000", "-m", "tale-target"]
    process = subprocess.run(
        [*signalled(300), *arguments],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    out, err = process.stdout, process.stderr
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    answer = json.loads(out)
    assert answer["interrupted"] is True


def test_an_interrupted_run_adds_nothing(ctx: lb.Context) -> None:
    speeds, sampling, calls = Speeds(), lb.SamplingParams(temperature=0), list[Any]()

    def interrupts(_tokens: Any, logits: Any) -> Any:
        calls.append(logits)
        if len(calls) == 9:  # in the middle of what is timed
            ctx.interrupt()
        return logits

    tokens = ctx.tokenize("Once upon a time there was a king who had three sons")
    measure(ctx, None, tokens, [4, 8], 6, sampling, speeds)
    assert list(speeds.read) == list(speeds.plain) == [4, 8] and not speeds.drafted
    with pytest.raises(lb.DecodeInterruptedError):
        stopped = sampling.replace(logits_processor=interrupts)
        measure(ctx, None, tokens, [4, 8], 6, stopped, speeds)
    assert len(calls) == 9
    assert [len(rates) for rates in speeds.read.values()] == [1, 1]
    assert ctx.usage().cells_used == 0


def test_the_fastest_reads_and_generates_best_over_all_lengths_with_drafts_only_if_they_pay() -> (
    None
):
    base = Speeds({8: [10.0]}, {8: [10.0]}, {8: [5.0]})
    reads = Speeds({8: [40.0]}, {8: [5.0]})  # 4 x 0.5: 1.41
    drafts = Speeds({8: [10.0]}, {8: [5.0]}, {8: [30.0]})  # 1 x 3: 1.73
    assert not base.drafts_pay and drafts.drafts_pay and not reads.drafts_pay
    assert reads.over(base) == pytest.approx(2**0.5)
    assert drafts.over(base) == pytest.approx(3**0.5)
    speeds = {"none": Speeds(), "a": base, "b": reads, "c": drafts}
    assert fastest(speeds) == "c"
    assert fastest({"none": Speeds()}) == ""
    uneven = Speeds({8: [10.0, 30.0]}, {8: [10.0, 10.0]})  # of an interrupted run: one more
    assert uneven.over(base) == pytest.approx(1.0)
