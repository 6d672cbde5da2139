"""What ``speculate --compare`` makes of given times: noise is no answer. Nothing here is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import pytest

import llamabranch as lb
from llamabranch.bench import Machine
from llamabranch.cli.comparison import Comparison, Run, compare
from llamabranch.cli.console import Console
from llamabranch.cli.interrupts import InterruptHandler
from llamabranch.cli.speculate_report import SpeculateReport


def _run(seconds: float, n_drafted: int = 0) -> Run:
    n_drafts = min(n_drafted, 5)
    stats = lb.SpeculativeStats(
        num_drafts=n_drafts, num_draft_tokens=n_drafted, num_plain_steps=10, plain_time_s=seconds
    )
    return Run("text", list(range(10)), "length", 1, seconds, stats, interrupted=False)


def _starts(seconds: Sequence[float], log: list[str], name: str) -> Callable[[], lb.Generation]:
    """Return what starts generations that say they took ``seconds``, one after another."""
    left: Iterator[float] = iter(seconds)

    def start() -> lb.Generation:
        log.append(name)

        class Told:
            text, tokens, finish_reason, seed = "text", list(range(10)), "length", 1
            stats = lb.SpeculativeStats()
            elapsed_s = next(left)

            def __iter__(self) -> Iterator[lb.Produced]:
                return iter(())

            def close(self) -> None:
                return None

        return cast(lb.Generation, Told())

    return start


def _compared(
    drafted: Sequence[float],
    plain: Sequence[float],
    n_drafted: int = 20,
    budget_s: float = 60.0,
    shown: list[str] | None = None,
) -> tuple[Comparison, list[str]]:
    log: list[str] = []
    progress: list[str] = [] if shown is None else shown
    found = compare(
        _run(drafted[0], n_drafted),
        _starts(drafted[1:], log, "drafted"),
        _starts(plain, log, "plain"),
        InterruptHandler(),
        budget_s,
        progress.append,
    )
    assert found is not None
    return found, log


ONE_SLOWER = [0.1, *[0.2] * 11]  # of plain runs: the first pair disagrees with the others


def test_pairs_that_disagree_are_run_twelve_times_in_both_orders() -> None:
    shown: list[str] = []
    found, log = _compared([0.15] * 12, ONE_SLOWER, shown=shown)
    assert log[:5] == ["plain", "plain", "drafted", "drafted", "plain"]
    assert log.count("drafted") == 11
    assert log.count("plain") == 12
    assert found.interval.n == 12
    assert found.verdict == "faster"
    assert shown[2] == "comparing: pair 3 of 12, speedup 1.00 so far"
    assert shown[-1] == ""


def test_seven_pairs_that_agree_are_enough() -> None:
    for drafted, verdict in ((0.1, "faster"), (0.3, "slower")):
        found, log = _compared([drafted] * 12, [0.2] * 12)
        assert log.count("plain") == found.interval.n == 7
        assert found.verdict == verdict


def test_runs_of_seconds_get_a_verdict_within_the_time() -> None:
    found, log = _compared([3.0, 3.1, 2.9, 3.0, 3.0], [9.0] * 5)
    assert log.count("plain") == 5  # a sixth pair would end after 60 seconds
    assert found.interval.n == 5
    assert 2.8 < found.interval.low < 3.0 < found.interval.high < 3.2
    assert found.verdict == "faster"
    found, log = _compared([3.0, 4.0, 2.5, 3.0, 3.0], [2.8, 3.5, 3.0, 3.3, 3.0], budget_s=32)
    assert log.count("plain") == 5
    assert found.verdict == "inconclusive"
    assert found.interval.low < 1 < found.interval.high


def test_runs_longer_than_the_time_are_not_repeated_and_decide_nothing() -> None:
    found, log = _compared([3.0], [9.0], budget_s=6)
    assert log == ["plain"]
    assert found.speedup == pytest.approx(3.0)
    assert found.verdict == "inconclusive"


def test_verdict_needs_the_whole_interval() -> None:
    assert _compared([0.2] * 12, [0.1] * 12)[0].verdict == "slower"
    assert _compared([0.1] * 12, [0.09, 0.15] * 6)[0].verdict == "inconclusive"
    found = _compared([0.1] * 12, [0.2] * 12, n_drafted=0)[0]
    assert found.verdict == "nothing drafted"


def _printed(
    found: Comparison,
    model: lb.Model,
    capsys: pytest.CaptureFixture[str],
    load: float = 0.0,
) -> tuple[str, dict[str, object]]:
    report = SpeculateReport(
        model=model,
        first=found.speculative,
        drafted=True,
        rule="seeded",
        explanation="",
        length_explanation="",
        capabilities=lb.Capabilities(True, True, False, False, True, ""),
        kv_type="bf16",
        has_grammar=False,
        same_text_expected=True,
        comparison=found,
        machine=Machine("a processor", 2, load, "1.0", "2.0", ("AVX",)),
        n_threads=2,
    )
    report.print(Console(color=False), explain=False)
    return " ".join(capsys.readouterr().out.split()), report.as_json()


def test_noise_is_called_inconclusive_with_what_to_do(
    target: lb.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _compared([0.1] * 12, [0.09, 0.15] * 6)[0]
    shown, answer = _printed(found, target, capsys)
    assert "95 % interval 0.90 to 1.50" in shown
    assert "Inconclusive: 12 pairs of runs were timed" in shown
    assert "`llamabranch bench`" in shown
    assert "Slower" not in shown
    assert answer["speedup_verdict"] == "inconclusive"
    assert answer["speedup_interval"] == {
        "median": pytest.approx(1.2), "low": pytest.approx(0.9), "high": pytest.approx(1.5), "n": 12,
    }  # fmt: skip
    assert "generate more (--max-tokens)" in shown  # the same number of longer pairs
    shown, answer = _printed(_compared([3.0], [9.0], budget_s=6)[0], target, capsys)
    assert "1 pair of runs was timed, and fewer than 3 have no interval" in shown
    assert "For 6 pairs give more time (--compare-time 80) or generate less (--max-tokens)" in shown
    assert "generate more" not in shown
    assert answer["speedup_interval"]["low"] is None  # type: ignore[index]


def test_runs_without_a_draft_are_no_speedup(
    target: lb.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _compared([0.1] * 12, [0.2] * 12, n_drafted=0)[0]
    shown, answer = _printed(found, target, capsys)
    assert "Inconclusive: nothing was drafted" in shown
    assert answer["speedup_verdict"] == "nothing drafted"


def test_the_decision_is_printed(target: lb.Model, capsys: pytest.CaptureFixture[str]) -> None:
    shown, _ = _printed(_compared([0.2] * 12, [0.1] * 12)[0], target, capsys)
    assert "Slower than plain decoding here." in shown
    assert "Inconclusive" not in shown
    shown, _ = _printed(_compared([0.1] * 12, [0.2] * 12)[0], target, capsys)
    assert "Inconclusive" not in shown
    assert "Slower" not in shown


def test_machine_is_printed_and_a_busy_one_is_named(
    target: lb.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _compared([0.1] * 12, [0.2] * 12)[0]
    shown, answer = _printed(found, target, capsys)
    assert "Machine: processor a processor, 2 cores, 2 threads, load 0.00 before;" in shown
    assert "noisy" not in shown
    machine = answer["machine"]
    assert isinstance(machine, dict)
    assert set(machine) == {*vars(Machine.now()), "load_after"}
    shown, _ = _printed(found, target, capsys, load=7.5)
    assert "The timings are noisy: " in shown
    assert "load 7.50 before" in shown
