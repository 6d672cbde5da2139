"""Drawn trees: each line with its text and figures, coloured on a terminal only."""

from __future__ import annotations

import io
import re

import pytest

from llamabranch.branch.tree import BranchTree
from llamabranch.pictures import TreeLine


def test_a_tree_has_the_text_of_each_edge_and_is_coloured_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    long = "The wolf ran and " * 9
    below = [TreeLine(" a", "1", [TreeLine(" b", "2")]), TreeLine(" c", "3")]
    tree = BranchTree([TreeLine(long, "", below)])
    first, *others = str(tree).split("\n")
    start, end = first.split("...")  # long texts are cut in their middle
    assert len(start) > 20 and long.startswith(start[1:]) and long.endswith(end[:-1])
    assert others == ["├─ ' a'  1", "│  └─ ' b'  2", "└─ ' c'  3"]
    assert str(BranchTree([])) == "" and repr(tree) == str(tree)
    monkeypatch.delenv("NO_COLOR", raising=False)
    pipe, terminal = io.StringIO(), Terminal()
    tree.print(pipe)
    tree.print(terminal)
    assert pipe.getvalue() == f"{tree}\n"
    assert "\x1b[" in terminal.getvalue()
    assert re.sub("\x1b\\[[0-9]*m", "", terminal.getvalue()) == pipe.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    tree.print(plain)
    assert plain.getvalue() == pipe.getvalue()
