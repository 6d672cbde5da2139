"""How many threads a context computes with: measured when it is created.

The threads of a decode wait for one another some hundred times a token, and OpenMP threads spin while
they wait. That is fast on idle cores. If another program occupies one of the cores, each wait may last
until that program is descheduled: two threads can then be a hundred times slower than one. No number of
threads is best everywhere, so a few decodes are timed with each candidate.

The number changes no logits, with one exception: with flash attention over 512 or more cells of F16 or
F32 K/V, llama.cpp splits the attention of a single token into one part for each thread and adds
the parts. In such contexts the number for single tokens is not measured, because the same seed must give
the same text.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from ..model import Model
from ..native import ContextHandle, available_cores
from ..profile import is_off, machine_key, read_entry, write_entries
from .params import ContextParams
from .thread_watch import ThreadWatch
from .timing import trial_decode

__all__ = ["ThreadTuner", "candidates", "stopped_after"]

_SECTION = "threads"
_LEAST_CELLS = 256  # flash attention splits more cells than this among the threads

_BLOCK_S = 0.005  # seconds of decodes with each number of threads ...
_BLOCK_DECODES = 24  # ... but at most this many decodes ...
_BLOCK_LEAST = 8  # ... and at least this many ...
_BLOCK_LIMIT_S = 0.1  # ... and never longer than this: then the running decode is stopped.
_BATCH = 8  # tokens of the batch that is timed for all: about one drafted round, or a few texts
_PAUSE_S = 0.005  # the threads of the previous number still spin for a short time
_WORTH = 0.9  # more threads must take less than this share of the time of fewer
_IDLE = 0.8  # threads that got less than this share of their cores shared them with other programs
_STALE = 3.0  # if a decode takes this many times as long as when it was stored, measure again


def candidates(cores: int) -> list[int]:
    """Return the numbers of threads worth trying: one, half of the cores, all of them."""
    return sorted({1, max(1, cores // 2), cores})


class _Timing(NamedTuple):
    """The mean seconds of a decode (inf if none ended in time), and whether the cores were idle."""

    seconds: float
    idle: bool


class ThreadTuner:
    """Finds the numbers of threads for one context, if the user has not set them.

    Measurements on idle cores are stored for this machine and model (see ``profile.py``); a later
    context decodes a few tokens to check that they still hold. Measurements made while other programs
    used the cores are used, but not stored.

    Args:
        model, params: the model and the parameters of the context. All defaults are resolved, except
            threads that the user has not set.

    Attributes:
        params: with the numbers that were chosen.
    """

    def __init__(self, model: Model, params: ContextParams) -> None:
        self._model, self._given_batch = model, params.n_threads_batch
        splits = params.kv_type in ("f16", "f32") and params.flash_attention is not False
        is_large = params.n_ctx is None or params.n_ctx > _LEAST_CELLS
        self._changes_logits = model.memory_type != "recurrent" and splits and is_large
        self._cores = available_cores()
        is_open = params.n_threads is None and not (self._changes_logits and self._given_batch)
        # CPU threads do not matter for layers on a GPU.
        self._measures = is_open and self._cores > 1 and not model.on_gpu and not is_off()
        self._was_busy = False  # other programs used the cores during the measurement
        self._kept = self._read() if self._measures else None
        n_threads = params.n_threads or self._cores
        if self._kept is not None and max(self._kept[:2]) == 1 and not self._changes_logits:
            n_threads = 1  # if one thread was the best, no others are started to measure again
        n_batch = self._given_batch or n_threads
        self.params = replace(params, n_threads=n_threads, n_threads_batch=n_batch)

    def tune(self, handle: ContextHandle) -> None:
        """Choose, on an empty context that was created with these numbers; it is empty afterwards."""
        if not self._measures or self.params.n_threads == 1:
            return
        try:
            trial_decode(handle, 1)  # untimed: it loads the weights from disk into memory
            n_threads, n_batch = self._still_good(handle) or self._measure(handle)
        finally:
            handle.clear()
        n_threads = self._cores if self._changes_logits else n_threads
        n_batch = self._given_batch or n_batch
        self.params = replace(self.params, n_threads=n_threads, n_threads_batch=n_batch)
        handle.set_threads(n_threads, n_batch)

    def watch(self, handle: ContextHandle) -> ThreadWatch | None:
        """Return what changes the numbers on busy cores; None if the numbers may not change."""
        if is_off() or self._model.on_gpu or self._cores == 1:
            return None
        adapts = self._measures, self._measures and self._given_batch is None
        kinds = []
        for n, may in zip(
            (self.params.n_threads, self.params.n_threads_batch), adapts, strict=True
        ):
            n = n or self._cores
            most = self._cores if may and self._was_busy else n
            numbers = sorted(
                {n, *(number for number in candidates(self._cores) if number <= most)}
            )[::-1]
            kinds.append((numbers, numbers.index(n), may))
        if self._changes_logits:
            kinds[0] = (*kinds[0][:2], False)
        watch = ThreadWatch(handle.set_threads, kinds[0], kinds[1])
        return watch if watch.is_needed else None

    # -- what is kept ------------------------------------------------------------------------------

    def _key(self) -> str | None:
        try:
            print_ = self._model.quick_key[:32]
        except OSError:  # the file is gone
            return None
        return f"{machine_key()}, {print_}"

    def _read(self) -> tuple[int, int, float] | None:
        """Return the stored numbers of threads, and the seconds of the decode that is timed again."""
        entry = read_entry(_SECTION, self._key()) or {}
        single, many = entry.get("n_threads"), entry.get("n_threads_batch")
        times = entry.get("step_ms" if single != 1 else "batch_ms")
        if not (type(single) is int and type(many) is int and isinstance(times, dict)):
            return None
        ms = times.get(str(single if single != 1 else many))
        if not (isinstance(ms, (int, float)) and ms > 0 and min(single, many) >= 1):
            return None
        return None if max(single, many) > self._cores else (single, many, ms / 1000)

    def _still_good(self, handle: ContextHandle) -> tuple[int, int] | None:
        if self._kept is None:
            return None
        single, many, seconds = self._kept
        n_tokens, n_threads = (1, single) if single != 1 else (min(_BATCH, handle.n_batch), many)
        if _time(handle, n_tokens, n_threads).seconds > _STALE * seconds:
            return None
        return single, many

    # -- measuring ---------------------------------------------------------------------------------

    def _measure(self, handle: ContextHandle) -> tuple[int, int]:
        self._model.measuring("how many threads are fast")
        numbers = candidates(self._cores)
        singles = {n: _time(handle, 1, n) for n in numbers}
        single = _best(singles)
        n_tokens = min(_BATCH, handle.n_batch)
        if self._given_batch is not None or n_tokens == 1:
            return single, single
        batches = {n: _time(handle, n_tokens, n) for n in numbers}
        many = _best(batches)
        timings = [*singles.values(), *batches.values()]
        self._was_busy = not all(timing.idle for timing in timings)
        key = self._key()
        if key is not None and not self._was_busy:
            entry: dict[str, object] = {
                "n_threads": single,
                "n_threads_batch": many,
                "step_ms": _in_ms(singles),
                "batch_ms": _in_ms(batches),
            }
            write_entries([(_SECTION, key, entry)])
        return single, many


def _best(timings: dict[int, _Timing]) -> int:
    """Return the fastest number of threads; the smaller one if two are nearly equal."""
    best, *others = timings
    for n in others:
        if timings[n].seconds < _WORTH * timings[best].seconds:
            best = n
    if timings[best].seconds < math.inf:
        return best
    # No decode finished in time. On idle cores the model is large, and waiting is a small part of its
    # time. On busy cores some of them are left to the other programs.
    numbers = sorted(timings)
    return numbers[-1] if all(timing.idle for timing in timings.values()) else numbers[-2:][0]


def _in_ms(timings: dict[int, _Timing]) -> dict[str, float]:
    known = {n: timing.seconds for n, timing in timings.items() if timing.seconds < math.inf}
    return {str(n): round(1000 * seconds, 4) for n, seconds in known.items()}


def _time(handle: ContextHandle, n_tokens: int, n_threads: int) -> _Timing:
    """Time decodes of ``n_tokens`` of one sequence, from an empty cache, for a limited time."""
    time.sleep(_PAUSE_S)
    handle.set_threads(n_threads, n_threads)
    handle.clear()
    n, spent = 0, 0.0
    most = min(_BLOCK_DECODES, handle.n_ctx_seq // n_tokens - 1)
    cpu, start = time.process_time(), time.perf_counter()
    with stopped_after(handle, _BLOCK_LIMIT_S):
        # The first starts the threads and builds the graph.
        seconds = trial_decode(handle, n_tokens)
        if seconds is not None:
            cpu, start = time.process_time(), time.perf_counter()
        while seconds is not None and n < most and (n < _BLOCK_LEAST or spent < _BLOCK_S):
            seconds = trial_decode(handle, n_tokens, (n + 1) * n_tokens)
            n, spent = (n, spent) if seconds is None else (n + 1, spent + seconds)
    # These times tell whether the cores were idle, even if no decode finished.
    cpu, waited = time.process_time() - cpu, time.perf_counter() - start
    return _Timing(spent / n if n else math.inf, idle=cpu >= _IDLE * waited * n_threads)


@contextmanager
def stopped_after(handle: ContextHandle, seconds: float) -> Iterator[None]:
    """Stop a decode that this thread runs in the block after ``seconds``.

    Decodes after the block, and those of other threads, are not stopped.
    """
    key, thread = object(), threading.get_ident()

    def stop() -> None:
        handle.stops.stop_thread(key, thread)

    alarm = threading.Timer(min(seconds, threading.TIMEOUT_MAX), stop)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()
        alarm.join()
        handle.stops.withdraw(key)
