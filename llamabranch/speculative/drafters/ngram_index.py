"""Where an n-gram occurred before: what the drafters that copy search.

Plain Python over token ids; nothing here uses a model, a branch or a drafter.

A suffix tree answers "which tokens followed this suffix, and how often". Here the places of an n-gram
give the same answers: walking down the tree is stepping through those places side by side. They are found
by searching the tokens' bytes from their end, which takes some 0.1 ms for 32,000 tokens and grows with
the text. So there is no index to keep, and rewinding, forking and forgetting are those of a list.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...native import forkable_lock

__all__ = ["Guess", "Match", "Place", "Segment", "SharedIndex", "TokenIndex", "doubling"]

_WIDTH = array("i").itemsize  # bytes of a token


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


def _longest(
    lengths: Sequence[int],
    tokens: Sequence[int],
    find: Callable[[bytes, int], list[Place]],
    most: int,
) -> Match | None:
    """Return the longest suffix of ``tokens`` for which ``find`` has places, None if there is none.

    That of the longest n-gram that occurred and, where there are gaps between ``lengths``, those places
    that agree furthest back, up to the longest length.
    """
    best, longest = 0, b""
    for n in lengths:
        gram = array("i", tokens[-n:]).tobytes()
        if n > len(tokens) or not find(gram, 1):  # so nothing longer occurred either
            break
        best, longest = n, gram
    kept = find(longest, most) if best else []
    limit = min(lengths[-1], len(tokens)) if lengths else 0
    if best < limit:  # these agree further back than that, perhaps
        places, kept = kept, []
        n = best
        for place in places:
            sequence, position = place
            m, most = n, min(limit, position)
            while m < most and sequence[position - 1 - m] == tokens[-1 - m]:
                m += 1
            if m > best:
                best, kept = m, [place]
            elif m == best:
                kept.append(place)
    return Match(best, kept) if kept else None


class TokenIndex:
    """A sequence of tokens that is searched, and can be extended, rewound and forked.

    Args:
        lengths: the n of the n-grams that are searched for, each at least 1.
        tokens: the first tokens.

    Appending and dropping a token cost O(1), a fork copies 12 bytes a token.
    """

    def __init__(self, lengths: Iterable[int], tokens: Iterable[int] = ()) -> None:
        self._lengths = tuple(sorted(set(lengths)))
        self._tokens: list[int] = []
        self._bytes = bytearray()  # of the tokens
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens: not a copy; valid until the next change."""
        return self._tokens

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens``."""
        added = list(tokens)
        self._tokens += added
        self._bytes += array("i", added).tobytes()

    def tail(self, n: int) -> bytes:
        """Return the last ``n`` tokens, as bytes."""
        return bytes(self._bytes[-n * _WIDTH :])

    def rewind(self, n_tokens: int) -> None:
        """Keep the first ``n_tokens``."""
        del self._tokens[n_tokens:], self._bytes[n_tokens * _WIDTH :]

    def fork(self) -> TokenIndex:
        """Return an independent copy."""
        clone = TokenIndex(self._lengths)
        clone._tokens, clone._bytes = self._tokens.copy(), self._bytes.copy()
        return clone

    def longest(self, most: int) -> Match | None:
        """Return the longest suffix of the tokens that occurred before, None if none did.

        It takes the newest ``most`` places.
        """
        return _longest(self._lengths, self._tokens, self.places, most)

    def places(self, gram: bytes, most: int, first: int = 0) -> list[Place]:
        """Return where a gram, given as bytes, was followed: the newest places, from ``first`` on."""
        found: list[Place] = []
        start, end = max(0, first * _WIDTH - len(gram)), len(self._bytes) - _WIDTH
        while len(found) < most:
            at = self._bytes.rfind(gram, start, end)
            if at < 0:
                break
            if at % _WIDTH == 0:
                found.append(Place(self._tokens, (at + len(gram)) // _WIDTH))
            end = at + len(gram) - 1
        return found


# -- many sequences -------------------------------------------------------------------------------


class Segment:
    """A run of tokens in a shared index; those before ``start`` are context or already forgotten."""

    def __init__(self, context: Iterable[int]) -> None:
        self.text = TokenIndex((), context)
        self.known: set[bytes] = set()  # the shortest n-grams that tokens of it follow
        self.start = len(self.text)
        self.closed = False


class SharedIndex:
    """The latest output of many sequences, which is searched; safe to use from many threads.

    Args:
        lengths: the n of the n-grams that are searched for.
        max_tokens: the most tokens it holds, at least 8 times the longest length; beyond that each new
            token makes it forget the oldest.
        most: how many places of an n-gram it returns, those in the newest segments.

    Sequences are written concurrently, each into segments of its own.
    """

    SEGMENT = 512  # most tokens of a segment, which stays in memory until all of it is forgotten

    def __init__(self, lengths: Iterable[int], max_tokens: int, most: int) -> None:
        self._lengths = tuple(sorted(set(lengths)))
        self._max_tokens = max_tokens
        self._most = most
        self._size = min(self.SEGMENT, max_tokens // 4)
        self._segments: deque[Segment] = deque()  # oldest first
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
                if segment is None or segment.closed or len(segment.text) >= self._size:
                    segment = Segment(tokens[max(0, position - self._lengths[-1]) : position])
                    self._segments.append(segment)
                segment.known.add(segment.text.tail(self._lengths[0]))
                segment.text.extend((tokens[position],))
                self._n_tokens += 1
                if self._n_tokens > self._max_tokens:
                    self._forget()
            return segment

    def longest(self, tokens: Sequence[int], skip: Segment | None = None) -> Match | None:
        """Return the longest suffix of ``tokens`` that occurred in another sequence, None if none did.

        Args:
            skip: the segment of the sequence itself, which is not searched.
        """

        def find(gram: bytes, most: int) -> list[Place]:
            found: list[Place] = []
            shortest = gram[-self._lengths[0] * _WIDTH :]
            for segment in reversed(self._segments):
                if shortest in segment.known and segment is not skip and len(found) < most:
                    found += segment.text.places(gram, most - len(found), segment.start)
            return found

        with self._lock:
            return _longest(self._lengths, tokens, find, self._most)

    def _forget(self) -> None:
        """Forget the oldest token."""
        segment = self._segments[0]
        segment.start += 1
        self._n_tokens -= 1
        if segment.start == len(segment.text):
            segment.closed = True
            self._segments.popleft()
