"""A chain: several drafters, tried in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...arguments import instance, items
from ...context import Context
from ...errors import ConfigError
from ...generation.drafter import Draft, Drafter, DraftLength, DraftRequest, DraftState
from ...generation.text import Text
from ...model import Model

__all__ = ["ChainDrafter"]


class ChainDrafter(Drafter):
    """Tries drafters in order until one proposes a draft: cheap ones first, a model last.

    A draft state whose turn does not come only learns how many tokens were accepted, so a model behind
    n-gram drafters decodes all the text it has missed in one decode when its turn comes.

    Args:
        drafters: at least one, in the order in which they are tried.

    Raises:
        ConfigError: an empty list, or something that is no drafter.
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

    @property
    def estimates(self) -> frozenset[str]:
        """Those of its drafters."""
        return frozenset().union(*(each.estimates for each in self.drafters))

    @property
    def contexts(self) -> list[Context]:
        """Those of its drafters."""
        return [ctx for each in self.drafters for ctx in each.contexts]

    def check(self, target: Model) -> None:
        """Raise VocabularyMismatchError if one of them cannot draft for ``target``."""
        for drafter in self.drafters:
            drafter.check(target)

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state, made of one state of each drafter."""
        makers = [partial(drafter.start, target, rule) for drafter in self.drafters]
        return _ChainState(self, _all_or_none(makers))

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Call each drafter with all requests for which those before it have no draft.

        A draft has the cost of the drafters before it added to its own.
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
    def __init__(self, drafter: ChainDrafter, states: Sequence[DraftState]) -> None:
        self.states = states
        self._drafter = drafter

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        return self._drafter.propose_many([DraftRequest(self, tokens, length, limit)])[0]

    def observe(self, n_tokens: int) -> None:
        for state in self.states:
            state.observe(n_tokens)

    def fork(self, target: Text) -> DraftState:
        makers = [partial(state.fork, target) for state in self.states]
        return _ChainState(self._drafter, _all_or_none(makers))

    def close(self) -> None:
        for state in self.states:
            state.close()


def _all_or_none(makers: Sequence[Callable[[], DraftState]]) -> list[DraftState]:
    """Return the states that ``makers`` make; if one fails, close those made before it."""
    states: list[DraftState] = []
    try:
        for make in makers:
            states.append(make())
    except BaseException:
        for state in states:
            state.close()
        raise
    return states
