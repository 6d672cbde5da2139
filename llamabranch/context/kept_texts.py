"""Texts by their beginnings: which of many shares the longest prefix with a given one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import attrgetter

from .hidden_states import PackedStates
from .memory import State

__all__ = ["KeptText", "KeptTexts", "n_common"]

_tokens = attrgetter("tokens")


class KeptText:
    """A text, the sequence that refers to its cells, or what was copied of them.

    Attributes:
        tokens: its token ids; nobody changes them while the text is in a collection.
        seq_id: the sequence; -1: none.
        state: the K/V of all its tokens, uint8 (n,), where it is outside the cache.
        hidden: then, with a head, their hidden states too.
    """

    def __init__(self, tokens: list[int], seq_id: int = -1) -> None:
        self.tokens = tokens
        self.seq_id = seq_id
        self.state: State | None = None
        self.hidden: PackedStates | None = None

    @property
    def n_bytes(self) -> int:
        """The memory that it takes outside the cache."""
        n = 0 if self.state is None else self.state.nbytes
        return n if self.hidden is None else n + self.hidden.rows.nbytes


class KeptTexts:
    """Different texts, the least recently used first; finding one costs as much as reading it."""

    def __init__(self) -> None:
        self._sorted: list[KeptText] = []  # by tokens: those that begin alike are neighbours
        self._used: OrderedDict[KeptText, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._used)

    def __iter__(self) -> Iterator[KeptText]:
        return iter(list(self._used))

    def __contains__(self, text: KeptText) -> bool:
        return text in self._used

    def find(self, tokens: Sequence[int]) -> tuple[int, KeptText | None]:
        """Return how many of ``tokens`` a text begins with, and such a text."""
        tokens, n, found = list(tokens), 0, None
        at = bisect_left(self._sorted, tokens, key=_tokens)
        for text in self._sorted[max(0, at - 1) : at + 1]:
            common = n_common(text.tokens, tokens)
            if common > n:
                n, found = common, text
        return n, found

    def find_whole(self, tokens: Sequence[int]) -> tuple[int, KeptText | None]:
        """Return the length of the longest text that ``tokens`` begin with, and that text."""
        beginning = list(tokens)
        while at := bisect_right(self._sorted, beginning, key=_tokens):
            text = self._sorted[at - 1]
            n = n_common(text.tokens, beginning)
            if n == len(text.tokens):
                return n, text
            del beginning[n:]  # the longest is no longer: it would be between the two
        return 0, None

    def add(self, text: KeptText) -> None:
        """Add a text that is not empty, and not there; it is the last one used."""
        insort(self._sorted, text, key=_tokens)
        self._used[text] = None

    def use(self, text: KeptText) -> None:
        """Record that a text was used; nothing if it is not there."""
        if text in self._used:
            self._used.move_to_end(text)

    def cut(self, text: KeptText, n: int) -> bool:
        """Shorten a text to its first ``n`` tokens; False, and no change, if another begins with them."""
        del self._sorted[bisect_left(self._sorted, text.tokens, key=_tokens)]
        is_new = self.find(text.tokens[:n])[0] < n
        if is_new:
            text.tokens = text.tokens[:n]
        insort(self._sorted, text, key=_tokens)
        return is_new

    def remove(self, text: KeptText) -> None:
        """Remove a text.

        Raises:
            KeyError: it is not there.
        """
        del self._used[text]
        del self._sorted[bisect_left(self._sorted, text.tokens, key=_tokens)]


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
