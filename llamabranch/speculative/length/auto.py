"""As many drafted tokens as pay, and none where none do."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...native import forkable_lock
from ..config import SpeculativeConfig
from .base import DraftLength, FixedLength, RoundReport

__all__ = ["AutoLength", "Profile", "draft_length", "interpolate", "smooth"]

_EDGES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)  # nats
_N_BUCKETS = len(_EDGES) + 1
_UNKNOWN = _N_BUCKETS  # the bucket of tokens whose drafter tells no entropy
# What a bucket learns of a token drawn in it, and what those beside it do.
_SHARED = ((-2, 0.1), (-1, 0.3), (0, 1.0), (1, 0.3), (2, 0.1))


@dataclass
class Profile:
    """What is known of one drafter: how often its tokens stand, by entropy, and what they cost."""

    tried: list[float] = field(default_factory=lambda: [1.0] * (_N_BUCKETS + 1))
    stood: list[float] = field(
        default_factory=lambda: [0.5] * (_N_BUCKETS + 1)
    )  # prior: one in two
    seen: list[float] = field(default_factory=lambda: [0.0] * (_N_BUCKETS + 1))
    step_s: float = 0.0
    n_drafts: int = 0
    # Whether it is asked, and what the rounds in which it was asked yielded.
    on: bool = True
    trial: bool = False
    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0
    lost_s: float = 0.0  # more than plain decoding would have taken, since it last was even with it
    pause: int = 0
    paused: int = 0
    paused_s: float = 0.0
    asked_in_vain: int = 0

    def chance(self, entropy: float) -> float:
        bucket = _bucket(entropy)
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
        buckets = [_bucket(entropy) for entropy in report.entropies]
        for bucket in buckets:
            self.seen[bucket] = 0.995 * self.seen[bucket] + 1.0
        tested = min(report.n_steps, report.n_accepted + 1)
        for i, bucket in enumerate(buckets[:tested]):
            self._test(bucket, stood=i < report.n_accepted)
        for bucket in buckets[report.n_steps :]:
            self._forget(bucket)
        if report.n_steps and not report.caught_up:
            self.step_s = smooth(self.step_s, report.draft_s / report.n_steps)

    def _test(self, bucket: int, *, stood: bool) -> None:
        for offset, weight in ((0, 1.0),) if bucket == _UNKNOWN else _SHARED:
            at = bucket + offset
            if 0 <= at < _N_BUCKETS or at == bucket:
                keep = 1.0 - 0.01 * weight
                self.tried[at] = keep * self.tried[at] + weight
                self.stood[at] = keep * self.stood[at] + weight * stood

    def _forget(self, bucket: int) -> None:
        """Return a little to the prior: what is never drawn would else be thought bad for ever."""
        self.tried[bucket] += 0.02 * (1.0 - self.tried[bucket])
        self.stood[bucket] += 0.02 * (0.5 - self.stood[bucket])

    def rest(self, pause: int) -> None:
        """Ask it no more for ``pause`` rounds."""
        self.pause, self.paused, self.paused_s, self.asked_in_vain = pause, 0, 0.0, 0

    def switch(self, *, on: bool, pause: int) -> None:
        """Ask it every round from now on, or rest."""
        self.on = on
        self.tokens = self.seconds = self.rounds = self.lost_s = 0.0
        self.rest(pause)


class _Drafting(threading.local):
    """What concerns the draft at hand: each thread may be at another."""

    def __init__(self) -> None:
        self.profile: Profile | None = None  # of the drafter that was considered
        self.n_behind = 0
        self.reach = 1.0
        self.going_rate = 0.0
        self.reason = "length"


class AutoLength:
    """The length with the most expected tokens a second, learned while it runs.

    A draft of k tokens is expected to yield E_k = 1 + sum_{j<=k} prod_{i<=j} b_i tokens in
    k c + t(k + 1) + s seconds: b_i is the learned chance that a token drawn at this entropy stands, c the
    time of a draft step, t(n) the target's time for n tokens in one decode, s that of sampling and text.
    A draft goes on while some longer one adds more tokens than the generation, at the rate of its last
    rounds, would say in the time that it takes.

    Whether to draft at all is decided by what came of it, for each drafter of a chain by itself: while
    it is asked, the time its rounds lost or won against plain steps is added up, and where it has lost
    the time of a few it is switched off. It is tried again after ever longer pauses, and only when the
    trial would cost little of the time since the last.

    Many threads may draft by it: what is learned is shared, what concerns one draft is each thread's own.
    """

    WARM_UP_PLAIN, WARM_UP_DRAFTS, WARM_UP_K = 3, 4, 3
    RATE_ROUNDS = 32  # how many rounds the going rate looks back, about
    LOST_ROUNDS = 8  # a drafter that has lost the time of so many of its rounds is switched off
    WORTH = 1.03  # of plain speed: what drafting must promise to be on, times being noisy
    DOUBT = 0.6  # over the number of drafts: how far off the chance that was learned may be
    REFRESH = 64  # rounds after which a plain step measures t(1) again
    PAUSE, LONGEST_PAUSE = 16, 1024  # plain steps between trials
    TRIAL_SHARE = 0.02  # of the time since the last trial
    LOOK_EVERY = 8  # plain steps between questions whether a trial is due
    VAIN_ASKS = 8  # how often a drafter with nothing to propose is asked in a trial
    reads_entropy = True

    def __init__(self, limit: int, entropy_stop: float | None = None, width: int = 1) -> None:
        self.limit = limit
        self._lock = forkable_lock()
        self._now = _Drafting()
        self._entropy_stop = entropy_stop
        self._width = width
        self._profiles: dict[str, Profile] = {}
        self._profile = Profile()  # of the drafter that was asked last
        self._target_s: dict[int, float] = {}
        self._settle_s = {False: 0.0, True: 0.0}  # by whether there was a draft
        self._costs: list[float] = []  # seconds of a round with k tokens; made anew when stale
        self._costs_of = self._profile
        self._n_plain = self._n_drafts = self._since_plain = 0

    @property
    def reason(self) -> str:
        """Why ``goes_on`` last said no to this thread."""
        return self._now.reason

    # -- what is known -----------------------------------------------------------------------------

    def step_cost(self) -> float:
        """Return c: a draft step's time over a plain target step's, nan before it is measured."""
        with self._lock:
            return self._profile.step_s / self._target_s[1] if 1 in self._target_s else math.nan

    def verify_cost(self, n: int) -> float:
        """Return v(n): the target's time for n tokens over its time for one, interpolated."""
        with self._lock:
            return self._time(n) / self._target_s[1] if 1 in self._target_s else math.nan

    def _time(self, n: int) -> float:
        return interpolate(self._target_s, n)

    @property
    def _plain_s(self) -> float:
        return self._time(1) + self._settle_s[False]

    def _round_costs(self, profile: Profile) -> list[float]:
        if not self._costs or self._costs_of is not profile:
            self._costs_of = profile
            step_s, width = profile.step_s, self._width
            # Times are noisy, but more tokens never take less: a draft is not free because of noise.
            least_s, overhead_s = self._time(1), max(self._settle_s.values())
            self._costs = [
                k * step_s + max(least_s, self._time(1 + k * width)) + overhead_s
                for k in range(self.limit + 1)
            ]
            self._costs[0] = self._plain_s
        return self._costs

    def _pays(self, profile: Profile, k: int, chance: float) -> bool:
        """Return whether to draft on after ``k`` tokens; the next one stands with ``chance``."""
        costs, mean, rate = self._round_costs(profile), profile.mean_chance, self._now.going_rate
        reach, gained = self._now.reach, 0.0
        for longer in range(k + 1, self.limit + 1):
            reach *= chance
            gained += reach
            if gained > rate * (costs[longer] - costs[k]):
                return True
            if reach < 0.05:
                break
            chance = mean
        return False

    def _rate(self, profile: Profile) -> float:
        """Return the tokens a second of late, those of plain decoding at least."""
        plain = 1.0 / self._plain_s
        return max(plain, profile.tokens / profile.seconds) if profile.rounds > 1 else plain

    def best(self, doubt: float = 0.0) -> tuple[int, float]:
        """Return the length with the best expected rate at the mean chance, and its speedup.

        ``doubt`` is by how much the chance may be higher than it seems.
        """
        with self._lock:
            costs = self._round_costs(self._profile)
            chance = min(1.0, self._profile.mean_chance + doubt)
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
        with self._lock:
            return not self._profiles or any(profile.on for profile in self._profiles.values())

    # -- decisions ---------------------------------------------------------------------------------

    def plain_steps(self, n_behind: int) -> int:
        """Return how many plain steps come before the drafter is asked: none while it is on."""
        with self._lock:
            if self._n_plain < self.WARM_UP_PLAIN:
                return self.WARM_UP_PLAIN - self._n_plain
            self._now.n_behind = n_behind
            if self.is_on:
                self._since_plain += 1
                if self._since_plain > self.REFRESH:
                    self._since_plain = 0
                    return 1
                return 0
            return 0 if any(map(self._is_due, self._profiles.values())) else self.LOOK_EVERY

    def _is_due(self, profile: Profile) -> bool:
        """Return whether a drafter that is off should be tried again."""
        if profile.paused < profile.pause:
            return False
        # Reading many tokens at once costs about a fifth of a step for each. In a chain that others
        # are asked in, a drafter has missed what was said in its own pause.
        n_behind = max(self._now.n_behind, profile.paused)
        round_s = self._round_costs(self._profile)[1]
        cost = profile.step_s * (1 + n_behind / 5) + round_s - self._plain_s
        return cost < self.TRIAL_SHARE * profile.paused_s

    def consider(self, drafter: str) -> bool:
        """Return whether this drafter should propose; what follows is about it."""
        with self._lock:
            profile = self._profiles.setdefault(drafter, Profile())
            self._profile = self._now.profile = profile
            profile.trial = not profile.on and self._is_due(profile)
            return profile.on or profile.trial

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return whether to draw one more after ``n_drafted``, from a distribution of ``entropy``."""
        with self._lock:
            now = self._now
            profile = now.profile or self._profile
            if n_drafted == 0:
                now.reach = 1.0
                now.going_rate = self._rate(profile)
            now.reason = "length"
            if n_drafted >= self.limit:
                return False
            if self._entropy_stop is not None and entropy > self._entropy_stop:
                now.reason = "entropy"
                return False
            now.reason = "goodput"
            if profile.n_drafts < self.WARM_UP_DRAFTS:
                return n_drafted < self.WARM_UP_K
            chance = profile.chance(entropy)
            is_trial = profile.trial and n_drafted == 0
            if not is_trial and not self._pays(profile, n_drafted, chance):
                return False
            now.reach *= chance
            return True

    # -- learning ----------------------------------------------------------------------------------

    def learn(self, report: RoundReport) -> None:
        """Take in a round."""
        with self._lock:
            self._learn_costs(report.n_verified, report.verify_s, report.overhead_s, 1)
            reported = self._profiles.get(report.drafter) if report.asked else None
            self._let_pass(1, report.verify_s + report.overhead_s, reported)
            if not report.asked:
                self._n_plain += 1
                return
            if reported is None:
                reported = self._profiles[report.drafter] = Profile()
            if report.entropies:
                reported.learn(report)
                self._n_drafts += 1
            self._judge(reported, report)

    def learn_plain(self, n: int, verify_s: float, overhead_s: float) -> None:
        """Take in ``n`` plain steps in which the drafter was not asked; seconds are medians."""
        with self._lock:
            self._n_plain += n
            self._learn_costs(1, verify_s, overhead_s, n)
            self._let_pass(n, n * (verify_s + overhead_s))

    def _learn_costs(self, n: int, verify_s: float, overhead_s: float, times: int) -> None:
        drafted = n > 1
        self._target_s[n] = smooth(self._target_s.get(n, 0.0), verify_s, times)
        self._settle_s[drafted] = smooth(self._settle_s[drafted], overhead_s, times)
        self._costs = []

    def _let_pass(self, n: int, seconds: float, asked: Profile | None = None) -> None:
        """Note rounds for all that rest but the one that was ``asked``."""
        for profile in self._profiles.values():
            if profile is not asked and not profile.on:
                profile.paused += n
                profile.paused_s += seconds

    def _judge(self, profile: Profile, report: RoundReport) -> None:
        """Switch a drafter on or off by what the rounds in which it was asked yielded."""
        self._profile = profile
        plain_s = self._plain_s
        if not report.caught_up:  # reading a prompt says nothing of what follows
            tokens = 1 + report.n_accepted
            seconds = report.draft_s + report.verify_s + report.overhead_s
            keep = 1.0 - 1.0 / self.RATE_ROUNDS
            profile.tokens = keep * profile.tokens + tokens
            profile.seconds = keep * profile.seconds + seconds
            profile.rounds = keep * profile.rounds + 1
            profile.lost_s = max(0.0, profile.lost_s + seconds - tokens * plain_s)
        if profile.on:
            n = profile.n_drafts
            hopeless = n >= self.WARM_UP_DRAFTS and self.best(self.DOUBT / n)[1] < self.WORTH
            if hopeless or profile.lost_s * profile.rounds > self.LOST_ROUNDS * profile.seconds:
                profile.switch(on=False, pause=profile.pause or self.PAUSE)
        elif not report.entropies:  # nothing to propose says nothing: ask again, but not for ever
            profile.asked_in_vain += 1
            if profile.asked_in_vain == self.VAIN_ASKS:
                profile.rest(profile.pause)
        elif self.best()[1] >= self.WORTH:
            profile.switch(on=True, pause=self.PAUSE)
        else:
            profile.rest(min(2 * profile.pause, self.LONGEST_PAUSE))

    # -- words -------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Return what it chose, and the measurements it chose by."""
        with self._lock:
            return self._explanation()

    def _explanation(self) -> str:
        missing = [
            name
            for name, known in (("plain step", 1 in self._target_s), ("draft", self._n_drafts > 0))
            if not known
        ]
        if missing:
            return "still measuring: " + " and ".join(f"no {name}" for name in missing) + " yet"
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


def _bucket(entropy: float) -> int:
    return _UNKNOWN if math.isnan(entropy) else bisect.bisect(_EDGES, entropy)


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


def smooth(old: float, new: float, times: int = 1) -> float:
    """Follow ``new``, seen so many ``times``, slowly; a single slow outlier moves little."""
    if old == 0.0:
        return new
    return old + (1.0 - 0.9**times) * (min(new, 2.0 * old) - old)


def draft_length(config: SpeculativeConfig, width: int = 1) -> DraftLength:
    """Return the controller a configuration asks for, for drafts with ``width`` tokens a step."""
    if isinstance(config.draft_k, int):
        return FixedLength(config.draft_k, config.entropy_stop)
    return AutoLength(config.max_draft_tokens, config.entropy_stop, width)
