"""Texts for the rows of a Ray dataset, with real actors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from programs import run_python

import llamabranch as lb
from llamabranch.errors import ConfigError

pa = pytest.importorskip("pyarrow", reason="needs the extra ray")

from llamabranch.ray_data import Generate  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "batching.md"
EXACT: Any = {"n_ctx": 1024, "n_threads": 1, "exact": True}


def alone(rows: list[dict[str, Any]]) -> list[str]:
    """Return the texts that one process generates."""
    with lb.load("tale-target", **EXACT) as ctx:
        engine = lb.Engine(ctx, seed=1, max_tokens=20)
        requests = [lb.Request(row["prompt"], id=str(row["id"])) for row in rows]
        return [result.text for result in engine.generate(requests)]


def test_rows_get_their_texts_and_bad_rows_their_reasons() -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "prompt": "The king", "kept": "a", "regex": None},
        {"id": 2, "prompt": None, "kept": "b"},
        {"id": 3, "prompt": "The fox", "kept": "c", "regex": "("},
        {"id": 4, "prompt": "The fox", "kept": "d"},
    ]
    generate = Generate("tale-target", max_tokens=20, seed=1, load=EXACT)
    made = generate(pa.Table.from_pylist(rows)).to_pylist()
    assert [row["text"] for row in made] == [*alone(rows[:1]), "", "", *alone(rows[3:])]
    assert [row["finish_reason"] for row in made] == ["length", "error", "error", "length"]
    assert "prompt" in made[1]["error"] and "GrammarError" in made[2]["error"]
    assert [row["kept"] for row in made] == ["a", "b", "c", "d"]
    again = generate(pa.Table.from_pylist(rows[3:])).to_pylist()
    assert again == [{name: made[3][name] for name in again[0]}]
    for bad in ([{"prompt": "a"}], [{"id": 1, "prompt": "a"}] * 2):
        with pytest.raises(ConfigError, match="id"):
            generate(pa.Table.from_pylist(bad))


@pytest.mark.slow
def test_program_of_the_documents_resumes_and_equals_one_process(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    import pyarrow.parquet as pq

    (program,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    files: list[set[Path]] = []
    for n in (6, 16, 16):  # the second run has the rows of the first, and more
        path = tmp_path / "program.py"
        path.write_text(
            f"import os\nos.chdir({str(tmp_path)!r})\n"
            + program.replace("range(16)", f"range({n})"),
            encoding="utf-8",
        )
        run_python(path, RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0")
        files.append(set((tmp_path / "texts").glob("*.parquet")))
        made = [row for file in files[-1] for row in pq.read_table(file).to_pylist()]
        assert sorted(row["id"] for row in made) == [*range(n)]
    assert files[0] < files[1] == files[2]
    made.sort(key=lambda row: row["id"])
    assert [row["text"] for row in made] == alone(made)
