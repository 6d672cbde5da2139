"""As many drafted tokens as raise the throughput, and none if drafting does not raise it."""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...native import forkable_lock
from ...native.draft_loop import StopRule
from ..config import SpeculativeConfig
from .base import DraftLength, FixedLength, RoundReport

__all__ = ["AutoLength", "draft_length"]

_EDGES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)  # nats
_N_BUCKETS = len(_EDGES) + 1
_UNKNOWN = _N_BUCKETS  # the bucket of tokens whose drafter gives no entropy
# The weight with which a token drawn in a bucket counts in it, and in its neighbours.
_SHARED = ((-2, 0.1), (-1, 0.3), (0, 1.0), (1, 0.3), (2, 0.1))


@dataclass
class _Profile:
    """Measurements of one drafter: how often its tokens are accepted, and its recent throughput.

    ``tested``, ``accepted`` and ``drawn`` count its tokens by entropy bucket, with less weight the
    older they are.
    """

    tested: list[float] = field(default_factory=lambda: [1.0] * (_N_BUCKETS + 1))
    # The prior is one accepted in two.
    accepted: list[float] = field(default_factory=lambda: [0.5] * (_N_BUCKETS + 1))
    drawn: list[float] = field(default_factory=lambda: [0.0] * (_N_BUCKETS + 1))
    step_s: float = 0.0  # seconds of a draft step
    n_drafts: int = 0
    # Whether it is called in every round; tokens, seconds and number of the latest rounds in which it
    # was called, with less weight the older they are.
    is_on: bool = True
    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0
    lost_s: float = 0.0  # net time lost against plain decoding; gains offset it, but not below 0
    # The cooldown while it is off, in rounds: its length, and how much of it has passed.
    cooldown: int = 0
    waited: float = 0.0
    waited_s: float = 0.0
    empty_probes: float = 0.0  # trial rounds after it in which the drafter had no draft

    def acceptance(self, entropy: float) -> float:
        """Return the probability that a token drawn at this entropy is accepted."""
        bucket = _bucket(entropy)
        return self.accepted[bucket] / self.tested[bucket]

    @property
    def mean_acceptance(self) -> float:
        """The probability of acceptance averaged over all entropies, weighted by how often they occur."""
        drawn = sum(self.drawn)
        if drawn == 0:
            return 0.5
        counts = zip(self.drawn, self.accepted, self.tested, strict=True)
        return sum(n * accepted / tested for n, accepted, tested in counts) / drawn

    def learn(self, report: RoundReport) -> None:
        """Learn the acceptance and the time of a step from a round that drafted."""
        self.n_drafts += 1
        buckets = [_bucket(entropy) for entropy in report.entropies]
        for bucket in buckets:
            self.drawn[bucket] = 0.995 * self.drawn[bucket] + 1.0
        n_tested = min(report.n_steps, report.n_accepted + 1)
        for i, bucket in enumerate(buckets[:n_tested]):
            self._test(bucket, accepted=i < report.n_accepted)
        for bucket in buckets[report.n_steps :]:
            self._forget(bucket)
        if report.n_steps and not report.caught_up:
            self.step_s = _smooth(self.step_s, report.draft_s / report.n_steps)

    def _test(self, bucket: int, *, accepted: bool) -> None:
        for offset, weight in ((0, 1.0),) if bucket == _UNKNOWN else _SHARED:
            at = bucket + offset
            if 0 <= at < _N_BUCKETS or at == bucket:
                keep = 1.0 - 0.01 * weight
                self.tested[at] = keep * self.tested[at] + weight
                self.accepted[at] = keep * self.accepted[at] + weight * accepted

    def _forget(self, bucket: int) -> None:
        """Move the bucket a little towards the prior; else what is never drawn would never be retried."""
        self.tested[bucket] += 0.02 * (1.0 - self.tested[bucket])
        self.accepted[bucket] += 0.02 * (0.5 - self.accepted[bucket])

    def switch(self, *, on: bool) -> None:
        """Call the drafter in every round from now on, or only after cooldowns."""
        self.is_on = on
        self.tokens = self.seconds = self.rounds = self.lost_s = 0.0

    def cool_down(self, cooldown: int) -> None:
        """Do not call the drafter for ``cooldown`` rounds."""
        self.cooldown = cooldown
        self.waited = self.waited_s = self.empty_probes = 0.0


