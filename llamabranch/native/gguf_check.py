"""Reject GGUF files on which llama.cpp would abort the process, before it opens them.

For most bad files llama.cpp returns NULL, but for some it calls `abort()`: while loading, while
creating a context, or at the first decode. `check_header` reads only the header, without llama.cpp,
and raises for everything known to be fatal in the pinned release, and for files that are certainly no
model (missing, empty, not GGUF, truncated). A file that passes may still be rejected by llama.cpp,
with an error of its own.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from llamabranch.errors import ModelLoadError

_Value = bool | int | float | str | list[int] | list[float]

# GGUF value types with a fixed size: number and struct code.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_KEPT_ARRAY = 512  # enough for one number a layer; longer arrays are tokenizer data

# ggml tensor types: number, elements and bytes of a block. The size of other types is not checked.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 30: (1, 2),  # F32, F16, BF16
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),  # Q4_0 to Q8_0
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),  # Q2_K to Q6_K
}  # fmt: skip
_F32 = 0
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
_MAX_HEADS = 1 << 20  # far above any model's
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Architectures whose graph asserts key length == value length, and those that use RoPE.
_EQUAL_HEADS = (
    "bert",
    "granite",
    "llama",
    "mistral3",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3moe",
)
_ROTATING = ("gemma", "gemma2", "gemma3", "lfm2", *_EQUAL_HEADS[1:])
_RWKV = ("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")
_LFM2 = ("lfm2", "lfm2moe")
_CUT_OFF = "the file ends in the middle of its header"
_DOWNLOAD_HINT = "download it again: the file is incomplete or damaged"


class _Reader:
    """A position in the bytes of a file; every read beyond the end raises `struct.error`."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self.data = data
        self.size = size
        self.at = 0
        self.tokens: list[bytes] = []  # of the array `tokenizer.ggml.tokens`

    def number(self, code: str) -> int:
        """Read one little-endian integer of that struct code."""
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize(code)
        return int(value)

    def blob(self) -> bytes:
        """Read a string: its length, then its bytes."""
        length = self.number("Q")
        if length > self.size - self.at:
            raise struct.error(_CUT_OFF)
        self.at += length
        return self.data[self.at - length : self.at]

    def value(self, key: str) -> _Value | None:
        """Read a value of any type; None for arrays of strings."""
        kind = self.number("I")
        if kind == _STRING:
            return self.blob().decode("utf-8", "replace")
        if kind != _ARRAY:
            return self._scalars(kind, 1)[0]
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            self._strings(count, self.tokens if key == "tokenizer.ggml.tokens" else None)
            return None
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[int] | list[float]:
        """Read numbers; of a long array only the first ones, which are all that the checks need."""
        if kind not in _SCALARS:
            _reject(f"its header has a value of unknown type {kind}")
        length = count * struct.calcsize(_SCALARS[kind])
        if length > self.size - self.at:
            raise struct.error(_CUT_OFF)
        kept = min(count, _KEPT_ARRAY)
        values = struct.unpack_from(f"<{kept}{_SCALARS[kind]}", self.data, self.at)
        self.at += length
        return list(values)

    def _strings(self, count: int, keep: list[bytes] | None) -> None:
        """Go through an array of strings. A vocabulary has 150,000, so the loop is kept short."""
        if count > (self.size - self.at) // 8:
            raise struct.error(_CUT_OFF)
        data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            end = at + 8 + unpack(data, at)[0]
            if keep is not None:
                keep.append(data[at + 8 : end])
            at = end
        if at > self.size:
            raise struct.error(_CUT_OFF)
        self.at = at


def check_header(path: str | Path, *, vocab_only: bool = False) -> None:
    """Raise `ModelLoadError`, with the reason, if llama.cpp would abort on the file.

    `vocab_only` skips the checks of sizes and tensors, which llama.cpp does not read in that case.
    Raises nothing else, whatever the file contains. A 150,000-token vocabulary takes about 0.1 s.
    """
    try:
        if not Path(path).exists():
            _reject("there is no such file")
        if not Path(path).is_file():
            _reject("it is not a file")
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                _reject("the file is empty", _DOWNLOAD_HINT)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _check(_Reader(data, size), vocab_only)
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot load {path}: {error.message}", hint=error.hint) from None
    except (struct.error, IndexError, OverflowError, MemoryError):
        raise ModelLoadError(f"cannot load {path}: {_CUT_OFF}", hint=_DOWNLOAD_HINT) from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from None


