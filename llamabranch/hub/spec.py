"""``user/repo[:tag]``: the name of a model on the Hugging Face hub, as llama.cpp's users type it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError

# llama.cpp's rule: letters, digits and _, with single dots and dashes between them.
_NAME = r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*"
_SPEC = re.compile(
    rf"(?P<prefix>hf:|(?:https://)?(?:hf\.co|huggingface\.co)/)?(?P<repository>{_NAME}/{_NAME})"
    r"(?P<marks>(?:@(?:refs/pr/\d+|[\w.-]+)|:[\w.-]+)*)(?:/(?P<file>.+))?",
    re.ASCII,
)
_MARK = re.compile(r"([@:])(refs/pr/\d+|[\w.-]+)", re.ASCII)
_LONGEST_NAME = 96  # of a repository on the hub


@dataclass(frozen=True)
class HubSpec:
    """A model of a repository on the Hugging Face hub.

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
        """Parse ``[hf:]user/repo[@revision][:tag]`` or ``[hf:]user/repo[@revision]/file.gguf``.

        Returns None for a word or a path.

        Raises:
            ConfigError: something else follows ``hf:``; two tags, two revisions, or a tag and a file.
        """
        match = _SPEC.fullmatch(text)
        if match is None:
            if text.startswith("hf:"):
                raise ConfigError(
                    f"{text!r} does not name a repository",
                    hint="write hf:user/repo, hf:user/repo:Q8_0 or hf:user/repo/file.gguf",
                )
            return None
        repository, file = match["repository"], match["file"]
        if file is None and match["prefix"] is None and repository.lower().endswith(".gguf"):
            return None  # models/tale.gguf
        marks = _MARK.findall(match["marks"])
        by_mark = dict(marks)
        if len(by_mark) < len(marks):
            raise ConfigError(f"{text!r} has two tags or two revisions", hint="use one of each")
        if file is not None and ":" in by_mark:
            raise ConfigError(f"{text!r} has a tag and a file", hint="use one of them")
        if file is not None and not is_safe_path(file):
            raise ConfigError(f"{text!r}: {file!r} is not the path of a file in a repository")
        if len(repository) > _LONGEST_NAME:
            return None
        return cls(repository, by_mark.get("@"), by_mark.get(":"), file)

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        tag = "" if self.tag is None else f":{self.tag}"
        file = "" if self.file is None else f"/{self.file}"
        return self.repository + revision + tag + file


def is_safe_path(path: str) -> bool:
    """Return whether the path of a file in a repository cannot leave its folder."""
    if not path.isprintable() or any(mark in path for mark in '\\:*?"<>|'):
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))
