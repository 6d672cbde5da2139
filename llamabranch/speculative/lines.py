"""Which draft line goes with which branch: the drafter's side of forks, rewinds and prunes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from ..branch import Branch
from ..errors import CapacityError
from .drafters import Drafter, DraftLine, NullDrafter

__all__ = ["LineBook"]


class LineBook:
    """Keeps the lines of branches that may go on, so that nothing is read twice.

    A branch without a line gets a fork of its nearest ancestor's, or a new one. A line is told by
    ``observe`` how much of what it knows still holds for its branch. When the drafter's context runs out
    of sequences, the lines that have waited longest are closed.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._kept: weakref.WeakKeyDictionary[Branch, tuple[DraftLine, str, list[int]]] = (
            weakref.WeakKeyDictionary()
        )

    def take(self, branch: Branch, rule: str) -> DraftLine:
        """Return the line that drafts for ``branch`` from where it stands."""
        self._close_pruned()
        found = self._kept.pop(branch, None)
        if found is not None:
            line, used_rule, known = found
            if used_rule == rule:
                line.observe(_common(known, branch.tokens))
                return line
            line.close()
        while True:
            try:
                return self._make(branch, rule)
            except CapacityError:
                if not self._kept:  # no room to draft is no reason to stop
                    return NullDrafter().line(branch, rule)
                oldest = next(iter(self._kept))
                self._kept.pop(oldest)[0].close()

    def _make(self, branch: Branch, rule: str) -> DraftLine:
        ancestor = branch.parent
        while ancestor is not None:
            found = self._kept.get(ancestor)
            if found is not None and found[1] == rule:
                line = found[0].fork(branch)
                line.observe(_common(found[2], branch.tokens))
                return line
            ancestor = ancestor.parent
        return self._drafter.line(branch, rule)

    def give_back(self, branch: Branch, line: DraftLine, rule: str, *, keep: bool) -> None:
        """Keep ``line`` for the next time ``branch`` goes on, or close it."""
        if keep and branch.state != "pruned" and not branch.ctx.closed:
            self._kept[branch] = (line, rule, branch.tokens)
        else:
            line.close()

    def forget(self, branch: Branch) -> None:
        """Close the line of ``branch`` if one is kept."""
        found = self._kept.pop(branch, None)
        if found is not None:
            found[0].close()

    def _close_pruned(self) -> None:
        for branch in [b for b in self._kept if b.state == "pruned"]:
            self._kept.pop(branch)[0].close()


def _common(known: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many tokens the two begin with alike."""
    for i, (a, b) in enumerate(zip(known, tokens, strict=False)):
        if a != b:
            return i
    return min(len(known), len(tokens))
