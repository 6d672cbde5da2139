"""The tests that depend on numbers, as on other processors: ``python -m tests.elsewhere [-- ARGS]``.

llama.cpp rounds otherwise where it is compiled otherwise. Its kernels for the CPU are built from the
source of the installed llama-cpp-python, with the options of `VARIANTS`, into build/elsewhere (ignored by
git, and kept for the next run), and `pytest -m numbers ARGS` runs on each. Where the source or a compiler
cannot be had it prints why, and is no failure: pip's registry is the only network this needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = metadata.version("llama-cpp-python")
FOLDER = ROOT / "build" / "elsewhere" / f"{VERSION}-{platform.machine()}"
VARIANTS = {
    "avx2": (
        "-DGGML_NATIVE=OFF",
    ),  # x86-64: AVX2, FMA and F16C; another architecture: its baseline
    "nollamafile": ("-DGGML_LLAMAFILE=OFF",),  # other kernels for matrices
}
KERNELS = "ggml-cpu"


class Unavailable(Exception):
    """Something that is needed to build cannot be had here."""


def installed() -> Path:
    """Return the folder of the installed llama.cpp's libraries."""
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"


def source() -> Path:
    """Return llama.cpp's source, that of the installed version, got through pip if need be."""
    folder = FOLDER / "source"
    if folder.exists():
        return folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    package = "llama-cpp-python"
    got = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", package,
         "--no-build-isolation", "--dest", FOLDER, f"{package}=={VERSION}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    archives = list(FOLDER.glob("llama_cpp_python-*.tar.gz"))
    if got.returncode or not archives:
        last = (got.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise Unavailable(f"pip cannot get the source of {package} {VERSION}: {last}")
    unpacked = FOLDER / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archives[0]) as archive:
        archive.extractall(unpacked, filter="data")
    (package_source,) = unpacked.iterdir()
    (package_source / "vendor" / "llama.cpp").rename(folder)
    shutil.rmtree(unpacked)
    archives[0].unlink()
    return folder


def libraries(variant: str) -> Path:
    """Return a copy of the installed libraries with the kernels of a variant, built if need be."""
    build, lib = FOLDER / variant / "build", FOLDER / variant / "lib"
    kernels = [path for path in installed().iterdir() if f"lib{KERNELS}." in path.name]
    if not kernels:
        raise Unavailable(f"no lib{KERNELS} in {installed()} to take the place of")
    if not (FOLDER / variant / "built").exists():
        for tool in ("cmake", os.environ.get("CXX", "c++")):
            if shutil.which(tool) is None:
                raise Unavailable(f"{tool} is not installed")
        off = (
            "BUILD_TESTS",
            "BUILD_EXAMPLES",
            "BUILD_TOOLS",
            "BUILD_SERVER",
            "BUILD_COMMON",
            "CURL",
        )
        options = [f"-DLLAMA_{name}=OFF" for name in off]
        options += ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", *VARIANTS[variant]]
        run("cmake", "-S", str(source()), "-B", str(build), *options)
        run("cmake", "--build", str(build), "--target", KERNELS, "--parallel", str(os.cpu_count()))
        (FOLDER / variant / "built").touch()
    (made,) = (p for p in build.rglob(f"lib{KERNELS}.*") if p.is_file() and not p.is_symlink())
    shutil.rmtree(lib, ignore_errors=True)
    shutil.copytree(installed(), lib)
    for path in kernels:
        shutil.copyfile(made, lib / path.name)
    return lib


def run(*command: str) -> None:
    """Run a command of the build; show what it printed where it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{' '.join(command)} failed")


def fingerprint(**environment: str) -> str:
    """Return what a build computes with, and a digest of logits it computes."""
    script = (
        "import llamabranch as lb; from tests.digests.machine import machine_key; "
        "print(lb.system_info(), machine_key(lb.resolve('tale-target')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def tested(variant: str, pytest_args: Sequence[str]) -> int:
    """Run the tests on a variant; return pytest's exit code."""
    lib = str(libraries(variant))
    found = fingerprint(LLAMA_CPP_LIB_PATH=lib)
    print(f"{variant}: {found}", flush=True)
    if found == fingerprint():
        print(f"{variant}: this is what the installed build is, which `make test` tests")
        return 0
    command = [sys.executable, "-m", "pytest", "-m", "numbers", *pytest_args]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "LLAMA_CPP_LIB_PATH": lib}
    ).returncode


def main() -> int:
    """Test on each variant; return 1 if tests failed on any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only this one")
    parser.add_argument(
        "--build", action="store_true", help="build, and print where, but run nothing"
    )
    parser.add_argument("pytest_args", nargs="*")
    asked = parser.parse_args()
    failed = []
    for variant in asked.variant or VARIANTS:
        try:
            if asked.build:
                print(f"LLAMA_CPP_LIB_PATH={libraries(variant)}")
            elif tested(variant, asked.pytest_args):
                failed.append(variant)
        except Unavailable as reason:
            print(f"{variant}: SKIPPED, nothing was tested: {reason}")
    if failed:
        print(f"failed on: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
