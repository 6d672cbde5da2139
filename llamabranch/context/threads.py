"""Fewer threads while other programs use the cores.

The threads of a decode wait for each other some hundred times per token. If another program uses one of
the cores, each wait lasts until that program is descheduled, and two threads can be a hundred times
slower than one. On idle cores, the threads keep their cores busy all the time, even while they wait for
each other. So if they got clearly less processor time, we run a few decodes with fewer threads and keep
the faster number. More threads are tried again later, at growing intervals. The trials cost no extra
decodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

_EVERY, _SLOW_S = 8, 0.02  # one in 8 decodes is timed, and every one after a slow one
_LAP, _LAP_S = 4, 1.0  # decodes are compared in laps of this many, or of this many seconds
_IDLE = 0.8  # threads on idle cores get at least this share of them
_WORTH = 0.9  # a change must bring the time to this share or less
_HOPELESS, _MOST_OTHER = 3.0, 8  # a trial fails if 3 times slower, or after 8 of other sizes
_PAUSE, _MOST_PAUSE = 16, 1024  # laps until the next trial; doubled after each failed one


def _clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class _Kind:
    """The decodes of one token, or of several tokens, with the ``numbers`` of threads to choose from."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers, self.at, self.trying = numbers, 0, 0  # 1 = fewer are tried, -1 = more
        self.known_s, self.n_laps, self.pause = 0.0, 0, _PAUSE
        self.is_fresh = self.falls = True  # the threads start first; fewer are tried at once
        self.begin(0)

    def begin(self, size: int) -> None:
        self.size, self.n, self.n_other, self.seconds, self.cpu_s = size, 0, 0, 0.0, 0.0

    def note(self, size: int, seconds: float, cpu_s: float) -> None:
        """Add a decode of ``size`` tokens: its seconds, and the processor time of all threads."""
        if size != self.size and not self.trying:
            self.begin(size)
        self.n_other += size != self.size
        hopeless = seconds > _HOPELESS * self.known_s and size == self.size
        if self.trying and (hopeless or self.n_other == _MOST_OTHER):
            self.conclude(is_better=False)
        elif size == self.size and self.is_fresh:
            self.is_fresh = False
        elif size == self.size:
            self.n += 1
            self.seconds += seconds
            self.cpu_s += cpu_s
            if self.n >= _LAP or self.seconds >= _LAP_S:
                self.end_lap(self.seconds / self.n, self.cpu_s / self.seconds)

    def end_lap(self, mean: float, n_busy: float) -> None:
        """Judge a lap by its mean seconds per decode and the mean number of busy cores."""
        self.begin(self.size)
        if self.trying:
            self.conclude(is_better=mean < _WORTH * self.known_s)
            return
        self.known_s, self.n_laps = mean, self.n_laps + 1
        is_shared, is_time = n_busy < _IDLE * self.numbers[self.at], self.n_laps >= self.pause
        self.falls |= not is_shared
        if is_shared and self.at + 1 < len(self.numbers) and (is_time or self.falls):
            self.trying = 1
        elif self.at and is_time:
            self.trying = -1
        self.is_fresh = self.trying != 0

    def conclude(self, *, is_better: bool) -> None:
        """End a trial."""
        self.falls = is_better and self.trying > 0
        self.at += self.trying if is_better else 0
        self.pause = _PAUSE if is_better else min(_MOST_PAUSE, 2 * self.pause)
        self.trying, self.n_laps, self.is_fresh = 0, 0, True
        self.begin(self.size)


class ThreadWatch:
    """Times decodes of a context, and calls ``use`` to change the threads for one token and for many.

    Args:
        numbers: the numbers of threads that may be used, the largest first.
        clock: returns seconds, and the processor time of all threads, also in seconds.
    """

    def __init__(
        self,
        use: Callable[[int, int], None],
        numbers: Sequence[int],
        clock: Callable[[], tuple[float, float]] = _clock,
    ) -> None:
        self._use, self._clock, self._n = use, clock, 0
        self._was_slow = True  # the first decode is timed
        self._kinds = _Kind(numbers), _Kind(numbers)

    @property
    def n_threads(self) -> tuple[int, int]:
        """The numbers of threads in use, for one token and for several."""
        single, several = (kind.numbers[kind.at + kind.trying] for kind in self._kinds)
        return single, several

    def decode(self, n: int, submit: Callable[[], int]) -> int:
        """Call ``submit``, which decodes ``n`` tokens; return its code. Some of these calls are timed."""
        self._n += 1
        kind = self._kinds[n > 1]
        if not (self._was_slow or self._n % _EVERY == 0 or kind.trying):
            return submit()
        start, cpu = self._clock()
        code = submit()
        if code == 0:
            end, cpu_end = self._clock()
            self._was_slow, before = end - start >= _SLOW_S, self.n_threads
            kind.note(n, end - start, cpu_end - cpu)
            if self.n_threads != before:
                self._use(*self.n_threads)
        return code
