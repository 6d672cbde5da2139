"""Regular files, replaced in one step; digests of files and of values.

Other kinds of files are refused: a rename would replace a device, and a pipe may never end.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import IO

from .errors import ConfigError


@contextlib.contextmanager
def atomic_write(path: str | PathLike[str], mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` at the end of the block, unless an error is raised.

    A symbolic link is followed. An existing file keeps its mode; a new one gets ``mode`` without the bits
    of the umask. The file is on the disk afterwards.

    Raises:
        OSError: it cannot be written, or a pipe, a device or a folder is there.
    """
    status = _status(path)
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name[:32]}.{os.urandom(8).hex()}")
    try:
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            if status is not None:
                _inherit(file.fileno(), status)
            sync(file)
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    _sync_folder(target.parent)


def path_of(path: str | PathLike[str]) -> Path:
    """Return ``path``; refuse a number, which system calls would take for an open file."""
    try:
        return Path(path)
    except TypeError:
        raise ConfigError(f"a path is text or path-like, not {path!r:.60}") from None


def sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of a file. It takes about a second for a GB, and releases the GIL."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def digest(value: object) -> str:
    """Return the first 16 hex digits of the SHA-256 of ``value`` as JSON."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def sync(file: IO[bytes] | IO[str]) -> None:
    """Flush a file to the disk; do nothing for a pipe or a device."""
    file.flush()
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        os.fsync(file.fileno())


def _status(path: str | PathLike[str]) -> os.stat_result | None:
    """Return the status of a regular file, None if nothing is there."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status


def _sync_folder(folder: Path) -> None:
    """Flush a rename to the disk; some systems cannot open a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _inherit(handle: int, replaced: os.stat_result) -> None:
    """Give an open file the mode of the file that it replaces, and its owner if that is permitted."""
    if hasattr(os, "fchown") and (replaced.st_uid, replaced.st_gid) != (os.getuid(), os.getgid()):
        with contextlib.suppress(OSError):
            os.fchown(handle, replaced.st_uid, replaced.st_gid)
    mode = stat.S_IMODE(replaced.st_mode)
    # The mode comes last, because changing the owner can clear bits. Some file systems have no modes.
    if hasattr(os, "fchmod") and stat.S_IMODE(os.fstat(handle).st_mode) != mode:
        os.fchmod(handle, mode)
