"""The file of a document: one record per line, only appended, written by one process.

An incomplete last line is dropped: its process ended while writing it. Any other damaged line ends the
reading, and the file opens read-only. A line that cannot be written, for example because the disk is
full, is kept in memory and written later. All that waits is written at once or not at all, so a token
is on the disk only with its text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from errno import EEXIST
from pathlib import Path
from threading import Lock
from time import time
from typing import IO

import msgspec

from ..errors import ConfigError
from .document import AnyRecord, Change, Document, Head, Node, Tokens

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
        error: why the last lines cannot be written; None = they can.
        complain: gets what the terminal says when writing fails, works again, or something is lost.
    """

    def __init__(self, path: Path, document: Document, *, read_only: bool = False) -> None:
        self.path = path
        self.read_only: str | None = "It was opened with --read-only." if read_only else None
        self.cause = ""
        self.error: str | None = None
        self._document = document
        self.complain: Callable[[str], object] = lambda message: None
        # Lines that are not on the disk yet, each with its node, and how many own tokens that then has.
        self._lines: list[tuple[bytes, str | None, int]] = []
        self._size = 0  # where the lines on the disk end
        self._kept: dict[str, int] = {}  # own tokens of nodes on the disk
        self._file: IO[bytes] | None = None
        self._lock: IO[bytes] | None = None
        self._mutex, self._saving = Lock(), Lock()
        if not read_only:
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} is not a file", hint="for example tale.loom.jsonl")
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
        self._kept = {name: len(node.ids) for name, node in self._document.nodes.items()}
        head = self._document.head
        if head is not None and head.version > Head().version:
            self.read_only = "A newer llamabranch has written it. What this one can read is shown."
        elif damage is not None:
            line, self.cause = damage
            told = "What came before is shown; export it to go on."
            self.read_only = f"The file is damaged at line {line}. {told}"
        elif size < len(data) and self._file is not None and self.read_only is None:
            self._file.truncate(size)

    # -- writing ---------------------------------------------------------------------------------------

    def add(self, record: AnyRecord) -> None:
        """Apply a record and keep it for the next ``save``."""
        record.r, record.t = self._document.rev + 1, int(1e3 * time())
        self._document.apply(record)
        if self.read_only is None:
            is_place = isinstance(record, Change) and record.name == "current"
            name = None if is_place else getattr(record, "id", "")
            n = record.at + len(record.ids) if isinstance(record, Tokens) else 0
            with self._mutex:
                self._lines.append((msgspec.json.encode(record) + b"\n", name, n))

    @property
    def saved(self) -> bool:
        """Whether all records are on the disk; the place that is shown does not count."""
        return self.error is None and all(name is None for _, name, _ in self._lines)

    @property
    def waits(self) -> bool:
        """Whether there are lines that are not on the disk."""
        return bool(self._lines)

    def unsaved(self, changing: Iterable[Node] = ()) -> int:
        """Return how many texts are, at least in part, only in memory; ``changing`` have new tokens."""
        with self._mutex:
            names = {name for _, name, _ in self._lines} | {node.id for node in changing}
            if not self._kept:
                names |= self._document.nodes.keys()
        nodes = [self._document.nodes[name] for name in names if name]
        texts = (len(node.ids) > self._kept.get(node.id, -1) for node in nodes if not node.hidden)
        return 0 if self.read_only is not None else sum(texts)

    def save(self) -> None:
        """Write the waiting lines, and return once they are on the disk; if that fails, they wait on.

        Any thread may call this.
        """
        with self._saving:
            with self._mutex:
                lines = [*self._lines]
            if self._file is None or not lines:
                return
            data = b"".join(line for line, _, _ in lines)
            try:
                self._file = self._checked(self._file)
                _put(self._file, data)
                os.fsync(self._file.fileno())
            except OSError as error:
                self._fail(error)
                return
            self._size += len(data)
            with self._mutex:
                for _, name, length in lines:
                    if name:
                        self._kept[name] = max(length, self._kept.get(name, 0))
                del self._lines[: len(lines)]
            if self.error is not None:
                self.error = None
                self.complain(f"{self.path.name} is written again")

    def _checked(self, file: IO[bytes]) -> IO[bytes]:
        """Return the file, made again if it was deleted. OSError: another program has changed it."""
        own = os.fstat(file.fileno())
        if self.path.exists():
            if not os.path.samestat(own, self.path.stat()) or own.st_size != self._size:
                raise OSError(EEXIST, "another program has changed it")
            return file
        file.seek(0)
        new = _opened(self.path)
        try:
            _put(new, file.read())
        except OSError:
            new.close()
            self.path.unlink()
            raise
        file.close()
        return new

    def _fail(self, error: OSError) -> None:
        reason = (error.strerror or str(error)).lower()
        if self.error is None:
            message = "new texts are only in memory; the page exports them"
            self.complain(f"cannot write {self.path.name}: {reason}: {message}")
        self.error = reason
        if error.errno == EEXIST:
            self._kept.clear()  # the file has nothing of the document
        elif self._file is not None:
            with suppress(OSError):  # no half line, and none that may not be on the disk
                self._file.truncate(self._size)

    def close(self) -> None:
        """Try once more to write the rest, say what is lost, and release the file."""
        self.save()
        if self._lines:
            what = {0: "changes", 1: "1 text"}.get(n := self.unsaved(), f"{n} texts")
            were, are = ("was", "is") if n == 1 else ("were", "are")
            self.complain(f"{what} {were} only in memory and {are} lost: {self.error}")
        with self._saving:
            self._release()

    def _release(self) -> None:
        for file in (self._file, self._lock):
            if file is not None:
                file.close()
        self._file = self._lock = None


def _put(file: IO[bytes], data: bytes) -> None:
    while data:
        data = data[file.write(data) :]  # a part of it may fit


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
