"""A file system with a full disk, which Ray's processes can import."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem


class SmallDisk(LocalFileSystem):  # type: ignore[misc]
    """The local file system, where a folder has room for so many Parquet files."""

    cachable = False

    def __init__(self, folder: str, n_files: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._small = Path(folder)
        self._n_files = n_files

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        is_data = Path(path).parent == self._small and ".parquet" in path
        if is_data and "w" in mode and len(list(self._small.glob("*.parquet"))) >= self._n_files:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return super()._open(path, mode, **kwargs)
