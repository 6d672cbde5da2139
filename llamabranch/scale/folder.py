"""A folder on a file system that all nodes share: local, NFS, S3, GCS, whatever pyarrow opens."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Sequence
from glob import glob
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError

if TYPE_CHECKING:
    import pyarrow.fs

__all__ = ["File", "Folder", "input_files"]

_ENDINGS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}


class File(NamedTuple):
    """A file of an input: its path on the file system and its size in bytes."""

    path: str
    size: int


class Folder:
    """A folder and the file system that it is on.

    Args:
        path: a path, or a URI such as ``s3://bucket/folder``.
        filesystem: a ``pyarrow.fs.FileSystem``; None = as the path tells.

    Raises:
        ConfigError: pyarrow knows no such file system.
    """

    def __init__(self, path: str, filesystem: pyarrow.fs.FileSystem | None = None) -> None:
        self.filesystem, self.path = _resolve(path, filesystem)

    def __truediv__(self, name: str) -> Folder:
        return Folder(posixpath.join(self.path, name), self.filesystem)

    def names(self) -> list[str]:
        """Return the names of its files, sorted; none if the folder does not exist."""
        return sorted(posixpath.basename(file.path) for file in _files(self.filesystem, self.path))

    def create(self) -> None:
        """Create it, and those above it."""
        self.filesystem.create_dir(self.path, recursive=True)

    def delete(self) -> None:
        """Delete it with all that it holds, if it exists."""
        import pyarrow.fs

        if self.filesystem.get_file_info(self.path).type != pyarrow.fs.FileType.NotFound:
            self.filesystem.delete_dir(self.path)

    def read_json(self, name: str) -> dict[str, object] | None:
        """Return the object in a file, or None if there is no such file.

        Raises:
            ConfigError: it holds something else.
        """
        import pyarrow.fs

        path = posixpath.join(self.path, name)
        if self.filesystem.get_file_info(path).type == pyarrow.fs.FileType.NotFound:
            return None
        with self.filesystem.open_input_stream(path) as file:
            data = file.read()
        try:
            found = json.loads(data)
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{path} is damaged: it holds no object")
        return found

    def write_json(self, name: str, value: object) -> None:
        """Write a file in one step: it is there whole, or not at all."""
        path = posixpath.join(self.path, name)
        with self.filesystem.open_output_stream(path + ".part") as file:
            file.write(json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8"))
        self.filesystem.move(path + ".part", path)


def input_files(
    paths: str | Sequence[str], filesystem: pyarrow.fs.FileSystem | None = None
) -> tuple[list[File], str, pyarrow.fs.FileSystem]:
    """Return the files of an input in a fixed order, their format, and the file system that they are on.

    Args:
        paths: files, folders, or (local) patterns such as ``in/*.parquet``.
        filesystem: as for `Folder`.

    Raises:
        ConfigError: there are none, or not all are Parquet, or not all are JSON lines.
    """
    given = [paths] if isinstance(paths, str) else list(paths)
    files: list[File] = []
    for path in given:
        names = (
            sorted(glob(path)) if "://" not in path and any(c in path for c in "*?[") else [path]
        )
        for name in names:
            filesystem, resolved = _resolve(name, filesystem)
            files += _files(filesystem, resolved)
    known = [file for file in files if posixpath.splitext(file.path)[1] in _ENDINGS]
    formats = {_ENDINGS[posixpath.splitext(file.path)[1]] for file in known}
    if not known or filesystem is None:
        raise ConfigError(f"there is no .parquet or .jsonl file in {', '.join(map(str, given))}")
    if len(formats) > 1:
        raise ConfigError("the input has files of both formats", hint="give one of them at a time")
    return sorted(known), formats.pop(), filesystem


def _resolve(
    path: str, filesystem: pyarrow.fs.FileSystem | None
) -> tuple[pyarrow.fs.FileSystem, str]:
    import pyarrow.fs

    if "://" not in path:
        if filesystem is None:
            return pyarrow.fs.LocalFileSystem(), os.path.abspath(path)
        return filesystem, path
    try:
        found, inner = pyarrow.fs.FileSystem.from_uri(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot open {path}: {error}") from None
    return (found if filesystem is None else filesystem), inner


def _files(filesystem: pyarrow.fs.FileSystem, path: str) -> list[File]:
    import pyarrow.fs

    info = filesystem.get_file_info(path)
    if info.type == pyarrow.fs.FileType.File:
        return [File(info.path, info.size)]
    if info.type == pyarrow.fs.FileType.NotFound:
        return []
    selector = pyarrow.fs.FileSelector(path, recursive=False)
    found = filesystem.get_file_info(selector)
    return [File(f.path, f.size) for f in found if f.type == pyarrow.fs.FileType.File]
