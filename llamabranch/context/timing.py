"""Trial decodes: arbitrary tokens of an empty native context, timed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..native import ContextHandle

__all__ = ["decode_seconds", "trial_decode"]

_PAUSE_S = 0.005  # the threads of the previous decodes still spin for a short time


def trial_decode(
    handle: ContextHandle, n: int, position: int = 0, *, n_rows: int = 1
) -> float | None:
    """Decode ``n`` arbitrary tokens of sequence 0; return the seconds, None if the decode was stopped.

    Use it only on a native context that has just been created, because the table of cells does not get
    these tokens. The last ``n_rows`` tokens get logits.
    """
    for i in range(n):
        handle.tokens[i] = (7 * i + 3) % handle.n_vocab
        handle.positions[i] = position + i
    handle.seqs[:n] = 0
    handle.wants_logits[: n - n_rows] = 0
    handle.wants_logits[n - n_rows : n] = 1
    start = time.perf_counter()
    outer = handle.stops.begin()
    try:
        code = handle.decode(n)
    finally:
        handle.stops.end(outer)
    handle.synchronize()
    if code == -2:  # no memory: the buffer of rows is gone
        handle.forget_rows()
    return time.perf_counter() - start if code == 0 else None


def decode_seconds(
    handle: ContextHandle, sizes: Sequence[int], threads: tuple[int, int]
) -> list[float] | None:
    """Return how many seconds one thread takes for a decode of each size, with an empty cache.

    The time that other programs take from the core does not count, if the system measures that. In
    decodes of up to eight tokens each token gets logits, as for eight texts. In larger ones only the
    last token does, as in a prompt. The result is None if a decode failed.

    Args:
        handle: the native context, whose cache is empty afterwards.
        sizes: how many tokens each decode has.
        threads: the numbers of threads to set afterwards, for one token and for many.
    """
    time.sleep(_PAUSE_S)
    handle.set_threads(1, 1)
    times = []
    try:
        for n in sizes:
            handle.clear()
            cpu = time.process_time()
            n_rows = min(n, handle.n_outputs_max) if n <= 8 else 1
            seconds = trial_decode(handle, n, n_rows=n_rows)
            if seconds is None:
                return None
            cpu = time.process_time() - cpu
            times.append(min(seconds, cpu) if cpu > 0 else seconds)
    finally:
        handle.clear()
        handle.set_threads(*threads)
    return times
