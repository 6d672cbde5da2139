"""Measurements of this machine, and hashes of its models, kept in one small JSON file.

``{"version": 1, "threads": {key: entry, ...}, ...}``: one section for each kind of measurement, with
one entry for each measured thing. The modules that write entries define their fields; a section that this
version does not know is kept unchanged. Measurements can be repeated. So it is not an error if the file
is missing, damaged or cannot be written, and if two processes write at once the last one wins.

``LLAMABRANCH_PROFILE=0`` turns off everything that depends on measured times; another value is the
path of the file, or ``/dev/null`` for no file. The default is
``$XDG_CACHE_HOME/llamabranch/profile.json`` (``~/.cache``).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

from .files import atomic_write, check_writable, read_small
from .native import available_cores, engine_versions, forkable_lock

Entry = dict[str, object]

MAX_ENTRIES = 256  # per section; the oldest are deleted first

_VERSION = 1
_VARIABLE = "LLAMABRANCH_PROFILE"
_lock = forkable_lock()


def is_off() -> bool:
    """Return True if nothing may be timed, kept, or decided by measured times."""
    return os.environ.get(_VARIABLE) == "0"


def profile_path() -> Path | None:
    """Return the path of the file, which need not exist; None if turned off, or if there is no home."""
    value = os.environ.get(_VARIABLE)
    if value in ("0", os.devnull):
        return None
    try:
        if value:
            return Path(value).expanduser()
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


def read_entry(section: str, key: str | None) -> Entry | None:
    """Return the stored entry, or None if nothing is stored or ``key`` is None."""
    path = profile_path()
    if path is None or key is None:
        return None
    with contextlib.suppress(OSError):
        entry = _read(path).get(section, {}).get(key)
        return entry if isinstance(entry, dict) else None
    return None


def write_entries(entries: Iterable[tuple[str, str, Entry]]) -> None:
    """Store entries of JSON values, as (section, key, entry); the file is replaced in one step.

    While the interpreter shuts down nothing is stored: reading the file may need imports, which fail
        then.
    """
    path = None if sys.is_finalizing() else profile_path()
    if path is None:
        return
    # If it cannot be written, the next process measures again.
    with _lock, contextlib.suppress(OSError):
        stored = _read(path)
        for name, key, entry in entries:
            section = stored.setdefault(name, {})
            section.pop(key, None)
            section[key] = entry  # the newest comes last
            for old in list(section)[:-MAX_ENTRIES]:
                del section[old]
        _make_folder(path)
        with atomic_write(path) as file:
            file.write(json.dumps({**stored, "version": _VERSION}, indent=1).encode())


def profile_problem() -> str | None:
    """Return why nothing can be stored, such as "Permission denied"; None if storing works or is off."""
    path = profile_path()
    if path is None:
        return None
    try:
        _make_folder(path)
        check_writable(path)
        _read(path)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _read(path: Path) -> dict[str, dict[str, object]]:
    """Return the sections of the file, none if it is missing or damaged.

    Raises:
        OSError: it cannot be read, or a later version wrote it; it must not be replaced.
    """
    try:
        stored = json.loads(read_small(path))
        if stored["version"] > _VERSION:
            raise OSError("a later version wrote it")
        return {name: section for name, section in stored.items() if isinstance(section, dict)}
    except (FileNotFoundError, ValueError, RecursionError, TypeError, LookupError):
        return {}


def _make_folder(path: Path) -> None:
    Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
