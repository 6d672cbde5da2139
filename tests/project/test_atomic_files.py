"""Files that are replaced in one step: only regular ones, and a device or a pipe stays what it is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamabranch.cli import app
from llamabranch.files import atomic_write, check_writable, read_small
from llamabranch.profile import profile_path, profile_problem, read_entry, write_entries

FEW = ("-n", "4", "--threads", "1", "--n-ctx", "256")
GENERATE = ("generate", "--prompts", "Once", *FEW, "--output")


@pytest.fixture
def null(tmp_path: Path) -> Path:
    """A null device that a test may lose, unlike /dev/null."""
    path = tmp_path / "null"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        path.write_bytes(b"x")
    except (AttributeError, OSError) as error:
        pytest.skip(f"no device can be made here: {error}")
    return path


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to("file")
    for data in (b"new", b"newer"):
        with atomic_write(link) as file:
            file.write(data)
        assert path.read_bytes() == data
        path.chmod(0o640)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"newer"
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    path, usual = tmp_path / "file", tmp_path / "usual"
    usual.touch()
    with atomic_write(path):
        pass
    assert path.stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize("kind", ["null", "fifo", "tmp_path"])
def test_what_is_no_regular_file_is_neither_replaced_nor_read(
    kind: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(kind)
    before = path.stat().st_mode, path.stat().st_ino
    with pytest.raises(OSError, match=r"regular|directory"), atomic_write(path):
        pass
    for call in (check_writable, read_small):
        with pytest.raises(OSError, match=r"regular|directory"):
            call(path)
    assert (path.stat().st_mode, path.stat().st_ino) == before


@pytest.mark.parametrize("kind", ["null", "fifo"])
def test_a_profile_that_is_no_file_is_not_read_and_stays(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """In a process of its own, which opening a pipe would hang."""
    path: Path = request.getfixturevalue(kind)
    before = path.stat().st_mode
    program = """
from llamabranch.profile import *
write_entries([("threads", "a", {"n": 1})])
print(read_entry("threads", "a"), profile_problem())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=60, check=True, capture_output=True, text=True,
        env={**os.environ, "LLAMABRANCH_PROFILE": str(path)},
    )  # fmt: skip
    assert done.stdout == "None not a regular file\n"
    assert path.stat().st_mode == before


def test_the_null_device_is_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMABRANCH_PROFILE", os.devnull)
    assert profile_path() is None  # so nothing is read, and nothing written
    assert profile_problem() is None


def test_a_large_file_is_no_profile_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(path))
    write_entries([("threads", "a", {"n": 1})])
    assert path.stat().st_size == (16 << 20) + 1
    assert read_entry("threads", "a") is None
    assert "large" in str(profile_problem())


def test_generate_writes_to_devices(null: Path) -> None:
    for more in ((), ("--resume",)):
        result = CliRunner().invoke(app, [*GENERATE, str(null), *more])
        assert result.exit_code == 0, result.output
    assert stat.S_ISCHR(null.stat().st_mode)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no /dev/stdout")
@pytest.mark.parametrize("is_pipe", [True, False], ids=["pipe", "file"])
def test_generate_writes_to_standard_output(is_pipe: bool, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as file:
        done = subprocess.run(
            [sys.executable, "-m", "llamabranch.cli", *GENERATE, "/dev/stdout"],
            stdout=subprocess.PIPE if is_pipe else file, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        file.seek(0)
        said = done.stdout if is_pipe else file.read()
    assert done.returncode == 0, done.stderr
    assert said.startswith('{"id": "0"')
    assert said.count("\n") == 1
