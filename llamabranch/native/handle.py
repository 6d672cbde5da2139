"""Ownership of native pointers."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import ClosedError

_generation = 0  # how many fork()s lie between this process and the one that imported this
_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def generation() -> int:
    """Return a number that is another one in every child of fork()."""
    return _generation


def forkable_lock() -> threading.RLock:
    """Return a lock that a child of fork() finds free if another thread held it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1
    for lock in _locks:
        # As the standard library does with its own; the thread that forked keeps what it holds.
        if not lock._is_owned():  # type: ignore[attr-defined]
            lock._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _release(free: Callable[[Any], None], ptr: Any, born: int, _parent: Handle | None) -> None:
    # A child of fork() inherits the address but not the threads behind it: only the owner frees.
    if born == _generation:
        free(ptr)


class Handle:
    """One native pointer, freed exactly once: by ``close()``, garbage collection or at exit.

    A handle keeps its parent alive; a parent knows its children weakly and closes them first. In a
    child of fork() it is closed: llama.cpp does not survive fork().
    """

    closes_first = False  # whether a thread at work with its siblings may hold its lock

    def __init__(
        self, ptr: Any, free: Callable[[Any], None], *, name: str, parent: Handle | None = None
    ) -> None:
        self.unchecked_ptr = ptr
        self._name = name
        self._generation = _generation
        self._children: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, _release, free, ptr, _generation, parent)
        if parent is not None:
            parent._children.add(self)

    @property
    def ptr(self) -> Any:
        """The pointer; raises ClosedError instead of ever handing out NULL."""
        if not self._finalizer.alive:
            raise ClosedError(f"the {self._name} is closed")
        if self._generation != _generation:
            raise ClosedError(
                f"the {self._name} belongs to the process that forked this one",
                hint="load the model in the process that uses it; llama.cpp does not survive fork()",
            )
        return self.unchecked_ptr

    @property
    def closed(self) -> bool:
        return self._generation != _generation or not self._finalizer.alive

    def close(self) -> None:
        """Free the pointer, children first. Does nothing the second time."""
        for child in sorted(self._children, key=lambda child: not child.closes_first):
            child.close()
        self._finalizer()
