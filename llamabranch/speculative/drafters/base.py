"""Who proposes tokens.

A *drafter* is shared by all requests; a *line* is one request's draft state. A line sees the tokens that
stand and proposes what may follow; it is told how much of that stood and forgets the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

from ...branch import Branch
from ...model import Model
from ...sampling import Distribution
from ..length.base import DraftLength

__all__ = ["NO_DRAFT", "Draft", "DraftState", "Drafter", "NullDrafter", "NullLine", "propose"]


@dataclass
class Draft:
    """What a line proposes, and which ``drafter`` it is from. Only ``tokens`` must be filled.

    ``sources[i]`` is what ``tokens[i]`` was really drawn from; left empty they are taken as certain.
    ``parents`` make it a tree: -1 = right after the text, None = a chain; every beginning of the list
    must be a tree too, so that it can be cut to what fits. ``entropies`` (nats) are
    those of the draft's own distributions, one for each step that was thought about, drawn or not;
    NaN where the length does not read them. A line that leaves them out has not asked the length how
    far to draft; then it is asked afterwards, without an entropy. ``n_read`` tokens were new to the
    drafter. ``seconds`` (measured if 0) and ``n_decodes`` are what it cost, ``stopped`` says why it is
    not longer: "length", "entropy", "goodput", "end", "capacity", "no evidence" or "off".
    """

    tokens: list[int] = field(default_factory=list)
    sources: list[Distribution] = field(default_factory=list)
    parents: list[int] | None = None
    entropies: list[float] = field(default_factory=list)
    n_read: int = 0
    seconds: float = 0.0
    n_decodes: int = 0
    stopped: str = "length"
    drafter: str = ""

    @property
    def n_steps(self) -> int:
        """How many tokens one after another it proposes: the tokens of a chain, a tree's levels."""
        return max(self.depths(), default=0)

    def cut(self, n: int) -> None:
        """Keep the first ``n`` tokens; a tree with one leaf left is a chain."""
        del self.tokens[n:], self.sources[n:]
        if self.parents is not None:
            chain = list(range(-1, len(self.tokens) - 1))
            self.parents = None if self.parents[:n] == chain else self.parents[:n]

    def depths(self) -> list[int]:
        """Return for each token the number of tokens from the text to it, itself included."""
        if self.parents is None:
            return list(range(1, len(self.tokens) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths


NO_DRAFT = Draft(stopped="off")  # of a drafter that was not asked


class DraftState(Protocol):
    """One request's draft state."""

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Return at most ``limit`` tokens that may follow ``tokens``.

        ``tokens`` begin with everything this line was told before. ``length`` is asked before each
        token is drawn, never after.
        """

    def observe(self, n_tokens: int) -> None:
        """Learn that exactly the first ``n_tokens`` of tokens and proposal stand."""

    def fork(self, target: Branch) -> DraftState:
        """Return a line in the same state that drafts for ``target``, a fork of its target."""

    def close(self) -> None:
        """Give back what the line holds."""


def propose(line: DraftState, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
    """Return what ``line`` proposes, its time measured and its length asked for if it did neither.

    What the length does not want is cut from the end: it decides by what earlier drafts yielded and
    never sees these tokens, so it is as lossless as not to have drawn them.
    """
    start = perf_counter()
    draft = line.propose(tokens, length, limit)
    if not draft.tokens or draft.entropies or not length.reads_entropy:
        return draft
    seconds = draft.seconds or perf_counter() - start
    parents = None if draft.parents is None else list(draft.parents)
    draft = replace(  # the line may keep what it returned
        draft, tokens=list(draft.tokens), sources=list(draft.sources), parents=parents,
        entropies=[], seconds=seconds,
    )  # fmt: skip
    if not length.consider(draft.drafter):
        draft.cut(0)
        draft.stopped = "off"
        return draft
    depths = draft.depths()
    for step in range(draft.n_steps):
        draft.entropies.append(math.nan)
        if not length.goes_on(step, math.nan):
            draft.stopped = length.reason
            draft.cut(next(i for i, depth in enumerate(depths) if depth > step))
            break
    return draft


class Drafter(Protocol):
    """Where lines come from."""

    @property
    def name(self) -> str:
        """What statistics call it."""

    def check(self, target: Model) -> None:
        """Raise VocabularyMismatchError if it cannot draft for ``target``."""

    def line(self, target: Branch, rule: str) -> DraftState:
        """Return a new line that drafts for ``target`` from where it stands.

        Under every rule but "seeded" what it draws must be independent of the target's draws.
        """


class NullDrafter:
    """Proposes nothing: plain decoding through the same loop."""

    name = "none"

    def check(self, target: Model) -> None:
        """Accept any target."""

    def line(self, target: Branch, rule: str) -> DraftState:
        """Return a line that never proposes."""
        return NullLine()


class NullLine:
    """Proposes nothing and holds nothing."""

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Return an empty draft."""
        return Draft()

    def observe(self, n_tokens: int) -> None:
        """Nothing to forget."""

    def fork(self, target: Branch) -> DraftState:
        """Return itself: it has no state."""
        return self

    def close(self) -> None:
        """Nothing to give back."""
