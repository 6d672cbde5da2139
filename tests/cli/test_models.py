"""``llamabranch models``: lists, downloads, what a file is; which model drafts for which."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import toys
from commands import COMMAND, answer, on_terminal, run
from fake_hub import FakeHub, running_hub

import llamabranch as lb
from llamabranch import hub as names

TARGET, DRAFT = "me/tale-target-GGUF", "me/tale-draft-GGUF"
SHORT = ("-n", "4", "-c", "256")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has the bundled pair, and empty caches."""
    with running_hub(tmp_path, monkeypatch) as served:
        for repository, name in ((TARGET, "tale-target"), (DRAFT, "tale-draft")):
            path = names.resolve(name)
            served.add(repository, {path.name: path.read_bytes(), "README.md": b"a tale"})
        yield served


OFFLINE = {"HF_HUB_OFFLINE": "1"}
ALLOWED, REFUSED = {"LLAMABRANCH_DOWNLOAD": "1"}, {"LLAMABRANCH_DOWNLOAD": "0"}


def test_pull_prints_the_path_and_nothing_else_or_fails(hub: FakeHub) -> None:
    result = run("models", "pull", f"{DRAFT}:Q8_0")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{names.resolve(DRAFT)}\n"
    assert result.stderr.startswith(f"downloading {DRAFT}/tale-draft-q8_0.gguf: 1.1 MB, to ")
    again = run("models", "pull", DRAFT, **OFFLINE)
    assert (again.stdout, again.stderr) == (result.stdout, "")
    path = str(names.resolve(DRAFT))
    assert answer("models", "pull", DRAFT) == {"model": DRAFT, "path": path}
    for name, code, words, more in (
        (f"{DRAFT}:Q4_0", 2, "no model with the tag Q4_0", {}),
        ("me/nothing", 1, "Repository not found", {}),
        (TARGET, 2, "HF_HUB_OFFLINE is set", OFFLINE),
        ("nothing", 2, "no model is called", {}),
    ):
        result = run("models", "pull", name, **more)
        assert (result.exit_code, result.stdout) == (code, ""), result.stderr
        assert words.lower() in result.stderr.lower()


def test_commands_take_repositories_and_never_download_by_surprise(hub: FakeHub) -> None:
    pair = ("-hf", f"{TARGET}:Q8_0", "-hfd", DRAFT)
    for more in ({}, REFUSED, {**OFFLINE, **ALLOWED}):
        result = run("speculate", *pair, *SHORT, **more)
        assert result.exit_code == 2, result.stdout
        assert "is not on this machine" in result.stderr
        assert f"llamabranch models pull {TARGET}:Q8_0" in result.stderr
    assert not hub.requests
    alone = run("speculate", *pair[:2], *SHORT, **ALLOWED)
    assert alone.exit_code == 0 and "drafts of 4 tokens by suffix" in alone.stderr
    assert alone.stderr.count("downloading ") == 1
    result = run("speculate", *pair, *SHORT, "--json", "-s", "1", **ALLOWED)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("downloading ") == 1
    bundled = answer("speculate", *SHORT, "-s", "1")
    assert json.loads(result.stdout)["text"] == bundled["text"]
    count = len(hub.requests)
    assert run("models", "show", TARGET, DRAFT, **OFFLINE).exit_code == 0
    assert answer("generate", "a", *pair, "-n", "2", **OFFLINE)["failed"] == 0
    assert len(hub.requests) == count


def test_on_a_terminal_a_download_starts_after_its_size_was_shown(hub: FakeHub) -> None:
    command = [*COMMAND, "models", "show", DRAFT, "--json"]
    text, output = on_terminal(command, 100, stdout=subprocess.PIPE)
    assert json.loads(output)["models"][0]["path"] == str(names.resolve(DRAFT))
    assert text.startswith(f"downloading {DRAFT}/tale-draft-q8_0.gguf: 1.1 MB")
    assert "tale-draft-q8_0.gguf" in text.partition("\n")[2]  # the bar


