"""Ownership of native pointers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import ClosedError


def _release(free: Callable[[Any], None], ptr: Any, pid: int, _parent: Handle | None) -> None:
    # A child of fork() inherits the address but not the threads behind it: only the owner frees.
    if os.getpid() == pid:
        free(ptr)


class Handle:
    """One native pointer, freed exactly once: by ``close()``, garbage collection or at exit.

    A handle keeps its parent alive; a parent knows its children weakly and closes them first.
    """

    def __init__(
        self, ptr: Any, free: Callable[[Any], None], *, name: str, parent: Handle | None = None
    ) -> None:
        self._ptr = ptr
        self._name = name
        self._pid = os.getpid()
        self._children: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, _release, free, ptr, self._pid, parent)
        if parent is not None:
            parent._children.add(self)

    @property
    def ptr(self) -> Any:
        """The pointer; raises ClosedError instead of ever handing out NULL."""
        if not self._finalizer.alive:
            raise ClosedError(f"the {self._name} is closed")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the {self._name} belongs to another process",
                hint="load the model in the child process; llama.cpp does not survive fork()",
            )
        return self._ptr

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Free the pointer, children first. Does nothing the second time."""
        for child in list(self._children):
            child.close()
        self._finalizer()
