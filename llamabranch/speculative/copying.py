"""Drafters that copy tokens which followed the same tokens earlier.

Their draft distributions are point masses, so a drafted token is accepted with the probability that
the target gives it. A point mass has no entropy, but a draft-length controller needs a measure of
uncertainty. So these drafters estimate the *probability* p that the token is right, from the tokens
that followed the same tokens earlier (``Match.follow``). ``Draft.entropies`` holds the surprisal
-ln(p) in nats. It is 0 for a certain token and grows with uncertainty, as an entropy does. It is
known before the token is proposed and depends only on earlier tokens, so a draft may stop on it and
stay lossless.

A suffix tree answers "which tokens followed this suffix, and how often". This module has no tree.
It searches for the places where an n-gram occurred, and steps through all of them side by side,
which gives the same answers as walking down the tree. The search goes through the tokens' bytes
from their end. It takes some 0.1 ms for 32,000 tokens and grows with the text. So no index has to
be kept, and rewinding, forking and forgetting are operations on a list.
"""

from __future__ import annotations

import math
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from ..arguments import whole
from ..generation.drafter import Draft, Drafter, DraftLength, DraftState, StopRule
from ..generation.text import Text
from ..model import Model
from ..native import forkable_lock

__all__ = [
    "Match",
    "Occurrence",
    "PromptLookupDrafter",
    "SharedIndex",
    "SuffixDrafter",
    "TokenIndex",
    "doubling",
]

_WIDTH = array("i").itemsize  # bytes of a token
_MOST_MATCH = 16  # the longest suffix that a `SuffixDrafter` compares, in tokens


# -- where tokens occurred before ------------------------------------------------------------------


class Occurrence(NamedTuple):
    """A sequence of tokens, and the position in it of the token that follows the match."""

    sequence: Sequence[int]
    position: int


@dataclass(frozen=True, slots=True)
class Match:
    """Earlier occurrences of the last ``length`` tokens of a text: ``places``, newest first."""

    length: int
    places: list[Occurrence]

    def follow(self, tokens: Sequence[int], most: int, floor: float) -> Guess:
        """Return the most frequent continuation of ``tokens``, at most ``most`` tokens.

        Step j takes the most frequent next token of the remaining places, and keeps the places that
        have it. In a tie the newest place decides. If c of n places have that token, its estimated
        probability is c / (n + 1/(length + j)). So the longer the match, the smaller the part that
        is reserved for tokens never seen there. The product of the estimates is the probability
        that all tokens so far are accepted. The guess ends when the product falls below ``floor``.

        If a place is in ``tokens`` itself, it may reach their end; then it continues into the
        guess, as LZ77 copies do. For example, a loop of three tokens is repeated up to ``most``
        tokens.

        The cost is O(places x tokens returned). SuffixDecoding (Oliaro et al. 2024, arXiv
        2411.04975) walks a suffix tree by the same rule, but reserves nothing for tokens never
        seen.
        """
        guess = Guess([], [])
        end = len(tokens)
        reach = 1.0
        places = self.places
        for j in range(most):
            following: dict[int, list[Occurrence]] = {}
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
            # In a tie, max takes the first token, the one from the newest place.
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
    """A continuation, and the probability of each token if all tokens before it are right."""

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
    """Return the n-gram lengths to search for: shortest, twice that, and so on up to longest."""
    lengths = []
    while shortest < longest:
        lengths.append(shortest)
        shortest *= 2
    return (*lengths, longest)


