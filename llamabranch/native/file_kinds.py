"""Recognise files that are not models, by their first bytes or by the keys of a GGUF header."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping

MOST_BYTES = 512  # from the beginning of a file, for `what_it_is`

_CONVERT = "llama.cpp's convert_hf_to_gguf.py makes a GGUF file of such a model"
_UNPACK = "unpack it and give the .gguf file inside"
_OLD = "it is from before August 2023; get the model as GGUF"
# The first bytes of other files, what they are, and what to do.
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"lmgg", "a model in the old GGML format", _OLD),
    (b"fmgg", "a model in the old GGML format", _OLD),
    (b"tjgg", "a model in the old GGML format", _OLD),
    (b"algg", "a LoRA adapter in an old format, not a model", _OLD),
    (b"PK\x03\x04", "a ZIP archive, as PyTorch's .bin and .pt files are", _CONVERT),
    (b"\x80\x02", "a Python pickle, as old PyTorch files are", _CONVERT),
    (b"\x1f\x8b", "compressed by gzip", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", _UNPACK),
    (b"\xfd7zXZ\x00", "compressed by xz", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"FUGG", "a GGUF file with its bytes swapped", "convert the model again on this machine"),
)
_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/.*?^size (\d+)", re.S | re.M)
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|\?xml|!--)", re.IGNORECASE)
_GET = "`llamabranch models pull` downloads a model"
_SHOWN = 60  # characters of a short text


def what_it_is(start: bytes) -> tuple[str, str | None]:
    """Return what kind of file begins with ``start``, which is not GGUF, and what to do."""
    pointer = _POINTER.match(start)
    if pointer is not None:
        return (
            f"it is a Git LFS pointer to a file of {int(pointer[1]):,} bytes, not that file",
            f"`git lfs pull` in that repository gets it; {_GET}",
        )
    if _PAGE.match(start):
        return (
            "it is a web page (HTML), not a model",
            f"use the download link, with /resolve/ instead of /blob/; {_GET}",
        )
    for magic, kind, hint in _MAGIC:
        if start.startswith(magic):
            return f"it is not a GGUF file: it is {kind}", hint
    if start[8:10] in (b'{"', b"{ ") and int.from_bytes(start[:8], "little") < 1 << 32:
        return "it is a safetensors file, not a GGUF file", _CONVERT
    text = _as_text(start)
    if text is not None:
        return f"it is a text, not a model: {text!r}", f"it may be a server's answer; {_GET}"
    return "it is not a GGUF file (its first bytes are not 'GGUF')", None


def _as_text(start: bytes) -> str | None:
    """Return the beginning of a text; None for anything else."""
    decoder = codecs.getincrementaldecoder("utf-8")()  # a character may be cut off
    try:
        text = " ".join(decoder.decode(start, final=len(start) < MOST_BYTES).split())
    except UnicodeDecodeError:
        return None
    if len(text) < 8 or not text.isprintable():
        return None
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def other_kind(metadata: Mapping[str, object]) -> tuple[str, str | None] | None:
    """Return what a GGUF file is if it is not a language model, and what to do; else None."""
    kind, architecture = metadata.get("general.type"), metadata.get("general.architecture")
    if kind == "adapter" or "adapter.type" in metadata:
        method = str(metadata.get("adapter.type", "lora"))
        return (
            f"it is an adapter ({method}) for a model, not a model",
            "llama.cpp's llama-export-lora merges it with its model into one file",
        )
    if kind == "imatrix" or "imatrix.chunk_count" in metadata:
        return (
            "it is an importance matrix (imatrix), not a model",
            "llama-quantize reads it; use the model that it was computed for",
        )
    if kind == "mmproj" or architecture == "clip":
        return (
            "it is a multimodal projector (mmproj, clip) for a model, not a model",
            "use the model's own file; images and sound are not supported",
        )
    if architecture == "controlvector":
        return "it is a control vector for a model, not a model", "use the model's own file"
    return None
