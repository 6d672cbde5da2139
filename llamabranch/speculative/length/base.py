"""How many tokens to draft: the protocol, and the length that is always the same."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["DraftLength", "FixedLength", "RoundReport"]

_CATCH_UP = 8  # new tokens; a drafter asked in every round has one or two to read


class RoundReport(NamedTuple):
    """What one round of one stream cost and produced; a plain step is a round without a draft.

    Attributes:
        drafter: the name of the drafter that made the draft.
        asked: whether the drafter was asked at all.
        entropies: of the draft's distributions in nats, one for each step that was considered, drawn
            or not; NaN where the drafter does not tell.
        n_steps: draft steps that drew a token (of a tree, its levels).
        n_accepted: drafted tokens that were accepted.
        n_verified: this stream's tokens in the target's decode: the pending one and the draft.
        draft_s: seconds of drafting.
        verify_s: seconds of the target's decode; of a decode shared with others, a share of them.
        overhead_s: seconds of the rest: sampling, the acceptance rule, text, clean-up.
        n_read: tokens new to the drafter that it read before it drew.
        n_rounds: how many equal rounds this is. Plain steps are reported together with the median
            seconds of one, since a single step may be far too slow.
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
    n_rounds: int = 1

    @classmethod
    def plain(cls, n_rounds: int, verify_s: float, overhead_s: float) -> RoundReport:
        """Return a report of ``n_rounds`` steps for which no drafter was asked; seconds are medians."""
        return cls("", False, (), 0, 0, 1, 0.0, verify_s, overhead_s, n_rounds=n_rounds)

    @property
    def caught_up(self) -> bool:
        """True if the drafter also read a prompt, or what was generated during a long pause."""
        return self.n_read > _CATCH_UP


class DraftLength(Protocol):
    """How many tokens one stream drafts, decided before each of them is drawn.

    A stream has one of its own, made by ``stream()``, and is driven by one thread at a time. What they
    learn may be shared; then any number of threads may each drive their own.
    """

    limit: int  # the most tokens a draft may have
    reads_entropy: bool  # whether it decides or learns by entropies; else they may be NaN
    reason: str  # why ``goes_on`` last returned False: "length", "entropy" or "goodput"

    def stream(self, *, shares_decode: bool = False) -> DraftLength:
        """Return one for another stream, which shares what is learned.

        With ``shares_decode`` several streams are verified in one decode of the target, whose time
        ``learn_decode`` reports.
        """

    def plain_steps(self, n_behind: int) -> int:
        """Return how many plain steps come before the drafter is asked; 0 = ask it now.

        The drafter has ``n_behind`` tokens to read before it can draft.
        """

    def consider(self, drafter: str) -> bool:
        """Return whether the drafter of this name should propose; ``goes_on`` is then about it.

        A draft state calls this first of all; in a chain each calls it in turn.
        """

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return whether to draw another token after ``n_drafted``.

        It is to be drawn from a distribution of this ``entropy`` in nats; NaN = not known.
        """

    def learn(self, report: RoundReport) -> None:
        """Learn from a round, or from plain steps that are reported together."""

    def learn_decode(self, streams: Sequence[DraftLength], n_tokens: int, verify_s: float) -> None:
        """Learn what a decode took that ``streams`` shared, once all of them have learned the round.

        It had ``n_tokens`` and took ``verify_s`` seconds; NaN = it also read prompts, so its time is
        not comparable.
        """

    def explain(self) -> str:
        """Return what it does and why, in words and numbers."""


class FixedLength:
    """Always the same number of tokens, or fewer where the entropy is above a limit (nats)."""

    def __init__(self, k: int, entropy_stop: float | None = None) -> None:
        self.limit = k
        self.reads_entropy = entropy_stop is not None
        self.reason = "length"
        self._entropy_stop = entropy_stop

    def stream(self, *, shares_decode: bool = False) -> FixedLength:
        """Return a copy: nothing is learned."""
        return copy.copy(self)

    def plain_steps(self, n_behind: int) -> int:
        """Return 0, or some number if nothing is ever drafted."""
        return 0 if self.limit > 0 else 64

    def consider(self, drafter: str) -> bool:
        """Return True."""
        return True

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return True while below the number and the entropy limit."""
        is_unsure = self._entropy_stop is not None and entropy > self._entropy_stop
        self.reason = "entropy" if is_unsure else "length"
        return n_drafted < self.limit and not is_unsure

    def learn(self, report: RoundReport) -> None:
        """Do nothing: the length is fixed."""

    def learn_decode(self, streams: Sequence[DraftLength], n_tokens: int, verify_s: float) -> None:
        """Do nothing: the length is fixed."""

    def explain(self) -> str:
        """Return the number that was asked for."""
        if self.limit == 0:
            return "no drafts: the length is fixed at 0"
        stop = "" if self._entropy_stop is None else f", fewer above {self._entropy_stop:g} nats"
        return f"always {self.limit} tokens a draft{stop}: the length is fixed"