def _longest(
    lengths: Sequence[int],
    tokens: Sequence[int],
    find: Callable[[bytes, int], list[Occurrence]],
    most: int,
) -> Match | None:
    """Return the longest suffix of ``tokens`` for which ``find`` has places, if any.

    The n-grams of ``lengths`` are searched for, shortest first. If there are gaps between the
    lengths, the match may be longer than the longest n-gram that was found. So its places are
    compared further back, up to the longest length, and those that agree furthest are kept.
    """
    best, longest = 0, b""
    for n in lengths:
        gram = array("i", tokens[-n:]).tobytes()
        if n > len(tokens) or not find(gram, 1):  # so nothing longer occurred either
            break
        best, longest = n, gram
    kept = find(longest, most) if best else []
    limit = min(lengths[-1], len(tokens)) if lengths else 0
    if best < limit:  # some places may agree further back
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

    Appending or dropping a token costs O(1). A fork copies 12 bytes per token.
    """

    def __init__(self, lengths: Iterable[int], tokens: Iterable[int] = ()) -> None:
        self._lengths = tuple(sorted(set(lengths)))
        self._tokens: list[int] = []
        self._bytes = bytearray()  # the same tokens, as bytes
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Sequence[int]:
        """The list of tokens itself, not a copy; valid until the next change."""
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
        """Return the longest suffix of the tokens that occurred before, or None.

        It uses the newest ``most`` occurrences.
        """
        return _longest(self._lengths, self._tokens, self.places, most)

    def places(self, gram: bytes, most: int, first: int = 0) -> list[Occurrence]:
        """Return the newest places, from ``first`` on, where a token follows ``gram`` (bytes)."""
        found: list[Occurrence] = []
        start, end = max(0, first * _WIDTH - len(gram)), len(self._bytes) - _WIDTH
        while len(found) < most:
            at = self._bytes.rfind(gram, start, end)
            if at < 0:
                break
            if at % _WIDTH == 0:
                found.append(Occurrence(self._tokens, (at + len(gram)) // _WIDTH))
            end = at + len(gram) - 1
        return found


# -- many sequences -------------------------------------------------------------------------------


class Segment:
    """A run of tokens in a shared index.

    The tokens before ``start`` do not count: they were forgotten, or come from the segment before
    and are only compared with a suffix.
    """

    def __init__(self, context: Iterable[int]) -> None:
        self.text = TokenIndex((), context)
        self.known: set[bytes] = set()  # n-grams of the shortest length that a token here follows
        self.start = len(self.text)
        self.closed = False


class SharedIndex:
    """A searchable index of the latest output of many sequences; many threads may use it.

    Args:
        lengths: the n of the n-grams that are searched for.
        max_tokens: the most tokens the index holds, at least 8 times the longest length. If it is
            full, each new token replaces the oldest.
        most: the most places of an n-gram that it returns. The newest segments are searched first.

    Several sequences may be written at the same time. Each has segments of its own.
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
            segment: the return value of the previous call for this sequence; None = the sequence is
                new, or does not continue where that call ended.
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
        """Return the longest suffix of ``tokens`` that occurred in another sequence, or None.

        Args:
            skip: the segment of the sequence itself, which is not searched.
        """

        def find(gram: bytes, most: int) -> list[Occurrence]:
            found: list[Occurrence] = []
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


# -- the drafters ---------------------------------------------------------------------------------


