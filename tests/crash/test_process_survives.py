"""Whatever is done to the public API, the process survives and the context works as before.

As a program, ``python test_process_survives.py GROUP [FIRST [HOW MANY]]``, this file runs cases of a
group. It prints a line when a case starts, and one when it has ended. A case without the second line
ended the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import crash_branches
import crash_files
import crash_memory
import crash_sampling
import crash_speculative
import pytest
from crash_harness import GROUPS, QUICK, World, run
from programs import run_python

MODULES = (crash_memory, crash_files, crash_sampling, crash_branches, crash_speculative)


def outcomes(group: str, n: int | None = None) -> dict[str, str]:
    """Run ``n`` cases of a group, or all; return the line of each, or how it ended the process."""
    names = list(GROUPS[group])[:n]
    results: dict[str, str] = {}
    while len(results) < len(names):
        first = names[len(results)]
        done = run_python(__file__, group, first, len(names) - len(results), code=None)
        lines = [line for line in done.stdout.splitlines() if line]
        started = [line.removeprefix("start ") for line in lines if line.startswith("start ")]
        answers = [line for line in lines if line != "end" and not line.startswith("start ")]
        results.update(zip(started, answers, strict=False))
        if len(answers) < len(started) or not started:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][-300:]
            victim = started[-1] if started else first
            results[victim] = f"the process ended with {done.returncode}: {last}"
    return results


@pytest.mark.parametrize("group", QUICK)
def test_every_refused_call_is_a_typed_error_and_changes_nothing(
    group: str, tmp_path: Path
) -> None:
    world = World(tmp_path)
    for name in QUICK[group]:
        GROUPS[group][name](world)
        world.check()


# The second run is of all cases of a group, in one process unless one of them ends it.
@pytest.mark.parametrize("n", [1, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("group", GROUPS)
def test_misuse_is_refused_and_the_context_lives_on(group: str, n: int | None) -> None:
    results = outcomes(group, n)
    failed = [f"{name}: {outcome}" for name, outcome in results.items() if outcome != "ok"]
    assert not failed, "\n".join(failed)
    assert list(results) == list(GROUPS[group])[:n]


if __name__ == "__main__":
    run(sys.argv[1], *sys.argv[2:])
