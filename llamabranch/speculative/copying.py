"""The drafter that copies tokens which followed the same tokens earlier.

Its draft distributions are point masses, so a drafted token is accepted with the probability that the
target gives it. The entropy of a point mass is zero, but a draft-length controller needs a measure of
uncertainty. So this drafter estimates the *probability* p that the token is right, from what followed
the same tokens earlier (``Match.follow``). ``Draft.entropies`` holds the surprisal -ln(p) in nats. It
is 0 for a certain token and grows with uncertainty, as an entropy does. It is known before the token is
proposed and depends only on earlier tokens, so a draft may stop on it and stay lossless.

A suffix tree answers "which tokens followed this suffix, and how often". This module has no tree.
It searches for the places where an n-gram occurred, and steps through all of them side by side,
which gives the same answers as walking down the tree. The search goes backwards through the tokens'
bytes. It takes about 0.1 ms for 32,000 tokens, and longer for longer texts. So it needs no index: a
text is kept as bytes, which can be appended to, cut and copied.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from ..arguments import whole
from ..generation.drafter import Draft, Drafter, DraftLength, DraftState
from ..generation.text import Text
from ..model import Model

_WIDTH = array("i").itemsize  # bytes of a token
_MOST_MATCH = 16  # the longest suffix that a `SuffixDrafter` compares, in tokens


# -- where tokens occurred before ------------------------------------------------------------------


class Match(NamedTuple):
    """Earlier occurrences of the last ``length`` tokens of a text.

    ``places`` has the position of the token after each of them, the newest first.
    """

    length: int
    places: list[int]

    def follow(self, tokens: Sequence[int], most: int, floor: float) -> list[tuple[int, float]]:
        """Return the most frequent continuation of ``tokens``, at most ``most`` tokens.

        Each comes with its probability, given that all tokens before it are right.

        Step j takes the most frequent next token of the remaining places, and keeps the places that
        have it. In a tie the newest place decides. If c of n places have that token, its estimated
        probability is c / (n + 1/(length + j)). So the longer the match, the less is reserved for
        tokens never seen there. The product of the estimates is the probability that all tokens so far
        are accepted. The guess ends when the product falls below ``floor``.

        A place that reaches the end of ``tokens`` continues into the guess, as LZ77 copies do. For
        example, a loop of three tokens is repeated up to ``most`` tokens.

        The cost is O(places x tokens returned). SuffixDecoding (Oliaro et al. 2024, arXiv
        2411.04975) walks a suffix tree by the same rule, but reserves nothing for tokens never
        seen.
        """
        guess: list[tuple[int, float]] = []
        end = len(tokens)
        reach = 1.0
        places = self.places
        for j in range(most):
            following: dict[int, list[int]] = {}
            for place in places:
                at = place + j
                token = tokens[at] if at < end else guess[at - end][0]
                following.setdefault(token, []).append(place)
            # In a tie, max takes the first token, which is from the newest place.
            token = max(following, key=lambda t: len(following[t]))
            n, places = len(places), following[token]
            probability = len(places) / (n + 1.0 / (self.length + j))
            reach *= probability
            if reach < floor:
                break
            guess.append((token, probability))
        return guess


def doubling(shortest: int, longest: int) -> tuple[int, ...]:
    """Return the n-gram lengths to search for: shortest, twice that, and so on up to longest."""
    lengths = []
    while shortest < longest:
        lengths.append(shortest)
        shortest *= 2
    return (*lengths, longest)


def packed(tokens: Sequence[int]) -> bytes:
    """Return tokens as bytes, for searching."""
    return array("i", tokens).tobytes()


def longest_match(
    tokens: Sequence[int], data: bytes | bytearray, lengths: Sequence[int], most: int
) -> Match | None:
    """Return the longest suffix of the tokens that occurred before, or None.

    It uses the newest ``most`` occurrences. It searches for n-grams, shortest first. If there are gaps
    between their lengths, the match may be longer than the longest n-gram found. So its places are
    compared further back, up to the longest length, and the ones that agree furthest are kept.

    Args:
        tokens, data: the text, and the same text from `packed`.
        lengths: the n of the n-grams that are searched for, each at least 1, ascending.
    """
    best, longest = 0, b""
    for n in lengths:
        gram = packed(tokens[-n:])
        if n > len(tokens) or not _places(data, gram, 1):  # then nothing longer occurred either
            break
        best, longest = n, gram
    kept = _places(data, longest, most) if best else []
    limit = min(lengths[-1], len(tokens))
    if best < limit:  # some places may agree further back
        places, kept = kept, []
        n = best
        for place in places:
            m, furthest = n, min(limit, place)
            while m < furthest and tokens[place - 1 - m] == tokens[-1 - m]:
                m += 1
            if m > best:
                best, kept = m, [place]
            elif m == best:
                kept.append(place)
    return Match(best, kept) if kept else None


def _places(data: bytes | bytearray, gram: bytes, most: int) -> list[int]:
    """Return the newest places where a token follows ``gram``."""
    found: list[int] = []
    end = len(data) - _WIDTH
    while len(found) < most:
        at = data.rfind(gram, 0, end)
        if at < 0:
            break
        if at % _WIDTH == 0:
            found.append((at + len(gram)) // _WIDTH)
        end = at + len(gram) - 1
    return found


# -- the drafter ---------------------------------------------------------------------------------


class SuffixDrafter(Drafter):
    """Follows the most frequent continuation of the longest suffix seen before in the same text.

    This is SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). It searches the prompt and the output
    for the longest match of the last tokens, and drafts the tokens after it: the longer the match, the
    more tokens. There are two differences from the paper. The estimated probability reserves a part for
    continuations that were never seen (``Match.follow``), and only the newest occurrences are counted.

    Args:
        min_match: the shortest suffix that counts as evidence, from 1 to 16 tokens.

    After a match of m tokens, a draft has at most m tokens. It ends when the probability that all of it
    is accepted falls below 0.2.

    Attributes:
        lengths: the lengths of the n-grams that are searched for.
        most: how many occurrences are counted.
        floor: a draft ends when the probability that all of it is accepted falls below this.
        factor, offset: after a match of m tokens a draft has at most floor(m * factor + offset) tokens.

    Raises:
        ConfigError: a value out of range.
    """

    name = "suffix"  # in statistics
    most, floor, factor, offset = 32, 0.2, 1.0, 0.0

    def __init__(self, *, min_match: int = 2) -> None:
        self.lengths: Sequence[int] = doubling(
            whole("min_match", min_match, 1, _MOST_MATCH), _MOST_MATCH
        )

    def check(self, target: Model) -> None:
        """Accept any target, because it copies token ids of the target's own text."""

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state."""
        return _CopyState(self, bytearray(), target.ctx.model)


class _CopyState:
    """The text of one request, as bytes."""

    def __init__(self, drafter: SuffixDrafter, data: bytearray, model: Model) -> None:
        self._drafter = drafter
        self._data = data
        self._is_eog = model.is_eog

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        drafter, data = self._drafter, self._data
        draft = Draft(drafter=drafter.name, stopped="no evidence")
        start = perf_counter()
        data += packed(tokens[len(data) // _WIDTH :])
        match = longest_match(tokens, data, drafter.lengths, drafter.most)
        if match is not None:
            most = math.floor(min(limit, match.length * drafter.factor + drafter.offset))
            guess = match.follow(tokens, most, drafter.floor)
            if guess and length.consider(draft.drafter):
                self._fill(draft, guess, length, limit)
        draft.seconds = perf_counter() - start
        return draft

    def _fill(
        self, draft: Draft, guess: Sequence[tuple[int, float]], length: DraftLength, limit: int
    ) -> None:
        draft.stopped = "length"
        for token, probability in guess:
            surprisal = -math.log(probability)
            draft.entropies.append(surprisal)
            if not length.goes_on(len(draft.tokens), surprisal):
                draft.stopped = length.reason
                return
            draft.tokens.append(token)
            if self._is_eog(token):
                draft.stopped = "end"  # a text ends at its EOG token, but a prompt may not
                return
        if len(draft.tokens) < limit:
            draft.stopped = "no evidence"  # the match allows no more

    def observe(self, n_tokens: int) -> None:
        del self._data[n_tokens * _WIDTH :]

    def fork(self, target: Text) -> DraftState:
        return _CopyState(self._drafter, self._data.copy(), target.ctx.model)

    def close(self) -> None:
        self._data.clear()