class _CopyDrafter(Drafter):
    """Copies token ids of the target's own text, and estimates how probable they are.

    Attributes:
        lengths: the lengths of the n-grams that are searched for.
        most: how many occurrences are counted.
        floor: a draft ends when the probability that all of it is accepted falls below this.
        factor, offset: after a match of m tokens a draft has at most floor(m * factor + offset) tokens.
    """

    lengths: Sequence[int]
    most, floor, factor, offset = 1, 0.0, 0.0, math.inf

    @property
    def estimates(self) -> frozenset[str]:
        """The drafter's name, because the entropies of its drafts are estimated surprisals."""
        return frozenset({self.name})

    def check(self, target: Model) -> None:
        """Accept any target, because it copies token ids of the target's own text."""

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state."""
        return _CopyState(self, TokenIndex(self.lengths), target.position, target)

    def pool(self, model: Model) -> SharedIndex | None:
        """Return the index that texts of ``model`` share; None = there is no such index."""
        return None


class PromptLookupDrafter(_CopyDrafter):
    """Copies the tokens that followed the last few tokens at their latest occurrence in prompt or output.

    Known as prompt lookup decoding (Saxena 2023) and n-gram speculation. It looks for the longest
    suffix of ``min_ngram`` to ``max_ngram`` tokens that occurred before, and for its latest occurrence.

    Args:
        max_ngram: the longest suffix to look for, 1 to 64 tokens.
        min_ngram: the shortest suffix to look for, at least 1.

    Raises:
        ConfigError: a value out of range.
    """

    name = "lookup"  # in statistics

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        self.max_ngram = whole("max_ngram", max_ngram, 1, 64)
        self.min_ngram = whole("min_ngram", min_ngram, 1, self.max_ngram)
        self.lengths = range(self.min_ngram, self.max_ngram + 1)


class SuffixDrafter(_CopyDrafter):
    """Follows the most frequent continuation of the longest suffix seen before.

    Known as SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). One index holds the request's
    prompt and output; a shared index holds the output of all requests of this drafter. Each index
    is searched for its longest match, and each match gives a continuation. The one with more tokens
    expected to be accepted is drafted; in a tie, the one from the request's own index. The longer
    the match, the more tokens are drafted. Three things differ from the paper. The estimated
    probability reserves a part for continuations never seen (``Match.follow``). The shared index is
    filled while texts are being generated, so branches benefit from their siblings. Only the newest
    occurrences are counted.

    Args:
        min_match: the shortest suffix that counts as evidence, from 1 to 16 tokens.
        shared_tokens: the most tokens that the shared index holds; beyond it the oldest are forgotten.
            Each target model has a shared index of its own, because token ids differ between
            models. 0 = share nothing, otherwise at least 128.

    After a match of m tokens a draft has at most m tokens, and it ends when the probability that
    all of it is accepted falls below 0.2. If copying costs almost nothing compared to a step of the
    target, the draft length "auto" ignores these limits and decides by the expected gain.

    Raises:
        ConfigError: a value out of range.
    """

    name = "suffix"  # in statistics
    most, floor, factor, offset = 32, 0.2, 1.0, 0.0

    def __init__(self, *, min_match: int = 2, shared_tokens: int = 16384) -> None:
        self.lengths = doubling(whole("min_match", min_match, 1, _MOST_MATCH), _MOST_MATCH)
        self.shared_tokens = whole("shared_tokens", shared_tokens, 0)
        if self.shared_tokens:
            whole("shared_tokens", shared_tokens, 8 * _MOST_MATCH, 1 << 24)
        self._shared: weakref.WeakKeyDictionary[Model, SharedIndex] = weakref.WeakKeyDictionary()

    def pool(self, model: Model) -> SharedIndex | None:
        """Return the index of the output that ``model`` generated; None if nothing is shared."""
        if not self.shared_tokens:
            return None
        fresh = SharedIndex(self.lengths, self.shared_tokens, self.most)
        return self._shared.setdefault(model, fresh)


class _CopyState:
    """One request's index, and the segment of the shared index that it writes.

    Args:
        n_written: how many of the text's first tokens are never written to the shared index again:
            the tokens that were there when the state was made, and the tokens written since.
        target: the text that is drafted for. Text that it reads, such as its prompt, is not written
            to the shared index either.
    """

    def __init__(
        self, drafter: _CopyDrafter, index: TokenIndex, n_written: int, target: Text
    ) -> None:
        self._drafter = drafter
        self._index = index
        self._shared = drafter.pool(target.ctx.model)
        self._n_written = n_written
        self._target = weakref.ref(target)  # a state must not keep it from being freed
        self._is_eog = target.ctx.model.is_eog
        self._segment: Segment | None = None

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        draft = Draft(drafter=self._drafter.name, stopped="no evidence")
        start = perf_counter()
        self._index_new(tokens)
        match, guess = self._guess(limit)
        if match is not None and length.consider(draft.drafter):
            rule = length.stop_rule(length.n_before) if length.reads_entropy else None
            if rule is not None and rule.weighs:
                self._weigh(draft, match.follow(self._index.tokens, limit, 0.0), rule, limit)
            else:
                self._fill(draft, guess, length, limit)
        draft.seconds = perf_counter() - start
        return draft

    def _weigh(self, draft: Draft, guess: Guess, rule: StopRule, limit: int) -> None:
        """Draft the beginning of the guess with the largest expected gain; no other limit holds."""
        ends = [i for i, token in enumerate(guess.tokens, 1) if self._is_eog(token)]
        tokens = guess.tokens[: min(ends, default=limit)]
        surprisals = [-math.log(p) for p in guess.probabilities[: len(tokens)]]
        n = rule.longest(surprisals)
        draft.tokens = tokens[:n]
        draft.entropies = surprisals[: n + 1]
        draft.following = tokens[n] if n < len(tokens) else None
        if n < len(tokens):
            draft.stopped = "goodput"
        elif ends:
            draft.stopped = "end"
        elif n == limit:
            draft.stopped = "length"

    def _fill(self, draft: Draft, guess: Guess, length: DraftLength, limit: int) -> None:
        draft.stopped = "length"
        for token, probability in zip(guess.tokens, guess.probabilities, strict=True):
            surprisal = -math.log(probability)
            draft.entropies.append(surprisal)
            if not length.goes_on(len(draft.tokens), surprisal):
                draft.stopped = length.reason
                return
            draft.tokens.append(token)
            if self._is_eog(token):
                draft.stopped = "end"  # a text ends with its EOG token, a prompt may not
                return
        if len(draft.tokens) < limit:
            draft.stopped = "no evidence"  # no occurrence has further tokens

    def _index_new(self, tokens: Sequence[int]) -> None:
        self._index.extend(tokens[len(self._index) :])
        target = self._target()
        start = 0 if target is None else target.answer_start
        if start > self._n_written:
            self._n_written, self._segment = start, None
        if self._shared is not None and len(tokens) > self._n_written:
            self._segment = self._shared.write(self._segment, tokens, self._n_written)
            self._n_written = len(tokens)

    def _guess(self, limit: int) -> tuple[Match | None, Guess]:
        index, drafter = self._index, self._drafter
        matches = [index.longest(drafter.most)]
        if self._shared is not None:
            matches.append(self._shared.longest(index.tokens, skip=self._segment))
        best, best_match = Guess([], []), None
        for match in matches:
            if match is not None:
                most = math.floor(min(limit, match.length * drafter.factor + drafter.offset))
                guess = match.follow(index.tokens, most, drafter.floor)
                if guess.expected > best.expected:
                    best, best_match = guess, match
        return best_match, best

    def observe(self, n_tokens: int) -> None:
        if n_tokens < len(self._index):
            self._index.rewind(n_tokens)
        if n_tokens < self._n_written:
            # Tokens that a rewind removed stay in the shared index. The new tokens go to a new
            # segment.
            self._n_written, self._segment = n_tokens, None

    def fork(self, target: Text) -> DraftState:
        return _CopyState(self._drafter, self._index.fork(), self._n_written, target)

    def close(self) -> None:
        self._index = TokenIndex(())
        self._shared = self._segment = None
