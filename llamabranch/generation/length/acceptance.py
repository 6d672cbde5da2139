"""How often a drafter's tokens are accepted, depending on the entropy they were drawn at."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Acceptance", "AcceptanceCounts"]

_EDGES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)  # nats
_N_BUCKETS = len(_EDGES) + 1
_UNKNOWN = _N_BUCKETS  # the bucket of tokens whose drafter gives no entropy
# The weight with which a token drawn in a bucket counts in it, and in its neighbours.
_SHARED = ((-2, 0.1), (-1, 0.3), (0, 1.0), (1, 0.3), (2, 0.1))
_PRIOR = 0.5  # one token in two is accepted
_MIDDLES = [sum(ends) / 2 for ends in zip((0.0, *_EDGES), (*_EDGES, 7.0), strict=True)]
# A copy ends where the text differs, of which its estimate knows nothing: it is too sure by about a half.
_OF_SURPRISALS = [*(math.exp(-1.5 * middle) for middle in _MIDDLES), _PRIOR]
_WEIGHT, _WEIGHT_OF_ESTIMATES = 1.0, 8.0  # tested tokens that the prior counts as


@dataclass(frozen=True)
class AcceptanceCounts:
    """Tested, accepted and drawn tokens by entropy bucket, with less weight the older they are."""

    tested: tuple[float, ...]
    accepted: tuple[float, ...]
    drawn: tuple[float, ...]

    SIZE: ClassVar = _N_BUCKETS + 1

    def __post_init__(self) -> None:
        """Raise ValueError unless these are counts."""
        for counts in (self.tested, self.accepted, self.drawn):
            if len(counts) != self.SIZE or not all(0 <= count < math.inf for count in counts):
                raise ValueError("counts are numbers of at least 0, one for each bucket")
        if any(accepted > tested for accepted, tested in self.pairs):
            raise ValueError("more tokens were accepted than tested")

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Accepted and tested tokens of each bucket."""
        return list(zip(self.accepted, self.tested, strict=True))


