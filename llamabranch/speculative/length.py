"""How many tokens to draft."""

from __future__ import annotations

import bisect
import math
from typing import Protocol

from .config import SpeculativeConfig

__all__ = ["DraftLength", "FixedLength", "GoodputLength", "draft_length"]


class DraftLength(Protocol):
    """Decides before each drafted token is drawn whether it is worth drawing."""

    @property
    def limit(self) -> int:
        """The most tokens a draft may have."""

    def wants_draft(self, n_behind: int) -> bool:
        """Return whether to draft at all, when the drafter has to read ``n_behind`` tokens first."""

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return whether to draw one more after ``n_drafted``, from a distribution of ``entropy``."""

    def learn_round(
        self, entropies: list[float], n_drafted: int, n_accepted: int,
        draft_s: float, verify_s: float,
    ) -> None:  # fmt: skip
        """Take in a round: what it cost, and what of the draft stood."""

    def learn_plain(self, seconds: float) -> None:
        """Take in what a plain step of the target cost."""


class FixedLength:
    """Always the same number, or fewer where the entropy is above a limit (nats)."""

    def __init__(self, k: int, entropy_stop: float | None = None) -> None:
        self.limit = k
        self._entropy_stop = entropy_stop

    def wants_draft(self, n_behind: int) -> bool:
        """Return True unless the number is zero."""
        return self.limit > 0

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return True while below the number and the entropy limit."""
        return n_drafted < self.limit and (
            self._entropy_stop is None or entropy <= self._entropy_stop
        )

    def learn_round(
        self, entropies: list[float], n_drafted: int, n_accepted: int,
        draft_s: float, verify_s: float,
    ) -> None:  # fmt: skip
        """Nothing to learn."""

    def learn_plain(self, seconds: float) -> None:
        """Nothing to learn."""


