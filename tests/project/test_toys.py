"""The header check accepts the files that llama.cpp accepts, and explains what it refuses."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import toys

from llamabranch.errors import ModelLoadError
from llamabranch.native.gguf_check import check_header

EXPERTS: dict[str, toys.Value | None] = {
    "expert_count": 8, "expert_used_count": [2, 4], "expert_group_count": 4,
    "expert_group_used_count": 2, "rope.scaling.type": "yarn", "rope.dimension_count": 32,
}  # fmt: skip
EMPTY = toys.Vocabulary((toys.BOS, toys.EOS, "\0", "", "\0b"))  # named [EMPTY_i] by llama.cpp


@pytest.mark.parametrize(
    "more",
    [{"metadata": EXPERTS}, {"vocab": EMPTY}],
)
def test_good_file_passes(more: dict[str, Any], tmp_path: Path) -> None:
    check_header(toys.write_toy(tmp_path / "good.gguf", **more))


def _header(data: bytes = b"", *, version: int = 3, tensors: int = 0, values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + data + bytes(64 * bool(data))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_header(version=0), "version 0"),
        (_header(version=4), "version 4"),
        (_header(version=3 << 24), "big-endian"),
        (_header(tensors=2**63), "header says"),
        (_header(values=2**64 - 1), "header says"),
        (_header(), "no general.architecture"),
        (_header(struct.pack("<Q", 2**63), values=1), "middle of its header"),
        (_header(struct.pack("<QI", 0, 99), values=1), "unknown type 99"),
        (_header(struct.pack("<QIIQ", 0, 9, 8, 2**62), values=1), "middle"),
        (_header(struct.pack("<QIIQ", 0, 9, 4, 2**62), values=1), "middle"),
        (_header(struct.pack("<QIB", 0, 0, 1) * 2, values=2), "twice"),
        (("a\0b", "a\0c"), "twice"),  # tokens: to llama.cpp they end at the NUL
    ],
    ids=range(12),
)
def test_bad_start_is_explained(data: bytes | tuple[str, ...], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        toys.write_llama(path, vocab=toys.Vocabulary((toys.BOS, toys.EOS, *data)))
    with pytest.raises(ModelLoadError, match=reason):
        check_header(path)
