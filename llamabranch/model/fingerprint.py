"""The fingerprint of a model's weights: the SHA-256 of its files, computed once and kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from time import time_ns

from ..errors import UsageError
from ..files import sha256
from ..profile import read_entry, write_entries

_SECTION = "sha256"
# A file that was written less than this long ago may be written again with the same time stamp.
_SETTLED_NS = 2_000_000_000


def states_of(paths: Sequence[Path]) -> list[dict[str, object]]:
    """Return for each file the data that change when it is written or replaced; {} if it is missing."""
    return [_state(path) for path in paths]


def fingerprint(paths: Sequence[Path], loaded: Sequence[dict[str, object]]) -> str:
    """Return the SHA-256 (hex) of a model's file; for several parts, that of their SHA-256s in order.

    Args:
        loaded: ``states_of`` when they were loaded.

    Raises:
        UsageError: a file is no longer the one that was loaded.
    """
    digests = []
    for path, before in zip(paths, loaded, strict=True):
        digest = _kept(path, before)
        if _content_of(_state(path)) != _content_of(before):
            raise UsageError(
                f"{path} was changed, replaced or removed after it was loaded",
                hint="load the model again",
            )
        digests.append(digest)
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def quick_key(path: Path) -> str:
    """Return the SHA-256 (hex) over a file's size, its first and its last MiB.

    It was the fingerprint before 0.4. Two files that differ only in the middle have the same key.
    """
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()


def _kept(path: Path, before: dict[str, object]) -> str:
    """Return the SHA-256 of a file in this state, from the profile or computed now."""
    key = os.path.abspath(path)
    state = _state(path)
    if _content_of(state) != _content_of(before) or not state:
        return ""  # the caller refuses it
    entry = read_entry(_SECTION, key) or {}
    if entry.items() >= state.items() and isinstance(digest := entry.get("sha256"), str):
        return digest
    try:
        digest = sha256(path)
    except OSError:
        return ""
    newest = max(int(str(state[name])) for name in ("mtime_ns", "ctime_ns"))
    if state == _state(path) and newest < time_ns() - _SETTLED_NS:
        write_entries([(_SECTION, key, {**state, "sha256": digest})])
    return digest


def _state(path: Path) -> dict[str, object]:
    try:
        status = path.stat()
    except OSError:
        return {}
    names = ("size", "mtime_ns", "ctime_ns", "ino", "dev")
    return {name: getattr(status, f"st_{name}") for name in names}


def _content_of(state: dict[str, object]) -> dict[str, object]:
    """Return the part of a state that changes with the bytes, not with a mode or a name."""
    return {name: value for name, value in state.items() if name != "ctime_ns"}
