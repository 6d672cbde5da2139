"""Files that commands read and write: never over another file, whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

from llamabranch import ConfigError

from ..files import check_writable
from .console import OutputError

__all__ = ["check_new_file", "is_unicode", "read_text", "write_error"]


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


def write_error(path: Path, error: OSError, hint: str | None = None) -> OutputError:
    """Return the error for a file that cannot be written; for a full disk the hint tells so first."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space" + (f"; {hint}" if hint else "")
    return OutputError(f"cannot write {path}: {error.strerror or error}", hint=hint)


def read_text(path: Path) -> str:
    """Return the text of a file, without a byte order mark.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8: it has no half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
