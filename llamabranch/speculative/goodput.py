"""As many drafted tokens as pay, and none where none do."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .config import SpeculativeConfig
from .length import DraftLength, FixedLength, RoundReport

__all__ = ["GoodputLength", "Profile", "draft_length", "interpolate", "smooth"]

_EDGES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)  # nats
_N_BUCKETS = len(_EDGES) + 1


@dataclass
class Profile:
    """What is known of one drafter: how often its tokens stand, by entropy, and what they cost."""

    tried: list[float] = field(default_factory=lambda: [1.0] * _N_BUCKETS)
    stood: list[float] = field(default_factory=lambda: [0.5] * _N_BUCKETS)  # prior: one in two
    seen: list[float] = field(default_factory=lambda: [0.0] * _N_BUCKETS)
    step_s: float = 0.0
    n_drafts: int = 0
    # Whether it is asked, and what the rounds in which it was asked yielded.
    on: bool = True
    trial: bool = False
    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0
    pause: int = 0
    paused: int = 0
    paused_s: float = 0.0
    asked_in_vain: int = 0

    def chance(self, entropy: float) -> float:
        bucket = bisect.bisect(_EDGES, entropy)
        return self.stood[bucket] / self.tried[bucket]

    @property
    def mean_chance(self) -> float:
        seen = sum(self.seen)
        if seen == 0:
            return 0.5
        return (
            sum(w * s / t for w, s, t in zip(self.seen, self.stood, self.tried, strict=True)) / seen
        )

    def learn(self, report: RoundReport) -> None:
        self.n_drafts += 1
        buckets = [bisect.bisect(_EDGES, entropy) for entropy in report.entropies]
        for bucket in buckets:
            self.seen[bucket] = 0.995 * self.seen[bucket] + 1.0
        tested = min(report.n_steps, report.n_accepted + 1)
        for i, bucket in enumerate(buckets[:tested]):
            self.tried[bucket] = 0.99 * self.tried[bucket] + 1.0
            self.stood[bucket] = 0.99 * self.stood[bucket] + (i < report.n_accepted)
        if report.n_steps:
            self.step_s = smooth(self.step_s, report.draft_s / report.n_steps)

    def rest(self, pause: int) -> None:
        """Ask it no more for ``pause`` rounds."""
        self.pause, self.paused, self.paused_s, self.asked_in_vain = pause, 0, 0.0, 0

    def switch(self, *, on: bool, pause: int) -> None:
        """Ask it every round from now on, or rest."""
        self.on = on
        self.tokens = self.seconds = self.rounds = 0.0
        self.rest(pause)


class GoodputLength:
    """The length with the most expected tokens a second, learned while it runs.

    A draft of k tokens is expected to yield E_k = 1 + sum_{j<=k} prod_{i<=j} b_i tokens in
    k c + t(k + 1) seconds: b_i is the learned chance that a token drawn at this entropy stands, c the
    time of a draft step, t(n) the target's time for n tokens in one decode. A draft goes on while some
    longer one has a better rate than stopping.

    Whether to draft at all is decided by what came of it, for each drafter of a chain by itself: while
    it is asked, tokens and seconds of its rounds are added up, and where plain steps are faster it is
    switched off. It is tried again after ever longer pauses, and only when the trial would cost
    little of the time since the last.
    """

    WARM_UP_PLAIN, WARM_UP_DRAFTS, WARM_UP_K = 3, 4, 3
    JUDGED_ROUNDS = 12  # how many rounds the sums of the on-off switch look back, about
    REFRESH = 64  # rounds after which a plain step measures t(1) again
    PAUSE, LONGEST_PAUSE = 48, 1024  # plain steps between trials
    TRIAL_SHARE = 0.02  # of the time since the last trial
    LOOK_EVERY = 8  # plain steps between questions whether a trial is due
    VAIN_ASKS = 8  # how often a drafter with nothing to propose is asked in a trial
    SLACK = 0.98  # of the plain rate: asking costs something, and times are noisy
    reads_entropy = True

    def __init__(self, limit: int, entropy_stop: float | None = None, width: int = 1) -> None:
        self.limit = limit
        self.reason = "length"
        self._entropy_stop = entropy_stop
        self._width = width
        self._profiles: dict[str, Profile] = {}
        self._profile = Profile()
        self._target_s: dict[int, float] = {}
        self._costs: list[float] = []  # seconds of a round with k tokens; made anew when stale
        self._n_plain = self._n_drafts = self._since_plain = 0
        self._n_behind = 0
        self._reach = self._expected = 1.0

    # -- what is known -----------------------------------------------------------------------------

    def step_cost(self) -> float:
        """Return c: a draft step's time over a plain target step's, nan before it is measured."""
        return self._profile.step_s / self._target_s[1] if 1 in self._target_s else math.nan

    def verify_cost(self, n: int) -> float:
        """Return v(n): the target's time for n tokens over its time for one, interpolated."""
        return self._time(n) / self._target_s[1] if 1 in self._target_s else math.nan

    def _time(self, n: int) -> float:
        return interpolate(self._target_s, n)

    def _round_costs(self) -> list[float]:
        if not self._costs:
            step_s, width = self._profile.step_s, self._width
            self._costs = [k * step_s + self._time(1 + k * width) for k in range(self.limit + 1)]
        return self._costs

    def _best_ahead(self, k: int, chance: float) -> float:
        """Return the best rate of any length above ``k``; ``chance`` is that of the next token."""
        costs, mean = self._round_costs(), self._profile.mean_chance
        reach, expected, best = self._reach, self._expected, 0.0
        for longer in range(k + 1, self.limit + 1):
            reach *= chance
            expected += reach
            chance = mean
            rate = expected / costs[longer]
            if rate > best:
                best = rate
            elif reach < 0.05:
                break
        return best

    def best(self) -> tuple[int, float]:
        """Return the length with the best expected rate at the mean chance, and its speedup."""
        costs, chance = self._round_costs(), self._profile.mean_chance
        rates, expected, reach = [1.0 / costs[0]], 1.0, 1.0
        for cost in costs[1:]:
            reach *= chance
            expected += reach
            rates.append(expected / cost)
        k = max(range(len(rates)), key=rates.__getitem__)
        return k, rates[k] / rates[0]

    @property
    def is_on(self) -> bool:
        """True while a drafter is asked every round."""
        return not self._profiles or any(profile.on for profile in self._profiles.values())

    # -- decisions ---------------------------------------------------------------------------------

    def wants_draft(self, n_behind: int) -> bool:
        """Return whether to ask the drafter at all; it has ``n_behind`` tokens to read first."""
        if self._n_plain < self.WARM_UP_PLAIN:
            return False
        self._n_behind = n_behind
        if self.is_on:
            self._since_plain += 1
            if self._since_plain > self.REFRESH:
                self._since_plain = 0
                return False
            return True
        return any(self._is_due(profile) for profile in self._profiles.values())

    def _is_due(self, profile: Profile) -> bool:
        """Return whether a drafter that is off should be tried again."""
        if profile.paused < profile.pause or profile.paused % self.LOOK_EVERY:
            return False
        # Reading many tokens at once costs about a fifth of a step for each.
        cost = profile.step_s * (1 + self._n_behind / 5) + self._time(2) - self._time(1)
        return cost < self.TRIAL_SHARE * profile.paused_s

    def consider(self, drafter: str) -> bool:
        """Return whether this drafter should propose; what follows is about it."""
        profile = self._profiles.setdefault(drafter, Profile())
        if profile is not self._profile:
            self._profile, self._costs = profile, []
        profile.trial = not profile.on and self._is_due(profile)
        return profile.on or profile.trial

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return whether to draw one more after ``n_drafted``, from a distribution of ``entropy``."""
        if n_drafted == 0:
            self._reach = self._expected = 1.0
        self.reason = "length"
        if n_drafted >= self.limit:
            return False
        if self._entropy_stop is not None and entropy > self._entropy_stop:
            self.reason = "entropy"
            return False
        self.reason = "goodput"
        profile = self._profile
        if profile.n_drafts < self.WARM_UP_DRAFTS:
            return n_drafted < self.WARM_UP_K
        chance = profile.chance(entropy)
        if not (profile.trial and n_drafted == 0):
            stop_here = self._expected / self._round_costs()[n_drafted]
            if self._best_ahead(n_drafted, chance) <= stop_here:
                return False
        self._reach *= chance
        self._expected += self._reach
        return True

    # -- learning ----------------------------------------------------------------------------------

    def learn(self, report: RoundReport) -> None:
        """Take in a round."""
        n = report.n_verified
        self._target_s[n] = smooth(self._target_s.get(n, 0.0), report.verify_s)
        self._costs = []
        reported = self._profiles.get(report.drafter) if report.asked else None
        for profile in self._profiles.values():
            if profile is not reported and not profile.on:
                profile.paused += 1
                profile.paused_s += report.verify_s
        if not report.asked:
            self._n_plain += 1
            return
        if reported is None:
            reported = self._profiles[report.drafter] = Profile()
        if report.entropies:
            reported.learn(report)
            self._n_drafts += 1
        self._judge(reported, report)

    def _judge(self, profile: Profile, report: RoundReport) -> None:
        """Switch a drafter on or off by what the rounds in which it was asked yielded."""
        keep = 1.0 - 1.0 / self.JUDGED_ROUNDS
        profile.tokens = keep * profile.tokens + 1 + report.n_accepted
        profile.seconds = keep * profile.seconds + report.verify_s + report.draft_s
        profile.rounds = keep * profile.rounds + 1
        if profile is not self._profile:
            self._profile, self._costs = profile, []
        plain_rate = 1.0 / self._time(1)
        if profile.on:
            enough = profile.rounds > self.JUDGED_ROUNDS / 2
            hopeless = profile.n_drafts >= self.WARM_UP_DRAFTS and self.best()[1] <= 1.0
            if hopeless or (enough and profile.tokens / profile.seconds < self.SLACK * plain_rate):
                profile.switch(on=False, pause=profile.pause or self.PAUSE)
        elif not report.entropies:  # nothing to propose says nothing: ask again, but not for ever
            profile.asked_in_vain += 1
            if profile.asked_in_vain == self.VAIN_ASKS:
                profile.rest(profile.pause)
        elif self.best()[1] > 1.0:
            profile.switch(on=True, pause=self.PAUSE)
        else:
            profile.rest(min(2 * profile.pause, self.LONGEST_PAUSE))

    # -- words -------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Return what it chose, and the measurements it chose by."""
        if 1 not in self._target_s or not self._n_drafts:
            return "still measuring: no draft and no plain step have been timed yet"
        k, speedup = self.best()
        costs = (
            f"a drafted token stands with chance {self._profile.mean_chance:.2f}, a draft step costs "
            f"c = {self.step_cost():.2f} target steps, a target decode of "
            + ", ".join(f"{n} tokens v = {self.verify_cost(n):.2f}" for n in sorted(self._target_s))
        )
        if not self.is_on:
            return f"drafting is off, {speedup:.2f} of plain speed at best; {costs}"
        return (
            f"about {k} tokens a draft, more where the draft is sure, fewer where it is not: "
            f"expected {speedup:.2f} of plain speed; {costs}"
        )


