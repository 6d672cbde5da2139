"""A quick measurement of t(n), the seconds of a decode of n tokens, on a context that is still unused.

It decodes without the ledger and clears the memory afterwards, so nothing shows that it has taken place:
no cell, no row, no count. That is certain only while the memory is as it was created, so it is done only
then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ..native import ContextHandle
from .context import Context

__all__ = ["LEAST_BYTES", "context_key", "measure_decode_times"]

# Weights that a processor's caches hold are computed about as fast for one token as they are read, so
# verifying n tokens costs nearly n steps: drafting gains little, and learning while it runs costs little.
LEAST_BYTES = 32 << 20

LIMIT_S = (
    1.0  # seconds after which no further size is begun, and the running decode is stopped at ...
)
_STOP_S = 2.0  # ... this many
_REPEATS = 2  # timed decodes of each size; the faster one counts


def context_key(ctx: Context) -> str:
    """Return what identifies a context's model and the speed of its decodes.

    Raises:
        OSError: the model's file is gone.
    """
    place = "gpu" if ctx.model.on_gpu else f"{ctx.n_threads}+{ctx.n_threads_batch} threads"
    return f"{ctx.model.fingerprint[:32]} {ctx.kv_type} {place}"


def measure_decode_times(ctx: Context, sizes: Sequence[int]) -> dict[int, float]:
    """Return seconds by number of tokens, with logits for all; empty if the context is not measured.

    Measured are contexts whose weights are ``LEAST_BYTES`` or more, whose memory can be truncated (else
    no draft is verified like this), and in which nothing has been decoded yet.
    Takes about a second, two at most. Sizes for which no time was left are missing: give the most
    important first.
    """
    with ctx.lock:
        if ctx.closed or ctx.model.size_bytes < LEAST_BYTES or not ctx.capabilities.can_truncate:
            return {}
        if ctx.kv_cache.ledger.clock:
            return {}
        largest = min(ctx.n_batch, ctx.n_outputs_max, ctx.n_ctx_seq)
        handle = ctx.decoder.handle
        try:
            return _measure(handle, [n for n in sizes if n <= largest])
        finally:
            handle.clear()


def _measure(handle: ContextHandle, sizes: Sequence[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        handle.stop()

    alarm = threading.Timer(_STOP_S, stop)
    alarm.daemon = True
    start = time.perf_counter()
    alarm.start()
    try:
        for n in sizes:
            best = None
            # The first decode of a size builds its graph.
            for repeat in range(_REPEATS + 1):
                if found and time.perf_counter() - start > LIMIT_S:
                    return found
                seconds = _time(handle, n)
                if seconds is None:
                    return found
                if repeat and (best is None or seconds < best):
                    found[n] = best = seconds
        return found
    finally:
        alarm.cancel()
        alarm.join()
        if is_late.is_set():  # an interruption that somebody else asked for is left to their decode
            handle.resume()


def _time(handle: ContextHandle, n: int) -> float | None:
    """Return the seconds of a decode of ``n`` tokens on the empty memory; None if it was stopped."""
    for i in range(n):
        handle.tokens[i] = (7 * i + 3) % handle.n_vocab
        handle.positions[i] = i
    handle.seqs[:n] = 0
    handle.wants_logits[:n] = 1
    start = time.perf_counter()
    code = handle.decode(n)
    handle.synchronize()
    seconds = time.perf_counter() - start
    if code == -2:  # no memory: the buffer of rows is gone
        handle.forget_rows()
    handle.remove(0, 0, -1)
    return seconds if code == 0 else None
