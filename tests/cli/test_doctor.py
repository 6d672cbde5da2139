"""``llamabranch doctor``: its report, its self-test, and its advice for several kinds of machines."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from commands import COMMAND, run

import llamabranch as lb
from llamabranch.bench.machine import Machine
from llamabranch.cli import doctor

FLAGS = frozenset({"avx", "avx2", "fma", "f16c"})
MACHINE = Machine(
    processor="Some CPU",
    cores=4,
    load=0.0,
    llama_cpp_python="0.3.36",
    llama_cpp="1",
    features=("AVX", "AVX2", "FMA", "F16C"),
)


def test_doctor_reports_and_passes_its_own_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    result = run("doctor")
    assert result.exit_code == 0, result.output
    found, facts = result.stdout.split(f"llamabranch {lb.__version__}, Python ")
    *slow, ok = found.splitlines()  # what is wrong comes first
    assert ok == f"ok: {', '.join(doctor.TESTS)}"
    assert all(line.startswith("slow: ") for line in slow)
    for line in (
        "\nllama-cpp-python ",
        "\nsystem: ",
        "\nprocessor: ",
        "runs on: the CPU, 1 thread; ",
    ):
        assert line in facts
    assert "\nvariables: " in facts and "HF_TOKEN" in facts
    wide = run("doctor", FORCE_COLOR="1", NO_COLOR="1", TERM="dumb", COLUMNS="80").stdout
    assert len(wide.splitlines()) < 24  # one screen
    assert "hf_secret" not in result.output


def test_llama_cpp_that_cannot_be_loaded_is_a_failed_check_above_what_is_known() -> None:
    def without(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments], env={**os.environ, "LLAMA_CPP_LIB_PATH": "/nowhere"},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    done = without("doctor")
    assert done.returncode == 1
    fault, _, _, *facts, end = done.stdout.splitlines()
    assert fault.startswith("FAIL: a score: score cannot be loaded: ")
    assert facts[0].startswith(f"llamabranch {lb.__version__}, ")
    assert "LLAMA_CPP_LIB_PATH" in facts[-1] and end.startswith("please report this")
    done = without("generate", "--json", "-p", "x")
    assert done.returncode == 1
    assert done.stderr.startswith("error: generate cannot be loaded: ")


def test_a_build_that_ends_the_process_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a build for another processor does, by SIGILL."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = run("doctor")
    assert result.exit_code == 1
    faults = [f"FAIL: {name}: the process ended with 1" for name in doctor.TESTS]
    assert result.stdout.splitlines()[: len(faults)] == faults
    assert f"\nllamabranch {lb.__version__}, " in result.stdout


def advised(machine: Machine, n_threads: int = 4, flags: frozenset[str] = FLAGS) -> list[str]:
    return doctor.advise(machine, flags, n_threads, on_gpu=True)


def test_what_could_be_better_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advised(MACHINE) == advised(replace(MACHINE, load=None)) == []
    assert advised(replace(MACHINE, features=()), flags=frozenset()) == []  # unknown: no advice
    (line,) = advised(MACHINE, flags=FLAGS | {"avx512f"})
    assert "avx512f" in line and "-DGGML_NATIVE=on" in line
    assert advised(replace(MACHINE, load=4.0)) == ["other programs use the cores too (load 4.00)"]
    assert "8 threads share 4 cores" in advised(MACHINE, 8)[0]
    monkeypatch.setattr("shutil.which", lambda name: name == "nvidia-smi")
    assert "-DGGML_CUDA=on" in doctor.advise(MACHINE, FLAGS, 4, on_gpu=False)[0]
