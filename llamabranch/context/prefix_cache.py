"""The prefix cache: K/V of texts that were read stays until its cells are needed.

A kept text has a sequence that is never decoded; it refers to the cells the text was read into, and
whoever needs the beginning of it shares those cells, as a fork does. So nothing is copied, the cells of a
text stay in order, and a text that continues a kept one gets the logits it would have had alone.
Texts that were not used for the longest time give up their cells first, from their ends. Cells that
others use too free nothing, and stay.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from .kv_cache import END, MOVED, KVCache
from .radix_tree import RadixTree

__all__ = ["KeptSequences", "LeasedSequences", "PrefixCache"]

_MIN_TOKENS = 8  # a shorter prefix is decoded faster than it is shared


class KeptSequences(Protocol):
    """Where the sequences of kept texts come from."""

    def lend(self, holder: object) -> int | None:
        """Return an empty sequence, None if there is none."""

    def give_back(self, seq_id: int) -> None:
        """Take back an emptied sequence."""


class _ExtraSequences:
    """Ids beyond those of the context: cells can refer to them, but they cannot be decoded."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._free = list(range(cache.ledger.n_seq_max, MOVED))

    def lend(self, holder: object) -> int | None:
        if not self._free:
            return None
        seq_id = heapq.heappop(self._free)
        self._cache.keep(seq_id)
        return seq_id

    def give_back(self, seq_id: int) -> None:
        self._cache.keepers.discard(seq_id)
        heapq.heappush(self._free, seq_id)


class LeasedSequences:
    """Sequences of the context itself: a recurrent state exists only for these.

    Args:
        cache: the cache.
        lease: leases a sequence to a holder; None if there is none.
        end_lease: ends the lease.
    """

    def __init__(
        self,
        cache: KVCache,
        lease: Callable[[object], int | None],
        end_lease: Callable[[int], None],
    ) -> None:
        self._cache = cache
        self._lease = lease
        self._end_lease = end_lease

    def lend(self, holder: object) -> int | None:
        """Return an empty sequence, None if there is none."""
        seq_id = self._lease(holder)
        if seq_id is not None:
            self._cache.keep(seq_id)
        return seq_id

    def give_back(self, seq_id: int) -> None:
        """Take back an emptied sequence."""
        self._cache.keepers.discard(seq_id)
        self._end_lease(seq_id)


class _Text:
    """A kept text and the sequence that refers to its cells."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.seq_id = -1


class PrefixCache:
    """Texts whose K/V is still in the cache. A context has one if it was opened with ``prefix_cache``.

    Args:
        cache: the cells.
        sequences: where the sequences of kept texts come from; None: ids beyond those of the context.

    Attributes:
        n_hits: how often the beginning of a text was found.
        n_hit_tokens: how many tokens those were together.
        n_evicted: how many cells were given up because others needed them.

    Where the memory cannot be cut (recurrent, hybrid, sliding window), a text is of use only to texts
    that begin with all of it.
    """

    def __init__(self, cache: KVCache, sequences: KeptSequences | None = None) -> None:
        self._cache = cache
        self._sequences: KeptSequences = sequences or _ExtraSequences(cache)
        self._tree: RadixTree[_Text] = RadixTree()
        self._kept: OrderedDict[_Text, None] = OrderedDict()  # least recently used first
        self.n_hits = 0
        self.n_hit_tokens = 0
        self.n_evicted = 0

    def __len__(self) -> int:
        """Return the number of kept texts."""
        return len(self._kept)

    def texts(self) -> list[tuple[int, list[int]]]:
        """Return the sequence and the tokens of every kept text."""
        return [(text.seq_id, text.tokens) for text in self._kept]

    def n_common(self, tokens: Sequence[int]) -> int:
        """Return how many of ``tokens``, from the first on, could be shared."""
        return self._find(tokens)[0]

    def take(self, seq_id: int, tokens: Sequence[int]) -> int:
        """Share the longest kept prefix of ``tokens`` with an empty sequence; return its length."""
        n, text = self._find(tokens)
        if text is None:
            return 0
        self._cache.share(text.seq_id, seq_id, 0, n if self._cache.can_truncate else -1)
        self._kept.move_to_end(text)
        self.n_hits += 1
        self.n_hit_tokens += n
        return n

    def _find(self, tokens: Sequence[int]) -> tuple[int, _Text | None]:
        tree = self._tree
        n, text = tree.find(tokens) if self._cache.can_truncate else tree.find_whole(tokens)
        return (n, text) if n >= _MIN_TOKENS else (0, None)

    def put(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Keep the K/V of a sequence, which holds exactly ``tokens``, beyond the end of that sequence."""
        if len(tokens) < _MIN_TOKENS:
            return
        n, known = self._find(tokens)
        if known is not None and n == len(tokens):
            self._kept.move_to_end(known)
            return
        if known is not None and n == len(known.tokens) and self._cache.can_truncate:
            self._drop(known)  # the new text continues it
        text = _Text(list(tokens))
        lent = self._sequences.lend(text)
        while lent is None:
            if not self.evict_text():
                return
            lent = self._sequences.lend(text)
        text.seq_id = lent
        self._cache.share(seq_id, lent)
        self._tree.insert(text.tokens, text)
        self._kept[text] = None

    def evict(self, n_cells: int) -> int:
        """Give up at least ``n_cells`` cells that nobody else uses, if there are as many.

        Returns:
            how many.

        Some may be reserved afterwards, until the cache is compacted.
        """
        freed = 0
        for text in list(self._kept):
            if freed >= n_cells:
                break
            first, n_alone = self._cache.ledger.exclusive(text.seq_id, 0, END)
            if first is None:
                continue
            keep = 0
            if self._cache.can_truncate:
                keep = max(first, len(text.tokens) - (n_cells - freed))
            freed += min(n_alone, len(text.tokens) - keep)
            self._cut(text, keep if keep >= _MIN_TOKENS else 0)
        self.n_evicted += freed
        return freed

    def evict_text(self) -> bool:
        """Give up the text that was not used for the longest time; False if none is kept."""
        for text in self._kept:
            _, n_alone = self._cache.ledger.exclusive(text.seq_id, 0, END)
            self.n_evicted += n_alone
            self._drop(text)
            return True
        return False

    def clear(self) -> None:
        """Give up everything."""
        for text in list(self._kept):
            self._drop(text)

    def _cut(self, text: _Text, n: int) -> None:
        """Keep only the first ``n`` tokens of a text; nothing if another text has these too."""
        self._tree.remove(text.tokens)
        if n and self._tree.find(text.tokens[:n])[0] < n:
            self._cache.drop(text.seq_id, n)
            text.tokens = text.tokens[:n]
            self._tree.insert(text.tokens, text)
        else:
            self._end(text)

    def _drop(self, text: _Text) -> None:
        self._tree.remove(text.tokens)
        self._end(text)

    def _end(self, text: _Text) -> None:
        del self._kept[text]
        self._cache.drop(text.seq_id, 0)
        self._sequences.give_back(text.seq_id)
