"""Who proposes tokens.

A *drafter* is shared by all requests; a *draft state* belongs to one of them. It sees the tokens of the
text and proposes what may follow; it is told how much of that was accepted and forgets the rest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple, Protocol

from ...branch import Branch
from ...model import Model
from ...sampling import Distribution
from ..length.base import DraftLength

__all__ = [
    "NO_DRAFT",
    "Draft",
    "DraftRequest",
    "DraftState",
    "Drafter",
    "NullDrafter",
    "NullState",
    "propose",
]


@dataclass
class Draft:
    """What a state proposes, and which ``drafter`` it is from. Only ``tokens`` must be filled.

    ``sources[i]`` is what ``tokens[i]`` was really drawn from; left empty they are taken as certain.
    ``parents`` make it a tree: -1 = right after the text, None = a chain; every beginning of the list
    must be a tree too, so that it can be cut to what fits. ``entropies`` (nats) are
    those of the draft's own distributions, one for each step that was thought about, drawn or not;
    NaN where the length does not read them. A state that leaves them out has not asked the length how
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

        ``tokens`` begin with everything this state was told before. ``length`` is asked before each
        token is drawn, never after.
        """

    def observe(self, n_tokens: int) -> None:
        """Learn that just the first ``n_tokens`` of text and proposal were accepted; forget the rest."""

    def fork(self, target: Branch) -> DraftState:
        """Return a state in the same state that drafts for ``target``, a fork of its target."""

    def close(self) -> None:
        """Give back what the state holds."""


def propose(state: DraftState, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
    """Return what ``state`` proposes, its time measured and its length asked for if it did neither.

    What the length does not want is cut from the end: it decides by what earlier drafts yielded and
    never sees these tokens, so it is as lossless as not to have drawn them.
    """
    start = perf_counter()
    draft = state.propose(tokens, length, limit)
    if not draft.tokens or draft.entropies or not length.reads_entropy:
        return draft
    seconds = draft.seconds or perf_counter() - start
    parents = None if draft.parents is None else list(draft.parents)
    draft = replace(  # the state may keep what it returned
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


class DraftRequest(NamedTuple):
    """A stream that wants a draft: its state, the tokens to continue, who decides how far, the limit."""

    state: DraftState
    tokens: list[int]
    length: DraftLength
    limit: int


class Drafter(ABC):
    """Where draft states come from; a drafter of one's own is a subclass.

    Attributes:
        width: candidates a node; above 1 it proposes trees, which need the seeded rule.
    """

    @property
    def width(self) -> int:
        """Candidates a node; above 1 it proposes trees."""
        return 1

    @property
    @abstractmethod
    def name(self) -> str:
        """What statistics call it."""

    @abstractmethod
    def check(self, target: Model) -> None:
        """Raise VocabularyMismatchError if it cannot draft for ``target``."""

    @abstractmethod
    def start(self, target: Branch, rule: str) -> DraftState:
        """Return a new state that drafts for ``target`` from where it is.

        Under every rule but "seeded" what it draws must be independent of the target's draws.
        """

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return a draft for each request, made by states of this drafter; default: one by one.

        A drafter overrides it to share work, such as one decode of a draft model for all.
        """
        return [propose(*request) for request in requests]


class NullDrafter(Drafter):
    """Proposes nothing: plain decoding through the same loop."""

    @property
    def name(self) -> str:
        """ "none"."""
        return "none"

    def check(self, target: Model) -> None:
        """Accept any target."""

    def start(self, target: Branch, rule: str) -> DraftState:
        """Return a state that never proposes."""
        return NullState()


class NullState:
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
