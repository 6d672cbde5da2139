"""What runs the tests: budgets of CPU time, marks, and llama.cpp compiled as for other processors."""

from __future__ import annotations

import sys
from pathlib import Path

import budgets
import elsewhere
import pytest
from conftest import HERE, listed


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "tests" / "budgets.txt"
    path.parent.mkdir()
    for name in ("test_a.py", "test_b.py"):
        (path.parent / name).touch()
    taken = {("tests/test_a.py", "fast"): 30.0, ("tests/test_b.py", "fast"): 1.0}
    budgets.record({**taken, ("tests/gone.py", "fast"): 1.0}, 0.1, path)
    return path


def test_file_that_takes_more_than_twice_its_budget_is_named(recorded: Path) -> None:
    def over(seconds: float, name: str = "tests/test_a.py", reference_s: float = 0.1) -> int:
        return len(budgets.exceeded({(name, "fast"): seconds}, reference_s, recorded))

    assert (over(59.0), over(61.0)) == (0, 1)
    assert over(61.0, reference_s=0.05) == 1, "a faster machine is no reason to take longer"
    assert (over(119.0, reference_s=0.2), over(121.0, reference_s=0.2)) == (0, 1)
    assert (over(39.0, "tests/test_b.py"), over(41.0, "tests/test_b.py")) == (0, 1)
    assert (over(19.0, "tests/test_new.py"), over(21.0, "tests/test_new.py")) == (0, 1)


def test_recording_keeps_what_was_not_run(recorded: Path) -> None:
    budgets.record({("tests/test_a.py", "slow"): 50.0}, 0.2, recorded)
    reference_s, rows = budgets.load(recorded)
    assert reference_s == 0.1
    assert rows == {"tests/test_a.py": (30.0, 25.0), "tests/test_b.py": (1.0, 0.0)}


def test_budgets_are_of_files_that_exist() -> None:
    _, rows = budgets.load()
    assert not [name for name in rows if not (HERE.parent / name).is_file()]


def test_reference_is_measured() -> None:
    assert 0 < budgets.reference() < 60


def test_listed_functions_keep_a_part_of_their_cases() -> None:
    slow = listed("slow.txt")
    assert slow["test_build.py"] == 0
    assert all(n == 0 or n > 1 for n in slow.values())


def test_source_that_cannot_be_had_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elsewhere, "FOLDER", tmp_path / "build")
    monkeypatch.setattr(sys, "argv", ["elsewhere", "--variant", "avx2"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert elsewhere.main() == 0
    told = capsys.readouterr().out
    assert told.startswith("avx2: SKIPPED, nothing was tested: ")
    assert "source" in told or "cmake" in told or "c++" in told
