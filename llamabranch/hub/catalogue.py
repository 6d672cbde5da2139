"""``models.txt``: the models known by name, and the draft model of each target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .caches import PACKAGES, find, own_cache
from .choice import HubSpec

BUNDLED_TARGET = "tale-target"
DEFAULT_MODEL = "smollm2-135m"  # of the command line, if it is installed
BUNDLED_DRAFT = "tale-draft"
BUNDLED_HEAD = "tale-eagle"

_DATA = Path(__file__).parents[1] / "data"  # where the bundled files are
_TARGETS = ("target", "mtp")


@dataclass(frozen=True)
class CatalogueEntry:
    """One line of ``models.txt``."""

    name: str
    role: str  # "target", "mtp": a target with MTP layers, "draft" or "head": EAGLE-3 or MTP layers
    repository: str  # on the Hugging Face hub, or "bundled"
    file: str
    licence: str  # "unknown" if no public document states it
    size: str  # rounded, in decimal units, such as "1.82 GB"

    @property
    def bundled(self) -> bool:
        """True if the file is part of the package."""
        return self.repository == "bundled"

    @property
    def path(self) -> Path | None:
        """The file on this machine; None if it is not here."""
        path = (_DATA if self.bundled else own_cache()) / self.file
        if path.is_file():
            return path
        return None if self.bundled else find(HubSpec(self.repository, file=self.file))

    @property
    def package(self) -> str | None:
        """The Python package that has files of the repository, by its name on PyPI, or None."""
        return PACKAGES.get(self.repository)

    @property
    def made_here(self) -> tuple[str, ...]:
        """The quantizations that can be made from its file on this machine: ``name:Q8_0``."""
        return () if self.package is None else ("Q8_0", "BF16", "Q4_0")


def draft_for(name: str) -> str | None:
    """Return the draft model listed for a target in ``models.txt``, else its head, or None.

    It is None for a target that drafts with the MTP layers of its own file.

    ``name`` is the target's name, or the repository of its file: ``Qwen/Qwen3-4B-GGUF:Q4_K_M``.
    """
    spec = HubSpec.parse(name)
    is_listed = False  # whether the entry belongs to the target
    for entry in catalogue():
        if entry.role in _TARGETS:
            same_repository = spec is not None and spec.repository == entry.repository
            is_listed = entry.name == name or same_repository
        elif is_listed:
            return entry.name
    return None


@lru_cache(maxsize=1)
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Return the entries of ``models.txt`` in order, the bundled pair first."""
    # The wheel has a copy next to the weights; a checkout has the file in its top folder.
    copy, original = _DATA / "models.txt", Path(__file__).parents[2] / "models.txt"
    text = (copy if copy.is_file() else original).read_text(encoding="utf-8")
    lines = (line.strip() for line in text.splitlines())
    return tuple(
        CatalogueEntry(*map(str.strip, line.split("|")))
        for line in lines
        if line and not line.startswith("#")
    )


def find_entry(name: str) -> CatalogueEntry | None:
    """Return the entry of a name, or None."""
    return next((entry for entry in catalogue() if entry.name == name), None)


def default_model() -> str:
    """Return the name of the model that commands use if the user names none.

    It is SmolLM2, an instruct model, if it is on this machine, and otherwise the bundled target.
    """
    entry = find_entry(DEFAULT_MODEL)
    return BUNDLED_TARGET if entry is None or entry.path is None else DEFAULT_MODEL
