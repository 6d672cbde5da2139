"""The input of a job as it is run: one schema, unique ids, sorted by prompt, one block a file.

Sorting brings prompts that begin alike together, so that the prefix caches of the workers find them; a
group that is larger than a block is cut. It is done once: a job that is resumed reads the same blocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .cluster import data_context, import_ray
from .folder import Folder
from .rows import Record

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.fs

_PART_BYTES = 64 << 20  # of the input, for each part of Ray's sort
_N_SAMPLED = 1000  # rows that tell the types of the columns
_PROBLEM = "llamabranch_problem"  # a column: why rows cannot be those of a job


@dataclass(frozen=True)
class Input:
    """The rows of a job.

    Args:
        files, kind, filesystem: as `input_files` returns them.
        id_column: the name of the column of ids.
        columns: those that requests are made of.
        keep: columns that the output has too.
    """

    files: Sequence[tuple[str, int]]
    kind: str
    filesystem: pyarrow.fs.FileSystem
    id_column: str
    columns: tuple[str, ...]
    keep: tuple[str, ...] = ()

    def stage(self, folder: Folder, block_rows: int) -> int:
        """Write the blocks of a job; return how many rows they hold.

        Raises:
            ConfigError: there are no rows, a line is no JSON object, a column holds values of several
                types, or an id is missing or not unique.
        """
        ray, n_parts = import_ray(), 1 + sum(size for _, size in self.files) // _PART_BYTES
        read = ray.data.read_parquet if self.kind == "parquet" else ray.data.read_text
        folder.delete()
        # A shuffle of Ray has 200 parts unless their number is given.
        with data_context(default_hash_shuffle_parallelism=max(2, n_parts)):
            rows = read(
                [path for path, _ in self.files],
                filesystem=self.filesystem,
                override_num_blocks=n_parts,
            )
            schema = self.schema(rows.take(_N_SAMPLED))
            rows = rows.map_batches(
                lambda batch: self.table(batch.to_pylist(), schema), batch_format="pyarrow"
            )
            # What a text begins with: of one to score that is its context.
            keys = [name for name in ("context", "prompt", "text") if name in self.columns]
            if all(str(schema.field(name).type) == "string" for name in keys):
                rows = rows.sort(keys)
            rows.write_parquet(
                folder.path,
                filesystem=folder.filesystem,
                min_rows_per_file=block_rows,
                max_rows_per_file=block_rows,
            )
        return _n_checked(folder, self.id_column)

    def schema(self, given: Sequence[Record]) -> pyarrow.Schema:
        """Return the types of the job's columns, as its first rows have them."""
        import pyarrow as pa

        if not given:
            raise ConfigError("the input has no rows")
        usual = {
            "max_tokens": pa.int64(), "seed": pa.int64(), "parse_special": pa.bool_(),
            "stop": pa.list_(pa.string()),
        }  # fmt: skip
        rows, fields = [self._parsed(row) for row in given], []
        for name in dict.fromkeys((self.id_column, *self.keep, *self.columns)):
            found = _array(name, [row.get(name) for row in rows]).type
            fields.append(
                (name, usual.get(name, pa.string()) if pa.types.is_null(found) else found)
            )
        kind = fields[0][1]
        if kind not in (pa.int64(), pa.string()):
            message = f"ids, in the column {self.id_column!r}, are integers or text, not {kind}"
            raise ConfigError(message)
        return pa.schema([*fields, (_PROBLEM, pa.string())])

    def table(self, given: Sequence[Record], schema: pyarrow.Schema) -> pyarrow.Table:
        """Return rows with the columns and the types of the job; or one row that tells why not.

        What is raised in a task of Ray is printed there, and reaches nobody as it was.
        """
        import pyarrow as pa

        try:
            rows = [self._parsed(row) for row in given]
            if any(row.get(self.id_column) is None for row in rows):
                raise ConfigError(f"every row needs an id, in the column {self.id_column!r}")
            arrays = [_array(f.name, [row.get(f.name) for row in rows], f.type) for f in schema]
        except ConfigError as error:
            return pa.Table.from_pylist([{_PROBLEM: error.message}], schema=schema)
        return pa.Table.from_arrays(arrays, schema=schema)

    def _parsed(self, row: Record) -> Record:
        """Return a row of Parquet as it is, a line of text as the object that it holds."""
        if self.kind == "parquet":
            return row
        try:
            found = json.loads(str(row["text"]))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"invalid row {row['text']!r:.80}: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"invalid row {row['text']!r:.80}: it is not an object")
        return found


def count_rows(folder: Folder) -> int:
    """Return the rows of a folder's Parquet files; ids that are pending do not count."""
    import pyarrow.parquet as pq

    return sum(
        pq.read_metadata(path, filesystem=folder.filesystem).num_rows
        for path in folder.paths(".parquet")
        if not path.endswith(".pending.parquet")
    )


def _array(
    name: str, values: Sequence[object], kind: pyarrow.DataType | None = None
) -> pyarrow.Array:
    import pyarrow as pa

    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        message = f"the column {name!r} holds values of several types, or too large ones: {error}"
        raise ConfigError(message) from None


def _n_checked(folder: Folder, id_column: str) -> int:
    """Return how many rows the blocks hold, once their ids are known to be unique."""
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    files = ds.dataset(folder.paths(".parquet"), filesystem=folder.filesystem, format="parquet")
    for found in files.to_table([_PROBLEM], filter=ds.field(_PROBLEM).is_valid())[_PROBLEM]:
        raise ConfigError(found.as_py())
    ids = files.to_table([id_column])[id_column]
    counts = ids.value_counts()
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(repeated):
        message = f"two rows have the id {repeated[0]['values'].as_py()!r}"
        raise ConfigError(message, hint="ids must be unique")
    return len(ids)
