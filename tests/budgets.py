"""How much CPU time each test file may take: a run fails where one takes more than twice its budget.

``budgets.txt`` has for each file the CPU seconds of what `make test` runs of it and of what
`make test-slow` runs, child processes included, and on its first line those of `reference`. That is timed
between the tests, in the same processes, so that budgets grow where the processor is slower, or shared.

    pytest --record-budgets    write what this run took, for the files and kinds of tests that it ran
    pytest --no-budgets        do not compare (another build of llama.cpp, the compiled core off)
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from time import process_time

import numpy as np
import pytest

__all__ = ["Budgets", "add_options"]

PATH = Path(__file__).with_name("budgets.txt")
FACTOR = 2.0
LEAST_S = (
    20.0  # below that a file's time is mostly chance: who loads the models first, what is cached
)
EVERY = 25  # tests for each reference computation
KINDS = ("fast", "slow")


def cpu_s() -> float:
    """Return the CPU seconds of this process, its threads and the children it has waited for."""
    times = os.times()
    return process_time() + times.children_user + times.children_system


def reference() -> float:
    """Return the CPU seconds of a fixed computation: Python, memory and arithmetic as in tests."""
    start = cpu_s()
    rows = np.random.default_rng(1).standard_normal((64, 4096), dtype=np.float32)
    n_seen = 0  # and no BLAS, whose threads may wait in a loop
    for _ in range(4):
        n_seen += sum(len(text) for text in {str(j) for j in range(10_000)})
        rows = np.sort(np.tanh(rows * 1.5), axis=1)
    return cpu_s() - start


def load(path: Path = PATH) -> tuple[float, dict[str, tuple[float, float]]]:
    """Return the reference's seconds, and those of each file's fast and slow tests."""
    first, *lines = path.read_text("utf-8").splitlines()
    rows = (line.split() for line in lines)
    return float(first.split()[-2]), {name: (float(a), float(b)) for name, a, b in rows}


def exceeded(
    taken: dict[tuple[str, str], float], reference_s: float, path: Path = PATH
) -> list[str]:
    """Return a line for each file that took more than its budget allows, and each without one."""
    recorded, budgets = load(path)
    slower = max(1.0, reference_s / recorded)
    found = []
    for (name, kind), seconds in sorted(taken.items()):
        if name not in budgets:
            if seconds > LEAST_S * slower:
                found.append(f"{name}: no budget, took {seconds:.1f} s: pytest --record-budgets")
            continue
        limit = FACTOR * slower * max(budgets[name][KINDS.index(kind)], LEAST_S)
        if seconds > limit:
            found.append(f"{name}: {kind} tests took {seconds:.1f} s of CPU, at most {limit:.1f}")
    return found


def record(taken: dict[tuple[str, str], float], reference_s: float, path: Path = PATH) -> None:
    """Write what was taken, in the reference's recorded seconds, beside what is there already."""
    recorded, budgets = load(path) if path.exists() else (reference_s, {})
    for (name, kind), seconds in taken.items():
        old = budgets.get(name, (0.0, 0.0))
        now = round(seconds * recorded / reference_s, 1)
        budgets[name] = (now, old[1]) if kind == "fast" else (old[0], now)
    there = {name: both for name, both in budgets.items() if (path.parents[1] / name).exists()}
    lines = [
        f"CPU seconds of each file's fast and slow tests, where the reference took {recorded:.4f} s"
    ]
    lines += [f"{name} {fast:.1f} {slow:.1f}" for name, (fast, slow) in sorted(there.items())]
    path.write_text("\n".join(lines) + "\n", "utf-8")


class Budgets:
    """Measure in the processes that test; add up and judge in the one that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._last, self._n_tests = cpu_s(), 0
        self._taken: dict[tuple[str, str], float] = defaultdict(float)
        self._references: list[float] = []
        self._problems: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = cpu_s()
        kind = "slow" if item.get_closest_marker("slow") else "fast"
        report.user_properties.append(("cpu", [kind, now - self._last]))
        if report.when == "setup":
            if self._n_tests % EVERY == 0:
                report.user_properties.append(("reference", reference()))
            self._n_tests += 1
        self._last = cpu_s()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        measured = dict(report.user_properties)
        cpu, reference_s = measured.get("cpu"), measured.get("reference")
        if isinstance(cpu, (list, tuple)):
            self._taken[report.nodeid.partition("::")[0], str(cpu[0])] += float(cpu[1])
        if isinstance(reference_s, float):
            self._references.append(reference_s)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workerinput") or not self._references:
            return
        mean = sum(self._references) / len(self._references)
        if self._config.getoption("record_budgets"):
            record(self._taken, mean)
        elif not self._config.getoption("no_budgets"):
            self._problems = exceeded(self._taken, mean)
            if self._problems and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._problems:
            terminalreporter.section("CPU time over budget (tests/budgets.txt)", red=True)
            for problem in self._problems:
                terminalreporter.line(problem)


def add_options(parser: pytest.Parser) -> None:
    """Add the options of this module to pytest's."""
    parser.addoption("--record-budgets", action="store_true", help="write tests/budgets.txt")
    parser.addoption("--no-budgets", action="store_true", help="do not compare with budgets.txt")
