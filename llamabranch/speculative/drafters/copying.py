"""Drafters that copy tokens which followed the same tokens earlier.

Their draft distributions are point masses, so a drafted token is accepted with the target's own
probability of it, and the draft distribution has no entropy. Instead they estimate the *probability*
that the token is right from what followed the same tokens earlier (``Match.follow``).
``Draft.entropies`` holds its surprisal -ln(p) in nats: 0 for a certain token, and growing with
uncertainty as an entropy does, which is all that a draft-length controller needs. It is known before
the token is proposed and depends only on earlier tokens, so stopping on it is lossless.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from time import perf_counter

from ...arguments import bounded, real, whole
from ...errors import ConfigError
from ...generation.drafter import Draft, Drafter, DraftLength, DraftState, StopRule
from ...generation.text import Text
from ...model import Model
from .ngram_index import Guess, Match, Segment, SharedIndex, TokenIndex, doubling

__all__ = ["PromptLookupDrafter", "SuffixDrafter"]


class _CopyDrafter(Drafter):
    """Copies token ids of the target's own text, and estimates how probable they are.

    Attributes:
        lengths: of the n-grams that are indexed.
        most: how many occurrences are counted.
        floor: ends a draft where the probability that all of it is accepted falls below it.
        factor, offset: a match of m tokens allows a draft of floor(m * factor + offset) tokens.
    """

    lengths: Sequence[int]
    most, floor, factor, offset = 1, 0.0, 0.0, math.inf

    @property
    def estimates(self) -> frozenset[str]:
        """Its name: the entropies of its drafts are surprisals."""
        return frozenset({self.name})

    def check(self, target: Model) -> None:
        """Accept any target: it copies token ids of the target's own text."""

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state."""
        return _CopyState(self, TokenIndex(self.lengths), target.position, target)

    def pool(self, model: Model) -> SharedIndex | None:
        """Return what texts of a model share: nothing."""
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

    Known as SuffixDecoding (Oliaro et al. 2024, 2411.04975): one index holds the request's prompt and
    output, a shared one holds the output of all requests of this drafter; the longer the match, the
    more tokens are drafted. Each index is searched for its longest match, and the continuation with
    more tokens expected to be accepted is drafted; in a tie, that of the request's own index. Unlike in
    the paper, the estimated probability reserves a part for continuations never seen
    (``Match.follow``), the shared index is filled while texts are being generated, so that branches
    benefit from their siblings, and only the newest occurrences are counted.

    Args:
        max_match: the longest suffix compared, up to 64 tokens.
        min_match: the shortest suffix that counts as evidence.
        factor, offset: a match of m tokens allows a draft of floor(m * factor + offset) tokens.
        min_probability: ends a draft where the probability that all of it is accepted falls below this.
            "auto" weighs whatever could follow instead, without these limits, where copying costs next
            to nothing beside a step of the target.
        max_occurrences: how many occurrences of a suffix are counted, the newest ones.
        shared_tokens: the most tokens that the shared index holds; beyond it the oldest are forgotten.
            Each target model has a shared index of its own, since token ids mean nothing to another.
            0 = share nothing, otherwise at least 8 * max_match.

    Raises:
        ConfigError: a value out of range.
    """

    name = "suffix"  # in statistics

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
        self.floor = bounded("min_probability", min_probability, 0.0, 1.0)
        self.factor = factor = real("factor", factor)
        self.offset = offset = real("offset", offset)
        if not (math.isfinite(factor) and factor >= 0 and math.isfinite(offset)):
            raise ConfigError(
                f"factor {factor!r} and offset {offset!r} must be numbers, factor >= 0"
            )
        self.most = whole("max_occurrences", max_occurrences, 1, 4096)
        self.shared_tokens = whole("shared_tokens", shared_tokens, 0)
        if self.shared_tokens:
            whole("shared_tokens", shared_tokens, 8 * max_match, 1 << 24)
        self.lengths = doubling(min_match, max_match)
        self._shared: weakref.WeakKeyDictionary[Model, SharedIndex] = weakref.WeakKeyDictionary()

    def pool(self, model: Model) -> SharedIndex | None:
        """Return the index of what was generated with a model, None if nothing is shared."""
        if not self.shared_tokens:
            return None
        fresh = SharedIndex(self.lengths, self.shared_tokens, self.most)
        return self._shared.setdefault(model, fresh)


class _CopyState:
    """One request's index, and the segment of the shared index that it writes.

    Args:
        n_written: how many tokens of the text do not need to be written to the shared index: those
            that were there when the state was made, and those written since.
        target: what is drafted for; it tells which tokens were read: those are not written either.
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
        """Draft as much of the guess as gains the most; nothing limits it otherwise."""
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
                draft.stopped = "end"  # nothing follows an EOG token, whatever did in the prompt
                return
        if len(draft.tokens) < limit:
            draft.stopped = "no evidence"  # for further tokens

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
            # Tokens that a rewind removed stay in the shared index; those that replace them go to a new
            # segment.
            self._n_written, self._segment = n_tokens, None

    def fork(self, target: Text) -> DraftState:
        return _CopyState(self._drafter, self._index.fork(), self._n_written, target)

    def close(self) -> None:
        self._index = TokenIndex(())
        self._shared = self._segment = None
