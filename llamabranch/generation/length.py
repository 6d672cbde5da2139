"""The draft length "auto", which follows running averages of acceptance and of round times."""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Sequence

from ..context import Context
from ..native.handle import forkable_lock
from .drafter import Drafter, DraftLength, NullDrafter, Round

WARM_UP_PLAIN = 3  # plain steps before the first draft
PAUSE, LONGEST_PAUSE = 16, 1024  # rounds between trials of a drafter that is off
_WARM_UP, _WARM_UP_K = 4, 2  # a drafter's first drafts, and their tokens
_MARGIN = 1.03  # the least speedup of drafts
_SLOWEST = 1.2  # plain steps; a draft step that takes longer never pays
_SUDDEN = 2.0  # if a time is this much shorter, earlier times are outdated
_REFRESH = 64  # rounds until a plain step is measured again
_CHEAP = 0.01  # of a plain step: a faster draft step costs next to nothing
_EDGES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # edges of the entropy buckets, nats
# The acceptance to assume at first in each bucket. The last one is for unknown entropy.
_PRIOR = (0.88, 0.84, 0.78, 0.67, 0.49, 0.27, 0.08, 0.01, 0.45)


def _bucket(entropy: float) -> int:
    return -1 if math.isnan(entropy) else bisect.bisect(_EDGES, entropy)


class _Speed:
    """Tokens of a sequence per time of a plain step, over roughly the last thirty rounds."""

    def __init__(self) -> None:
        self.n_tokens = self.n_steps = 1.0

    def add(self, n_tokens: float, n_steps: float, n_rounds: int = 1) -> None:
        """Add rounds with ``n_tokens`` each, which each took as long as ``n_steps`` plain steps."""
        keep = 0.97**n_rounds
        self.n_tokens = keep * self.n_tokens + n_rounds * n_tokens
        self.n_steps = keep * self.n_steps + n_rounds * n_steps

    def halve(self) -> None:
        """Make later rounds count twice as much."""
        self.n_tokens, self.n_steps = self.n_tokens / 2, self.n_steps / 2

    @property
    def value(self) -> float:
        """The speed; 1 = the speed of plain steps."""
        return self.n_tokens / self.n_steps


class _Record:
    """The record of a drafter. Older rounds count less. Times are multiples of a plain step's."""

    def __init__(self) -> None:
        self.tested, self.accepted = [1.0] * len(_PRIOR), [*_PRIOR]  # tokens in each bucket
        self.n_tested = self.n_accepted = 0
        self.forget_times()

    def forget_times(self) -> None:
        """Forget everything except which tokens were accepted."""
        self.step = self.verify = 0.0  # time to draft a token, and to verify one
        self.speed = _Speed()  # of its rounds
        self.n_drafts = self.longest = 0  # rounds, and the maximum number of tokens of one draft
        self.pause = self.waited = 0  # rounds between trials (0 = it is on), and since the last one

    def test(self, done: Round) -> None:
        """Learn which tokens of a draft were accepted."""
        n_tested = min(done.n_accepted + 1, len(done.draft.tokens))
        self.n_tested += n_tested
        self.n_accepted += done.n_accepted
        for i, at in enumerate(map(_bucket, done.draft.entropies)):
            weight, share, outcome = 1.0, 0.01, float(i < done.n_accepted)
            if i >= n_tested:  # go back towards the prior, or it would never be tried again
                weight, share, outcome = 0.005, 0.005, _PRIOR[at]
            self.tested[at] += weight - share * self.tested[at]
            self.accepted[at] += weight * outcome - share * self.accepted[at]

    def time(self, rounds: Sequence[Round], n: int, plain_s: float, verify: float) -> None:
        """Learn from this drafter's rounds in a decode of ``n`` sequences: does it pay?

        A plain step takes ``plain_s`` seconds, and each drafted token adds ``verify`` times that.
        """
        drafts = [done.draft for done in rounds]
        n_drafted = sum(len(draft.tokens) for draft in drafts)
        entropies = [entropy for draft in drafts for entropy in draft.entropies]
        n_steps = max(1, n_drafted, sum(not math.isnan(entropy) for entropy in entropies))
        step = min(sum(draft.seconds for draft in drafts) / n_steps / plain_s, _SLOWEST)
        if step < self.step / _SUDDEN:  # the first were slow: weights were being loaded
            self.forget_times()
        self.n_drafts += 1
        self.longest = max(self.longest, *(len(draft.tokens) for draft in drafts), 0)
        share = max(0.1, 1.0 / self.n_drafts)
        # With more tokens to read, most of the time goes into reading.
        if all(draft.n_read <= (2 if self.step else 8) for draft in drafts):
            old = self.step or step
            self.step = old + share * (min(step, 4.0 * old) - old)  # one slow round says little
        if n_drafted:
            old = self.verify or verify
            self.verify = old + share * (verify - old)
        cost = n * (n_steps * self.step + n_drafted * self.verify) / len(rounds)
        self.speed.add(1 + sum(done.n_accepted for done in rounds) / len(rounds), 1 + cost)
        least = 0.9 if self.n_drafts < 16 else _MARGIN  # a few drafts may just be unlucky
        if self.speed.value >= least or (not self.pause and self.n_drafts < _WARM_UP):
            self.pause = 0
        else:
            self.pause = min(2 * self.pause, LONGEST_PAUSE) or PAUSE
            self.waited = 0
            self.speed.halve()


