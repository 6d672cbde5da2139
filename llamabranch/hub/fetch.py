"""A model by any name, downloaded if it must be and may be."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError, UnsupportedError
from .caches import find
from .display import announce, progress_bar
from .resolve import hub_spec, look_up
from .spec import HubSpec

__all__ = ["download_allowed", "fetch", "is_offline", "obtain"]

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def fetch(
    name: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
    offline: bool | None = None,
) -> Path:
    """Return the path of a model, downloading it if it is not on this machine.

    Of ``user/repo`` without a quantization the hub is asked for its files, and the one is chosen that
    llama.cpp would take (Q4_K_M, else Q8_0, else the first), whatever is on this machine already.

    Downloads go into the Hugging Face cache, which llama.cpp and transformers share. A file gets its name
    only after its SHA-256 was checked; a download that was interrupted is continued by the next one.

    Args:
        name: as for `resolve`.
        progress: called with the bytes that are here and the bytes in all. Without it the size is
            announced on standard error before a download starts, with a bar if that is a terminal.
        offline: never use the network; None = as ``HF_HUB_OFFLINE`` is set.

    Returns:
        The file; of a model in shards the first, the others are beside it.

    Raises:
        ConfigError: no such name, tag or file, or it is not here and this is offline.
        DownloadError: the hub cannot be reached or refuses, the bytes are wrong, or there is no room.
        UnsupportedError: huggingface_hub, the extra ``hub``, is not installed.
    """
    found, spec = look_up(name), hub_spec(name)
    if is_offline(offline) or spec is None or spec.tag or spec.file:
        return obtain(name, download=True, offline=offline, progress=progress)
    try:
        return _download(spec, progress)
    except UnsupportedError:
        if isinstance(found, Path):
            return found
        raise


def obtain(
    name: str | os.PathLike[str],
    *,
    download: bool | None = None,
    offline: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the path of a model; download it only where `download_allowed` is true.

    Raises:
        ConfigError, DownloadError, UnsupportedError: as for `fetch`; ConfigError also if it would have to
            be downloaded and that is not allowed.
    """
    found = look_up(name)
    if isinstance(found, Path):
        return found
    if is_offline(offline):
        raise found.error(offline=True)
    if not download_allowed(download):
        raise found.error()
    return _download(found.spec, progress)


def is_offline(asked: bool | None = None) -> bool:
    """Return ``asked``, or the value of ``HF_HUB_OFFLINE`` if it is None."""
    return _flag("HF_HUB_OFFLINE") is True if asked is None else asked


def download_allowed(asked: bool | None = None) -> bool:
    """Return whether a model that is missing may be downloaded now.

    ``asked`` decides, then the environment variable ``LLAMABRANCH_DOWNLOAD`` (1 or 0); otherwise it may
    if standard error is a terminal, where the size is announced.
    """
    if asked is None:
        asked = _flag("LLAMABRANCH_DOWNLOAD")
    if asked is None:
        return sys.stderr is not None and sys.stderr.isatty()
    return asked


def _download(spec: HubSpec, progress: Callable[[int, int], None] | None) -> Path:
    from .download import download, plan_download

    plan = plan_download(spec)
    if plan.missing and (local := find(replace(spec, file=plan.files[0].path, tag=None))):
        return local.path
    if progress is not None or not plan.missing:
        return download(plan, progress)
    announce(plan)
    with progress_bar(plan) as shown:
        return download(plan, shown)


def _flag(name: str) -> bool | None:
    given = os.environ.get(name, "").strip().lower()
    if not given:
        return None
    if given in _TRUE:
        return True
    if given in _FALSE:
        return False
    raise ConfigError(f"{name} must be 1 or 0, not {given!r}")
