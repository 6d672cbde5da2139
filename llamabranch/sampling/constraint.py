"""Constraints in Python: functions of the text that decide which texts are allowed.

A constraint answers two questions: can a text be continued to a valid one, and is it valid already? A
token is allowed if the text with it can be continued or, if the token ends the text, if the text is
valid. A constraint gets only whole characters; the bytes of an unfinished one wait for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from ..errors import ConfigError, ConstraintError
from ..model import Model


class Constraint(Protocol):
    """Decides which texts are allowed. Both methods get the generated text and must be pure functions."""

    def prefix(self, text: str) -> bool:
        """Return False only if no valid text begins with ``text``."""

    def complete(self, text: str) -> bool:
        """Return whether the text is valid if it ends here."""


ConstraintLike: TypeAlias = Constraint | Callable[[str], bool]  # a function answers both questions

_MOST_SILENT = 8  # tokens without text that follow one another; more would hide a dead end
_HINT = "a constraint is a function of the text so far, or an object with prefix(text) and complete(text)"


class ConstraintCalls:
    """Calls a constraint, and counts the calls.

    Args:
        constraint: a function of the text that answers both questions, or an object with ``prefix`` and
            ``complete``.

    Attributes:
        calls: number of calls.
        rejections: number of tokens that it refused.

    Raises:
        ConfigError: ``constraint`` is neither a function nor such an object.
    """

    def __init__(self, constraint: ConstraintLike) -> None:
        self.calls = self.rejections = 0
        methods = [getattr(constraint, name, None) for name in ("prefix", "complete")]
        if not any(methods) and callable(constraint):
            methods = [constraint, constraint]
        elif methods[0] is None and callable(methods[1]):
            raise ConfigError(
                "a constraint without prefix(text) refuses nothing before the end of a text",
                hint="examples/rejection.py draws whole texts until they are valid",
            )
        if isinstance(constraint, type) or not all(map(callable, methods)):
            raise ConfigError(f"constraint cannot be {constraint!r:.60}", hint=_HINT)
        self._prefix, self._complete = methods

    def allows(self, text: str, *, is_end: bool) -> bool:
        """Ask whether ``text`` is valid (``is_end``), or can be continued to a valid text.

        Raises:
            ConfigError: the constraint raises an exception, or returns something other than True or
                False.
        """
        method = self._complete if is_end else self._prefix
        self.calls += 1
        try:
            answer = method(text) if method is not None else None
        except Exception as error:
            raise ConfigError(
                f"the constraint raised {error!r} for the text {text[-60:]!r}",
                hint="it gets every beginning of a text, also within a word, and the empty one",
            ) from error
        if not isinstance(answer, (bool, np.bool_)):
            raise ConfigError(
                f"the constraint must return True or False, not {answer!r:.40}",
                hint="return bool(...)",
            )
        return bool(answer)


@dataclass
class ConstraintStats:
    """The cost of a constraint: calls, and refused tokens."""

    constraint_calls: int = 0
    constraint_rejections: int = 0

    def count_constraint(self, calls: ConstraintCalls | None) -> None:
        """Copy the counts of a constraint, if there is one."""
        if calls is not None:
            self.constraint_calls, self.constraint_rejections = calls.calls, calls.rejections


class ConstraintState:
    """A text under a constraint. It is immutable: each token leads to a new state.

    Args:
        calls: calls the constraint.
        model: has the texts of tokens.
        stop: strings that end a text; the constraint does not see them.
        stop_tokens: tokens that end a text and are part of it.

    Attributes:
        text: the generated text so far, in whole characters.
    """

    _CHECK_AFTER = 64  # refused tokens at one position

    def __init__(
        self,
        calls: ConstraintCalls,
        model: Model,
        stop: Sequence[str] = (),
        stop_tokens: Collection[int] = (),
    ) -> None:
        self.calls = calls
        self.text = ""
        self._model = model
        self._stop = stop
        self._stop_tokens = stop_tokens
        self._pending = b""  # the bytes of an unfinished character
        self._was_allowed = False
        self._n_refused = self._n_silent = 0
        self._after: dict[int, ConstraintState | None] = {}

    def start(self) -> ConstraintState:
        """Return the state before the first token."""
        return ConstraintState(self.calls, self._model, self._stop, self._stop_tokens)

    def accept(self, token: int) -> ConstraintState:
        """Return the state after ``token``, without calling the constraint."""
        state = self._after.get(token)
        if state is None:
            state = self.start()
            if not self._model.is_eog(token):
                piece, state._pending = self._model.text_after(token, self._pending)
                state.text = self.text + piece
                is_silent = not piece and state._pending == self._pending
                state._n_silent = self._n_silent + 1 if is_silent else 0
        return state

    def allows(self, token: int) -> bool:
        """Return whether the constraint allows ``token`` next; the answer is cached.

        Raises:
            ConstraintError: many tokens were refused, and the constraint refuses even the text so far.
            ConfigError: the constraint refuses a text that it allowed before.
        """
        if token not in self._after:
            if self._n_refused == self._CHECK_AFTER:
                self._check()
            state = self.accept(token)
            is_allowed = self._allows(token, state)
            self._after[token] = state if is_allowed else None
            self._n_refused += not is_allowed
            self.calls.rejections += not is_allowed
        return self._after[token] is not None

    def may_end(self) -> bool:
        """Return whether the text may end here."""
        return not self._pending and self.calls.allows(self.text, is_end=True)

    def dead_end(self) -> ConstraintError:
        """Return the error for a text that no token may follow."""
        return ConstraintError(
            f"the constraint allows no token after {self.text[-60:]!r}",
            hint="prefix(text) must be False for a text that cannot be continued to a valid one",
        )

    def _allows(self, token: int, after: ConstraintState) -> bool:
        if self._model.is_eog(token):
            return self.may_end()
        end = self._stop_end(after.text)
        if end is not None:
            return self.calls.allows(after.text[:end], is_end=True)
        if token in self._stop_tokens:
            return after.may_end()
        if len(after.text) == len(self.text):
            after._was_allowed = self._was_allowed
            return after._n_silent <= _MOST_SILENT
        after._was_allowed = self.calls.allows(after.text, is_end=False)
        return after._was_allowed

    def _stop_end(self, text: str) -> int | None:
        """Return where the stop string that the last token completes begins, or None."""
        ends = []
        for stop in self._stop:
            at = text.find(stop, max(0, len(self.text) - len(stop) + 1))
            if at >= 0:
                ends.append((at + len(stop), at))
        return min(ends)[1] if ends else None

    def _check(self) -> None:
        self._n_refused += 1  # so that this is checked only once
        if self.calls.allows(self.text, is_end=False):
            return
        if self._was_allowed:
            raise ConfigError(
                f"the constraint refuses the text {self.text[-60:]!r}, which it allowed before",
                hint="its answer may depend only on the text",
            )
        raise self.dead_end()
