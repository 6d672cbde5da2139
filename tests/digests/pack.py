"""Write v0_1.zip, the older version as it is run beside this one: ``python -m tests.digests.pack``.

It holds version 0.1's package without the two bundled models (they have not changed since: the files of
this tree are copied in where it is run), the table of cases that was asked of it, and the toys, all as
they are in one commit of git's history. A test compares the contents with the commit.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

__all__ = ["ARCHIVE", "COMMIT", "members"]

ROOT = Path(__file__).parents[2]
ARCHIVE = Path(__file__).with_name("v0_1.zip")
COMMIT = "50f8f7e9fdbec613c02b29efa0592312ce845392"  # of the record; the package is version 0.1.0
TAKEN = ("llamabranch", "tests/digests", "tests/toys.py", "LICENSE")
LEFT = (".gguf", ".json")  # the models, and the record


def members() -> dict[str, bytes]:
    """Return the files by their names in the archive, read from git."""
    tar = subprocess.run(
        ["git", "archive", "--format=tar", COMMIT, *TAKEN],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for entry in archive:
            file = archive.extractfile(entry) if entry.isfile() else None
            if file is not None and not entry.name.endswith(LEFT):
                found[entry.name.removeprefix("tests/")] = file.read()
    return dict(sorted(found.items()))


def main() -> None:
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in members().items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, 9)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
