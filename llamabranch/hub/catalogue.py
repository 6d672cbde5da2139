"""Finds the file of a model by its name.

A name is a path to a GGUF file, one of the bundled pair, or a name in ``models.txt``. Files of
``models.txt`` are searched, not downloaded: first in ``LLAMABRANCH_CACHE`` (default:
``~/.cache/llamabranch``), then in the Hugging Face hub's cache. A missing file raises a `ConfigError`
whose hint is the command that downloads it.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..errors import ConfigError

__all__ = [
    "BUNDLED_DRAFT",
    "BUNDLED_TARGET",
    "CatalogueEntry",
    "catalogue",
    "draft_for",
    "locate",
    "parse_catalogue",
    "resolve",
]

BUNDLED_TARGET = "tale-target"
BUNDLED_DRAFT = "tale-draft"

_DATA = Path(__file__).parents[1] / "data"
_SIZE = re.compile(r"(\d+(?:\.\d+)?) (MB|GB)")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class CatalogueEntry:
    """One line of ``models.txt``."""

    name: str
    role: str  # "target" or "draft"
    repository: str  # on the Hugging Face hub, or "bundled"
    file: str
    licence: str
    size: str  # in decimal units and rounded, such as "1.82 GB"

    @property
    def bundled(self) -> bool:
        """True if the file is part of the package."""
        return self.repository == "bundled"

    @property
    def size_bytes(self) -> int:
        """Return the rounded size in bytes."""
        number, unit = self.size.split()
        return round(float(number) * {"MB": 1e6, "GB": 1e9}[unit])

    @property
    def download_command(self) -> str | None:
        """Return the command that downloads the file, or None for a bundled one."""
        return None if self.bundled else f"hf download {self.repository} {self.file}"


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the path of a model file.

    Accepts a path to a GGUF file or a name of `catalogue`. If the current folder has a file with the same
    name, write ``./name`` for the file.

    Raises:
        ConfigError: no such name, or the file is not on this machine; the hint tells how to get it.
    """
    text = os.fspath(name_or_path)
    for entry in catalogue():
        if entry.name == text:
            return _resolve_entry(entry)
    path = Path(text).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{text} is a folder, not a GGUF file", hint=_first_gguf(path))
    if path.suffix == ".gguf" or os.sep in text:
        raise ConfigError(f"there is no file {text}", hint="check the path; a GGUF file is needed")
    raise ConfigError(
        f"no model is called {text!r}",
        hint=nearest(text, [entry.name for entry in catalogue()], "a path to a GGUF file, or names")
        + "; `llamabranch models` lists them",
    )


def locate(entry: CatalogueEntry) -> Path | None:
    """Return the path of an entry's file on this machine, or None."""
    if entry.bundled:
        places = [_DATA / entry.file]
    else:
        cache = _cache()
        places = [cache / entry.file, cache / entry.repository / entry.file]
        places += _hub_snapshots(entry)
    return next((place for place in places if place.is_file()), None)


def draft_for(name: str) -> str | None:
    """Return the draft model listed for a target in ``models.txt``, or None."""
    entries = catalogue()
    for target, draft in itertools.pairwise(entries):
        if target.name == name and target.role == "target" and draft.role == "draft":
            return draft.name
    return None


def catalogue() -> list[CatalogueEntry]:
    """Return the entries of ``models.txt`` in order, the bundled pair first."""
    return list(_shipped_catalogue())


def parse_catalogue(text: str, source: str = "models.txt") -> list[CatalogueEntry]:
    """Parse the text of a ``models.txt``.

    Blank lines and lines that start with ``#`` are skipped.

    Raises:
        ConfigError: with the line number: a line that is not ``name | role | repository | file | licence
            | size``, a duplicate name, or a draft that does not follow a target.
    """
    entries: list[CatalogueEntry] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        entry = _parse_line(line, f"{source}, line {number}")
        if any(entry.name == other.name for other in entries):
            raise ConfigError(f"{source}, line {number}: duplicate name {entry.name!r}")
        if entry.role == "draft" and (not entries or entries[-1].role != "target"):
            raise ConfigError(
                f"{source}, line {number}: the draft {entry.name!r} does not follow a target",
                hint="list a target first, then the draft model for it",
            )
        entries.append(entry)
    return entries


