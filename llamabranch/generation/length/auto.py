"""As many drafted tokens as raise the throughput, and none if drafting does not raise it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...native import forkable_lock
from ..config import SpeculativeConfig
from .acceptance import Acceptance
from .base import DraftLength, FixedLength, RoundReport
from .curve import Curve, smooth
from .known import Known, KnownDrafter
from .stop_rule import StopRule

__all__ = ["AutoLength", "draft_length"]


@dataclass
class _Record:
    """Measurements of one drafter: how often its tokens are accepted, and its recent throughput."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    step_s: float = 0.0  # seconds of a draft step
    n_drafts: int = 0  # of this run
    n_timed: int = 0  # of these, those whose steps were timed
    n_tested: int = 0  # tokens of this run
    n_accepted: int = 0
    source: str = ""  # of what was known before this run
    estimates: bool = False  # its entropies are its own estimates of its tokens' surprisal
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

    def learn(self, report: RoundReport) -> None:
        """Learn the acceptance and the time of a step from a round that drafted."""
        self.n_drafts += 1
        n_tested, n_accepted = report.n_steps, report.n_accepted
        if report.followed is not None:
            n_tested, n_accepted = n_tested + 1, n_accepted + report.followed
        self.acceptance.learn(report.entropies, n_tested, n_accepted)
        self.n_tested += min(n_tested, n_accepted + 1)
        self.n_accepted += n_accepted
        # Where it also read more than the last round's tokens, that is no draft step's time.
        if report.n_looks and not report.caught_up and (report.n_read <= 2 or not self.n_timed):
            n_before = self.n_timed if self.source else None
            self.step_s = smooth(self.step_s, report.draft_s / report.n_looks, 1, n_before)
            self.n_timed += 1

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

    def __init__(self, known: Known) -> None:
        self.lock = forkable_lock()
        self.known = known
        self.records: dict[str, _Record] = {}
        self.record = _Record()  # of the drafter that was called last
        self.curve = Curve(known.target_s, known.n_decodes)
        self.overhead_s = {False: 0.0, True: 0.0}  # of a stream's round, by whether it had a draft
        self.n_streams = 1  # in the last decode
        self.weighed: list[StopRule] = []  # of drafts that will share the next decode
        self.n_plain = 0  # rounds
        self.n_drafts = 0
        self.since_plain = 0  # rounds since the last of them
        self.costs: list[float] = []  # seconds of a round by its length; computed anew when empty
        self.costs_of = self.record

    def record_of(self, drafter: str) -> _Record:
        """Return the record of a drafter."""
        if drafter not in self.records:
            self.records[drafter] = self.new_record(drafter)
        return self.records[drafter]

    def new_record(self, drafter: str) -> _Record:
        """Return a record that begins with what is known of a drafter."""
        record, known = _Record(), self.known.drafters.get(drafter)
        if drafter in self.known.estimates:
            record.acceptance, record.estimates = Acceptance(of_surprisals=True), True
        if known is not None:
            record.acceptance.start_from(known.counts)
            record.source = known.source
            if self.curve:
                record.step_s = known.cost * self.curve.of(1)
        return record

    def described(self) -> _Record:
        """Return the record to describe: of the drafter called last, or of one that is known."""
        if self.records:
            return self.record
        return self.new_record(next(iter(self.known.drafters), ""))


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
        known: what earlier runs have found out, or a measurement. Where it is not true of this run, that
            is noticed: times follow those that are measured, acceptance is dropped when it is improbable.

    All streams share what is learned, and any number of threads may each use one stream.
    """

    WARM_UP_PLAIN = 3  # plain steps before the first draft
    WARM_UP_DRAFTS, WARM_UP_K = 4, 3  # drafts that measure a new drafter, and their tokens
    FIRST_K = 7  # tokens of a copied draft at first; later at most twice the largest timed decode
    SHORT_DRAFTS = 2  # drafts of a known drafter that are as short, in case it has changed
    RATE_ROUNDS = 32  # the number of rounds that the recent throughput covers, about
    LOST_STEPS = 8  # a drafter that has lost the time of so many plain steps is switched off
    MARGIN = 1.03  # speedup that a trial must predict to switch on, since times are noisy
    REFRESH = 64  # rounds after which a plain step measures t(n) again
    COOLDOWN, LONGEST_COOLDOWN = 16, 1024  # rounds between trials
    TRIAL_SHARE = 0.02  # the most a trial may cost, as a share of the time since the last one
    LOOK_EVERY = 8  # plain steps between checks whether a trial is due
    CHEAP = 0.02  # of a plain step: the time of a draft step that costs next to nothing
    EMPTY_PROBES = 8  # rounds without a draft after which a trial ends

    reads_entropy = True

    def __init__(
        self,
        limit: int,
        entropy_stop: float | None = None,
        width: int = 1,
        known: Known | None = None,
    ) -> None:
        self.limit = limit
        self._entropy_stop = entropy_stop
        self._width = width
        self._learned = _Learned(known or Known())
        self._begin(shares_decode=False)

    def _begin(self, *, shares_decode: bool) -> None:
        """Reset the fields that are not shared between streams."""
        self.reason = "length"
        self._shares_decode = shares_decode
        self._report: RoundReport | None = None  # of a round whose decode is not learned yet
        self._record: _Record | None = None  # of the drafter in use
        self._is_trial = False
        self._n_behind = 0
        self._rule: StopRule | None = None  # of the draft in progress, and of which drafter
        self._rule_of: _Record | None = None

    def stream(self, *, shares_decode: bool = False) -> AutoLength:
        """Return one for another stream, which shares what is learned."""
        other = copy.copy(self)
        other._begin(shares_decode=shares_decode)
        return other

    # -- measurements ------------------------------------------------------------------------------

    @property
    def curve(self) -> Curve:
        """The times of the target's decodes."""
        return self._learned.curve

    def step_cost(self) -> float:
        """Return c: a draft step's time over a plain target step's; nan before it is measured."""
        with self._learned.lock:
            return self._learned.record.step_s / self._time(1) if self._learned.curve else math.nan

    def verify_cost(self, n: int) -> float:
        """Return v(n): the target's time for n tokens over its time for one, interpolated."""
        with self._learned.lock:
            return self._time(n) / self._time(1) if self._learned.curve else math.nan

    @property
    def is_on(self) -> bool:
        """True while some drafter is called in every round."""
        with self._learned.lock:
            return self._is_on()

    def best(self) -> tuple[int, float]:
        """Return the length with the highest expected throughput, and its speedup over plain decoding."""
        with self._learned.lock:
            return self._best(self._learned.record)

    def _best(self, record: _Record) -> tuple[int, float]:
        # A draft that ends before the limit has looked at one step more.
        gains = self._speedups(record, record.acceptance.mean, record.step_s)
        k = max(range(len(gains)), key=gains.__getitem__)
        return k, gains[k]

    def _speedups(self, record: _Record, acceptance: float, look_s: float) -> list[float]:
        """Return the speedup over plain decoding that drafts of k = 0, 1, ... tokens would have."""
        costs, expected, reach, gains = self._costs(record), 1.0, 1.0, [1.0]
        for k, cost in enumerate(costs[1:], 1):
            reach *= acceptance
            expected += reach
            gains.append(expected * costs[0] / (cost + look_s * (k < self.limit)))
        return gains

    def _is_on(self) -> bool:
        records = self._learned.records
        return not records or any(r.is_on or self._weighs(r) for r in records.values())

    def _time(self, n: int) -> float:
        return self._learned.curve.of(n)

    def _plain_s(self) -> float:
        """Return the seconds of a plain token: a stream's share of the decode plus its overhead."""
        n = self._learned.n_streams
        return self._learned.curve.filled(n) / n + self._learned.overhead_s[False]

    def _costs(self, record: _Record) -> list[float]:
        """Return a stream's seconds per round, for k = 0, 1, ... tokens drafted by each stream."""
        learned = self._learned
        if not learned.costs or learned.costs_of is not record:
            learned.costs_of = record
            n, per_token = learned.n_streams, learned.n_streams * self._width
            # Measured times are noisy, but no draft makes a decode take less than without it.
            filled, overhead_s = learned.curve.filled, max(learned.overhead_s.values())
            least_s = filled(n)
            learned.costs = [
                k * record.step_s + max(least_s, filled(n + k * per_token)) / n + overhead_s
                for k in range(self.limit + 1)
            ]
            learned.costs[0] = self._plain_s()
        return learned.costs

    def _added_costs(self, record: _Record) -> list[float]:
        """Return what a stream's draft adds to a decode with the drafts that others have in it already.

        Up to the next edge that is nothing, even where drafts would not pay otherwise.
        """
        learned = self._learned
        filled, n = learned.curve.filled, learned.n_streams
        n += sum(rule.n_drafted for rule in learned.weighed)
        without_s, plain_s = filled(n), self._plain_s()
        return [
            plain_s + k * record.step_s + max(0.0, filled(n + k) - without_s)
            for k in range(self.limit + 1)
        ]

    def _throughput(self, record: _Record) -> float:
        """Return the recent tokens per second, or the best that is expected if that is more."""
        plain = 1.0 / self._plain_s()
        best = plain * self._best(record)[1]
        return max(best, record.tokens / record.seconds) if record.rounds > 1 else best

    # -- decisions ---------------------------------------------------------------------------------

    def plain_steps(self, n_behind: int) -> int:
        """Return how many plain steps to take before the drafter is called: 0 or 1 while it is on."""
        with self._learned.lock:
            learned = self._learned
            self._n_behind = n_behind
            warm_up = 0 if learned.curve.is_kept else self.WARM_UP_PLAIN
            if learned.n_plain < warm_up:
                return warm_up - learned.n_plain
            if self._is_on():
                return int(learned.since_plain >= self.REFRESH)
            return 0 if any(map(self._is_due, learned.records.values())) else self.LOOK_EVERY

    def _is_due(self, record: _Record) -> bool:
        """Return whether a drafter that is off should be tried again."""
        if record.waited < record.cooldown:
            return False
        if record.cooldown == 0 and record.n_drafts < self.WARM_UP_DRAFTS:
            return True
        # Decoding many tokens at once costs about a fifth of a step for each. In a chain whose other
        # drafters are called, this one has missed the tokens generated during its own cooldown.
        n_behind = max(self._n_behind, record.waited)
        cost_s = record.step_s * (1 + n_behind / 5) + self._costs(record)[1] - self._plain_s()
        return cost_s < self.TRIAL_SHARE * record.waited_s

    def consider(self, drafter: str) -> bool:
        """Return whether this drafter should draft; later ``goes_on`` calls are about it."""
        with self._learned.lock:
            is_new = drafter not in self._learned.records
            record = self._learned.record_of(drafter)
            self._record = self._learned.record = record
            if self._weighs(record):
                self._is_trial = False
                return True
            if is_new and self._is_known(record) and self._best(record)[0] == 0:
                record.switch(on=False)  # a few trials at once show whether that still holds
            self._is_trial = not record.is_on and self._is_due(record)
            return record.is_on or self._is_trial

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return whether to draw another token after ``n_drafted``, at this ``entropy`` in nats."""
        self.reason = "length"
        if n_drafted >= self.limit:
            return False
        self.reason = self.stop_rule(n_drafted).reason(n_drafted, entropy)
        return not self.reason

    def _weighs(self, record: _Record) -> bool:
        """Return whether all tokens that could follow are looked at, since that costs next to nothing."""
        return record.estimates and record.step_s < self.CHEAP * self._plain_s()

    def _is_known(self, record: _Record) -> bool:
        """Return whether a drafter's acceptance can be relied on; else its drafts are a warm-up."""
        return record.acceptance.is_kept or record.n_drafts >= self.WARM_UP_DRAFTS

    def stop_rule(self, n_drafted: int) -> StopRule:
        """Return what decides about the draft that has ``n_drafted`` tokens.

        It is made when a draft begins, and when another drafter goes on with it.
        """
        rule, record = self._rule, self._record or self._learned.record
        if n_drafted == 0 or rule is None or record is not self._rule_of:
            reach = rule.reach if rule is not None and n_drafted else 1.0
            with self._learned.lock:
                rule = self._rule = self._new_rule(record)
                if rule.weighs and self._shares_decode:
                    self._learned.weighed.append(rule)
            self._rule_of, rule.reach = record, reach
        rule.n_drafted = n_drafted
        return rule

    def _new_rule(self, record: _Record) -> StopRule:
        most = math.inf if self._entropy_stop is None else self._entropy_stop
        weighs = self._weighs(record)
        if not (weighs or self._is_known(record)):
            return StopRule(most, self.WARM_UP_K)
        acceptance, most_tokens = record.acceptance, self.limit
        if weighs:
            most_tokens = max(self.FIRST_K, 2 * max(self._learned.curve.sizes) - 1)
        elif record.n_drafts < self.SHORT_DRAFTS:
            most_tokens = self.WARM_UP_K
        return StopRule(
            most,
            most_tokens,
            edges=acceptance.edges,
            acceptance=acceptance.rates(),
            costs=self._added_costs(record)
            if weighs and self._shares_decode
            else self._costs(record),
            mean=acceptance.mean,
            rate=self._throughput(record),
            is_probe=self._is_trial,
            weighs=weighs,
        )

    # -- learning ----------------------------------------------------------------------------------

    def learn(self, report: RoundReport) -> None:
        """Learn the acceptance from a round, and its times too unless the decode was shared."""
        with self._learned.lock:
            learned = self._learned
            overhead_s, has_draft = learned.overhead_s, report.n_verified > 1
            overhead_s[has_draft] = smooth(
                overhead_s[has_draft], report.overhead_s, report.n_rounds
            )
            if report.drafter_called:
                record = learned.record_of(report.drafter)
                if report.entropies:
                    record.learn(report)
                    learned.n_drafts += 1
            if self._shares_decode:
                self._report = report if report.drafter_called else None
            else:
                n_rows = report.n_rows or report.n_verified
                self._learn_round([report], n_rows, report.verify_s, report.n_rounds)

    def learn_decode(self, streams: Sequence[DraftLength], n_tokens: int, verify_s: float) -> None:
        """Learn the time of a decode that ``streams`` shared; NaN = it is not comparable."""
        with self._learned.lock:
            self._learned.weighed.clear()
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
        n_drafted = sum(report.n_verified for report in reports) - n_streams
        learned.n_streams = n_streams
        factor = learned.curve.learn(n_tokens, verify_s, n_rounds)
        for record in learned.records.values():
            if record.n_timed == 0:
                record.step_s *= factor
        learned.costs = []
        learned.since_plain += n_rounds
        if not n_drafted and not any(report.drafter_called for report in reports):
            learned.n_plain += n_rounds
        if not n_drafted:
            learned.since_plain = 0
        # Each stream is charged the time that its own draft added to the decode.
        plain_s = learned.curve.filled(n_streams) if n_drafted else verify_s
        added_s = (verify_s - plain_s) / max(1, n_drafted)
        weight = n_rounds / n_streams
        for report in reports:
            seconds = plain_s / n_streams + (report.n_verified - 1) * added_s
            seconds += report.draft_s + report.overhead_s
            called = learned.records.get(report.drafter) if report.drafter_called else None
            for record in learned.records.values():
                if record is not called and not record.is_on:
                    record.waited += weight
                    record.waited_s += weight * seconds
            if called is not None:
                self._update_switch(called, report, seconds, weight)

    def _update_switch(
        self, record: _Record, report: RoundReport, seconds: float, weight: float
    ) -> None:
        """Switch a drafter on or off, by the throughput of the rounds in which it was called."""
        self._learned.record = record
        if not report.caught_up:  # the time of a prefill does not predict that of later rounds
            tokens = 1 + report.n_accepted
            keep = (1.0 - 1.0 / self.RATE_ROUNDS) ** weight
            record.tokens = keep * record.tokens + weight * tokens
            record.seconds = keep * record.seconds + weight * seconds
            record.rounds = keep * record.rounds + weight
            lost_s = seconds - tokens * self._plain_s()
            record.lost_s = max(0.0, record.lost_s + weight * lost_s)
        if record.is_on:
            if self._weighs(record):
                return  # each draft is decided by itself
            is_useless = self._is_known(record) and self._best(record)[0] == 0
            if is_useless or record.lost_s > self.LOST_STEPS * self._plain_s():
                record.switch(on=False)
                record.cool_down(self.COOLDOWN)
        elif record.waited < record.cooldown:
            return  # another stream of the same trial has decided
        elif not report.entropies:  # without a draft nothing is measured: probe a few more times
            record.empty_probes += weight
            if record.empty_probes >= self.EMPTY_PROBES:
                record.cool_down(record.cooldown or self.COOLDOWN)
        elif self._best(record)[1] >= self.MARGIN:
            record.switch(on=True)
            record.cool_down(self.COOLDOWN)
        elif record.cooldown or record.n_drafts >= self.WARM_UP_DRAFTS:
            cooldown = 2 * record.cooldown or self.COOLDOWN
            record.cool_down(min(cooldown, self.LONGEST_COOLDOWN))

    # -- report ------------------------------------------------------------------------------------

    def findings(self) -> Known | None:
        """Return what was measured so far, for later runs; None as long as t(1) is not known."""
        with self._learned.lock:
            curve = self._learned.curve
            n_decodes = curve.n_decodes
            if not n_decodes or 1 not in curve.sizes:
                return None
            one_s = curve.of(1)
            return Known(
                {1: one_s} | {n: curve.of(n) for n in n_decodes},
                drafters={
                    name: KnownDrafter(
                        record.acceptance.counts(), record.step_s / one_s, n_drafts=record.n_drafts
                    )
                    for name, record in self._learned.records.items()
                    if record.n_timed
                },
                n_decodes=n_decodes,
            )

    def explain(self) -> str:
        """Return the length it chose, and the measurements behind that."""
        with self._learned.lock:
            return self._explanation()

    def _explanation(self) -> str:
        learned, record = self._learned, self._learned.described()
        has_acceptance = learned.n_drafts > 0 or record.acceptance.is_kept
        known = (("plain step", bool(learned.curve)), ("draft", has_acceptance))
        missing = [name for name, is_known in known if not is_known]
        if missing:
            waiting = " and ".join(f"no {name}" for name in missing)
            times = f"; {learned.curve.explain()}" if learned.curve else ""
            return f"still measuring: {waiting} yet{times}" + self._sources(record)
        n, accepted, c = learned.n_streams, record.acceptance.mean, record.step_s / self._time(1)
        weighs = self._weighs(record)
        if weighs and record.n_tested:
            # The mean is of all copies, also of those not worth drafting.
            accepted = record.n_accepted / record.n_tested
        earlier = " and earlier runs" if record.acceptance.is_kept else ""
        facts = (
            f"a drafted token costs {c:.2f} of a target's step, about {accepted:.0%} are accepted "
            f"({record.n_accepted} of {record.n_tested} tested{earlier})"
        )
        streams = "" if n == 1 else f" with {n} sequences in a decode"
        details = "\n" + learned.curve.explain() + self._sources(record)
        if weighs:
            return f"drafting is on{streams} where a copy is likely: {facts}{details}"
        if not self._is_on():
            at_best = max(self._speedups(record, accepted, 0.0)[1:])
            return f"drafting is off{streams}: {facts}: at best {at_best:.2f} x{details}"
        k, speedup = self._best(record)
        return (
            f"drafting is on{streams}: {facts}: {speedup:.2f} x expected, with about {k} tokens a "
            f"draft, more where the drafter is sure{details}"
        )

    def _sources(self, record: _Record) -> str:
        """Return where the numbers come from: what was known before, and what was measured since."""
        learned = self._learned
        n_idle, n_decodes = learned.curve.n_idle, learned.curve.n_learned
        costs = learned.known.source if learned.known.target_s else ""
        if n_idle:
            costs = " and ".join(filter(None, (costs, f"{n_idle} decodes while nothing ran")))
        kept = record.source if record.acceptance.is_kept else ""
        dropped = f" ({record.source} was wrong)" if record.source and not kept else ""
        return (
            f"; times from {_joined(costs, n_decodes, 'decode')}, acceptance from "
            f"{_joined(kept or 'an assumed 0.50', record.n_drafts, 'draft')}{dropped}"
        )


def _joined(source: str, n: int, noun: str) -> str:
    """Return "SOURCE and N decodes of this run"; one of the two may be missing."""
    measured = f"{n} {noun}{'' if n == 1 else 's'} of this run" if n else ""
    return " and ".join(filter(None, (source, measured))) or "nothing yet"


def draft_length(
    config: SpeculativeConfig, width: int = 1, known: Known | None = None
) -> DraftLength:
    """Return the draft length that ``config`` sets, for drafts with ``width`` tokens per step."""
    if isinstance(config.draft_k, int):
        return FixedLength(config.draft_k, config.entropy_stop)
    return AutoLength(config.max_draft_tokens, config.entropy_stop, width, known)
