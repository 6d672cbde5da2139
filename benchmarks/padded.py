"""Padded models: the output of a small model at the cost of a larger one.

    python -m benchmarks.padded OUT.gguf --parameters 150M --type f16

A *padded model* is a copy of a model of the ``llama`` architecture with added weights that change
nothing. Its feed-forward part is wider, and the new columns of ``ffn_down`` are zero. It has more layers,
and their ``attn_output`` and ``ffn_down`` are zero, so they add nothing to the residual stream. It
computes the same logits as its source, but a decode costs as much as with a real model of its size. It
serves to measure speed without large weights. Its text is no better than that of its source.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFWriter

from llamabranch.hub import BUNDLED_TARGET, resolve

from .report import PADDED_KEY

__all__ = [
    "Shape",
    "cached_padded",
    "cached_useless",
    "make_padded",
    "make_useless",
    "parse_size",
    "plan_shape",
]

FILE_TYPES = {"f16": 1, "q8_0": 7}
WIDEST = 8192  # feed-forward width; few real models are wider, so more parameters become layers
_STEP = 256  # widths are multiples of it
_ZERO = ("attn_output", "ffn_down")

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Shape:
    """The part of a model's shape that padding changes."""

    n_layer: int
    n_ff: int


@dataclass(frozen=True)
class _Tensor:
    """A tensor to be written: its name, shape as NumPy has it, and whether it is a matrix."""

    name: str
    shape: tuple[int, ...]

    @property
    def role(self) -> str:
        return self.name.removesuffix(".weight").rsplit(".", 1)[-1]

    @property
    def layer(self) -> int:
        return int(self.name.split(".")[1]) if self.name.startswith("blk.") else -1

    @property
    def n_params(self) -> int:
        return int(np.prod(self.shape))


def plan_shape(n_params: int, source: Shape, n_fixed: int, n_attention: int, n_embd: int) -> Shape:
    """Return the shape with about ``n_params`` parameters: wide first, then deep.

    Args:
        n_fixed: parameters outside the layers.
        n_attention: parameters of a layer without its feed-forward part.

    Raises:
        ValueError: the source has more than ``n_params`` parameters.
    """

    def count(n_layer: int, n_ff: int) -> int:
        return n_fixed + n_layer * (n_attention + 3 * n_embd * n_ff)

    if count(source.n_layer, source.n_ff) > n_params:
        raise ValueError(f"the source has more than {n_params:,} parameters")
    n_layer = source.n_layer
    while count(n_layer, max(WIDEST, source.n_ff)) < n_params:
        n_layer += 1
    left = (n_params - n_fixed) / n_layer - n_attention
    n_ff = max(source.n_ff, round(left / (3 * n_embd) / _STEP) * _STEP)
    return Shape(n_layer, n_ff)


def make_padded(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    n_params: int,
    file_type: str = "f16",
) -> Path:
    """Write a padded copy of ``source`` with about ``n_params`` parameters; return its path.

    Args:
        source: a GGUF of the ``llama`` architecture with F32, F16 or Q8_0 weights.
        file_type: the type of the matrices, "f16" or "q8_0". Weights that already have this type are
            copied bit for bit; others are converted.

    Raises:
        ValueError: another architecture, an unknown type, or a source with more parameters.
    """
    if file_type not in FILE_TYPES:
        raise ValueError(f"file type {file_type!r}: use one of {', '.join(FILE_TYPES)}")
    path = Path(path)
    reader = gguf.GGUFReader(os.fspath(source))
    shape = _shape(reader)
    tensors = [_Tensor(t.name, tuple(int(n) for n in reversed(t.shape))) for t in reader.tensors]
    n_embd = _number(reader, "llama.embedding_length")
    n_fixed = sum(t.n_params for t in tensors if t.layer < 0)
    layer = [t for t in tensors if t.layer == shape.n_layer - 1]
    n_attention = sum(t.n_params for t in layer if not _is_wide(t))
    wanted = plan_shape(n_params, shape, n_fixed, n_attention, n_embd)
    template = [t for t in tensors if t.layer == 0]
    planned = [_widened(t, wanted) for t in tensors]
    for i in range(shape.n_layer, wanted.n_layer):
        planned += [_widened(_Tensor(_of_layer(t, i), t.shape), wanted) for t in template]
    total = sum(t.n_params for t in planned)
    changed: dict[str, int | str] = {
        "llama.block_count": wanted.n_layer,
        "llama.feed_forward_length": wanted.n_ff,
        "general.file_type": FILE_TYPES[file_type],
        "general.name": f"{_text(reader, 'general.name')}-padded-{_size(n_params)}",
        "general.size_label": _size(total),
        "general.description": "A padded model: the output of its source at the cost of a larger model.",
    }
    temporary = path.with_suffix(".tmp")
    writer = _copy_keys(reader, temporary, changed)
    writer.add_uint32(PADDED_KEY, total)
    _write_tensors(writer, planned, _Matrices(reader, file_type))
    os.replace(temporary, path)
    return path


