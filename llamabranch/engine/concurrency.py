"""How many texts run at a time: as many as were measured to give the most tokens a second.

In a unified cache the attention of every token runs over the cells of all texts, so many long texts can
be slower together than some of them at a time. While texts wait, the throughput is measured with the
present number and then with half and twice as many, for as long as it gets better. Fewer run by admitting
fewer: a text that has begun goes on, since it keeps its cells.

Besides, the number ends on an edge of the target's curve: nine rows can take far more time than eight.
"""

from __future__ import annotations

from ..generation.length.curve import Curve

__all__ = ["Concurrency"]

_LEAST_CELLS = 2048  # with fewer, attention to other texts costs little: nothing is tried
_LEAST_ENDED = 4  # texts, for a measurement
_GAIN = 1.03  # what another number must bring
_OTHER_LENGTH = 1.5  # texts longer or shorter by this factor are measured anew


class Concurrency:
    """Measures throughput and chooses how many texts run.

    Args:
        curve: the times of the target's decodes.

    Attributes:
        limit: that number, before the curve is looked at; None = as many as can.
    """

    def __init__(self, curve: Curve | None = None) -> None:
        self.limit: int | None = None
        self._curve = curve
        self._edge = (0, 0, 0)  # the last answer of ``on_edge``, after what was asked
        self._rates: dict[int, float] = {}  # tokens a second, by the number of texts
        self._length = 0.0  # tokens of the texts for which these hold
        self._begin()

    def _begin(self) -> None:
        """Begin a measurement."""
        self._n_tokens = self._n_ended = self._n_ended_tokens = self._most_cells = 0
        self._seconds = 0.0

    def on_edge(self, most: int, n_texts: int) -> int:
        """Return how many of ``n_texts`` unfinished texts, at most ``most``, to run at a time.

        As many as take the least time if all get equally many tokens: in waves of them, the last one
        smaller, or, if there are far more texts, with the most tokens a second.
        """
        curve = self._curve
        if curve is None or not curve.knows(most) or min(most, n_texts) < 2:
            return most
        if self._edge[:2] != (most, n_texts):
            self._edge = (most, n_texts, _fastest(curve, most, n_texts))
        return self._edge[2]

    def note_step(
        self, n_tokens: int, n_active: int, n_cells: int, seconds: float, *, most: int, waits: bool
    ) -> None:
        """Note a step.

        Args:
            n_tokens: how many texts got a token.
            n_active: how many texts run, those included whose prompt is being read.
            n_cells: the cells that they use.
            seconds: how long it took.
            most: how many texts can run.
            waits: whether others wait to be admitted.
        """
        if not waits:
            self._begin()
            return
        now = self.limit or most
        if n_active > now:  # more were admitted before
            return
        self._n_tokens += n_tokens
        self._seconds += seconds
        self._most_cells = max(self._most_cells, n_cells)
        if self._n_ended >= max(now, _LEAST_ENDED):
            self._choose(now, most)
            self._begin()

    def note_end(self, n_tokens: int) -> None:
        """Note that a text has ended after so many tokens, prompt included."""
        if self._n_tokens:
            self._n_ended += 1
            self._n_ended_tokens += n_tokens

    def _choose(self, now: int, most: int) -> None:
        if self._most_cells < _LEAST_CELLS and self.limit is None:
            return
        length = self._n_ended_tokens / self._n_ended
        if not self._length / _OTHER_LENGTH < length < self._length * _OTHER_LENGTH:
            self._rates.clear()
            self._length = length
        rates = self._rates
        rates[now] = self._n_tokens / self._seconds
        best = max(rates, key=lambda n: (rates[n], n))
        if best != now and rates[best] < _GAIN * rates[now]:
            best = now
        near = [n for n in (max(1, best // 2), min(most, 2 * best)) if n not in rates]
        best = near[0] if near else best
        self.limit = None if best >= most else best


def _fastest(curve: Curve, most: int, n_texts: int) -> int:
    def seconds(n: int) -> float:
        if n_texts >= 2 * most:
            return curve.filled(n) / n
        n_waves, rest = divmod(n_texts, n)
        return n_waves * curve.filled(n) + (curve.filled(rest) if rest else 0.0)

    best = min(range(most, 0, -1), key=seconds)
    return best if _GAIN * seconds(best) < seconds(most) else most
