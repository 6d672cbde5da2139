"""The same numbers and files as llama-perplexity, built from the sources of the installed
llama-cpp-python.

``LLAMA_PERPLEXITY`` names the program. Without it the program is used that ``python -m
benchmarks.evaluation`` builds. Both sides use f16 K/V, and chunks of 512 tokens in decodes of 512.

The tolerances: on the machine where this was written all values that the program prints are equal. Of 75
million codes 8 differ, by one, because the two sides sum 49,152 exponentials in different orders. Other
processors may use other kernels. There perplexities may differ by 1e-4, and one code in a thousand by a
few steps.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import llamabranch as lb
from benchmarks.evaluation import best_choice, choice_file, make_items, read_text
from benchmarks.llama_tools import PERPLEXITY, ToolError, build_perplexity, has_amx
from llamabranch import eval as evaluation
from llamabranch import hub

MODEL, DRAFT = hub.resolve(hub.BUNDLED_TARGET), hub.resolve(hub.BUNDLED_DRAFT)
WINDOW = 512
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program() -> Path:
    path = os.environ.get("LLAMA_PERPLEXITY")
    home = Path(os.environ.get("LLAMABRANCH_CACHE") or "~/.cache/llamabranch").expanduser()
    folders = [] if path is None else [Path(path).parent]
    folders += sorted((home / "benchmarks").glob("llama-cpp-python-*/build/bin"))
    for folder in folders:
        try:
            return build_perplexity(home, folder)
        except ToolError:
            continue
    pytest.skip(f"{PERPLEXITY} is not built: python -m benchmarks.evaluation --quick does it")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    items = evaluation.suite_items("true_ending")[:60]
    path.write_text("\n".join(str(item["context"]) for item in items), "utf-8")
    return path


def opened(model: Path) -> lb.Context:
    return lb.load(
        model, n_ctx=WINDOW, n_seq_max=1, kv_type="f16", batch_invariant=False, n_threads=2
    )


@pytest.fixture
def ctx() -> Iterator[lb.Context]:
    with opened(MODEL) as context:
        yield context


def run(program: Path, *arguments: object, last: str) -> str:
    """Return the program's log. It is run again if its last lines are missing, as on a busy machine."""
    command = [str(program), "-t", "2", "-c", str(WINDOW), "-b", str(WINDOW), *map(str, arguments)]
    for _ in range(8):
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        if last in (log := done.stdout + done.stderr):
            return log
    pytest.fail(f"no {last!r} in {log[-2000:]}")


def test_perplexity_and_file_are_the_programs(
    program: Path, text: Path, ctx: lb.Context, tmp_path: Path
) -> None:
    if has_amx():
        pytest.skip("the program may use AMX, which the library turns off")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    log = run(program, "-m", MODEL, "-f", text, "--save-all-logits", theirs, last="PPL =")
    result = evaluation.perplexity(ctx, text.read_text("utf-8"), WINDOW, save_to=ours)
    printed = [float(value) for value in re.findall(r"\[\d+\]([\d.]+)", log)]
    assert result.n_chunks >= 4
    assert result.running == pytest.approx(printed, rel=1e-4)
    final = re.search(r"PPL = ([\d.]+) \+/- ([\d.]+)", log)
    assert final is not None
    assert result.value == pytest.approx(float(final[1]), rel=1e-4)
    assert result.stderr == pytest.approx(float(final[2]), rel=1e-3)
    a, b = theirs.read_bytes(), ours.read_bytes()
    header = 20 + 4 * WINDOW * result.n_chunks
    assert len(a) == len(b) and a[:header] == b[:header]
    first, second = (
        np.frombuffer(data[header:], dtype="<u2").reshape(-1, ctx.n_vocab + 4) for data in (a, b)
    )
    steps = np.abs(first[:, 4:].astype(int) - second[:, 4:].astype(int))
    assert (steps > 0).mean() < 1e-3 and steps.max() <= 16


def test_divergence_is_the_programs_both_ways(
    program: Path, text: Path, ctx: lb.Context, tmp_path: Path
) -> None:
    ours = tmp_path / "ours"
    evaluation.perplexity(ctx, text.read_text("utf-8"), WINDOW, save_to=ours)
    options = ("--kl-divergence-base", ours, "--kl-divergence")
    log = run(program, "-m", DRAFT, *options, last="Same top p:")
    with opened(DRAFT) as draft:
        result = evaluation.divergence(draft, ours)
    stats = result.statistics

    def printed(label: str) -> list[float]:
        line = re.search(rf"{re.escape(label)} *: *(.*)", log)
        assert line is not None, label
        return [float(value) for value in re.findall(r"-?[\d.]+", line[1])]

    # The program prints six digits; for standard errors it sums in another order.
    for label, value in {
        "Mean PPL(Q)": stats.perplexity, "Mean PPL(base)": stats.base_perplexity,
        "Mean ln(PPL(Q)/PPL(base))": stats.log_ratio, "Mean PPL(Q)/PPL(base)": stats.ratio,
        "Mean PPL(Q)-PPL(base)": stats.difference, "Mean    KLD": stats.mean,
    }.items():  # fmt: skip
        assert printed(label) == pytest.approx(list(value), rel=1e-3, abs=2e-6), label
    percents: dict[str, tuple[float, ...]] = {
        "Mean    Δp": stats.p_change, "RMS Δp    ": stats.p_change_rms, "Same top p": stats.same_top,
        "Cor(ln(PPL(Q)), ln(PPL(base)))": (stats.correlation,),
    }  # fmt: skip
    for label, values in percents.items():
        wanted = [100 * number for number in values]
        near = 0.02 if label.startswith("Cor") else 2e-3
        assert printed(label) == pytest.approx(wanted, abs=near), label
    for label, fraction in {
        "Maximum": 1.0, "99.9%  ": 0.999, "99.0%  ": 0.99, "95.0%  ": 0.95, "90.0%  ": 0.9,
        "Median ": 0.5, "10.0%  ": 0.1, " 5.0%  ": 0.05, " 1.0%  ": 0.01, "Minimum": 0.0,
    }.items():  # fmt: skip
        assert printed(f"{label} KLD") == pytest.approx([result.percentile(fraction)], abs=2e-6)
        wanted = [100 * result.p_change_percentile(fraction)]
        assert printed(f"{label} Δp") == pytest.approx(wanted, abs=2e-3), label


def test_the_programs_multiple_choice_finds_the_same_right(
    program: Path, ctx: lb.Context, tmp_path: Path
) -> None:
    items = make_items(read_text(None), 40)
    path = tmp_path / "choices"
    path.write_bytes(choice_file(items))
    options = ("-bf", path, "--multiple-choice", "--multiple-choice-tasks", 0)
    log = run(program, "-m", MODEL, *options, last="Final result")
    final = re.search(r"Final result: ([\d.]+)", log)
    assert final is not None
    requests = [(context, [" " + choice for choice in choices]) for context, choices in items]
    right = sum(best_choice(scores) == 0 for scores in evaluation.score(ctx, requests))
    # One near tie may be decided the other way.
    assert abs(right / len(items) - float(final[1]) / 100) <= 1.01 / len(items)
