"""Requests to stop a context's decode: the running one, the next one, or only one thread's."""

from __future__ import annotations

from threading import get_ident

from .handle import forkable_lock


class Stops:
    """Sets the flag that llama.cpp checks while it decodes.

    ``stop`` stops any decode. ``stop_thread`` stops only the decodes of one thread. A stop
    lasts until it has stopped one decode, or until it is withdrawn.

    Attributes:
        flag: the flag, in its first byte: 1 = stop.
    """

    def __init__(self) -> None:
        self.flag = bytearray(2)
        self._lock = forkable_lock()
        self._stops_any = False
        self._threads: dict[object, int] = {}  # the thread of each key
        self._decoding = 0  # the thread that decodes; it holds the context's lock

    def stop(self) -> None:
        """Stop the running decode, or the next one. A signal handler may call this: it never waits."""
        self._stops_any = True
        self.flag[0] = 1

    def resume(self) -> None:
        """Withdraw ``stop``."""
        with self._lock:
            self._stops_any = False
            self._update()

    def stop_thread(self, key: object, thread: int) -> None:
        """Stop a thread's running decode, or else its next one."""
        with self._lock:
            self._threads[key] = thread
            self._update()

    def withdraw(self, key: object) -> bool:
        """Withdraw ``stop_thread``; return False if it has stopped a decode, or was never called."""
        with self._lock:
            is_pending = self._threads.pop(key, None) is not None
            self._update()
            return is_pending

    @property
    def is_pending(self) -> bool:
        """Whether this thread's next decode will be stopped."""
        return self._stops_any or get_ident() in list(self._threads.values())

    def begin(self) -> int:
        """Note that this thread starts a decode; return the argument for ``end``."""
        before, self._decoding = self._decoding, get_ident()
        if self._threads:
            with self._lock:
                self._update()
        return before

    def end(self, before: int) -> None:
        """Note that the decode has ended."""
        self._decoding = before
        if self._threads:
            with self._lock:
                self._update()

    def note_stopped(self) -> None:
        """Note that this thread's decode was stopped, so that the stop which did it is used up."""
        thread = get_ident()
        with self._lock:
            key = next((k for k, other in self._threads.items() if other == thread), None)
            if key is None or self._stops_any:
                self._stops_any = False
            else:
                del self._threads[key]
            self._update()

    def _update(self) -> None:
        self.flag[0] = 0
        # Read after the line above: ``stop`` takes no lock.
        if self._stops_any or self._decoding in self._threads.values():
            self.flag[0] = 1
