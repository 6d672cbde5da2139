"""Drafters that copy what was said before, and a chain that asks one drafter after another.

They propose point masses: a token stands with the target's own probability of it, and there is no
distribution of the draft to speak of. In its place stands an *estimated probability* that the token is
right, counted from what followed the same words earlier (``Match.follow``). ``Draft.entropies`` carry
its surprisal, -ln of it, in nats: 0 for certain, growing with doubt as an entropy does, which is all
that a draft-length controller asks of it. It is known before the token is proposed and is a function
of the past alone, so stopping on it is lossless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from weakref import WeakKeyDictionary

from ...arguments import real, whole
from ...branch import Branch
from ...errors import ConfigError
from ...model import Model
from ..length.base import DraftLength
from .base import Draft, Drafter, DraftState
from .ngram_index import Guess, Segment, SharedIndex, TokenIndex, doubling

__all__ = ["PromptLookupDrafter", "SuffixDrafter"]


class PromptLookupDrafter(Drafter):
    """Copies what followed the last few tokens when they were last seen, in prompt or output.

    Known as prompt lookup decoding (Saxena 2023) and n-gram speculation. The longest suffix of
    ``min_ngram`` to ``max_ngram`` tokens counts, and its most recent occurrence.

    Args:
        max_ngram: the longest suffix to look for, 1 to 64 tokens.
        min_ngram: the shortest one worth copying after.

    Raises:
        ConfigError: a value out of range.
    """

    name = "lookup"  # what statistics call it

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        self.max_ngram = whole("max_ngram", max_ngram, 1, 64)
        self.min_ngram = whole("min_ngram", min_ngram, 1, self.max_ngram)
        self._policy = _Policy(self.name, most=1, floor=0.0, factor=0.0, offset=math.inf)

    def check(self, target: Model) -> None:
        """Accept any target: it speaks the tokens it is told."""

    def start(self, target: Branch, rule: str) -> DraftState:
        """Return a new state."""
        index = TokenIndex(range(self.min_ngram, self.max_ngram + 1))
        return _CopyState(self._policy, index, None, target.position, target.ctx.model.is_eog)


class SuffixDrafter(Drafter):
    """Follows the most frequent continuation of the longest suffix seen before.

    Known as SuffixDecoding (Oliaro et al. 2024, 2411.04975): one index over the request's prompt and
    output, one over what all requests of this drafter said; the longer the match, the more is
    proposed. Each index is searched for its longest match, and the continuation of which more tokens
    are expected to stand is taken, the request's own if they are equal. Unlike in the paper, the
    estimated probability keeps a part for the unseen (``Match.follow``), the shared index is fed
    while states run, so that branches learn from their siblings, and only the newest occurrences vote.

    Args:
        max_match: the longest suffix compared, up to 64 tokens.
        min_match: the shortest suffix that counts as evidence.
        factor, offset: a match of m tokens may propose floor(m * factor + offset).
        min_probability: ends a proposal where the chance that all of it stands falls below this.
        max_occurrences: how many occurrences of a suffix have a vote, the newest.
        shared_tokens: the most tokens the shared index holds (for each target model, since token ids
            mean nothing to another); the oldest are forgotten. 0 = share nothing, otherwise at least
            8 * max_match.

    Raises:
        ConfigError: a value out of range.
    """

    name = "suffix"  # what statistics call it

    def __init__(
        self,
        max_match: int = 16,
        min_match: int = 2,
        *,
        factor: float = 1.0,
        offset: float = 0.0,
        min_probability: float = 0.2,
        max_occurrences: int = 32,
        shared_tokens: int = 16384,
    ) -> None:
        max_match = whole("max_match", max_match, 1, 64)
        min_match = whole("min_match", min_match, 1, max_match)
        min_probability = real("min_probability", min_probability)
        factor, offset = real("factor", factor), real("offset", offset)
        if not 0 <= min_probability <= 1:
            raise ConfigError(f"min_probability must be from 0 to 1, not {min_probability!r}")
        if not (math.isfinite(factor) and factor >= 0 and math.isfinite(offset)):
            raise ConfigError(
                f"factor {factor!r} and offset {offset!r} must be numbers, factor >= 0"
            )
        max_occurrences = whole("max_occurrences", max_occurrences, 1, 4096)
        shared_tokens = whole("shared_tokens", shared_tokens, 0)
        if shared_tokens != 0:
            whole("shared_tokens", shared_tokens, 8 * max_match, 1 << 24)
        self.lengths = doubling(min_match, max_match)
        self.shared_tokens = shared_tokens
        self._policy = _Policy(self.name, max_occurrences, min_probability, factor, offset)
        self._shared: WeakKeyDictionary[Model, SharedIndex] = WeakKeyDictionary()

    def check(self, target: Model) -> None:
        """Accept any target: it speaks the tokens it is told."""

    def start(self, target: Branch, rule: str) -> DraftState:
        """Return a new state; what it says from here on becomes evidence for all others."""
        model = target.ctx.model
        index = TokenIndex(self.lengths)
        return _CopyState(self._policy, index, self._pool(model), target.position, model.is_eog)

    def _pool(self, model: Model) -> SharedIndex | None:
        if not self.shared_tokens:
            return None
        fresh = SharedIndex(self.lengths, self.shared_tokens, self._policy.most)
        return self._shared.setdefault(model, fresh)


@dataclass(frozen=True)
class _Policy:
    """How many places have a vote, and how much to propose on what they say."""

    name: str
    most: int
    floor: float
    factor: float
    offset: float

    def budget(self, match_length: int, limit: int) -> int:
        return math.floor(min(limit, match_length * self.factor + self.offset))


class _CopyState:
    """One request's index, and the segment of the shared one that it writes.

    ``told`` counts the tokens that need not be written: read by others than us, or written already.
    """

    def __init__(
        self,
        policy: _Policy,
        index: TokenIndex,
        shared: SharedIndex | None,
        told: int,
        is_eog: Callable[[int], bool],
    ) -> None:
        self._policy = policy
        self._index = index
        self._shared = shared
        self._told = told
        self._is_end = is_eog
        self._segment: Segment | None = None

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        draft = Draft(drafter=self._policy.name, stopped="no evidence")
        start = perf_counter()
        self._read(tokens)
        guess = self._guess(limit)
        if guess.tokens and length.consider(draft.drafter):
            self._take(draft, guess, length, limit)
        draft.seconds = perf_counter() - start
        return draft

    def _take(self, draft: Draft, guess: Guess, length: DraftLength, limit: int) -> None:
        draft.stopped = "length"
        for token, probability in zip(guess.tokens, guess.probabilities, strict=True):
            surprisal = -math.log(probability)
            draft.entropies.append(surprisal)
            if not length.goes_on(len(draft.tokens), surprisal):
                draft.stopped = length.reason
                return
            draft.tokens.append(token)
            if self._is_end(token):
                draft.stopped = "end"  # nothing follows it, whatever did in the prompt
                return
        if len(draft.tokens) < limit:
            draft.stopped = "no evidence"  # for more

    def _read(self, tokens: Sequence[int]) -> None:
        self._index.extend(tokens[len(self._index) :])
        if self._shared is not None and len(tokens) > self._told:
            self._segment = self._shared.write(self._segment, tokens, self._told)
            self._told = len(tokens)

    def _guess(self, limit: int) -> Guess:
        index, policy = self._index, self._policy
        matches = [index.longest(policy.most)]
        if self._shared is not None:
            matches.append(self._shared.longest(index.tokens, skip=self._segment))
        best = Guess([], [])
        for match in matches:
            if match is not None:
                most = policy.budget(match.length, limit)
                guess = match.follow(index.tokens, most, policy.floor)
                if guess.expected > best.expected:
                    best = guess
        return best

    def observe(self, n_tokens: int) -> None:
        if n_tokens < len(self._index):
            self._index.rewind(n_tokens)
        if n_tokens < self._told:
            # What was said stays evidence; what comes instead is another text.
            self._told, self._segment = n_tokens, None

    def fork(self, target: Branch) -> DraftState:
        return _CopyState(self._policy, self._index.fork(), self._shared, self._told, self._is_end)

    def close(self) -> None:
        self._index = TokenIndex(())
        self._shared = self._segment = None
