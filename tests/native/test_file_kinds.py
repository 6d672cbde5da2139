"""A file that is not a model is refused."""

from __future__ import annotations

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


@pytest.mark.parametrize("architecture", ["llama", "", "clip", "controlvector"])
def test_gguf_that_is_no_model_is_refused(architecture: str, tmp_path: Path) -> None:
    """An adapter, an importance matrix, a projector, a control vector."""
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    if not architecture:  # the writer puts one into every file
        writer.kv_data[0].clear()
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 64), np.float32))
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
