"""The package after ``pip install .`` alone, without extras and without the tools of the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = {"starlette", "uvicorn", "uvloop", "huggingface_hub"}
EXTRAS |= {"ray"}
COMMANDS = (
    "generate", "speculate", "chat", "agent", "score", "models", "doctor", "demo",
    "bench", "open", "serve",
)  # fmt: skip
# Imports every module in place; prints those that fail without naming their extra.
IMPORT_ALL = """
import importlib, pathlib, llamabranch
from llamabranch.errors import UnsupportedError
top = pathlib.Path(llamabranch.__file__).parent
for path in sorted(top.rglob("*.py")):
    parts = path.relative_to(top.parent).with_suffix("").parts
    name = ".".join(parts).removesuffix(".__init__")
    if name.endswith("__main__"):
        continue
    try:
        importlib.import_module(name)
    except UnsupportedError as error:
        assert "pip install" in error.hint and "[" in error.hint, (name, error)
        print("extra", name)
    except BaseException as error:
        print("FAILED", name, repr(error))
"""


def _cached_wheel() -> list[str]:
    """Return the wheel of llama-cpp-python that pip built on this machine, if it is still there."""
    version = metadata.version("llama-cpp-python")
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "cache", "list", "--format=abspath", "llama_cpp_python"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wheels = [Path(line) for line in listed.stdout.splitlines()]
    return [str(wheel) for wheel in wheels if f"-{version}-" in wheel.name][:1]


def _index_answers() -> bool:
    """Return whether pip reaches an index: the build backend and the dependencies come from there."""
    asked = [sys.executable, "-m", "pip", "index", "--retries", "0", "--timeout", "10"]
    done = subprocess.run([*asked, "versions", "msgspec"], capture_output=True, check=False)
    return done.returncode == 0


def _documented_installs() -> list[str]:
    """Return the README's lines that install the package itself."""
    readme = (ROOT / "README.md").read_text("utf-8")
    lines = re.findall(r"^\$ (pip install [^#\n]*)", readme, re.MULTILINE)
    return [line.strip() for line in lines if re.search(r"install '?\.", line)]


def test_a_bare_install_runs_every_command(tmp_path: Path) -> None:
    """The README's line, in a new environment; then each command, on the bundled pair."""
    if not (wheel := _cached_wheel()):
        pytest.skip("pip has kept no wheel of llama-cpp-python here: compiling it takes minutes")
    if not _index_answers():
        pytest.skip("no package index can be reached")
    lines = _documented_installs()
    assert lines[0] == "pip install ."
    environment, home = tmp_path / "environment", tmp_path / "home"
    home.mkdir()
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    bin_ = environment / ("Scripts" if os.name == "nt" else "bin")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LLAMABRANCH_"))}
    clean |= {"HOME": str(home), "PATH": f"{bin_}{os.pathsep}{clean['PATH']}", "COLUMNS": "80"}

    def run(*command: object, where: Path = home, answers: str = "", timeout: int = 120) -> str:
        done = subprocess.run(
            list(map(str, command)), cwd=where, env=clean, input=answers, timeout=timeout,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run("pip", "install", "--quiet", *wheel, where=ROOT)
    # Only pip's cache of wheels belongs to the user; it is named as a folder, independent of HOME.
    clean["PIP_CACHE_DIR"] = str(home / "pip")
    run("sh", "-c", f"{lines[0]} --quiet", where=ROOT)
    freeze = run("pip", "freeze").split("\n")
    assert not EXTRAS & {requirement.split("==")[0].replace("-", "_") for requirement in freeze}

    modules = run("python", "-c", IMPORT_ALL).splitlines()
    assert not [line for line in modules if not line.startswith("extra llamabranch.")]
    assert {"extra llamabranch.loom", "extra llamabranch.serve.server"} <= set(modules)

    for command in COMMANDS:
        assert f"  llamabranch {command}" in run("llamabranch", command, "--help")
    text = home / "text.txt"
    text.write_text("The old king looked out of the window and saw his horse. " * 60)
    once = "-t", "1", "-n", "8"
    assert run("llamabranch", "generate", "-p", "Once", *once)
    assert run("llamabranch", "speculate", "-p", "Once", *once)
    assert run("llamabranch", "chat", *once, "-S", "chat_template=chatml", answers="Hello\n/quit\n")
    assert run("llamabranch", "score", "Once upon a time")
    assert "tale-target" in run("llamabranch", "models")
    assert "ok: " in run("llamabranch", "doctor")
    assert run("llamabranch", "demo", timeout=300)
    # A missing extra is named at once, before a model is loaded.
    for command, extra in (("serve", "serve"), ("open", "page")):
        done = subprocess.run(
            ["llamabranch", command, "-m", "no/such/model.gguf"], cwd=home, env=clean,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert f"[{extra}]'" in done.stderr and "starlette" in done.stderr

    for line in lines[1:]:  # the extras that the README names exist
        run("sh", "-c", f"{line} --quiet --dry-run", where=ROOT)
