"""A tree in the terminal: a line has a text, the probability of its first token, and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

import llamabranch as lb
from llamabranch.pictures import Token, TreeLine

LEGEND = "A percentage is the probability of the first token of a line."
_STYLES = {"pruned": "dim", "finished": "green", "": ""}


def tree_of(texts: Sequence[Sequence[lb.Produced]]) -> list[TreeLine]:
    """Return texts as a tree: a common beginning is one line. The most probable line comes first."""
    groups: dict[int, list[Sequence[lb.Produced]]] = {}
    for text in filter(len, texts):
        groups.setdefault(text[0].token, []).append(text)
    lines = []
    for group in sorted(groups.values(), key=lambda group: -group[0][0].logprob):
        first, n = group[0], 1
        while all(len(text) > n and text[n].token == first[n].token for text in group):
            n += 1
        below = tree_of([text[n:] for text in group]) if len(group) > 1 else []
        shown = first[:n] if len(group) > 1 else first
        lines.append(
            TreeLine([Token(token.text, token.logprob) for token in shown], children=below)
        )
    return lines


def drawn_tree(root: TreeLine, *, longest: int = 120, most_lines: int = 60) -> Tree:
    """Return a tree for the terminal, of the ``most_lines`` lines that are nearest to the root."""
    drawn = Tree(Text(_shown(root.text, longest, tail=True), style="bold"))
    waiting = [(root, drawn)]
    n_drawn = 0
    while waiting and n_drawn < most_lines:
        line, at = waiting.pop(0)
        if line.n_hidden:
            at.add(Text(f"... {line.n_hidden} more pruned on this path", style="dim"))
        for child in line.children:
            waiting.append((child, at.add(_label(child, longest))))
            n_drawn += 1
    n_left = sum(len(line.children) for line, _ in waiting)
    if n_left:
        drawn.add(Text(f"... and {n_left} more", style="dim"))
    return drawn


def _label(line: TreeLine, longest: int) -> Table:
    style = _STYLES[line.status]
    label = Table.grid(padding=(0, 1))
    label.add_column(style=style or "bold", no_wrap=True)
    label.add_column()
    text = Text(_shown(line.text, longest), style=style)
    if line.figures:
        text.append(f"  {line.figures}", style="dim")
    p = line.probability
    label.add_row("" if math.isnan(p) else f"{100 * p:3.0f} %", text)
    return label


def _shown(text: str, longest: int, *, tail: bool = False) -> str:
    """Return a text as one line. A long one loses its middle or, with ``tail``, its beginning."""
    text = text.strip(" ").replace("\n", "\\n")
    if len(text) <= longest:
        return text
    if tail:
        return "..." + text[-longest:]
    first, last = text[: longest // 2], text[-longest // 2 :]
    return f"{first.rpartition(' ')[0] or first} ... {last.partition(' ')[2] or last}"
