"""Files whose names are not UTF-8: Linux allows any bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import COMMAND, answer
from serving import TARGET, Serving, bundled_engine
from toys import CHAT_TEMPLATE

import llamabranch as lb


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model and a prompt; all of its names have a byte that is no UTF-8."""
    folder = tmp_path / os.fsdecode(b"d\xff")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has only names in UTF-8")
    shutil.copy(TARGET, folder / os.fsdecode(b"m\xff.gguf"))
    (folder / os.fsdecode(b"p\xff.txt")).write_text("Once upon a time. " * 300, encoding="utf-8")
    (folder / os.fsdecode(b"p\xff.jsonl")).write_text('{"prompt": "Once"}\n', encoding="utf-8")
    return folder


def test_models_branches_and_chats_have_any_name(folder: Path) -> None:
    model, branch, chat = (folder / os.fsdecode(n) for n in (b"m\xff.gguf", b"b\xff", b"c\xff"))
    with lb.load(model, n_ctx=256, n_threads=1, chat_template=CHAT_TEMPLATE) as ctx:
        assert ctx.model.name == "m\ufffd"
        with lb.Branch.start(ctx, "Once upon", seed=1) as root:
            root.step()
            root.save(branch)
            assert lb.Branch.load(ctx, branch).tokens == root.tokens
        talk = lb.Chat(ctx, seed=1)
        talk.options["max_tokens"] = 3
        answer = talk.send("Hello").text
        talk.save(chat)
        assert lb.Chat.load(ctx, chat).messages[-1]["content"] == answer
    with pytest.raises(lb.errors.LlamaBranchError, match="no\udcff"):
        lb.load(folder / os.fsdecode(b"no\xff.gguf"))


def test_commands_take_any_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    model, text, lines, missing = map(
        os.fsdecode, (b"m\xff.gguf", b"p\xff.txt", b"p\xff.jsonl", b"no\xff")
    )
    few = ("-n", "2", "--seed", "1", "-c", "256")
    assert answer("generate", "-m", model, *few, "Once")["tokens"]
    assert answer("score", "-m", model, "--file", text)
    assert answer("generate", "-m", model, *few, "-i", lines)["results"]
    for arguments, code, shown in (
        (("score", "-m", model, "--file", missing), 2, b"no\\udcff"),
        (("models", "show", model), 0, b"m\xef\xbf\xbd"),
    ):
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, check=False)
        assert done.returncode == code and shown in done.stdout + done.stderr


def test_server_answers_with_a_model_of_any_name(folder: Path) -> None:
    model = folder / os.fsdecode(b"m\xff.gguf")
    with Serving(lambda: bundled_engine(model=model)) as server, server.client() as api:
        assert api.get("/v1/models").status_code == 200
        body = {"prompt": "Once", "max_tokens": 2}
        assert api.post("/v1/completions", json=body).json()["model"] == "m\ufffd"
        assert api.post("/v1/completions", json={**body, "stream": True}).status_code == 200
