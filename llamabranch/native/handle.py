"""Ownership of native pointers."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import ClosedError
from .interrupts import call_in_thread

_generation = 0  # how many forks lie between the import and this process
_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def generation() -> int:
    """Return a number that differs between a process and its children by fork()."""
    return _generation


def forkable_lock() -> threading.RLock:
    """Return a lock that is free in a child of fork(), even if another thread of the parent held it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def is_held(lock: threading.RLock) -> bool:
    """Return whether this thread holds the lock."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]


@contextmanager
def held_before(lock: threading.RLock, later: threading.RLock) -> Iterator[None]:
    """Hold ``lock`` in the ``with`` block, but never wait for it while holding ``later``.

    Other threads acquire ``lock`` first and then ``later``. So if this thread holds ``later``, it
    releases it while it waits.
    """
    if not is_held(later):
        lock.acquire()
    elif not lock.acquire(blocking=False):
        count = later._release_save()  # type: ignore[attr-defined]  # as `threading.Condition` does
        try:
            lock.acquire()
        finally:
            later._acquire_restore(count)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        lock.release()


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1
    for lock in _locks:
        # The standard library does the same with its own locks. Locks that the forking thread holds
        # stay locked.
        if not is_held(lock):
            lock._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _release(
    alive: list[bool],
    free: Callable[[Any], None],
    ptr: Any,
    born: int,
    _parents: Sequence[Handle],
) -> None:
    alive.clear()
    # A child of fork() inherits the address but not llama.cpp's threads, so only the parent frees it.
    if born == _generation:
        free(ptr)


class Handle:
    """One native pointer, freed exactly once: by ``close()``, garbage collection or at exit.

    A handle keeps its parents alive; a parent has weak references to its children and closes them
    first. In a child of fork(), every handle counts as closed, because llama.cpp does not survive
    fork(). ``name`` is what error messages call it.
    """

    closes_first = False  # before its siblings, because another thread may be decoding with it

    def __init__(
        self,
        ptr: Any,
        free: Callable[[Any], None],
        *,
        name: str,
        parents: Sequence[Handle] = (),
    ) -> None:
        self.unchecked_ptr = ptr
        self.name = name
        self._generation = _generation
        self._children: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._alive = alive = [True]  # emptied when freed; a list is quick to check
        self._finalizer = weakref.finalize(self, _release, alive, free, ptr, _generation, parents)
        for parent in parents:
            parent._children.add(self)

    def make(
        self,
        create: Callable[[], Any],
        free: Callable[[Any], None],
        *,
        name: str,
        parents: Sequence[Handle] = (),
        run: Callable[[Callable[[], None]], None] = call_in_thread,
    ) -> bool:
        """Initialise this handle with the pointer that ``create`` returns; return False if it is NULL.

        ``run`` may call it in another thread. If that is interrupted, a pointer that was already
        created is freed.
        """
        ptr: Any = None

        def call() -> None:
            nonlocal ptr
            ptr = create()
            if ptr:  # from here on it is freed with this object
                Handle.__init__(self, ptr, free, name=name, parents=parents)

        try:
            run(call)
        except BaseException:
            if ptr:
                self.close()
            raise
        return bool(ptr)

    @property
    def ptr(self) -> Any:
        """The pointer; raises ClosedError instead of returning NULL."""
        if not self._alive:
            raise ClosedError(f"the {self.name} is closed")
        if self._generation != _generation:
            raise ClosedError(
                f"the {self.name} was created in the parent process, before fork()",
                hint="load the model in the process that uses it: llama.cpp does not survive fork()",
            )
        return self.unchecked_ptr

    @property
    def closed(self) -> bool:
        return self._generation != _generation or not self._alive

    def close(self) -> None:
        """Free the pointer, children first. A second call does nothing."""
        self.close_children()
        self._finalizer()

    def close_children(self) -> None:
        """Close all handles that use the pointer."""
        for child in sorted(self._children, key=lambda child: not child.closes_first):
            child.close()
