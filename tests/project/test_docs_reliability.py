"""The page on reliability names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_named_test_exists(file: str, name: str) -> None:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_a_test() -> None:
    promised = PAGE.split("## What is promised")[1].split("\n## ")[0]
    rows = [row for row in promised.splitlines() if row.startswith("| ")]
    promises = [row for row in rows if not row.startswith(("| promise", "| llama.cpp"))]
    assert len(promises) > 20
    for row in promises:
        assert ".py::test_" in row.split("|")[3], row
