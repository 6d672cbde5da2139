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
