"""When a draft ends."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StopRule", "bucket"]

_LEAST_GAIN = 0.2  # tokens that a draft must be expected to gain: acceptance is not known exactly
_EDGES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # of buckets of entropy, nats


def bucket(entropy: float) -> int:
    """Return the bucket of an entropy, one of eight; -1, the last of nine, if it is NaN: not known."""
    return -1 if math.isnan(entropy) else bisect.bisect(_EDGES, entropy)


@dataclass(slots=True)
class StopRule:
    """When a draft ends, as numbers.

    Attributes:
        most_entropy: no token is drawn above it, nats; inf = no limit.
        most_tokens: of the draft, whatever the entropy.
        acceptance: the probability that a token of each bucket is accepted.
        costs: seconds of a round by the length of its draft; empty = only the limits count.
        mean: the acceptance of tokens whose entropy is not known yet.
        rate: tokens a second that a longer draft must exceed.
        is_probe: the first token is drawn even if that does not pay.
        weighs: drafting itself costs next to nothing: ``longest`` decides on all that could follow.
        n_drafted: tokens of the draft when the loop begins.
        reach: the product of the acceptance of the tokens drafted so far.
    """

    most_entropy: float
    most_tokens: float = math.inf
    acceptance: Sequence[float] = ()
    costs: Sequence[float] = ()
    mean: float = 0.0
    rate: float = 0.0
    is_probe: bool = False
    weighs: bool = False
    n_drafted: int = 0
    reach: float = 1.0

    def reason(self, n_drafted: int, entropy: float) -> str:
        """Return why the draft ends after ``n_drafted`` tokens, "" if a token at ``entropy`` follows.

        NaN = the entropy is not known.
        """
        if entropy > self.most_entropy:
            return "entropy"
        if n_drafted >= self.most_tokens:
            return "goodput"
        if self.costs:
            acceptance = self.acceptance[bucket(entropy)]
            if not (self.is_probe and n_drafted == 0) and not self._pays(n_drafted, acceptance):
                return "goodput"
            self.reach *= acceptance
        return ""

    def longest(self, entropies: Sequence[float]) -> int:
        """Return how many of the tokens that may follow, of which all is known, to draft.

        As many as gain the most over what their time would yield otherwise.
        """
        k, costs, reach, gained = self.n_drafted, self.costs, self.reach, 0.0
        best, n = _LEAST_GAIN, 0
        for i, entropy in enumerate(entropies, 1):
            if k + i >= len(costs) or k + i > self.most_tokens or entropy > self.most_entropy:
                break
            reach *= self.acceptance[bucket(entropy)]
            gained += reach
            gain = gained - self.rate * (costs[k + i] - costs[k])
            if gain > best:
                best, n, self.reach = gain, i, reach
        self.n_drafted = k + n
        return n

    def _pays(self, k: int, acceptance: float) -> bool:
        """Return whether some draft longer than ``k`` gains more tokens than its time is worth."""
        costs, reach, gained = self.costs, self.reach, 0.0
        for longer in range(k + 1, len(costs)):
            reach *= acceptance
            gained += reach
            if gained > self.rate * (costs[longer] - costs[k]):
                return True
            acceptance = self.mean
        return False
