"""The prefix cache: keeps the K/V of earlier texts until its cells are needed.

A cached prefix has a sequence that is never decoded; it refers to the cells that the text was decoded
into. A new text with the same beginning shares those cells, as a fork does. So nothing is copied, the
cells of a text stay in order, and a text that continues a cached one gets the logits it would have had
alone. Cells are evicted from the end of a text. Cells that other sequences also use stay, since
evicting them would free nothing. Texts are evicted in this order:

1. texts of sessions that have ended;
2. texts without a session, least recently used first; texts that many others have shared go later;
3. texts of a session except its longest, least recently used first;
4. the longest texts of sessions, least recently used first.

The longest text of a session is not evicted while a session below it runs. It is also kept while a
request of such a session waits; requests of other sessions then have to wait for other cells. It may be
evicted only if at most one text is running, so that something always runs.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..model.text import n_common
from ..native.interrupts import uninterrupted
from .memory import END, Memory
from .sequence_ids import SequenceIds
from .sessions import Session, Sessions
from .store import PrefixStore

MIN_SHARED = 8  # tokens; a shorter prefix is decoded faster than it is shared
_MOST_SHARED = 8  # a text that was shared more often is not kept longer
_FEWEST_IDS = 14  # with fewer ids of their own, cached texts take sequences of the context


@dataclass(eq=False)
class CachedPrefix:
    """A text, with the sequence that refers to its cells.

    Attributes:
        tokens: its token ids.
        seq_id: the sequence; -1 if it has none.
        session: the session that it belongs to, if any.
        n_shared: how many tokens other texts have shared with it, in total.
        age: when this text was last used, the worth of the text that had been evicted last.
    """

    tokens: list[int]
    seq_id: int = -1
    session: Session | None = None
    n_shared: int = 0
    age: float = 0.0

    @property
    def worth(self) -> float:
        """Texts are evicted in the order of this number. Each use of a text makes it larger."""
        return self.age + 1 + min(_MOST_SHARED, self.n_shared / len(self.tokens))


def longest_prefix(
    texts: Iterable[CachedPrefix],
    tokens: Sequence[int],
    usable: Callable[[int, int], int] = lambda _seq_id, n: n,
) -> tuple[int, CachedPrefix | None]:
    """Return the length of the longest prefix that a text shares with ``tokens``, and that text.

    ``usable(seq_id, n)`` returns how many of the first ``n`` tokens of a text can be shared.
    """
    tokens, n, best = list(tokens), 0, None
    for text in texts:
        # Most texts have no more than this in common, which one comparison shows.
        if text.tokens[n : n + 1] == tokens[n : n + 1]:
            common = n_common(text.tokens, tokens)
            if common > n and (common := usable(text.seq_id, common)) > n:
                n, best = common, text
    return n, best


class PrefixCache:
    """Texts whose K/V is still in the cache, for new texts that begin the same way.

    ``ContextParams.prefix_cache`` tells which contexts have one.

    Args:
        memory: has the cells.
        sequences: the sequences of the context. Cached texts use some of them if the memory has no other
            ids.
        store: keeps evicted texts in a folder; None = evicted texts are lost.

    Attributes:
        n_hits: how often the beginning of a text was found.
        n_hit_tokens: the total number of tokens found.
        n_evicted: how many cells were freed because other texts needed them.
        sessions: the sessions of its texts.
        asker: the session of the text that needs cells now, if any.
        note_evicted: called before a text loses its end, with the text and how many tokens will be
            left.

    If the memory cannot be cut (recurrent, hybrid, sliding window), a text helps only texts that
    begin with all of it, or with its tokens up to one of its checkpoints.
    """

    def __init__(
        self, memory: Memory, sequences: SequenceIds, store: PrefixStore | None = None
    ) -> None:
        self._memory, self._store = memory, store
        self._sequences = sequences
        if len(memory.spare_seq_ids) < _FEWEST_IDS:
            memory.spare_seq_ids = range(0)
        self._spare_seq_ids = list(memory.spare_seq_ids)  # a heap
        self._kept: OrderedDict[CachedPrefix, None] = OrderedDict()  # least recently used first
        self.n_hits = 0
        self.n_hit_tokens = 0
        self.n_evicted = 0
        self.sessions = Sessions()
        self.asker: Session | None = None
        self._shared: CachedPrefix | None = None
        self.note_evicted: Callable[[CachedPrefix, int], None] = lambda _text, _left: None
        self._age = 0.0
        memory.evict, memory.protected = self.evict, self._reserved
        sequences.evict, sequences.transfer_text = self.evict_text, self.transfer_text

    def __len__(self) -> int:
        """Return the number of cached prefixes."""
        return len(self._kept)

    def texts(self) -> list[CachedPrefix]:
        """Return every cached prefix."""
        return list(self._kept)

    def n_common(self, tokens: Sequence[int]) -> int:
        """Return how many of the first ``tokens`` could be shared. Any thread may call this."""
        with self._memory.handle.lock:
            n, _ = self._find(tokens)
            return n if self._store is None else self._store.n_common(tokens, n)

    @uninterrupted
    def take(self, seq_id: int, tokens: Sequence[int]) -> int:
        """Put the longest cached prefix of ``tokens`` into an empty sequence; return its length."""
        n, text = self._find(tokens)
        stored = None
        if self._store is not None:
            self._shared = text  # room is made by evicting other texts
            try:
                stored = self._store.read(tokens, n)
            finally:
                self._shared = None
        n = 0 if text is None else self._memory.fork(text.seq_id, seq_id, n)
        if text is not None and n:
            self._note_hit(text, n)
        if self._store is not None and stored is not None:
            n = self._store.place(stored, seq_id)
        return n

    @uninterrupted
    def transfer_text(self, tokens: Sequence[int], is_full: bool) -> int | None:
        """Drop a cached text that begins like ``tokens``; return its sequence, cut to the common part.

        This avoids a copy with non-unified KV. There the text is dropped if ``tokens`` continue all of
        it. If no sequence is free (``is_full``), some text must be dropped anyway: this one, if more of
        it is shared than lost. If it is the only one, it is dropped with any kind of memory.

        Returns:
            The sequence; None if ``take`` has to copy, or if there is nothing to take.
        """
        n, text = self._find(tokens)
        if text is None or text.seq_id in self._protected():
            return None
        if self._store is not None and self._store.n_common(tokens, n) > n:
            return None  # `take` reads a longer prefix from the folder
        self._kept.move_to_end(text)  # so that another text is evicted
        n_lost = len(text.tokens) - n
        is_cheap = self._memory.forks_copy and (not n_lost or (is_full and n_lost < n))
        if not is_cheap and (self._memory.spare_seq_ids or not is_full or len(self._kept) > 1):
            return None
        self._memory.prefix_seq_ids.discard(text.seq_id)
        if n_lost:
            self._note_evicted(text, n)
            self._memory.cut(text.seq_id, n)
        self._note_hit(text, n)
        del self._kept[text]
        return text.seq_id

    def _note_hit(self, text: CachedPrefix, n: int) -> None:
        self._kept.move_to_end(text)
        text.age = self._age
        text.n_shared += n
        self.n_hits += 1
        self.n_hit_tokens += n

    def _find(self, tokens: Sequence[int]) -> tuple[int, CachedPrefix | None]:
        n, text = longest_prefix(self._kept, tokens, self._memory.usable)
        return (n, text) if n >= MIN_SHARED else (0, None)

    # -- keeping and evicting ----------------------------------------------------------------------

    @uninterrupted
    def put(
        self,
        seq_id: int,
        tokens: Sequence[int],
        session: Session | None = None,
        *,
        is_last: bool = False,
    ) -> bool:
        """Cache the K/V of a sequence, which holds exactly ``tokens``, so that it outlives the sequence.

        Args:
            seq_id: a sequence that is held.
            tokens: the tokens that it holds.
            session: the session that it belongs to, if any.
            is_last: no one else will use the sequence again, so the cached text may take it over.

        Returns:
            True if the cached text has taken over the sequence, which must then not be freed.
        """
        if len(tokens) < MIN_SHARED:
            return False
        text = CachedPrefix(list(tokens), session=session, age=self._age)
        n, known = self._find(tokens)
        # A text of another session is kept too, because the two are evicted at different times.
        if known is not None and known.session in (None, session):
            if n == len(tokens):
                self._kept.move_to_end(known)
                known.session = session
                return False
            if n == len(known.tokens) and self._memory.usable(seq_id, n) == n:
                text.n_shared = known.n_shared
                self._drop(known)  # the new text continues the known one
        transfers = is_last and not self._memory.spare_seq_ids  # so no second sequence is needed
        allocated = seq_id if transfers else self._allocate(text)
        while allocated is None:
            if not self.evict_text():
                return False
            allocated = self._allocate(text)
        text.seq_id = allocated
        self._memory.keep(allocated)
        if transfers:
            self._sequences.transfer(seq_id, text)
        else:
            self._memory.fork(seq_id, allocated)
        self._kept[text] = None
        return transfers

    def _allocate(self, text: CachedPrefix) -> int | None:
        """Return an empty sequence for a text; None if all are taken."""
        if not self._memory.spare_seq_ids:
            return self._sequences.allocate_if_free(text)
        return heapq.heappop(self._spare_seq_ids) if self._spare_seq_ids else None

    @uninterrupted
    def evict(self, n_cells: int) -> int:
        """Free at least ``n_cells`` cells that only cached texts use, or all if there are fewer.

        Returns:
            The number of freed cells.

        Some may be quarantined afterwards, until the cache is compacted.
        """
        freed, is_over = 0, False
        while freed < n_cells and not is_over:
            is_over, texts = True, self._in_order(by_worth=True)
            for text in texts:
                if freed >= n_cells:
                    break
                n = self._shorten(text, n_cells - freed)
                if n or self._is_in(text, texts):  # another text may now be a cell's only user
                    freed, is_over = freed + n, False
        self.n_evicted += freed
        return freed

    def _is_in(self, text: CachedPrefix, texts: Iterable[CachedPrefix]) -> bool:
        """Drop a text that is the beginning of another one; return whether it was dropped.

        Two sessions may hold the same cells. Then neither has cells that only it uses.
        """
        others = (other for other in texts if other is not text and other in self._kept)
        is_in = text in self._kept and longest_prefix(others, text.tokens)[0] == len(text.tokens)
        if is_in:
            self._drop(text)
        return is_in

    def _shorten(self, text: CachedPrefix, n_cells: int) -> int:
        """Free up to ``n_cells`` cells at the end of a text that only it uses; return how many."""
        first, n_alone = self._memory.cells.exclusive(text.seq_id, 0, END)
        if first is None:
            return 0
        n_tokens = len(text.tokens)
        keep = self._memory.usable(text.seq_id, max(first, n_tokens - n_cells))
        # What would be left may be the beginning of another text.
        others = (other for other in self._kept if other is not text)
        is_kept = keep >= MIN_SHARED and longest_prefix(others, text.tokens[:keep])[0] < keep
        self._note_evicted(text, keep)
        if is_kept and self._memory.cut(text.seq_id, keep) == keep:
            del text.tokens[keep:]
        else:
            self._drop(text)
        return min(n_alone, n_tokens - keep)

    def _note_evicted(self, text: CachedPrefix, n_left: int) -> None:
        if text.session is None:
            self._age = max(self._age, text.worth)
        self.note_evicted(text, n_left)
        if self._store is not None:
            self._store.save(text.seq_id, text.tokens)

    def _in_order(self, *, by_worth: bool) -> list[CachedPrefix]:
        """Return the texts that may be evicted, in that order.

        ``by_worth``: texts without a session come later if other texts have shared them.
        """
        longest: dict[Session | None, CachedPrefix] = {}
        for text in self._kept:
            if text.session not in longest or len(text.tokens) > len(longest[text.session].tokens):
                longest[text.session] = text
        n_running = sum(len(session.running) for session in self.sessions.running())
        protected = self._reserved() if n_running > 1 else self._protected()

        def rank(text: CachedPrefix) -> tuple[int, float]:
            session = text.session
            if session is None:
                return 1, text.worth if by_worth else 0
            return 0 if session.has_ended else 3 if longest[session] is text else 2, 0

        return sorted((text for text in self._kept if text.seq_id not in protected), key=rank)

    def _protected(self) -> set[int]:
        """Return the sequences that hold the longest text of each session above a running one."""
        running = self.sessions.running() + ([] if self.asker is None else [self.asker])
        kept = (*self._above(running), self._shared)
        return {text.seq_id for text in kept if text is not None}

    def _reserved(self) -> set[int]:
        """Return the protected sequences, and those protected for sessions with a waiting request."""
        return self._protected() | {text.seq_id for text in self._above(self.sessions.asked())}

    def _above(self, sessions: Iterable[Session]) -> list[CachedPrefix]:
        """Return the longest text of each session above one of these."""
        above = {each for below in sessions for each in below.ancestors() if each is not below}
        kept = ([text for text in self._kept if text.session is session] for session in above)
        return [max(texts, key=lambda text: len(text.tokens)) for texts in kept if texts]

    def n_kept_above(self, session: Session, tokens: Sequence[int]) -> int:
        """Return how many cells a text cannot have because sessions above its own hold them.

        Cells that it shares with them are not counted.
        """
        with self._memory.handle.lock:
            texts = self._above([session])
            used, _ = self._memory.cells.count({text.seq_id for text in texts})
            return used - max((n_common(text.tokens, tokens) for text in texts), default=0)

    @uninterrupted
    def evict_text(self) -> bool:
        """Drop the first text in the order of eviction; return False if none is left."""
        for text in self._in_order(by_worth=False):
            _, n_alone = self._memory.cells.exclusive(text.seq_id, 0, END)
            self.n_evicted += n_alone
            self._note_evicted(text, 0)
            self._drop(text)
            return True
        return False

    @uninterrupted
    def clear(self) -> None:
        """Drop everything."""
        for text in self.texts():
            self._drop(text)

    def close(self) -> None:
        """Write the cached texts to the store, if there is one, before the context closes."""
        if self._store is not None:
            self._store.close([(text.seq_id, text.tokens) for text in self._kept])

    def _drop(self, text: CachedPrefix) -> None:
        del self._kept[text]
        self._memory.drop(text.seq_id, 0)
        self._memory.prefix_seq_ids.discard(text.seq_id)
        if self._memory.spare_seq_ids:
            heapq.heappush(self._spare_seq_ids, text.seq_id)
        else:
            self._sequences.free(text.seq_id)
