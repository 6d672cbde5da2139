"""A drafter of what a grammar forces, with another drafter where the grammar leaves a choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter

from ...arguments import instance
from ...context import Context
from ...errors import GrammarError
from ...generation.drafter import Draft, Drafter, DraftLength, DraftState, NullDrafter
from ...generation.text import Text
from ...model import Model
from ...sampling import Distribution
from ...sampling.grammar.guidance import Matcher
from .copying import SuffixDrafter

__all__ = ["GrammarDrafter"]

_NAME = "grammar"  # of drafts that begin with what is forced


class GrammarDrafter(Drafter):
    """Drafts the text that the grammar of a branch forces: keys, punctuation, the rest of a constant.

    Where the grammar leaves a choice, ``values`` drafts on: with a copying drafter, values come from the
    prompt. After these tokens follows what is forced next, and so on. What the grammar refuses is left
    out.

    Args:
        values: drafts where the grammar leaves a choice; None = the draft ends there.
        plain: drafts on a branch without a grammar; None = ``values`` does.
    """

    def __init__(self, values: Drafter | None = None, plain: Drafter | None = None) -> None:
        for name, each in (("values", values), ("plain", plain)):
            if each is not None:
                instance(name, each, Drafter)  # type: ignore[type-abstract]
        self.values: Drafter = values or NullDrafter()
        self.plain = plain or self.values

    @classmethod
    def copying(cls) -> GrammarDrafter:
        """Return the drafter that is used where a grammar is given and no drafter: "grammar+suffix"."""
        return cls(SuffixDrafter(min_match=1, shared_tokens=0))

    @property
    def name(self) -> str:
        """ "grammar", or "grammar+" and the name of ``values``."""
        none = isinstance(self.values, NullDrafter)
        return "grammar" if none else f"grammar+{self.values.name}"

    @property
    def estimates(self) -> frozenset[str]:
        """Those of ``values``."""
        return self.values.estimates

    @property
    def contexts(self) -> list[Context]:
        """Those of ``values``."""
        return self.values.contexts

    def check(self, target: Model) -> None:
        """Raise VocabularyMismatchError if ``values`` or ``plain`` cannot draft for ``target``."""
        self.values.check(target)
        self.plain.check(target)

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state, with one of ``values``."""
        if target.grammar is None:
            return self.plain.start(target, rule)
        values = self.values.start(target, rule)
        try:
            state = target.grammar.start(target.ctx.model, forcing=True)
        except BaseException:
            values.close()
            raise
        return _ForcedState(state, target.answer_start, values)


class _ForcedState:
    """A grammar's state after the tokens from ``start`` to ``n_seen``, and the state of ``values``."""

    def __init__(self, grammar: Matcher, start: int, values: DraftState) -> None:
        self._first = grammar  # before any token
        self._grammar = grammar.clone()
        self._start = self._n_seen = start
        self._values = values

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        start = perf_counter()
        try:
            for token in tokens[self._n_seen :]:
                if not self._grammar.allows(token):
                    raise GrammarError(f"the grammar does not allow token {token} here")
                self._grammar.accept(token)
                self._n_seen += 1
            grammar = self._grammar.clone()
            if grammar.forced():
                draft = Draft(drafter=_NAME, stopped="off")
                if length.consider(_NAME):
                    self._fill(draft, tokens, grammar, length, limit)
                draft.seconds = perf_counter() - start
                return draft
        except GrammarError:  # the target raises it if it gets there
            return Draft(drafter=_NAME, stopped="end")
        # What a draft begins with decides whose costs and acceptance it is judged by.
        return self._values.propose(tokens, length, limit)

    def _fill(
        self,
        draft: Draft,
        tokens: Sequence[int],
        grammar: Matcher,
        length: DraftLength,
        limit: int,
    ) -> None:
        draft.stopped = "length"
        while len(draft.tokens) < limit:
            forced = grammar.forced()[: limit - len(draft.tokens)]
            for token in forced:
                draft.entropies.append(0.0)
                if not length.goes_on(len(draft.tokens), 0.0):
                    draft.stopped = length.reason
                    return
                grammar.accept(token)
                draft.tokens.append(token)
                draft.forced.append(True)
                if draft.sources:
                    draft.sources.append(Distribution.point(token))
            if not forced:
                goes_on = self._add_values(draft, tokens, grammar, length, limit)
                length.consider(_NAME)
                if not goes_on:
                    return

    def _add_values(
        self,
        draft: Draft,
        tokens: Sequence[int],
        grammar: Matcher,
        length: DraftLength,
        limit: int,
    ) -> bool:
        """Add what ``values`` proposes and the grammar allows; return whether the draft may go on."""
        n, before = len(draft.tokens), length.n_before
        length.n_before = before + n
        try:
            found = self._values.propose([*tokens, *draft.tokens], length, limit - n)
        finally:
            length.n_before = before
        draft.stopped = found.stopped
        draft.n_decodes += found.n_decodes
        draft.n_read += found.n_read
        if found.sources and not draft.sources:
            draft.sources = [Distribution.point(token) for token in draft.tokens]
        for i, token in enumerate(found.tokens):
            # Cutting a token that was drawn at random would bias the text: the rule has to reject it.
            is_allowed = grammar.allows(token)
            if not is_allowed and not found.sources:
                draft.stopped = "end"
                break
            draft.entropies.append(found.entropies[i] if found.entropies else math.nan)
            draft.tokens.append(token)
            draft.forced.append(False)
            if draft.sources:
                draft.sources.append(found.sources[i])
            if not is_allowed:
                return False
            grammar.accept(token)
        else:
            draft.entropies += found.entropies[len(found.tokens) :]
            return bool(found.tokens) and found.stopped in ("no evidence", "end")
        return False

    def observe(self, n_tokens: int) -> None:
        self._values.observe(n_tokens)
        if n_tokens < self._n_seen:
            self._grammar, self._n_seen = self._first.clone(), self._start

    def fork(self, target: Text) -> DraftState:
        start = target.answer_start  # of another prompt, perhaps
        clone = _ForcedState(self._first, start, self._values.fork(target))
        if start == self._start:
            clone._grammar, clone._n_seen = self._grammar.clone(), self._n_seen
        return clone

    def close(self) -> None:
        self._values.close()
