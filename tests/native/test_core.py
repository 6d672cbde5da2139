"""The compiled core measures rows as NumPy does, and stays inside its memory."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from programs import run_code, run_python
from rows import KINDS, row

import llamabranch as lb
from llamabranch.context.logits import LogitsRow
from llamabranch.native import core

Row = npt.NDArray[np.float32]

NATIVE = Path(core.__file__).parent
needs_core = pytest.mark.skipif(not core.available, reason=f"compiled core: {core.description}")


def _reference(x: Row) -> tuple[int, float, float]:
    """Return the best token, the log-sum-exp and the entropy in 64-bit floats."""
    wide = x.astype(np.float64)
    shifted = wide - wide.max()
    weights = np.exp(shifted)
    total = math.fsum(weights)
    mean = math.fsum(w * d for w, d in zip(weights, shifted, strict=True) if w > 0.0) / total
    return int(x.argmax()), float(wide.max()) + math.log(total), math.log(total) - mean


def _assert_measured(x: Row) -> None:
    best, logsumexp, entropy = core.measure(core.address_of(x)[0], len(x))
    expected = _reference(x)
    assert best == expected[0]
    assert logsumexp == pytest.approx(expected[1], rel=1e-12, abs=1e-6)
    assert entropy == pytest.approx(expected[2], abs=1e-6)


@needs_core
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_vocab", [1, 2, 15, 16, 17, 4096, 262_144])
def test_row_is_measured_as_by_numpy(n_vocab: int, kind: str) -> None:
    _assert_measured(row(np.random.default_rng(n_vocab), n_vocab, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_vocab", [2, 17, 4096, 262_144])
def test_numpy_measures_as_accurately(
    n_vocab: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in 32 bits were off by more than 1e-6, on some processors more than on others."""
    monkeypatch.setattr(core, "available", False)
    x = row(np.random.default_rng(n_vocab), n_vocab, kind)
    best, logsumexp, entropy = _reference(x)
    measured = LogitsRow(x)
    assert measured.entropy() == pytest.approx(entropy, abs=1e-6)
    assert measured.logprob(best) == pytest.approx(float(x[best]) - logsumexp, abs=1e-6)


@needs_core
@pytest.mark.parametrize("n_vocab", [1, 16, 100, 4096])
@pytest.mark.parametrize("bad", [[math.nan], [-math.nan], [math.inf], [math.inf, math.nan]])
def test_row_with_nan_or_inf_is_left_to_numpy(n_vocab: int, bad: list[float]) -> None:
    rng = np.random.default_rng(n_vocab)
    for _ in range(20):
        x = row(rng, n_vocab, "half masked")
        x[rng.integers(n_vocab, size=len(bad))] = bad
        best, logsumexp, entropy = core.measure(x.ctypes.data, n_vocab)
        assert (best, math.isnan(logsumexp), math.isnan(entropy)) == (-1, True, True)
    x[:] = -math.inf  # no token can be drawn
    assert core.measure(x.ctypes.data, n_vocab)[0] == -1


def test_system_info_says_which_code_runs_and_a_variable_turns_it_off() -> None:
    assert f"llamabranch core: {core.description}" in lb.system_info()
    assert core.available == core.description.startswith("compiled")
    code = "from llamabranch.native import core; print(core.available)"
    assert run_code(code, LLAMABRANCH_CORE="0") == "False\n"


def _shared_library_of(compiler: str, name: str) -> str | None:
    """Return the path of a sanitizer's library, None if the compiler has none."""
    path = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return path if os.path.isabs(path) and os.path.exists(path) else None


def test_core_stays_inside_its_memory(tmp_path: Path) -> None:
    """All settings over hard rows of many lengths, under AddressSanitizer and UBSan.

    The driver loads a copy of ``core.py`` next to a library built with the sanitizers. llama.cpp does
    not run in that process.
    """
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    sanitizers = [_shared_library_of(compiler, f"lib{kind}.so") for kind in ("asan", "ubsan")]
    if None in sanitizers:
        pytest.skip("this compiler has no shared AddressSanitizer or UBSan")
    copies = tmp_path / "compiled"
    library = copies / "lib" / core.LIBRARY.name
    library.parent.mkdir(parents=True)
    (copies / "__init__.py").touch()
    built = subprocess.run(
        [
            compiler, "-std=c11", "-O1", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror",
            "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all",
            "-shared", "-fPIC", str(NATIVE / "core.c"), "-o", str(library), "-lm",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    shutil.copy(NATIVE / "core.py", copies / "core.py")
    done = run_python(
        Path(__file__).with_name("core_driver.py"),
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])]),
        LD_PRELOAD=" ".join(str(path) for path in sanitizers),
        ASAN_OPTIONS="detect_leaks=0",
        PYTHONMALLOC="malloc",
        LLAMABRANCH_CORE="1",
    )
    assert done.stdout.startswith("rows: ")
