"""Batches of Ray Data as rows, and rows as tables of a fixed schema.

The schema does not depend on the rows: blocks with other types could not be written into one folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .rows import GenerateRows, Record, RowKind

if TYPE_CHECKING:
    import pyarrow

__all__ = ["output_table", "read_rows"]


def read_rows(batch: object) -> list[Record]:
    """Return the rows of a batch: a table, a data frame, or a mapping of columns.

    Raises:
        ConfigError: something else.
    """
    import pyarrow as pa

    if isinstance(batch, pa.Table):
        return list(batch.to_pylist())
    if isinstance(batch, Mapping):
        return list(pa.table({k: _plain(v) for k, v in batch.items()}).to_pylist())
    if hasattr(batch, "to_dict"):
        return list(pa.Table.from_pandas(batch, preserve_index=False).to_pylist())
    raise ConfigError(f"a batch is a table or a mapping of columns, not {type(batch).__name__}")


def output_table(
    records: Sequence[Record], batch: object, kind: RowKind, id_column: str, keep: Sequence[str]
) -> pyarrow.Table:
    """Return records as a table; the id and the kept columns have the types of the batch."""
    import pyarrow as pa

    given = (
        {field.name: field.type for field in batch.schema} if isinstance(batch, pa.Table) else {}
    )
    fields = []
    for name in (id_column, *keep):
        values = [record.get(name) for record in records]
        fields.append((name, given[name] if name in given else pa.array(values).type))
    schema = pa.schema(fields + _result_fields(kind))
    return pa.Table.from_pylist(list(records), schema=schema)


def _result_fields(kind: RowKind) -> list[tuple[str, object]]:
    import pyarrow as pa

    if not isinstance(kind, GenerateRows):
        return [
            ("tokens", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float64())),
            ("ranks", pa.list_(pa.int32())),
            ("logprob", pa.float64()),
            ("n_tokens", pa.int32()),
            ("finish_reason", pa.string()),
            ("error", pa.string()),
            ("batch_invariant", pa.bool_()),
        ]
    fields = [
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("seed", pa.uint64()),
    ]
    if kind.n > 1:
        fields = [(name, pa.list_(type_)) for name, type_ in fields]
    return [
        *fields,
        ("n_prompt_tokens", pa.int32()),
        ("error", pa.string()),
        ("batch_invariant", pa.bool_()),
    ]


def _plain(column: object) -> object:
    """Return a column that pyarrow can read: NumPy's arrays of objects hold lists and texts."""
    return column.tolist() if hasattr(column, "tolist") else column
