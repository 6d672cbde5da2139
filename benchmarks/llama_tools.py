"""llama.cpp's own programs, built from the sources of the installed llama-cpp-python.

Both sides then run the same llama.cpp, built by the same compiler with the same options (``CMAKE_ARGS``
is passed on, as pip does). Only the program around it differs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import llamabranch as lb
from llamabranch.bench.machine import Machine
from llamabranch.bench.timing import Timing

from .report import Settings

__all__ = ["PERPLEXITY", "SERVER", "ToolError", "has_amx", "lookup", "parse_report", "program"]

LOOKUP, PERPLEXITY, SERVER = "llama-lookup", "llama-perplexity", "llama-server"
_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_SERVER=ON",
)
_SECONDS = 1800
_TRIES = 16  # the last lines of a program's log may be missing


class ToolError(RuntimeError):
    """A program is missing, failed, or printed something that cannot be parsed."""


def lookup(
    settings: Settings, model: Path, prompt: str, *, temperature: float, seed: int, k: int = 15
) -> Timing:
    """Run ``llama-lookup``, which drafts at most ``k`` tokens from the n-grams of prompt and output.

    It runs again until its output has the report, which a busy machine may cut off.

    Raises:
        ToolError: the program is missing or failed, or never printed a report.
    """
    path = program(LOOKUP, settings.cache, settings.peers_bin)
    command = [
        path, "-m", model, "--spec-draft-n-max", k, "-p", prompt, "-n", settings.tokens,
        "-c", 1024, "--temp", temperature, "-s", seed, "-t", settings.threads,
    ]  # fmt: skip
    for _ in range(_TRIES - 1):
        try:
            return parse_report(_call(*command))
        except ToolError:
            continue
    return parse_report(_call(*command))


def parse_report(text: str) -> Timing:
    """Parse the report that ``llama-lookup`` prints at its end.

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
    stats = lb.speculative.SpeculativeStats(
        num_drafts=n - int(accepted[1]),
        num_draft_tokens=int(drafted[1]),
        num_accepted_tokens=int(accepted[1]),
        num_emitted_tokens=n,
    )
    return Timing(n, n / speed, None, stats)


# -- building --------------------------------------------------------------------------------------


def has_amx() -> bool:
    """Return True if llama.cpp would use AMX. The library turns it off, so its peers must, too."""
    return "AMX_INT8 = 1" in lb.system_info()


def program(name: str, cache: Path, folder: Path | None = None) -> Path:
    """Return the path of a program. If it is missing, build it: about five minutes on two cores.

    Building downloads the source distribution, and CMake if that is missing.

    Args:
        name: "llama-server" or another target of llama.cpp's CMake files.
        cache: the folder in which it is built.
        folder: use the program in this folder, and build nothing.

    Raises:
        ToolError: a step failed, or the program is not in ``folder``.
    """
    if folder is not None:
        path = shutil.which(name, path=os.fspath(folder))
        if path is None:
            raise ToolError(f"{folder} has no {name}")
        return Path(path)
    home = cache / f"llama-cpp-python-{metadata.version('llama-cpp-python')}"
    bin_folder = os.fspath(home / "build" / "bin")
    path = shutil.which(name, path=bin_folder)
    if path is None:
        home.mkdir(parents=True, exist_ok=True)
        _report_progress(f"building {name} in {home}: about five minutes on two cores")
        _compile(home, name)
        path = shutil.which(name, path=bin_folder)
    if path is None:
        raise ToolError(f"the build made no {name}")
    return Path(path)


def _compile(home: Path, name: str) -> None:
    source = _source(home, metadata.version("llama-cpp-python"))
    cmake, generator = _cmake(home)
    options = [*_CMAKE, *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
    if has_amx():
        amx_flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
        options += [f"-DCMAKE_C_FLAGS={amx_flags}", f"-DCMAKE_CXX_FLAGS={amx_flags}"]
    _call(cmake, "-S", source, "-B", home / "build", *generator, *options)
    jobs = Machine.now().cores
    _call(cmake, "--build", home / "build", "--parallel", jobs, "--target", name)


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


def _call(*command: object) -> str:
    """Run a command; return what it printed."""
    text = [str(part) for part in command]
    done = subprocess.run(
        text, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
    )
    if done.returncode != 0:
        tail = (done.stdout + done.stderr).strip()[-1500:]
        raise ToolError(f"{shlex.join(text)} failed:\n{tail}")
    return done.stderr + done.stdout


def _report_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
