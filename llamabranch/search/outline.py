"""The tree of a search in a few lines: the paths to its results, and the branches pruned on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..arguments import instance
from ..pictures import Token, TreeLine
from .node import SearchNode

__all__ = ["TreeLine", "outline"]


def outline(root: SearchNode, *, prompt: str | None = None, most_pruned: int = 3) -> TreeLine:
    """Return the tree below ``root`` as lines, for drawing; the first one is ``root``.

    Nodes that continue in one way only are one line. A pruned branch is shown as a child of the line that
    ends where it was pruned. It comes before the continuations of that line.

    Args:
        root: a node of a search.
        prompt: the text to begin with; None = the root's text.
        most_pruned: the most pruned branches to show between two places where the tree divides. The most
            visited come first, then the most probable; the others are only counted.

    Returns:
        the line of the root; of several continuations the best one comes first.

    Raises:
        ConfigError: not a node.
    """
    instance("root", root, SearchNode)
    return _outline(root, prompt, most_pruned)[0]


def _outline(start: SearchNode, prompt: str | None, most_pruned: int) -> tuple[TreeLine, float]:
    """Return the tree as lines, and the best score at their ends."""
    chain = [start]
    going_on = _going_on(start)
    while len(going_on) == 1 and chain[-1].status != "finished" and chain[-1].parent is not None:
        chain += going_on
        going_on = _going_on(chain[-1])
    heads = [child for node in chain for child in node.children if child.status == "pruned"]
    heads.sort(key=lambda node: (-node.n_visits, -node.pieces[0][1]))
    shown = set(heads[:most_pruned])
    below = [_outline(child, None, most_pruned) for child in going_on]
    below.sort(key=lambda pair: -pair[1])
    score = chain[-1].score
    best = below[0][1] if below else score if score == score else -math.inf
    children = [line for line, _ in below]
    part: list[SearchNode] = []  # built from the end; a part ends where a shown branch was pruned
    n_hidden = 0
    for node in reversed(chain):
        pruned = [child for child in node.children if child.status == "pruned"]
        if part and not shown.isdisjoint(pruned):
            children = [_line(part[::-1], None, children, n_hidden)]
            part, n_hidden = [], 0
        part.append(node)
        children = [
            _pruned(child) for child in heads if child in shown and child in pruned
        ] + children
        n_hidden += sum(child not in shown for child in pruned)
    return _line(part[::-1], prompt, children, n_hidden), best


def _going_on(node: SearchNode) -> list[SearchNode]:
    return [child for child in node.children if child.status != "pruned"]


def _pruned(head: SearchNode) -> TreeLine:
    """Return the line of a pruned branch, up to the place where it divides."""
    nodes = [head]
    while len(nodes[-1].children) == 1:
        nodes += nodes[-1].children
    return _line(nodes, None, (), 0)


def _line(
    nodes: list[SearchNode], prompt: str | None, children: Sequence[TreeLine], n_hidden: int
) -> TreeLine:
    last = nodes[-1]
    tokens = [Token(*piece) for node in nodes for piece in node.pieces]
    if not tokens:
        tokens = [Token(last.text if prompt is None else prompt)]
    elif not tokens[-1].text:
        tokens[-1] = Token("(end)", tokens[-1].logprob)
    status = last.status if last.status != "open" else ""
    if status == "pruned" and last.children:
        tokens.append(Token("..."))
    figures = []
    if last.score == last.score:
        figures.append(f"score {last.score:.3f}")
    if last.n_visits and last.parent is not None:
        figures.append(f"{last.n_visits} visit{'s' if last.n_visits > 1 else ''}")
    return TreeLine(tokens, ", ".join(figures), children, status, n_hidden)
