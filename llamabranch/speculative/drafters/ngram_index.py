"""Where an n-gram occurred before: the indexes behind the drafters that copy.

Plain Python over token ids; nothing here uses a model, a branch or a drafter.

A suffix tree answers "which tokens followed this suffix, and how often". Here lists of places give the
same answers: for a few lengths n, each n-gram maps to the positions of the tokens that *followed* it, and
walking down the tree is stepping through those places side by side. This makes rewinding, forking and
forgetting cheap: the entries of removed tokens are found from the tokens themselves, a fork freezes the
entries that both sides share, and the entries of a forgotten sequence are removed with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...native import forkable_lock

__all__ = ["Guess", "Match", "Place", "Segment", "SharedIndex", "TokenIndex", "doubling"]

Gram = tuple[int, ...]


class Place(NamedTuple):
    """A sequence of tokens, and the position in it of the token that followed the match."""

    sequence: Sequence[int]
    position: int


@dataclass(frozen=True, slots=True)
class Match:
    """The last ``length`` tokens occurred before; ``places``, newest first, are what followed them."""

    length: int
    places: list[Place]

    def follow(self, tokens: Sequence[int], most: int, floor: float) -> Guess:
        """Return the most frequent continuation of ``tokens``, at most ``most`` tokens of it.

        Step j takes the token that most of the remaining places continue with (the newest place
        decides a tie) and keeps those places. If c of n places do, its estimated probability is
        c / (n + 1/(length + j)): the longer the match, the less is reserved for tokens never seen
        there. It ends where the product, the probability that all tokens so far are accepted, falls
        below ``floor``.

        A place in ``tokens`` itself that reaches their end continues into the guess, as LZ77 copies
        do: a loop of three tokens is continued up to ``most`` tokens.

        O(places x tokens returned); SuffixDecoding (Oliaro et al. 2024, 2411.04975) walks a suffix
        tree by the same rule, without the prior.
        """
        guess = Guess([], [])
        end = len(tokens)
        reach = 1.0
        places = self.places
        for j in range(most):
            following: dict[int, list[Place]] = {}
            n = 0
            for place in places:
                at = place.position + j
                if at < len(place.sequence):
                    token = place.sequence[at]
                elif place.sequence is tokens:
                    token = guess.tokens[at - end]
                else:
                    continue  # this sequence ends here
                n += 1
                following.setdefault(token, []).append(place)
            if not n:
                break
            # In a tie the first, which is the newest, is taken.
            token = max(following, key=lambda t: len(following[t]))
            places = following[token]
            probability = len(places) / (n + 1.0 / (self.length + j))
            reach *= probability
            if reach < floor:
                break
            guess.tokens.append(token)
            guess.probabilities.append(probability)
        return guess


@dataclass(frozen=True, slots=True)
class Guess:
    """A continuation, and the estimated probability of each token given that those before are right."""

    tokens: list[int]
    probabilities: list[float]

    @property
    def expected(self) -> float:
        """The expected number of accepted tokens."""
        total, reach = 0.0, 1.0
        for probability in self.probabilities:
            reach *= probability
            total += reach
        return total


def doubling(shortest: int, longest: int) -> tuple[int, ...]:
    """Return shortest, twice that, ..., longest: the lengths a longest-match search needs."""
    lengths = []
    while shortest < longest:
        lengths.append(shortest)
        shortest *= 2
    return (*lengths, longest)


def _furthest(places: list[Place], tokens: Sequence[int], n: int, limit: int) -> Match:
    """Return the longest match among ``places``, which all follow the last ``n`` of ``tokens``."""
    best, kept = n, places
    limit = min(limit, len(tokens))
    if n < limit:
        kept = []
        for place in places:
            sequence, position = place
            m, most = n, min(limit, position)
            while m < most and sequence[position - 1 - m] == tokens[-1 - m]:
                m += 1
            if m > best:
                best, kept = m, [place]
            elif m == best:
                kept.append(place)
    return Match(best, kept)


# -- one sequence ---------------------------------------------------------------------------------

Postings = dict[Gram, list[int]]  # n-gram -> positions of what followed it, ascending


class _Layer(NamedTuple):
    """Entries for the positions from ``start`` on, of which those before ``end`` are visible.

    Forks share the entries, so they are never written to: a rewind only lowers ``end`` in its own copy.
    """

    postings: Postings
    start: int
    end: int


class TokenIndex:
    """The n-grams of one sequence of tokens, which can be extended, rewound and forked.

    Args:
        lengths: the n to index, each at least 1.

    With L lengths: appending and dropping a token cost O(L) amortised, ``longest(k)`` O(L log n) for
    the search and O(k x longest length) to compare; memory is O(L) a token. ``fork`` copies the tokens
    (8 bytes each) and shares the entries: what was appended since the last fork is frozen, and frozen
    layers are merged so that each is at least twice as large as the next, O(log n) of them.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        self._lengths = tuple(sorted(set(lengths)))
        self._tokens: list[int] = []
        self._frozen: list[_Layer] = []  # oldest first, each ends where the next starts
        self._own: Postings = {}
        self._own_start = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens: not a copy; valid until the next change."""
        return self._tokens

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens``."""
        start = len(self._tokens)
        self._tokens.extend(tokens)
        self._file(self._own, start, len(self._tokens))

    def rewind(self, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` and remove the others with their entries."""
        tokens = self._tokens
        if n_tokens >= self._own_start:
            for position in range(len(tokens) - 1, n_tokens - 1, -1):
                for gram in self._grams(position):
                    positions = self._own[gram]
                    positions.pop()  # positions ascend: the last one is this one
                    if not positions:
                        del self._own[gram]
        else:
            self._own, self._own_start = {}, n_tokens
            while self._frozen and self._frozen[-1].start >= n_tokens:
                self._frozen.pop()
            if self._frozen:
                self._frozen[-1] = self._frozen[-1]._replace(end=n_tokens)
        del tokens[n_tokens:]

    def fork(self) -> TokenIndex:
        """Return an independent copy."""
        self._freeze()
        clone = TokenIndex(self._lengths)
        clone._tokens = self._tokens.copy()
        clone._frozen = self._frozen.copy()
        clone._own_start = self._own_start
        return clone

    def longest(self, most: int) -> Match | None:
        """Return the longest suffix of the tokens that occurred before, None if none did.

        It takes the newest ``most`` places of the longest indexed n-gram that occurred and, where there
        are gaps between the indexed lengths, compares further back, up to the longest length.
        """
        for n in reversed(self._lengths):
            found = self._followers(n, most)
            if found:
                places = [Place(self._tokens, position) for position in found]
                return _furthest(places, self._tokens, n, self._lengths[-1])
        return None

    def _followers(self, n: int, most: int) -> list[int]:
        """Return up to ``most`` positions of what followed the last n tokens, newest first."""
        if n > len(self._tokens):
            return []
        gram = tuple(self._tokens[-n:])
        found = self._own.get(gram, [])[: -most - 1 : -1]
        for postings, _, end in reversed(self._frozen):
            if len(found) == most:
                break
            positions = postings.get(gram)
            if positions:
                stop = len(positions) if positions[-1] < end else bisect_left(positions, end)
                start = max(0, stop - most + len(found))
                found += reversed(positions[start:stop])
        return found

    def _grams(self, position: int) -> Iterable[Gram]:
        """Yield the n-grams that end right before ``position``."""
        tokens = self._tokens
        for n in self._lengths:
            if n > position:
                break
            yield tuple(tokens[position - n : position])

    def _file(self, postings: Postings, start: int, end: int) -> None:
        for position in range(start, end):
            for gram in self._grams(position):
                positions = postings.get(gram)
                if positions is None:
                    postings[gram] = [position]
                else:
                    positions.append(position)

    def _freeze(self) -> None:
        start, end = self._own_start, len(self._tokens)
        if start == end:
            return
        own, frozen = self._own, self._frozen
        merged = start
        while frozen and end - merged > (merged - frozen[-1].start) / 2:
            merged = frozen.pop().start
        if merged < start:  # index these positions anew: forks may share the old layers
            own = {}
            self._file(own, merged, end)
        frozen.append(_Layer(own, merged, end))
        self._own, self._own_start = {}, end


# -- many sequences -------------------------------------------------------------------------------


class Segment:
    """A run of tokens in a shared index; those before ``start`` are context or already forgotten."""

    def __init__(self, context: Iterable[int]) -> None:
        self.tokens = list(context)
        self.start = len(self.tokens)
        self.closed = False


class SharedIndex:
    """The n-grams of the latest output of many sequences; safe to use from many threads.

    Args:
        lengths: the n to index.
        max_tokens: the most tokens it indexes, at least 8 times the longest length; beyond that each
            new token makes it forget the oldest. At most max_tokens x len(lengths) entries.
        most: how many places it keeps for an n-gram, the newest ones.

    Sequences are written concurrently, each into segments of its own. With L lengths, writing a token
    costs O(L), forgetting one O(L x most) at worst; ``longest`` as in :class:`TokenIndex`.
    """

    SEGMENT = 512  # most tokens of a segment, which stays in memory until all of it is forgotten

    def __init__(self, lengths: Iterable[int], max_tokens: int, most: int) -> None:
        self._lengths = tuple(sorted(set(lengths)))
        self._max_tokens = max_tokens
        self._most = most
        self._size = min(self.SEGMENT, max_tokens // 4)
        self._segments: deque[Segment] = deque()  # oldest first
        self._postings: dict[Gram, list[tuple[Segment, int]]] = {}
        self._n_tokens = 0
        self._lock = forkable_lock()

    def write(self, segment: Segment | None, tokens: Sequence[int], start: int) -> Segment | None:
        """Add ``tokens[start:]``, which follow ``tokens[:start]``.

        Args:
            segment: the return value of the previous call for this sequence; None = a new sequence, or
                one that does not continue from there.
        """
        with self._lock:
            for position in range(start, len(tokens)):
                if segment is None or segment.closed or len(segment.tokens) >= self._size:
                    segment = Segment(tokens[max(0, position - self._lengths[-1]) : position])
                    self._segments.append(segment)
                segment.tokens.append(tokens[position])
                self._file(segment, len(segment.tokens) - 1)
                self._n_tokens += 1
                if self._n_tokens > self._max_tokens:
                    self._forget()
            return segment

    def longest(self, tokens: Sequence[int], skip: Segment | None = None) -> Match | None:
        """Return the longest suffix of ``tokens`` that occurred in another sequence, None if none did.

        Args:
            skip: the segment of the sequence itself, which is not searched.
        """
        with self._lock:
            for n in reversed(self._lengths):
                found = self._postings.get(tuple(tokens[-n:])) if n <= len(tokens) else None
                places = [Place(s.tokens, at) for s, at in reversed(found or ()) if s is not skip]
                if places:
                    return _furthest(places, tokens, n, self._lengths[-1])
        return None

    def _grams(self, segment: Segment, position: int) -> Iterable[Gram]:
        for n in self._lengths:
            if n > position:
                break
            yield tuple(segment.tokens[position - n : position])

    def _file(self, segment: Segment, position: int) -> None:
        for gram in self._grams(segment, position):
            places = self._postings.setdefault(gram, [])
            places.append((segment, position))
            if len(places) > self._most:
                del places[0]

    def _forget(self) -> None:
        """Drop the entries of the oldest token."""
        segment = self._segments[0]
        place = segment, segment.start
        for gram in self._grams(segment, segment.start):
            places = self._postings.get(gram, [])
            if place in places:
                places.remove(place)
                if not places:
                    del self._postings[gram]
        segment.start += 1
        self._n_tokens -= 1
        if segment.start == len(segment.tokens):
            segment.closed = True
            self._segments.popleft()
