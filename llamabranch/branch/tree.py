"""A tree of texts to print: the text of each branch, and figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from ..pictures import TreeLine

__all__ = ["BranchTree"]

_LONGEST = 60  # characters of a branch's text
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


class BranchTree:
    """A drawing of a tree of texts as it was at that time, such as that of `Chat.tree`.

    ``print(tree)`` prints plain text; ``tree.print()`` uses colours on a terminal.
    """

    def __init__(self, roots: Sequence[TreeLine]) -> None:
        self._roots = tuple(roots)

    def __str__(self) -> str:
        return "\n".join(before + text + figures for before, text, figures in self._lines())

    def __repr__(self) -> str:
        return str(self)

    def _lines(self) -> Iterator[tuple[str, str, str]]:
        """Yield for each branch its tree lines, its text and its figures."""

        def below(node: TreeLine, indent: str) -> Iterator[tuple[str, str, str]]:
            for i, child in enumerate(node.children):
                is_last = i == len(node.children) - 1
                yield (indent + ("└─ " if is_last else "├─ "), *_parts(child))
                yield from below(child, indent + ("   " if is_last else "│  "))

        for root in self._roots:
            yield "", *_parts(root)
            yield from below(root, "")

    def print(self, file: TextIO | None = None) -> None:
        """Print it to ``file``, or standard output; with colours on a terminal unless NO_COLOR is set."""
        file = sys.stdout if file is None else file
        colored = file.isatty() and not os.environ.get("NO_COLOR")
        for before, text, figures in self._lines():
            if colored:
                text = f"{_BOLD}{text}{_PLAIN}"
                before, figures = (f"{_DIM}{part}{_PLAIN}" for part in (before, figures))
            print(before + text + figures, file=file)


def _parts(node: TreeLine) -> tuple[str, str]:
    text, half = node.text, (_LONGEST - 3) // 2
    shown = text if len(text) <= _LONGEST else f"{text[:half]}...{text[-half:]}"
    return repr(shown), f"  {node.figures}" if node.figures else ""
