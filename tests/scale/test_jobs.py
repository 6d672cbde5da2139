"""Jobs on Ray: the output is that of one process, row for row and byte for byte, whatever dies."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra `scale` (Ray) is not installed")

import clusters
from clusters import alone, assert_equal, prompts, read_output, wait_for, write_rows

import llamabranch as lb
from llamabranch import scale
from llamabranch.scale import job as job_module

pytestmark = [
    pytest.mark.slow,
    # Ray's own, while it starts, works and ends.
    pytest.mark.filterwarnings("ignore"),
]

SEED = 11
LOAD = lb.loading.LoadOptions(n_ctx=1024)
TARGET = str(Path(lb.__file__).parent / "data" / "tale-target-q8_0.gguf")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    with clusters.cluster(num_cpus=5) as found:
        yield found


@pytest.fixture
def generate(ray_cluster: Any, tmp_path: Path) -> Any:
    """Run a job over rows; return its report and its output."""

    def run(rows: list[clusters.Row] | str, **options: Any) -> tuple[scale.JobReport, Any]:
        inputs = write_rows(tmp_path / "in.jsonl", rows) if isinstance(rows, list) else rows
        options = {"block_rows": 8, "streams": 4, "seed": SEED, "load": LOAD, **options}
        report = scale.generate(inputs, str(tmp_path / "out"), model=TARGET, **options)
        return report, read_output(tmp_path / "out")

    return run


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_output_is_that_of_one_process(generate: Any, ctx: lb.Context, workers: int) -> None:
    rows = prompts(40)
    report, output = generate(rows, workers=workers)
    assert_equal(output, alone(ctx, rows, SEED))
    assert (report.n_rows, report.n_errors, report.n_resumed) == (40, 0, 0)
    assert report.exact is True


def test_rows_of_very_different_lengths(generate: Any, ctx: lb.Context) -> None:
    rows = prompts(24)
    for i, row in enumerate(rows):
        row["max_tokens"] = 200 if i % 8 == 0 else 1
    rows[0]["note"] = "x" * 3_000_000
    _, output = generate(rows, workers=2, keep=["prompt", "note"])
    assert_equal(output, alone(ctx, rows, SEED))
    kept, given = ({row["id"]: row["prompt"] for row in part} for part in (output, rows))
    assert kept == given


def test_killed_worker_loses_nothing(
    generate: Any, ctx: lb.Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = prompts(40)
    stage = clusters.fatal(signal.SIGKILL, {17}, once=tmp_path / "killed")
    monkeypatch.setattr(job_module, "Generate", stage)
    report, output = generate(rows, workers=2)
    assert (tmp_path / "killed").exists()
    assert_equal(output, alone(ctx, rows, SEED))
    assert report.n_errors == 0


def test_bad_rows_are_errors_and_the_others_are_not(generate: Any, ctx: lb.Context) -> None:
    rows = prompts(24)
    bad: list[clusters.Row] = [
        {"id": 100, "prompt": "A wolf", "grammar": "root ::= ("},
        {"id": 101, "prompt": "long " * 3000},
        {"id": 103},
        {"id": 104, "prompt": "A king", "max_tokens": -1},
    ]
    report, output = generate(rows + bad, workers=1)
    assert_equal([row for row in output if row["error"] is None], alone(ctx, rows, SEED))
    errors = {row["id"]: row for row in output if row["error"] is not None}
    assert report.n_errors == 4 == len(errors)
    expected = {100: "grammar", 101: "context", 103: "prompt", 104: "max_tokens"}
    for i, part in expected.items():
        assert part in errors[i]["error"]
        assert errors[i]["finish_reason"] == ("capacity" if i == 101 else "error")


def test_row_that_ends_its_process_holds_back_no_other_row(
    generate: Any, ctx: lb.Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = prompts(24)
    inputs = write_rows(tmp_path / "in.jsonl", rows)
    monkeypatch.setattr(job_module, "Generate", clusters.fatal(signal.SIGABRT, {13}))
    monkeypatch.setattr(job_module, "MOST_RETRIES", 2)  # each death costs seconds
    with pytest.raises(lb.errors.JobError, match="of 24 rows are in") as caught:
        generate(inputs, workers=1)
    assert "block_rows=1" in (caught.value.hint or "")
    n_first = len(read_output(tmp_path / "out"))
    assert n_first < 24
    with pytest.raises(lb.errors.JobError, match="23 of 24 rows are in"):
        generate(inputs, workers=1, block_rows=1, resume=True)
    output = read_output(tmp_path / "out")
    assert_equal(output, alone(ctx, [row for row in rows if row["id"] != 13], SEED))
    assert not (tmp_path / "out" / "_SUCCESS").exists()


@pytest.mark.parametrize(
    ("n_retries", "n_rows", "block_rows", "message"),
    [(1, 8, 8, r"0 of 8 rows are in .* the workers of the others died"),
     (0, 12, 1, "its workers died again and again")],  # with the ninth block
)  # fmt: skip
def test_workers_that_die_while_they_load_end_the_job(
    generate: Any, monkeypatch: Any, n_retries: int, n_rows: int, block_rows: int, message: str
) -> None:
    monkeypatch.setattr(job_module, "Generate", clusters.Stillborn)
    monkeypatch.setattr(job_module, "MOST_RETRIES", n_retries)  # each death costs seconds
    with pytest.raises(lb.errors.JobError, match=message):
        generate(prompts(n_rows), workers=1, block_rows=block_rows)


def test_full_disk_ends_the_job_and_it_can_be_resumed(
    generate: Any, ctx: lb.Context, tmp_path: Path
) -> None:
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

    rows = prompts(40)  # 20 blocks: some may fail before a job ends
    inputs = write_rows(tmp_path / "in.jsonl", rows)
    full = PyFileSystem(FSSpecHandler(clusters.SmallDisk(str(tmp_path / "out"), n_files=2)))
    with pytest.raises(lb.errors.JobError, match="No space left on device") as caught:
        generate(inputs, workers=1, block_rows=2, filesystem=full)
    assert "resume" in (caught.value.hint or "")
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    report, output = generate(inputs, workers=1, filesystem=LocalFileSystem(), resume=True)
    assert_equal(output, alone(ctx, rows, SEED))
    assert 0 < report.n_resumed < 40


def test_job_that_ended_in_the_middle_is_resumed(
    generate: Any, ctx: lb.Context, tmp_path: Path
) -> None:
    rows = prompts(32)
    _, before = generate(rows, workers=1)
    _, torn, missing, _ = sorted((tmp_path / "out").glob("*.parquet"))
    # As a crash leaves it.
    missing.unlink()
    os.truncate(torn, 100)
    torn.rename(torn.with_suffix(".parquet.part"))
    (tmp_path / "out" / "_SUCCESS").unlink()
    report, output = generate(str(tmp_path / "in.jsonl"), workers=1, resume=True)
    assert report.n_resumed == 16
    assert output == before
    assert_equal(output, alone(ctx, rows, SEED))
    assert not list((tmp_path / "out").glob("*.part"))
    assert json.loads((tmp_path / "out" / "_SUCCESS").read_text())["n_rows"] == 32

    # The same input and settings only.
    others = {"max_tokens": 5, "seed": 12, "load": {"n_ctx": 512}}
    for name, value in {**others, "sampling": lb.SamplingParams(temperature=0)}.items():
        with pytest.raises(lb.ConfigError, match=f"other settings: {name}"):
            generate(str(tmp_path / "in.jsonl"), resume=True, **{name: value})
    write_rows(tmp_path / "in.jsonl", prompts(33))
    with pytest.raises(lb.ConfigError, match="other settings: input"):
        generate(str(tmp_path / "in.jsonl"), resume=True)
    with pytest.raises(lb.ConfigError, match="already exists"):
        generate(rows)


def test_blocks_are_sorted_by_prompt(generate: Any, ctx: lb.Context, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{**row, "id": f"row {row['id']:03}"} for row in prompts(40)]
    for part in range(2):
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows[part::2]), tmp_path / "in" / f"{part}.parquet")
    _, output = generate(str(tmp_path / "in"), workers=2, keep=["prompt"])
    assert_equal(output, alone(ctx, rows, SEED))
    place = {prompt: i for i, prompt in enumerate(sorted(row["prompt"] for row in rows))}
    files = (tmp_path / "out").glob("*.parquet")
    kept = [pq.read_table(path, columns=["prompt"])["prompt"].to_pylist() for path in files]
    assert sorted(len(block) for block in kept) == [8] * 5
    for block in kept:
        first = place[block[0]]
        assert [place[prompt] for prompt in block] == list(range(first, first + 8))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}], "two rows have the id 1"),
        ([{"id": 1, "prompt": "a"}, {"prompt": "b"}], "every row needs an id"),
        ([{"id": i, "prompt": "a" if i < 1000 else 5} for i in range(1001)], "column 'prompt'"),
        ([], "the input has no rows"),
    ],
)
def test_ids_must_be_there_and_unique(
    generate: Any, tmp_path: Path, rows: list[clusters.Row], message: str
) -> None:
    with pytest.raises(lb.ConfigError, match=message):
        generate(rows)
    assert not (tmp_path / "out" / "_job" / "job.json").exists()


def test_score_gives_what_the_library_gives(
    ray_cluster: Any, ctx: lb.Context, tmp_path: Path
) -> None:
    texts = ["Once upon a time there was a king.", "The wolf ate the bread.", "the", "A crown"]
    rows: list[clusters.Row] = [{"id": i, "text": text} for i, text in enumerate(texts)]
    rows += [{"id": 10, "context": "The king", "text": " said"}, {"id": 12}]
    inputs, out = write_rows(tmp_path / "in.jsonl", rows), str(tmp_path / "out")
    report = scale.score(inputs, out, model=TARGET, load=LOAD, streams=4)
    assert (report.n_rows, report.n_errors) == (6, 1)
    output = {row["id"]: row for row in read_output(tmp_path / "out")}
    for i, text in enumerate(texts):
        tokens = ctx.model.prompt_tokens(text)
        with lb.Branch.start(ctx, tokens[:1]) as branch:
            expected = branch.score(tokens[1:]) if len(tokens) > 1 else []
        assert output[i]["tokens"] == tokens[1:]
        assert output[i]["logprobs"] == [score.logprob for score in expected]
        assert output[i]["ranks"] == [score.rank for score in expected]
        assert output[i]["n_tokens"] == len(expected)
    with lb.Branch.start(ctx, "The king") as branch:
        (score,) = branch.score(ctx.tokenize(" said", add_special=False))
    assert output[10]["logprob"] == pytest.approx(score.logprob, abs=1e-6)
    assert output[12]["error"] == "text must be a str, not None"


def test_documented_jobs_run(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/scale.md", "exec"), names)
    assert (names["report"].n_rows, names["report"].n_errors) == (4, 0)
    assert all(row["text"] and row["error"] is None for row in names["texts"].take_all())


def test_model_that_is_no_model_and_unknown_options_are_refused(
    ray_cluster: Any, tmp_path: Path
) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    inputs, out = write_rows(tmp_path / "rows.jsonl", prompts(4)), tmp_path / "o"
    with pytest.raises(lb.errors.ModelLoadError):
        scale.generate(inputs, str(out), model=str(path))
    for wrong in ({"wrokers": 2}, {"workers": (2, 1)}):
        with pytest.raises(lb.ConfigError):
            scale.generate(inputs, str(out), model=TARGET, **wrong)
    assert not out.exists()


def test_driver_that_is_killed_is_resumed_where_it_was(
    ray_cluster: Any, generate: Any, ctx: lb.Context, tmp_path: Path
) -> None:
    rows, out = prompts(200), tmp_path / "out"
    inputs = write_rows(tmp_path / "in.jsonl", rows)
    settings = {"model": TARGET, "seed": SEED, "block_rows": 8, "streams": 4, "load": dict(LOAD)}
    code = "scale.generate(inputs, out, **settings)"

    names = {"inputs": inputs, "out": str(out), "settings": settings}
    with clusters.driver(ray_cluster.address, code, **names) as process:
        wait_for(lambda: len(list(out.glob("*.parquet"))) >= 2)
        process.kill()
        process.wait()
    assert not (out / "_SUCCESS").exists()
    report, output = generate(inputs, resume=True)
    assert 16 <= report.n_resumed < 200
    assert_equal(output, alone(ctx, rows, SEED))
    again, _ = generate(inputs, resume=True)
    assert (again.n_resumed, again.n_rows) == (200, 200)


def test_node_that_goes_without_grace_loses_nothing(
    generate: Any, ray_cluster: Any, ctx: lb.Context, tmp_path: Path, monkeypatch: Any
) -> None:
    rows, seen = prompts(40), tmp_path / "seen"
    seen.mkdir()
    monkeypatch.setattr(job_module, "Generate", clusters.gated(seen))
    node = ray_cluster.add_node(num_cpus=5, object_store_memory=80 * clusters.MIB)
    with ThreadPoolExecutor() as pool:
        # Workers of four CPUs: one for each node.
        job = pool.submit(generate, rows, workers=2, cpus=4.0)
        wait_for(lambda: list(seen.glob(f"{node.node_id}-*")))  # it has a batch that is not written
        ray_cluster.remove_node(node, allow_graceful=False)
        (seen / "go").touch()
        report, output = job.result(120)
    assert_equal(output, alone(ctx, rows, SEED))
    assert report.n_errors == 0
