"""The fingerprint of a model's weights: the SHA-256 of its files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import UsageError
from ..files import atomic_write, digest, sha256


def state_of(path: Path) -> dict[str, object]:
    """Return the file attributes that change when a file is written or replaced; {} if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return {}
    names = ("size", "mtime_ns", "ino", "dev")
    return {name: getattr(status, f"st_{name}") for name in names}


def fingerprint(paths: Sequence[Path], loaded: Sequence[dict[str, object]]) -> str:
    """Return the SHA-256 (hex) of a model's file; for several parts, of their SHA-256s in order.

    Args:
        loaded: what ``state_of`` returned for each file when it was loaded.

    Raises:
        UsageError: a file is no longer the one that was loaded.
    """
    digests = []
    for path, before in zip(paths, loaded, strict=True):
        digest = None
        with suppress(OSError):
            digest = sha256(path)
        if digest is None or state_of(path) != before:
            raise UsageError(
                f"{path} was changed, replaced or removed after it was loaded",
                hint="load the model again",
            )
        digests.append(digest)
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def noted_fingerprint(
    paths: Sequence[Path], loaded: Sequence[dict[str, object]], folder: Path
) -> str:
    """Return the ``fingerprint``, from a note in ``folder`` if there is one.

    A note is valid for files with the same size, time and place on the disk. Otherwise a new
    note is written, if possible.
    """
    state = digest([[str(path.resolve()) for path in paths], *loaded])
    note = folder / f"{state}.sha256"
    with suppress(OSError, ValueError):
        known, value = note.read_text("ascii").split()
        if known == state and re.fullmatch("[0-9a-f]{64}", value):
            return value
    value = fingerprint(paths, loaded)
    with suppress(OSError), atomic_write(note, 0o600) as file:
        file.write(f"{state} {value}".encode())
    return value


def quick_key(path: Path) -> str:
    """Return the SHA-256 (hex) over a file's size, its first and its last MiB.

    This was the fingerprint before 0.4. Two files that differ only in the middle have the same key.
    """
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()
