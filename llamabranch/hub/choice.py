"""Choose the files of a repository that belong to the model with a tag.

It chooses like llama.cpp, but a tag must match as a whole. In llama.cpp ``:F16`` also finds BF16, and
``:Q4_0`` finds IQ4_0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import ConfigError
from .spec import is_safe_path

DEFAULT_TAGS = ("Q4_K_M", "Q8_0")  # tried without a tag, in this order; then any model

_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})", re.ASCII)
# Files that belong to a model but are not models: projectors, importance matrices and heads.
_SIDECAR = re.compile(r"(?i:mmproj|imatrix)|(?:^|[-._])(?:mtp|eagle3|dflash|dspark)-", re.ASCII)
_QUANTIZATION = re.compile(
    r"(?:I?Q|TQ)\d_[A-Z0-9]+(?:_[A-Z0-9]+)*|BF16|F16|F32|FP16|FP32|MXFP4(?:_MOE)?|NVFP4",
    re.ASCII | re.IGNORECASE,
)


def is_model(path: str) -> bool:
    """Return whether a file of a repository is a model, or a shard of one."""
    name = path.rpartition("/")[2]
    return path.endswith(".gguf") and is_safe_path(path) and not _SIDECAR.search(name)


def choose(
    paths: Iterable[str], tag: str | None = None, *, file: str | None = None, where: str = "it"
) -> tuple[str, ...]:
    """Return the files of one model: one file, or all shards in order.

    Args:
        paths: the files of the repository; names that would leave a folder are ignored.
        tag: the quantization, in capitals or not; None = Q4_K_M, Q8_0, or else the first model.
        file: this file instead, or the model that it is a shard of. Sidecar files can be named.
        where: the repository, for messages.

    Raises:
        ConfigError: no model has the tag, there is no such file, or a shard is missing. The hint lists
            the available models.
    """
    safe = sorted({path for path in paths if is_safe_path(path)})
    if file is not None:
        if file not in safe:
            raise ConfigError(f"{where} has no file {file}", hint=_offer(safe))
        stem, shard = _stem_and_shard(file)
        shards = (file,) if shard is None else _sets(safe)[stem, shard[1]]
        return _complete(shards, where)
    models = model_sets(safe)
    if not models:
        raise ConfigError(f"{where} has no GGUF model", hint=_offer(safe))
    for quantization in DEFAULT_TAGS if tag is None else (tag,):
        # The end of a name is the quantization; the same letters in the middle may belong to the model's
        # name.
        for after in ("$", r"(?![A-Za-z0-9_])"):
            pattern = re.compile(_bounded(quantization) + after, re.ASCII | re.IGNORECASE)
            for files in models:
                if pattern.search(_stem_and_shard(files[0])[0]):
                    return _complete(files, where)
    if tag is None:
        return _complete(models[0], where)
    raise ConfigError(f"{where} has no model with the tag {tag}", hint=_offer(safe))


def model_sets(paths: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the models among files, in order: each one file, or its shards, complete or not."""
    return list(_sets(path for path in sorted(set(paths)) if is_model(path)).values())


def _sets(paths: Iterable[str]) -> dict[tuple[str, int], tuple[str, ...]]:
    sets: dict[tuple[str, int], tuple[str, ...]] = {}
    for path in paths:
        stem, shard = _stem_and_shard(path)
        key = (stem, 1 if shard is None else shard[1])
        sets[key] = (*sets.get(key, ()), path)
    return sets


def _complete(files: tuple[str, ...], where: str) -> tuple[str, ...]:
    stem, shard = _stem_and_shard(files[0])
    if shard is None:
        return files
    count = shard[1]
    present = {index for _, part in map(_stem_and_shard, files) if part for index in part[:1]}
    missing = next((i for i in range(1, count + 1) if i not in present), None)
    if missing is None and len(files) == count:
        return files
    raise ConfigError(
        f"{where} lacks part {missing or count} of {count} of {stem}",
        hint="the model is incomplete there: choose another quantization",
    )


def _stem_and_shard(path: str) -> tuple[str, tuple[int, int] | None]:
    """Return a path without suffix and shard number, and (index, count) of a shard."""
    stem = path.removesuffix(".gguf")
    match = _SHARD.fullmatch(stem)
    if match is None:
        return stem, None
    return match["stem"], (int(match["index"]), int(match["count"]))


def _bounded(tag: str) -> str:
    # An underscore may stand before the name of a quantization, as in tale-target_q8_0. Before any other
    # tag it may be inside a longer tag: the tag M must not match in Q4_K_M.
    before = r"[A-Za-z0-9]" if _QUANTIZATION.fullmatch(tag) else r"[A-Za-z0-9_]"
    return f"(?<!{before}){re.escape(tag)}"


def _offer(paths: list[str]) -> str:
    """Return a hint: the models among the files, or else other GGUF files."""
    if models := model_sets(paths):
        return "models: " + ", ".join(files[0] for files in models[:12])
    if others := [path for path in paths if path.endswith(".gguf")]:
        return f"name one of its files: {', '.join(others[:8])}"
    return "is it a GGUF repository?"
