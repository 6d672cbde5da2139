"""How many tokens to draft: the interface of a draft length, and a fixed length."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .stop_rule import StopRule

__all__ = ["DraftLength", "FixedLength", "RoundReport"]

_CATCH_UP = 8  # new tokens; a drafter that is called in every round has one or two to decode


class RoundReport(NamedTuple):
    """The costs and results of one round of one stream; a plain step is a round without a draft.

    Attributes:
        drafter: the name of the drafter that made the draft.
        drafter_called: whether the drafter was called.
        entropies: of the draft's distributions in nats, one for each step that was considered, drawn
            or not; NaN where the drafter gives none.
        n_steps: draft steps that drew a token (in a tree, its levels).
        n_accepted: drafted tokens that were accepted.
        n_verified: this stream's tokens in the target's decode: the pending one and the draft.
        draft_s: seconds of drafting.
        verify_s: seconds of the target's decode; if other streams shared it, this stream's share.
        overhead_s: seconds of the rest: sampling, the acceptance rule, text, clean-up.
        n_read: tokens new to the drafter, which it processed before it drew.
        followed: whether the token after a draft that was accepted whole is the one that was next and not
            drafted; None = not known.
        n_rows: rows of that decode, if no other stream shared it; 0 = ``n_verified``.
        n_rounds: the number of equal rounds reported here. Plain steps are reported together, with the
            median seconds of one, since a single slow step would mislead.
    """

    drafter: str
    drafter_called: bool
    entropies: Sequence[float]
    n_steps: int
    n_accepted: int
    n_verified: int
    draft_s: float
    verify_s: float
    overhead_s: float = 0.0
    n_read: int = 0
    n_rounds: int = 1
    n_rows: int = 0
    followed: bool | None = None

    @classmethod
    def plain(cls, n_rounds: int, verify_s: float, overhead_s: float) -> RoundReport:
        """Return a report of ``n_rounds`` steps in which no drafter was called; seconds are medians."""
        return cls("", False, (), 0, 0, 1, 0.0, verify_s, overhead_s, n_rounds=n_rounds)

    @property
    def n_looks(self) -> int:
        """Steps of the drafter: with entropies also the one whose token was not drawn."""
        return max(self.n_steps, sum(not math.isnan(entropy) for entropy in self.entropies))

    @property
    def caught_up(self) -> bool:
        """True if the drafter also processed a prompt, or the tokens generated during a long pause."""
        return self.n_read > _CATCH_UP


class DraftLength(Protocol):
    """How many tokens one stream drafts, decided before each of them is drawn.

    Each stream has its own, made by ``stream()`` and used by one thread at a time. These may share what
    they learn; then any number of threads may each use one.
    """

    limit: int  # the most tokens a draft may have
    reads_entropy: bool  # whether it decides or learns by entropies; else they may be NaN
    reason: str  # why ``goes_on`` last returned False: "length", "entropy" or "goodput"

    def stream(self, *, shares_decode: bool = False) -> DraftLength:
        """Return one for another stream, which shares what is learned.

        With ``shares_decode`` several streams are verified in one decode of the target, whose time is
        reported by ``learn_decode``.
        """

    def plain_steps(self, n_behind: int) -> int:
        """Return how many plain steps to take before the drafter is called; 0 = call it now.

        The drafter has ``n_behind`` new tokens to process before it can draft.
        """

    def consider(self, drafter: str) -> bool:
        """Return whether the drafter of this name should draft; later ``goes_on`` calls are about it.

        A draft state calls this before it does anything else; in a chain each state calls it in turn.
        """

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return whether to draw another token after ``n_drafted``.

        ``entropy`` in nats is that of the distribution it would be drawn from; NaN = not known.
        """

    def stop_rule(self, n_drafted: int) -> StopRule | None:
        """Return what ``goes_on`` decides by, as numbers, for a draft that has ``n_drafted`` tokens.

        The compiled loop asks these instead, and where it ends a draft, that is the end. None where
        ``limit`` alone decides.
        """

    def learn(self, report: RoundReport) -> None:
        """Learn from a round, or from plain steps that are reported together."""

    def learn_decode(self, streams: Sequence[DraftLength], n_tokens: int, verify_s: float) -> None:
        """Learn the time of a decode that ``streams`` shared, after ``learn`` was called for each.

        It had ``n_tokens`` and took ``verify_s`` seconds; NaN = it also prefilled prompts, so its time
        is not comparable.
        """

    def explain(self) -> str:
        """Return a description of what it does, with the numbers behind it."""


class FixedLength:
    """Always ``k`` tokens, or fewer where the entropy is above ``entropy_stop`` (nats)."""

    def __init__(self, k: int, entropy_stop: float | None = None) -> None:
        self.limit = k
        self.reads_entropy = entropy_stop is not None
        self.reason = "length"
        self._entropy_stop = entropy_stop
        self._rule = None if entropy_stop is None else StopRule(entropy_stop)

    def stream(self, *, shares_decode: bool = False) -> FixedLength:
        """Return a copy: nothing is learned."""
        return copy.copy(self)

    def plain_steps(self, n_behind: int) -> int:
        """Return 0; if the length is 0, an arbitrary number of steps after which to ask again."""
        return 0 if self.limit > 0 else 64

    def consider(self, drafter: str) -> bool:
        """Return True."""
        return True

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return True below the fixed number and the entropy limit."""
        is_unsure = self._entropy_stop is not None and entropy > self._entropy_stop
        self.reason = "entropy" if is_unsure else "length"
        return n_drafted < self.limit and not is_unsure

    def stop_rule(self, n_drafted: int) -> StopRule | None:
        """Return the entropy limit, None without one."""
        return self._rule

    def learn(self, report: RoundReport) -> None:
        """Do nothing: the length is fixed."""

    def learn_decode(self, streams: Sequence[DraftLength], n_tokens: int, verify_s: float) -> None:
        """Do nothing: the length is fixed."""

    def explain(self) -> str:
        """Return the fixed number and the entropy limit."""
        if self.limit == 0:
            return "no drafts: the length is fixed at 0"
        stop = "" if self._entropy_stop is None else f", fewer above {self._entropy_stop:g} nats"
        return f"always {self.limit} tokens a draft{stop}: the length is fixed"
