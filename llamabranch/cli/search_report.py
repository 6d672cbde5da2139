"""What ``search`` and ``select`` print: hypotheses, costs, and the tree."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.text import Text
from rich.tree import Tree

from llamabranch.search import SearchNode, SearchStats

__all__ = ["drawn_tree", "stats_text"]

_MOST_NODES = 200  # of a drawn tree
_LONGEST = 60  # characters of a node's text


def stats_text(stats: SearchStats) -> str:
    """Return the cost of a search as a line."""
    again = f" ({stats.tokens_redecoded} again)" if stats.tokens_redecoded else ""
    return (
        f"{stats.decodes} decodes of {stats.tokens_decoded} tokens{again}, "
        f"{stats.tokens_shared} tokens shared, at most {stats.peak_sequences} sequences, "
        f"{stats.elapsed_s:.2f} s"
    )


def drawn_tree(root: SearchNode, prompt: str) -> Tree:
    """Return the tree for the terminal: probabilities, pruned branches dimmed.

    Nodes that go on in one way only are drawn as one; of a large tree the first levels are drawn.
    """
    drawn = Tree(Text(_shown(prompt, tail=True), style="bold"))
    waiting: list[tuple[SearchNode, Tree]] = [(root, drawn)]
    left = _MOST_NODES
    while waiting:
        node, at = waiting.pop(0)
        for end, text, logprob in _children(node):
            if not left:
                at.add(Text("...", style="dim"))
                break
            left -= 1
            waiting.append((end, at.add(_label(end, text, logprob))))
    return drawn


def _children(node: SearchNode) -> Iterator[tuple[SearchNode, str, float]]:
    """Yield what follows ``node``: the last of nodes that go on in one way, their text and log p."""
    for child in node.children:
        end, text = child, child.text
        while end.status == "open" and len(end.children) == 1 and not end.n_visits:
            end = end.children[0]
            text += end.text
        yield end, text, end.logprob - node.logprob


def _label(node: SearchNode, text: str, logprob: float) -> Text:
    style = {"finished": "green", "pruned": "dim"}.get(node.status, "")
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