def _reject(reason: str, hint: str | None = None) -> NoReturn:
    raise ModelLoadError(reason, hint=hint)


def _check(reader: _Reader, vocab_only: bool) -> None:
    if reader.data[:4] != b"GGUF":
        _reject("it is not a GGUF file (its first bytes are not 'GGUF')")
    reader.at = 4
    version = reader.number("I")
    if version and not version & 0xFFFF:
        _reject("it was written on a big-endian machine")
    if version not in (2, 3):
        _reject(f"GGUF version {version} is not supported; 2 and 3 are")
    n_tensors, n_values = reader.number("Q"), reader.number("Q")
    # The smallest tensor entry takes 24 bytes, the smallest value 13.
    if n_tensors * 24 + n_values * 13 > reader.size:
        _reject(
            f"its header announces {n_tensors} tensors and {n_values} values, more than fit in the file",
            _DOWNLOAD_HINT,
        )
    metadata: dict[str, _Value | None] = {}
    for _ in range(n_values):
        key = reader.blob().decode("utf-8", "replace")
        if key in metadata:
            _reject(f"its header contains the key {key!r} twice")
        metadata[key] = reader.value(key)
    _check_vocabulary(metadata, reader.tokens)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        _reject("its header has no general.architecture")
    if vocab_only:
        return
    keys = _Keys(architecture, metadata)
    for check in (_check_sizes, _check_experts, _check_heads, _check_layer_kinds):
        check(keys)
    alignment = metadata.get("general.alignment", 32)
    _check_tensors(reader, n_tensors, alignment if isinstance(alignment, int) else 32)


class _Keys:
    """The metadata of one architecture, by the part of the key after its name."""

    def __init__(self, architecture: str, metadata: Mapping[str, _Value | None]) -> None:
        self.architecture = architecture
        self._metadata = metadata

    def get(self, key: str) -> _Value | None:
        return self._metadata.get(f"{self.architecture}.{key}")

    def integers(self, key: str) -> list[int]:
        """Return the value as a list, whether it is one number or one for each layer."""
        value = self.get(key)
        items = value if isinstance(value, list) else [value]
        return [item for item in items if isinstance(item, int)]

    def integer(self, key: str, default: int = 0) -> int:
        """Return the value, or that of the first layer."""
        return next(iter(self.integers(key)), default)


def _check_vocabulary(metadata: Mapping[str, _Value | None], tokens: list[bytes]) -> None:
    if metadata.get("tokenizer.ggml.model") in ("none", "no_vocab"):
        return
    if any(b"\0" in token for token in tokens):  # llama.cpp reads them as C strings
        tokens = [token.split(b"\0", 1)[0] for token in tokens]
    named = [token for token in tokens if token]  # llama.cpp renames empty ones
    if len(set(named)) == len(named):
        return
    seen: set[bytes] = set()
    for token in named:
        if token in seen:
            text = token.decode("utf-8", "replace")
            _reject(f"its vocabulary contains the token {text!r} twice", "convert the model again")
        seen.add(token)


def _check_sizes(keys: _Keys) -> None:
    blocks = keys.integer("block_count", 1)
    if not 0 < blocks <= _MAX_LAYERS:
        _reject(f"block_count is {blocks}, not between 1 and {_MAX_LAYERS}")
    extra = keys.integer("nextn_predict_layers")
    if not 0 <= extra <= blocks:
        _reject(f"nextn_predict_layers is {extra}, more than the {blocks} blocks")
    if keys.architecture in _RWKV and keys.integer("wkv.head_size", 64) != 64:
        _reject("wkv.head_size is not 64: llama.cpp would read out of bounds")
    for name in ("layer_norm_epsilon", "layer_norm_rms_epsilon"):
        epsilon = keys.get(f"attention.{name}")
        if isinstance(epsilon, float) and not epsilon >= 0:
            _reject(f"attention.{name} is {epsilon}")