def test_models_lists_every_entry_in_order_with_its_draft_and_whether_it_is_here(
    tmp_path: Path,
) -> None:
    (tmp_path / "Qwen3-0.6B-Q8_0.gguf").touch()
    caches = {"LLAMABRANCH_CACHE": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "none")}
    lines = run("models", **caches).stdout.splitlines()
    columns = ["name", "role", "repository", "file", "licence", "size", "here"]
    assert lines[0].split() == columns
    for line, entry in zip(lines[1:], names.catalogue(), strict=False):
        assert line.startswith(entry.name)
        for field in (entry.role, entry.repository, entry.file, entry.licence, entry.size):
            assert field in line
    assert lines[1].endswith("yes") and "llamabranch models pull" in "".join(lines)
    assert "Made from it when first used: smollm2-135m:Q8_0, " in lines[-1]
    listed = {entry["name"]: entry for entry in answer("models", **caches)["models"]}
    assert (listed["qwen3-4b"]["draft"], listed["qwen3-0.6b"]["draft"]) == ("qwen3-0.6b", None)
    present = {name for name, entry in listed.items() if entry["path"]}
    assert present - {"smollm2-135m"} == {"tale-target", "tale-draft", "tale-eagle", "qwen3-0.6b"}


def test_show_describes_a_model(tmp_path: Path) -> None:
    shown = run("models", "show", "tale-target").stdout
    labels = ("architecture", "n params", "size bytes", "n vocab", "memory type", "can truncate")
    for label in (*labels, "llama", "Q8_0", "5,770,496"):
        assert label in shown
    assert re.search(r"^head kind +-$", shown, re.MULTILINE) and "\n\n\n" not in shown
    (facts,) = answer("models", "show", "tale-target")["models"]
    assert (facts["architecture"], facts["memory_type"]) == ("llama", "attention")
    assert facts["capabilities"]["can_truncate"] is facts["capabilities"]["can_share"] is True
    with lb.Model(names.resolve("tale-target")) as model:
        assert (facts["n_params"], facts["n_vocab"]) == (model.n_params, model.n_vocab)
    other = toys.write_toy(tmp_path / "other.gguf", "mamba")
    (facts,) = answer("models", "show", other)["models"]
    assert facts["capabilities"]["state_bytes"] > 0
    assert facts["capabilities"]["checkpoints"] is True
    assert "a state was put back" in facts["capabilities"]["checkpoints_reason"]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ("tale-draft", "can draft for the first: the same 4096 tokens"),
        ("tale-eagle", "can draft for the first: the head fits"),
        ("bytes", "cannot draft for the first: "),
        ("none", "cannot draft for the first: "),
    ],
)
def test_show_says_whether_the_second_model_can_draft_and_why(
    second: str, sentence: str, tmp_path: Path
) -> None:
    is_toy = not second.startswith("tale-")
    other = toys.write_toy(tmp_path / "other.gguf", vocab=second) if is_toy else second
    shown = run("models", "show", "tale-target", other).stdout
    report = answer("models", "show", "tale-target", other)
    sentences = " ".join(shown.split())
    assert sentence in sentences and f"{report['reason']}." in sentences
    assert report["compatible"] != is_toy
    assert shown.splitlines()[0].split() == ["tale-target", "other.gguf" if is_toy else second]
    assert str(tmp_path) not in shown  # the names of files, not their paths
    kinds = [facts["head_kind"] for facts in report["models"]]
    assert kinds == ["", "eagle3" if second == "tale-eagle" else ""]
    assert bool(report["models"][1]["target_layers"]) == (second == "tale-eagle")


def test_draft_auto_takes_what_is_listed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "draft: tale-draft\n" in run("generate", "a", "--draft", "auto", *SHORT).stderr
    alone = toys.write_toy(tmp_path / "alone.gguf", vocab="bytes")
    copied = run("generate", "-m", alone, "--draft", "auto", "a", *SHORT)
    assert "draft: suffix\n" in copied.stderr
    # It must not be downloaded, so the text is copied.
    monkeypatch.setenv("LLAMABRANCH_DOWNLOAD", "0")
    monkeypatch.setattr(names, "draft_for", lambda _: "qwen3-0.6b")
    refused = run("generate", "-m", alone, "--draft", "auto", "a", *SHORT)
    assert refused.exit_code == 0 and "draft: suffix\n" in refused.stderr
