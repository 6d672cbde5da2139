"""The file of a document: one record per line, only appended, written by one process.

An incomplete last line is dropped: its process ended while writing it. Any other damaged line ends the
reading, and the file opens read-only. If the disk is full, lines are kept and written later.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from time import time
from typing import IO

import msgspec

from ..errors import ConfigError
from .document import AnyRecord, Document, Head, Record

_read = msgspec.json.Decoder(AnyRecord).decode
_BAD = (msgspec.MsgspecError, LookupError, ValueError, RecursionError)


def replay(document: Document, data: bytes) -> tuple[int, tuple[int, str] | None]:
    """Apply the records of a file to a document.

    Returns:
        The number of applied bytes, without a last line that was cut off; and the number of the damaged
        line after them with what is wrong there, or None.
    """
    *lines, _ = data.split(b"\n")  # the last part is b"" if the last line is complete
    size = 0
    for number, line in enumerate(lines, 1):
        try:
            record = _read(line)
            if isinstance(record, Head) != (number == 1):
                raise ValueError("the head is the first line, and only that")
            document.apply(record)
        except _BAD as error:
            return size, (number, str(error))
        size += len(line) + 1
    return size, None


class Journal:
    """Opens a file, and reads it into a document.

    Args:
        path: the file; it is created if it does not exist.
        document: gets the records of the file.
        read_only: write nothing.

    Raises:
        ConfigError: it cannot be read, or is not a journal.

    Attributes:
        read_only: why nothing is written, in a sentence; None = the file is written.
        cause: more about that for the terminal, or "".
        error: why the last lines are not on the disk yet; None = all are.
    """

    def __init__(self, path: Path, document: Document, *, read_only: bool = False) -> None:
        self.path = path
        self.read_only: str | None = "It was opened with --read-only." if read_only else None
        self.cause = ""
        self.error: str | None = None
        self._document = document
        self._lines: list[bytes] = []  # not written yet
        self._file: IO[bytes] | None = None
        self._lock: IO[bytes] | None = None
        self._size = 0
        if not read_only:
            self._open()
        try:
            self._load(path.read_bytes() if path.exists() else b"")
        except OSError as error:
            self._release()
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
        except BaseException:
            self._release()
            raise

    def _open(self) -> None:
        try:
            self._lock = _opened(self.path.with_name(f".{self.path.name}.lock"))
            if not _locked(self._lock):
                self.read_only = "Another process has it open."
                return
            self._file = _opened(self.path)
        except OSError as error:
            self.read_only = f"The file cannot be written: {error.strerror or error}."

    def _load(self, data: bytes) -> None:
        size, damage = replay(self._document, data)
        if data and not size:
            raise ConfigError(
                f"{self.path} was not written by the page: its first line is not a head",
                hint="import files of other programs in the page, or name another file",
            )
        self._size = size
        if damage is not None:
            line, self.cause = damage
            told = "What came before is shown; export it to go on."
            self.read_only = f"The file is damaged at line {line}. {told}"
        elif size < len(data) and self._file is not None and self.read_only is None:
            self._file.truncate(size)

    # -- writing ---------------------------------------------------------------------------------------

    def add(self, record: Record) -> None:
        """Apply a record and keep it for the next ``write``."""
        record.r, record.t = self._document.rev + 1, int(1e3 * time())
        self._document.apply(record)
        self._lines.append(msgspec.json.encode(record) + b"\n")

    @property
    def saved(self) -> bool:
        """Whether the file has all records."""
        return self.error is None and not self._lines

    def write(self) -> bool:
        """Write the waiting lines; if that fails, keep them and return False."""
        if self._file is None or self.read_only is not None:
            self._lines.clear()
            return True
        data = b"".join(self._lines)
        try:
            if data and self._file.write(data) != len(data):
                raise OSError("the disk is full")
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._size)  # no half line
            self.error = f"cannot write {self.path.name}: {error.strerror or error}"
            return False
        self._size += len(data)
        self._lines.clear()
        self.error = None
        return True

    def sync(self) -> None:
        """Wait until all written lines are on the disk. Any thread may call this."""
        try:
            if self._file is not None:
                os.fsync(self._file.fileno())
        except ValueError:  # it was closed meanwhile, and synced before
            pass
        except OSError as error:
            self.error = f"cannot write {self.path.name}: {error.strerror or error}"

    def close(self) -> None:
        """Write the rest and release the file."""
        self.write()
        self.sync()
        self._release()

    def _release(self) -> None:
        for file in (self._file, self._lock):
            if file is not None:
                file.close()
        self._file = self._lock = None


def _opened(path: Path) -> IO[bytes]:
    """Open a file to read it and append to it. A new file is for this user only."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, 0o600), "a+b", buffering=0)


def _locked(file: IO[bytes]) -> bool:
    """Lock a file for this process until it is closed; return False if another process has locked it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
