"""Parse ``user/repo[:tag]``, llama.cpp's notation, and choose the files of the repository.

The choice is llama.cpp's, but a tag must match as a whole. In llama.cpp ``:F16`` also finds BF16, and
``:Q4_0`` finds IQ4_0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ConfigError

DEFAULT_TAGS = ("Q4_K_M", "Q8_0")  # tried without a tag, in this order; then any model

# llama.cpp's rule: letters, digits and _, with single dots and dashes between them.
_NAME = r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*"
_MARK = r"@refs/pr/\d+|[@:][\w.-]+"
_PREFIX = r"hf:|(?:https://)?(?:hf|huggingface)\.co/"
_SPEC = re.compile(rf"(?:{_PREFIX})?({_NAME}/{_NAME})((?:{_MARK})*)(?:/(.+))?", re.ASCII)
_LONGEST_NAME = 96  # of a repository on the hub
_SHARD = re.compile(r"(.+)-\d{5}-of-(?!00000)(\d{5})\.gguf", re.ASCII)
# Files that belong to a model but are not models: projectors, importance matrices and heads.
_SIDECAR = re.compile(r"(?i:mmproj|imatrix)|(?:^|[-._])(?:mtp|eagle3|dflash|dspark)-", re.ASCII)


@dataclass(frozen=True)
class HubSpec:
    """A model in a repository on the Hugging Face hub.

    Attributes:
        repository: ``user/repo``.
        revision: a branch, a tag of git or a commit; None = the main branch.
        tag: the quantization, such as ``Q8_0``; None = llama.cpp's choice.
        file: a file of the repository, instead of a tag.
    """

    repository: str
    revision: str | None = None
    tag: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubSpec | None:
        """Parse ``user/repo[@revision][:tag]`` or ``user/repo[@revision]/file.gguf``; None = neither."""
        match = _SPEC.fullmatch(text)
        if match is None or len(match[1]) > _LONGEST_NAME:
            return None
        if text.endswith(".gguf") and match[3] is None:  # models/tale.gguf
            return None
        marks = re.findall(_MARK, match[2], re.ASCII)
        by_kind = {mark[0]: mark[1:] for mark in marks}
        if len(by_kind) < len(marks) or (":" in by_kind and match[3]):
            return None
        return cls(match[1], by_kind.get("@"), by_kind.get(":"), match[3])

    def __str__(self) -> str:
        parts = ("", self.repository), ("@", self.revision), (":", self.tag), ("/", self.file)
        return "".join(mark + part for mark, part in parts if part is not None)


def choose(
    paths: Iterable[str], tag: str | None = None, *, file: str | None = None, where: str = "it"
) -> tuple[str, ...]:
    """Return the files of one model: one file, or all shards in order.

    Args:
        paths: the files of the repository.
        tag: the quantization, in capitals or not; None = Q4_K_M, Q8_0, or else the first model.
        file: this file instead, or the model that it is a shard of. Sidecar files can be named.
        where: the repository, for messages.

    Raises:
        ConfigError: no model has the tag, there is no such file, or a shard is missing. The hint lists
            the available models.
    """
    files = sorted(paths)
    ggufs = [path for path in files if path.endswith(".gguf")]
    models = [path for path in ggufs if not _SIDECAR.search(path.rpartition("/")[2])]
    if file is not None:
        what, found = f"file {file}", [file] if file in files else []
    elif tag is not None:
        what, found = f"model with the tag {tag}", _tagged(models, tag)
    else:
        preferred = (path for name in DEFAULT_TAGS for path in _tagged(models, name))
        what, found = "GGUF model", [*preferred, *models]
    if not found:
        offered = models or ggufs
        hint = f"its files: {', '.join(offered[:12])}" if offered else "is it a GGUF repository?"
        raise ConfigError(f"{where} has no {what}", hint=hint)
    shard = _SHARD.fullmatch(found[0])
    if shard is None:
        return (found[0],)
    count = int(shard[2])
    shards = tuple(f"{shard[1]}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1))
    missing = [path for path in shards if path not in files]
    if missing:
        raise ConfigError(
            f"{where} lacks part {missing[0]}",
            hint="the model is incomplete there: choose another quantization",
        )
    return shards


def _tagged(models: list[str], tag: str) -> list[str]:
    """Return the models that have the tag as a whole, those whose name ends in it first."""
    # An underscore may stand before the name of a quantization, as in tale-target_q8_0. Before any other
    # tag it may be inside a longer tag: the tag M must not match in Q4_K_M.
    before = r"[^\W_]" if re.match(r"[A-Za-z]+\d", tag, re.ASCII) else r"\w"
    whole = rf"(?ai)(?<!{before}){re.escape(tag)}(?!\w)"
    stems = {path: re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", path) for path in models}
    found = [path for path in models if re.search(whole, stems[path])]
    return sorted(found, key=lambda path: not re.search(f"{whole}$", stems[path]))
