"""Drafters made of other drafters, a function or a grammar, and the default drafter, "auto"."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Literal

from ..arguments import instance, items, placed
from ..context import Context
from ..errors import ConfigError, GrammarError
from ..generation.drafter import (
    Draft,
    Drafter,
    DraftLength,
    DraftRequest,
    DraftState,
    NullDrafter,
    NullState,
)
from ..generation.text import Text
from ..model import Model, token_list
from ..sampling import Distribution
from ..sampling.grammar.guidance import Matcher
from .copying import SuffixDrafter
from .head import MTPDrafter

DrafterChoice = Drafter | Literal["auto"] | None
DraftFunction = Callable[[list[int], int], Sequence[int]]

_GRAMMAR = "grammar"  # the name of drafts that begin with forced text


# -- a function -----------------------------------------------------------------------------------


class FunctionDrafter(Drafter):
    """Drafts the tokens that a function returns.

    ``function(tokens, k)`` gets a copy of the ids of the text so far, and returns up to ``k`` ids that
    may follow. Further ids are cut off, and an empty list means no draft. The function may use anything
    but the target's random numbers. Its drafts never change the text's distribution. If several texts
    need a draft, it is called for each in turn.

    Args:
        function: returns the drafted token ids.
        name: the drafter's name in statistics; None = the function's own name.

    Raises:
        ConfigError: ``function`` is not a function. Later, an exception in it ends the generation, and
            a result that is not a list of the target's token ids raises TokenizeError there.
    """

    name = "function"  # in statistics

    def __init__(self, function: DraftFunction, name: str | None = None) -> None:
        if not callable(function):
            raise ConfigError(
                f"a drafter needs a function of tokens and a number, not {function!r}"
            )
        self._function = function
        found = getattr(function, "__name__", type(function).__name__)
        self.name = name or ("function" if found == "<lambda>" else found)

    def check(self, target: Model) -> None:
        """Accept any target, because the function is responsible for the ids."""

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a state that keeps nothing, because the function gets the whole text each time."""
        return _FunctionState(self._function, self.name)


class _FunctionState(NullState):
    """Calls the function. It keeps no copy of the text."""

    def __init__(self, function: DraftFunction, name: str) -> None:
        self._function = function
        self._name = name

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        draft = Draft(drafter=self._name, stopped="off")
        if not length.consider(self._name):
            return draft
        limit = min(limit, length.limit)
        with placed(f"the drafter {self._name}"):
            draft.tokens = token_list(self._function(list(tokens), limit))[:limit]
        draft.stopped = "length" if len(draft.tokens) == limit else "no evidence"
        return draft


class _Combined(Drafter):
    """A drafter made of other drafters."""

    drafters: Sequence[Drafter]

    @property
    def contexts(self) -> list[Context]:
        """The contexts of all its drafters."""
        return [ctx for each in self.drafters for ctx in each.contexts]

    def check(self, target: Model) -> None:
        """Raise VocabularyMismatchError if one of its drafters cannot draft for ``target``."""
        for drafter in self.drafters:
            drafter.check(target)


# -- a chain --------------------------------------------------------------------------------------


