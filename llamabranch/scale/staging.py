"""The input of a job as it is run: one schema, checked ids, sorted by prompt, one block a file.

Sorting brings prompts that begin alike together, so that the prefix caches of the workers find them; a
group that is larger than a block is cut. It is done once: a job that is resumed reads the same blocks.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError
from .folder import File, Folder
from .rows import PROBLEM, Record

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.fs

__all__ = [
    "SORT_KEY",
    "Layout",
    "id_type",
    "normalize",
    "read_input",
    "stage_locally",
    "staged_ids",
    "unique_ids",
]

SORT_KEY = "sort_key"

_KINDS: dict[str, tuple[type, ...]] = {
    "prompt": (str, list),
    "text": (str,),
    "context": (str,),
    "max_tokens": (int,),
    "seed": (int,),
    "grammar": (str,),
    "stop": (str, list),
    "parse_special": (bool,),
}


@dataclass(frozen=True)
class Layout:
    """The columns of a job's input.

    Args:
        id_column: the name of the column of ids.
        columns: those that requests are made of; the first is the one to sort by.
        keep: others that the output keeps.
    """

    id_column: str
    columns: tuple[str, ...]
    keep: tuple[str, ...] = ()


def read_input(
    files: Sequence[File], kind: str, filesystem: pyarrow.fs.FileSystem, layout: Layout
) -> list[Record]:
    """Return all rows of a small input; rows of JSON lines without an id are numbered.

    Raises:
        ConfigError: a line that is not a JSON object, with its number; a file that cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = {layout.id_column, *layout.columns, *layout.keep}
    rows: list[Record] = []
    for file in files:
        if kind == "parquet":
            try:
                names = pq.read_schema(file.path, filesystem=filesystem).names
                columns = [name for name in names if name in wanted]
                table = pq.read_table(file.path, filesystem=filesystem, columns=columns)
            except (OSError, pa.ArrowInvalid) as error:
                raise ConfigError(f"cannot read {file.path}: {error}") from None
            rows += table.to_pylist()
            continue
        with filesystem.open_input_stream(file.path) as stream:
            lines = stream.read().split(b"\n")
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{posixpath.basename(file.path)}, line {number}"
                row = {k: v for k, v in _parse(line, where).items() if k in wanted}
                rows.append({layout.id_column: len(rows), **row})
    return rows


def _parse(line: bytes, where: str) -> Record:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: invalid row: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: invalid row: it is not an object")
    return row


def normalize(rows: Iterable[Record], layout: Layout, ids: str) -> pyarrow.Table:
    """Return rows as a table of the job's schema, with the key to sort by.

    A value that cannot be used leaves its row with a problem, which becomes its error.

    Args:
        rows: the rows of the input.
        layout: their columns.
        ids: the type of the ids, "int64" or "string".

    Raises:
        ConfigError: a row without an id, or with one of another type.
    """
    import pyarrow as pa

    records: list[Record] = []
    for row in rows:
        identity = row.get(layout.id_column)
        wanted = int if ids == "int64" else str
        if type(identity) is not wanted or (
            wanted is int and not -(2**63) <= _int(identity) < 2**63
        ):
            raise ConfigError(
                f"every row needs an id in the column {layout.id_column!r}, of the same type: "
                f"{identity!r:.40} is not {'an integer' if wanted is int else 'text'}"
            )
        record: Record = {name: row.get(name) for name in layout.keep if name not in layout.columns}
        record[layout.id_column] = identity
        problems = []
        for name in layout.columns:
            value = row.get(name)
            problem = None if value is None else _problem(name, value)
            if problem is not None:
                problems.append(problem)
            elif isinstance(value, list) and name == "prompt":
                record["prompt_tokens"] = value
            else:
                record[name] = [value] if isinstance(value, str) and name == "stop" else value
        record[PROBLEM] = "; ".join(problems) or None
        record[SORT_KEY] = _sort_key(record, layout)
        records.append(record)
    return pa.Table.from_pylist(records, schema=_schema(records, layout, ids))


