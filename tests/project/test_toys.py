"""Toys have distributions of use; the header check takes what llama.cpp takes, and explains the rest."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import toys

from llamabranch import Context, Model
from llamabranch.errors import ModelLoadError
from llamabranch.native.gguf_check import check_header

GENERATIVE = ["llama", "gemma3", "mamba", "lfm2", "rwkv7"]


@pytest.mark.parametrize("architecture", GENERATIVE)
@pytest.mark.parametrize("weights", ["q8_0", "f32"])
def test_distributions_are_neither_flat_nor_one_hot(
    architecture: str, weights: str, tmp_path: Path
) -> None:
    path = toys.write_toy(tmp_path / "toy.gguf", architecture, weights=weights)
    with Model(path) as model, Context(model, n_ctx=256, n_threads=1) as context:
        rng = np.random.default_rng(0)
        entropies = []
        for position in range(40):
            context.decode([int(rng.integers(2, 16))], position)
            entropies.append(context.model_entropy())
    assert 1.0 < np.median(entropies) < 2.5
    assert min(entropies) > 0.3
    assert len(set(entropies)) == 40


@pytest.mark.parametrize("architecture", [*GENERATIVE, "bert"])
@pytest.mark.parametrize("vocab", ["small", "bytes", "none", 600])
def test_good_file_passes(architecture: str, vocab: str | int, tmp_path: Path) -> None:
    check_header(toys.write_toy(tmp_path / "good.gguf", architecture, vocab=vocab))


def test_expert_layers_that_llama_cpp_takes_pass(tmp_path: Path) -> None:
    experts: dict[str, toys.Value | None] = {
        "expert_count": 8,
        "expert_used_count": [2, 4],
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "rope.scaling.type": "yarn",
        "rope.dimension_count": 32,
    }
    check_header(toys.write_llama(tmp_path / "good.gguf", metadata=experts))


def test_tokens_that_differ_only_after_a_nul_are_duplicates_to_llama_cpp(tmp_path: Path) -> None:
    vocabulary = toys.Vocabulary((toys.BOS, toys.EOS, "a\0b", "a\0c"))
    path = toys.write_llama(tmp_path / "broken.gguf", vocab=vocabulary)
    with pytest.raises(ModelLoadError, match="twice"):
        check_header(path)
    empty = toys.Vocabulary((toys.BOS, toys.EOS, "\0", "", "\0b"))  # named [EMPTY_i] by llama.cpp
    check_header(toys.write_llama(tmp_path / "good.gguf", vocab=empty))


def test_vocabulary_only_load_ignores_sizes(tmp_path: Path) -> None:
    path = toys.write_broken(tmp_path / "broken.gguf", "zero_blocks")
    check_header(path, vocab_only=True)


def _header(
    *, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, values: int = 0
) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, values)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF"),
        (b"GGUF", "middle of its header"),
        (_header(magic=b"GGML"), "not a GGUF"),
        (_header(version=0), "version 0"),
        (_header(version=1), "version 1"),
        (_header(version=4), "version 4"),
        (_header(version=3 << 24), "big-endian"),
        (_header(tensors=2**63), "announces"),
        (_header(values=2**64 - 1), "announces"),
        (_header(), "no general.architecture"),
        (_header(values=1) + struct.pack("<Q", 2**63) + bytes(64), "middle of its header"),
        (_header(values=1) + struct.pack("<QI", 0, 99) + bytes(64), "unknown type 99"),
        (_header(values=1) + struct.pack("<QIIQ", 0, 9, 8, 2**62) + bytes(64), "middle"),
        (_header(values=1) + struct.pack("<QIIQ", 0, 9, 4, 2**62) + bytes(64), "middle"),
        (_header(values=2) + struct.pack("<QIB", 0, 0, 1) * 2 + bytes(64), "twice"),
    ],
)
def test_bad_start_is_explained(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=reason):
        check_header(path)
