"""``llamabranch doctor``: what is installed, on which machine, and whether it works.

llama.cpp is imported late, so that everything else is printed even if llama.cpp is broken.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
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
TESTS = "four texts in one batch", "speculative decoding", "the cache's accounting"
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
    """Test the installation, and say what is wrong or slow.

    llamabranch doctor
    llamabranch doctor > report.txt

    It takes about ten seconds. A bug report needs this output.
    """
    faults, advice, facts = list[str](), list[str](), _versions()
    # A build for another processor can end the process, so another process loads it first.
    command = [
        sys.executable,
        "-m",
        "llamabranch.cli",
        "score",
        "-m",
        hub.BUNDLED_TARGET,
        "Once upon",
    ]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        why = tried.stderr.strip() or f"it ended the process (code {tried.returncode})"
        faults.append(f"loading llama.cpp and the bundled model: {why.splitlines()[0]}")
    else:
        from llamabranch.bench.machine import Machine, processor_flags

        target, draft = (
            given.open(name, console, n_ctx=1024)
            for name in (hub.BUNDLED_TARGET, hub.BUNDLED_DRAFT)
        )
        faults += _self_test(target, draft)
        machine = Machine.now()
        on_gpu = target.model.on_gpu
        advice = advise(machine, processor_flags(), target.n_threads, on_gpu=on_gpu)
        core = lb.system_info().rpartition("llamabranch core:")[2].strip()
        threads = f"{target.n_threads} for tokens, {target.n_threads_batch} for prompts"
        facts += [
            *machine.describe(),
            f"runs on: {'a GPU' if on_gpu else 'the CPU'}; threads: {threads}; our core: {core}",
        ]
    for line in faults:
        console.line(f"FAIL: {line}", "bold red")
    for line in advice:
        console.line(f"slow: {line}", "yellow")
    if not faults:
        console.line(f"ok: {', '.join(TESTS)}{'' if advice else '; nothing to improve'}", "green")
    for line in facts:
        console.line(line)
    if faults:
        console.line("please report this, with everything above")
        raise typer.Exit(EXIT_FAILURE)


# -- facts ---------------------------------------------------------------------------------------------


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def _versions() -> list[str]:
    # Only names: a value may be a secret.
    own = [n for n in os.environ if n.startswith(("CMAKE_ARGS", "GGML_", "HF_", "LLAMA", "OMP_"))]
    return [
        f"llamabranch {lb.__version__}, Python {platform.python_version()}: {Path(lb.__file__).parent}",
        ", ".join(map(_version, PACKAGES)),
        f"system: {platform.platform()}",
        *[f"variables: {' '.join(own)}"] * bool(own),
    ]


# -- the self-test --------------------------------------------------------------------------------------


def _self_test(target: lb.Context, draft: lb.Context) -> list[str]:
    """Run `TESTS`; return what has failed."""

    def texts(drafter: lb.Drafter | None) -> None:
        requests = [
            lb.Request(PROMPT, max_tokens=N_TOKENS, sampling=lb.SamplingParams(seed=seed))
            for seed in range(4)
        ]
        config = lb.SpeculativeConfig(draft_k=4)
        for result in lb.Engine(target, drafter, config).generate(requests):
            if result.error is not None:
                raise result.error

    faults = list[str]()
    tests = (lambda: texts(None)), (lambda: texts(lb.ModelDrafter(draft))), target.audit
    for name, test in zip(TESTS, tests, strict=True):
        try:
            test()
        except lb.LlamaBranchError as error:
            faults.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
    return faults


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
    advice = list[str]()
    if n_threads > machine.cores:
        advice.append(
            f"{n_threads} threads share {machine.cores} cores: -t {machine.cores} is faster"
        )
    elif (machine.load or 0) + n_threads > machine.cores + 0.5:
        advice.append(f"other programs use the cores too (load {machine.load:.2f})")
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
    return advice
