"""Measurements of this machine, kept between processes in one small JSON file.

``{"version": 1, "threads": {key: entry, ...}, ...}``: one section for each kind of measurement, in it
one entry for each thing measured. The modules that write entries define their fields; a section that this
version does not know is kept unchanged. Measurements can be repeated, so a file that is missing,
damaged or cannot be written is no error, and of two processes that write at once the last one wins.

``LLAMABRANCH_PROFILE=0`` turns off everything that depends on measured times; another value is the
path of the file. The default is ``$XDG_CACHE_HOME/llamabranch/profile.json`` (``~/.cache``).
"""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .native import available_cores, engine_versions, forkable_lock

__all__ = [
    "Entry",
    "is_off",
    "machine_key",
    "profile_path",
    "profile_problem",
    "read_entry",
    "write_entries",
]

Entry = dict[str, object]

VERSION = 1
MAX_ENTRIES = 256  # a section; the oldest are deleted first

_VARIABLE = "LLAMABRANCH_PROFILE"
_lock = forkable_lock()


def is_off() -> bool:
    """Return True if nothing may be timed, kept, or decided by measured times."""
    return os.environ.get(_VARIABLE) == "0"


def profile_path() -> Path | None:
    """Return where the file is or would be; None if it is turned off, or the user has no home."""
    if is_off():
        return None
    try:
        if given := os.environ.get(_VARIABLE):
            return Path(given).expanduser()
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or "")
            if not base.is_absolute():  # such a value is ignored, by the XDG specification
                base = Path.home() / ".cache"
    except RuntimeError:  # the user has no home
        return None
    return base / "llamabranch" / "profile.json"


def machine_key() -> str:
    """Return the part of a key that identifies this machine: its name, its cores, llama.cpp's build."""
    engine = engine_versions()["llama_cpp_python"]
    return f"{platform.node()} {platform.machine()} {available_cores()} cores, {engine}"


def read_entry(section: str, key: str) -> Entry | None:
    """Return the stored entry, or None."""
    path = profile_path()
    known = None if path is None else _read(path)
    entry = _section(known or {}, section).get(key)
    return entry if isinstance(entry, dict) else None


def write_entries(entries: Iterable[tuple[str, str, Entry]]) -> None:
    """Store entries of JSON values, as (section, key, entry); the file is replaced in one step.

    While the interpreter ends nothing is stored: it imports no more, which reading a file may need.
    """
    path = None if sys.is_finalizing() else profile_path()
    if path is None:
        return
    with _lock:
        known = _read(path)
        if known is None:
            return
        for name, key, entry in entries:
            section = dict(_section(known, name))
            section.pop(key, None)
            section[key] = entry  # the newest comes last
            for old in list(section)[:-MAX_ENTRIES]:
                del section[old]
            known[name] = section
        _replace(path, {**known, "version": VERSION})


def profile_problem() -> str | None:
    """Return why nothing can be stored, such as "Permission denied"; None if it can, or all is off."""
    path = profile_path()
    if path is None:
        return None
    path = Path(os.path.realpath(path))
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        return error.strerror or str(error)
    return "a later version wrote it" if _read(path) is None else None


def _read(path: Path) -> dict[str, object] | None:
    """Return the file's content, empty if it is missing or damaged; None if a later version wrote it."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    version = known.get("version") if isinstance(known, dict) else None
    if not isinstance(version, int):
        return {}
    return None if version > VERSION else known


def _section(known: dict[str, object], name: str) -> dict[str, object]:
    section = known.get(name)
    return section if isinstance(section, dict) else {}


def _replace(path: Path, content: dict[str, object]) -> None:
    temporary = ""
    path = Path(os.path.realpath(path))  # a link stays one
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)
        temporary = ""
    except OSError:  # it cannot be written: the next process measures again
        pass
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
