"""Commands as processes: closed, full and narrow streams, encodings, Ctrl-C at any moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import COMMAND, ENDLESS
from self_signal import signalled

TIMEOUT_S = 600  # for a machine that is busy with other things
MODEL = ("-m", "tale-target", "-t", "1")
LONG = ["speculate", *MODEL, "-n", "100000", *ENDLESS, "-c", "16384"]
STATISTICS = ("accept rate", "tokens a pass", "decodes", "tokens/s")


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as a process; capture its standard error, and its output unless it has a file."""
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.run([*COMMAND, *arguments], timeout=TIMEOUT_S, check=False, **streams)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs /dev/full and descriptors of POSIX"
)
@pytest.mark.parametrize(
    ("arguments", "closed", "code", "message"),
    [("speculate - -n 4", 0, 2, "standard input is closed"),
     *((name, 1, 1, "standard output is closed") for name in ("models", "models --json")),
     *((name, None, 1, "cannot write to standard output: No space left on device") for name in (
         "models", "models --json", "--help", "speculate -n 4", "speculate -n 4 --json",
         "generate -n 4 -p king"))],
)  # fmt: skip
def test_closed_and_full_streams_are_an_error_in_one_line(
    arguments: str, closed: int | None, code: int, message: str
) -> None:
    model = MODEL if "-n" in arguments else ()
    with open("/dev/full", "w", encoding="utf-8") as full:
        closes = None if closed is None else lambda: os.close(closed)
        stdout = full if closed is None else None
        done = run(*arguments.split(), *model, preexec_fn=closes, stdout=stdout)
    assert done.returncode == code, done.stderr
    first, *rest = done.stderr.splitlines()
    assert first == f"error: {message}"
    assert all(line.startswith("hint: ") for line in rest) and (rest or closed is None)


@pytest.mark.skipif(os.name == "nt", reason="closes descriptors as POSIX has them")
def test_chat_and_page_need_no_standard_input(tmp_path: Path) -> None:
    options: Any = {"preexec_fn": lambda: os.close(0), "stdin": None}
    said = run("chat", "-p", "Hi", "-S", "chat_template=chatml", "-n", "2", *MODEL, **options)
    assert said.returncode == 0 and "error" not in said.stderr, said.stderr
    file = str(tmp_path / "page.loom.jsonl")
    page = [*COMMAND, "open", *MODEL, "--file", file, "--json", "--port", "0", "--no-browser"]
    with subprocess.Popen(
        page, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as opened:
        assert opened.stdout is not None and opened.stderr is not None
        line = opened.stdout.readline()
        opened.terminate()
        assert "link" in line, opened.stderr.read()


def test_standard_input_that_is_not_utf8_is_wrong_usage() -> None:
    done = run("speculate", "-", input=b"a\xffb", text=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: cannot read standard input: ")  # type: ignore[arg-type]


def test_pipe_that_closes_early_ends_the_command_quietly() -> None:
    with subprocess.Popen(
        [*COMMAND, "speculate", *MODEL, "-n", "900", *ENDLESS],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(20)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=TIMEOUT_S) != 0


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
@pytest.mark.parametrize(
    "arguments",
    [LONG, [*LONG, "--json"], ["generate", "-p", "The king", *LONG[1:], "-d", "none"]],
    ids=["one text", "json", "plain"],
)
def test_interrupt_prints_what_there_is_and_exits_with_130(arguments: list[str]) -> None:
    process = subprocess.run(
        [*signalled(100), *arguments],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert process.returncode == 130, process.stderr
    assert "Traceback" not in process.stderr
    if "--json" in arguments:
        report = json.loads(process.stdout)
        assert report["finish_reason"] == "cancelled" and report["tokens"]
        return
    assert len(process.stdout) > 40
    assert "ended by Ctrl-C," in process.stderr
    for label in STATISTICS if "none" not in arguments else ():
        assert label in process.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
@pytest.mark.parametrize("moment", ["atexit, first", "atexit, last", "threads", "modules", "sys"])
def test_ctrl_c_in_the_last_moments_never_ends_the_process_by_the_signal(moment: str) -> None:
    """Python restores the system's SIGINT handler before it frees its modules."""
    program = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
sys.argv = ["llamabranch", "models", "--json"]
moment = MOMENT
def ctrl_c(kill=os.kill, pid=os.getpid()):
    kill(pid, 2)
class Late:
    def __del__(self, ctrl_c=ctrl_c):
        ctrl_c()
import atexit, threading
if moment == "atexit, last":
    atexit.register(ctrl_c)
from llamabranch.cli import main
if moment == "atexit, first":
    atexit.register(ctrl_c)
elif moment == "threads":
    threading._register_atexit(ctrl_c)
elif moment == "modules":
    sys.modules["late"] = Late()
elif moment == "sys":
    sys.late = Late()
main()
"""
    command = [sys.executable, "-c", program.replace("MOMENT", repr(moment))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 130), done.stderr
    assert done.stdout.startswith("{"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows reads arguments as Unicode")
def test_in_the_c_locale_arguments_are_utf8_and_output_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "König.jsonl"
    file.write_text('{"prompt": "Ein König"}', "utf-8")
    arguments = ("generate", "Die Königin ♕", "-n", "8", *MODEL, "-i", str(file), "-s", "1")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = run(*arguments, "--json", env=ascii_only)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [result["prompt"] for result in results] == ["Die Königin ♕", "Ein König"]
    expected = "\n".join(f"==> {r['id']}: {r['prompt']} <==\n{r['text']}\n" for r in results)
    shown = run(*arguments, env=ascii_only).stdout
    assert shown == expected.encode("ascii", "backslashreplace").decode()
