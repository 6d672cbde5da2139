"""Version 0.1 on this machine, in another process: it runs cases for the comparison.

As a program this file reads names of cases, one per line, and answers with their records in JSON.
llama.cpp and the model files are those of the tests. The package, the table and its reader are in
v0_1.zip: they are from commit 50f8f7e9 of git's history, without the bundled models, which have not
changed since.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .record import CaseRecord, Words

ARCHIVE = Path(__file__).with_name("v0_1.zip")
VERSION = "0.1.0"


class Older:
    """The process, started at the first request; ``folder`` has the toys, ``data`` the bundled pair."""

    def __init__(self, folder: Path, data: Path) -> None:
        self._folder, self._data = folder, data
        self._process: subprocess.Popen[str] | None = None

    def make(self, name: str) -> tuple[CaseRecord, dict[str, Words]]:
        """Return the record of a case, and its texts by their SHA-256."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        print(name, file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"version {VERSION} ended with {process.wait()} at {name}")
        case, texts = json.loads(line)
        return case, texts

    def _start(self) -> subprocess.Popen[str]:
        packages = self._folder / VERSION
        with zipfile.ZipFile(ARCHIVE) as archive:
            archive.extractall(packages)
        shutil.copytree(self._data, packages / "llamabranch" / "data", dirs_exist_ok=True)
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(packages), str(self._folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with self._process:
                assert self._process.stdin is not None
                self._process.stdin.close()
            self._process = None


def main(packages: str, folder: str) -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # so that other output is not taken for an answer
    # The finder of an editable install would find this tree's package first.
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__
    ]
    sys.path[0] = packages
    library, record, cases = (
        importlib.import_module(f"digests.{name}") for name in ("library", "record", "cases")
    )
    assert Path(library.lb.__file__).is_relative_to(packages), library.lb.__file__
    assert library.VERSION == VERSION
    with library.World(Path(folder)) as world:
        for line in sys.stdin:
            outcome, models = record.run(world, cases.CASES[line.rstrip("\n")])
            numbers = {key: record._number(value) for key, value in outcome.numbers.items()}
            texts = [record.record_text(said) for said in outcome.texts]
            words = {
                text["sha256"]: {"tokens": said.tokens, "text": said.text}
                for text, said in zip(texts, outcome.texts, strict=True)
            }
            case = {"models": models, "texts": texts, "numbers": numbers}
            print(json.dumps([case, words]), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
