"""A radix tree over token ids: which of many texts shares the longest prefix with a given one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["RadixTree", "n_common"]

T = TypeVar("T")


class _Node(Generic[T]):
    """The end of an edge labelled with tokens; ``value`` belongs to the text that ends here, if any."""

    __slots__ = ("children", "parent", "tokens", "value")

    def __init__(self, tokens: list[int], parent: _Node[T] | None, value: T | None) -> None:
        self.tokens = tokens
        self.parent = parent
        self.value = value
        self.children: dict[int, _Node[T]] = {}


class RadixTree(Generic[T]):
    """Texts as lists of token ids, each with a value; finding one costs as much as reading it."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node([], None, None)

    def find(self, tokens: Sequence[int]) -> tuple[int, T | None]:
        """Return how many of ``tokens`` a text in the tree begins with, and the value of such a text."""
        node, n = self._descend(tokens)
        if n == 0:
            return 0, None
        while node.value is None:
            node = next(iter(node.children.values()))
        return n, node.value

    def find_whole(self, tokens: Sequence[int]) -> tuple[int, T | None]:
        """Return the length and the value of the longest text in the tree that ``tokens`` begin with."""
        node, n = self._descend(tokens)
        end = _length(node)
        if n < end:  # the last edge matches in part only
            node, end = node.parent or node, end - len(node.tokens)
        while node.value is None and node.parent is not None:
            end -= len(node.tokens)
            node = node.parent
        return end, node.value

    def insert(self, tokens: Sequence[int], value: T) -> T | None:
        """Add a text; return the value it had before, None if it is new."""
        node, n = self._descend(tokens)
        end = _length(node)
        if n < end:  # split the last edge
            node = self._split(node, len(node.tokens) - (end - n))
        if n < len(tokens):
            child: _Node[T] = _Node(list(tokens[n:]), node, value)
            node.children[tokens[n]] = child
            return None
        before, node.value = node.value, value
        return before

    def remove(self, tokens: Sequence[int]) -> None:
        """Remove a text.

        Raises:
            KeyError: it is not in the tree.
        """
        node, n = self._descend(tokens)
        if n < len(tokens) or n < _length(node) or node.value is None:
            raise KeyError(len(tokens))
        node.value = None
        parent = node.parent
        if not node.children and parent is not None:
            del parent.children[node.tokens[0]]
            node = parent
        self._join(node)

    def _descend(self, tokens: Sequence[int]) -> tuple[_Node[T], int]:
        """Return the deepest node whose edge is entered, and how many tokens match."""
        node, n = self._root, 0
        while n < len(tokens):
            child = node.children.get(tokens[n])
            if child is None:
                break
            same = n_common(child.tokens, tokens[n : n + len(child.tokens)])
            node, n = child, n + same
            if same < len(child.tokens):
                break
        return node, n

    def _split(self, node: _Node[T], n: int) -> _Node[T]:
        """Divide the edge to ``node`` after ``n`` tokens; return the new node in its middle."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("the root has no edge to split")
        middle: _Node[T] = _Node(node.tokens[:n], parent, None)
        parent.children[middle.tokens[0]] = middle
        node.tokens, node.parent = node.tokens[n:], middle
        middle.children[node.tokens[0]] = node
        return middle

    def _join(self, node: _Node[T]) -> None:
        """Join ``node`` with its only child, if no text ends there."""
        parent = node.parent
        if node.value is None and len(node.children) == 1 and parent is not None:
            (child,) = node.children.values()
            child.tokens, child.parent = node.tokens + child.tokens, parent
            parent.children[child.tokens[0]] = child


def _length(node: _Node[T]) -> int:
    """Return how many tokens lead to the end of the edge of ``node``."""
    n, at = 0, node
    while at.parent is not None:
        n += len(at.tokens)
        at = at.parent
    return n


def n_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists."""
    n = min(len(left), len(right))
    if left[:n] == right[:n]:
        return n
    low, high = 0, n  # they agree up to low, and differ before high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