def make_useless(
    source: str | os.PathLike[str], path: str | os.PathLike[str], seed: int = 1
) -> Path:
    """Write a model of the source's shape, types and vocabulary whose matrices are noise."""
    path = Path(path)
    reader = gguf.GGUFReader(os.fspath(source))
    shapes = [_Tensor(t.name, tuple(int(n) for n in reversed(t.shape))) for t in reader.tensors]
    temporary = path.with_suffix(".tmp")
    writer = _copy_keys(reader, temporary, {"general.name": "useless"})
    _write_tensors(writer, shapes, _Noise(reader, seed))
    os.replace(temporary, path)
    return path


def cached_padded(source: Path, folder: Path, n_params: int, file_type: str) -> Path:
    """Return the path of the padded model in ``folder``; write it if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{source.stem}-{_digest(source)}-padded-{_size(n_params)}-{file_type}.gguf"
    return path if path.exists() else make_padded(source, path, n_params, file_type)


def cached_useless(source: Path, folder: Path) -> Path:
    """Return the path of the useless model in ``folder``; write it if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{source.stem}-{_digest(source)}-useless.gguf"
    return path if path.exists() else make_useless(source, path)


def _digest(path: Path) -> str:
    """Return eight hex digits of a hash of the file's size, its first MiB and its last MiB."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(str(size).encode() + file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()[:8]


# -- shapes ----------------------------------------------------------------------------------------


def _shape(reader: GGUFReader) -> Shape:
    if _text(reader, "general.architecture") != "llama":
        raise ValueError("only models of the llama architecture can be padded")
    return Shape(_number(reader, "llama.block_count"), _number(reader, "llama.feed_forward_length"))


def _number(reader: GGUFReader, key: str) -> int:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the source has no {key}")
    return int(field.contents())


def _text(reader: GGUFReader, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())


def _is_wide(tensor: _Tensor) -> bool:
    return tensor.role in ("ffn_gate", "ffn_up", "ffn_down")


def _widened(tensor: _Tensor, wanted: Shape) -> _Tensor:
    if not _is_wide(tensor):
        return tensor
    rows, columns = tensor.shape
    if tensor.role == "ffn_down":
        return _Tensor(tensor.name, (rows, wanted.n_ff))
    return _Tensor(tensor.name, (wanted.n_ff, columns))


def _of_layer(tensor: _Tensor, layer: int) -> str:
    return f"blk.{layer}." + tensor.name.split(".", 2)[2]


def _size(n_params: int) -> str:
    return f"{n_params / 1e6:.3g}M"


# -- tensors ---------------------------------------------------------------------------------------


def _noise(generator: np.random.Generator, shape: Sequence[int]) -> Array:
    """Return random weights at the scale that keeps activations near one."""
    values: Array = generator.standard_normal(tuple(shape), dtype=np.float32)
    values /= np.float32(np.sqrt(shape[-1]))
    return values


class _Source(Protocol):
    """The source of the values of tensors to be written."""

    def type_of(self, tensor: _Tensor) -> gguf.GGMLQuantizationType:
        """Return the type that the tensor is written in."""

    def values(self, tensor: _Tensor) -> Bytes:
        """Return the tensor's values, encoded in that type."""


class _Noise:
    """Random values, in the types of the source's tensors."""

    def __init__(self, reader: GGUFReader, seed: int) -> None:
        self._kinds = {t.name: t.tensor_type for t in reader.tensors}
        self._generator = np.random.default_rng(seed)

    def type_of(self, tensor: _Tensor) -> gguf.GGMLQuantizationType:
        return self._kinds[tensor.name]

    def values(self, tensor: _Tensor) -> Bytes:
        if len(tensor.shape) == 1:
            return np.ones(tensor.shape, dtype=np.float32)
        return _encode(_noise(self._generator, tensor.shape), self._kinds[tensor.name])


