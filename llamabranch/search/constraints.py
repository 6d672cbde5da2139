"""Constraints on texts: from functions of words or lines, a check, and exact weights for a draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..arguments import function, instance, items
from ..errors import ConfigError
from ..sampling import Distribution
from ..sampling.constraint import Constraint, ConstraintCalls, ConstraintLike

__all__ = ["Constraint", "check_constraint", "lines", "weighted_draw", "words"]


class _Units:
    """Texts whose units, words or lines, are all allowed."""

    def __init__(
        self,
        split: Callable[[str], Sequence[str]],
        allowed: Callable[[str], bool],
        partial: Callable[[str], bool] | None,
    ) -> None:
        self._split = split
        function("the first argument", allowed)
        self._allowed = allowed
        self._partial = partial or getattr(allowed, "partial", None)
        if self._partial is not None:
            function("partial", self._partial)

    def prefix(self, text: str) -> bool:
        """Return whether all finished units are allowed, and the last one can become allowed."""
        *ended, last = self._split(text)
        if not all(map(self._allowed, ended)):
            return False
        return not last or self._partial is None or self._partial(last)

    def complete(self, text: str) -> bool:
        """Return whether all units are allowed."""
        *ended, last = self._split(text)
        return all(map(self._allowed, ended)) and (not last or self._allowed(last))


def words(
    allowed: Callable[[str], bool], partial: Callable[[str], bool] | None = None
) -> Constraint:
    """Return a constraint: ``allowed`` must return True for each word. White space separates words.

    Args:
        allowed: called for each word that has ended.
        partial: returns whether the beginning of a word can become an allowed word; default: always. The
            sooner it returns False, the fewer texts end in a dead end.
    """
    return _Units(_split_words, allowed, partial)


def lines(
    allowed: Callable[[str], bool], partial: Callable[[str], bool] | None = None
) -> Constraint:
    """Return a constraint: ``allowed`` must return True for each line; see also `words`.

    ``allowed`` is called for empty lines too, but not for an empty end of the text.
    """
    return _Units(lambda text: text.split("\n"), allowed, partial)


def _split_words(text: str) -> list[str]:
    """Return the words of a text; the last one is "" if none has begun."""
    return [*text.split(), *([""] if not text or text[-1].isspace() else [])]


def check_constraint(constraint: ConstraintLike, texts: Sequence[str]) -> None:
    """Try a constraint with valid texts: it must allow each text and every beginning of it.

    Tokens can end anywhere, also inside a word. So, for example, a constraint that asks a spelling
    checker about an unfinished last word refuses everything. Each question is asked twice.

    Raises:
        ConfigError: it refuses a valid text or the beginning of one, its two answers differ, it raises an
            exception, or it returns neither True nor False.
    """
    asked = ConstraintCalls(constraint)
    for text in items("texts", texts):
        instance("a valid text", text, str)
        for end in range(len(text) + 1):
            _ask_twice(asked, text[:end], is_end=False)
        _ask_twice(asked, text, is_end=True)


def _ask_twice(asked: ConstraintCalls, text: str, *, is_end: bool) -> None:
    first, second = (asked.allows(text, is_end=is_end) for _ in range(2))
    method = "complete" if is_end else "prefix"
    if first != second:
        raise ConfigError(
            f"the constraint answers {first}, then {second}, to {method}({text[-60:]!r})",
            hint="it must be pure: its answer may depend only on the text",
        )
    if not first:
        raise ConfigError(
            f"the constraint refuses {text[-60:]!r}, which "
            + ("is a valid text" if is_end else "begins a valid text"),
            hint="prefix(text) may be False only if no valid text can start with it",
        )


def weighted_draw(
    source: Distribution,
    order: Iterator[int],
    allows: Callable[[int], bool],
    max_rejects: int = 64,
) -> tuple[int | None, float]:
    """Draw an allowed token by adaptive weighted rejection (Lipkin et al. 2025, 2504.05410).

    Tokens are tried in the order of a draw without replacement. The first allowed one is taken. The
    weight also depends on whether the next one is allowed. For every function f of a token the
    expectation of exp(log-weight) f(token) is the sum of p f over the allowed tokens, so the weight
    estimates their mass. Unlike the paper's geometric form no token is tried twice.

    Args:
        source: the distribution p.
        order: the indices of its tokens, in the order in which they are tried.
        allows: whether a token is allowed.
        max_rejects: the most tokens to try; if none of them is allowed, the weight is 0.

    Returns:
        the token and the log of its weight; (None, -inf) if no token that was tried is allowed.
    """
    probs, n = source.probs, len(source)
    weight, left = 0.0, 1.0
    for k, i in enumerate(order):
        token, p = int(source.ids[i]), float(probs[i])
        is_last = k + 1 in (n, max_rejects)
        if allows(token):
            if not is_last and not allows(int(source.ids[next(order)])):
                weight += math.log(p / left) if p > 0.0 else -math.inf
            return token, weight
        if is_last:
            break
        probs[i] = 0.0
        before = left
        left -= p
        if left < 0.01:  # the difference has few correct digits
            left = float(np.sum(probs))
        if left <= 0.0:
            break
        weight += math.log(left / before)
    return None, -math.inf