def _check_experts(keys: _Keys) -> None:
    experts, used = keys.integer("expert_count"), max(keys.integers("expert_used_count"), default=0)
    groups, groups_used = (
        keys.integer("expert_group_count"),
        keys.integer("expert_group_used_count"),
    )
    if keys.architecture.startswith("hunyuan") and experts <= 1:
        return  # llama.cpp ignores them here
    if not 0 <= experts <= _MAX_EXPERTS:
        _reject(f"expert_count is {experts}, more than {_MAX_EXPERTS}")
    if used > experts or (experts and used < 1):
        _reject(f"expert_used_count is {used} of expert_count {experts}")
    if groups and groups >= experts:
        _reject(f"expert_group_count is {groups} of expert_count {experts}")
    if groups > 1 and (experts % groups or not 0 < groups_used < groups):
        _reject(f"{experts} experts in {groups} groups, {groups_used} of them used")


def _check_heads(keys: _Keys) -> None:
    scaling = keys.get("rope.scaling.type")
    if isinstance(scaling, str) and scaling not in _ROPE_SCALINGS:
        _reject(f"rope.scaling.type is {scaling!r}, not one of {', '.join(_ROPE_SCALINGS)}")
    for name in ("head_count", "head_count_kv", "key_length", "value_length"):
        if max(keys.integers(f"attention.{name}"), default=0) > _MAX_HEADS:
            _reject(f"attention.{name} is too large: sizes computed from it would overflow")
    n_head = keys.integer("attention.head_count")
    if n_head <= 0:
        return
    usual = keys.integer("embedding_length") // n_head
    d_key = keys.integer("attention.key_length", usual)
    d_value = keys.integer("attention.value_length", usual)
    if keys.architecture in _EQUAL_HEADS and d_key != d_value:
        _reject(f"attention.key_length is {d_key}, but value_length is {d_value}")
    rotated = d_key
    for kind in ("", "_swa"):  # sliding-window layers have sizes of their own
        d_key = keys.integer(f"attention.key_length{kind}", d_key)
        rotated = keys.integer(f"rope.dimension_count{kind}", rotated)
        if keys.architecture in _ROTATING and (not 0 < rotated <= d_key or rotated % 2):
            _reject(f"rope.dimension_count is {rotated}, not an even part of the head size {d_key}")


def _check_layer_kinds(keys: _Keys) -> None:
    """Reject a model with two kinds of memory, one of which would have no layers."""
    if keys.architecture in _LFM2:
        kinds = {heads == 0 for heads in keys.integers("attention.head_count_kv")}
        if len(kinds) == 1:
            _reject("it has no convolution layers or no attention layers, and needs both")
    if keys.architecture.startswith("gemma3") and keys.integer("attention.sliding_window"):
        pattern = keys.get("attention.sliding_window_pattern")
        if pattern == 1 or (isinstance(pattern, list) and not any(pattern)):
            _reject("attention.sliding_window is set, but no layer uses it")


def _check_tensors(reader: _Reader, count: int, alignment: int) -> None:
    end = 0
    for _ in range(count):
        name = reader.blob().decode("utf-8", "replace")
        n_dimensions = reader.number("I")
        if n_dimensions > _MAX_DIMENSIONS:
            _reject(f"the tensor {name!r} has {n_dimensions} dimensions", _DOWNLOAD_HINT)
        elements = 1
        for _ in range(n_dimensions):
            elements *= reader.number("Q")
        kind, offset = reader.number("I"), reader.number("Q")
        if name.endswith("norm.weight") and n_dimensions == 1 and kind != _F32:
            _reject(f"the tensor {name!r} is not F32: llama.cpp would abort at the first decode")
        block, block_bytes = _BLOCKS.get(kind, (1, 0))
        end = max(end, offset + elements // block * block_bytes)
    start = -(-reader.at // alignment) * alignment if alignment > 0 else reader.at
    if count and start + end > reader.size:
        missing = start + end - reader.size
        _reject(f"the file is truncated: its last {missing} bytes are missing", _DOWNLOAD_HINT)
