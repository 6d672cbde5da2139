"""llama.cpp's own programs, built from the sources of the installed llama-cpp-python.

Both sides then run the same llama.cpp, built by the same compiler with the same options (``CMAKE_ARGS``
is passed on, as pip does). Only the program around it differs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import llamabranch as lb
from llamabranch.bench.timing import Timing

__all__ = [
    "LlamaTools",
    "ToolError",
    "build",
    "build_perplexity",
    "build_server",
    "has_amx",
    "parse_report",
]

SERVER = "llama-server"
PERPLEXITY = "llama-perplexity"
PROGRAMS = ("llama-bench", "llama-speculative-simple", "llama-lookup", "llama-batched-bench")
_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)
_SECONDS = 1800
_TRIES = 16  # the last lines of the programs' log may be missing


class ToolError(RuntimeError):
    """A program is missing, failed, or printed something that cannot be parsed."""


class LlamaTools:
    """A folder with llama.cpp's programs.

    Raises:
        ToolError: a program is missing.
    """

    def __init__(self, folder: Path, *, threads: int, n_ctx: int) -> None:
        missing = [name for name in PROGRAMS if _program(folder, name) is None]
        if missing:
            raise ToolError(f"{folder} has no {', '.join(missing)}")
        self._folder = folder
        self._threads = threads
        self._n_ctx = n_ctx
        self.build_commit = ""  # set by the first ``bench``

    def bench(self, model: Path, n: int, kv_type: str = "f16") -> Timing:
        """Run ``llama-bench``: n decodes from an empty cache, after a warm-up; it samples nothing."""
        done = self._run(
            "llama-bench", "-m", model, "-p", 0, "-n", n, "-r", 1, "-t", self._threads,
            "-ctk", kv_type, "-ctv", kv_type, "-o", "json",
        )  # fmt: skip
        try:
            report = json.loads(done.stdout)[0]
            self.build_commit = str(report["build_commit"])
            return Timing(int(report["n_gen"]), float(report["samples_ns"][0]) / 1e9)
        except (ValueError, LookupError, TypeError) as error:
            raise ToolError(
                f"cannot parse the output of llama-bench: {done.stdout[-500:]!r}"
            ) from error

    def speculative(
        self,
        target: Path,
        draft: Path,
        prompt: str,
        n: int,
        *,
        k: int,
        temperature: float,
        seed: int,
    ) -> Timing:
        """Run ``llama-speculative-simple`` with a draft model and drafts of at most ``k`` tokens."""
        return self._report(
            "llama-speculative-simple", "-m", target, "-md", draft, "--spec-type", "draft-simple",
            "--spec-draft-n-max", k, *self._generation(prompt, n, temperature, seed),
        )  # fmt: skip

    def lookup(
        self, target: Path, prompt: str, n: int, *, k: int, temperature: float, seed: int
    ) -> Timing:
        """Run ``llama-lookup``: drafts from the n-grams of prompt and output."""
        return self._report(
            "llama-lookup", "-m", target, "--spec-draft-n-max", k,
            *self._generation(prompt, n, temperature, seed),
        )  # fmt: skip

    def batched(
        self,
        model: Path,
        streams: Sequence[int],
        *,
        n_prompt: int,
        n: int,
        unified: bool,
        kv_type: str = "f16",
        with_prompts: bool = False,
    ) -> Mapping[int, Timing]:
        """Run ``llama-batched-bench``: n decodes for each number of streams after a shared prompt.

        ``with_prompts``: each stream has a prompt of its own, and the time includes them.
        """
        cells = n_prompt + n * max(streams)
        if (
            not unified or with_prompts
        ):  # each stream has its own part of the cache, or its own prompt
            cells = (n_prompt + n) * max(streams)
        command = (
            "llama-batched-bench", "-m", model, "-c", -(-cells // 256) * 256 + 256 * max(streams),
            "-npp", n_prompt, "-ntg", n, "-npl", ",".join(map(str, streams)),
            "-ctk", kv_type, "-ctv", kv_type, "-t", self._threads, "--output-format", "jsonl",
            *(() if with_prompts else ("-pps",)), *(("-kvu",) if unified else ()),
        )  # fmt: skip
        time = "t" if with_prompts else "t_tg"
        for _ in range(_TRIES):
            output = self._run(*command).stdout
            lines = [json.loads(x) for x in output.splitlines() if x.startswith("{")]
            timings = {int(x["pl"]): Timing(int(x["pl"]) * int(x["tg"]), x[time]) for x in lines}
            if set(timings) == set(streams):
                return timings
        raise ToolError(f"cannot parse the output of llama-batched-bench: {output[-500:]!r}")

    def _report(self, *command: object) -> Timing:
        """Run a program until its output has the report, which a busy machine may cut off."""
        for _ in range(_TRIES - 1):
            done = self._run(*command)
            try:
                return parse_report(done.stderr + done.stdout)
            except ToolError:
                continue
        done = self._run(*command)
        return parse_report(done.stderr + done.stdout)

    def _generation(
        self, prompt: str, n: int, temperature: float, seed: int
    ) -> Sequence[str | int | float]:
        return (
            "-p", prompt, "-n", n, "-c", self._n_ctx, "--temp", temperature, "-s", seed,
            "-t", self._threads,
        )  # fmt: skip

    def _run(self, name: object, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(_program(self._folder, str(name))), *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
        if done.returncode != 0:
            raise ToolError(f"{shlex.join(command)} failed: {done.stderr.strip()[-800:]}")
        return done


def parse_report(text: str) -> Timing:
    """Parse the report that ``llama-speculative-simple`` or ``llama-lookup`` prints at its end.

    A round yields its accepted tokens and one more, so there are (tokens - accepted) rounds.

    Raises:
        ToolError: ``text`` has no report.
    """
    decoded = re.search(
        r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds, speed:\s+([\d.]+) t/s", text
    )
    drafted = re.search(r"n_drafted\s+= (\d+)", text)
    accepted = re.search(r"n_accept\s+= (\d+)", text)
    if decoded is None or drafted is None or accepted is None:
        raise ToolError(f"no report in {text[-500:]!r}")
    n, speed = int(decoded[1]), float(decoded[3])  # the seconds are rounded, the speed is not
    stats = lb.SpeculativeStats(
        num_drafts=n - int(accepted[1]),
        num_draft_tokens=int(drafted[1]),
        num_accepted_tokens=int(accepted[1]),
        num_emitted_tokens=n,
    )
    return Timing(n, n / speed, None, stats)


def _program(folder: Path, name: str) -> Path | None:
    path = shutil.which(name, path=os.fspath(folder))
    return None if path is None else Path(path)


# -- building --------------------------------------------------------------------------------------


def has_amx() -> bool:
    """Return True if llama.cpp would use AMX. The library turns it off, so its peers must, too."""
    return "AMX_INT8 = 1" in lb.system_info()


def build_server(cache: Path, folder: Path | None = None) -> Path:
    """Return the path of ``llama-server``. If it is missing, build it: five minutes on two cores.

    Args:
        cache: the folder in which it is built.
        folder: use the program in this folder, and build nothing.

    Raises:
        ToolError: a step failed, or the program is not in ``folder``.
    """
    if folder is not None:
        existing = _program(folder, SERVER)
        if existing is None:
            raise ToolError(f"{folder} has no {SERVER}")
        return existing
    bin_folder = build(cache)
    program = _program(bin_folder, SERVER)
    if program is None:
        _report_progress(f"building {SERVER}")
        _compile(bin_folder.parent.parent, "-DLLAMA_BUILD_SERVER=ON", targets=[SERVER])
        program = _program(bin_folder, SERVER)
    if program is None:
        raise ToolError(f"the build made no {SERVER}")
    return program


def build_perplexity(cache: Path, folder: Path | None = None) -> Path:
    """Return the path of ``llama-perplexity``. If it is missing, build it: five minutes on two cores.

    Arguments and errors are those of `build_server`.
    """
    if folder is not None:
        existing = _program(folder, PERPLEXITY)
        if existing is None:
            raise ToolError(f"{folder} has no {PERPLEXITY}")
        return existing
    home = cache / f"llama-cpp-python-{metadata.version('llama-cpp-python')}"
    program = _program(home / "build" / "bin", PERPLEXITY)
    if program is None:
        home.mkdir(parents=True, exist_ok=True)
        _report_progress(f"building {PERPLEXITY} in {home}: about five minutes on two cores")
        _compile(home, *_CMAKE, targets=[PERPLEXITY])
        program = _program(home / "build" / "bin", PERPLEXITY)
    if program is None:
        raise ToolError(f"the build made no {PERPLEXITY}")
    return program


def build(cache: Path) -> Path:
    """Return the folder of the programs in ``cache``; build them if they are missing.

    Building takes about five minutes. It downloads the source distribution, and CMake if that is missing.

    Raises:
        ToolError: a step failed.
    """
    version = metadata.version("llama-cpp-python")
    home = cache / f"llama-cpp-python-{version}"
    bin_folder = home / "build" / "bin"
    if all(_program(bin_folder, name) for name in PROGRAMS):
        return bin_folder
    home.mkdir(parents=True, exist_ok=True)
    _report_progress(f"building llama.cpp's programs in {home}: about five minutes on two cores")
    _compile(home, *_CMAKE, targets=PROGRAMS)
    missing = [name for name in PROGRAMS if _program(bin_folder, name) is None]
    if missing:
        raise ToolError(f"the build made no {', '.join(missing)}")
    return bin_folder


def _compile(home: Path, *flags: str, targets: Sequence[str]) -> None:
    source = _source(home, metadata.version("llama-cpp-python"))
    cmake, generator = _cmake(home)
    options = [*flags, *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
    if has_amx():
        amx_flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
        options += [f"-DCMAKE_C_FLAGS={amx_flags}", f"-DCMAKE_CXX_FLAGS={amx_flags}"]
    _call(cmake, "-S", source, "-B", home / "build", *generator, *options)
    jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    _call(cmake, "--build", home / "build", "--parallel", jobs or 1, "--target", *targets)


def _source(home: Path, version: str) -> Path:
    """Return llama.cpp's sources as that version of llama-cpp-python ships them."""
    source = home / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"
    if (source / "CMakeLists.txt").is_file():
        return source
    archive = home / f"llama_cpp_python-{version}.tar.gz"
    if not archive.is_file():
        _report_progress(f"downloading the sources of llama-cpp-python {version}")
        _call(
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
            "--dest", home, f"llama-cpp-python=={version}",
        )  # fmt: skip
    if not archive.is_file():
        raise ToolError(f"pip left no {archive.name} in {home}")
    with tarfile.open(archive) as opened:
        if hasattr(tarfile, "data_filter"):
            opened.extractall(home, filter="data")
        else:
            opened.extractall(home)
    return source


def _cmake(home: Path) -> tuple[Path, Sequence[str]]:
    """Return CMake and its generator arguments: the installed one, or a copy from PyPI."""
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
    if cmake is not None:
        return Path(cmake), ("-G", "Ninja") if ninja else ()
    environment = home / "cmake"
    _report_progress("installing CMake and Ninja into the cache")
    _call(sys.executable, "-m", "venv", environment)
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    _call(scripts / "python", "-m", "pip", "install", "--quiet", "cmake", "ninja")
    return scripts / "cmake", ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}")


def _call(*command: object) -> None:
    text = [str(part) for part in command]
    done = subprocess.run(text, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        tail = (done.stdout + done.stderr).strip()[-1500:]
        raise ToolError(f"{shlex.join(text)} failed:\n{tail}")


def _report_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
