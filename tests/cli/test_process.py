"""Commands as processes: closed, full and narrow streams, encodings, Ctrl-C at any moment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import COMMAND, answer
from self_signal import signalled_at_decode

TIMEOUT_S = 600  # for a machine that is busy with other things
MODEL = ("-m", "tale-target", "-t", "1")
ENDLESS = ["speculate", *MODEL, "-n", "100000", "--ignore-eos", "-c", "16384"]
STATISTICS = ("iterations", "drafted", "accepted", "accept rate", "tokens a second")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        ("models",),
        ("models", "--json"),
        ("--help",),
        ("speculate", *MODEL, "-n", "4"),
        ("speculate", *MODEL, "-n", "4", "--json"),
        ("generate", *MODEL, "-p", "The king", "-n", "4"),
    ],
    ids=" ".join,
)
def test_full_standard_output_is_an_error_in_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1, done.stderr
    first, *rest = done.stderr.splitlines()
    assert first == "error: cannot write to standard output: No space left on device"
    assert all(line.startswith("hint: ") for line in rest)


@pytest.mark.skipif(os.name == "nt", reason="closes descriptors as POSIX has them")
@pytest.mark.parametrize(
    ("arguments", "number", "code", "message"),
    [
        (("speculate", "-", "-n", "4"), 0, 2, "standard input is closed"),
        (("generate", "-i", "-", "-n", "4"), 0, 2, "standard input is closed"),
        (("bench", "--quick", "-i", "-"), 0, 2, "standard input is closed"),
        (("models",), 1, 1, "standard output is closed"),
        (("models", "--json"), 1, 1, "standard output is closed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_closed_stream_is_an_error_in_one_line(
    arguments: tuple[str, ...], number: int, code: int, message: str
) -> None:
    done = subprocess.run(
        [*COMMAND, *arguments],
        preexec_fn=lambda: os.close(number),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    first, *rest = done.stderr.splitlines()
    assert first == f"error: {message}"
    assert len(rest) == 1
    assert rest[0].startswith("hint: ")


def test_standard_input_that_is_not_utf8_is_wrong_usage() -> None:
    done = subprocess.run(
        [*COMMAND, "speculate", "-"], input=b"a\xffb", capture_output=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: cannot read standard input: ")


def test_output_that_is_not_utf8_loses_nothing() -> None:
    def lines_of(*arguments: str) -> tuple[str, str]:
        done = subprocess.run(
            [
                *COMMAND,
                "speculate",
                "Die Königin ♕",
                "-m",
                "tale-target",
                "-n",
                "8",
                "--seed",
                "1",
                *arguments,
            ],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    whole = answer("speculate", "Die Königin ♕", "-n", "8", "--seed", "1")
    out, _ = lines_of("--json")
    assert json.loads(out)["text"] == whole["text"]
    out, _ = lines_of()
    assert out.rstrip("\n") == whole["text"].encode("ascii", "backslashreplace").decode()


def test_pipe_that_closes_early_ends_the_command_quietly() -> None:
    process = subprocess.Popen(
        [
            *COMMAND,
            "speculate",
            "-m",
            "tale-target",
            "--max-tokens",
            "900",
            "--ignore-end",
            "--threads",
            "1",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(20)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=TIMEOUT_S) != 0


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_interrupt_prints_what_there_is_and_exits_with_130() -> None:
    process = subprocess.Popen(
        [*COMMAND, *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seen = process.stdout.read(60)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert len(seen + out) > 60
    for label in STATISTICS:
        assert label in err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_interrupt_with_json_writes_what_there_is_and_exits_with_130() -> None:
    process = subprocess.run(
        [*signalled_at_decode("SIGINT", 100), *ENDLESS, "--json"],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert process.returncode == 130, process.stderr
    assert "Traceback" not in process.stderr
    answer = json.loads(process.stdout)
    assert answer["finish_reason"] is None
    assert answer["tokens"]


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


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_ctrl_c_at_any_moment_after_the_output_never_ends_the_process_by_the_signal() -> None:
    for n_spins in range(0, 60_000, 10_000):  # some milliseconds, in steps
        with subprocess.Popen(
            [*COMMAND, "models", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_take_ctrl_c,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.read(20)
            for _ in range(n_spins):
                pass
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=TIMEOUT_S)
            assert process.returncode in (0, 130)


def _take_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it


@pytest.mark.skipif(os.name == "nt", reason="Windows reads arguments as Unicode")
def test_arguments_are_utf8_in_the_c_locale(tmp_path: Path) -> None:
    out = tmp_path / "König.jsonl"
    done = subprocess.run(
        [*COMMAND, "generate", "König", "-n", "2", *MODEL, "-o", str(out)],
        capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text("utf-8"))["prompt"] == "König"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_interrupted_run_prints_the_text_so_far() -> None:
    command = [*signalled_at_decode("SIGINT", 40), "generate", "-p", "The king"]
    process = subprocess.run(
        [*command, "-n", "100000", "--ignore-eos", *MODEL, "-d", "none"],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert process.returncode == 130, process.stderr
    assert "Traceback" not in process.stderr
    assert len(process.stdout) > 40
    assert re.search(r"finish reason +cancelled 1\n", process.stderr)
