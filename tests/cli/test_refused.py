"""Calls that are refused: one line and a hint, the right exit code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import run, said_by
from toys import write_toy

from llamabranch import hub

# Arguments and a part of the message.
WRONG: tuple[tuple[tuple[str, ...], str], ...] = (
    (("no-such-command",), "no-such-command"),
    (("speculate", "--no-such-option"), "--no-such-option"),
    (("speculate", "--draft-length", "four"), "draft_k must be 'auto' or from 0"),
    (("speculate", "--draft-length", "-1"), "draft_k must be from 0 to"),
    (("speculate", "-m", ""), "no model is called ''"),
    (("speculate", "--draft", "suffix+"), "not a chain of drafters"),
    (("speculate", "--draft", "none+suffix"), "not a chain of drafters"),
    (("speculate", "--draft", "suffix+tale-dratf"), "did you mean tale-draft?"),
    (("speculate", "--draft", "16"), "no model is called"),
    (("speculate", "-S", "rule=best"), "unknown rule 'best'"),
    (("speculate", "-S", "hotness=3"), "no setting 'hotness'"),
    (("agent", "a", "-m", "tale-target", "-S", "n=4"), "no setting 'n'"),
    (("score", "a", "-m", "tale-target", "-S", "rule=seeded"), "no setting 'rule'"),
    (("speculate", "-S", "typical_p"), "takes NAME=VALUE"),
    (("speculate", "-S", "typical_p=x"), "typical_p"),
    (("speculate", "--temperature", "1e5"), "temperature"),
    (("speculate", "-n", "-3"), "max_tokens must be at least"),
    (("speculate", "--target", "tale-targte"), "did you mean tale-target?"),
    (("speculate", "--target", "absent.gguf", "--draft", "none"), "no file absent.gguf"),
    (("speculate", "--grammar", "absent.gbnf"), "cannot read absent.gbnf"),
    (("speculate", "--grammar", "a", "--json-schema", "{}"), "exclude each other"),
    (("speculate", "--grammar", "/(a/"), "unclosed group"),
    (("speculate", "--json-schema", '{"type": 5}'), "type must be"),
    (("speculate", "--json-schema", "{"), "schema"),
    (("speculate", "--kv-type", "f7"), "f7"),
    (("speculate", "-ctk", "q8_0", "-fa", "0"), "needs flash attention"),
    (("speculate", "-fa", "maybe"), "unknown --flash-attn"),
    (("speculate", "-ngl", "many"), "many"),
    (("generate", "--seed", "1"), "there is no prompt"),
    (("generate", "--prompts"), "there is no prompt"),
    (("generate", "--input", "no-such-file.jsonl"), "cannot read no-such-file.jsonl"),
    (("generate", "a", "--draft", "no-such-model"), "no-such-model"),
    (("score",), "there is no text"),
    (("score", "--file", "missing.txt"), "cannot read missing.txt"),
    (("bench", "--target", "tale-targte"), "did you mean tale-target?"),
    (("bench", "--draft", "suffix+"), "not a chain of drafters"),
    (("bench", "-m", "tale-target", "--lengths", ""), "--lengths"),
    (("bench", "-m", "tale-target", "--lengths", "1,8"), "--lengths"),
    (("bench", "-m", "tale-target", "--lengths", "many"), "--lengths"),
    (("bench", "-m", "tale-target", "--lengths", "6000"), "--lengths"),
    (("bench", "-m", "tale-target", "--lengths", "64,2k"), "--lengths 64,2k: use numbers from 2"),
    (("bench", "--runs", "0"), "runs"),
    (("doctor", "-t", "1000"), "--threads"),
    (("serve", "-m", "tale-target", "--api-key", ""), "an API key must be"),
    (("serve", "-m", "tale-target", "--api-key", " ,"), "an API key must be"),
    (("models", "delete"), "models cannot do 'delete'"),
    (("models", "show", "a", "b", "c"), "models show MODEL [DRAFT]"),
    (("models", "show", "tale-dratf"), "did you mean tale-draft?"),
    (("open", "--no-browser", "--file", ""), "--file has no name"),
    (("serve", "--limit", "max_quue=3"), "did you mean max_queue?"),
    (("serve", "-np", "0"), "parallel"),
    (("agent", "a", "-m", "tale-target", "--cache-dir", os.devnull), "cache_dir"),
    (("agent", "a", "-m", "tale-target", "-S", "cache_size=8 apples"), "cache_size"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "complaint"), WRONG, ids=[" ".join(each[0])[:60] for each in WRONG]
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...], complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    "command",
    [("speculate",), ("generate", "a"), ("bench", "--draft", "none"), ("models", "show", "MODEL")],
    ids=lambda c: c[0],
)
def test_failure_exits_with_1_in_one_line_and_v_shows_where(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "garbage.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    words = [str(path) if word == "MODEL" else word for word in command]
    words += [] if command[0] == "models" else ["-m", str(path)]
    result = run(*words)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert sum(not line.startswith("hint: ") for line in result.stderr.splitlines()) == 1
    assert "garbage.gguf" in result.stderr and run(*words, "--json").stdout == ""
    shown = run(*words, "-v")
    assert shown.exit_code == 1 and "Traceback" in shown.stderr and "ModelLoadError" in shown.stderr


def test_bug_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[hub.CatalogueEntry]:
        raise ZeroDivisionError("by accident")

    monkeypatch.setattr(hub, "catalogue", fail)
    result = run("models")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: unexpected ZeroDivisionError: by accident\n")
    assert "Traceback" not in result.stderr


def test_models_and_prompts_that_cannot_be_used_fail_with_a_reason(tmp_path: Path) -> None:
    other = write_toy(tmp_path / "none.gguf", vocab="none")
    result = run("speculate", "--draft", other, "-n", "4")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    (tmp_path / "empty.gguf").touch()
    result = run("speculate", "--target", tmp_path / "empty.gguf")
    assert result.exit_code == 1 and "the file is empty" in result.stderr
    for command in (("speculate", "Hi", "--chat"), ("chat", "-p", "Hi", "-m", "tale-target")):
        assert "no chat template" in said_by(*command)
    for name in ("speculate", "generate", "score"):
        result = run(name, "The king was old. " * 400, "-c", "256")
        assert result.exit_code == 1 and result.stdout == ""
        assert "error: " in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("depth", [20, 200, 20_000])
def test_schema_that_nests_too_deep_is_wrong_usage(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    inside, ends = '{"type": "array", "items": ' * depth, "}" * depth
    path.write_text(inside + '{"type": "integer"}' + ends, encoding="utf-8")
    result = run("speculate", "--json-schema", path, "-n", "4")
    assert result.exit_code == (0 if depth == 20 else 2), result.output
    if depth > 20:
        assert result.stderr == "error: the JSON schema is nested too deep\n"
