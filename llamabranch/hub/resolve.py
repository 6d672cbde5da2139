"""From what a user names a model by to its file on this machine; nothing here needs a network.

A name is a path to a GGUF file, a name of ``models.txt``, or ``user/repo[:tag]`` on the Hugging Face hub
(`HubSpec`), looked for in that order, repositories in every cache of `caches.find`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .caches import find, own_cache
from .catalogue import DATA, CatalogueEntry, catalogue, nearest
from .spec import HubSpec

__all__ = ["Absent", "hub_spec", "locate", "look_up", "resolve"]


@dataclass(frozen=True)
class Absent:
    """A model that exists on the hub as far as known, but not on this machine.

    Attributes:
        name: as it was given.
        spec: what to download.
        entry: its line in ``models.txt``, if it has one.
    """

    name: str
    spec: HubSpec
    entry: CatalogueEntry | None = None

    def error(self, *, offline: bool = False) -> ConfigError:
        """Return the error for a model that is needed now; the hint tells how to get it."""
        name, entry = self.name, self.entry
        size = "" if entry is None else f" ({entry.size})"
        why = f"{name} is not on this machine" + (", and this is offline" if offline else "")
        hint = f"`llamabranch pull {name}` downloads it{size}; --download lets any command do so"
        if entry is not None:
            hint += f"; or `{entry.download_command}`, or put {entry.file} in {own_cache()}"
        elif Path(name).suffix == ".gguf":
            hint = f"there is no file {name} either; " + hint
        return ConfigError(why, hint=hint)


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the path of a model file that is on this machine; nothing is downloaded.

    Args:
        name_or_path: a path to a GGUF file, a name of `catalogue`, or a repository of the Hugging Face
            hub: ``user/repo``, ``user/repo:Q8_0``, ``user/repo@revision``, ``user/repo/file.gguf``.

    Returns:
        The file; of a model in shards the first.

    Raises:
        ConfigError: no such name, or the file is not on this machine; the hint tells how to get it.
    """
    found = look_up(name_or_path)
    if isinstance(found, Absent):
        raise found.error()
    return found


def look_up(name_or_path: str | os.PathLike[str]) -> Path | Absent:
    """Return the path of a model file, or what would have to be downloaded.

    Raises:
        ConfigError: no model is called that.
    """
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    if "\0" in text or not text:
        raise ConfigError(f"no model is called {text!r}")
    if path.is_file():
        return path
    entry = next((entry for entry in catalogue() if entry.name == text), None)
    if entry is not None:
        return _of_catalogue(entry)
    if path.is_dir():
        raise ConfigError(f"{text} is a folder, not a GGUF file", hint=_first_gguf(path))
    spec = hub_spec(name_or_path)
    if spec is not None:
        local = find(spec)
        return Absent(text, spec) if local is None else local.path
    if path.suffix == ".gguf" or os.sep in text:
        raise ConfigError(f"there is no file {text}", hint="check the path; a GGUF file is needed")
    raise ConfigError(
        f"no model is called {text!r}",
        hint=nearest(
            text,
            [entry.name for entry in catalogue()],
            "a path to a GGUF file, user/repo on the Hugging Face hub, or names",
        )
        + "; `llamabranch models` lists them",
    )


def hub_spec(name_or_path: str | os.PathLike[str]) -> HubSpec | None:
    """Return the repository that a name means; None for a path and for a name of ``models.txt``.

    Raises:
        ConfigError: as `HubSpec.parse`.
    """
    if not isinstance(name_or_path, str) or Path(name_or_path).expanduser().exists():
        return None
    return HubSpec.parse(name_or_path)


def locate(entry: CatalogueEntry) -> Path | None:
    """Return the path of an entry's file on this machine, or None."""
    if entry.bundled:
        places = [DATA / entry.file]
    else:
        cache = own_cache()
        places = [cache / entry.file, cache / entry.repository / entry.file]
    for place in places:
        if place.is_file():
            return place
    found = None if entry.bundled else find(HubSpec(entry.repository, file=entry.file))
    return None if found is None else found.path


def _of_catalogue(entry: CatalogueEntry) -> Path | Absent:
    path = locate(entry)
    if path is not None:
        return path
    if entry.bundled:
        raise ConfigError(
            f"the bundled file {entry.file} is missing from this installation",
            hint="install llamabranch again",
        )
    return Absent(entry.name, HubSpec(entry.repository, file=entry.file), entry)


def _first_gguf(folder: Path) -> str:
    found = sorted(folder.glob("*.gguf"))
    return f"it contains {found[0]}" if found else "give the path of a .gguf file"