class _Matrices:
    """The values of a padded model's tensors; ask for them in the order of the file."""

    def __init__(self, reader: GGUFReader, file_type: str) -> None:
        self._sources = {t.name: t for t in reader.tensors}
        kinds = gguf.GGMLQuantizationType
        self._kind = kinds.F16 if file_type == "f16" else kinds.Q8_0
        self._generator = np.random.default_rng(1)
        self._drawn: dict[tuple[str, tuple[int, ...]], Bytes] = {}

    def type_of(self, tensor: _Tensor) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType.F32 if len(tensor.shape) == 1 else self._kind

    def values(self, tensor: _Tensor) -> Bytes:
        if tensor.name in self._sources:
            return self._copied(tensor)
        # All added layers share their random values: drawing them takes longer than writing them.
        key = (tensor.role, tensor.shape)
        if key not in self._drawn:
            self._drawn[key] = self._added(tensor)
        return self._drawn[key]

    def _added(self, tensor: _Tensor) -> Bytes:
        if len(tensor.shape) == 1:
            return np.ones(tensor.shape, dtype=np.float32)
        if tensor.role in _ZERO:
            return self._encoded(np.zeros(tensor.shape, dtype=np.float32))
        return self._encoded(_noise(self._generator, tensor.shape))

    def _copied(self, tensor: _Tensor) -> Bytes:
        source = self._sources[tensor.name]
        if len(tensor.shape) == 1:
            return np.array(source.data, dtype=np.float32)
        if source.tensor_type == self._kind:
            mine: Bytes = np.array(source.data)
        else:
            mine = self._encoded(gguf.quants.dequantize(source.data, source.tensor_type))
        rows, columns = (int(n) for n in reversed(source.shape))
        if tensor.shape == (rows, columns):
            return mine
        if tensor.role == "ffn_down":
            rest = np.zeros((rows, tensor.shape[1] - columns), dtype=np.float32)
            return np.concatenate([mine, self._encoded(rest)], axis=1)
        rest = _noise(self._generator, (tensor.shape[0] - rows, columns))
        return np.concatenate([mine, self._encoded(rest)], axis=0)

    def _encoded(self, values: Array) -> Bytes:
        return _encode(values, self._kind)


def _encode(values: Array, kind: gguf.GGMLQuantizationType) -> Bytes:
    encoded: Bytes = gguf.quants.quantize(np.ascontiguousarray(values), kind)
    return encoded


# -- the file --------------------------------------------------------------------------------------


def _copy_keys(reader: GGUFReader, path: Path, changed: dict[str, int | str]) -> GGUFWriter:
    writer = gguf.GGUFWriter(path, _text(reader, "general.architecture"))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, *rest = field.types
        value = changed.get(field.name, field.contents())
        writer.add_key_value(field.name, value, kind, sub_type=rest[-1] if rest else None)
    for key, value in changed.items():
        if reader.get_field(key) is None:
            kind = (
                gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
            )
            writer.add_key_value(key, value, kind)
    return writer


def _write_tensors(writer: GGUFWriter, tensors: Sequence[_Tensor], source: _Source) -> None:
    """Write tensor after tensor, so that a large model is never in memory as a whole."""
    for tensor in tensors:
        kind = source.type_of(tensor)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        n_bytes = tensor.n_params // block * size
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(np.ascontiguousarray(source.values(tensor)))
    writer.close()


def parse_size(text: str) -> int:
    """Return the number of parameters that a text like "150M" or "12345" means.

    Raises:
        ValueError: the text is not a number.
    """
    factor = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper())
    return round(float(text) if factor is None else float(text[:-1]) * factor)


def main() -> None:
    """Write one padded model."""
    parser = argparse.ArgumentParser(
        description="write a model with the output of a small one at the cost of a larger one"
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", help="GGUF of the llama architecture; default: bundled target")
    parser.add_argument("--parameters", type=parse_size, default=150_000_000, metavar="N")
    parser.add_argument(
        "--type", choices=FILE_TYPES, default="f16", help="type of the weight matrices"
    )
    args = parser.parse_args()
    source = resolve(args.source or BUNDLED_TARGET)
    path = make_padded(source, args.out, args.parameters, args.type)
    print(f"{path}: {path.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
