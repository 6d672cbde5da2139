"""Timing decodes on a native context that nothing has used yet.

They bypass the ledger, and the memory is cleared afterwards, so nothing shows that they have taken place:
no cell, no row, no count. That is certain only while the memory is as it was created.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..native import ContextHandle

__all__ = ["seconds_by_size", "stopped_after", "trial_decode"]

_ROUNDS = 2  # timed decodes of each size; the faster one counts


@contextmanager
def stopped_after(handle: ContextHandle, seconds: float) -> Iterator[None]:
    """Stop what the block decodes after ``seconds``, and nothing after the block.

    An interruption that somebody else has asked for is left to their decode.
    """
    passed = threading.Event()

    def stop() -> None:
        passed.set()
        handle.stop()

    alarm = threading.Timer(min(seconds, threading.TIMEOUT_MAX), stop)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()
        alarm.join()
        if passed.is_set():
            handle.resume()


def trial_decode(
    handle: ContextHandle, n: int, position: int = 0, *, wants_all: bool = False
) -> float | None:
    """Decode ``n`` arbitrary tokens of sequence 0; return the seconds, None if that was stopped.

    ``wants_all``: the logits of all of them, not of the last one only.
    """
    for i in range(n):
        handle.tokens[i] = (7 * i + 3) % handle.n_vocab
        handle.positions[i] = position + i
    handle.seqs[:n] = 0
    handle.wants_logits[:n] = wants_all
    handle.wants_logits[n - 1] = 1
    start = time.perf_counter()
    code = handle.decode(n)
    handle.synchronize()
    if code == -2:  # no memory: the buffer of rows is gone
        handle.forget_rows()
    return time.perf_counter() - start if code == 0 else None


def seconds_by_size(
    handle: ContextHandle, sizes: Sequence[int], limit_s: float
) -> dict[int, float]:
    """Return seconds by number of tokens, with logits for all of them.

    After ``limit_s`` no further size is begun, after twice that the running decode is stopped. Sizes for
    which no time was left are missing.
    """
    found: dict[int, float] = {}
    start = time.perf_counter()
    with stopped_after(handle, max(2.0, 2 * limit_s)):
        for turn in range(_ROUNDS + 1):
            for n in (
                sizes if turn else sizes[:1]
            ):  # the very first decode may still load the weights
                if found and time.perf_counter() - start > limit_s:
                    return found
                seconds = trial_decode(handle, n, wants_all=True)
                handle.remove(0, 0, -1)
                if seconds is None:
                    return found
                if turn:
                    found[n] = min(seconds, found.get(n, seconds))
    return found
