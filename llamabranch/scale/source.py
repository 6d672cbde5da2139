"""The input of a job: its files, and its rows in the order in which they run.

Rows are sorted so that prompts with the same beginning are in the same block. Then a worker's
prefix cache can reuse the beginning.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .folder import Folder
from .rows import Record

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.fs
    import ray.data

_KINDS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_PART_BYTES = 64 << 20  # Ray reads and sorts the input in parts of about so many bytes
_N_SAMPLED = 1000  # the types of the columns are taken from this many first rows
_PROBLEM = "llamabranch_problem"  # an extra column with the reason why rows are invalid


@dataclass(frozen=True)
class Source:
    """The files of a job's input, and the columns that it reads.

    Args:
        files: the path and the size in bytes of each file, sorted.
        kind: "parquet" or "jsonl".
        filesystem: the file system of the files.
        id_column: the name of the column of ids.
        columns: the names of the columns from which requests are made.
        keep: the names of the columns that are copied to the output.
    """

    files: Sequence[tuple[str, int]]
    kind: str
    filesystem: pyarrow.fs.FileSystem
    id_column: str
    columns: tuple[str, ...]
    keep: tuple[str, ...] = ()

    @classmethod
    def find(
        cls,
        inputs: str | Sequence[str],
        filesystem: pyarrow.fs.FileSystem | None,
        id_column: str,
        columns: tuple[str, ...],
        keep: tuple[str, ...] = (),
    ) -> Source:
        """Return the source of ``inputs``: paths or URIs of files and folders.

        Raises:
            ConfigError: there are no files, or they have both formats or are on several file
                systems.
        """
        inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        folders = [Folder(path, filesystem) for path in inputs]
        if any(folder.filesystem != folders[0].filesystem for folder in folders):
            raise ConfigError("the input is on several file systems", hint="name one of them")
        files = (file for folder in folders for file in folder.files())
        found_files = sorted(file for file in files if posixpath.splitext(file[0])[1] in _KINDS)
        if not found_files:
            names = ", ".join(map(str, inputs))
            is_pattern = any(character in names for character in "*?[")
            hint = "patterns are not expanded: name the folder, or a list of files"
            raise ConfigError(
                f"there is no .parquet or .jsonl file in {names}", hint=hint if is_pattern else None
            )
        kind, *other = {_KINDS[posixpath.splitext(path)[1]] for path, _ in found_files}
        if other:
            message = "the input has files of both formats"
            raise ConfigError(message, hint="give one of them at a time")
        return cls(found_files, kind, folders[0].filesystem, id_column, columns, keep)

    def rows(self, done: pyarrow.ChunkedArray, block_rows: int) -> ray.data.Dataset:
        """Return the rows whose ids are not in ``done``, sorted by prompt, in blocks of ``block_rows``.

        The rows are read at once, because workers may later take all CPUs of the cluster.

        Raises:
            ConfigError: there are no rows, or a column has values of several types.
        """
        import pyarrow.compute as pc
        import ray

        n_parts = 1 + sum(size for _, size in self.files) // _PART_BYTES
        read = ray.data.read_parquet if self.kind == "parquet" else ray.data.read_text
        paths = [path for path, _ in self.files]
        rows = read(paths, filesystem=self.filesystem, override_num_blocks=n_parts)
        schema = self.schema(rows.take(_N_SAMPLED))
        finished = ray.put(done.cast(schema[0].type))

        def prepare(batch: pyarrow.Table) -> pyarrow.Table:
            table = self.table(batch.to_pylist(), schema)
            is_done = pc.is_in(table[self.id_column], value_set=ray.get(finished))
            return table.filter(pc.invert(is_done))

        rows = rows.map_batches(prepare, batch_format="pyarrow", batch_size=None)
        # A text to score begins with its context, if it has one.
        keys = [name for name in ("context", "prompt", "text") if name in self.columns]
        if all(str(schema.field(name).type) == "string" for name in keys):
            # materialize() ends this plan of Ray's. If sorting and cutting were one plan, Ray would
            # cut each sorted part into blocks separately.
            rows = rows.sort(keys).materialize()
        return rows.repartition(target_num_rows_per_block=block_rows, strict=True).materialize()

    def count(self, rows: ray.data.Dataset) -> int:
        """Check the rows, and return how many there are.

        Raises:
            ConfigError: two rows have the same id, an id is missing, a line is not a JSON object,
                or a column holds values of several types.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        names = [self.id_column, _PROBLEM]
        checked = rows.select_columns(names).iter_batches(batch_size=None, batch_format="pyarrow")
        table = pa.concat_tables(
            [pa.table({name: [] for name in names}), *checked], promote_options="permissive"
        )
        for problem in table[_PROBLEM].drop_null():
            raise ConfigError(problem.as_py())
        ids = table[self.id_column]
        counts = ids.value_counts()
        repeated = counts.filter(pc.greater(counts.field("counts"), 1))
        if len(repeated):
            message = f"two rows have the id {repeated[0]['values'].as_py()!r}"
            raise ConfigError(message, hint="ids must be unique")
        return len(ids)

    def schema(self, sample: Sequence[Record]) -> pyarrow.Schema:
        """Return the types of the job's columns, found from its first rows."""
        import pyarrow as pa

        if not sample:
            raise ConfigError("the input has no rows")
        usual = {
            "max_tokens": pa.int64(), "seed": pa.int64(), "parse_special": pa.bool_(),
            "stop": pa.list_(pa.string()), "choice": pa.list_(pa.string()),
        }  # fmt: skip
        rows, fields = [self._parsed(row) for row in sample], []
        for name in dict.fromkeys((self.id_column, *self.keep, *self.columns)):
            column_type = _array(name, [row.get(name) for row in rows]).type
            fields.append(
                (
                    name,
                    usual.get(name, pa.string()) if pa.types.is_null(column_type) else column_type,
                )
            )
        kind = fields[0][1]
        if kind not in (pa.int64(), pa.string()):
            message = f"ids, in the column {self.id_column!r}, are integers or text, not {kind}"
            raise ConfigError(message)
        return pa.schema([*fields, (_PROBLEM, pa.string())])

    def table(self, rows: Sequence[Record], schema: pyarrow.Schema) -> pyarrow.Table:
        """Return rows with the job's columns and types, or one row with why they are invalid.

        No exception is raised, because Ray would print it and change its message.
        """
        import pyarrow as pa

        try:
            rows = [self._parsed(row) for row in rows]
            if any(row.get(self.id_column) is None for row in rows):
                raise ConfigError(f"every row needs an id, in the column {self.id_column!r}")
            arrays = [_array(f.name, [row.get(f.name) for row in rows], f.type) for f in schema]
        except ConfigError as error:
            return pa.Table.from_pylist([{_PROBLEM: error.message}], schema=schema)
        return pa.Table.from_arrays(arrays, schema=schema)

    def _parsed(self, row: Record) -> Record:
        """Return the row's columns. A line of JSON is parsed; Parquet has them already."""
        if self.kind == "parquet":
            return row
        try:
            row_object = json.loads(str(row["text"]))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"invalid row {row['text']!r:.80}: {error}") from None
        if not isinstance(row_object, dict):
            raise ConfigError(f"invalid row {row['text']!r:.80}: it is not an object")
        return row_object


def _array(
    name: str, values: Sequence[object], kind: pyarrow.DataType | None = None
) -> pyarrow.Array:
    import pyarrow as pa

    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        message = f"the column {name!r} holds values of several types, or too large ones: {error}"
        raise ConfigError(message) from None
