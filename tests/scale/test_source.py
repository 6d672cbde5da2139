"""The input of a job: its files, its columns; the folders and files around it; its tables and rows."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="pyarrow, of the extra `scale`, is not installed")

import pyarrow as pa
import pyarrow.parquet as pq
import toys

import llamabranch as lb
from llamabranch import ConfigError
from llamabranch.scale.folder import Folder
from llamabranch.scale.rows import GenerateRows, Record, ScoreRows, output_table, read_rows
from llamabranch.scale.source import Source

MARKED = "a<|im_end|>b"


def find(*paths: Path) -> Source:
    return Source.find([str(path) for path in paths], None, "id", GenerateRows.columns, ("source",))


def given(tmp_path: Path, *lines: str) -> tuple[Source, list[dict[str, object]]]:
    """Return a source of JSON lines, and its rows as Ray reads them."""
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return find(path), [{"text": line} for line in lines]


def test_every_block_has_the_columns_of_the_job_and_their_types(tmp_path: Path) -> None:
    job, rows = given(tmp_path, '{"id": 1, "prompt": [2, 3], "stop": ["a"], "x": 1}', '{"id": 2}')
    schema = job.schema(rows)
    types = {field.name: str(field.type) for field in schema if "problem" not in field.name}
    assert types == {
        "id": "int64", "source": "string", "prompt": "list<item: int64>", "max_tokens": "int64",
        "stop": "list<item: string>", "grammar": "string", "json_schema": "string", "regex": "string",
        "choice": "list<item: string>", "seed": "int64", "parse_special": "bool",
    }  # fmt: skip
    for part in (rows, rows[:1], rows[1:]):
        assert job.table(part, schema).schema == schema
    assert job.table(rows, schema).column("prompt").to_pylist() == [[2, 3], None]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "the input has no rows"),
        (('{"id": 1, "prompt": "a"}', '{"id": "b", "prompt": "b"}'), "column 'id' holds values"),
        (('{"id": 1, "prompt": "a"}', '{"id": 2, "prompt": 5}'), "column 'prompt' holds values"),
        (('{"id": "a", "prompt": "a"}', '{"id": null, "prompt": "b"}'), "every row needs an id"),
        (('{"id": 1.5, "prompt": "a"}',), "integers or text, not double"),
        (('{"id": 1180591620717411303424}',), "column 'id' holds values"),
        (('{"id": 1, "prompt": "a"}', "5"), "invalid row '5': it is not an object"),
        (("{",), "invalid row '{'"),
        (('{"id": 1, "source": 1}', '{"id": 2, "source": "x"}'), "column 'source' holds values"),
    ],
)
def test_input_that_has_no_schema_is_refused(
    tmp_path: Path, lines: tuple[str, ...], message: str
) -> None:
    job, rows = given(tmp_path, *lines)
    try:
        problem = job.table(rows, job.schema(rows)).to_pylist()[0]["llamabranch_problem"]
    except ConfigError as error:
        problem = error.message
    assert message in str(problem)


def test_input_files_are_those_of_one_format(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_text("{}\n")
    source = find(tmp_path)
    assert [Path(path).name for path, _ in source.files] == ["a.jsonl", "b.jsonl"]
    assert (source.kind, source.files[0][1]) == ("jsonl", 3)
    assert find(tmp_path / "a.jsonl").files == source.files[:1]
    assert find(tmp_path / "b.jsonl", tmp_path / "a.jsonl").files == source.files
    pq.write_table(pa.table({"id": [1]}), tmp_path / "c.parquet")
    with pytest.raises(ConfigError, match="both formats"):
        find(tmp_path)
    for missing in ("none", "*.parquet"):
        with pytest.raises(ConfigError, match=r"no \.parquet or \.jsonl") as caught:
            find(tmp_path / missing)
        assert ("patterns are not expanded" in (caught.value.hint or "")) == (missing != "none")
    with pytest.raises(ConfigError, match="cannot open"):
        Source.find("nowhere://x", None, "id", ())


def test_relative_paths_are_those_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    assert find(Path("a.jsonl"), Path("b.jsonl")).files == find(tmp_path).files


def test_files_of_a_folder_are_whole_or_missing(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "a"))
    assert folder.files() == []
    assert folder.read_json("b/x") is None
    folder.write_json("b/x", {"a": [1, "ä"]})
    assert folder.read_json("b/x") == {"a": [1, "ä"]}
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["x"]
    for damaged in ("{", "[]"):
        (tmp_path / "a" / "b" / "x").write_text(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            folder.read_json("b/x")


def test_finished_rows_are_those_of_complete_files_that_share_no_row(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert len(folder.finished("name")) == 0

    def write(file: str, *names: str) -> None:
        errors = pa.array([None if name != "bad" else "why" for name in names], pa.string())
        rows = {"name": names, "error": errors, "batch_invariant": [True] * len(names)}
        pq.write_table(pa.table(rows), tmp_path / file)

    write("1.parquet", "a", "bad")
    write("2.parquet", "c", "d")
    write("3.parquet", "d", "e")  # as a driver that was killed can leave it
    (tmp_path / "4.parquet.part").write_bytes(b"PAR1")
    rows = folder.finished("name")
    assert rows["id"].to_pylist() == ["a", "bad"]
    assert rows["is_error"].to_pylist() == [False, True]
    assert rows["batch_invariant"].to_pylist() == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["1.parquet"]


def test_schema_of_the_output_does_not_depend_on_the_rows() -> None:
    for kind in (GenerateRows(8, None), GenerateRows(8, None, n=2), ScoreRows()):
        reason: object = ["error"] if kind.n > 1 else "error"
        nothing: dict[str, object] = {"id": 1, "finish_reason": reason, "error": "x"}
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


SETTINGS: dict[str, object] = {"max_tokens": 3, "stop": ["a", "b"], "seed": 5}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "A king", **SETTINGS, "parse_special": False},
        {"prompt": [2, 3], "stop": "a", "grammar": 'root ::= "a"'},
        {"prompt": "A king", "json_schema": '{"type": "boolean"}'},
        {"prompt": "A king", "regex": "[a-c]{3}"},
        {"prompt": "A king", "choice": ["yes", "no"], "max_tokens": 0},
    ],
)
def test_row_is_the_request_that_a_line_of_a_file_is(
    ctx: lb.Context, fields: dict[str, object]
) -> None:
    sampling = lb.SamplingParams(temperature=0.5, logprobs=False)
    row = dict.fromkeys(GenerateRows.columns) | fields
    expected = lb.Request.from_json(fields, "0", sampling)
    assert GenerateRows(None, sampling).request(ctx, row, "0") == expected


@pytest.mark.parametrize(
    "wrong",
    [{"json_schema": {"type": "boolean"}}, {"regex": "("}, {"regex": "a", "choice": ["a"]}],
)
def test_row_whose_structure_is_wrong_is_refused(ctx: lb.Context, wrong: dict[str, object]) -> None:
    row = dict.fromkeys(GenerateRows.columns) | {"prompt": "A king", **wrong}
    with pytest.raises((ConfigError, lb.errors.GrammarError)):
        GenerateRows().request(ctx, row, "0")


def test_control_tokens_are_parsed_unless_the_job_or_the_row_does_not(tmp_path: Path) -> None:
    vocabulary = toys.Vocabulary.with_control("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    template = {"tokenizer.chat_template": toys.CHAT_TEMPLATE}
    path = toys.write_toy(tmp_path / "toy.gguf", vocab=vocabulary, metadata=template)
    with lb.load(path, n_ctx=256, n_threads=1) as context:
        model = context.model

        def n_prompt(row: Record, **settings: bool) -> int:
            rows = GenerateRows(4, lb.SamplingParams(), **settings)  # type: ignore[arg-type]
            request = rows.request(context, row, "0")
            return len(model.prompt_tokens(request.prompt, parse_special=request.parse_special))

        parsed, letters = 4, 13  # with BOS
        for parse_special, expected in ((None, parsed), (True, parsed), (False, letters)):
            row: Record = {"prompt": MARKED, "text": MARKED, "parse_special": parse_special}
            assert n_prompt(row) == expected
            assert n_prompt(row, parse_special=False) == letters
            assert len(ScoreRows().request(context, row, "0").prompt) == expected
            both = ScoreRows().request(context, {**row, "context": MARKED}, "0")
            assert both.logprobs_from == expected
            assert len(both.prompt) == 2 * expected - 1
        with pytest.raises(ConfigError, match="parse_special"):
            n_prompt({"prompt": MARKED, "parse_special": 1})
        chat = GenerateRows(4, lb.SamplingParams(), chat=True)
        request = chat.request(context, {"prompt": MARKED}, "0")
        assert request.prompt == model.chat_tokens([("user", MARKED)])
        assert request.prompt[0] == model.bos
