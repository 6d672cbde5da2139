"""Every row of the table of fatal files: a file meets it, and without the check it ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest
import toys

from llamabranch.errors import ModelLoadError
from llamabranch.native.gguf_check import FATAL, FatalCase, check_header, find_fatal
from llamabranch.native.gguf_reader import read_header

PROGRAM = Path(__file__).with_name("load_unchecked.py")
CASES = pytest.mark.parametrize("case", FATAL, ids=[case.name for case in FATAL])


@CASES
def test_file_of_each_fatal_case_is_refused_for_it(case: FatalCase, tmp_path: Path) -> None:
    path = toys.write_broken(tmp_path / "fatal.gguf", case.name)
    found = find_fatal(read_header(path))
    assert found is not None and found[0] == case
    with pytest.raises(ModelLoadError) as raised:
        check_header(path)
    assert raised.value.message == f"cannot load {path}: {found[1]}"
    assert raised.value.hint == case.hint
    if case.in_vocabulary:
        with pytest.raises(ModelLoadError):
            check_header(path, vocab_only=True)
    else:
        check_header(path, vocab_only=True)


@CASES
def test_llama_cpp_ends_the_process_as_the_table_says(case: FatalCase, tmp_path: Path) -> None:
    if llama_cpp.__version__ != case.seen_in:
        pytest.skip(f"seen in {case.seen_in}, this is {llama_cpp.__version__}")
    path = toys.write_broken(tmp_path / "fatal.gguf", case.name)
    for options in ((), ("vocab_only",)) if case.in_vocabulary else ((),):
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(path), *options],
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            check=False,
        )
        assert done.stdout.split()[-1] == case.phase, done.stderr[-500:]
        assert done.returncode == -signal.SIGABRT
        assert case.symptom in done.stderr
