"""Tables of every command in a terminal of 80 columns: they fit, and no word is broken."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import run

import llamabranch as lb
from llamabranch.cli import console

WIDTH = 80
FILE = "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf"
DATA = Path(lb.__file__).parent / "data"
TERMINAL = {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": str(WIDTH)}


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every word that is put into a table from now on."""
    seen: list[str] = []
    inner = console.Console.table

    def table(self: console.Console, columns: Sequence[str], rows: Any, **more: Any) -> None:
        rows = [tuple(row) for row in rows]
        for row in rows:
            cells = map(console.cell, row)
            # A path that is longer than a line has to be broken.
            seen.extend(w for cell in cells for w in cell.split() if len(w) < WIDTH)
        inner(self, columns, rows, **more)

    monkeypatch.setattr(console.Console, "table", table)
    yield seen
    assert seen, "the command printed no table"


COMMANDS = [
    f"models show {FILE}",
    "models",
    f"score -m {FILE} Once-upon-a-time",
    f"bench -m {FILE} --lengths 16 -r 1 -n 2 -t 1",
    f"chat -m {FILE} -S chat_template=chatml",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_table_breaks_a_word_at_80_columns(
    command: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(DATA / "tale-target-q8_0.gguf", FILE)
    result = run(*command.split(), stdin="/help\n/set\n", **TERMINAL)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    shown = set(result.stdout.split())
    assert [word for word in words if word not in shown] == []
    assert [line for line in lines if len(line) > WIDTH] == []
