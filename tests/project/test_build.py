"""The wheel and the sdist: what is in them, with a compiler and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from llamabranch.native import core

ROOT = Path(__file__).parents[2]
DATA = {
    "llamabranch/data/models.txt",
    "llamabranch/data/MODEL_CARD.md",
    "llamabranch/data/tale-target-q8_0.gguf",
    "llamabranch/data/tale-draft-q8_0.gguf",
    "llamabranch/py.typed",
    "llamabranch/native/core.py",
    *(str(file.relative_to(ROOT)) for file in (ROOT / "llamabranch").glob("*/app/*")),
}

pytest.importorskip("scikit_build_core")
if shutil.which("cmake") is None:
    pytest.skip("no CMake", allow_module_level=True)


def _python(code: str, where: Path, **environment: str) -> list[str]:
    """Run a program and return the lines it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=where, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def _build(kind: str, source: Path, to: Path, **environment: str) -> Path:
    """Call the build backend as pip does, without a network; return what it made."""
    code = f"from scikit_build_core.build import build_{kind} as b; print(b({str(to)!r}))"
    return to / _python(code, source, **environment)[-1]


def _names_and_core(wheel: Path, to: Path) -> tuple[set[str], str]:
    """Return the files of a wheel, and which core it uses when it is unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to)
        names = set(archive.namelist())
    assert names >= DATA
    # The finder of an editable install comes before PYTHONPATH.
    code = (
        "import sys; "
        "sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]; "
        "import llamabranch; print(llamabranch.__file__); print(llamabranch.system_info())"
    )
    where, output = _python(code, to, PYTHONPATH=str(to), LLAMABRANCH_CORE="1")
    assert where.startswith(str(to))
    return names, output.split("llamabranch core: ")[1]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_wheel_from_the_sdist_holds_the_core(tmp_path: Path) -> None:
    with tarfile.open(_build("sdist", ROOT, tmp_path)) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    wheel = _build("wheel", source, tmp_path)
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    names, described = _names_and_core(wheel, tmp_path / "unpacked")
    assert f"llamabranch/native/lib/{core.LIBRARY.name}" in names
    assert not [name for name in names if name.startswith(("tests/", "CMake"))]
    assert described.startswith("compiled (")


def test_without_a_compiler_the_wheel_is_pure_python(tmp_path: Path) -> None:
    wheel = _build("wheel", ROOT, tmp_path, CC=str(tmp_path / "no-compiler"))
    assert wheel.name.endswith("-py3-none-any.whl")
    names, described = _names_and_core(wheel, tmp_path / "unpacked")
    assert not [name for name in names if "_core" in name]
    assert described == "not built: NumPy"