class ChainDrafter(_Combined):
    """Tries drafters in order until one proposes a draft. Put cheap ones first and a model last.

    If an earlier drafter proposes a draft, the later ones decode nothing in that round. For
    example, a draft model may come after copying drafters. When its turn comes, it first decodes
    all the text it has missed, in one decode.

    Args:
        drafters: at least one, in the order in which they are tried.

    Raises:
        ConfigError: the list is empty, or an item is not a drafter.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = tuple(items("drafters", drafters))
        if not self.drafters:
            raise ConfigError("a chain needs at least one drafter")
        for one in self.drafters:
            instance("a drafter of a chain", one, Drafter)  # type: ignore[type-abstract]

    @property
    def name(self) -> str:
        """The names of its drafters, joined by "+"."""
        return "+".join(drafter.name for drafter in self.drafters)

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state, made of one state per drafter."""
        return _ChainState(self, (drafter.start(target, rule) for drafter in self.drafters))

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Call each drafter in turn, with the requests that have no draft yet.

        The cost of a draft includes the cost of the drafters that were tried before.
        """
        drafts = [Draft() for _ in requests]
        found = ((i, request.state) for i, request in enumerate(requests))
        states = {i: state.states for i, state in found if isinstance(state, _ChainState)}
        left = list(states)
        for number, drafter in enumerate(self.drafters):
            asked = [requests[i]._replace(state=states[i][number]) for i in left]
            for i, draft in zip(left, drafter.propose_many(asked), strict=True):
                draft.seconds += drafts[i].seconds
                draft.n_decodes += drafts[i].n_decodes
                drafts[i] = draft
            left = [i for i in left if not drafts[i].tokens]
        return drafts


class _ChainState:
    def __init__(self, drafter: ChainDrafter, states: Iterable[DraftState]) -> None:
        self._drafter = drafter
        self.states: list[DraftState] = []
        with ExitStack() as failing:  # if a state cannot be made, those before it are closed
            failing.callback(self.close)
            for state in states:
                self.states.append(state)
            failing.pop_all()

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        return self._drafter.propose_many([DraftRequest(self, tokens, length, limit)])[0]

    def observe(self, n_tokens: int) -> None:
        for state in self.states:
            state.observe(n_tokens)

    def fork(self, target: Text) -> DraftState:
        return _ChainState(self._drafter, (state.fork(target) for state in self.states))

    def close(self) -> None:
        for state in self.states:
            state.close()


# -- a grammar ------------------------------------------------------------------------------------


class GrammarDrafter(_Combined):
    """Drafts the text that a branch's grammar forces: keys, punctuation, the rest of a constant.

    If the grammar leaves a choice, the drafter ``values`` continues the draft; for example, a
    copying drafter takes values from the prompt. Then the next forced text follows, and so on.
    A draft is cut off before the first token that the grammar does not allow, unless that token was
    drawn at random.

    Args:
        values: the drafter for when the grammar leaves a choice; None = end the draft there.
        plain: the drafter for branches without a grammar; None = ``values``.
    """

    def __init__(self, values: Drafter | None = None, plain: Drafter | None = None) -> None:
        for name, each in (("values", values), ("plain", plain)):
            if each is not None:
                instance(name, each, Drafter)  # type: ignore[type-abstract]
        self.values: Drafter = values or NullDrafter()
        self.plain = plain or self.values
        self.drafters = (self.values, *(() if plain is None else (plain,)))

    @classmethod
    def copying(cls) -> GrammarDrafter:
        """Return the default drafter for texts with a grammar: "grammar+suffix"."""
        return cls(SuffixDrafter(min_match=1))

    @property
    def name(self) -> str:
        """ "grammar", or "grammar+" and the name of ``values`` if there is one."""
        none = isinstance(self.values, NullDrafter)
        return "grammar" if none else f"grammar+{self.values.name}"

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state, which includes a state of ``values``."""
        if target.grammar is None:
            return self.plain.start(target, rule)
        state = target.grammar.start(target.ctx.model, forcing=True)
        return _ForcedState(state, target.answer_start, self.values.start(target, rule))


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
                draft = Draft(drafter=_GRAMMAR, stopped="off")
                if length.consider(_GRAMMAR):
                    self._fill(draft, tokens, grammar, length, limit)
                if draft.sources:
                    _add_certain(draft)
                draft.seconds = perf_counter() - start
                return draft
        except GrammarError:  # the target raises it if the text gets there
            return Draft(drafter=_GRAMMAR, stopped="end")
        # The first token of a draft decides which drafter's costs and acceptance rate count.
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
            if not forced:
                goes_on = self._add_values(draft, tokens, grammar, length, limit)
                length.consider(_GRAMMAR)
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
        """Add tokens of ``values`` that the grammar allows; return whether the draft may continue."""
        n, before = len(draft.tokens), length.n_before
        length.n_before = before + n
        try:
            found = self._values.propose([*tokens, *draft.tokens], length, limit - n)
        finally:
            length.n_before = before
        draft.stopped = found.stopped
        draft.n_decodes += found.n_decodes
        draft.n_read += found.n_read
        if found.sources:
            _add_certain(draft)
        for i, token in enumerate(found.tokens):
            # A token that was drawn at random must stay: cutting it off would bias the text. The
            # acceptance rule rejects it.
            is_allowed = grammar.allows(token)
            if not is_allowed and not found.sources:
                draft.stopped = "end"
                break
            draft.entropies.append(found.entropies[i] if found.entropies else math.nan)
            draft.tokens.append(token)
            draft.forced.append(False)
            if found.sources:
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
        start = target.answer_start  # another position if the fork has another prompt
        clone = _ForcedState(self._first, start, self._values.fork(target))
        if start == self._start:
            clone._grammar, clone._n_seen = self._grammar.clone(), self._n_seen
        return clone

    def close(self) -> None:
        self._values.close()


def _add_certain(draft: Draft) -> None:
    """Add a source for each of the last tokens without one, which were not drawn at random."""
    draft.sources += map(Distribution.point, draft.tokens[len(draft.sources) :])


# -- the default ----------------------------------------------------------------------------------


def auto_drafter(ctx: Context, *, structured: bool | None = None) -> Drafter:
    """Return a drafter that combines copied text, the model's MTP layers and text that a grammar forces.

    ``structured``: True = all texts have a grammar; False = no text has one; None = some texts do.
    """
    head = ctx.mtp_head()

    def copying(min_match: int) -> Drafter:
        values = SuffixDrafter(min_match=min_match)
        return ChainDrafter([values, MTPDrafter(head)]) if head is not None else values

    if structured is False:
        return copying(2)
    return GrammarDrafter(copying(1), copying(2) if structured is None else None)
