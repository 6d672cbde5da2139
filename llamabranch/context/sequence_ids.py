"""Which sequences of a context are allocated, and to which objects."""

from __future__ import annotations

import gc
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ..errors import SequencesExhaustedError
from .memory import Memory

__all__ = ["Evictable", "SequenceIds"]

_TRIES = 1000  # tries, a millisecond apart: a collection in another thread may take that long


class Evictable(Protocol):
    """Sequences that may be taken if none is free and another text needs one."""

    def evictable(self) -> Sequence[int]:
        """Return their ids. Does not wait for a lock."""

    def evict(self, used: Collection[int]) -> bool:
        """Free one of them that is not in ``used``; False if there is no such sequence.

        The caller holds the context's lock, in any thread.
        """


class SequenceIds:
    """Sequence ids and their holders, which are referenced weakly: a sequence is freed with its holder.

    Garbage collection can run at any time, also in the middle of a decode. So the finalizer only records
    the sequence, and ``collect`` empties the recorded sequences when that is safe.

    Args:
        memory: its sequences are allocated, and emptied when they are freed.
        check: raises an error if nothing may be allocated, and calls ``collect``.

    Attributes:
        evict: frees a sequence that the prefix cache holds; returns whether it did.
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
        self._evictables: list[weakref.ref[Evictable]] = []  # the first one is asked first
        self._in_use: list[tuple[weakref.ref[object], int]] = []  # users and their sequences

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._holders

    @property
    def n_cached(self) -> int:
        """How many allocated sequences belong to the prefix cache, which frees them on request."""
        return sum(1 for seq_id in tuple(self._memory.prefix_seq_ids) if seq_id < self.n_seq_max)

    @property
    def n_held(self) -> int:
        """How many sequences are allocated to other holders than the prefix cache."""
        return len(self._holders) - self.n_cached

    def count_free(self, *, used: Collection[int] = ()) -> int:
        """Return how many sequences could be allocated now; ``used`` is as for `allocate`.

        It does not wait until another thread has finished its step.
        """
        if self._lock.acquire(blocking=False):
            try:
                self.collect()
            finally:
                self._lock.release()
        used = self._with_those_in_use(used)
        evictable = {
            seq_id for owner in self._living_evictables() for seq_id in owner.evictable()
        } - used
        return sum(map(self._is_free, range(self.n_seq_max))) + self.n_cached + len(evictable)

    def _is_full(self) -> bool:
        return not any(map(self._is_free, reversed(range(self.n_seq_max))))

    def use(self, seq_id: int, user: object) -> None:
        """Do not evict this sequence until `end_use`, or until ``user`` is garbage. Hold the lock."""
        self._in_use = [*self._in_use, (weakref.ref(user), seq_id)]

    def end_use(self, user: object) -> None:
        """End what `use` began. A second call does nothing."""
        with self._lock:
            self._in_use = [use for use in self._in_use if use[0]() not in (None, user)]

    def _with_those_in_use(self, used: Collection[int]) -> set[int]:
        return {*used, *(seq_id for user, seq_id in self._in_use if user() is not None)}

    def _is_free(self, seq_id: int) -> bool:
        return seq_id not in self._holders and self._memory.first_position(seq_id) < 0

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

    def evict_last(self, evictable: Evictable) -> None:
        """Also take sequences from ``evictable`` from now on, after all others. Hold the lock."""
        others = [other for other in self._living_evictables() if other is not evictable]
        self._evictables = [weakref.ref(owner) for owner in (*others, evictable)]

    def _living_evictables(self) -> list[Evictable]:
        owners = (ref() for ref in self._evictables)
        return [owner for owner in owners if owner is not None]

    def allocate(
        self, holder: object, beginning: Sequence[int] = (), *, used: Collection[int] = ()
    ) -> int:
        """Allocate a sequence to ``holder`` until ``free`` or its garbage collection.

        The sequence is empty; or it holds the first tokens of ``beginning``, if a cached text has them
        and hands its sequence over. ``used``: sequences that the caller works with; none of them is
        evicted.

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
            while self._is_full() and any(
                owner.evict(self._with_those_in_use(used)) for owner in self._living_evictables()
            ):
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
        for seq_id in range(self.n_seq_max - 1, -1, -1):
            if self._is_free(seq_id):
                self.transfer(seq_id, holder)
                return seq_id
        return None

    def transfer(self, seq_id: int, holder: object) -> None:
        """Allocate this sequence to another holder."""
        weakref.finalize(holder, self._collected.append, seq_id).atexit = False
        self._holders[seq_id] = weakref.ref(holder)

    def free(self, seq_id: int) -> None:
        """Free a sequence, if it is allocated, and empty it."""
        with self._lock:
            if seq_id in self._holders:
                if not self._memory.handle.closed:
                    self._memory.drop(seq_id, 0)
                del self._holders[seq_id]

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
