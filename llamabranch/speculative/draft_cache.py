"""Which draft state belongs to which branch, and what forks, rewinds and prunes do to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..branch import Branch
from ..context.radix_tree import n_common
from ..errors import CapacityError
from ..native import forkable_lock
from ..sampling import SamplingParams
from .drafters.base import Drafter, DraftState, NullState
from .rules import Rule, rule_name

__all__ = ["DraftCache"]

_IDLE = NullState()  # used where there is no room for a real state; it holds nothing


class DraftCache:
    """Keeps the draft states of branches that may be continued, so that no text is decoded twice.

    A branch without a state gets a fork of its nearest ancestor's, or a new one. ``observe`` tells a
    state how many of the tokens it has seen are still those of its branch. When the drafter's context
    runs out of sequences, the states that were given back first are closed.

    Threads may share one cache. A state belongs to the thread that took it out, or that marked it as
    being forked; the cache's own lock is never held during a call of a state, since such a call may wait
    for a context's lock.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._lock = forkable_lock()
        self._kept: weakref.WeakKeyDictionary[Branch, _Kept] = weakref.WeakKeyDictionary()

    def take(self, branch: Branch, rule: Rule) -> DraftState:
        """Return the state that drafts for ``branch`` after its last token."""
        self._close_pruned()
        found = self._pop(branch, lambda kept: kept.fits(branch, rule) and kept.draws_like(branch))
        if found is not None:
            found.state.observe(n_common(found.tokens, branch.tokens))
            return found.state
        while True:
            try:
                state = self._make(branch, rule)
                self.forget(branch)
                return state
            except CapacityError:
                oldest = self._pop_oldest()
                if oldest is None:  # without room for a draft state it decodes plainly
                    return _IDLE
                oldest.state.close()

    def _make(self, branch: Branch, rule: Rule) -> DraftState:
        relative: Branch | None = branch  # with a new seed or new settings it forks its own state
        while relative is not None:
            with self._lock:
                found = self._kept.get(relative)
                usable = found is not None and not found.is_forked and found.fits(branch, rule)
                if found is not None and usable:
                    found.is_forked = True
            if found is not None and usable:
                try:
                    state = found.state.fork(branch)
                    state.observe(n_common(found.tokens, branch.tokens))
                    return state
                finally:
                    self._end_fork(relative, found)
            relative = relative.parent
        return self._drafter.start(branch, rule_name(rule))

    def _end_fork(self, branch: Branch, kept: _Kept) -> None:
        with self._lock:
            kept.is_forked = False
            is_kept = self._kept.get(branch) is kept
        if not is_kept:  # another thread removed or replaced it meanwhile
            kept.state.close()

    def give_back(self, branch: Branch, state: DraftState, rule: Rule, *, keep: bool) -> None:
        """Keep ``state`` for the next generation of ``branch``, or close it."""
        if state is _IDLE:
            return
        if not keep or branch.state == "pruned" or branch.ctx.closed:
            state.close()
            return
        kept = _Kept(state, rule, _prompt_end(branch), branch.seed, branch.sampling, branch.tokens)
        with self._lock:
            before = self._pop_free(branch)
            self._kept[branch] = kept
        if before is not None:
            before.close()

    def forget(self, branch: Branch) -> None:
        """Close the state of ``branch`` if one is kept."""
        with self._lock:
            state = self._pop_free(branch)
        if state is not None:
            state.close()

    def _pop(self, branch: Branch, fits: Callable[[_Kept], bool]) -> _Kept | None:
        """Take out the state of ``branch`` if it fits and no thread is forking it."""
        with self._lock:
            found = self._kept.get(branch)
            if found is None or found.is_forked or not fits(found):
                return None
            return self._kept.pop(branch, None)

    def _pop_oldest(self) -> _Kept | None:
        with self._lock:
            for branch, kept in list(self._kept.items()):
                if not kept.is_forked:
                    return self._kept.pop(branch, None)
            return None

    def _close_pruned(self) -> None:
        with self._lock:
            pruned = [branch for branch in list(self._kept) if branch.state == "pruned"]
            states = [self._pop_free(branch) for branch in pruned]
        for state in states:
            if state is not None:
                state.close()

    def _pop_free(self, branch: Branch) -> DraftState | None:
        """Take out what is kept for ``branch``; return its state, None if a forking thread closes it."""
        kept = self._kept.pop(branch, None)
        return None if kept is None or kept.is_forked else kept.state


def _prompt_end(branch: Branch) -> int:
    """Return up to where a draft state must have read, not drafted, the text."""
    return branch.n_prompt if branch.grammar is None else branch.sequence.answer_start


@dataclass(eq=False)
class _Kept:
    """A state, and the properties of its branch when it was given back."""

    state: DraftState
    rule: Rule
    n_prompt: int
    seed: int
    sampling: SamplingParams
    tokens: Sequence[int]
    is_forked: bool = False  # a thread is forking it: no other may use it now

    def fits(self, branch: Branch, rule: Rule) -> bool:
        """Return whether the state can draft for ``branch``: not once its prompt was cut short."""
        return self.rule == rule and self.n_prompt == _prompt_end(branch)

    def draws_like(self, branch: Branch) -> bool:
        """Return whether the state drafts with the seed and the settings that ``branch`` has now."""
        return self.seed == branch.seed and self.sampling == branch.sampling
