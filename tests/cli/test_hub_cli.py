"""Models from the hub on the command line: pull, -hf, --download, --offline, models."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serve
from typer.testing import CliRunner, Result

from llamabranch import hub as names
from llamabranch.cli import app

TARGET, DRAFT = "me/tale-target-GGUF", "me/tale-draft-GGUF"
SHORT = ("-n", "4", "--threads", "1", "--n-ctx", "256")
OURS = (
    "HF_TOKEN", "HF_HUB_OFFLINE", "LLAMABRANCH_DOWNLOAD", "LLAMA_CACHE", "OLLAMA_MODELS",
    "MODEL_ENDPOINT", "XDG_CACHE_HOME", "HUGGINGFACE_HUB_CACHE",
)  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has the bundled pair, and empty caches."""
    pytest.importorskip("huggingface_hub", reason="downloads need huggingface_hub")
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE", "LLAMABRANCH_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("llamabranch.hub.caches.PACKAGES", {})
    with serve() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
        for repository, name in ((TARGET, "tale-target"), (DRAFT, "tale-draft")):
            path = names.resolve(name)
            served.add(repository, {path.name: path.read_bytes(), "README.md": b"a tale"})
        yield served


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_pull_prints_the_path_and_nothing_else(hub: FakeHub) -> None:
    result = run("pull", f"{DRAFT}:Q8_0")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{names.resolve(DRAFT)}\n"
    assert result.stderr.startswith(f"downloading {DRAFT}/tale-draft-q8_0.gguf: 1.1 MB, to ")
    again = run("pull", DRAFT, "--offline")
    assert (again.stdout, again.stderr) == (result.stdout, "")
    answer = json.loads(run("pull", DRAFT, "--json").stdout)
    assert answer == {"model": DRAFT, "path": str(names.resolve(DRAFT))}


def test_pull_that_fails_prints_no_path(hub: FakeHub) -> None:
    for arguments, code, said in (
        ((f"{DRAFT}:Q4_0",), 2, "no model with the tag Q4_0"),
        (("me/nothing",), 1, "Repository not found"),
        ((DRAFT, "--offline"), 2, "this is offline"),
        (("nothing",), 2, "no model is called"),
    ):
        result = run("pull", *arguments)
        assert (result.exit_code, result.stdout) == (code, ""), result.stderr
        assert said.lower() in result.stderr.lower()
    error = json.loads(run("pull", "me/nothing", "--json").stdout)["error"]
    assert error["type"] == "DownloadError"


def test_speculate_takes_repositories_and_never_downloads_by_surprise(hub: FakeHub) -> None:
    pair = ("-hf", f"{TARGET}:Q8_0", "-hfd", DRAFT)
    for refusing in ((), ("--no-download",), ("--offline", "--download")):
        result = run("speculate", *pair, *refusing, *SHORT)
        assert result.exit_code == 2, result.stdout
        assert "is not on this machine" in result.stderr
        assert f"llamabranch pull {TARGET}:Q8_0" in result.stderr
    assert not hub.requests
    result = run("speculate", *pair, "--download", *SHORT, "--json", "--seed", "1")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("downloading ") == 2
    bundled = run("speculate", *SHORT, "--json", "--seed", "1")
    assert json.loads(result.stdout)["text"] == json.loads(bundled.stdout)["text"]
    count = len(hub.requests)
    assert run("inspect", TARGET, DRAFT, "--offline").exit_code == 0
    result = run("generate", "--prompts", "a", *pair, "-n", "2", "--offline", "--json")
    assert result.exit_code == 0, result.stderr
    assert len(hub.requests) == count


def test_repository_alone_is_enough(hub: FakeHub) -> None:
    result = run("speculate", "-hf", f"{TARGET}:Q8_0", "--download", *SHORT)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("downloading ") == 1
    assert "draft: suffix+tale-draft\n" in result.stderr


def test_on_a_terminal_a_download_starts_after_its_size_was_shown(hub: FakeHub) -> None:
    command = [sys.executable, "-m", "llamabranch.cli", "inspect", DRAFT, "--json"]
    leader, follower = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower) as process:
        os.close(follower)
        assert process.stdout is not None
        shown = b""
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
        answer = json.loads(process.stdout.read())
    os.close(leader)
    assert process.returncode == 0, shown
    assert answer["models"][0]["path"] == str(names.resolve(DRAFT))
    text = shown.decode()
    assert text.startswith(f"downloading {DRAFT}/tale-draft-q8_0.gguf: 1.1 MB")
    assert "tale-draft-q8_0.gguf" in text.partition("\n")[2]  # the bar


def test_models_lists_the_caches_and_searches_the_hub(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no GGUF model" in run("models", "--local").stdout
    run("pull", DRAFT)
    (model,) = json.loads(run("models", "--local", "--json").stdout)["models"]
    assert model["name"] == f"{DRAFT}/tale-draft-q8_0.gguf"
    assert model["cache"] == "Hugging Face"
    assert model["files"] == [str(names.resolve(DRAFT))]
    assert model["size_bytes"] == names.resolve("tale-draft").stat().st_size
    assert model["name"] in run("models", "--local").stdout
    found = json.loads(run("models", "--search", "tale", "--json").stdout)["models"]
    assert found[0] == {"repository": TARGET, "downloads": 7}
    assert DRAFT in run("models", "--search", "tale").stdout
    assert run("models", "--search", "tale", "--local").exit_code == 2
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("models", "--search", "tale").exit_code == 2


def test_models_names_the_draft_of_each_target() -> None:
    listed = json.loads(run("models", "--json").stdout)["models"]
    drafts = {entry["name"]: entry["draft"] for entry in listed}
    assert drafts["qwen3-4b"] == "qwen3-0.6b"
    assert drafts["qwen3-0.6b"] is None
