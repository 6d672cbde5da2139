"""Texts whose K/V was copied to host memory when the prefix cache evicted it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .hidden_states import PackedStates
from .memory import State
from .radix_tree import RadixTree

__all__ = ["SavedPrefixes", "SavedText"]


class SavedText:
    """A text and the K/V of all its tokens; with a head, their hidden states too."""

    def __init__(self, tokens: list[int], state: State, hidden: PackedStates | None) -> None:
        self.tokens = tokens
        self.state = state
        self.hidden = hidden

    @property
    def n_bytes(self) -> int:
        """Its size in memory."""
        return self.state.nbytes + (0 if self.hidden is None else self.hidden.rows.nbytes)


class SavedPrefixes:
    """At most ``max_bytes`` of K/V and hidden states; the least recently used texts go first.

    Attributes:
        n_bytes: the size of what is held.
    """

    def __init__(self, max_bytes: int) -> None:
        self.n_bytes = 0
        self._max_bytes = max_bytes
        self._tree: RadixTree[SavedText] = RadixTree()
        self._texts: OrderedDict[SavedText, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._texts)

    def find(self, tokens: Sequence[int]) -> tuple[int, SavedText | None]:
        """Return how many of ``tokens`` a text begins with, and that text."""
        return self._tree.find(tokens)

    def touch(self, text: SavedText) -> None:
        """Record that a text was used; nothing if it was dropped meanwhile."""
        if text in self._texts:
            self._texts.move_to_end(text)

    def accepts(self, n_bytes: int) -> bool:
        """Return whether a state of this size can be held at all."""
        return n_bytes <= self._max_bytes

    def put(self, tokens: list[int], state: State, hidden: PackedStates | None = None) -> None:
        """Hold a text that does not begin another one; those that it continues are dropped."""
        n, known = self._tree.find(tokens)
        if known is not None and n == len(known.tokens):
            self.drop(known)
        text = SavedText(tokens, state, hidden)
        self._tree.insert(tokens, text)
        self._texts[text] = None
        self.n_bytes += text.n_bytes
        while self.n_bytes > self._max_bytes:
            self.drop(next(iter(self._texts)))

    def drop(self, text: SavedText) -> None:
        """Forget a text; a second time does nothing."""
        if text not in self._texts:
            return
        self._tree.remove(text.tokens)
        del self._texts[text]
        self.n_bytes -= text.n_bytes

    def clear(self) -> None:
        """Forget everything."""
        for text in list(self._texts):
            self.drop(text)