def _parse_line(line: str, where: str) -> CatalogueEntry:
    fields = [field.strip() for field in line.split("|")]
    if len(fields) != 6:
        raise ConfigError(
            f"{where}: {len(fields)} fields instead of 6",
            hint="write a line as: name | role | repository | file | licence | size",
        )
    names = ("name", "role", "repository", "file", "licence", "size")
    for name, field in zip(names, fields, strict=True):
        if not field:
            raise ConfigError(f"{where}: the {name} is empty")
    entry = CatalogueEntry(*fields)
    if any(mark in entry.name for mark in (" ", "/", os.sep)):
        raise ConfigError(f"{where}: the name {entry.name!r} contains a space or a slash")
    if entry.role not in ("target", "draft"):
        raise ConfigError(f"{where}: the role is {entry.role!r}, not target or draft")
    if not entry.bundled and not _REPOSITORY.fullmatch(entry.repository):
        raise ConfigError(
            f"{where}: the repository {entry.repository!r} is neither owner/name nor bundled"
        )
    if not entry.file.endswith(".gguf") or "/" in entry.file:
        raise ConfigError(f"{where}: {entry.file!r} is not the name of a .gguf file")
    if not _SIZE.fullmatch(entry.size):
        raise ConfigError(f"{where}: the size {entry.size!r} is not a number followed by MB or GB")
    return entry


@lru_cache(maxsize=1)
def _shipped_catalogue() -> tuple[CatalogueEntry, ...]:
    # The wheel has a copy next to the weights; a checkout has the file in its top folder.
    for path in (_DATA / "models.txt", Path(__file__).parents[2] / "models.txt"):
        if path.is_file():
            return tuple(parse_catalogue(path.read_text(encoding="utf-8")))
    raise ConfigError(
        "models.txt is missing from this installation", hint="install llamabranch again"
    )


def _resolve_entry(entry: CatalogueEntry) -> Path:
    path = locate(entry)
    if path is not None:
        return path
    if entry.bundled:
        raise ConfigError(
            f"the bundled file {entry.file} is missing from this installation",
            hint="install llamabranch again",
        )
    raise ConfigError(
        f"{entry.name} is not on this machine",
        hint=f"download it ({entry.size}) with: {entry.download_command}  (the command comes with "
        f"`pip install huggingface_hub`), or put {entry.file} in {_cache()}",
    )


def _cache() -> Path:
    given = os.environ.get("LLAMABRANCH_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "llamabranch"


def _hub_snapshots(entry: CatalogueEntry) -> list[Path]:
    """Return the possible paths of a file in the Hugging Face cache, the current revision first."""
    if given := os.environ.get("HF_HUB_CACHE"):
        hub = Path(given).expanduser()
    else:
        home = os.environ.get("HF_HOME")
        hub = (Path(home).expanduser() if home else Path.home() / ".cache" / "huggingface") / "hub"
    folder = hub / ("models--" + entry.repository.replace("/", "--"))
    revisions: list[str] = []
    main = folder / "refs" / "main"
    if main.is_file():
        revisions.append(main.read_text(encoding="utf-8").strip())
    if (folder / "snapshots").is_dir():
        revisions += sorted(item.name for item in (folder / "snapshots").iterdir())
    return [folder / "snapshots" / revision / entry.file for revision in revisions]


def _first_gguf(folder: Path) -> str:
    found = sorted(folder.glob("*.gguf"))
    return f"it contains {found[0]}" if found else "give the path of a .gguf file"


def nearest(text: str, names: list[str], what: str) -> str:
    close = difflib.get_close_matches(text, names, n=1)
    return f"did you mean {close[0]}?" if close else f"{what}: {', '.join(names)}"
