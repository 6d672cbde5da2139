"""How many tokens to draft: the number with the highest throughput, learned while it runs."""

from __future__ import annotations

import bisect
import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from ..context import Context
from ..native import forkable_lock
from .drafter import Drafter, DraftLength, NullDrafter, Round, StopRule, bucket

__all__ = ["AutoLength"]

# Acceptance is learned for each bucket of entropy. These are the middles of the buckets in nats.
# The last bucket is for unknown entropy.
_MIDDLES = (0.02, 0.07, 0.15, 0.3, 0.6, 1.2, 2.4, 4.8, 0.7)


class _Record:
    """The record of a drafter: how often its tokens are accepted, what they cost, whether they pay."""

    def __init__(self, *, estimates: bool) -> None:
        self.estimates = estimates  # its entropies are its own estimates of its tokens' surprisals
        # A copy ends where the text differs. Its estimate cannot see that coming, so it is too sure.
        self._prior = [0.9 * math.exp(-1.25 * nats) if estimates else 0.5 for nats in _MIDDLES]
        weight, self._keep = (3.0, 0.95) if estimates else (1.0, 0.99)
        self._tested = [weight] * len(_MIDDLES)  # tested tokens per bucket; older ones count less
        self._accepted = [weight * chance for chance in self._prior]
        self._drawn = deque([-1], maxlen=64)  # the buckets of the tokens considered last
        self.step_s = 0.0  # seconds of a draft step
        self.n_drafts = self.n_tested = self.n_accepted = 0
        self.reach = 0  # the most tokens of its next draft after one accepted whole; else 0
        self.pause = 0  # rounds before it is tried again; 0 = it is called in every round
        self.waited = self.waited_s = 0.0  # rounds of the pause so far, and their seconds

    def acceptance(self) -> tuple[list[float], float]:
        """Return the acceptance in each bucket, and its mean over recently considered tokens."""
        rates = [a / t for a, t in zip(self._accepted, self._tested, strict=True)]
        return rates, sum(rates[drawn] for drawn in self._drawn) / len(self._drawn)

    def learn(self, done: Round) -> None:
        """Learn from the outcome of a draft."""
        draft, n_accepted = done.draft, done.n_accepted + bool(done.followed)
        n_tested = min(n_accepted + 1, len(draft.tokens) + (done.followed is not None))
        self.n_drafts += 1
        if draft.tokens:
            self.reach = (2 * len(draft.tokens) + 1) * (done.n_accepted == len(draft.tokens))
        self.n_tested, self.n_accepted = self.n_tested + n_tested, self.n_accepted + n_accepted
        for i, entropy in enumerate(draft.entropies):
            at = bucket(entropy)
            keep, weight, outcome = self._keep, 1.0, float(i < n_accepted)
            if i >= n_tested:  # untested: back a little towards the prior, or it is never retried
                keep, weight, outcome = 0.98, 0.02, self._prior[at]
            self._tested[at] = keep * self._tested[at] + weight
            self._accepted[at] = keep * self._accepted[at] + weight * outcome
            self._drawn.append(at)
        n_looks = max(
            1, len(draft.tokens), sum(not math.isnan(entropy) for entropy in draft.entropies)
        )
        if draft.n_read <= (2 if self.step_s else 8):  # else most of the time is reading
            seconds = min(draft.seconds / n_looks, 4.0 * (self.step_s or math.inf))
            share = 0.5 if seconds < self.step_s else 0.1 if self.step_s else 1.0
            self.step_s += share * (seconds - self.step_s)


