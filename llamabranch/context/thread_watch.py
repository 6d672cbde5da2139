"""Decodes watched for threads that wait for cores which other programs use."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..errors import PerformanceWarning, warn
from ..model import Model
from ..native import ContextHandle
from ..profile import is_off
from .threads import IDLE, ThreadTuner

__all__ = ["ThreadWatch"]


@dataclass
class _Lap:
    """Some decodes of one size: how many, their seconds, and the processor time of all threads."""

    n: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0


class ThreadWatch:
    """Detects that threads wait for cores that other programs use, and warns once.

    It times one decode in eight, of small batches. Two laps in a row that are far slower than the
    fastest, or than the time measured when the context was created, may just mean a longer context: but
    then the threads are busy all the time. It warns only where they also got less processor time.
    """

    EVERY = 8  # a power of two
    LARGEST = 16  # tokens of a decode that is watched

    LAP = 4
    LAPS = 2
    SLOW = 5.0  # times the fastest lap
    LEAST_S = 0.002  # a lap with faster decodes is never slow, whatever the fastest lap was

    def __init__(
        self, handle: ContextHandle, n_threads: int, n_threads_batch: int, step_s: float | None
    ) -> None:
        self._handle = handle
        self._n_threads = (n_threads, n_threads_batch)
        self._laps: dict[int, _Lap] = {}
        self._fastest: dict[int, float] = {} if step_s is None else {1: step_s}
        self._n_slow: dict[int, int] = {}
        self._warned = False

    @classmethod
    def of(cls, handle: ContextHandle, model: Model, tuner: ThreadTuner) -> ThreadWatch | None:
        """Return a watch, or None where there is nothing to watch."""
        if is_off() or model.on_gpu or max(tuner.n_threads, tuner.n_threads_batch) == 1:
            return None
        return cls(handle, tuner.n_threads, tuner.n_threads_batch, tuner.step_s)

    def decode(self, n: int) -> int:
        """Decode the first ``n`` entries of the batch arrays, timed; return llama.cpp's code.

        Raises:
            PerformanceWarning: only where warnings are errors.
        """
        if self._warned or n > self.LARGEST or self._n_threads[n > 1] == 1:
            return self._handle.decode(n)
        cpu, start = time.process_time(), time.perf_counter()
        code = self._handle.decode(n)
        if code == 0:
            self.note(n, time.perf_counter() - start, time.process_time() - cpu)
        return code

    def note_loop(self, n: int, n_decodes: int, seconds: float, cpu_s: float) -> None:
        """Add the mean of ``n_decodes`` decodes of ``n`` tokens each, from their totals."""
        if not (self._warned or n > self.LARGEST or self._n_threads[n > 1] == 1):
            self.note(n, seconds / n_decodes, cpu_s / n_decodes)

    def note(self, n: int, seconds: float, cpu_s: float) -> None:
        """Add a decode of ``n`` tokens: its seconds, and the processor time of all threads."""
        lap = self._laps.setdefault(n, _Lap())
        lap.n += 1
        lap.seconds += seconds
        lap.cpu_s += cpu_s
        if lap.n == self.LAP:
            self._end(n, self._laps.pop(n))

    def _end(self, n: int, lap: _Lap) -> None:
        mean = lap.seconds / lap.n
        fastest = self._fastest[n] = min(mean, self._fastest.get(n, mean))
        n_threads = self._n_threads[n > 1]
        slow = mean >= max(self.SLOW * fastest, self.LEAST_S)
        shares_cores = lap.cpu_s < IDLE * lap.seconds * n_threads
        self._n_slow[n] = self._n_slow.get(n, 0) + 1 if slow and shares_cores else 0
        if self._n_slow[n] < self.LAPS:
            return
        self._warned = True
        what = "one token" if n == 1 else f"{n} tokens"
        warn(
            f"decoding {what} with {n_threads} threads now takes {1000 * mean:.3g} ms, it has taken "
            f"{1000 * fastest:.3g} ms: other programs use the cores, and llama.cpp's threads wait "
            f"for each other. Create the context with n_threads=1, or let the cores become idle. If "
            f"another thread of this program decoded before: Context.release_threads() there.",
            PerformanceWarning,
        )