def _problem(name: str, value: object) -> str | None:
    """Return what is wrong with a value; the worker checks its range."""
    allowed = _KINDS[name]
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = {str: "text", int: "an integer", list: "a list", bool: "true or false"}
        kinds = " or ".join(names[k] for k in allowed)
        return f"{name} must be {kinds}, not {value!r:.40}"
    inner, most = (int, 2**31) if name == "prompt" else (str, 0)
    if isinstance(value, list):
        for one in value:
            if type(one) is not inner or (inner is int and not 0 <= _int(one) < most):
                return f"{name} must be a list of {'token ids' if inner is int else 'texts'}"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"{name} is out of range: {value!r:.40}"
    for text in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
        if isinstance(text, str) and not _is_unicode(text):
            return f"{name} is not valid Unicode"
    return None


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _sort_key(record: Record, layout: Layout) -> bytes:
    tokens = record.get("prompt_tokens")
    if isinstance(tokens, list):
        return np.asarray(tokens, dtype=">i4").tobytes()
    # A text to score begins with its context.
    names = [name for name in ("context", *layout.columns[:1]) if name in layout.columns]
    return b"".join(str(record.get(name) or "").encode("utf-8") for name in names)


def _schema(records: Sequence[Record], layout: Layout, ids: str) -> pyarrow.Schema:
    import pyarrow as pa

    types = {
        "prompt": pa.string(),
        "text": pa.string(),
        "context": pa.string(),
        "max_tokens": pa.int64(),
        "seed": pa.int64(),
        "grammar": pa.string(),
        "stop": pa.list_(pa.string()),
        "parse_special": pa.bool_(),
    }
    fields = [(layout.id_column, pa.int64() if ids == "int64" else pa.string())]
    fields += [(name, types[name]) for name in layout.columns]
    if "prompt" in layout.columns:
        fields.append(("prompt_tokens", pa.list_(pa.int32())))
    for name in layout.keep:
        if name not in layout.columns:
            try:
                fields.append((name, pa.array([record[name] for record in records]).type))
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
                raise ConfigError(f"cannot keep the column {name!r}: {error}") from None
    return pa.schema([*fields, (PROBLEM, pa.string()), (SORT_KEY, pa.binary())])


def id_type(file: File, kind: str, filesystem: pyarrow.fs.FileSystem, layout: Layout) -> str:
    """Return the type of the ids of a large input, "int64" or "string", from its first file.

    Raises:
        ConfigError: the file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "parquet":
        try:
            schema = pq.read_schema(file.path, filesystem=filesystem)
        except (OSError, pa.ArrowInvalid) as error:
            raise ConfigError(f"cannot read {file.path}: {error}") from None
        names = [layout.id_column] if layout.id_column in schema.names else []
        is_text = any("string" in str(schema.field(name).type) for name in names)
    else:
        with filesystem.open_input_stream(file.path) as stream:
            line = stream.read(1 << 24).split(b"\n", 1)[0]
        is_text = isinstance(_parse(line, file.path).get(layout.id_column), str)
    return "string" if is_text else "int64"


def staged_ids(folder: Folder, id_column: str) -> Iterator[object]:
    """Yield the ids of all blocks."""
    import pyarrow.parquet as pq

    for name in folder.names():
        path = f"{folder.path}/{name}"
        table = pq.read_table(path, filesystem=folder.filesystem, columns=[id_column])
        yield from table.column(id_column).to_pylist()


def unique_ids(ids: Iterable[object]) -> None:
    """Check that no two ids are equal.

    Raises:
        ConfigError: two rows have the same id.
    """
    seen: set[object] = set()
    for identity in ids:
        if identity in seen:
            raise ConfigError(f"two rows have the id {identity!r}", hint="ids must be unique")
        seen.add(identity)


def stage_locally(
    files: Sequence[File],
    kind: str,
    filesystem: pyarrow.fs.FileSystem,
    layout: Layout,
    folder: Folder,
    *,
    block_rows: int,
    sort: bool,
) -> int:
    """Write the blocks of a job from an input that fits into memory; return how many rows they hold.

    Raises:
        ConfigError: as `read_input` and `normalize`, or two rows with the same id.
    """
    import pyarrow.parquet as pq

    rows = read_input(files, kind, filesystem, layout)
    first = rows[0].get(layout.id_column) if rows else 0
    table = normalize(rows, layout, "string" if isinstance(first, str) else "int64")
    unique_ids(table.column(layout.id_column).to_pylist())
    if sort:
        table = table.sort_by([(SORT_KEY, "ascending")])
    table = table.drop_columns([SORT_KEY])
    folder.delete()
    folder.create()
    for number, start in enumerate(range(0, table.num_rows, block_rows)):
        path = posixpath.join(folder.path, f"block-{number:09}.parquet")
        pq.write_table(table.slice(start, block_rows), path, filesystem=folder.filesystem)
    return int(table.num_rows)