class GoodputLength:
    """As many tokens as pay: the length with the most expected tokens a second.

    A draft of k tokens is expected to yield E_k = 1 + sum_{j<=k} prod_{i<=j} b_i tokens in
    k c + t(k + 1) seconds, where b_i is the learned chance that a token drawn at this entropy stands,
    c the time of a draft step and t(n) the target's time for n tokens in one decode. Everything is
    measured while it runs. Where no k beats k = 0 it drafts nothing, and tries again when a trial
    would cost under one percent of the time that has passed since the last one.
    """

    EDGES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)  # nats
    MARGIN = 1.02  # a gain below this is noise
    WARM_UP_PLAIN, WARM_UP_DRAFTS, WARM_UP_K = 4, 4, 3
    REFRESH = 64  # rounds after which a plain step measures t(1) again
    TRIAL_SHARE = 0.01

    def __init__(self, limit: int, entropy_stop: float | None = None) -> None:
        self.limit = limit
        self._entropy_stop = entropy_stop
        self._tried = [2.0] * (len(self.EDGES) + 1)  # a prior of one success in two
        self._stood = [1.0] * (len(self.EDGES) + 1)
        self._seen = [0.0] * (len(self.EDGES) + 1)
        self._target_s: dict[int, float] = {}
        self._step_s = 0.0
        self._n_plain = self._n_drafts = self._since_plain = 0
        self._plain_since_trial_s = math.inf
        self._trial = False
        self._reach = self._expected = 1.0

    # -- what is known -----------------------------------------------------------------------------

    def step_cost(self) -> float:
        """Return c: a draft step's time over a plain target step's, nan before it is measured."""
        return self._step_s / self._target_s[1] if 1 in self._target_s else math.nan

    def verify_cost(self, n: int) -> float:
        """Return v(n): the target's time for n tokens over its time for one, interpolated."""
        return self._time(n) / self._target_s[1] if 1 in self._target_s else math.nan

    def _time(self, n: int) -> float:
        known = sorted(self._target_s)
        below = [m for m in known if m <= n]
        above = [m for m in known if m >= n]
        if below and above:
            low, high = below[-1], above[0]
            share = 0.0 if low == high else (n - low) / (high - low)
            return self._target_s[low] * (1 - share) + self._target_s[high] * share
        if not below:
            return self._target_s[above[0]]
        last = below[-1]
        slope = self._target_s[last] / max(last, 8)  # unknown territory: assume it costs something
        if len(below) > 1:
            slope = (self._target_s[last] - self._target_s[below[-2]]) / (last - below[-2])
        return self._target_s[last] + max(slope, 0.0) * (n - last)

    def _chance(self, entropy: float) -> float:
        bucket = bisect.bisect(self.EDGES, entropy)
        return self._stood[bucket] / self._tried[bucket]

    def _mean_chance(self) -> float:
        seen = sum(self._seen)
        if seen == 0:
            return 0.5
        chances = [stood / tried for stood, tried in zip(self._stood, self._tried, strict=True)]
        return sum(w * b for w, b in zip(self._seen, chances, strict=True)) / seen

    def _rate(self, k: int, expected: float) -> float:
        return expected / (k * self._step_s + self._time(k + 1))

    def _best_ahead(self, k: int, reach: float, expected: float, chance: float) -> float:
        """Return the best rate of any length above ``k``; ``chance`` is that of the next token."""
        best = 0.0
        mean = self._mean_chance()
        for longer in range(k + 1, self.limit + 1):
            reach *= chance
            expected += reach
            chance = mean
            best = max(best, self._rate(longer, expected))
        return best

    # -- decisions ---------------------------------------------------------------------------------

    @property
    def pays(self) -> bool:
        """True if drafting is expected to be faster than plain decoding."""
        if self._n_drafts < self.WARM_UP_DRAFTS or 1 not in self._target_s:
            return True
        ahead = self._best_ahead(0, 1.0, 1.0, self._mean_chance())
        return ahead > self.MARGIN * self._rate(0, 1.0)

    def wants_draft(self, n_behind: int) -> bool:
        """Return whether to draft at all, when the drafter has to read ``n_behind`` tokens first."""
        self._trial = False
        if self._n_plain < self.WARM_UP_PLAIN:
            return False
        if self._n_drafts < self.WARM_UP_DRAFTS:
            return True
        if self.pays:
            self._since_plain += 1
            if self._since_plain > self.REFRESH:
                self._since_plain = 0
                return False
            return True
        # Reading what was missed costs about a third of a step a token on the machines measured.
        cost = self._step_s * (1 + n_behind / 3) + self._time(2) - self._time(1)
        self._trial = cost < self.TRIAL_SHARE * self._plain_since_trial_s
        return self._trial

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return whether to draw one more after ``n_drafted``, from a distribution of ``entropy``."""
        if n_drafted == 0:
            self._reach = self._expected = 1.0
        if n_drafted >= self.limit:
            return False
        if self._entropy_stop is not None and entropy > self._entropy_stop:
            return False
        if self._n_drafts < self.WARM_UP_DRAFTS:
            return n_drafted < self.WARM_UP_K
        chance = self._chance(entropy)
        if not (self._trial and n_drafted == 0):
            ahead = self._best_ahead(n_drafted, self._reach, self._expected, chance)
            if ahead <= self._rate(n_drafted, self._expected):
                return False
        self._reach *= chance
        self._expected += self._reach
        return True

    # -- learning ----------------------------------------------------------------------------------

    def learn_round(
        self, entropies: list[float], n_drafted: int, n_accepted: int,
        draft_s: float, verify_s: float,
    ) -> None:  # fmt: skip
        """Take in a round: what it cost, and what of the draft stood."""
        self._n_drafts += 1
        self._plain_since_trial_s = 0.0
        for bucket in (bisect.bisect(self.EDGES, e) for e in entropies):
            self._seen[bucket] = 0.995 * self._seen[bucket] + 1.0
        for i in range(min(n_drafted, n_accepted + 1)):  # the tokens that were put to the test
            bucket = bisect.bisect(self.EDGES, entropies[i])
            self._tried[bucket] = 0.99 * self._tried[bucket] + 1.0
            self._stood[bucket] = 0.99 * self._stood[bucket] + (i < n_accepted)
        if n_drafted:
            self._step_s = _smooth(self._step_s, draft_s / n_drafted)
        self._learn_time(n_drafted + 1, verify_s)

    def learn_plain(self, seconds: float) -> None:
        """Take in what a plain step of the target cost."""
        self._n_plain += 1
        self._plain_since_trial_s += seconds
        if self._n_plain > 1:  # the first one warms caches up
            self._learn_time(1, seconds)

    def _learn_time(self, n: int, seconds: float) -> None:
        self._target_s[n] = _smooth(self._target_s.get(n, 0.0), seconds)


def _smooth(old: float, new: float) -> float:
    """Follow ``new`` slowly; a single slow outlier moves little."""
    if old == 0.0:
        return new
    return old + 0.1 * (min(new, 2.0 * old) - old)


def draft_length(config: SpeculativeConfig) -> DraftLength:
    """Return the controller a configuration asks for."""
    if isinstance(config.draft_k, int):
        return FixedLength(config.draft_k, config.entropy_stop)
    return GoodputLength(config.max_draft_tokens, config.entropy_stop)
