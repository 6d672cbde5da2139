"""The commands that evaluate: tables and JSON, files that are written and refused, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from commands import COMMAND, answer, run

from llamabranch import hub

TARGET, DRAFT = str(hub.resolve(hub.BUNDLED_TARGET)), str(hub.resolve(hub.BUNDLED_DRAFT))
TEXT = (
    "Once upon a time there was a king who had three sons. The eldest was proud, the second was lazy, "
    "and the youngest was kind.\n"
) * 12


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, "utf-8")
    return path


def test_perplexity_saves_what_kld_compares(text: Path, tmp_path: Path) -> None:
    logits = tmp_path / "base.logits"
    shared = ("--perplexity", text, "-c", 64, "--chunks", 3)
    report = answer("eval", *shared, "--save-logits", logits)
    assert report["n_done"] == report["n_chunks"] == 3 and report["n_tokens"] == 93
    assert report["kv_type"] == "f16" and report["window"] == 64
    assert "losses" not in report
    plain = run("eval", *shared)
    assert f"{report['perplexity']:.4f}" in plain.stdout and "3 of 3" in plain.stdout
    against = ("eval", "--against", logits)
    means = [answer(*against)["mean"], answer(*against, "-m", DRAFT)["mean"]]
    assert abs(means[0]["value"]) < 1e-4 < 0.1 < means[1]["value"]
    shown = run(*against, "-m", DRAFT).stdout
    assert f"{means[1]['value']:.6f}" in shown and "percentile" in shown


def test_results_are_kept(text: Path, tmp_path: Path) -> None:
    kept, logits = tmp_path / "kept.json", tmp_path / "base.logits"
    shared = ("eval", "--perplexity", text, "-c", 64)
    report = answer(*shared, "-o", kept, "--save-logits", logits)
    data = json.loads(kept.read_text())
    assert data["kind"] == "perplexity" and data["perplexity"] == report["perplexity"]
    assert len(data["losses"]) == data["n_done"] == data["n_chunks"]
    assert run(*shared, "-o", kept).exit_code == 2  # it is there already
    compared = tmp_path / "kld.json"
    first = answer("eval", "--against", logits, "-m", DRAFT, "-o", compared)
    data = json.loads(compared.read_text())
    assert data["kind"] == "kld" and data["mean"] == first["mean"]
    assert len(data["rows"]) == data["n_chunks"]


def against(folder: Path) -> list[object]:
    """Return a command that compares the draft model and a copy of it with the target."""
    copy = folder / "copy.gguf"
    copy.symlink_to(DRAFT)
    arguments = ("eval", "-m", DRAFT, "-m", copy, "--against", TARGET, "-c", 64, "--perplexity")
    return [*arguments]


def test_quants_shows_files_side_by_side(text: Path, tmp_path: Path) -> None:
    kept = tmp_path / "quants.json"
    shared = (*against(tmp_path), text, "--chunks", 2)
    report = answer(*shared, "-o", kept)
    rows = report["models"]
    copy = str(tmp_path / "copy.gguf")
    assert report["base"] == TARGET and [row["model"] for row in rows] == [TARGET, DRAFT, copy]
    assert rows[0]["kl"] == 0.0 < rows[1]["kl"] == rows[2]["kl"] and rows[1]["same_top"] < 1.0
    assert rows[0]["perplexity"] < rows[1]["perplexity"]
    assert rows[0]["size_bytes"] == Path(TARGET).stat().st_size
    assert not list(tmp_path.glob("*.logits"))
    shown = run(*shared).stdout
    assert f"{rows[1]['kl']:.5f}" in shown
    assert json.loads(kept.read_text())["models"] == rows
    assert run(*shared, "-o", kept).exit_code == 2  # it is there already


def test_quants_says_what_was_made_from_what(text: Path, tmp_path: Path) -> None:
    """The names of quantized files say which model they were made from. The files need not exist."""
    quantized = tmp_path / "smollm2-135m-Q8_0.gguf"
    quantized.symlink_to(TARGET)
    models = ("-m", DRAFT, "-m", TARGET, "--against", quantized)
    shared = ("eval", *models, "--perplexity", text, "-c", 64, "--chunks", 1)
    assert "made from" in run(*shared).stdout
    report = answer(*shared)
    assert report["base"] == str(quantized)
    assert [entry["made_from"] for entry in report["models"]] == ["smollm2-135m", None, None]
    by_size = [str(quantized), TARGET, DRAFT]
    assert [entry["model"] for entry in report["models"]] == by_size
    assert hub.made_from("smollm2-135m:bf16") == "smollm2-135m"
    assert hub.made_from("smollm2-135m") is hub.made_from("tale-target") is None


def test_quants_that_is_interrupted_keeps_the_models_that_are_done(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    kept = tmp_path / "quants.json"
    monkeypatch.setattr("llamabranch.eval.divergence", interrupt)
    result = run(*against(tmp_path), text, "--chunks", 1, "-o", kept)
    assert result.exit_code == 130 and Path(TARGET).name in result.stdout
    assert [row["model"] for row in json.loads(kept.read_text())["models"]] == [TARGET]


def test_a_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    text, kept = tmp_path / "long.txt", tmp_path / "kept.json"
    text.write_text(TEXT * 300)  # it would take half a minute, and is interrupted after a second
    command = [
        *COMMAND, "eval", "--perplexity", text, "-c", "64", "-S", "n_batch=64", "-m", "tale-target",
        "-t", "1", "-o", kept, "--save-logits", tmp_path / "logits",
    ]  # fmt: skip
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), **streams) as process:
        while not (tmp_path / "logits").exists() or (tmp_path / "logits").stat().st_size < 10**7:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    assert process.returncode == 130
    data = json.loads(kept.read_text())
    assert 0 < data["n_done"] < data["n_chunks"]
    assert f"{data['n_done']} of {data['n_chunks']}" in out


def test_carriage_returns_of_a_text_are_measured(tmp_path: Path) -> None:
    """Python's text files replace them by newlines, which are other tokens."""
    unix, dos = tmp_path / "unix.txt", tmp_path / "dos.txt"
    unix.write_bytes(b"Once upon a time\nthere was a king.\n" * 8)
    dos.write_bytes(b"Once upon a time\r\nthere was a king.\r\n" * 8)
    read = [answer("eval", "--perplexity", path, "-c", "16")["n_tokens"] for path in (unix, dos)]
    assert read[0] < read[1]
    for path in (unix, dos):
        text = path.read_bytes().decode().removesuffix("\n")
        (item,) = answer("score", "-f", path)["items"]
        assert item["scores"][0]["text"] == text
        (result,) = answer("generate", "-f", path, "-n", "1")["results"]
        assert result["prompt"] == text
