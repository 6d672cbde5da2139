"""The draft states of texts: kept between generations, forked for forks, freed to make room."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ..errors import CapacityError
from ..model.text import n_common
from ..native.handle import forkable_lock
from ..sampling import SamplingParams
from .drafter import NO_STATE, Drafter, DraftState
from .text import Text
from .verify import Rule, rule_name


class DraftStates:
    """Keeps the draft states of one drafter between generations.

    A text has at most one draft state, from the drafter that last drafted for it. The state is kept
    between generations, so that the drafter decodes no text twice. A text without a state gets a fork
    of its nearest ancestor's state, or a new state. When a kept state is used again, ``observe`` tells
    it how many of its tokens the text still has. When a draft model runs out of sequences, the least
    recently used states are closed.

    Only one thread at a time uses or forks a state. No lock is held while a state's method runs,
    because the method may wait for a context's lock.

    Args:
        drafter: makes the states.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def take(self, text: Text, rule: Rule) -> DraftState:
        """Return a state that drafts for ``text`` after its last token. Call ``give_back`` later."""
        kept = self._use(text, text, rule, draws_alike=True)
        if kept is not None:
            kept.state.observe(n_common(kept.tokens, text.shown))
            return kept.state
        while True:
            try:
                state = self._make(text, rule)
                break
            except CapacityError:
                if not self._free_oldest():  # there is no room for a state: decode plainly
                    return NO_STATE
        _free(text)
        if state is not NO_STATE:
            with _lock:
                text.draft_state = _Kept(state, self._drafter, _made_for(text, rule))
                _holders.add(text)
        return state

    def give_back(self, text: Text, state: DraftState, tokens: Sequence[int] | None) -> None:
        """Keep the state that ``take`` returned until the text's next generation, or free it.

        ``tokens``: the tokens of the text that the state has seen; None = free the state.
        """
        if state is NO_STATE:
            return
        with _lock:
            kept = _kept(text)
            if kept is not None and kept.state is state:  # else another thread has replaced it
                if tokens is not None and not text.is_pruned and not text.ctx.closed:
                    kept.tokens = tokens or kept.tokens
                    kept.returned = next(_returns)
                    kept.is_used = False
                    return
                text.draft_state = None
        state.close()

    def _use(
        self, holder: Text, text: Text, rule: Rule, *, draws_alike: bool = False
    ) -> _Kept | None:
        """Mark the state of ``holder`` as used and return it; return None if ``text`` cannot use it.

        The state can be used if no other thread uses it, if it belongs to this drafter, and if it was
        made for the same rule and the same first drafted position. With ``draws_alike`` it must also
        have been made for the same seed and settings.
        """
        n = 4 if draws_alike else 2
        with _lock:
            kept = _kept(holder)
            if kept is None or kept.is_used or kept.drafter is not self._drafter:
                return None
            if kept.made_for[:n] != _made_for(text, rule)[:n]:
                return None
            kept.is_used = True
            return kept

    def _make(self, text: Text, rule: Rule) -> DraftState:
        """Return a fork of the nearest state among the text and its ancestors, or a new state."""
        # A text whose seed or settings changed forks its own state.
        for relative in text.ancestors():
            kept = self._use(relative, text, rule)
            if kept is not None:
                try:
                    state = kept.state.fork(text)
                    state.observe(n_common(kept.tokens, text.shown))
                    return state
                finally:
                    with _lock:
                        kept.is_used = False
                        is_kept = relative.draft_state is kept
                    if not is_kept:  # another thread has removed or replaced it
                        kept.state.close()
        return self._drafter.start(text, rule_name(rule))

    def forget(self, text: Text) -> None:
        """Free the draft state of ``text`` if it is this drafter's."""
        kept = _kept(text)
        if kept is not None and kept.drafter is self._drafter:
            _free(text)

    def _free_oldest(self) -> bool:
        """Free the least recently used state of any drafter that shares a context with this one.

        States that are in use stay. Return False if there was no state to free.
        """
        with _lock:
            every = [(kept, text) for text in _holders if (kept := _kept(text)) is not None]
            ours = [pair for pair in every if not pair[0].is_used and self._shares(pair[0].drafter)]
        if not ours:
            return False
        _free(min(ours, key=lambda pair: pair[0].returned)[1])
        return True

    def _shares(self, other: Drafter) -> bool:
        """Return whether another drafter is this one, or drafts with the same context."""
        ours = self._drafter.contexts
        return other is self._drafter or any(a is b for a in ours for b in other.contexts)


@dataclass(eq=False)
class _Kept:
    """A text's draft state, with the result of ``_made_for`` when the state was made."""

    state: DraftState
    drafter: Drafter
    made_for: tuple[Rule, int, int, SamplingParams]
    tokens: Sequence[int] = ()  # the tokens it had seen when it was last returned
    returned: int = 0  # the number of that return, counted over all states
    is_used: bool = True  # a thread drafts with it or forks it; no other thread may use it now


_lock = forkable_lock()  # for the draft states of all texts
_holders: weakref.WeakSet[Text] = weakref.WeakSet()  # texts that have or had a draft state
_returns = itertools.count(1)


def _kept(text: Text) -> _Kept | None:
    return cast("_Kept | None", text.draft_state)


def _free(text: Text) -> None:
    """Free the draft state of ``text``, if there is one."""
    with _lock:
        kept, text.draft_state = _kept(text), None
    if kept is not None and not kept.is_used:  # otherwise the thread that uses it closes it
        kept.state.close()


def _made_for(text: Text, rule: Rule) -> tuple[Rule, int, int, SamplingParams]:
    """Return the values that a state depends on: rule, first drafted position, seed, settings."""
    n_prompt = text.n_prompt if text.grammar is None else text.answer_start
    return rule, n_prompt, text.seed, text.sampling
