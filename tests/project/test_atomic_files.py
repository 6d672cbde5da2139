"""Files are replaced in one step, but only regular ones. A device or a pipe is not replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from llamabranch.files import atomic_write


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder, a pipe, a link to itself, or a null device that a test may destroy."""
    path = tmp_path / "place"
    try:
        if request.param == "null":
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            path.write_bytes(b"x")
        elif request.param == "loop":
            path.symlink_to(path)
        else:
            os.mkfifo(path) if request.param == "pipe" else path.mkdir()
    except (AttributeError, OSError) as error:
        pytest.skip(f"no {request.param} can be made here: {error}")
    return path


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path, link, usual = (tmp_path / name for name in ("file", "link", "usual"))
    link.symlink_to("file")
    usual.touch()
    for data in (b"new", b"newer"):
        with atomic_write(link) as file:
            file.write(data)
        assert path.read_bytes() == data
        if data == b"new":  # a new file has the mode of the umask; a changed mode is kept
            assert path.stat().st_mode == usual.stat().st_mode
            path.chmod(0o640)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"newer"
    assert sorted(tmp_path.iterdir()) == [path, link, usual]


@pytest.mark.parametrize("place", ["null", "pipe", "folder", "loop"], indirect=True)
def test_what_is_no_regular_file_is_not_replaced(place: Path) -> None:
    before = place.lstat().st_mode, place.lstat().st_ino
    with pytest.raises(OSError, match=r"regular|directory|symbolic"), atomic_write(place):
        pass
    assert (place.lstat().st_mode, place.lstat().st_ino) == before
