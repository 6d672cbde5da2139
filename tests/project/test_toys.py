"""The toys load, speak, and can be told apart; the header check knows the fatal ones."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import toys

from llamabranch import Context, Model
from llamabranch.errors import ModelLoadError
from llamabranch.native.gguf_check import check_header

GENERATIVE = ["llama", "gemma3", "mamba", "lfm2", "rwkv7"]
TEXT = "Grüße, 世界 🙂\n\0 \t<|bos|>"


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


def test_same_arguments_give_the_same_file(tmp_path: Path) -> None:
    one = toys.write_llama(tmp_path / "one.gguf", seed=3)
    two = toys.write_llama(tmp_path / "two.gguf", seed=3)
    other = toys.write_llama(tmp_path / "other.gguf", seed=4)
    assert one.read_bytes() == two.read_bytes() != other.read_bytes()


def test_small_drift_predicts_much_like_the_original(tmp_path: Path) -> None:
    rows = []
    for drift in (0.0, 0.2, 1.0):
        path = toys.write_llama(tmp_path / f"{drift}.gguf", drift=drift)
        with Model(path) as model, Context(model, n_ctx=256, n_threads=1) as context:
            context.decode([5, 9, 3, 7], 0, logits="all")
            rows.append(np.stack([context.logits(row) for row in range(4)]))
    near = np.corrcoef(rows[0].ravel(), rows[1].ravel())[0, 1]
    far = np.corrcoef(rows[0].ravel(), rows[2].ravel())[0, 1]
    assert near > 0.7 > abs(far)


def test_byte_vocabulary_round_trips_any_text(tmp_path: Path) -> None:
    with Model(toys.write_llama(tmp_path / "toy.gguf", vocab="bytes")) as model:
        tokens = model.tokenize(TEXT)
        assert tokens[0] == model.bos
        assert len(tokens) == 1 + len(TEXT.encode())
        assert model.detokenize(tokens[1:]) == TEXT
        assert model.is_eog(1)


def test_small_vocabulary_speaks_its_letters(tmp_path: Path) -> None:
    with Model(toys.write_llama(tmp_path / "toy.gguf")) as model:
        assert model.n_vocab == 16
        assert model.tokenize("cab", add_special=False) == [4, 2, 3]
        assert model.detokenize([4, 2, 3]) == "cab"


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


def test_what_is_no_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        check_header(tmp_path / "missing.gguf")
    with pytest.raises(ModelLoadError, match="not a file"):
        check_header(tmp_path)
    with pytest.raises(ModelLoadError):
        check_header("a\0b")


def test_arbitrary_bytes_raise_nothing_else(tmp_path: Path) -> None:
    good = toys.write_lfm2(tmp_path / "good.gguf", n_embd=32, n_head=1, n_ff=32)
    data, header = good.read_bytes(), gguf.GGUFReader(good).data_offset
    rng = np.random.default_rng(0)
    variants = [data[:end] for end in range(0, len(data), 64)]
    for _ in range(1500):
        flipped = bytearray(data)
        for at in rng.integers(0, header, rng.integers(1, 5)):
            flipped[at] = int(rng.integers(256))
        variants.append(bytes(flipped))
    path = tmp_path / "bad.gguf"
    refused = 0
    for variant in variants:
        path.write_bytes(variant)
        try:
            check_header(path)
        except ModelLoadError:
            refused += 1
    assert refused > len(variants) // 3


def test_large_vocabulary_is_read_in_no_time(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "large.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(150_000)])
    writer.add_array("tokenizer.ggml.merges", [f"{i} {i}" for i in range(150_000)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 150_000)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    start = time.process_time()  # others on the machine do not count
    check_header(tmp_path / "large.gguf")
    assert time.process_time() - start < 1.5  # about 0.1 on an idle core
