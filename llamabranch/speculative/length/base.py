"""How many tokens to draft: the protocol, and the length that is always the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

CATCH_UP = 8  # new tokens; a draft that follows another finds one or two

__all__ = ["DraftLength", "FixedLength", "RoundReport"]


class RoundReport(NamedTuple):
    """What a round cost and yielded; a plain step is a round without a draft.

    ``entropies`` (nats) are of the draft's distributions, one for each step that was thought about,
    NaN where the drafter does not tell;
    ``n_steps`` were drawn (of a tree, its levels) and ``n_accepted`` stood. ``n_verified`` tokens were in
    the target's decode. ``asked`` says whether the drafter was asked at all. Times in seconds: drafting,
    the target's decode, and ``overhead_s`` the rest: the rule, text, clean-up. Before it drew, the
    drafter read ``n_read`` tokens that were new to it.
    """

    drafter: str
    asked: bool
    entropies: Sequence[float]
    n_steps: int
    n_accepted: int
    n_verified: int
    draft_s: float
    verify_s: float
    overhead_s: float = 0.0
    n_read: int = 0

    @property
    def caught_up(self) -> bool:
        """True if the drafter also read a prompt, or what was said in a long pause."""
        return self.n_read > CATCH_UP


class DraftLength(Protocol):
    """Decides, before each drafted token is drawn, whether it is worth drawing.

    A draft is made in one thread; where a speculator is shared, others may be at theirs meanwhile.
    """

    limit: int  # the most tokens a draft may have
    reads_entropy: bool  # whether it decides or learns by entropies; else they may be NaN

    @property
    def reason(self) -> str:
        """Why ``goes_on`` last said no to this thread: "length", "entropy" or "goodput"."""

    def plain_steps(self, n_behind: int) -> int:
        """Return how many plain steps come before the drafter is asked; 0 = it is asked now.

        It has ``n_behind`` tokens to read first.
        """

    def consider(self, drafter: str) -> bool:
        """Return whether this drafter should propose; what follows is about it.

        Lines call it first of all; in a chain each in turn.
        """

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return whether to draw one more after ``n_drafted``, from a distribution of ``entropy``.

        NaN is an entropy that nobody knows.
        """

    def learn(self, report: RoundReport) -> None:
        """Take in a round."""

    def learn_plain(self, n: int, verify_s: float, overhead_s: float) -> None:
        """Take in ``n`` plain steps in which the drafter was not asked, and the seconds of most of them.

        Medians, since a single step may be far too slow.
        """

    def explain(self) -> str:
        """Return in words and numbers what it does and why."""


class _Reason(threading.local):
    reason = "length"


class FixedLength:
    """Always the same number, or fewer where the entropy is above a limit (nats)."""

    def __init__(self, k: int, entropy_stop: float | None = None) -> None:
        self.limit = k
        self._now = _Reason()
        self.reads_entropy = entropy_stop is not None
        self._entropy_stop = entropy_stop

    @property
    def reason(self) -> str:
        """Why ``goes_on`` last said no to this thread."""
        return self._now.reason

    def plain_steps(self, n_behind: int) -> int:
        """Return 0, or any number if none are drafted."""
        return 0 if self.limit > 0 else 64

    def consider(self, drafter: str) -> bool:
        """Return True."""
        return True

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return True while below the number and the entropy limit."""
        too_open = self._entropy_stop is not None and entropy > self._entropy_stop
        self._now.reason = "entropy" if too_open else "length"
        return n_drafted < self.limit and not too_open

    def learn(self, report: RoundReport) -> None:
        """Nothing to learn."""

    def learn_plain(self, n: int, verify_s: float, overhead_s: float) -> None:
        """Nothing to learn."""

    def explain(self) -> str:
        """Return what was asked for."""
        if self.limit == 0:
            return "no drafts: the length is fixed at 0"
        stop = "" if self._entropy_stop is None else f", fewer above {self._entropy_stop:g} nats"
        return f"always {self.limit} tokens a draft{stop}: the length is fixed"
