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

from .console import Console, plural
from .interrupts import EXIT_FAILURE
from .options import Given, with_options

if TYPE_CHECKING:
    from llamabranch.bench.machine import Machine

# The self-test: commands, each in a process of its own, because a bad build can end the process.
TESTS = {
    "a score": "score Once",
    "four texts in one batch": "generate Once -S n=4 -n 32",
    "drafts": "speculate Once -n 32 -md tale-draft",
}
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


@with_options("threads verbose")
def doctor(given: Given, console: Console) -> None:
    """Test the installation, and say what is wrong or slow.

    llamabranch doctor
    llamabranch doctor > report.txt

    It takes about ten seconds. A bug report needs this output.
    """
    faults, advice, facts = list[str](), list[str](), _versions()
    for name, command in TESTS.items():
        words = [*command.split(), "-m", hub.BUNDLED_TARGET, "-t", str(given.threads or 1)]
        program = [sys.executable, "-m", "llamabranch.cli", *words]
        console.progress(f"testing {name}")
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip() or f"the process ended with {done.returncode}"
            faults.append(f"{name}: {why.splitlines()[0].removeprefix('error: ')}")
    console.progress("")
    if not faults:
        from llamabranch.bench.machine import Machine, processor_flags

        machine, context = Machine.now(), given.open(hub.BUNDLED_TARGET, console)
        on_gpu, n_threads = context.model.on_gpu, context.n_threads
        advice = advise(machine, processor_flags(), n_threads, on_gpu=on_gpu)
        core = lb.system_info().rpartition("llamabranch core:")[2].strip()
        where = f"runs on: {'a GPU' if on_gpu else 'the CPU'}, {plural(n_threads, 'thread')}"
        facts += [*machine.describe(), f"{where}; core of llamabranch: {core}"]
        facts.insert(0, f"ok: {', '.join(TESTS)}")
    for line in faults:
        console.line(f"FAIL: {line}", "bold red")
    for line in advice:
        console.line(f"slow: {line}", "yellow")
    console.line("\n".join(facts))
    if faults:
        console.line("please report this, with everything above")
        raise typer.Exit(EXIT_FAILURE)


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


def advise(machine: Machine, flags: frozenset[str], n_threads: int, *, on_gpu: bool) -> list[str]:
    """Return advice: what could be better, and what to do about it. ``flags`` are the processor's."""
    # Compare beginnings: a build lists several features of AVX512, and ARM's names vary.
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
