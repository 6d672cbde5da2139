"""Token sequences as a tree in which long common beginnings are one, so that they are decoded once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Line", "Node", "build"]

# A beginning that saves fewer tokens than this is not worth a decode of its own.
_LEAST_SHARED = 8


@dataclass(eq=False)
class Line:
    """A sequence whose tokens from index ``n_context`` on are rated.

    Attributes:
        tokens: context and continuation; all but the last one are decoded.
        n_context: how many of them are context, at least one.
        logprobs: by the index of a token its log-probability, nats, once it is known.
        is_greedy: whether each of these tokens has the largest logit.
    """

    tokens: list[int]
    n_context: int
    logprobs: dict[int, float] = field(default_factory=dict)
    is_greedy: bool = True

    @property
    def n_decoded(self) -> int:
        """How many tokens are decoded."""
        return len(self.tokens) - 1

    @property
    def is_done(self) -> bool:
        """Whether all log-probabilities are known."""
        return len(self.logprobs) == len(self.tokens) - self.n_context


@dataclass(eq=False)
class Node:
    """Tokens [start, end) of the lines through it.

    Attributes:
        tokens: those of the node alone.
        ratings: by position, the lines whose token after it is rated.
        n_tokens, n_leaves: of the node and everything below it.
    """

    tokens: list[int]
    start: int
    children: list[Node] = field(default_factory=list)
    ratings: dict[int, list[Line]] = field(default_factory=dict)
    n_tokens: int = 0
    n_leaves: int = 1

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens)

    @property
    def first_row(self) -> int:
        """The index of the first token whose logits are needed; that after the last one if none is."""
        return min(self.ratings, default=self.end) - self.start

    def extend(self, lines: Sequence[Line], end: int) -> None:
        """Add the tokens up to ``end``, which are the same in all ``lines``."""
        for line in lines:
            for position in range(max(self.end, line.n_context - 1), min(end, line.n_decoded)):
                self.ratings.setdefault(position, []).append(line)
        self.tokens += lines[0].tokens[self.end : end]

    def paths(self) -> list[Node]:
        """Return the way from here to each leaf as one node: what is shared below here is read again."""
        found: list[Node] = []
        waiting = [(self, Node([], self.start))]
        while waiting:
            node, above = waiting.pop()
            tokens = [*above.tokens, *node.tokens]
            path = Node(tokens, self.start, [], above.ratings | node.ratings, len(tokens))
            waiting += [(child, path) for child in node.children]
            if not node.children:
                found.append(path)
        return found


def build(lines: Iterable[Line]) -> list[Node]:
    """Return the roots of a tree over ``lines``."""
    ordered = sorted(lines, key=lambda line: line.tokens[:-1])
    shared = [0, *map(_shared, ordered, ordered[1:])]  # of each line with the one before it
    top = Node([], 0)
    nodes = [top]
    waiting = [(top, 0, len(ordered))]
    while waiting:
        node, first, last = waiting.pop()
        while first < last and ordered[first].n_decoded == node.end:
            first += 1  # it ends here
        begins = [i for i in range(first, last) if i == first or shared[i] <= node.end]
        for begin, end in zip(begins, [*begins[1:], last], strict=False):
            child = node
            if len(begins) > 1 or node is top:
                child = Node([], node.end)
                node.children.append(child)
                nodes.append(child)
            group = ordered[begin:end]
            child.extend(group, min(shared[begin + 1 : end], default=group[0].n_decoded))
            waiting.append((child, begin, end))
    for node in reversed(nodes):
        node.n_tokens = len(node.tokens) + sum(child.n_tokens for child in node.children)
        node.n_leaves = sum(child.n_leaves for child in node.children) or 1
    return top.children


def _shared(last: Line, line: Line) -> int:
    """Return how many tokens two neighbours begin with in common, fewer where sharing is not worth it."""
    most = min(last.n_decoded, line.n_decoded)
    n = next((i for i in range(most) if last.tokens[i] != line.tokens[i]), most)
    if n == most:
        return n  # one continues the other
    n_context = line.n_context
    if last.n_context == n_context and 0 <= n - n_context < _LEAST_SHARED:
        return n_context  # choices that begin alike
    return n if n >= _LEAST_SHARED else 0
