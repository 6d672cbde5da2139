"""Files that commands write: nothing is overwritten; a full disk leaves no part of a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from llamabranch import hub
from llamabranch.cli import app

COMMAND = [sys.executable, "-m", "llamabranch.cli"]
FEW = ("-n", "4", "--threads", "1", "--n-ctx", "256")
WRITERS = {
    "speculate --html": ("speculate", *FEW, "--html"),
    "search --html": ("search", "Once", *FEW, "--html"),
    "generate --output": ("generate", "--prompts", "Once", *FEW, "--output"),
}
BENCH = ("bench", "--quick", "--draft", "none", "--threads", "1", "--n-ctx", "256", "--output")
writers = pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refusal(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


@writers
def test_file_that_is_there_is_kept(command: tuple[str, ...], tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(before := hub.resolve("tale-draft").read_bytes())
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    for path in (model, link):
        assert f"{path} already exists" in refusal(run(*command, str(path)))
    assert model.read_bytes() == before
    assert link.is_symlink()


@writers
@pytest.mark.parametrize("place", ["missing/file", "dangling", "folder"])
def test_place_that_cannot_be_written_is_refused_before_a_model_loads(
    command: tuple[str, ...], place: str, tmp_path: Path
) -> None:
    path, aim = tmp_path / place, tmp_path / "aim"
    if place == "dangling":
        path.symlink_to(aim)
    elif place == "folder":
        path.mkdir()
    said = refusal(run(*command, str(path), "--target", str(tmp_path / "no-such-model.gguf")))
    assert str(path) in said
    assert "no-such-model" not in said
    assert not aim.exists()


def test_bench_keeps_the_files_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "speed.png").write_bytes(b"an image")
    said = refusal(run(*BENCH, str(tmp_path), "--target", str(tmp_path / "no-such-model.gguf")))
    assert "speed.png already exists" in said
    assert [path.name for path in tmp_path.iterdir()] == ["speed.png"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on the size of files")
@pytest.mark.parametrize(
    ("command", "name", "result"),
    [
        (WRITERS["speculate --html"], "page.html", "text"),
        (WRITERS["search --html"], "page.html", "hypotheses"),
        (BENCH, "bench.json", "plain"),
    ],
    ids=["speculate --html", "search --html", "bench --output"],
)
def test_full_disk_is_named_and_loses_no_result(
    command: tuple[str, ...], name: str, result: str, tmp_path: Path
) -> None:
    """The process may write 64 bytes to a file; what comes after fails, as on a full disk."""
    resource = pytest.importorskip("resource")
    path = tmp_path / name

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))

    given = str(tmp_path if command is BENCH else path)
    done = subprocess.run(
        [*COMMAND, *command, given, "--json"],
        preexec_fn=limit, capture_output=True, text=True, check=False,
        env={**os.environ, "LLAMABRANCH_PROFILE": "0"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert f"error: cannot write {path}: " in done.stderr
    assert "bug" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert json.loads(done.stdout)[result]


def test_empty_file_device_and_new_file_are_written(tmp_path: Path) -> None:
    empty = tmp_path / "empty.html"
    empty.touch()
    for path in (empty, Path(os.devnull), tmp_path / "new.html"):
        result = run(*WRITERS["search --html"], str(path))
        assert result.exit_code == 0, result.stderr
    assert empty.read_text("utf-8").startswith("<!doctype html>")
    assert (tmp_path / "new.html").read_text("utf-8").startswith("<!doctype html>")
