"""How many tokens to draft: the protocol, and the length that is always the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["DraftLength", "FixedLength", "RoundReport"]


class RoundReport(NamedTuple):
    """What a round cost and yielded; a plain step is a round without a draft.

    ``entropies`` (nats) are of the draft's distributions, one for each step that was thought about;
    ``n_steps`` were drawn (of a tree, its levels) and ``n_accepted`` stood. ``n_verified`` tokens were in
    the target's decode. ``asked`` says whether the drafter was asked at all. Times in seconds.
    """

    drafter: str
    asked: bool
    entropies: Sequence[float]
    n_steps: int
    n_accepted: int
    n_verified: int
    draft_s: float
    verify_s: float


class DraftLength(Protocol):
    """Decides, before each drafted token is drawn, whether it is worth drawing."""

    limit: int  # the most tokens a draft may have
    reason: str  # why ``goes_on`` last said no: "length", "entropy" or "goodput"
    reads_entropy: bool  # whether it decides or learns by entropies; else they may be NaN

    def wants_draft(self, n_behind: int) -> bool:
        """Return whether to ask the drafter at all; it has ``n_behind`` tokens to read first."""

    def consider(self, drafter: str) -> bool:
        """Return whether this drafter should propose; what follows is about it.

        Lines call it first of all; in a chain each in turn.
        """

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return whether to draw one more after ``n_drafted``, from a distribution of ``entropy``."""

    def learn(self, report: RoundReport) -> None:
        """Take in a round."""

    def explain(self) -> str:
        """Return in words and numbers what it does and why."""


class FixedLength:
    """Always the same number, or fewer where the entropy is above a limit (nats)."""

    def __init__(self, k: int, entropy_stop: float | None = None) -> None:
        self.limit = k
        self.reason = "length"
        self.reads_entropy = entropy_stop is not None
        self._entropy_stop = entropy_stop

    def wants_draft(self, n_behind: int) -> bool:
        """Return True unless the number is zero."""
        return self.limit > 0

    def consider(self, drafter: str) -> bool:
        """Return True."""
        return True

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return True while below the number and the entropy limit."""
        too_open = self._entropy_stop is not None and entropy > self._entropy_stop
        self.reason = "entropy" if too_open else "length"
        return n_drafted < self.limit and not too_open

    def learn(self, report: RoundReport) -> None:
        """Nothing to learn."""

    def explain(self) -> str:
        """Return what was asked for."""
        if self.limit == 0:
            return "no drafts: the length is fixed at 0"
        stop = "" if self._entropy_stop is None else f", fewer above {self._entropy_stop:g} nats"
        return f"always {self.limit} tokens a draft{stop}: the length is fixed"
