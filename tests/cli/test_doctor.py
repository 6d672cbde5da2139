"""``llamabranch doctor``: its report, its self-test, and its advice for several kinds of machines."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import pytest
from typer.testing import Result

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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure speeds only briefly."""
    monkeypatch.setattr("llamabranch.cli.doctor.SPEED_S", 0.01)


def run(*arguments: str) -> Result:
    return commands.run("doctor", *arguments)


def test_doctor_reports_and_passes_its_own_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    result = run()
    assert result.exit_code == 0, result.output
    labels = "llamabranch system HF_TOKEN processor version threads advice"
    assert all(f"{label}: " in result.stdout for label in labels.split())
    assert len(result.stdout.splitlines()) <= 40  # on one screen
    assert result.stdout.count("\nok  ") == 4
    assert "HF_TOKEN: set" in result.stdout
    assert "hf_secret" not in result.output


def test_doctor_as_json_has_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.loads(run("--json").stdout)
    assert {check["passed"] for check in answer["self_test"]} == {True}
    assert answer["versions"]["llamabranch"].startswith(f"{lb.__version__} (")
    assert answer["machine"]["cores"] > 0
    assert answer["llama.cpp"]["runs on"] == "the CPU"
    assert answer["context"]["threads"].startswith("1 ")
    assert all(rate > 0 for rate in answer["speeds"].values())
    assert isinstance(answer["advice"], list)


def test_profile_that_cannot_be_written_is_told_with_the_reason(
    ctx: lb.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "newer.json").write_text('{"version": 1000}', encoding="utf-8")
    (tmp_path / "other.json").write_text('{"no": "version"}', encoding="utf-8")
    (tmp_path / "link.json").symlink_to("target.json")
    for name, reason in (
        ("file/profile.json", ", which cannot be written: "),
        (".", ", which cannot be written: Is a directory"),
        ("newer.json", ", which cannot be written: a later version wrote it"),
        ("other.json", ""),
        ("link.json", ""),
    ):
        path = str(tmp_path / name).removesuffix("/.")
        monkeypatch.setenv("LLAMABRANCH_PROFILE", path)
        line = doctor._context(ctx)["profile"]
        assert line.startswith(path + reason) and (line == path) == (not reason)
    monkeypatch.setenv("LLAMABRANCH_PROFILE", "0")
    assert doctor._context(ctx)["profile"] == "off"


def test_llama_cpp_that_cannot_be_loaded_is_a_failed_check_below_what_is_known() -> None:
    def without(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*commands.COMMAND, *arguments], env={**os.environ, "LLAMA_CPP_LIB_PATH": "/nowhere"},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    done = without("doctor")
    assert done.returncode == 1
    assert f"llamabranch: {lb.__version__} (" in done.stdout
    assert "\nLLAMA_CPP_LIB_PATH: /nowhere\n" in done.stdout
    assert "\nFAIL  loading llama.cpp and the bundled pair: FileNotFoundError" in done.stdout
    done = without("generate", "--json", "-p", "x")
    assert done.returncode == 1
    assert done.stderr.startswith("error: generate cannot be loaded: ")
    assert json.loads(done.stdout)["error"]["type"] == "FileNotFoundError"


@pytest.mark.parametrize("invariant", [True, False])
def test_texts_may_differ_where_batches_are_not_exact(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, step, calls = lb.Engine.generate, lb.Branch.step, itertools.count()

    def other(self: lb.Engine, requests: list[lb.Request]) -> list[lb.Result]:
        results = generate(self, requests)
        results[0].tokens = [next(calls)]
        return results

    def next_step(self: lb.Branch) -> lb.Produced:
        return step(self)._replace(token=next(calls))

    def load(name: str, **options: Any) -> lb.Context:
        ctx = loaded(name, **options)
        why: Any = {"batch_invariant": invariant, "batch_invariant_reason": "rounding"}
        ctx.capabilities = replace(ctx.capabilities, **why)
        return ctx

    loaded = lb.load
    monkeypatch.setattr(lb, "load", load)
    monkeypatch.setattr(lb.Engine, "generate", other)
    monkeypatch.setattr(lb.Branch, "step", next_step)
    shown, label = run().stdout, "FAIL" if invariant else "ok  "
    why = "" if invariant else ", which is allowed: rounding"
    for name, kind in (
        ("four texts in one batch", "each text as it is alone"),
        ("speculative decoding", "the text of plain decoding"),
    ):
        assert f"{label}  {name}: not {kind}{why}\n" in shown
    assert "FAIL  a saved branch: not the tokens that follow where it was saved\n" in shown


@pytest.mark.parametrize("part", ["a text", "an engine", "the accounting"])
def test_a_check_that_raises_has_failed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine puts the error of a text into its result. Two empty texts would be equal."""
    generate = lb.Engine.generate

    def failing(self: lb.Engine, requests: list[lb.Request]) -> list[lb.Result]:
        results = generate(self, requests)
        for result in results:
            result.tokens, result.error = [], lb.errors.DecodeError("no")
        return results

    def refused(*_: object) -> None:
        raise lb.errors.DecodeError("no")

    owner, name = (lb.Context, "audit") if part == "the accounting" else (lb.Engine, "__init__")
    if part == "a text":
        monkeypatch.setattr(lb.Engine, "generate", failing)
    else:
        monkeypatch.setattr(owner, name, refused)
    result = run()
    assert result.exit_code == 1
    of_texts = ("four texts in one batch", "speculative decoding")
    failed = ("the cache's accounting",) if part == "the accounting" else of_texts
    for name in failed:
        assert f"FAIL  {name}: DecodeError: no" in result.stdout
    assert result.stdout.count("FAIL  ") == len(failed)


@pytest.mark.parametrize(
    ("machine", "n_threads", "more", "advice"),
    [
        (MACHINE, 4, {}, []),
        (MACHINE, 4, {"on_gpu": True, "tools": ("nvidia-smi",)}, []),
        (MACHINE, 4, {"flags": FLAGS | {"avx512f"}}, ["avx512f", "-DGGML_NATIVE=on"]),
        (MACHINE, 4, {"tools": ("nvidia-smi",)}, ["-DGGML_CUDA=on"]),
        (replace(MACHINE, load=4.0), 4, {}, ["busy (load 4.00"]),
        (replace(MACHINE, load=None), 4, {}, []),
        (replace(MACHINE, features=()), 4, {"flags": frozenset()}, []),  # unknown: no advice
        (MACHINE, 8, {}, ["8 threads share 4 cores"]),
        (MACHINE, 4, {"extra": False}, ["[hub]'"]),
    ],
)
def test_what_could_be_better_is_advised(
    machine: Machine,
    n_threads: int,
    more: dict[str, Any],
    advice: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"on_gpu": False, "flags": FLAGS, "tools": (), "extra": True, **more}
    version = "1" if options.pop("extra") else "not installed"
    monkeypatch.setattr("llamabranch.cli.doctor._version", lambda _name: version)
    advised = doctor.advise(machine, n_threads, **options)
    assert len(advised) == bool(advice) and all(part in advised[0] for part in advice)
