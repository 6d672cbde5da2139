"""Fewer threads while other programs use the cores.

The threads of a decode wait for one another some hundred times a token. If another program uses one of
the cores, every wait lasts until that program is descheduled: two threads can then be a hundred times
slower than one. The numbers were chosen when the context was opened and may be wrong by then, so decodes
are watched.

Threads that compute or wait for each other use their cores all the time. If they got less processor time
than that, other programs use the cores. Then a few decodes run with fewer threads, and the faster number
is kept. More threads are tried again later, at growing intervals. A trial costs no extra work, because
its decodes are needed anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..arguments import figure
from ..errors import PerformanceWarning, warn

__all__ = ["ThreadWatch"]

_EVERY = 8  # one in this many decodes is timed (a power of two) ...
_SLOW_S = 0.02  # ... but each one that takes longer than this
_LAP = 4  # decodes are compared in laps of this many ...
_LAP_S = 1.0  # ... or of this many seconds
_IDLE = 0.8  # threads that got less than this share of their cores shared them with other programs
_WORTH = 0.9  # another number must take less than this share of the time
_HOPELESS = 3.0  # a trial ends at once if a decode takes this many times as long
_PAUSE, _MOST_PAUSE = 16, 1024  # laps until the next trial; doubled after each failed one
_MOST_OTHER = 8  # after this many decodes of other sizes a trial ends without a result
_COLLAPSE = 5.0  # a lap this many times as slow as the fastest is reported, if the number must stay

Clock = Callable[[], tuple[float, float]]


def _clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class _Kind:
    """The decodes of one token, or of several.

    Args:
        numbers: the numbers of threads that may be used, the largest first.
        at: the index of the number in use.
        adapts: whether another number may be used.
    """

    def __init__(self, numbers: Sequence[int], at: int, *, adapts: bool) -> None:
        self._numbers, self._at = numbers, at
        self._adapts = adapts
        self._trying: int | None = None
        # Of a lap: the tokens of its decodes, how many there were, and how many of other sizes.
        self._size = self._n = self._n_other = 0
        self._seconds = self._cpu_s = 0.0
        self._known_s = self._fastest_s = 0.0  # a decode's, in the last and in the fastest lap
        self._is_fresh = True  # the first decode with another number starts its threads
        self._n_laps = self._n_collapsed = 0
        self._pause = _PAUSE
        self._falls = True  # try fewer first: the cores were idle, or fewer were better

    @property
    def n_threads(self) -> int:
        """The number to use now."""
        return self._numbers[self._at if self._trying is None else self._trying]

    @property
    def is_trying(self) -> bool:
        """Whether another number is being tried."""
        return self._trying is not None

    @property
    def is_watched(self) -> bool:
        """Whether decodes are worth timing."""
        return len(self._numbers) > 1

    def note(self, size: int, seconds: float, cpu_s: float) -> None:
        """Add a decode of ``size`` tokens: its seconds, and the processor time of all threads."""
        if size != self._size and self._trying is not None:
            self._n_other += 1
            if self._n_other == _MOST_OTHER:
                self._conclude(is_better=False)
            return
        if size != self._size:
            self._begin(size)
        if self._trying is not None and seconds > _HOPELESS * self._known_s:
            self._conclude(is_better=False)
            return
        if self._is_fresh:
            self._is_fresh = False
            return
        self._n += 1
        self._seconds += seconds
        self._cpu_s += cpu_s
        if self._n >= _LAP or self._seconds >= _LAP_S:
            self._end_lap(self._seconds / self._n, self._cpu_s / self._seconds)

    def _begin(self, size: int) -> None:
        self._size, self._n, self._n_other, self._seconds, self._cpu_s = size, 0, 0, 0.0, 0.0
        self._fastest_s = 0.0

    def _end_lap(self, mean: float, n_busy: float) -> None:
        """Judge a lap: seconds of a decode, and how many cores were used on average."""
        fastest = self._fastest_s
        self._begin(self._size)
        if self._trying is not None:
            self._conclude(is_better=mean < _WORTH * self._known_s)
            return
        self._known_s, self._fastest_s = mean, min(mean, fastest or mean)
        self._n_laps += 1
        is_shared = n_busy < _IDLE * self.n_threads
        collapsed = is_shared and mean >= _COLLAPSE * self._fastest_s
        self._n_collapsed = self._n_collapsed + 1 if collapsed else 0
        self._falls |= not is_shared
        is_time = self._n_laps >= self._pause
        if not self._adapts:
            return
        if is_shared and self._at + 1 < len(self._numbers) and (is_time or self._falls):
            self._trying = self._at + 1
        elif self._at and is_time:
            self._trying = self._at - 1
        self._is_fresh = self._trying is not None

    def _conclude(self, *, is_better: bool) -> None:
        """End a trial."""
        self._falls = False
        if is_better and self._trying is not None:
            self._falls = self._trying > self._at
            self._at, self._pause = self._trying, _PAUSE
        else:
            self._pause = min(_MOST_PAUSE, 2 * self._pause)
        self._trying, self._n_laps, self._is_fresh = None, 0, True
        self._begin(self._size)

    def take_collapse(self) -> tuple[float, float] | None:
        """Return a decode's seconds now and in the fastest lap, once, if the number cannot change."""
        if self._adapts or self._n_collapsed < 2:
            return None
        self._n_collapsed = 0
        return self._known_s, self._fastest_s


