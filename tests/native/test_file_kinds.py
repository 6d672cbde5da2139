"""A file that is not a model is refused; the error says what it is and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import toys
from commands import said_by

import llamabranch as lb
from llamabranch.errors import ModelLoadError

POINTER = b"""version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 4368439584
"""
SAFETENSORS = b'{"__metadata__":{"format":"pt"}}'
# Beginnings of files that are not GGUF, with the reason and the hint.
FILES: dict[str, tuple[bytes, str, str]] = {
    "lfs": (POINTER, "Git LFS pointer to a file of 4,368,439,584 bytes", "git lfs pull"),
    "page": (b"<!DOCTYPE html>\n<html><head>", "a web page", "/resolve/ instead of /blob/"),
    "page2": (b"\xef\xbb\xbf\n  <html lang='en'>", "a web page", "/resolve/"),
    "xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code>', "a web page", "/resolve/"),
    "refusal": (b"Entry not found", "it is a text, .*'Entry not found'", "server's answer"),
    "json": (b'{"error":"Repository not found"}', "it is a text, .*Repository", "server's answer"),
    "long": ("é".encode() * 5000, "it is a text, .*éé\\.\\.\\.", "server's answer"),
    "safetensors": (
        len(SAFETENSORS).to_bytes(8, "little") + SAFETENSORS + bytes(9000),
        "a safetensors file", "convert_hf_to_gguf",
    ),
    "pickle": (b"\x80\x02ctorch._utils\n", "Python pickle", "convert_hf_to_gguf"),
    "ggml": (b"lmgg" + bytes(100), "old GGML format", "as GGUF"),
    "ggjt": (b"tjgg" + bytes(100), "old GGML format", "as GGUF"),
    "lora": (b"algg" + bytes(100), "a LoRA adapter", "as GGUF"),
    "gzip": (b"\x1f\x8b\x08" + bytes(100), "compressed by gzip", "unpack"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(100), "compressed by zstd", "unpack"),
    "zip": (b"PK\x03\x04" + bytes(100), "a ZIP archive, as PyTorch's", "convert_hf_to_gguf"),
    "swapped": (b"FUGG" + bytes(100), "its bytes swapped", "convert"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_file_that_is_no_gguf_is_named(name: str, tmp_path: Path) -> None:
    data, reason, hint = FILES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    for vocab_only in (False, True):
        with pytest.raises(ModelLoadError, match=reason) as raised:
            lb.Model(path, vocab_only=vocab_only)
        assert re.search(hint, str(raised.value.hint))


@pytest.mark.parametrize("data", [b"GG", b"\0" * 999, bytes(range(200, 256)) * 9, b"\xff\xfe a \0"])
def test_file_of_no_known_kind_is_not_guessed(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"it is not a GGUF file \(its first bytes are not"):
        lb.load(path)


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


GGUFS: list[tuple[Callable[[gguf.GGUFWriter], None], str, str, str]] = [
    (adapter, "llama", r"an adapter \(lora\) for a model", "llama-export-lora"),
    (old_adapter, "llama", r"an adapter \(lora\) for a model", "llama-export-lora"),
    (imatrix, "", "an importance matrix", "llama-quantize"),
    (mmproj, "clip", "a multimodal projector", "the model's own file"),
    (old_mmproj, "clip", "a multimodal projector", "the model's own file"),
    (control_vector, "controlvector", "a control vector", "the model's own file"),
]


@pytest.mark.parametrize(("write", "architecture", "reason", "hint"), GGUFS)
def test_gguf_that_is_no_model_is_named(
    write: Callable[[gguf.GGUFWriter], None],
    architecture: str,
    reason: str,
    hint: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    if not architecture:  # the writer puts one into every file
        writer.kv_data[0].clear()
    write(writer)
    toys.finish(writer, path)
    for vocab_only in (False, True):
        with pytest.raises(ModelLoadError, match=reason) as raised:
            lb.Model(path, vocab_only=vocab_only)
        assert hint in str(raised.value.hint)
    assert re.search(reason, said_by("models", "show", path))


def test_vocabulary_without_weights_is_named(tmp_path: Path) -> None:
    path = toys.write_llama(tmp_path / "vocab.gguf", vocab="bytes", drop=("*",))
    with pytest.raises(ModelLoadError, match="it has only a vocabulary, no weights") as raised:
        lb.load(path)
    assert "vocab_only=True" in str(raised.value.hint)
    with lb.Model(path, vocab_only=True) as model:
        assert model.detokenize(model.tokenize("ab")).strip() == "ab"
