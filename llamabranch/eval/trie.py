"""Token sequences as a tree in which long common beginnings are one, so that they are decoded once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Line", "Node", "build"]

# A beginning that saves fewer tokens than this is not worth a decode of its own.
_LEAST_SHARED = 8


@dataclass(eq=False)
class Line:
    """A sequence to be read, and the tokens that are rated after its positions.

    Attributes:
        tokens: what is read: context and continuation, but for its last token.
        n_context: how many of them are context, at least one.
        last: the last token of the continuation.
        logprobs: by the index of a token in the continuation its log-probability, nats, once it is known.
        is_greedy: whether each of these tokens has the largest logit.
    """

    tokens: list[int]
    n_context: int
    last: int
    logprobs: dict[int, float] = field(default_factory=dict)
    is_greedy: bool = True

    @property
    def continuation(self) -> list[int]:
        """The tokens that are rated."""
        return [*self.tokens[self.n_context :], self.last]


@dataclass(eq=False)
class Node:
    """Tokens [start, end) of the lines through it.

    Attributes:
        tokens: those of the node alone.
        ratings: at an index of ``tokens``, the lines of which the next token is rated, with the index of
            that token in their continuations.
        n_tokens, n_leaves: of the node and everything below it.
    """

    tokens: list[int]
    start: int
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    ratings: dict[int, list[tuple[Line, int]]] = field(default_factory=dict)
    n_tokens: int = 0
    n_leaves: int = 0

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens)

    @property
    def first_row(self) -> int:
        """The index of the first token whose logits are needed; that after the last one if none is."""
        return min(self.ratings, default=len(self.tokens))

    def paths(self) -> list[Node]:
        """Return the way from here to each leaf as one node: what is shared below here is read again."""
        found: list[Node] = []
        waiting = [(self, Node([], self.start))]
        while waiting:
            node, above = waiting.pop()
            ratings = dict(above.ratings)
            ratings |= {len(above.tokens) + i: rated for i, rated in node.ratings.items()}
            path = Node([*above.tokens, *node.tokens], self.start, ratings=ratings)
            if node.children:
                waiting += [(child, path) for child in node.children]
            else:
                path.n_tokens, path.n_leaves = len(path.tokens), 1
                found.append(path)
        return found


def build(lines: Iterable[Line]) -> list[Node]:
    """Return the roots of a tree over ``lines``."""
    top = Node([], 0)
    stack = [top]
    ends: list[tuple[Line, Node]] = []
    last: Line | None = None
    for line in sorted(lines, key=lambda line: line.tokens):
        shared = 0 if last is None else _shared(last, line)
        while stack[-1].start >= shared and stack[-1] is not top:
            stack.pop()
        node = stack[-1]
        if node is not top and shared == node.end and not node.children:
            node.tokens += line.tokens[shared:]  # the line before it ends where this one goes on
        else:
            if shared < node.end:
                stack[-1] = node = _split(node, shared)
            if shared < len(line.tokens):
                leaf = Node(line.tokens[shared:], shared, node)
                node.children.append(leaf)
                stack.append(leaf)
        ends.append((line, stack[-1]))
        last = line
    for line, end in ends:
        _rate(line, end)
    _count(top)
    return top.children


def _shared(last: Line, line: Line) -> int:
    """Return how many tokens two neighbours begin with in common, fewer where sharing is not worth it."""
    n = 0
    for a, b in zip(last.tokens, line.tokens, strict=False):
        if a != b:
            break
        n += 1
    if n == min(len(last.tokens), len(line.tokens)):
        return n  # one continues the other
    n_context = line.n_context
    if last.n_context == n_context and 0 <= n - n_context < _LEAST_SHARED:
        return n_context  # choices that begin alike
    return n if n >= _LEAST_SHARED else 0


def _split(node: Node, position: int) -> Node:
    """Cut a node in two at ``position``; return the upper one."""
    cut, parent = position - node.start, node.parent
    upper = Node(node.tokens[:cut], node.start, parent, [node])
    if parent is not None:
        parent.children[parent.children.index(node)] = upper
    node.tokens, node.start, node.parent = node.tokens[cut:], position, upper
    return upper


def _rate(line: Line, end: Node) -> None:
    """Note at the nodes above and including ``end`` which tokens of a line are rated."""
    position = len(line.tokens) - 1
    node: Node | None = end
    while node is not None and position >= line.n_context - 1:
        while position >= max(node.start, line.n_context - 1):
            rated = (line, position - line.n_context + 1)
            node.ratings.setdefault(position - node.start, []).append(rated)
            position -= 1
        node = node.parent


def _count(top: Node) -> None:
    order: list[Node] = [top]
    for node in order:
        order += node.children
    for node in reversed(order):
        node.n_tokens = len(node.tokens) + sum(child.n_tokens for child in node.children)
        node.n_leaves = sum(child.n_leaves for child in node.children) or 1
