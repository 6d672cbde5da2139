"""A folder on a file system that all nodes share, and the results in it. pyarrow gives access.

Ray's own sinks write directly to a file with its final name, so a crash can leave an incomplete
file. Here a file gets its final name only when it is complete. So the ids in the files are the ids
of the finished rows.
"""

from __future__ import annotations

import json
import os
import posixpath
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.fs
    import ray.data

_PART = ".part"  # the ending of a file that is being written


class Folder:
    """A folder and the file system that it is on.

    Args:
        path: a path, or a URI such as ``s3://bucket/folder``.
        filesystem: a ``pyarrow.fs.FileSystem``; None = the one in the URI, or the local one.

    Raises:
        ConfigError: pyarrow cannot open a file system for this path.
    """

    def __init__(self, path: str, filesystem: pyarrow.fs.FileSystem | None = None) -> None:
        import pyarrow.fs

        if "://" in path:
            try:
                named, path = pyarrow.fs.FileSystem.from_uri(path)
            except (ValueError, OSError) as error:
                raise ConfigError(f"cannot open {path}: {error}") from None
            filesystem = filesystem or named
        elif filesystem is None:
            filesystem, path = pyarrow.fs.LocalFileSystem(), os.path.abspath(path)
        self.filesystem, self.path = filesystem, path

    def files(self) -> list[tuple[str, int]]:
        """Return the paths of the files in it, sorted, with their sizes; [] if the folder does not exist.

        If the path is a file, return only this file.
        """
        import pyarrow.fs

        info = self.filesystem.get_file_info(self.path)
        selector = pyarrow.fs.FileSelector(self.path, allow_not_found=True)
        entries = [info] if info.is_file else self.filesystem.get_file_info(selector)
        return sorted((file.path, file.size) for file in entries if file.is_file)

    def read_json(self, name: str) -> dict[str, object] | None:
        """Return the object in a file, or None if there is no such file.

        Raises:
            ConfigError: the file does not hold a JSON object.
        """
        path = posixpath.join(self.path, name)
        try:
            with self.filesystem.open_input_stream(path) as file:
                content = json.loads(file.read())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is damaged: it holds no object")
        return content

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file in one step. After a crash the file is complete or missing."""
        path = posixpath.join(self.path, name)
        self.filesystem.create_dir(posixpath.dirname(path), recursive=True)
        with self.filesystem.open_output_stream(path + _PART) as file:
            file.write(json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8"))
        self.filesystem.move(path + _PART, path)

    # -- results -----------------------------------------------------------------------------------

    def finished(self, id_column: str) -> pyarrow.Table:
        """Return ``id``, ``is_error`` and ``exact`` of all rows in complete files.

        This deletes incomplete files, and files that have a row in common, so their rows count as
        missing. Two files can have a row in common if the process that started the job died while
        Ray was still writing.
        """
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.dataset as ds

        paths = [path for path, _ in self.files()]
        for path in paths:
            if path.endswith(_PART):
                self.filesystem.delete_file(path)
        paths = [path for path in paths if path.endswith(".parquet")]
        if not paths:
            return pa.table({"id": pa.array([], pa.int64()), "is_error": [], "exact": []})
        files = ds.dataset(paths, filesystem=self.filesystem, format="parquet")
        of_rows = {
            "id": ds.field(id_column),
            "is_error": ds.field("error").is_valid(),
            "exact": ds.field("exact"),
        }
        rows = files.to_table(of_rows)
        counts = rows["id"].value_counts()
        twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")
        if not len(twice):
            return rows
        of_twice = files.to_table(["__filename"], filter=ds.field(id_column).isin(twice))
        for path in of_twice["__filename"].unique():
            self.filesystem.delete_file(path.as_py())
        return self.finished(id_column)

    def sink(self) -> ray.data.Datasink:
        """Return a data sink that writes a Parquet file for each block."""
        import pyarrow.parquet as pq
        from ray.data.datasource import BlockBasedFileDatasink

        class Sink(BlockBasedFileDatasink):  # type: ignore[misc, unused-ignore]
            def write_block(self, block: object, block_index: int, ctx: object) -> None:
                # If Ray repeats a task, the name is the same, so the file is replaced.
                name = f"{ctx.kwargs['write_uuid']}-{ctx.task_idx:012}.parquet"  # type: ignore[attr-defined]
                path = posixpath.join(self.path, name)
                with self.open_output_stream(path + _PART) as file:
                    pq.write_table(block.to_arrow(), file)  # type: ignore[attr-defined]
                self.filesystem.move(path + _PART, path)

        return Sink(self.path, filesystem=self.filesystem, file_format="parquet")
