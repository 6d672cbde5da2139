"""A drafter from a function: tokens in, a guess out; length and time are handled here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...arguments import placed
from ...errors import ConfigError
from ...generation.drafter import Draft, Drafter, DraftLength, DraftState, NullState
from ...generation.text import Text
from ...model import Model, token_list

__all__ = ["FunctionDrafter"]

DraftFunction = Callable[[list[int], int], Sequence[int]]


class FunctionDrafter(Drafter):
    """Drafts what a function returns.

    ``function(tokens, k)`` gets the ids of the text so far, a list of its own, and returns at most ``k``
    ids that may follow; what is beyond ``k`` is cut off, and an empty list is no draft. It may use
    anything but the target's random numbers; drafts never change the text's distribution. Several texts
    at a time are drafted one after another.

    Args:
        function: the guess.
        name: its name in statistics.

    Raises:
        ConfigError: not a function. What the function raises ends the generation; a result that is no
            list of the target's token ids raises TokenizeError there.
    """

    def __init__(self, function: DraftFunction, name: str | None = None) -> None:
        if not callable(function):
            raise ConfigError(
                f"a drafter needs a function of tokens and a number, not {function!r}"
            )
        self._function = function
        found = getattr(function, "__name__", type(function).__name__)
        self._name = name or ("function" if found == "<lambda>" else found)

    @property
    def name(self) -> str:
        """Its name in statistics."""
        return self._name

    def check(self, target: Model) -> None:
        """Accept any target: the function is responsible for the ids."""

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a state that keeps nothing: the function gets the whole text each time."""
        return _FunctionState(self._function, self._name)


class _FunctionState(NullState):
    """Calls the function; holds nothing of the text."""

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