class _Learned:
    """Shared by all generations of a context: seconds of rounds, and the records of drafters by name."""

    def __init__(self) -> None:
        self.lock = forkable_lock()
        self.records: dict[tuple[str, str], _Record] = {}
        self.seconds: dict[int, float] = {}  # t(n), by the number of target tokens
        self.n_sequences = 1  # in the last round
        self.since_plain = 0  # rounds since the last plain one
        self.gained, self.spent_s = 0.0, 1.0  # per sequence; older rounds count less

    def times(self, sizes: Sequence[int]) -> list[float]:
        """Return t(n) for these token counts, interpolated or extrapolated if they were not decoded."""
        known, seconds = zip(*(sorted(self.seconds.items()) or [(1, 1.0)]), strict=True)
        slope = seconds[-1] / 8  # with a single size: assume that more tokens cost something
        if known[1:]:  # mean of the upper half, because a single step says nothing about the slope
            low = min(bisect.bisect(known, known[-1] / 2), len(known) - 2)
            slope = max(0.0, (seconds[-1] - seconds[low]) / (known[-1] - known[low]))
        # Larger sizes are estimated with a quarter of the slope. So a size that may be cheap is
        # tried, and its time is then known.
        xs, ys = (*known, known[-1] + 4096), (*seconds, seconds[-1] + 1024 * slope)
        return [float(time_s) for time_s in np.interp(sizes, xs, ys)]

    def learn(self, n: int, seconds: float, n_rounds: int) -> None:
        """Learn from rounds with ``n`` tokens; the times of other sizes change in proportion."""
        if self.seconds:
            (expected,) = self.times([n])
            if n in self.seconds:  # the machine may be slower or faster now, and a context grows
                pace = 0.8 + 0.2 * min(2.0, max(0.5, seconds / expected))
                self.seconds = {size: pace * time_s for size, time_s in self.seconds.items()}
            most = 2.0 if len(self.seconds) > 1 else 4.0  # one slow round says little
            seconds = min(seconds, most * expected)
        old = self.seconds.get(n, seconds)
        self.seconds[n] = old + (1.0 - 0.9**n_rounds) * (seconds - old)


_of_contexts: weakref.WeakKeyDictionary[Context, _Learned] = weakref.WeakKeyDictionary()


