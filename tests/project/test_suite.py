"""What runs the tests: marks, and llama.cpp compiled as for other processors."""

from __future__ import annotations

import sys
from pathlib import Path

import elsewhere
import pytest
from conftest import listed


def test_listed_functions_keep_a_part_of_their_cases() -> None:
    slow = listed("slow.txt")
    assert slow["test_build.py"] == 0
    assert all(n == 0 or n > 1 for n in slow.values())


@pytest.mark.parametrize(
    ("place", "reasons"),
    [("avx2", ("source", "cmake", "c++")), ("lowest-versions", ("uv", "Python", "llama-cpp"))],
)
def test_what_cannot_be_had_is_no_failure(
    place: str,
    reasons: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(elsewhere, "FOLDER", tmp_path / "build")
    monkeypatch.setattr(sys, "argv", ["elsewhere", "--on", place])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert elsewhere.main() == 0
    told = capsys.readouterr().out
    before, _, reason = told.partition("SKIPPED, nothing was tested: ")
    assert before == f"{place}: "
    assert any(word in reason for word in reasons)