class _Learned:
    """What all streams of a controller share."""

    def __init__(self) -> None:
        self.lock = forkable_lock()
        self.profiles: dict[str, _Profile] = {}
        self.profile = _Profile()  # of the drafter that was called last
        self.target_s: dict[int, float] = {}  # seconds of a target decode, by its number of tokens
        self.overhead_s = {False: 0.0, True: 0.0}  # of a stream's round, by whether it had a draft
        self.n_streams = 1  # in the last decode
        self.n_plain = 0  # rounds
        self.n_drafts = 0
        self.since_plain = 0  # rounds since the last of them
        self.costs: list[float] = []  # seconds of a round by its length; computed anew when empty
        self.costs_of = self.profile


class AutoLength:
    """The length with the highest throughput in tokens a second, learned while it runs.

    A draft of k tokens is expected to produce E_k = 1 + sum_{j<=k} prod_{i<=j} b_i tokens in
    k c + t(n (k + 1)) / n + s seconds: b_i is the learned probability that a token drawn at this
    entropy is accepted, c the time of a draft step, t(m) the target's time for m tokens in one decode,
    n the number of streams that share it, s the time of sampling and text. So a drafted token costs
    what it adds to the decode of all. A draft goes on while some longer one adds more tokens than the
    generation, at the throughput of its last rounds, would produce in the additional time.

    Whether to draft at all is decided for each drafter of a chain separately. The time that its rounds
    lost or gained against plain steps is added up. A drafter is switched off if it has lost the time of
    a few steps, or if no length is expected to be faster than plain decoding. After a cooldown it is
    tried again; a trial that shows no gain doubles the cooldown, and a trial is made only if it would
    cost a small share of the time since the last one.

    Args:
        limit: the most tokens a draft may have.
        entropy_stop: end a draft before a token above this entropy, nats; None = never.
        width: tokens that a draft step adds to the decode: 1, or those of a tree's level.

    All streams share what is learned, and any number of threads may each use one stream.
    """

    WARM_UP_PLAIN = 3  # plain steps before the first draft
    WARM_UP_DRAFTS, WARM_UP_K = 4, 3  # drafts that measure a new drafter, and their tokens
    RATE_ROUNDS = 32  # the number of rounds that the recent throughput covers, about
    LOST_STEPS = 8  # a drafter that has lost the time of so many plain steps is switched off
    MARGIN = 1.03  # speedup that a trial must predict to switch on, since times are noisy
    REFRESH = 64  # rounds after which a plain step measures t(n) again
    COOLDOWN, LONGEST_COOLDOWN = 16, 1024  # rounds between trials
    TRIAL_SHARE = 0.02  # the most a trial may cost, as a share of the time since the last one
    LOOK_EVERY = 8  # plain steps between checks whether a trial is due
    EMPTY_PROBES = 8  # rounds without a draft after which a trial ends

    reads_entropy = True

    def __init__(self, limit: int, entropy_stop: float | None = None, width: int = 1) -> None:
        self.limit = limit
        self._entropy_stop = entropy_stop
        self._width = width
        self._learned = _Learned()
        self._begin(shares_decode=False)

    def _begin(self, *, shares_decode: bool) -> None:
        """Reset the fields that are not shared between streams."""
        self.reason = "length"
        self._shares_decode = shares_decode
        self._report: RoundReport | None = None  # of a round whose decode is not learned yet
        self._profile: _Profile | None = None  # of the drafter in use
        self._is_trial = False
        self._n_behind = 0
        self._reach = 1.0  # the probability that all of the draft so far is accepted

    def stream(self, *, shares_decode: bool = False) -> AutoLength:
        """Return one for another stream, which shares what is learned."""
        other = copy.copy(self)
        other._begin(shares_decode=shares_decode)
        return other

    # -- measurements ------------------------------------------------------------------------------

    def step_cost(self) -> float:
        """Return c: a draft step's time over a plain target step's; nan before it is measured."""
        with self._learned.lock:
            target_s = self._learned.target_s
            return self._learned.profile.step_s / self._time(1) if target_s else math.nan

    def verify_cost(self, n: int) -> float:
        """Return v(n): the target's time for n tokens over its time for one, interpolated."""
        with self._learned.lock:
            return self._time(n) / self._time(1) if self._learned.target_s else math.nan

    @property
    def is_on(self) -> bool:
        """True while some drafter is called in every round."""
        with self._learned.lock:
            return self._is_on()

    def best(self) -> tuple[int, float]:
        """Return the length with the highest expected throughput, and its speedup over plain decoding."""
        with self._learned.lock:
            return self._best(self._learned.profile)

    def _best(self, profile: _Profile) -> tuple[int, float]:
        costs, expected, reach = self._costs(profile), 1.0, 1.0
        acceptance = profile.mean_acceptance
        rates = [1.0 / costs[0]]
        for cost in costs[1:]:
            reach *= acceptance
            expected += reach
            rates.append(expected / cost)
        k = max(range(len(rates)), key=rates.__getitem__)
        return k, rates[k] / rates[0]

    def _is_on(self) -> bool:
        profiles = self._learned.profiles
        return not profiles or any(profile.is_on for profile in profiles.values())

    def _time(self, n: int) -> float:
        return _interpolate(self._learned.target_s, n)

    def _plain_s(self) -> float:
        """Return the seconds of a plain token: a stream's share of the decode plus its overhead."""
        n = self._learned.n_streams
        return self._time(n) / n + self._learned.overhead_s[False]

    def _costs(self, profile: _Profile) -> list[float]:
        """Return a stream's seconds per round, for k = 0, 1, ... tokens drafted by each stream."""
        learned = self._learned
        if not learned.costs or learned.costs_of is not profile:
            learned.costs_of = profile
            n, per_token = learned.n_streams, learned.n_streams * self._width
            # Measured times are noisy, but more tokens never take less time than fewer.
            least_s, overhead_s = self._time(n), max(learned.overhead_s.values())
            learned.costs = [
                k * profile.step_s + max(least_s, self._time(n + k * per_token)) / n + overhead_s
                for k in range(self.limit + 1)
            ]
            learned.costs[0] = self._plain_s()
        return learned.costs

    def _throughput(self, profile: _Profile) -> float:
        """Return the recent tokens per second; plain decoding's if those are higher."""
        plain = 1.0 / self._plain_s()
        return max(plain, profile.tokens / profile.seconds) if profile.rounds > 1 else plain

    # -- decisions ---------------------------------------------------------------------------------

    def plain_steps(self, n_behind: int) -> int:
        """Return how many plain steps to take before the drafter is called: 0 or 1 while it is on."""
        with self._learned.lock:
            learned = self._learned
            self._n_behind = n_behind
            if learned.n_plain < self.WARM_UP_PLAIN:
                return self.WARM_UP_PLAIN - learned.n_plain
            if self._is_on():
                return int(learned.since_plain >= self.REFRESH)
            return 0 if any(map(self._is_due, learned.profiles.values())) else self.LOOK_EVERY

    def _is_due(self, profile: _Profile) -> bool:
        """Return whether a drafter that is off should be tried again."""
        if profile.waited < profile.cooldown:
            return False
        # Decoding many tokens at once costs about a fifth of a step for each. In a chain whose other
        # drafters are called, this one has missed the tokens generated during its own cooldown.
        n_behind = max(self._n_behind, profile.waited)
        cost_s = profile.step_s * (1 + n_behind / 5) + self._costs(profile)[1] - self._plain_s()
        return cost_s < self.TRIAL_SHARE * profile.waited_s

    def consider(self, drafter: str) -> bool:
        """Return whether this drafter should draft; later ``goes_on`` calls are about it."""
        with self._learned.lock:
            profile = self._learned.profiles.setdefault(drafter, _Profile())
            self._profile = self._learned.profile = profile
            self._is_trial = not profile.is_on and self._is_due(profile)
            return profile.is_on or self._is_trial

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return whether to draw another token after ``n_drafted``, at this ``entropy`` in nats."""
        with self._learned.lock:
            profile = self._profile or self._learned.profile
            if n_drafted == 0:
                self._reach = 1.0
            self.reason = "length"
            if n_drafted >= self.limit:
                return False
            if self._entropy_stop is not None and entropy > self._entropy_stop:
                self.reason = "entropy"
                return False
            self.reason = "goodput"
            if profile.n_drafts < self.WARM_UP_DRAFTS:
                return n_drafted < self.WARM_UP_K
            acceptance = profile.acceptance(entropy)
            is_probe = self._is_trial and n_drafted == 0
            if not is_probe and not self._pays(profile, n_drafted, acceptance):
                return False
            self._reach *= acceptance
            return True

    def stop_rule(self, n_drafted: int) -> StopRule:
        """Return the entropy limit, and what ``goes_on`` decides by after ``n_drafted`` tokens."""
        with self._learned.lock:
            profile = self._profile or self._learned.profile
            most = math.inf if self._entropy_stop is None else self._entropy_stop
            if profile.n_drafts < self.WARM_UP_DRAFTS:
                return StopRule(most, self.WARM_UP_K)
            return StopRule(
                most,
                edges=_EDGES,
                acceptance=[a / n for a, n in zip(profile.accepted, profile.tested, strict=True)],
                costs=self._costs(profile),
                mean=profile.mean_acceptance,
                rate=self._throughput(profile),
                is_probe=self._is_trial,
                reach=self._reach if n_drafted else 1.0,
            )

    def _pays(self, profile: _Profile, k: int, acceptance: float) -> bool:
        """Return whether to draft on after ``k`` tokens; ``acceptance`` is the next one's probability."""
        costs, mean = self._costs(profile), profile.mean_acceptance
        reach, gained, rate = self._reach, 0.0, self._throughput(profile)
        for longer in range(k + 1, self.limit + 1):
            reach *= acceptance
            gained += reach
            if gained > rate * (costs[longer] - costs[k]):
                return True
            acceptance = mean
        return False

    # -- learning ----------------------------------------------------------------------------------

    def learn(self, report: RoundReport) -> None:
        """Learn the acceptance from a round, and its times too unless the decode was shared."""
        with self._learned.lock:
            learned = self._learned
            overhead_s, has_draft = learned.overhead_s, report.n_verified > 1
            overhead_s[has_draft] = _smooth(
                overhead_s[has_draft], report.overhead_s, report.n_rounds
            )
            if report.asked:
                profile = learned.profiles.setdefault(report.drafter, _Profile())
                if report.entropies:
                    profile.learn(report)
                    learned.n_drafts += 1
            if self._shares_decode:
                self._report = report if report.asked else None
            else:
                self._learn_round([report], report.n_verified, report.verify_s, report.n_rounds)

    def learn_decode(self, streams: Sequence[DraftLength], n_tokens: int, verify_s: float) -> None:
        """Learn the time of a decode that ``streams`` shared; NaN = it is not comparable."""
        with self._learned.lock:
            reports: list[RoundReport] = []
            for stream in streams:
                if isinstance(stream, AutoLength):
                    overhead_s = self._learned.overhead_s[False]
                    reports.append(stream._report or RoundReport.plain(1, 0.0, overhead_s))
                    stream._report = None
            if reports and not math.isnan(verify_s):
                self._learn_round(reports, n_tokens, verify_s)

    def _learn_round(
        self, reports: Sequence[RoundReport], n_tokens: int, verify_s: float, n_rounds: int = 1
    ) -> None:
        """Learn from one decode of ``n_tokens``; the reports of its streams together weigh as one."""
        learned, n_streams = self._learned, len(reports)
        learned.n_streams = n_streams
        learned.target_s[n_tokens] = _smooth(
            learned.target_s.get(n_tokens, 0.0), verify_s, n_rounds
        )
        learned.costs = []
        learned.since_plain += n_rounds
        if n_tokens == n_streams and not any(report.asked for report in reports):
            learned.n_plain += n_rounds
            learned.since_plain = 0
        # Each stream is charged the time that its own draft added to the decode.
        plain_s = self._time(n_streams) if n_tokens > n_streams else verify_s
        added_s = (verify_s - plain_s) / max(1, n_tokens - n_streams)
        weight = n_rounds / n_streams
        for report in reports:
            seconds = plain_s / n_streams + (report.n_verified - 1) * added_s
            seconds += report.draft_s + report.overhead_s
            asked = learned.profiles.get(report.drafter) if report.asked else None
            for profile in learned.profiles.values():
                if profile is not asked and not profile.is_on:
                    profile.waited += weight
                    profile.waited_s += weight * seconds
            if asked is not None:
                self._update_switch(asked, report, seconds, weight)

    def _update_switch(
        self, profile: _Profile, report: RoundReport, seconds: float, weight: float
    ) -> None:
        """Switch a drafter on or off, by the throughput of the rounds in which it was called."""
        self._learned.profile = profile
        if not report.caught_up:  # the time of a prefill does not predict that of later rounds
            tokens = 1 + report.n_accepted
            keep = (1.0 - 1.0 / self.RATE_ROUNDS) ** weight
            profile.tokens = keep * profile.tokens + weight * tokens
            profile.seconds = keep * profile.seconds + weight * seconds
            profile.rounds = keep * profile.rounds + weight
            lost_s = seconds - tokens * self._plain_s()
            profile.lost_s = max(0.0, profile.lost_s + weight * lost_s)
        if profile.is_on:
            is_known = profile.n_drafts >= self.WARM_UP_DRAFTS
            is_useless = is_known and self._best(profile)[0] == 0
            if is_useless or profile.lost_s > self.LOST_STEPS * self._plain_s():
                profile.switch(on=False)
                profile.cool_down(self.COOLDOWN)
        elif profile.waited < profile.cooldown:
            return  # another stream of the same trial has decided
        elif not report.entropies:  # without a draft nothing is measured: probe a few more times
            profile.empty_probes += weight
            if profile.empty_probes >= self.EMPTY_PROBES:
                profile.cool_down(profile.cooldown)
        elif self._best(profile)[1] >= self.MARGIN:
            profile.switch(on=True)
            profile.cool_down(self.COOLDOWN)
        else:
            profile.cool_down(min(2 * profile.cooldown, self.LONGEST_COOLDOWN))

    # -- report ------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Return the length it chose, and the measurements behind that."""
        with self._learned.lock:
            return self._explanation()

    def _explanation(self) -> str:
        learned = self._learned
        known = (("plain step", bool(learned.target_s)), ("draft", learned.n_drafts > 0))
        missing = [name for name, is_known in known if not is_known]
        if missing:
            return "still measuring: " + " and ".join(f"no {name}" for name in missing) + " yet"
        profile, one_s = learned.profile, self._time(1)
        k, speedup = self._best(profile)
        n = learned.n_streams
        sizes = [
            m for m in sorted({1, *(n * i for i in (1, 2, 3, 5, 9))}) if m <= max(learned.target_s)
        ]
        facts = (
            f"a drafted token is accepted with probability {profile.mean_acceptance:.2f}, "
            f"a draft step costs c = {profile.step_s / one_s:.2f} target steps, a target decode of "
            + ", ".join(f"{m} tokens v = {self._time(m) / one_s:.2f}" for m in sizes)
        )
        streams = "" if n == 1 else f" with {n} streams in a decode"
        if not self._is_on():
            return (
                f"drafting is off{streams}: it would reach {speedup:.2f} times plain throughput "
                f"at best; {facts}"
            )
        return (
            f"about {k} tokens a draft{streams}, more at low entropy, fewer at high: "
            f"{speedup:.2f} times plain throughput expected; {facts}"
        )


def _bucket(entropy: float) -> int:
    return _UNKNOWN if math.isnan(entropy) else bisect.bisect(_EDGES, entropy)


def _interpolate(seconds: Mapping[int, float], n: int) -> float:
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
    slope = seconds[low] / 8  # only one size is measured: assume that more tokens cost something
    if at > 1:
        before = known[at - 2]
        slope = max(0.0, (seconds[low] - seconds[before]) / (low - before))
    return seconds[low] + slope * (n - low)


def _smooth(old: float, new: float, times: int = 1) -> float:
    """Return the moving average after ``times`` observations of ``new``; one outlier moves it little."""
    if old == 0.0:
        return new
    return old + (1.0 - 0.9**times) * (min(new, 2.0 * old) - old)


def draft_length(config: SpeculativeConfig, width: int = 1) -> DraftLength:
    """Return the draft length that ``config`` sets, for drafts with ``width`` tokens per step."""
    if isinstance(config.draft_k, int):
        return FixedLength(config.draft_k, config.entropy_stop)
    return AutoLength(config.max_draft_tokens, config.entropy_stop, width)