def interpolate(seconds: Mapping[int, float], n: int) -> float:
    """Return the time of ``n`` tokens: measured, between two measured ones, or extrapolated."""
    known = sorted(seconds)
    at = bisect.bisect_left(known, n)
    if at == 0 or (at < len(known) and known[at] == n):
        return seconds[known[at]]
    low = known[at - 1]
    if at < len(known):
        high = known[at]
        share = (n - low) / (high - low)
        return seconds[low] * (1 - share) + seconds[high] * share
    slope = seconds[low] / 8  # nothing else measured: assume that it costs something
    if at > 1:
        before = known[at - 2]
        slope = max(0.0, (seconds[low] - seconds[before]) / (low - before))
    return seconds[low] + slope * (n - low)


def smooth(old: float, new: float) -> float:
    """Follow ``new`` slowly; a single slow outlier moves little."""
    if old == 0.0:
        return new
    return old + 0.1 * (min(new, 2.0 * old) - old)


def draft_length(config: SpeculativeConfig, width: int = 1) -> DraftLength:
    """Return the controller a configuration asks for, for drafts with ``width`` tokens a step."""
    if isinstance(config.draft_k, int):
        return FixedLength(config.draft_k, config.entropy_stop)
    return GoodputLength(config.max_draft_tokens, config.entropy_stop, width)
