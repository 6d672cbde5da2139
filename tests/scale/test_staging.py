"""The input of a job, as it is run: one schema, checked, sorted; and the folders and files around it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="pyarrow, of the extra `scale`, is not installed")

import pyarrow as pa
import pyarrow.parquet as pq

from llamabranch import ConfigError
from llamabranch.scale.folder import Folder, input_files, write_json_lines
from llamabranch.scale.rows import GenerateRows, ScoreRows, output_table, read_rows
from llamabranch.scale.staging import Input


def stage(tmp_path: Path, rows: list[Any], *, kind: Any = GenerateRows, sort: bool = True) -> Any:
    """Stage rows as JSON lines in blocks of 3; return the rows of the blocks as a worker has them."""
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    given = Input(*input_files(str(path)), "id", kind.columns, ("source",))
    folder = Folder(str(tmp_path / "staged"))
    n = given.stage_locally(folder, block_rows=3, sort=sort)
    blocks = [read_rows(pq.read_table(path)) for path in folder.paths()]
    assert n == len(rows) == sum(map(len, blocks))
    assert all(len(block) == 3 for block in blocks[:-1])
    return [row for block in blocks for row in block]


def test_rows_are_sorted_by_prompt(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": p, "source": i} for i, p in enumerate(["b", "ä", "a", "ba", ""])]
    staged = stage(tmp_path, rows)
    assert [row["prompt"] for row in staged] == ["", "a", "b", "ba", "ä"]
    assert [row["source"] for row in staged] == [4, 2, 0, 3, 1]
    unsorted = stage(tmp_path, rows, sort=False)
    assert [row["id"] for row in unsorted] == [0, 1, 2, 3, 4]


def test_prompts_of_tokens_are_sorted_by_them(tmp_path: Path) -> None:
    rows = [{"id": str(i), "prompt": p} for i, p in enumerate([[300, 2], [2, 9], [2, 8, 1]])]
    staged = stage(tmp_path, rows)
    assert [row["prompt"] for row in staged] == [[2, 8, 1], [2, 9], [300, 2]]


def test_values_of_any_type_are_kept_for_the_worker_that_checks_them(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [
        {"prompt": 5}, {"prompt": [1, "x"]}, {"prompt": "\ud800"}, {"prompt": "x", "stop": {"a": 1}},
        {"prompt": "x", "seed": 2**70, "max_tokens": 3, "parse_special": False},
    ]  # fmt: skip
    staged = stage(tmp_path, [{"id": i, **row} for i, row in enumerate(given)], sort=False)
    assert staged == [{"id": i, "source": None, **row} for i, row in enumerate(given)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}], "two rows have the id 1"),
        ([{"id": 1, "prompt": "a"}, {"id": "b", "prompt": "b"}], "'b' is not an integer"),
        ([{"id": "a", "prompt": "a"}, {"id": None, "prompt": "b"}], "None is not text"),
        ([{"id": 1.5, "prompt": "a"}], "1.5 is not an integer"),
        ([{"id": 2**70, "prompt": "a"}], "is not an integer"),
        ([{"id": 1, "prompt": "a"}, 5], "line 2: invalid row: it is not an object"),
        ([{"id": 1, "source": 1}, {"id": 2, "source": "x"}], "cannot keep the column 'source'"),
    ],
)
def test_ids_must_be_there_and_unique(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stage(tmp_path, rows)


def test_rows_without_an_id_are_numbered(tmp_path: Path) -> None:
    staged = stage(tmp_path, [{"prompt": "b"}, {"prompt": "a"}])
    assert [(row["id"], row["prompt"]) for row in staged] == [(1, "a"), (0, "b")]


def test_texts_to_score_are_sorted_with_their_context(tmp_path: Path) -> None:
    rows = [{"id": 1, "text": "x", "context": "b"}, {"id": 2, "text": "bb"}, {"id": 3, "text": "a"}]
    staged = stage(tmp_path, rows, kind=ScoreRows)
    assert [row["id"] for row in staged] == [3, 2, 1]


def test_input_files_are_those_of_one_format(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_text("{}\n")
    files, kind, _ = input_files(str(tmp_path))
    assert [Path(file.path).name for file in files] == ["a.jsonl", "b.jsonl"]
    assert (kind, files[0].size) == ("jsonl", 3)
    assert input_files(str(tmp_path / "a*"))[0] == files[:1]
    pq.write_table(pa.table({"id": [1]}), tmp_path / "c.parquet")
    with pytest.raises(ConfigError, match="both formats"):
        input_files(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no \.parquet or \.jsonl"):
        input_files(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot open"):
        input_files("nowhere://x")


def test_files_of_a_folder_are_whole_or_missing(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "a")) / "b"
    assert folder.paths() == []
    assert folder.read_json("x") is None
    folder.create()
    folder.write_json("x", {"a": [1, "ä"]})
    assert folder.read_json("x") == {"a": [1, "ä"]}
    assert folder.paths() == [f"{tmp_path}/a/b/x"]
    for damaged in ("{", "[]"):
        (tmp_path / "a" / "b" / "x").write_text(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            folder.read_json("x")
    folder.delete()
    folder.delete()
    assert not (tmp_path / "a" / "b").exists()


def test_schema_of_the_output_does_not_depend_on_the_rows() -> None:
    for kind in (GenerateRows(8, None), GenerateRows(8, None, n=2), ScoreRows()):
        nothing: dict[str, object] = {
            "id": 1,
            "finish_reason": ["error"] if kind.n > 1 else "error",
            "error": "x",
        }
        batch = pa.table({"id": pa.array([1], pa.int64())})
        table = output_table([nothing], batch, kind, "id", ())
        assert table.schema.field("error").type == pa.string()
        assert not [field for field in table.schema if pa.types.is_null(field.type)]


def test_batches_of_any_kind_are_read() -> None:
    table = pa.table({"id": [1, 2], "prompt": ["a", None]})
    rows = [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": None}]
    assert read_rows(table) == read_rows(table.to_pydict()) == rows
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    assert read_rows(columns) == rows
    with pytest.raises(ConfigError, match="a batch is a table"):
        read_rows(5)


def test_json_lines_hold_what_json_can() -> None:
    table = pa.table(
        {"a": [1.5, float("nan")], "b": [[float("-inf"), 0.1 + 0.2], None], "c": ["ä", "\n"]}
    )
    file = io.BytesIO()
    write_json_lines(table, file)
    assert [json.loads(line) for line in file.getvalue().splitlines()] == [
        {"a": 1.5, "b": [None, 0.1 + 0.2], "c": "ä"},
        {"a": None, "b": None, "c": "\n"},
    ]
