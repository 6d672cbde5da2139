"""A folder on a file system that all nodes share (whatever pyarrow opens), and results in it.

Ray's own sinks open a file by its final name, so one that a crash has cut short shows until the job is
resumed; and they number files with six digits, so that with a million of them one name begins like
another, by which Ray finds what to delete. Here a file of results is complete as soon as it has its name.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    import pyarrow.fs
    import ray.data

_KINDS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}


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

    def paths(self, ending: str = "") -> list[str]:
        """Return the paths of its files that end so, sorted; none if the folder does not exist."""
        files = _files(self.filesystem, self.path)
        return [path for path, _ in files if path.endswith(ending)]

    def delete(self) -> None:
        """Delete it with all that it holds, if it exists."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_dir(self.path)

    def read_json(self, name: str) -> dict[str, object] | None:
        """Return the object in a file, or None if there is no such file.

        Raises:
            ConfigError: it holds something else.
        """
        path = posixpath.join(self.path, name)
        try:
            with self.filesystem.open_input_stream(path) as file:
                found = json.loads(file.read())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{path} is damaged: it holds no object")
        return found

    def write_json(self, name: str, value: object) -> None:
        """Write a file in one step: it is there whole, or not at all."""
        self.filesystem.create_dir(self.path, recursive=True)
        path = posixpath.join(self.path, name)
        with self.filesystem.open_output_stream(path + ".part") as file:
            file.write(json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8"))
        self.filesystem.move(path + ".part", path)


def input_files(
    paths: str | Sequence[str], filesystem: pyarrow.fs.FileSystem | None = None
) -> tuple[list[tuple[str, int]], str, pyarrow.fs.FileSystem]:
    """Return the files of an input, sorted, with their sizes; their format, and their file system.

    Args:
        paths: files, or folders.
        filesystem: as for `Folder`.

    Raises:
        ConfigError: the folder has no files, or not all are Parquet, or not all are JSON lines.
    """
    given = [paths] if isinstance(paths, str) else list(paths)
    found: list[tuple[str, int]] = []
    wanted = filesystem
    for path in given:  # each by itself: a relative path is resolved where none is wanted
        filesystem, resolved = _resolve(path, wanted)
        found += _files(filesystem, resolved)
    kinds = {path: kind for path, _ in found if (kind := _KINDS.get(posixpath.splitext(path)[1]))}
    if not kinds or filesystem is None:
        names = ", ".join(map(str, given))
        is_pattern = any(character in names for character in "*?[")
        hint = "patterns are not expanded: name the folder, or a list of files"
        raise ConfigError(
            f"there is no .parquet or .jsonl file in {names}", hint=hint if is_pattern else None
        )
    kind, *other = set(kinds.values())
    if other:
        raise ConfigError("the input has files of both formats", hint="give one of them at a time")
    return sorted(file for file in found if file[0] in kinds), kind, filesystem


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
    return filesystem or found, inner


def _files(filesystem: pyarrow.fs.FileSystem, path: str) -> list[tuple[str, int]]:
    """Return a file, or those of a folder, sorted, with their sizes; none where nothing is."""
    import pyarrow.fs

    info = filesystem.get_file_info(path)
    selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
    found = [info] if info.is_file else filesystem.get_file_info(selector)
    return sorted((file.path, file.size) for file in found if file.is_file)


# -- results ---------------------------------------------------------------------------------------


def make_sink(folder: Folder) -> ray.data.Datasink:
    """Return the data sink of a folder: a Parquet file for each block."""
    import pyarrow.parquet as pq
    from ray.data.datasource import BlockBasedFileDatasink, FilenameProvider

    class Names(FilenameProvider):  # type: ignore[misc, unused-ignore]
        def get_filename_for_task(self, write_uuid: str, task_index: int) -> str:
            return f"{write_uuid}-{task_index:012}.parquet"

    class Sink(BlockBasedFileDatasink):  # type: ignore[misc, unused-ignore]
        def write_block(self, block: object, block_index: int, ctx: object) -> None:
            write_uuid, task = ctx.kwargs["write_uuid"], ctx.task_idx  # type: ignore[attr-defined]
            name = self.filename_provider.get_filename_for_task(write_uuid, task)
            path = posixpath.join(self.path, name)
            table = block.to_arrow()  # type: ignore[attr-defined]
            with self.open_output_stream(path + ".part") as file:
                pq.write_table(table, file)
            self.filesystem.move(path + ".part", path)

    return Sink(
        folder.path,
        filesystem=folder.filesystem,
        filename_provider=Names(),
        file_format="parquet",
    )