class AutoLength(DraftLength):
    """The length with the highest throughput in tokens a second.

    A draft of k tokens is expected to bring E_k = 1 + sum_{j<=k} prod_{i<=j} b_i tokens in
    t(n) / n + k c + t(n + k) - t(n) seconds. Here b_i is the learned probability that a token drawn
    at this entropy is accepted, c is the time of a draft step, t(m) is the time of a round in which
    the target decodes m tokens, and n is the number of sequences that share the decode. A draft
    grows while some longer draft adds more tokens than other rounds would bring in the added time.

    If no length makes a drafter 3 % faster than plain steps, it is turned off, and tried again
    after longer and longer pauses. A drafter that copies at next to no cost is always called, to
    see which tokens could follow. All generations of a context share what is learned, in any number
    of threads.
    """

    WARM_UP_PLAIN = 3  # plain steps before the first draft
    WARM_UP_DRAFTS, WARM_UP_K = 4, 3  # drafts that measure a new drafter, and the tokens of each
    FIRST_K = 3  # tokens of a copied draft until longer ones have been timed
    MARGIN = 1.03  # the least expected speedup of drafts, since times are noisy
    REFRESH = 64  # rounds after which a plain step measures t(n) again
    PAUSE, LONGEST_PAUSE = 16, 1024  # rounds between trials
    CHEAP = 0.02  # share of a plain step: a draft step that takes less costs next to nothing
    TRIAL_SHARE = 0.02  # the most a trial may cost, as a share of the time since the last one

    reads_entropy = True

    def __init__(
        self,
        limit: int = 16,
        entropy_stop: float | None = None,
        drafter: Drafter | None = None,
        ctx: Context | None = None,
    ) -> None:
        self.limit = limit
        self._stop = StopRule(math.inf if entropy_stop is None else entropy_stop, self.WARM_UP_K)
        self._drafter = drafter or NullDrafter()
        self._learned = _Learned() if ctx is None else _of_contexts.setdefault(ctx, _Learned())
        self._splits = ctx is not None and ctx.kv_cache.forks_copy
        self._used: dict[str, _Record] = {}  # the drafters it was asked about, the latest one last
        self._record = _Record(estimates=False)  # of the drafter in use
        self._rule, self._rule_of = self._stop, self._record  # of the draft in progress
        self._n_behind = 0

    def plain_steps(self, n_behind: int) -> int:
        """Return how many plain steps to take before the drafter is called: 0 or 1 while it is on."""
        learned, used = self._learned, self._used.values()
        with learned.lock:
            self._n_behind = n_behind
            if not learned.seconds:
                return self.WARM_UP_PLAIN
            if not used or any(not record.pause for record in used):
                return int(learned.since_plain >= self.REFRESH)
            return 0 if any(map(self._is_due, used)) else self.PAUSE

    def consider(self, drafter: str) -> bool:
        """Return whether this drafter should draft; later ``goes_on`` calls are about it."""
        with self._learned.lock:
            fresh, key = _Record(estimates=drafter in self._drafter.estimates), self._drafter.name
            self._record = record = self._learned.records.setdefault((key, drafter), fresh)
            if self._used.pop(drafter, None) is None:  # another text may suit the drafter better
                record.pause = min(record.pause, self.PAUSE)
            self._used[drafter] = record
            return not record.pause or self._is_due(record)

    def stop_rule(self, n_drafted: int) -> StopRule:
        """Return the rule for the draft that has ``n_drafted`` tokens."""
        if n_drafted == 0 or self._record is not self._rule_of:
            reach = self._rule.reach if n_drafted else 1.0
            with self._learned.lock:
                self._rule, self._rule_of = self._new_rule(self._record), self._record
            self._rule.reach = reach
        self._rule.n_drafted = n_drafted
        return self._rule

    def _new_rule(self, record: _Record) -> StopRule:
        is_free, learned = self._is_free(record), self._learned
        is_new = record.n_drafts < self.WARM_UP_DRAFTS
        if is_new and not (is_free or record.pause):
            return replace(self._stop)
        costs, (rates, mean) = self._costs(record), record.acceptance()
        rate = max(1.0, self._best(record)[1]) / costs[0]
        if is_free and not is_new:  # some rounds have nothing to copy: use the measured rate
            rate = max(1.0 / costs[0], learned.gained / learned.spent_s)
        # Estimates of times beyond the measured sizes are poor. Such sizes are tried only after a
        # draft was accepted whole.
        most = max(self.FIRST_K, record.reach, max(learned.seconds, default=1) - 1)
        return replace(
            self._stop,
            most_tokens=most if is_free else 1 if record.pause else self.limit,
            acceptance=rates,
            costs=costs,
            mean=mean,
            rate=rate,
            is_probe=record.pause > 0,
            weighs=is_free,
        )

    def _is_free(self, record: _Record) -> bool:
        """Return whether all tokens that could follow can be seen at next to no cost."""
        n = self._learned.n_sequences
        return record.estimates and n * record.step_s < self.CHEAP * self._learned.times([n])[0]

    def _is_due(self, record: _Record) -> bool:
        """Return whether a drafter that is off should be tried again."""
        # The drafter first reads the tokens that it missed, also during a pause. Each costs about a
        # fifth of a step.
        n_behind, costs = max(self._n_behind, record.waited), self._costs(record)
        cost_s = record.step_s * (1 + n_behind / 5) + costs[1] - costs[0]
        return record.waited >= record.pause and cost_s < self.TRIAL_SHARE * record.waited_s

    def _costs(self, record: _Record) -> list[float]:
        """Return a sequence's seconds per round, by draft length, including all added time."""
        n, sizes = self._learned.n_sequences, range(1, self.limit + 1)
        # With non-unified K/V llama.cpp decodes the surplus tokens of one text by themselves.
        shared = n if n == 1 or not self._splits else 0
        plain_s, *times = self._learned.times([n, *(shared + k for k in sizes)])
        added_s = (max(0.0, added - plain_s * bool(shared)) for added in times)  # below 0 is noise
        return [plain_s / n + k * record.step_s + added for k, added in enumerate((0.0, *added_s))]

    def _best(self, record: _Record) -> tuple[int, float]:
        """Return the length with the highest expected throughput, and its speedup over plain steps."""
        costs, (_, mean) = self._costs(record), record.acceptance()
        tokens = accumulate(mean**k for k in range(self.limit + 1))
        # A draft that ends before the limit has also cost the draft step after which it ended.
        looks_s = [record.step_s] * self.limit + [0.0]
        gains = [n * costs[0] / sum(s) for n, *s in zip(tokens, costs, looks_s, strict=True)]
        k = max(range(1, self.limit + 1), key=gains.__getitem__)
        return k, gains[k]

    def learn(
        self, rounds: Sequence[Round], n_tokens: int, verify_s: float, n_rounds: int = 1
    ) -> None:
        """Learn from the rounds of all sequences that shared a decode."""
        learned, n = self._learned, len(rounds)
        with learned.lock:
            for each in rounds:
                if each.draft.entropies and each.draft.drafter in self._used:
                    self._used[each.draft.drafter].learn(each)
            if math.isnan(verify_s):
                return
            seconds = verify_s + sum(each.overhead_s for each in rounds)
            has_draft = any(each.draft.tokens for each in rounds)
            if n == 1 or not (has_draft and self._splits):
                learned.learn(n_tokens, seconds, n_rounds)
            learned.n_sequences = n
            learned.since_plain = has_draft * (learned.since_plain + 1)
            seconds += sum(each.draft.seconds for each in rounds)
            n_gained, keep = 1 + sum(each.n_accepted for each in rounds) / n, 0.97**n_rounds
            learned.gained = keep * learned.gained + n_rounds * n_gained
            learned.spent_s = keep * learned.spent_s + n_rounds * seconds
            tested = {each.draft.drafter for each in rounds if each.draft.entropies}
            for name, record in self._used.items():
                if name in tested:
                    is_new = not record.pause and record.n_drafts < self.WARM_UP_DRAFTS
                    least = 0.9 if is_new else self.MARGIN  # a few drafts may have had bad luck
                    pays = self._is_free(record) or self._best(record)[1] >= least
                    longer = min(2 * record.pause, self.LONGEST_PAUSE) or self.PAUSE
                    record.pause = 0 if pays else longer
                    record.waited = record.waited_s = 0.0
                elif record.pause:
                    record.waited += n_rounds
                    record.waited_s += seconds * n_rounds / n

    def explain(self) -> str:
        """Return the chosen length and the measurements behind it."""
        learned, used = self._learned, [*self._used.values()]
        with learned.lock:
            if not (learned.seconds and used and used[-1].n_drafts):
                return f"still measuring: {'' if learned.seconds else 'no plain step and '}no draft yet"
            record, n, one_s = used[-1], learned.n_sequences, learned.times([1])[0]
            k, gain = self._best(record)
            state, expected = "on", f": {gain:.2f} x expected, with about {k} tokens a draft"
            if self._is_free(record):
                state, expected = "on where a copy is likely", ""
            elif all(record.pause for record in used):
                state, expected = "off", f": at best {gain:.2f} x"
            beside = "" if n == 1 else f" with {n} sequences in a decode"
            share = record.n_accepted / max(1, record.n_tested)
            v = (f"{m} tokens v = {s / one_s:.2f}" for m, s in sorted(learned.seconds.items()))
            return (
                f"drafting is {state}{beside}: a drafted token costs {record.step_s / one_s:.2f} of a "
                f"target's step, about {share:.0%} are accepted ({record.n_accepted} of "
                f"{record.n_tested} tested){expected}\na target decode of {', '.join(v)}"
            )
