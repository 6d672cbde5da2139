"""Whatever is done to the public API, the process lives, and the context goes on as before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cases
import pytest
from crash_harness import GROUPS, QUICK, World

TIMEOUT_S = 300


def outcomes(group: str, n: int | None = None) -> dict[str, str]:
    """Run ``n`` cases of a group, or all, in processes of their own.

    Returns:
        each case's line, or how it ended the process.
    """
    root = Path(__file__).parents[2]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": str(root)}
    names = list(cases.GROUPS[group])[:n]
    found: dict[str, str] = {}
    while len(found) < len(names):
        first = names[len(found)]
        done = subprocess.run(
            [sys.executable, cases.__file__, group, first, str(len(names) - len(found))],
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line]
        started = [line.removeprefix("start ") for line in lines if line.startswith("start ")]
        answers = [line for line in lines if line != "end" and not line.startswith("start ")]
        found.update(zip(started, answers, strict=False))
        if len(answers) < len(started) or not started:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][-300:]
            victim = started[-1] if started else first
            found[victim] = f"the process ended with {done.returncode}: {last}"
    return found


def check(found: dict[str, str]) -> None:
    """Fail, naming them, if there are cases that did not go well."""
    failed = [f"{name}: {outcome}" for name, outcome in found.items() if outcome != "ok"]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)


@pytest.mark.parametrize("group", QUICK)
def test_every_refused_call_is_a_typed_error_and_changes_nothing(
    group: str, tmp_path: Path
) -> None:
    world = World(tmp_path)
    for name in QUICK[group]:
        GROUPS[group][name](world)
        world.check()


@pytest.mark.parametrize("group", cases.GROUPS)
def test_one_misuse_of_each_group_is_refused(group: str) -> None:
    found = outcomes(group, 1)
    check(found)
    assert list(found) == list(cases.GROUPS[group])[:1]


@pytest.mark.parametrize("group", cases.GROUPS)
def test_misuse_is_refused_and_the_context_lives_on(group: str) -> None:
    """One process runs all cases of a group, unless one of them ends it."""
    found = outcomes(group)
    check(found)
    assert found.keys() == cases.GROUPS[group].keys()
