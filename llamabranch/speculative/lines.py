"""Which draft line goes with which branch: the drafter's side of forks, rewinds and prunes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ..branch import Branch
from ..cells import n_common
from ..errors import CapacityError
from ..sampling import SamplingParams
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
        self._kept: weakref.WeakKeyDictionary[Branch, _Kept] = weakref.WeakKeyDictionary()
        self._idle: DraftLine | None = None  # stands in while there is no room for a line

    def take(self, branch: Branch, rule: str) -> DraftLine:
        """Return the line that drafts for ``branch`` from where it stands."""
        self._close_pruned()
        found = self._kept.get(branch)
        if found is not None and found.fits(branch, rule) and found.draws_like(branch):
            del self._kept[branch]
            found.line.observe(n_common(found.tokens, branch.tokens))
            return found.line
        while True:
            try:
                line = self._make(branch, rule)
                self.forget(branch)
                return line
            except CapacityError:
                if not self._kept:  # no room to draft is no reason to stop
                    self._idle = self._idle or NullDrafter().line(branch, rule)
                    return self._idle
                oldest = next(iter(self._kept))
                self._kept.pop(oldest).line.close()

    def _make(self, branch: Branch, rule: str) -> DraftLine:
        relative: Branch | None = branch  # reseeded or steered, it takes a fork of its own line
        while relative is not None:
            found = self._kept.get(relative)
            if found is not None and found.fits(branch, rule):
                line = found.line.fork(branch)
                line.observe(n_common(found.tokens, branch.tokens))
                return line
            relative = relative.parent
        return self._drafter.line(branch, rule)

    def give_back(self, branch: Branch, line: DraftLine, rule: str, *, keep: bool) -> None:
        """Keep ``line`` for the next time ``branch`` goes on, or close it."""
        if line is self._idle:
            return
        if keep and branch.state != "pruned" and not branch.ctx.closed:
            self._kept[branch] = _Kept(
                line, rule, branch.n_prompt, branch.seed, branch.sampling, branch.tokens
            )
        else:
            line.close()

    def forget(self, branch: Branch) -> None:
        """Close the line of ``branch`` if one is kept."""
        found = self._kept.pop(branch, None)
        if found is not None:
            found.line.close()

    def _close_pruned(self) -> None:
        for branch in [b for b in self._kept if b.state == "pruned"]:
            self._kept.pop(branch).line.close()


@dataclass(frozen=True)
class _Kept:
    """A line, and what it was told of its branch."""

    line: DraftLine
    rule: str
    n_prompt: int
    seed: int
    sampling: SamplingParams
    tokens: Sequence[int]

    def fits(self, branch: Branch, rule: str) -> bool:
        """Return whether the line may serve ``branch``: a prompt cut short is another prompt."""
        return self.rule == rule and self.n_prompt == branch.n_prompt

    def draws_like(self, branch: Branch) -> bool:
        """Return whether the line still drafts with the seed and the settings of ``branch``."""
        return self.seed == branch.seed and self.sampling == branch.sampling
