"""``llamabranch chat``: in a terminal, from a pipe, from a file; every command; Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import readline
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import toys
from commands import ENDLESS
from conftest import DATA
from typer.testing import CliRunner, Result

import llamabranch as lb
from llamabranch.cli import app
from llamabranch.cli.chat import ChatSession
from llamabranch.cli.console import Console

TARGET = str(DATA / "tale-target-q8_0.gguf")
OPTIONS = (
    "-m", TARGET, "--draft", "none", "-S", f"chat_template={toys.CHAT_TEMPLATE}", "-t", "1", "-c", "1024",
    "--seed", "4",
)  # fmt: skip
LONG_S = 60  # on a busy machine
PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv = ["llamabranch", *sys.argv[1:]]
from llamabranch.cli.app import main
main()
"""


def run(*arguments: object, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", *map(str, arguments)], input=stdin)


def saved_in(file: Path) -> dict[str, Any]:
    """Return what a chat that was saved consists of."""
    chat: dict[str, Any] = json.loads(file.read_text())
    return chat


def said(file: Path, *arguments: object, stdin: str) -> dict[str, Any]:
    """Run a chat from a pipe, and return what it saves in a file at its end."""
    result = run(*arguments, stdin=f"{stdin}\n/save {file}")
    assert result.exit_code == 0, result.stderr
    return saved_in(file)


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self._shown = b""
        self._start = 0  # where the next search begins
        self.seen = ""  # before the first line can be typed

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def paste(self, text: str) -> None:
        """Type a text as a terminal pastes it: marked as pasted, if the program has asked for that."""
        is_marked = self._shown.rfind(b"\x1b[?2004h") > self._shown.rfind(b"\x1b[?2004l")
        self.type(f"\x1b[200~{text}\x1b[201~" if is_marked else text)

    def until(self, pattern: str) -> str:
        """Return what is shown from the end of the last pattern up to this pattern."""
        end = time.monotonic() + LONG_S
        while True:
            text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", self._shown).decode(errors="replace")
            match = re.compile(pattern).search(text, self._start)
            if match:
                start, self._start = self._start, match.end()
                return text[start : match.end()]
            assert time.monotonic() < end, f"{pattern} is missing in {text!r}"
            if select.select([self._leader], [], [], 1.0)[0]:
                self._shown += os.read(self._leader, 1 << 16)

    def ready(self) -> None:
        """Wait until a line can be typed."""
        self.until(r">[\s\x08]*$")

    def say(self, line: str, pattern: str, end: str = "\r") -> str:
        """Type a line when it can be typed; return what is shown up to a pattern after it."""
        self.ready()
        self.type(line + end)
        return self.until(pattern)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environment |= {"COLUMNS": "100", "LINES": "40"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "chat", *arguments],
        stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(follower)
        try:
            shown = Terminal(leader)
            shown.seen = shown.until("/help lists the commands")
            yield shown
            assert process.wait(LONG_S) == 0
        finally:
            process.kill()
            os.close(leader)


def test_every_command_in_a_terminal(tmp_path: Path) -> None:
    with terminal(*OPTIONS, "-n", "8") as chat:
        chat.say("One day", "has reached max_tokens")
        chat.say("/retry", r"branch 2, after: One day")
        tree = chat.say("/branches", r"branch 2\s+\(current\)")
        assert tree.count("One day > ") == 2
        chat.say("And then?", "has reached max_tokens")
        chat.say("/edit 1 One night", "branch 3, after: One night")
        chat.say("/fork", "branch 4, after: One night")
        chat.say("/undo", "taken back: One night")
        chat.say("/switch 2", r"branch 2, after: And then\?")
        chat.say("/switch 9", "there is no branch 9[\\s\\S]*branches: 1, 2, 3, 4")
        chat.say("/system Be kind.", "system: Be kind.")
        chat.say("/set temperature 0.5", "temperature: 0.5")
        chat.say("/set temperature", "error")
        chat.say(f"/save {tmp_path}/kept", "saved in")
        chat.say("/undo", r"taken back: And then\?")
        chat.say("/what", "there is no command /what")
        chat.say("/help", "End the program")
        if "GNU" in (readline.__doc__ or ""):  # pasted lines are one message
            chat.ready()
            chat.paste("first\rsecond\rthird")
            chat.type("\r")
            chat.until("has reached max_tokens")
            chat.say(f"/save {tmp_path}/pasted", "saved in")
            exchanges = saved_in(tmp_path / "pasted")["exchanges"]
            assert "first\nsecond\nthird" in [message["user"] for message in exchanges]
        chat.ready()
        chat.type("/quit\r")
    assert saved_in(tmp_path / "kept")["sampling"]["temperature"] == 0.5


def test_ctrl_c_ends_an_answer_and_not_the_program() -> None:
    # Long enough to be interrupted by a test that has to wait for a core.
    with terminal(*OPTIONS, *ENDLESS, "-c", "8192") as chat:
        for _ in range(2):
            chat.say("One day", r"One day\s+([^\s>]+\s+){4}")
            chat.type("\x03")
            chat.until("interrupted: this part of the answer stays")
        tree = chat.say("/branches", r"branch\s+1\s+\(current\)")  # long answers wrap
        assert tree.count("One day > ") == 2
        chat.ready()
        chat.type("\x04")


class Late(lb.Chat):
    """A chat whose ``retry`` is interrupted when its answer has begun, before anybody has it."""

    def retry(self) -> lb.chat.Answer:
        answer = super().retry()
        for _ in range(2):  # the second Ctrl-C does not wait for a decode
            signal.raise_signal(signal.SIGINT)
        return answer


def test_an_answer_that_is_interrupted_as_it_begins_is_taken_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = lb.loading.LoadOptions(n_ctx=256, n_threads=1, chat_template=toys.CHAT_TEMPLATE)
    with lb.load(TARGET, **options) as ctx, Late(ctx, None, seed=4, max_tokens=4) as chat:
        session = ChatSession(chat, Console())
        session.is_typed = True
        session.take("One day")
        session.take("/retry")
        assert "the message was removed" in capsys.readouterr().err
        assert (chat.current, chat.tree().count("branch ")) == (1, 1)


def test_a_chat_that_goes_on_shows_its_end(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (before,) = said(kept, *OPTIONS, "-n", "90", *ENDLESS, stdin="Tell of a king.")["exchanges"]
    with terminal(*OPTIONS, "--load", str(kept)) as chat:
        end = chat.seen.split("> Tell of a king.")[1].split("branch 1, after: Tell of a king.")[0]
        assert end.split() == before["answer"].split()
        chat.ready()
        chat.type("\x04")


def test_a_pipe_gets_the_answers_alone() -> None:
    result = run(*OPTIONS, "-n", "12", "-p", "Tell of a king.", stdin="\nAnd then?")
    assert result.exit_code == 0, result.stderr
    options = lb.loading.LoadOptions(n_ctx=1024, n_threads=1, chat_template=toys.CHAT_TEMPLATE)
    with lb.load(TARGET, **options) as ctx, lb.Chat(ctx, seed=4, max_tokens=12) as chat:
        answers = [chat.send(text).finish().text for text in ("Tell of a king.", "And then?")]
    assert result.stdout == "".join(f"{text}\n" for text in answers)


def test_only_a_newline_ends_a_turn_of_a_pipe_and_a_saved_chat_goes_on(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    odd = [f"a{mark}b" for mark in "\u2028\u2029\x85\f\v\x1c\x1d\x1e"]
    more = ("-n", "3", "-sys", "Be kind.", "--top-k", "7")
    before = said(kept, *OPTIONS, *more, stdin="\n".join([*odd, "One", "", "day", "/retry"]))
    assert [m["user"] for m in before["exchanges"]] == [*odd, "One", "day", "day"]
    assert before["system"] == "Be kind."
    after = said(kept, *OPTIONS[:-2], "--load", kept, "-p", "What else?", stdin="And then?")
    assert after["exchanges"][: len(odd) + 3] == before["exchanges"]
    assert [m["user"] for m in after["exchanges"][-2:]] == ["What else?", "And then?"]
    settings = after["sampling"]["top_k"], after["sampling"]["seed"], after["max_tokens"]
    assert settings == (7, 4, 3)
    other = said(kept, *OPTIONS, "--load", kept, "-sys", "Be short.", stdin="Again")
    assert other["system"] == "Be short."


def test_a_chat_that_goes_on_opens_its_model(tmp_path: Path) -> None:
    toy, kept = tmp_path / "toy.gguf", tmp_path / "kept"
    toys.write_llama(toy, vocab="bytes", metadata={"tokenizer.chat_template": toys.CHAT_TEMPLATE})
    options = ("-t", "1", "-n", "2", "--draft", "none", "-c", "512")
    said(kept, "-m", toy, *options, stdin="ab")
    again = said(kept, "--load", kept, *options, stdin="cd")
    assert [m["user"] for m in again["exchanges"]] == ["ab", "cd"]
    other = run("-m", TARGET, "--load", kept, "-S", "chat_template=chatml", *options)
    assert other.exit_code == 1
    assert "another model: toy.gguf, not tale-target-q8_0.gguf" in other.stderr
    assert not re.search(r"[0-9a-f]{20}", other.stderr)
    moved = toy.rename(tmp_path / "moved.gguf")
    gone = run("--load", kept, *options)
    assert gone.exit_code == 1 and "toy.gguf" in gone.stderr
    assert run("-m", moved, "--load", kept, *options, stdin="cd").exit_code == 0


def test_a_wrong_command_of_a_pipe_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = "/undo\nOne day\n/what\n/switch x\n/save\n/retry\n/edit 1\n/save ~/kept\n/quit\nnever"
    result = run(*OPTIONS, "-n", "4", stdin=lines)
    assert result.exit_code == 1 and "never" not in result.stdout
    assert saved_in(tmp_path / "kept")
    for message in ("there is no command /what", "an argument is missing", "no message yet"):
        assert message in result.stderr
    for usage in ("/edit N TEXT", "/switch N", "/save FILE"):
        assert f"hint: {usage}\n" in result.stderr


def test_each_branch_that_lacks_turns_says_so() -> None:
    lines = [*(f"Of day {n}?" for n in range(6)), "/retry", "/retry", "/edit 1 Hello"]
    more = ("-c", "256", "-n", "24", *ENDLESS)
    result = run(*OPTIONS, *more, stdin="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    notes = re.findall(r"no longer sees|branch \d", result.stderr + result.stdout)
    assert notes[-5:] == ["no longer sees", "branch 2", "no longer sees", "branch 3", "branch 4"]


def test_what_a_chat_has_read_is_kept_in_a_folder(tmp_path: Path) -> None:
    folder, story = tmp_path / "cache", "The dog ran to the river. " * 80
    for _ in range(2):
        result = run(*OPTIONS, "-p", story, "-n", "2", "--cache-dir", folder)
        assert result.exit_code == 0, result.stderr
        assert len(list(folder.glob("*.kv"))) == 1
