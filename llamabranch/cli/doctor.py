"""``llamabranch doctor``: what is installed, on which machine, and whether it works.

llama.cpp is imported late, so that everything else is printed even if llama.cpp is broken.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import llamabranch as lb
from llamabranch import hub

from ..extras import install_command
from . import options as opt
from .console import decimal_size
from .interrupts import EXIT_FAILURE
from .options import Given

if TYPE_CHECKING:
    from llamabranch.bench.machine import Machine

PROMPT = "Once upon a time there was a king"
N_TOKENS = 32
SPEED_S = 1.0  # seconds that each speed is measured
PACKAGES = ("llamabranch", "llama-cpp-python", "numpy", "rich", "typer", "huggingface_hub")
VARIABLES = re.compile(r"(CMAKE_ARGS|(GGML|HF|LLAMA|LLAMABRANCH|OMP)_\w+|LD_LIBRARY_PATH)")
SECRET = re.compile(r"TOKEN|KEY")
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

Check = tuple[str, bool, str]  # the name of a test, whether it passed, and what was seen


def doctor(
    call: typer.Context,
    threads: opt.Threads = None,
    as_json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """Report what is installed on which machine, test it, and advise.

    llamabranch doctor
    llamabranch doctor --json > report.json

    It takes about ten seconds. A bug report needs this output.
    """
    given = Given.of(call)
    with given.console() as console:
        sections: dict[str, dict[str, object]] = {}

        def tell(name: str, rows: dict[str, str]) -> None:
            sections[name] = {**rows}
            for label, value in rows.items():
                console.line(f"{label}: {value}")

        tell("versions", _versions())
        tell("environment", _environment())
        tell("caches", _caches())
        checks, speeds, advice = list[Check](), dict[str, float](), list[str]()
        try:
            from llamabranch.bench.machine import Machine

            machine = Machine.now()
            tell("machine", _described(machine))
            sections["machine"] |= machine.as_dict()
            target, draft = (
                given.open(name, console, n_ctx=1024)
                for name in (hub.BUNDLED_TARGET, hub.BUNDLED_DRAFT)
            )
        # A broken build can fail in any way, and this command must report it.
        except Exception as error:
            checks.append(_failed("loading llama.cpp and the bundled pair", error))
            sections.setdefault("machine", {})
        else:
            tell("llama.cpp", _build(target, machine))
            tell("context", _context(target))
            checks += _self_test(target, draft)
            with contextlib.suppress(lb.LlamaBranchError):  # a check has said so
                speeds["one text"] = _speed(target, 1)
                speeds["eight texts in one batch"] = _speed(target, 8)
            advice = advise(machine, target.n_threads, on_gpu=target.model.on_gpu)
        for name, passed, detail in checks:
            style = "green" if passed else "bold red"
            console.line(f"{'ok  ' if passed else 'FAIL'}  {name}: {detail}", style)
        for name, rate in speeds.items():
            console.line(f"      {name}: {rate:,.0f} tokens a second")
        all_passed = all(passed for _, passed, _ in checks)
        failed = [] if all_passed else ["a test failed: please report it with everything above"]
        for line in [*advice, *failed] or ["nothing to improve was found"]:
            console.line(f"advice: {line}")
        tests = [dict(zip(("name", "passed", "detail"), check, strict=True)) for check in checks]
        console.answer({**sections, "self_test": tests, "speeds": speeds, "advice": advice})
        if not all_passed:
            raise typer.Exit(EXIT_FAILURE)


# -- facts ---------------------------------------------------------------------------------------------


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> dict[str, str]:
    versions = {name: _version(name) for name in PACKAGES}
    versions["llamabranch"] += f" ({Path(lb.__file__).parent})"
    python = f"{platform.python_version()} ({sys.executable})"
    return {**versions, "python": python, "system": platform.platform()}


def _environment() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)}
    shown = {name: "set" if SECRET.search(name) else value for name, value in variables.items()}
    return shown or {"variables": "none is set"}


def _caches() -> dict[str, str]:
    cache = hub.hub_cache()
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    counts = Counter(model.cache for model in hub.local_models())
    free = decimal_size(shutil.disk_usage(folder).free)
    return {
        "Hugging Face cache": f"{cache}, {free} free on its disk",
        "models in caches": ", ".join(f"{n} {name}" for name, n in counts.items()) or "none",
    }


def _described(machine: Machine) -> dict[str, str]:
    from llamabranch.bench.machine import free_memory_bytes, processor_flags

    flags, free = processor_flags(), free_memory_bytes()
    return {
        "processor": machine.processor,
        "cores": f"{machine.cores} for this process, {os.cpu_count()} in all",
        "processor features": " ".join(flag for flag in FEATURES if flag in flags) or "unknown",
        "load": "unknown" if machine.load is None else f"{machine.load:.2f}",
        "memory": "unknown" if free is None else f"{decimal_size(free)} free",
        "GPU driver": ", ".join(filter(shutil.which, GPUS)) or "none was found",
    }


def _build(context: lb.Context, machine: Machine) -> dict[str, str]:
    return {
        "version": machine.llama_cpp or "unknown",
        "compiled for": " ".join(machine.features) or "no special instructions",
        "runs on": "a GPU" if context.model.on_gpu else "the CPU",
        "llamabranch's core": lb.system_info().rpartition("llamabranch core:")[2].strip(),
    }


def _context(context: lb.Context) -> dict[str, str]:
    from llamabranch.profile import profile_path, profile_problem

    can, problem = context.capabilities, profile_problem()
    unwritable = f", which cannot be written: {problem}" if problem else ""
    return {
        "threads": f"{context.n_threads} for tokens, {context.n_threads_batch} for prompts",
        "K/V type": context.kv_type,
        "flash attention": "off" if context.params.flash_attention is False else "on",
        "batch-invariant": _exactness(can),
        "profile": str(profile_path() or "off") + unwritable,
    }


def _exactness(can: lb.context.Capabilities) -> str:
    """Return whether batches are exact, why, and how much slower exact batches are here."""
    if not can.batch_invariant:
        return f"no: {can.batch_invariant_reason}"
    cost = f"; {can.cost_of_exact}" if can.cost_of_exact else ""
    return can.batch_invariant_reason + cost


# -- the self-test --------------------------------------------------------------------------------------


def _failed(name: str, error: Exception) -> Check:
    return name, False, f"{type(error).__name__}: {' '.join(str(error).split())}"


def _self_test(target: lb.Context, draft: lb.Context) -> list[Check]:
    def texts(engine: lb.Engine, *seeds: int) -> list[list[int]]:
        settings = (lb.SamplingParams(temperature=0.8, seed=seed) for seed in seeds)
        results = engine.generate(
            [lb.Request(PROMPT, max_tokens=N_TOKENS, sampling=sampling) for sampling in settings]
        )
        for error in (result.error for result in results if result.error is not None):
            raise error
        return [result.tokens for result in results]

    def batch() -> bool:
        alone = [text for seed in range(4) for text in texts(lb.Engine(target), seed)]
        return alone == texts(lb.Engine(target), *range(4))

    def drafts() -> bool:
        drafting = lb.Engine(target, lb.ModelDrafter(draft), lb.SpeculativeConfig(draft_k=4))
        return texts(drafting, 1) == texts(lb.Engine(target, None), 1)

    def saved() -> bool:
        start = lb.Branch.start(target, PROMPT, temperature=0.8, seed=1)
        with tempfile.TemporaryDirectory() as folder, start as branch:
            branch.save(Path(folder, "branch"))
            with lb.Branch.load(target, Path(folder, "branch")) as loaded:
                return all(branch.step().token == loaded.step().token for _ in range(8))

    def accounting() -> bool:
        target.audit()
        return True

    can, checks = target.capabilities, list[Check]()
    for name, test, expected, is_exact in (
        ("four texts in one batch", batch, "each text as it is alone", False),
        ("speculative decoding", drafts, "the text of plain decoding", False),
        ("a saved branch", saved, "the tokens that follow where it was saved", True),
        ("the cache's accounting", accounting, "that of llama.cpp", True),
    ):
        try:
            same = test()
        except lb.LlamaBranchError as error:
            checks.append(_failed(name, error))
            continue
        may_differ = not is_exact and not can.batch_invariant
        why = f", which is allowed: {can.batch_invariant_reason}" * may_differ
        checks.append((name, same or may_differ, expected if same else f"not {expected}{why}"))
    return checks


def _speed(ctx: lb.Context, n_texts: int) -> float:
    """Return the tokens per second of ``n_texts`` texts together, decoded in one batch."""
    banned = dict.fromkeys(ctx.model.eog_tokens, -float("inf"))
    greedy = lb.SamplingParams(temperature=0.0, logit_bias=banned)
    engine, count, start = lb.Engine(ctx, None), 0, time.perf_counter()
    while time.perf_counter() - start < SPEED_S:
        request = lb.Request(PROMPT, max_tokens=N_TOKENS, sampling=greedy, n=n_texts)
        count += sum(len(result.tokens) for result in engine.generate([request]))
    return count / (time.perf_counter() - start)


# -- advice ----------------------------------------------------------------------------------------------


def advise(
    machine: Machine,
    n_threads: int,
    *,
    on_gpu: bool,
    flags: frozenset[str] | None = None,
    tools: Sequence[str] | None = None,
) -> list[str]:
    """Return advice: what could be better, and what to do about it.

    ``flags`` are flags of the processor, ``tools`` are programs of GPU drivers. The default for
    both is what this machine has.
    """
    from llamabranch.bench.machine import processor_flags

    flags = processor_flags() if flags is None else flags
    tools = list(filter(shutil.which, GPUS)) if tools is None else tools
    # Compare beginnings: a build lists several features of AVX512, and names of ARM's features
    # vary.
    built = "\n".join(machine.features)
    unused = [
        f for f, name in FEATURES.items() if f in flags and not re.search(rf"^{name}", built, re.M)
    ]
    advice = []
    if unused:
        advice.append(
            f"this processor has {' '.join(unused)}, which llama.cpp was not compiled for: a build made "
            f'on this machine is faster (CMAKE_ARGS="-DGGML_NATIVE=on" {REBUILD})'
        )
    if tools and not on_gpu:
        advice.append(
            f"{tools[0]} is installed, but this llama.cpp was built without its GPU: "
            f'CMAKE_ARGS="{GPUS[tools[0]]}" {REBUILD}'
        )
    if complaint := machine.complaint(n_threads):
        advice.append(complaint)
    if _version("huggingface_hub") == "not installed":
        advice.append(f"downloads from the Hugging Face hub need: {install_command('hub')}")
    return advice
