"""llama.cpp's own tests of its server, from llama-cpp-python's source distribution, against ours.

They are run as they are, with a program that maps the options. The model is the bundled one: the one
that they download is not at hand. ``LLAMA_CPP_SOURCE`` names llama.cpp's sources; without it those are
used that the benchmarks have unpacked, if they have.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("requests", reason="requests is not installed")

HERE = Path(__file__).parent
FILES = ("basic", "tokenize", "security", "metrics", "template", "completion", "chat_completion")
MODEL = "their model is not at hand: another vocabulary, other texts, other numbers of tokens"
# Each test that fails, and why.
DEVIATIONS: dict[str, str] = {}


def source() -> Path:
    """Return the folder of the tests; skip where there is none."""
    version = metadata.version("llama-cpp-python")
    home = Path(os.environ.get("LLAMABRANCH_CACHE") or "~/.cache/llamabranch").expanduser()
    cache = home / "benchmarks" / f"llama-cpp-python-{version}"
    unpacked = cache / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"
    given = Path(os.environ.get("LLAMA_CPP_SOURCE", unpacked))
    if not (given / "tools" / "server" / "tests" / "utils.py").is_file():
        pytest.skip(f"llama.cpp's sources are not at hand ({given}): LLAMA_CPP_SOURCE names them")
    return given


def prepare(root: Path, sources: Path) -> Path:
    """Copy the tests to a folder from which they find everything; return it."""
    folder = root / "tools" / "server" / "tests"
    shutil.copytree(sources / "tools" / "server" / "tests", folder)
    (root / "models").symlink_to(sources / "models")
    (folder / "wget.py").write_text("")
    (folder / "conftest.py").write_text(
        "import pytest\n"
        "from utils import *\n"
        "@pytest.fixture(autouse=True)\n"
        "def stop_server_after_each_test():\n"
        "    yield\n"
        "    for server in set(server_instances):\n"
        "        server.stop()\n"
    )
    program = root / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "llama_server.py"} "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the program that maps options is a shell script")
def test_llama_cpps_own_tests_pass_but_for_the_deviations(tmp_path: Path) -> None:
    folder = prepare(tmp_path, source())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": str(tmp_path / "llama-server"),
        "PORT": str(port),
        "LLAMABRANCH_PROFILE": "0",
    }
    report = tmp_path / "report.xml"
    files = [f"unit/test_{name}.py" for name in FILES]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        f"--junitxml={report}",
        *files,
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    cases = list(ET.parse(report).iter("testcase"))
    failed = {
        f"{case.get('classname', '').removeprefix('unit.test_')}::{case.get('name')}": str(
            next(part for part in case if part.tag in ("failure", "error")).get("message")
        )[:200]
        for case in cases
        if any(part.tag in ("failure", "error") for part in case)
    }
    unexpected = {name: why for name, why in failed.items() if name not in DEVIATIONS}
    assert not unexpected, "\n".join(f"{name}: {why}" for name, why in unexpected.items())
    assert not set(DEVIATIONS) - set(failed), "these pass now"
    assert len(cases) > 130
