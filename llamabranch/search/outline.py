"""The tree of a search as few lines: what led to a result, and what was pruned on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..pictures import Node, Token, tree
from .node import SearchNode

__all__ = ["TreeLine", "outline", "tree_picture"]

_MOST_ASIDE = 40  # pruned branches of a line that a picture lists


@dataclass(frozen=True)
class TreeLine:
    """A part of a tree that goes on in one way only, pruned branches aside.

    Attributes:
        nodes: one after another; the last one is where it ends or divides.
        pruned: the first nodes of the branches that were pruned along it, the most visited and then
            the most probable first.
        n_pruned: how many nodes they and all nodes below them are.
        lines: how it goes on, best first.
    """

    nodes: list[SearchNode]
    pruned: list[SearchNode]
    n_pruned: int
    lines: list[TreeLine]

    @property
    def text(self) -> str:
        """The text of its nodes."""
        return "".join(node.text for node in self.nodes)

    @property
    def logprob(self) -> float:
        """Log p of its tokens, nats."""
        above = self.nodes[0].parent
        return self.nodes[-1].logprob - (0.0 if above is None else above.logprob)


def outline(root: SearchNode) -> TreeLine:
    """Return the tree below ``root`` as lines; the first one begins with ``root``."""
    nodes, pruned = [root], []
    while True:
        at = nodes[-1]
        going_on = [child for child in at.children if child.status != "pruned"]
        pruned += [child for child in at.children if child.status == "pruned"]
        if len(going_on) != 1 or at.status == "finished" or (at is root and at.parent is None):
            break
        nodes.append(going_on[0])
    pruned.sort(key=lambda node: (-node.n_visits, -_own_logprob(node)))
    n_pruned = sum(1 for node in pruned for _ in node.walk())
    lines = [outline(child) for child in going_on]
    lines.sort(key=lambda line: -_best(line))
    return TreeLine(nodes, pruned, n_pruned, lines)


def _best(line: TreeLine) -> float:
    """Return the best score at the ends of a line."""
    if line.lines:
        return max(map(_best, line.lines))
    score = line.nodes[-1].score
    return score if score == score else -math.inf


def _own_logprob(node: SearchNode) -> float:
    return node.logprob - (0.0 if node.parent is None else node.parent.logprob)


def tree_picture(root: SearchNode, *, prompt: str = "", caption: str = "") -> str:
    """Return the tree as HTML: tokens coloured by probability, pruned branches to unfold."""
    line = outline(root)
    top = Node("", [Token(prompt)], [_picture(below) for below in line.lines], *_aside(line))
    return tree([top], caption=caption)


def _picture(line: TreeLine) -> Node:
    tokens = [Token(node.text or "(end)", _mean(node)) for node in line.nodes]
    children = [_picture(below) for below in line.lines]
    return Node(_told(line.nodes[-1], line.logprob), tokens, children, *_aside(line))


def _aside(line: TreeLine) -> tuple[list[Node], int]:
    """Return the pruned branches of a line that are listed, and how many are not."""
    listed = []
    for node in line.pruned[:_MOST_ASIDE]:
        logprob = _own_logprob(node)
        listed.append(Node(_told(node, logprob), [Token(node.text or "(end)", _mean(node))]))
    return listed, len(line.pruned) - len(listed)


def _mean(node: SearchNode) -> float:
    """Return the mean log-probability of a node's tokens, nats."""
    return _own_logprob(node) / len(node.tokens) if node.tokens else math.nan


def _told(node: SearchNode, logprob: float) -> str:
    told = [f"{math.exp(min(0.0, logprob)):.1%}"]
    if node.score == node.score:
        told.append(f"score {node.score:.3f}")
    if node.n_visits:
        told.append(f"{node.n_visits} visits")
    return ", ".join(told)
