"""The same perplexity as llama-perplexity, built from the sources of the installed llama-cpp-python.

``LLAMA_PERPLEXITY`` names the program. On the machine where this was written all digits that the program
prints are equal. Other processors may use other kernels; there perplexities may differ by 1e-4.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import llamabranch as lb
from benchmarks.servers import has_amx
from llamabranch import eval as evaluation
from llamabranch import hub

MODEL, ROOT = hub.resolve(hub.BUNDLED_TARGET), Path(__file__).parents[2]
WINDOW = 512
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program() -> str:
    path = os.environ.get("LLAMA_PERPLEXITY")
    if path is None:
        pytest.skip("LLAMA_PERPLEXITY names no llama-perplexity")
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    names = ("README.md", "docs/architecture.md")
    path.write_text("\n".join((ROOT / name).read_text("utf-8") for name in names), "utf-8")
    return path


def opened(model: Path) -> lb.Context:
    return lb.load(model, n_ctx=WINDOW, n_seq_max=1, kv_type="f16", exact=False, n_threads=2)


@pytest.fixture
def ctx() -> Iterator[lb.Context]:
    with opened(MODEL) as context:
        yield context


def run(program: str, *arguments: object, last: str) -> str:
    """Return the program's log. It is run again if its last lines are missing, as on a busy machine."""
    command = [program, "-t", "2", "-c", str(WINDOW), "-b", str(WINDOW), *map(str, arguments)]
    for _ in range(8):
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        if last in (log := done.stdout + done.stderr):
            return log
    pytest.fail(f"no {last!r} in {log[-2000:]}")


def test_perplexity_is_the_programs(program: str, text: Path, ctx: lb.Context) -> None:
    if has_amx():
        pytest.skip("the program may use AMX, which the library turns off")
    log = run(program, "-m", MODEL, "-f", text, last="PPL =")
    result = evaluation.perplexity(ctx, text.read_text("utf-8"), WINDOW)
    assert result.n_chunks >= 4
    final = re.search(r"PPL = ([\d.]+) \+/- ([\d.]+)", log)
    assert final is not None
    assert result.value == pytest.approx(float(final[1]), rel=1e-4)
    assert result.stderr == pytest.approx(float(final[2]), rel=1e-3)
