"""A tree in the terminal: a line has a text, the probability of its first token, and figures."""

from __future__ import annotations

import math

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from llamabranch.pictures import TreeLine

_STYLES = {"pruned": "dim", "finished": "green", "": ""}


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
