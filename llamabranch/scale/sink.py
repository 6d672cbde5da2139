"""Where Ray Data writes results: one file for each block, complete as soon as it has its name.

Ray's own sinks open a file by its final name, so one that a crash has cut short shows until the job is
resumed; and they number files with six digits, so that with a million of them one name begins like
another, by which Ray finds what to delete.
"""

from __future__ import annotations

import json
import math
import posixpath
from typing import TYPE_CHECKING, BinaryIO

from .folder import Folder

if TYPE_CHECKING:
    import pyarrow
    import ray.data

__all__ = ["ENDINGS", "make_sink", "write_json_lines"]

ENDINGS = {"parquet": "parquet", "jsonl": "jsonl"}


def make_sink(folder: Folder, kind: str) -> ray.data.Datasink:
    """Return the data sink of a folder; ``kind`` is "parquet" or "jsonl"."""
    import pyarrow.parquet as pq
    from ray.data.datasource import BlockBasedFileDatasink, FilenameProvider

    class Names(FilenameProvider):  # type: ignore[misc, unused-ignore]
        def get_filename_for_task(self, write_uuid: str, task_index: int) -> str:
            return f"{write_uuid}-{task_index:012}.{kind}"

    class Sink(BlockBasedFileDatasink):  # type: ignore[misc, unused-ignore]
        def write_block(self, block: object, block_index: int, ctx: object) -> None:
            write_uuid, task = ctx.kwargs["write_uuid"], ctx.task_idx  # type: ignore[attr-defined]
            name = self.filename_provider.get_filename_for_task(write_uuid, task)
            path = posixpath.join(self.path, name)
            table = block.to_arrow()  # type: ignore[attr-defined]
            with self.open_output_stream(path + ".part") as file:
                if kind == "jsonl":
                    write_json_lines(table, file)
                else:
                    pq.write_table(table, file)
            self.filesystem.move(path + ".part", path)

    return Sink(
        folder.path,
        filesystem=folder.filesystem,
        filename_provider=Names(),
        file_format=kind,
    )


def write_json_lines(table: pyarrow.Table, file: BinaryIO) -> None:
    """Write one object a line; numbers that JSON does not have become null."""
    for row in table.to_pylist():
        line = json.dumps({name: _plain(value) for name, value in row.items()}, ensure_ascii=False)
        file.write(line.encode("utf-8") + b"\n")


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value
