"""The input of a job as it is run: one schema, unique ids, sorted by prompt, one block a file.

Sorting brings prompts that begin alike together, so that the prefix caches of the workers find them; a
group that is larger than a block is cut. It is done once: a job that is resumed reads the same blocks.
A small input is sorted by the driver, a larger one by Ray. The values from which a row's request is made
are kept as JSON: the worker checks them, so that a wrong one is the error of its row.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError
from .cluster import data_context, import_ray
from .folder import File, Folder
from .rows import ROW, Record

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.fs

__all__ = ["Input", "count_rows"]

_SORT_KEY = "sort_key"
_MOST_CHECKED_IDS = 100_000_000  # 8 bytes and a hash each, on the driver
_PART_BYTES = 64 << 20  # of the input, for each part of Ray's sort


@dataclass(frozen=True)
class Input:
    """The rows of a job.

    Args:
        files, kind, filesystem: as `input_files` returns them.
        id_column: the name of the column of ids.
        columns: those that requests are made of; the first is the one to sort by.
        keep: columns that the output has too.
    """

    files: Sequence[File]
    kind: str
    filesystem: pyarrow.fs.FileSystem
    id_column: str
    columns: tuple[str, ...]
    keep: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(file.size for file in self.files)

    def stage_locally(self, folder: Folder, *, block_rows: int, sort: bool) -> int:
        """Write the blocks of a job from an input that fits into memory; return how many rows they hold.

        Raises:
            ConfigError: a file cannot be read, a line is no JSON object, or two rows have the same id.
        """
        import pyarrow.parquet as pq

        rows = list(self._read())
        table = self._table(rows, _is_text(rows, self.id_column))
        _check_unique(table.column(self.id_column).to_pylist())
        if sort:
            table = table.sort_by([(_SORT_KEY, "ascending")])
        folder.delete()
        folder.create()
        for number, start in enumerate(range(0, table.num_rows, block_rows)):
            path = posixpath.join(folder.path, f"block-{number:09}.parquet")
            block = table.slice(start, block_rows).drop_columns([_SORT_KEY])
            pq.write_table(block, path, filesystem=folder.filesystem)
        return int(table.num_rows)

    def stage_on_ray(self, folder: Folder, *, block_rows: int, sort: bool) -> int:
        """Do what `stage_locally` does by Ray Data; rows need ids."""
        ray, paths = import_ray(), [file.path for file in self.files]
        folder.delete()
        # A shuffle of Ray has 200 parts if it is not told.
        with data_context(default_hash_shuffle_parallelism=max(2, self.size // _PART_BYTES)):
            read = ray.data.read_parquet if self.kind == "parquet" else ray.data.read_text
            rows = read(paths, filesystem=self.filesystem)
            ids_are_text = _is_text(list(self._given(rows.take(1))), self.id_column)

            def table(batch: pyarrow.Table) -> pyarrow.Table:
                return self._table(self._given(batch.to_pylist()), ids_are_text)

            rows = rows.map_batches(table, batch_format="pyarrow", batch_size=4096)
            if sort:
                rows = rows.sort(_SORT_KEY)
            rows.drop_columns([_SORT_KEY]).write_parquet(
                folder.path,
                filesystem=folder.filesystem,
                min_rows_per_file=block_rows,
                max_rows_per_file=block_rows,
            )
        n_rows = count_rows(folder)
        if n_rows <= _MOST_CHECKED_IDS:
            _check_unique(_ids(folder, self.id_column))
        return n_rows

    def _read(self) -> Iterator[Record]:
        """Yield all rows; those of JSON lines without an id are numbered."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        wanted, n_rows = {self.id_column, *self.columns, *self.keep}, 0
        for file in self.files:
            if self.kind == "parquet":
                try:
                    names = pq.read_schema(file.path, filesystem=self.filesystem).names
                    columns = [name for name in names if name in wanted]
                    table = pq.read_table(file.path, filesystem=self.filesystem, columns=columns)
                except (OSError, pa.ArrowInvalid) as error:
                    raise ConfigError(f"cannot read {file.path}: {error}") from None
                yield from table.to_pylist()
                continue
            with self.filesystem.open_input_stream(file.path) as stream:
                lines = stream.read().split(b"\n")
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = _parse(line, f"{posixpath.basename(file.path)}, line {number}")
                    yield {self.id_column: n_rows, **row}
                    n_rows += 1

    def _given(self, rows: Iterable[Record]) -> Iterator[Record]:
        """Yield rows of Parquet as they are, those of text parsed."""
        for row in rows:
            yield row if self.kind == "parquet" else _parse(str(row["text"]), "the input")

    def _table(self, rows: Iterable[Record], ids_are_text: bool) -> pyarrow.Table:
        """Return rows as a table of the job's schema, with the key to sort by.

        Raises:
            ConfigError: a row without an id, or with one of another type.
        """
        import pyarrow as pa

        columns: dict[str, list[object]] = {
            name: [] for name in dict.fromkeys((self.id_column, *self.keep, ROW, _SORT_KEY))
        }
        for row in rows:
            identity = row.get(self.id_column)
            if type(identity) is not (str if ids_are_text else int) or (
                isinstance(identity, int) and not -(2**63) <= identity < 2**63
            ):
                raise ConfigError(
                    f"every row needs an id in the column {self.id_column!r}, of the same type: "
                    f"{identity!r:.40} is not {'text' if ids_are_text else 'an integer'}"
                )
            for name in (self.id_column, *(n for n in self.keep if n != self.id_column)):
                columns[name].append(row.get(name))
            given = {name: row[name] for name in self.columns if row.get(name) is not None}
            columns[ROW].append(json.dumps(given, default=lambda value: {"no JSON": repr(value)}))
            columns[_SORT_KEY].append(self._sort_key(given))
        types = {ROW: pa.string(), _SORT_KEY: pa.binary()}
        types[self.id_column] = pa.string() if ids_are_text else pa.int64()
        arrays = {}
        for name, values in columns.items():
            try:
                arrays[name] = pa.array(values, types.get(name))
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
                raise ConfigError(f"cannot keep the column {name!r}: {error}") from None
        return pa.table(arrays)

    def _sort_key(self, row: Record) -> bytes:
        prompt = row.get(self.columns[0])
        if isinstance(prompt, list):
            try:
                return np.asarray(prompt, dtype=">i4").tobytes()
            except (TypeError, ValueError, OverflowError):
                return b""
        # A text to score begins with its context.
        parts = [row.get("context") if "context" in self.columns else None, prompt]
        text = "".join(part for part in parts if isinstance(part, str))
        return text.encode("utf-8", "surrogatepass")


def count_rows(folder: Folder) -> int:
    """Return the rows of a folder's Parquet files; ids that are pending do not count."""
    import pyarrow.parquet as pq

    return sum(
        pq.read_metadata(path, filesystem=folder.filesystem).num_rows
        for path in folder.paths(".parquet")
        if not path.endswith(".pending.parquet")
    )


def _parse(line: bytes | str, where: str) -> Record:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: invalid row: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: invalid row: it is not an object")
    return row


def _is_text(rows: Sequence[Record], id_column: str) -> bool:
    return bool(rows) and isinstance(rows[0].get(id_column), str)


def _ids(folder: Folder, id_column: str) -> Iterator[object]:
    import pyarrow.parquet as pq

    for path in folder.paths(".parquet"):
        table = pq.read_table(path, filesystem=folder.filesystem, columns=[id_column])
        yield from table.column(id_column).to_pylist()


def _check_unique(ids: Iterable[object]) -> None:
    seen: set[object] = set()
    for identity in ids:
        if identity in seen:
            raise ConfigError(f"two rows have the id {identity!r}", hint="ids must be unique")
        seen.add(identity)
