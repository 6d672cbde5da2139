"""The file of a document: one record a line, only ever appended, and one process that writes.

A line that was cut by the end of its process is dropped; any other line that cannot be read ends the
reading, and the file is not written then. While the disk refuses, lines are kept and tried again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import time
from typing import IO

import msgspec

from ..errors import ConfigError
from ..files import atomic_write
from .document import AnyRecord, Document, Head, Record

__all__ = ["Journal"]

_read = msgspec.json.Decoder(AnyRecord).decode
_BAD = (msgspec.MsgspecError, LookupError, ValueError, RecursionError)


class Journal:
    """Opens a file, and reads it into a document.

    Args:
        path: the file; made with the first record.
        document: gets what is in it.
        read_only: write nothing.

    Raises:
        ConfigError: it cannot be read, or is no journal.

    Attributes:
        read_only: why nothing is written; None = it is.
        error: why the last lines are not on the disk yet; None = they are.
    """

    def __init__(self, path: Path, document: Document, *, read_only: bool = False) -> None:
        self.path = path
        self.read_only: str | None = "it was opened with --read-only" if read_only else None
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
            self._lock = self.path.with_name(f".{self.path.name}.lock").open("ab")
            if not _locked(self._lock):
                self.read_only = "another process has it open"
                return
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            self.read_only = f"it cannot be written: {error.strerror or error}"

    def _load(self, data: bytes) -> None:
        lines = data.split(b"\n")
        torn = lines.pop()  # "" after a last line that is whole
        size = 0
        for number, line in enumerate(lines, 1):
            try:
                record = _read(line)
                if isinstance(record, Head) != (number == 1):
                    raise ValueError("the head is the first line, and only that")
                self._document.apply(record)
            except _BAD as error:
                if number == 1:
                    break
                self.read_only = f"line {number} is damaged: {error}"
                return
            size += len(line) + 1
        if data and not size:
            raise ConfigError(
                f"{self.path} is no file of the page: it does not begin with a head",
                hint="import files of other programs in the page, or name another file",
            )
        self._size = size
        if torn and self._file is not None and self.read_only is None:
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
        """Write what is kept; False if the disk refuses, and it is kept longer."""
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
        """Wait until the disk has what was written; in any thread."""
        try:
            if self._file is not None:
                os.fsync(self._file.fileno())
        except ValueError:  # it was closed meanwhile, and synced before
            pass
        except OSError as error:
            self.error = f"cannot write {self.path.name}: {error.strerror or error}"

    def rewrite(self, records: Iterable[Record]) -> None:
        """Put a new file with these records in the place of the old one, which stays as .bak.

        Raises:
            OSError: it cannot be written; the old file is as it was.
        """
        backup = self.path.with_name(self.path.name + ".bak")
        with atomic_write(backup) as file:
            file.write(self.path.read_bytes())
        with atomic_write(self.path) as file:
            for record in records:
                file.write(msgspec.json.encode(record) + b"\n")
            size = file.tell()
        if self._file is not None:
            self.sync()
            self._file.close()
        self._file, self._size = self.path.open("ab", buffering=0), size

    def close(self) -> None:
        """Write the rest, and let others write."""
        self.write()
        self.sync()
        self._release()

    def _release(self) -> None:
        for file in (self._file, self._lock):
            if file is not None:
                file.close()
        self._file = self._lock = None


def _locked(file: IO[bytes]) -> bool:
    """Lock a file for this process until it is closed; False if another one has it."""
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