class _Learned:
    """The measurements that all generations of a context share."""

    def __init__(self) -> None:
        self.lock = forkable_lock()
        self.records: dict[tuple[str, str], _Record] = {}  # of drafters
        self.plain_s: dict[int, float] = {}  # seconds of a plain step, by the number of sequences
        self.n_sequences = 1  # in the last round
        self.since_plain = 0  # rounds since the last plain round
        self.speed = _Speed()  # of all rounds

    def time(self, n: int, seconds: float, n_rounds: int, *, is_plain: bool) -> float:
        """Return the seconds of a plain step of ``n`` sequences, learned from plain rounds."""
        nearest = min(self.plain_s, key=lambda known: abs(known - n), default=n)
        plain_s = self.plain_s.get(nearest, seconds)
        if is_plain:
            plain_s = plain_s if n == nearest else seconds
            if seconds < plain_s / _SUDDEN:  # draft times were relative to a wrong time
                plain_s, self.speed = seconds, _Speed()
                for record in self.records.values():
                    record.forget_times()
            plain_s += (1.0 - 0.9**n_rounds) * (min(seconds, 2.0 * plain_s) - plain_s)
            self.plain_s[n] = plain_s
        self.n_sequences, self.since_plain = n, 0 if is_plain else self.since_plain + 1
        return plain_s


_of_contexts: weakref.WeakKeyDictionary[Context, _Learned] = weakref.WeakKeyDictionary()


