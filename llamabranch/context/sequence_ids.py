"""Which sequences of a context are allocated, and which objects hold them."""

from __future__ import annotations

import gc
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ..errors import SequencesExhaustedError
from ..native.interrupts import uninterrupted
from .memory import Memory

_TRIES = 1000  # a millisecond apart, because a collection in another thread may take a second


class SequenceIds:
    """Sequence ids and their holders, which are referenced weakly: a sequence is freed with its holder.

    Garbage collection can run at any time, also in the middle of a decode. So the finalizer only notes
    the sequence, and ``collect`` empties it when that is safe.

    Args:
        memory: its sequences are allocated, and emptied when they are freed.
        check: raises an error if nothing may be allocated, and calls ``collect``.

    Attributes:
        evict: frees a sequence that the prefix cache holds; returns False if it holds no text.
        transfer_text: takes a sequence over from a cached text; see ``PrefixCache.transfer_text``.
    """

    def __init__(self, memory: Memory, check: Callable[[], object]) -> None:
        self.n_seq_max = memory.cells.n_seq_max
        self.evict: Callable[[], bool] = lambda: False
        self.transfer_text: Callable[[Sequence[int], bool], int | None] = lambda *_: None
        self._memory = memory
        self._lock = memory.handle.lock  # every call takes it
        self._check = check
        self._holders: dict[int, weakref.ref[object]] = {}
        self._collected: deque[int] = deque()

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._holders

    @property
    def n_cached(self) -> int:
        """How many allocated sequences belong to the prefix cache, which frees them on request."""
        return sum(1 for seq_id in tuple(self._memory.prefix_seq_ids) if seq_id < self.n_seq_max)

    @property
    def n_held(self) -> int:
        """How many sequences have holders other than the prefix cache."""
        return len(self._holders) - self.n_cached

    def count_free(self) -> int:
        """Return how many sequences could be allocated now, including the prefix cache's.

        It does not wait until another thread has finished its step.
        """
        if self._lock.acquire(blocking=False):
            try:
                self.collect()
            finally:
                self._lock.release()
        return sum(1 for _ in self._free()) + self.n_cached

    def _free(self) -> Iterator[int]:
        """Yield the sequences that are neither allocated nor in use, the highest first."""
        for seq_id in range(self.n_seq_max - 1, -1, -1):
            if seq_id not in self._holders and not self._memory.next_position(seq_id):
                yield seq_id

    def _is_full(self) -> bool:
        return next(self._free(), None) is None

    def holder(self, seq_id: int) -> object:
        """Return the holder of ``seq_id``; None if it is not allocated or its holder was collected."""
        ref = self._holders.get(seq_id)
        return None if ref is None else ref()

    def holders(self) -> list[object]:
        """Return the holders of allocated sequences, ordered by sequence id."""
        with self._lock:
            self.collect()
            all_holders = map(self.holder, range(self.n_seq_max))
            return [holder for holder in all_holders if holder is not None]

    def allocate(self, holder: object, beginning: Sequence[int] = ()) -> int:
        """Allocate a sequence to ``holder`` until ``free`` or its garbage collection.

        The sequence is empty, or holds the first tokens of ``beginning`` if a cached text has them
        and hands its sequence over. If no sequence is free, the prefix cache frees its least
        recently used one.

        Raises:
            SequencesExhaustedError: all are taken; the message lists the holders.
            UnsupportedError: this is the context of a head, which reads the sequences of its target.
        """
        with self._lock:
            self._check()
            reused = self.transfer_text(beginning, self._is_full()) if beginning else None
            if reused is not None:
                self.transfer(reused, holder)
                return reused
            while self._is_full() and self.n_cached and self.evict():
                pass
            if self._is_full():
                _collect_garbage()  # an unreferenced branch may be in a reference cycle
                self.collect(noted=False)
            seq_id = self.allocate_if_free(holder)
            if seq_id is not None:
                return seq_id
            holders = "; ".join(f"{s} by {ref()!r}" for s, ref in sorted(self._holders.items()))
            raw = [s for s in range(self.n_seq_max) if s not in self._holders]
            raise SequencesExhaustedError(
                f"all {self.n_seq_max} sequences are taken: {holders or 'none by branches'}"
                + (f"; {raw} by raw calls" if raw else ""),
                hint="prune a branch, or create the context with a larger n_seq_max",
            )

    def allocate_if_free(self, holder: object) -> int | None:
        """Allocate the highest sequence that is neither allocated nor in use; None if all are.

        Hold the lock, as for ``transfer`` and ``collect``.
        """
        seq_id = next(self._free(), None)
        if seq_id is not None:
            self.transfer(seq_id, holder)
        return seq_id

    @uninterrupted
    def transfer(self, seq_id: int, holder: object) -> None:
        """Allocate this sequence to another holder."""
        weakref.finalize(holder, self._collected.append, seq_id).atexit = False
        self._holders[seq_id] = weakref.ref(holder)

    @uninterrupted
    def free(self, seq_id: int) -> None:
        """Free a sequence, if it is allocated, and empty it."""
        with self._lock:
            if seq_id in self._holders:
                if not self._memory.handle.closed:
                    self._memory.drop(seq_id, 0)
                del self._holders[seq_id]

    @uninterrupted
    def collect(self, *, noted: bool = True) -> None:
        """Free the sequences whose holders were garbage collected.

        With ``noted=False`` also free those whose finalizer has not yet run in another thread.
        """
        n = len(self._collected)
        if noted and not n:
            return
        for seq_id in [seq_id for seq_id, ref in self._holders.items() if ref() is None]:
            self.free(seq_id)
        for _ in range(n):
            self._collected.popleft()


def _collect_garbage() -> None:
    """Collect all garbage. ``gc.collect`` does nothing while another thread is collecting."""
    for _ in range(_TRIES):
        n_before = gc.get_stats()[-1]["collections"]
        gc.collect()
        if gc.get_stats()[-1]["collections"] > n_before:
            return
        time.sleep(0.001)
