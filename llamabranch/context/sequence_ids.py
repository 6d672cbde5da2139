"""Which sequences are leased, and to which objects."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

from ..errors import SequencesExhaustedError

__all__ = ["SequenceIds"]


class SequenceIds:
    """Sequence ids leased to holders, which are referenced weakly: a lease ends with its holder.

    Garbage collection can run at any time, also in the middle of a decode, so the finalizer only records
    the sequence; ``forgotten`` returns the recorded ones when it is safe to empty them.
    """

    def __init__(self, n_seq_max: int) -> None:
        self.n_seq_max = n_seq_max
        self._holders: dict[int, weakref.ref[object]] = {}
        self._collected: deque[int] = deque()

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._holders

    def __len__(self) -> int:
        return len(self._holders)

    def holder(self, seq_id: int) -> object:
        """Return the holder of ``seq_id``; None if it is not leased or its holder was collected."""
        ref = self._holders.get(seq_id)
        return None if ref is None else ref()

    def lend(self, holder: object, is_empty: Callable[[int], bool]) -> int:
        """Lease the highest sequence that is neither leased nor in use.

        Raises:
            SequencesExhaustedError: there is none; the message lists the holders.
        """
        for seq_id in range(self.n_seq_max - 1, -1, -1):
            if seq_id not in self._holders and is_empty(seq_id):
                weakref.finalize(holder, self._collected.append, seq_id).atexit = False
                self._holders[seq_id] = weakref.ref(holder)
                return seq_id
        holders = "; ".join(f"{s} by {ref()!r}" for s, ref in sorted(self._holders.items()))
        raw = [s for s in range(self.n_seq_max) if s not in self._holders]
        raise SequencesExhaustedError(
            f"all {self.n_seq_max} sequences are taken: {holders or 'none by branches'}"
            + (f"; {raw} by raw calls" if raw else ""),
            hint="prune a branch, or create the context with a larger n_seq_max",
        )

    def transfer(self, seq_id: int, holder: object) -> None:
        """Make ``holder`` the one whose lease this is."""
        weakref.finalize(holder, self._collected.append, seq_id).atexit = False
        self._holders[seq_id] = weakref.ref(holder)

    def end(self, seq_id: int) -> None:
        """End the lease of a sequence."""
        del self._holders[seq_id]

    def forgotten(self, *, noted: bool = True) -> list[int]:
        """Return the sequences whose holders were garbage collected, until their leases end.

        With ``noted`` false also those whose finalizer has not run yet in another thread.
        """
        n = len(self._collected)
        if noted and not n:
            return []
        found = [seq_id for seq_id, ref in self._holders.items() if ref() is None]
        for _ in range(n):
            self._collected.popleft()
        return found
