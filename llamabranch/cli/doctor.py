"""``llamabranch doctor``: what is installed, on which machine, and whether it works.

llama.cpp is imported late, so that everything else is printed even if llama.cpp is broken.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import llamabranch as lb
from llamabranch import hub

from .console import Console
from .interrupts import EXIT_FAILURE
from .options import Given, with_options

if TYPE_CHECKING:
    from llamabranch.bench.machine import Machine

PROMPT = "Once upon a time there was a king"
N_TOKENS = 32
PACKAGES = ("llama-cpp-python", "numpy", "rich", "typer", "huggingface_hub")
# Flags of processors, each with the feature of a build that uses it.
FEATURES = {
    "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16", "avx_vnni": "AVX_VNNI",
    "asimddp": "DOTPROD", "i8mm": "MATMUL_INT8", "sve": "SVE",
}  # fmt: skip
REBUILD = (
    "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"
)
GPUS = {"nvidia-smi": "-DGGML_CUDA=on", "rocminfo": "-DGGML_HIP=on"}


@with_options("threads", "verbose")
def doctor(given: Given, console: Console) -> None:
    """Report what is installed on which machine, test it, and advise.

    llamabranch doctor
    llamabranch doctor > report.txt

    It takes about ten seconds. A bug report needs this output.
    """

    def tell(rows: dict[str, str]) -> None:
        for label, value in rows.items():
            console.line(f"{label}: {value}")

    tell(_versions())
    advice, all_passed = list[str](), False
    try:
        from llamabranch.bench.machine import Machine, processor_flags

        machine = Machine.now()
        for line in machine.describe():
            console.line(line)
        target, draft = (
            given.open(name, console, n_ctx=1024)
            for name in (hub.BUNDLED_TARGET, hub.BUNDLED_DRAFT)
        )
    # A broken build can fail in any way, and this command must report it.
    except Exception as error:
        _report_failure(console, "loading llama.cpp and the bundled pair", error)
    else:
        tell(_context(target))
        all_passed = _self_test(console, target, draft)
        advice = advise(machine, processor_flags(), target.n_threads, on_gpu=target.model.on_gpu)
    if not all_passed:
        advice.append("a test failed: please report it with everything above")
    for line in advice or ["nothing to improve was found"]:
        console.line(f"advice: {line}")
    if not all_passed:
        raise typer.Exit(EXIT_FAILURE)


# -- facts ---------------------------------------------------------------------------------------------


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> dict[str, str]:
    own = ("CMAKE_ARGS", "GGML_", "HF_", "LLAMA", "OMP_")
    return {
        "llamabranch": f"{lb.__version__} ({Path(lb.__file__).parent})",
        **{name: _version(name) for name in PACKAGES},
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        # A value may be a secret.
        "variables": " ".join(name for name in os.environ if name.startswith(own)) or "none is set",
    }


def _context(context: lb.Context) -> dict[str, str]:
    return {
        "runs on": "a GPU" if context.model.on_gpu else "the CPU",
        "llamabranch's core": lb.system_info().rpartition("llamabranch core:")[2].strip(),
        "threads": f"{context.n_threads} for tokens, {context.n_threads_batch} for prompts",
    }


# -- the self-test --------------------------------------------------------------------------------------


def _report_failure(console: Console, name: str, error: Exception) -> None:
    message = " ".join(str(error).split())
    console.line(f"FAIL  {name}: {type(error).__name__}: {message}", "bold red")


def _self_test(console: Console, target: lb.Context, draft: lb.Context) -> bool:
    """Run the tests and report each; return whether all passed."""

    def texts(drafter: lb.Drafter | None) -> None:
        requests = [
            lb.Request(PROMPT, max_tokens=N_TOKENS, sampling=lb.SamplingParams(seed=seed))
            for seed in range(4)
        ]
        config = lb.SpeculativeConfig(draft_k=4)
        for result in lb.Engine(target, drafter, config).generate(requests):
            if result.error is not None:
                raise result.error

    tests: dict[str, Callable[[], None]] = {
        "four texts in one batch": lambda: texts(None),
        "speculative decoding": lambda: texts(lb.ModelDrafter(draft)),
        "the cache's accounting": target.audit,
    }
    n_failed = 0
    for name, test in tests.items():
        try:
            test()
            console.line(f"ok    {name}: no error", "green")
        except lb.LlamaBranchError as error:
            n_failed += 1
            _report_failure(console, name, error)
    return not n_failed


# -- advice ----------------------------------------------------------------------------------------------


def advise(machine: Machine, flags: frozenset[str], n_threads: int, *, on_gpu: bool) -> list[str]:
    """Return advice: what could be better, and what to do about it. ``flags`` are the processor's."""
    # Compare beginnings: a build lists several features of AVX512, and names of ARM's features
    # vary.
    built = "\n".join(machine.features)
    unused = [
        f for f, name in FEATURES.items() if f in flags and not re.search(rf"^{name}", built, re.M)
    ]
    tools = [] if on_gpu else list(filter(shutil.which, GPUS))
    advice = [machine.complaint(n_threads)]
    if unused:
        advice.append(
            f"this processor has {' '.join(unused)}, which llama.cpp was not compiled for: a build made "
            f'on this machine is faster (CMAKE_ARGS="-DGGML_NATIVE=on" {REBUILD})'
        )
    if tools:
        advice.append(
            f"{tools[0]} is installed, but this llama.cpp was built without its GPU: "
            f'CMAKE_ARGS="{GPUS[tools[0]]}" {REBUILD}'
        )
    return list(filter(None, advice))