class AutoLength(DraftLength):
    """The length with the highest throughput, according to the measurements so far.

    A draft continues as long as the probability that all of it is accepted is larger than the number of
    tokens that other rounds generate in the time of one more drafted token. A drafter that gains less
    than 3 % over plain steps is turned off, and tried with one token after longer and longer pauses. A
    drafter that costs next to nothing stays on, and drafts where acceptance is likely. All generations
    of a context share the measurements, in any number of threads.
    """

    reads_entropy = True

    def __init__(
        self,
        limit: int = 16,
        entropy_stop: float | None = None,
        drafter: Drafter | None = None,
        ctx: Context | None = None,
    ) -> None:
        super().__init__(limit, entropy_stop)
        self._drafter = drafter or NullDrafter()
        self._learned = _Learned() if ctx is None else _of_contexts.setdefault(ctx, _Learned())
        self._used: dict[str, _Record] = {}  # the drafters it was asked about, the latest last
        self._record, self._is_trial = _Record(), False  # of the drafter in use
        self._reach = 1.0  # the probability that the whole draft is accepted
        self._n_behind = 0

    def plain_steps(self, n_behind: int) -> int:
        """Return how many plain steps to take before the drafter is called: 0 or 1 while it is on."""
        learned, used = self._learned, self._used.values()
        with learned.lock:
            self._n_behind = n_behind
            if not learned.plain_s:
                return WARM_UP_PLAIN
            if not used or any(not record.pause or self._is_free(record) for record in used):
                return int(learned.since_plain >= _REFRESH)
            return 0 if any(map(self._is_due, used)) else PAUSE

    def consider(self, drafter: str) -> bool:
        """Return whether this drafter should draft; later ``goes_on`` calls are about it."""
        with self._learned.lock:
            record = self._learned.records.setdefault((self._drafter.name, drafter), _Record())
            if self._used.pop(drafter, None) is None:  # another text may suit the drafter better
                record.pause = min(record.pause, PAUSE)
            self._used[drafter] = self._record = record
            self._is_trial = record.pause > 0 and self._is_due(record)
            return not record.pause or self._is_trial or self._is_free(record)

    def _is_free(self, record: _Record) -> bool:
        return record.n_drafts > 0 and self._learned.n_sequences * record.step < _CHEAP

    def _is_due(self, record: _Record) -> bool:
        """Return whether a drafter that is off should be tried again."""
        # The drafter first reads the tokens that it missed, each in a fifth of its step. This may take
        # up to four plain steps, and beyond that 2 % of the time. A trial is worth it because the
        # measured times may be wrong, or because the drafter may suit the text now.
        return record.waited >= max(record.pause, 50 * (self._n_behind * record.step / 5 - 4.0))

    def pays(self, n_drafted: int, entropy: float) -> bool:
        """Return whether another token is worth its time."""
        record, learned, at = self._record, self._learned, _bucket(entropy)
        reach = record.accepted[at] / record.tested[at] * (self._reach if n_drafted else 1.0)
        self._reach = reach
        if self._is_trial:
            return n_drafted == 0
        is_short = n_drafted < _WARM_UP_K
        if record.n_drafts < _WARM_UP and (is_short or not self._is_free(record)):
            return is_short
        cost = learned.n_sequences * (record.step + record.verify)
        is_known = n_drafted < 2 * record.longest + 1  # a longer draft may cost more
        return is_known and reach > max(1.0, learned.speed.value) * cost

    def learn(
        self, rounds: Sequence[Round], n_tokens: int, verify_s: float, n_rounds: int = 1
    ) -> None:
        """Learn from the rounds of all sequences that shared a decode."""
        learned, n = self._learned, len(rounds)
        n_drafted = sum(len(done.draft.tokens) for done in rounds)
        with learned.lock:
            for done in rounds:
                if done.draft.entropies and done.draft.drafter in self._used:
                    self._used[done.draft.drafter].test(done)
            if math.isnan(verify_s):
                return
            seconds = verify_s + sum(done.overhead_s for done in rounds)
            plain_s = learned.time(n, seconds, n_rounds, is_plain=not n_drafted)
            n_steps = (seconds + sum(done.draft.seconds for done in rounds)) / plain_s
            learned.speed.add(1 + sum(done.n_accepted for done in rounds) / n, n_steps, n_rounds)
            verify = min(1.0, max(0.0, seconds / plain_s - 1.0) / max(1, n_drafted))
            for name, record in self._used.items():
                own = [r for r in rounds if r.draft.entropies and r.draft.drafter == name]
                if own and (any(r.draft.tokens for r in own) or not self._is_free(record)):
                    record.time(own, n, plain_s, verify)
                else:
                    record.waited += n_rounds

    def explain(self) -> str:
        """Explain whether it drafts, and by which measurements."""
        learned, used = self._learned, [*self._used.values()]
        with learned.lock:
            if not (learned.plain_s and used and used[-1].n_drafts):
                return f"still measuring: {'' if learned.plain_s else 'no plain step and '}no draft yet"
            record, n = used[-1], learned.n_sequences
            beside = "" if n == 1 else f" with {n} sequences in a decode"
            share = record.n_accepted / max(1, record.n_tested)
            return (
                f"drafting is {'off' if all(r.pause for r in used) else 'on'}{beside}: a drafted token "
                f"costs {record.step:.2f} of a target's step, and {record.verify:.2f} to verify; "
                f"{share:.0%} are accepted ({record.n_accepted} of {record.n_tested} tested): "
                f"{record.speed.value:.2f} x"
            )
