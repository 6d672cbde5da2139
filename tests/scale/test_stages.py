"""The classes for ``map_batches``, without a cluster: batches feed one engine, rows keep their order."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="pyarrow, of the extra `scale`, is not installed")

import pyarrow as pa
from clusters import alone, prompts

import llamabranch as lb
from llamabranch.scale import Generate, Score, WorkerOptions

TARGET = str(Path(lb.__file__).parent / "data" / "tale-target-q8_0.gguf")


def run(stage: Any, *batches: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Give batches to a stage at the same time; return the rows of each."""

    def table(rows: list[dict[str, Any]]) -> Any:
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])

    async def main() -> list[Any]:
        return await asyncio.gather(*(stage(table(batch)) for batch in batches))

    return [table.to_pylist() for table in asyncio.run(main())]


@pytest.fixture
def generate() -> Any:
    worker = WorkerOptions(streams=8)
    return Generate(TARGET, seed=3, worker=worker, n_ctx=1024, n_threads=1, keep=["prompt"])


def test_batches_share_the_engine(generate: Any, ctx: lb.Context) -> None:
    rows = prompts(24)
    batches = run(generate, rows[:8], rows[8:16], rows[16:])
    assert [[row["id"] for row in batch] for batch in batches] == [
        list(range(8)), list(range(8, 16)), list(range(16, 24))
    ]  # fmt: skip
    expected = alone(ctx, rows, 3)
    for row in [row for batch in batches for row in batch]:
        assert {name: row[name] for name in expected[row["id"]]} == expected[row["id"]]
        assert row["prompt"] == rows[row["id"]]["prompt"]
    # 24 texts of 2 to 17 tokens in 8 streams: batch by batch it takes 3 x 17 decodes, and prompts.
    assert generate._engine.stats.target_forward_passes < 3 * 17


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": 5}, {"prompt": None}, {"prompt": [-1]}, {"prompt": True}, {"prompt": [2**40]},
        {"prompt": {"a": "b"}}, {"max_tokens": "3"}, {"max_tokens": -2}, {"seed": "x"},
        {"stop": [1]}, {"grammar": 5}, {"grammar": "root ::= ("}, {"parse_special": 1},
    ],
)  # fmt: skip
def test_row_that_cannot_be_run_is_an_error(generate: Any, wrong: dict[str, Any]) -> None:
    ((bad,), (good,)) = run(
        generate, [{"id": "a", "prompt": "A wolf", **wrong}], [{"id": "b", "prompt": "A wolf"}]
    )
    assert bad["finish_reason"] == "error" and bad["error"] and good["error"] is None


def test_rows_need_ids(generate: Any) -> None:
    with pytest.raises(lb.ConfigError, match="every row needs an id"):
        run(generate, [{"id": None, "prompt": "A wolf"}])


def test_samples_are_lists_of_one_row() -> None:
    stage = Generate(TARGET, n=3, max_tokens=4, seed=1, n_ctx=1024, n_threads=1)
    (batch,) = run(stage, [{"id": 1, "prompt": "A wolf"}, {"id": 2}])
    good, bad = batch
    assert [len(good[name]) for name in ("text", "tokens", "finish_reason", "seed")] == [3] * 4
    assert len(set(good["seed"])) == 3
    assert (bad["text"], bad["finish_reason"]) == (None, ["error"])


def test_seed_and_limit_of_a_row_replace_the_jobs(generate: Any) -> None:
    row = {"prompt": "A wolf", "max_tokens": 6}
    rows = [{"id": 1, **row, "seed": 5}, {"id": 2, **row, "seed": 5}, {"id": 3, **row}]
    (batch,) = run(generate, rows)
    assert batch[0]["seed"] == batch[1]["seed"] == 5
    assert batch[0]["tokens"] == batch[1]["tokens"]
    assert batch[2]["seed"] != 5
    assert len(batch[2]["tokens"]) <= 6


def test_texts_are_scored_after_their_context(ctx: lb.Context) -> None:
    stage = Score(TARGET, n_ctx=1024, n_threads=1)
    rows = [{"id": 1, "text": " said", "context": "The king"}, {"id": 2, "text": ""}]
    (batch,) = run(stage, rows)
    assert batch[0]["n_tokens"] == len(ctx.tokenize(" said", add_special=False))
    assert batch[0]["logprob"] == sum(batch[0]["logprobs"])
    assert batch[1]["n_tokens"] == 0
    (errors,) = run(stage, [{"id": 3, "text": None}, {"id": 4, "text": "", "context": "A king"}])
    assert [row["finish_reason"] for row in errors] == ["error", "error"]


def test_file_that_is_not_the_jobs_is_refused() -> None:
    with pytest.raises(lb.errors.ModelLoadError, match="is another file on this node"):
        Generate(TARGET, worker=WorkerOptions(fingerprint="0" * 64), n_ctx=512, n_threads=1)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("raise RuntimeError('out of order')", "the engine failed: out of order"),
        ("raise lb.errors.DecodeError('it failed', code=-3)", "the engine failed: it failed"),
        ("threading.Event().wait()", "no progress for 0.2 s"),
    ],
)
def test_worker_with_a_broken_engine_ends_its_process(broken: str, message: str) -> None:
    code = f"""
import asyncio, threading
import llamabranch as lb
from llamabranch.scale import Generate, WorkerOptions
stage = Generate({TARGET!r}, worker=WorkerOptions(stall_s=0.2), n_ctx=512, n_threads=1)
def step():
    {broken}
stage._engine.engine.step = step
asyncio.run(stage({{"id": [1], "prompt": ["A wolf"]}}))
print("it went on")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert message in done.stderr
