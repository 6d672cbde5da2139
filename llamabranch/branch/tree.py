"""The branches of a context as a tree to print: the text of each branch, and figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from ..errors import BranchStateError, ConfigError
from ..pictures import Token, TreeLine
from .branch import Branch

__all__ = ["COLUMNS", "DEFAULT_COLUMNS", "BranchTree", "tree_lines"]

_LONGEST = 60  # characters of a branch's text
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def _score(label: str, value: Callable[[Branch], float]) -> Callable[[Branch], str]:
    """Return a column with a figure about the tokens generated since the fork."""

    def shown(branch: Branch) -> str:
        if branch.position <= max(branch.fork_position, branch.n_prompt):
            return ""
        try:
            return f"{label} {value(branch):.2f}"
        except BranchStateError:  # tokens that were appended without a score
            return f"{label} -"

    return shown


COLUMNS: dict[str, Callable[[Branch], str]] = {
    "fork": lambda branch: "" if branch.parent is None else f"at {branch.fork_position}",
    "logprob": _score("log p", lambda branch: branch.log_likelihood("fork")),
    "perplexity": _score("perplexity", lambda branch: branch.perplexity("fork")),
    "position": lambda branch: f"ends at {branch.position}",
    "seed": lambda branch: f"seed {branch.seed}",
    "seq_id": lambda branch: f"seq {branch.seq_id}",
    "state": lambda branch: branch.state,
    "tokens": lambda branch: f"{branch.position - branch.fork_position} tokens",
}


DEFAULT_COLUMNS = ("fork", "tokens", "logprob", "state")


class BranchTree:
    """The result of `BranchStore.tree`: a drawing of the branches as they were at that time.

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


def tree_lines(roots: Sequence[Branch], columns: Sequence[str]) -> list[TreeLine]:
    """Return the tree of these branches and their descendants, with one line per branch.

    Raises:
        ConfigError: an unknown column.
    """
    if isinstance(columns, str) or not set(columns) <= COLUMNS.keys():
        raise ConfigError(
            f"unknown columns {columns!r}", hint=f"columns: {', '.join(sorted(COLUMNS))}"
        )

    def node(branch: Branch) -> TreeLine:
        figures = ", ".join(filter(None, (COLUMNS[name](branch) for name in columns)))
        pieces = map(branch.ctx.model.piece, branch.tokens[branch.fork_position :])
        text = Token(b"".join(pieces).decode("utf-8", "replace"))
        return TreeLine([text], figures, tuple(node(child) for child in branch.children))

    return [node(root) for root in roots]


def _parts(node: TreeLine) -> tuple[str, str]:
    text, half = node.text, (_LONGEST - 3) // 2
    shown = text if len(text) <= _LONGEST else f"{text[:half]}...{text[-half:]}"
    return repr(shown), f"  {node.figures}" if node.figures else ""
