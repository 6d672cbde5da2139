"""Drafters asked one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...branch import Branch
from ...errors import ConfigError
from ...model import Model
from ..length.base import DraftLength
from .base import Draft, Drafter, DraftState, propose

__all__ = ["ChainDrafter"]


class ChainDrafter:
    """Asks one drafter after another until one proposes: the cheap ones first, a model last.

    Lines that are not asked are told only what stands, so a model behind n-grams reads what it missed
    in one decode when it is asked.

    Args:
        drafters: at least one, in the order they are asked.

    Raises:
        ConfigError: no drafters.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ConfigError("a chain needs at least one drafter")
        self.drafters = tuple(drafters)

    @property
    def name(self) -> str:
        """The names of its drafters, joined by "+"."""
        return "+".join(drafter.name for drafter in self.drafters)

    @property
    def width(self) -> int:
        """The largest width of its drafters: above 1 trees may come, which need the seeded rule."""
        return max(int(getattr(drafter, "width", 1)) for drafter in self.drafters)

    def check(self, target: Model) -> None:
        """Raise VocabularyMismatchError if one of them cannot draft for ``target``."""
        for drafter in self.drafters:
            drafter.check(target)

    def line(self, target: Branch, rule: str) -> DraftState:
        """Return a new line; takes what each drafter's line takes."""
        return _ChainLine(
            _all_or_none([partial(drafter.line, target, rule) for drafter in self.drafters])
        )


class _ChainLine:
    def __init__(self, lines: Sequence[DraftState]) -> None:
        self._lines = lines

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Return the first proposal, with the time of those who were asked in vain added to it."""
        draft = Draft()
        for line in self._lines:
            seconds, n_decodes = draft.seconds, draft.n_decodes
            draft = propose(line, tokens, length, limit)
            draft.seconds += seconds
            draft.n_decodes += n_decodes
            if draft.tokens:
                break
        return draft

    def observe(self, n_tokens: int) -> None:
        for line in self._lines:
            line.observe(n_tokens)

    def fork(self, target: Branch) -> DraftState:
        return _ChainLine(_all_or_none([partial(line.fork, target) for line in self._lines]))

    def close(self) -> None:
        for line in self._lines:
            line.close()


def _all_or_none(makers: Sequence[Callable[[], DraftState]]) -> list[DraftState]:
    """Return what the makers make; where one fails, close what the others made."""
    lines: list[DraftState] = []
    try:
        for make in makers:
            lines.append(make())
    except BaseException:
        for line in lines:
            line.close()
        raise
    return lines