class ThreadWatch:
    """Times decodes of a context, and changes its numbers of threads.

    Args:
        use: sets the numbers of threads for one token and for several.
        single, several: the ``numbers``, ``at`` and ``adapts`` of `_Kind`, for decodes of one token and
            of several.
        clock: returns seconds, and the processor time of all threads, also in seconds.
    """

    def __init__(
        self,
        use: Callable[[int, int], None],
        single: tuple[Sequence[int], int, bool],
        several: tuple[Sequence[int], int, bool],
        clock: Clock = _clock,
    ) -> None:
        self._use, self._clock = use, clock
        self._kinds = [
            _Kind(numbers, at, adapts=adapts) for numbers, at, adapts in (single, several)
        ]
        self._n = 0
        self._was_slow = self._has_warned = False

    @property
    def is_needed(self) -> bool:
        """Whether decodes are worth timing."""
        return any(kind.is_watched for kind in self._kinds)

    @property
    def n_threads(self) -> tuple[int, int]:
        """The numbers of threads in use, for one token and for several."""
        single, several = self._kinds
        return single.n_threads, several.n_threads

    def decode(self, n: int, submit: Callable[[], int]) -> int:
        """Call ``submit``, which decodes ``n`` tokens, and return its result; time it if it is its turn.

        Raises:
            PerformanceWarning: only if warnings are errors.
        """
        self._n += 1
        kind = self._kinds[n > 1]
        is_due = self._was_slow or not self._n & (_EVERY - 1) or kind.is_trying
        if not (is_due and kind.is_watched):
            return submit()
        start, cpu = self._clock()
        code = submit()
        if code == 0:
            end, cpu_end = self._clock()
            self._was_slow = end - start >= _SLOW_S
            before = self.n_threads
            kind.note(n, end - start, cpu_end - cpu)
            if self.n_threads != before:
                self._use(*self.n_threads)
            self._warn(kind, n)
        return code

    def _warn(self, kind: _Kind, n: int) -> None:
        collapse = kind.take_collapse()
        if collapse is None or self._has_warned:
            return
        self._has_warned = True
        now, best = collapse
        batch = "a token" if n == 1 else f"{n} tokens"
        warn(
            f"decoding {batch} with {kind.n_threads} threads takes {figure(1e3 * now)} ms now, it took "
            f"{figure(1e3 * best)} ms: other programs use the cores, and the threads wait for each "
            "other. n_threads=1 is faster until they have ended",
            PerformanceWarning,
        )
