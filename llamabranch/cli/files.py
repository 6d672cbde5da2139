"""Files that commands write: never over another file, whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

from llamabranch import ConfigError

from ..files import atomic_write, check_writable
from .console import OutputError

__all__ = ["check_new_file", "write_error", "write_new_file"]


def check_new_file(path: Path, *, hint: str = "name another file, or delete it") -> None:
    """Raise unless a file can be written at ``path`` without losing one; called before a model loads.

    An empty file, a device and a pipe may be there. ``hint`` is what to do about a file that is there.

    Raises:
        ConfigError: a file that is not empty, a folder or a link to a missing file is there; or its
            folder is missing or cannot be written.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder", hint="name a file in it")
        if path.exists():
            if path.is_file() and path.stat().st_size:
                raise ConfigError(f"{path} already exists", hint=hint)
            return
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a link to a file that does not exist", hint="name the file itself"
            )
        check_writable(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def write_new_file(path: Path, data: str | bytes) -> None:
    """Write a file in one go; on failure it is not there, or as empty as it was.

    Args:
        path: as for `check_new_file`, which is called again.
        data: text is written as UTF-8.

    Raises:
        ConfigError: as `check_new_file`: something has come there in the meantime.
        OutputError: the disk is full or broken.
    """
    check_new_file(path)
    if isinstance(data, str):
        data = data.encode("utf-8", "backslashreplace")
    is_device = path.exists() and not path.is_file()
    try:
        with path.open("wb") if is_device else atomic_write(path) as file:
            file.write(data)
    except OSError as error:
        raise write_error(path, error) from None


def write_error(path: Path, error: OSError, hint: str | None = None) -> OutputError:
    """Return the error for a file that cannot be written; for a full disk the hint tells so first."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space" + (f"; {hint}" if hint else "")
    return OutputError(f"cannot write {path}: {error.strerror or error}", hint=hint)
