"""A file that is not a model is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import toys
from commands import said_by

import llamabranch as lb
from llamabranch.errors import ModelLoadError


@pytest.mark.parametrize(
    "data",
    [
        b"GG", b"\0" * 999, bytes(range(200, 256)) * 9, b"FUGG" + bytes(100), b"lmgg" + bytes(100),
        b"version https://git-lfs.github.com/spec/v1\n", b"<!DOCTYPE html>\n<html>", b"PK\x03\x04",
    ],
)  # fmt: skip
def test_file_that_is_no_gguf_is_refused_with_its_first_bytes(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    for vocab_only in (False, True):
        with pytest.raises(ModelLoadError, match="it is not a GGUF file") as raised:
            lb.Model(path, vocab_only=vocab_only)
        assert f"(it begins with {data[:16]!r})" in str(raised.value)


def adapter(writer: gguf.GGUFWriter) -> None:
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 16.0)
    for side in ("a", "b"):
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{side}", np.zeros((4, 64), np.float32))


def old_adapter(writer: gguf.GGUFWriter) -> None:
    writer.add_string("adapter.type", "lora")


def imatrix(writer: gguf.GGUFWriter) -> None:
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["wiki.txt"])
    writer.add_uint32("imatrix.chunk_count", 12)
    writer.add_uint32("imatrix.chunk_size", 512)
    writer.add_tensor("blk.0.attn_q.weight.in_sum2", np.zeros((1, 64), np.float32))


def mmproj(writer: gguf.GGUFWriter) -> None:
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 64), np.float32))


def old_mmproj(writer: gguf.GGUFWriter) -> None:
    writer.add_bool("clip.has_vision_encoder", True)


def control_vector(writer: gguf.GGUFWriter) -> None:
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_tensor("direction.1", np.zeros(64, np.float32))


GGUFS: list[tuple[Callable[[gguf.GGUFWriter], None], str]] = [
    (adapter, "llama"),
    (old_adapter, "llama"),
    (imatrix, ""),
    (mmproj, "clip"),
    (old_mmproj, "clip"),
    (control_vector, "controlvector"),
]


@pytest.mark.parametrize(("write", "architecture"), GGUFS)
def test_gguf_that_is_no_model_is_refused(
    write: Callable[[gguf.GGUFWriter], None], architecture: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    if not architecture:  # the writer puts one into every file
        writer.kv_data[0].clear()
    write(writer)
    toys.finish(writer, path)
    for vocab_only in (False, True):
        with pytest.raises(ModelLoadError):
            lb.Model(path, vocab_only=vocab_only)
    assert said_by("models", "show", path)


def test_vocabulary_without_weights_is_named(tmp_path: Path) -> None:
    path = toys.write_llama(tmp_path / "vocab.gguf", vocab="bytes", drop=("*",))
    with pytest.raises(ModelLoadError, match="it has only a vocabulary, no weights") as raised:
        lb.load(path)
    assert "vocab_only=True" in str(raised.value.hint)
    with lb.Model(path, vocab_only=True) as model:
        assert model.detokenize(model.tokenize("ab")).strip() == "ab"
