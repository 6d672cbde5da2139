"""A folder on a file system that all nodes share (whatever pyarrow opens), and results in it.

Ray's own sinks open a file by its final name, so a crash can leave one that is cut short. Here a file of
results is complete as soon as it has its name, so its ids are those of finished rows.
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
        filesystem: a ``pyarrow.fs.FileSystem``; None = as the path tells.

    Raises:
        ConfigError: pyarrow knows no such file system.
    """

    def __init__(self, path: str, filesystem: pyarrow.fs.FileSystem | None = None) -> None:
        import pyarrow.fs

        if "://" in path:
            try:
                found, path = pyarrow.fs.FileSystem.from_uri(path)
            except (ValueError, OSError) as error:
                raise ConfigError(f"cannot open {path}: {error}") from None
            filesystem = filesystem or found
        elif filesystem is None:
            filesystem, path = pyarrow.fs.LocalFileSystem(), os.path.abspath(path)
        self.filesystem, self.path = filesystem, path

    def files(self) -> list[tuple[str, int]]:
        """Return the paths of its files, sorted, with their sizes; none if it does not exist.

        A path that is a file counts as the folder of this file.
        """
        import pyarrow.fs

        info = self.filesystem.get_file_info(self.path)
        selector = pyarrow.fs.FileSelector(self.path, allow_not_found=True)
        found = [info] if info.is_file else self.filesystem.get_file_info(selector)
        return sorted((file.path, file.size) for file in found if file.is_file)

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
        path = posixpath.join(self.path, name)
        self.filesystem.create_dir(posixpath.dirname(path), recursive=True)
        with self.filesystem.open_output_stream(path + _PART) as file:
            file.write(json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8"))
        self.filesystem.move(path + _PART, path)

    # -- results -----------------------------------------------------------------------------------

    def finished(self, id_column: str) -> pyarrow.Table:
        """Return ``id``, ``is_error`` and ``batch_invariant`` of the rows of its complete files.

        Two files can hold the same rows if a driver died while Ray still wrote for it. Such files are
        deleted here, so that their rows count as missing; files that were not completed are, too.
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
            return pa.table({"id": pa.array([], pa.int64()), "is_error": [], "batch_invariant": []})
        files = ds.dataset(paths, filesystem=self.filesystem, format="parquet")
        of_rows = {
            "id": ds.field(id_column),
            "is_error": ds.field("error").is_valid(),
            "batch_invariant": ds.field("batch_invariant"),
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
                # A task that Ray repeats writes the same file again.
                name = f"{ctx.kwargs['write_uuid']}-{ctx.task_idx:012}.parquet"  # type: ignore[attr-defined]
                path = posixpath.join(self.path, name)
                with self.open_output_stream(path + _PART) as file:
                    pq.write_table(block.to_arrow(), file)  # type: ignore[attr-defined]
                self.filesystem.move(path + _PART, path)

        return Sink(self.path, filesystem=self.filesystem, file_format="parquet")