class Acceptance:
    """The probability of acceptance by entropy, learned from rounds.

    It begins with one accepted in two, at a small weight, or with the counts of earlier runs. Those have
    the weight of some twenty tokens a bucket, and are dropped if too many or too few tokens are accepted
    for them to be true of this run.

    Args:
        of_surprisals: the entropies are surprisals of the tokens themselves, as the drafter estimates
            them: it begins with these estimates.
    """

    KEPT_WEIGHT = 20.0  # the most tested tokens of a bucket that earlier runs count as
    KEPT_DRAWN = 100.0  # the same for how often each entropy occurs, over all buckets
    FADE, FADE_SURPRISALS = 0.01, 0.05  # of a bucket's counts, with each tested token
    SURPRISE = 2.5  # standard deviations, plus half a token, from which they are dropped

    def __init__(self, *, of_surprisals: bool = False) -> None:
        self._prior = _OF_SURPRISALS if of_surprisals else [_PRIOR] * (_N_BUCKETS + 1)
        self._weight = _WEIGHT_OF_ESTIMATES if of_surprisals else _WEIGHT
        # Where a text begins to repeat another, copies are right that were wrong before.
        self._fades = self.FADE_SURPRISALS if of_surprisals else self.FADE
        self.tested = [self._weight] * (_N_BUCKETS + 1)
        self.accepted = [self._weight * chance for chance in self._prior]
        self.drawn = [0.0] * (_N_BUCKETS + 1)
        # What earlier runs contributed to these, and by how much they are wrong about this run.
        self._kept: AcceptanceCounts | None = None
        self._keeps = [1.0] * (_N_BUCKETS + 1)  # how much of the first weight a bucket still has
        self._drawn_here = [0.0] * (_N_BUCKETS + 1)  # in this run
        self._expected = self._variance = self._observed = 0.0

    @property
    def is_kept(self) -> bool:
        """True while the counts of earlier runs are used."""
        return self._kept is not None

    def start_from(self, counts: AcceptanceCounts) -> None:
        """Begin with the counts of earlier runs; call it before anything is learned."""
        tested, accepted = [], []
        for old_tested, old_accepted in zip(counts.tested, counts.accepted, strict=True):
            share = min(1.0, self.KEPT_WEIGHT / old_tested) if old_tested else 0.0
            tested.append(share * old_tested)
            accepted.append(share * old_accepted)
        drawn = sum(counts.drawn)
        share = min(1.0, self.KEPT_DRAWN / drawn) if drawn else 0.0
        self._kept = AcceptanceCounts(
            tuple(tested), tuple(accepted), tuple(share * n for n in counts.drawn)
        )
        for i in range(_N_BUCKETS + 1):
            if tested[i] >= 1.0:  # it includes the prior already
                self.tested[i], self.accepted[i] = tested[i], accepted[i]
        self.drawn = list(self._kept.drawn)

    def counts(self) -> AcceptanceCounts:
        """Return the counts, for later runs."""
        return AcceptanceCounts(tuple(self.tested), tuple(self.accepted), tuple(self.drawn))

    @property
    def edges(self) -> tuple[float, ...]:
        """The upper ends of the buckets of entropy but the last, nats, ascending."""
        return _EDGES

    def rates(self) -> list[float]:
        """Return the probability of acceptance below each of ``edges``, above the last, and unknown."""
        return [a / t for a, t in zip(self.accepted, self.tested, strict=True)]

    @property
    def mean(self) -> float:
        """The probability averaged over all entropies, weighted by how often they occur."""
        drawn = sum(self.drawn)
        if drawn == 0:
            return _PRIOR
        counts = zip(self.drawn, self.accepted, self.tested, strict=True)
        return sum(n * accepted / tested for n, accepted, tested in counts) / drawn

    def learn(self, entropies: Sequence[float], n_steps: int, n_accepted: int) -> None:
        """Learn from a draft of ``n_steps``, and the entropies of all steps that were considered."""
        buckets = [_bucket(entropy) for entropy in entropies]
        for bucket in buckets:
            for drawn in (self.drawn, self._drawn_here):
                drawn[bucket] = 0.995 * drawn[bucket] + 1.0
        for i, bucket in enumerate(buckets[: min(n_steps, n_accepted + 1)]):
            if self._kept is not None:
                self._compare(bucket, accepted=i < n_accepted)
            self._test(bucket, accepted=i < n_accepted)
        for bucket in buckets[n_steps:]:
            self._forget(bucket)
        if abs(self._observed - self._expected) > self.SURPRISE * math.sqrt(self._variance) + 0.5:
            self._drop_kept()

    def _test(self, bucket: int, *, accepted: bool) -> None:
        for offset, weight in ((0, 1.0),) if bucket == _UNKNOWN else _SHARED:
            at = bucket + offset
            if 0 <= at < _N_BUCKETS or at == bucket:
                self._fade(at, 1.0 - self._fades * weight)
                self.tested[at] += weight
                self.accepted[at] += weight * accepted

    def _forget(self, bucket: int) -> None:
        """Move the bucket a little towards the prior; else what is never drawn would never be retried."""
        self._fade(bucket, 0.98)
        self.tested[bucket] += 0.02
        self.accepted[bucket] += 0.02 * self._prior[bucket]

    def _fade(self, bucket: int, keep: float) -> None:
        self.tested[bucket] *= keep
        self.accepted[bucket] *= keep
        self._keeps[bucket] *= keep

    def _compare(self, bucket: int, *, accepted: bool) -> None:
        """Note what the counts of earlier runs expected of a token, and what has happened."""
        if self._kept is None or self._kept.tested[bucket] < 1.0:
            return
        chance = self._kept.accepted[bucket] / self._kept.tested[bucket]
        chance = min(0.98, max(0.02, chance))
        self._expected += chance
        self._variance += chance * (1.0 - chance)
        self._observed += accepted

    def _drop_kept(self) -> None:
        """Take the counts of earlier runs out again: this run's own count, from the first."""
        kept, self._kept = self._kept, None
        self._expected = self._variance = self._observed = 0.0
        if kept is None:
            return
        self.drawn = list(self._drawn_here)
        for i, keep in enumerate(self._keeps):
            if kept.tested[i] >= 1.0:
                self.tested[i] += keep * (self._weight - kept.tested[i])
                self.accepted[i] += keep * (self._weight * self._prior[i] - kept.accepted[i])


def _bucket(entropy: float) -> int:
    return _UNKNOWN if math.isnan(entropy) else bisect.bisect(_EDGES, entropy)
