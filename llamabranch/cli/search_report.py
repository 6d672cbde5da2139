"""What ``search`` and ``select`` print: hypotheses, costs, and the tree."""

from __future__ import annotations

import math

from rich.text import Text
from rich.tree import Tree

from llamabranch.pictures import page, table
from llamabranch.search import (
    SearchNode,
    SearchResult,
    SearchStats,
    TreeLine,
    outline,
    tree_picture,
)

__all__ = ["drawn_tree", "search_page", "stats_text"]

_MOST_LINES = 60  # of a drawn tree
_MOST_PRUNED = 3  # branches under a line
_LONGEST = 60  # characters of a node's text


def stats_text(stats: SearchStats) -> str:
    """Return the cost of a search as a line."""
    again = f" ({stats.tokens_redecoded} again)" if stats.tokens_redecoded else ""
    return (
        f"{stats.decodes} decodes of {stats.tokens_decoded} tokens{again}, "
        f"{stats.tokens_shared} tokens shared, at most {stats.peak_sequences} sequences, "
        f"{stats.elapsed_s:.2f} s"
    )


def search_page(result: SearchResult, prompt: str, name: str, best: int) -> str:
    """Return a page: the ``best`` results, what they have cost, and the tree."""
    rows = [("text", "score", "log p, nats", "tokens", "ended by")]
    rows += [
        (h.text, f"{h.score:.4f}", f"{h.logprob:.2f}", str(len(h.tokens)), h.finish_reason)
        for h in result.hypotheses[:best]
    ]
    return page(
        name,
        table(rows),
        table([(stats_text(result.stats),)]),
        "<hr>",
        tree_picture(result.tree, prompt=prompt),
    )


def drawn_tree(root: SearchNode, prompt: str) -> Tree:
    """Return the tree for the terminal: probabilities, pruned branches dimmed.

    Nodes that go on in one way only are one line. Of the branches that were pruned along a line the
    first few are listed under it, the others counted; of many lines those first in the tree are drawn.
    """
    line = outline(root)
    drawn = Tree(Text(_shown(prompt, tail=True), style="bold"))
    _add_pruned(drawn, line)
    waiting = [(below, drawn) for below in line.lines]
    n_drawn = 0
    while waiting and n_drawn < _MOST_LINES:
        line, at = waiting.pop(0)
        n_drawn += 1
        node = line.nodes[-1]
        style = "green" if node.status == "finished" else ""
        branch = at.add(_label(node, line.text, line.logprob, style))
        _add_pruned(branch, line)
        waiting += [(below, branch) for below in line.lines]
    if waiting:
        drawn.add(Text(f"... and {len(waiting)} more that go on", style="dim"))
    return drawn


def _add_pruned(branch: Tree, line: TreeLine) -> None:
    for node in line.pruned[:_MOST_PRUNED]:
        above = 0.0 if node.parent is None else node.parent.logprob
        branch.add(_label(node, node.text, node.logprob - above, "dim"))
    left = len(line.pruned) - _MOST_PRUNED
    if left > 0:
        branch.add(Text(f"... and {left} more given up, {line.n_pruned} nodes in all", style="dim"))


def _label(node: SearchNode, text: str, logprob: float, style: str) -> Text:
    label = Text(_shown(text) or "(end)", style=style)
    label.append(f"  {math.exp(min(0.0, logprob)):.1%}", style="dim" if style == "dim" else "cyan")
    if node.score == node.score:
        label.append(f"  {node.score:.3f}", style="dim")
    if node.n_visits:
        label.append(f"  {node.n_visits} visits", style="dim")
    return label


def _shown(text: str, *, tail: bool = False) -> str:
    text = text.replace("\n", "\\n")
    if len(text) <= _LONGEST:
        return text
    return "..." + text[-_LONGEST:] if tail else text[:_LONGEST] + "..."
