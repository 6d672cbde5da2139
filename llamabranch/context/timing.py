"""Limits of time on decodes, and timing decodes on a native context that nothing has used yet.

The latter bypass the table of cells, and the memory is cleared afterwards, so nothing shows that they
have taken place: no cell, no row, no count. That is certain only while the memory is as it was created.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..native import ContextHandle

__all__ = ["stopped_after", "trial_decode"]


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


def trial_decode(handle: ContextHandle, n: int, position: int = 0) -> float | None:
    """Decode ``n`` arbitrary tokens of sequence 0; return the seconds, None if that was stopped."""
    for i in range(n):
        handle.tokens[i] = (7 * i + 3) % handle.n_vocab
        handle.positions[i] = position + i
    handle.seqs[:n] = 0
    handle.wants_logits[:n] = 0
    handle.wants_logits[n - 1] = 1
    start = time.perf_counter()
    code = handle.decode(n)
    handle.synchronize()
    if code == -2:  # no memory: the buffer of rows is gone
        handle.forget_rows()
    return time.perf_counter() - start if code == 0 else None
