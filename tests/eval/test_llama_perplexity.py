"""The same perplexity as llama-perplexity, built from the sources of the installed llama-cpp-python.

``LLAMA_PERPLEXITY`` names the program. On the machine where this was written all digits that the program
prints are equal. Other processors may use other kernels; there perplexities may differ by 1e-4.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import llamabranch as lb
from benchmarks.servers import has_amx
from llamabranch.eval import perplexity

ROOT = Path(__file__).parents[2]
WINDOW = 512


@pytest.mark.slow
def test_perplexity_is_the_programs(tmp_path: Path) -> None:
    program = os.environ.get("LLAMA_PERPLEXITY")
    if program is None:
        pytest.skip("LLAMA_PERPLEXITY names no llama-perplexity")
    if has_amx():
        pytest.skip("the program may use AMX, which the library turns off")
    path, model = tmp_path / "text.txt", lb.hub.resolve(lb.hub.BUNDLED_TARGET)
    names = ("README.md", "docs/architecture.md")
    path.write_text("\n".join((ROOT / name).read_text("utf-8") for name in names), "utf-8")
    sizes = ["-t", "2", "-c", str(WINDOW), "-b", str(WINDOW)]
    command = [program, "-m", str(model), "-f", str(path), *sizes]
    for _ in range(8):  # on a busy machine its last lines may be missing
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        final = re.search(r"PPL = ([\d.]+) \+/- ([\d.]+)", done.stdout + done.stderr)
        if final is not None:
            break
    else:
        pytest.fail(f"no perplexity in {done.stderr[-2000:]}")
    with lb.load(model, n_ctx=WINDOW, n_seq_max=1, kv_type="f16", n_threads=2) as ctx:
        result = perplexity(ctx, path.read_text("utf-8"), WINDOW)
    assert result.n_chunks >= 4
    assert result.value == pytest.approx(float(final[1]), rel=1e-4)
    assert result.stderr == pytest.approx(float(final[2]), rel=1e-3)
