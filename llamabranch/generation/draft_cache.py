"""Which draft state belongs to which text, and what forks, rewinds and prunes do to it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ..context.prefix_cache import n_common
from ..errors import CapacityError
from ..native import forkable_lock
from ..sampling import SamplingParams
from .drafter import NO_STATE, Drafter, DraftState
from .rules import Rule, rule_name
from .text import Text

__all__ = ["DraftCache"]


class DraftCache:
    """Keeps the draft states of texts that may be continued, so that no text is decoded twice.

    A text without a state gets a fork of its nearest ancestor's, or a new one. ``observe`` tells a
    state how many of the tokens it has seen are still those of its text. When the drafter's context
    runs out of sequences, the states that were returned first are closed.

    Threads may share one cache. A state belongs to the thread that took it out, or that marked it as
    being forked; the cache's own lock is never held during a call of a state, since such a call may wait
    for a context's lock.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._lock = forkable_lock()
        self._kept: weakref.WeakKeyDictionary[Text, _Kept] = weakref.WeakKeyDictionary()

    def take(self, text: Text, rule: Rule) -> DraftState:
        """Return the state that drafts for ``text`` after its last token."""
        self._close_pruned()
        with self._lock:
            found = self._kept.get(text)
            if found is not None and found.fits(text, rule) and found.draws_like(text):
                del self._kept[text]
            else:
                found = None
        if found is not None:
            found.state.observe(n_common(found.tokens, text.shown))
            return found.state
        while True:
            try:
                state = self._make(text, rule)
                self.forget(text)
                return state
            except CapacityError:
                if not self.forget_oldest():  # without room for a draft state it decodes plainly
                    return NO_STATE

    def _make(self, text: Text, rule: Rule) -> DraftState:
        relative: Text | None = text  # with a new seed or new settings it forks its own state
        while relative is not None:
            with self._lock:
                found = self._kept.get(relative)
                if found is not None and found.fits(text, rule):
                    found.is_forked = True
                else:
                    found = None
            if found is not None:
                try:
                    state = found.state.fork(text)
                    state.observe(n_common(found.tokens, text.shown))
                    return state
                finally:
                    self._end_fork(relative, found)
            relative = relative.parent
        return self._drafter.start(text, rule_name(rule))

    def _end_fork(self, text: Text, kept: _Kept) -> None:
        with self._lock:
            kept.is_forked = False
            is_kept = self._kept.get(text) is kept
        if not is_kept:  # another thread removed or replaced it meanwhile
            kept.state.close()

    def release(self, text: Text, state: DraftState, rule: Rule, *, keep: bool) -> None:
        """Keep ``state`` for the next generation of ``text``, or close it."""
        if state is NO_STATE:
            return
        if not keep or text.state == "pruned" or text.ctx.closed:
            state.close()
            return
        kept = _Kept(state, rule, _prompt_end(text), text.seed, text.sampling, list(text.shown))
        with self._lock:
            before = self._pop_free(text)
            self._kept[text] = kept
        if before is not None:
            before.close()

    def forget(self, text: Text) -> None:
        """Close the state of ``text`` if one is kept."""
        with self._lock:
            state = self._pop_free(text)
        if state is not None:
            state.close()

    def forget_oldest(self) -> bool:
        """Close the state that was returned first; False if none is kept, or all are being forked."""
        with self._lock:
            kept = [text for text, its in list(self._kept.items()) if not its.is_forked]
            state = self._pop_free(kept[0]) if kept else None
        if state is not None:
            state.close()
        return state is not None

    def _close_pruned(self) -> None:
        with self._lock:
            pruned = [text for text in list(self._kept) if text.state == "pruned"]
            states = [self._pop_free(text) for text in pruned]
        for state in states:
            if state is not None:
                state.close()

    def _pop_free(self, text: Text) -> DraftState | None:
        """Take out what is kept for ``text``; return its state, None if a forking thread closes it."""
        kept = self._kept.pop(text, None)
        return None if kept is None or kept.is_forked else kept.state


def _prompt_end(text: Text) -> int:
    """Return up to where a draft state must have read, not drafted, the text."""
    return text.n_prompt if text.grammar is None else text.answer_start


@dataclass(eq=False)
class _Kept:
    """A state, and the properties of its text when it was returned."""

    state: DraftState
    rule: Rule
    n_prompt: int
    seed: int
    sampling: SamplingParams
    tokens: Sequence[int]
    is_forked: bool = False  # a thread is forking it: no other may use it now

    def fits(self, text: Text, rule: Rule) -> bool:
        """Return whether the state can draft for ``text`` now: not once its prompt was cut short."""
        same = self.rule == rule and self.n_prompt == _prompt_end(text)
        return same and not self.is_forked

    def draws_like(self, text: Text) -> bool:
        """Return whether the state drafts with the seed and the settings that ``text`` has now."""
        return self.seed == text.seed and self.sampling == text.sampling
