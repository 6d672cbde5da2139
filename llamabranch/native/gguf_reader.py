"""Read the header of a GGUF file: its metadata and the list of its tensors, without llama.cpp.

A file that is certainly not a model is refused: missing, empty, not GGUF, or truncated.
``gguf_check`` decides whether llama.cpp survives a readable one.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from ..errors import ModelLoadError

Value = bool | int | float | str | list[int] | list[float]

# GGUF value types with a fixed size: number and struct code.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_KEPT_ARRAY = 512  # enough for one number per layer; longer arrays are tokenizer data

# ggml tensor types: number, elements and bytes of a block. The size of other types is not checked.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 30: (1, 2),  # F32, F16, BF16
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),  # Q4_0 to Q8_0
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),  # Q2_K to Q6_K
}  # fmt: skip
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_ALIGNMENT = 32  # of weights in memory (TENSOR_ALIGNMENT), and by default in a file
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
_CUT_OFF = "the file ends in the middle of its header"
_DOWNLOAD_HINT = "download it again: the file is incomplete or damaged"


def type_bytes(kind: int) -> float:
    """Return the bytes per number of a ggml type; 0 if its size is not known."""
    numbers, size = _BLOCKS.get(kind, (1, 0))
    return size / numbers


class TensorInfo(NamedTuple):
    """A tensor's entry in the header; ``kind`` is its ggml type, ``offset`` in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def end(self) -> int:
        """The offset after its last byte, or after its first if the size of its type is not known."""
        block, block_bytes = _BLOCKS.get(self.kind, (1, 0))
        return self.offset + math.prod(self.shape) // block * block_bytes


@dataclass(frozen=True)
class Header:
    """What the header of a GGUF file contains.

    Attributes:
        architecture: ``general.architecture``.
        metadata: all values by key; None for arrays of strings. Long arrays of numbers have only their
            first 512 items.
        tokens: the vocabulary, as bytes.
        tensors: the list of the tensors of all parts; empty if it was not read.
        parts: the files of the model: one, or all parts in order.
        is_mappable: whether each tensor lies at a multiple of 32 bytes in its file. Mapping any other
            file into memory would make llama.cpp end the process.
    """

    architecture: str
    metadata: Mapping[str, Value | None]
    tokens: Sequence[bytes]
    tensors: Sequence[TensorInfo]
    parts: tuple[Path, ...] = ()
    is_mappable: bool = True

    def split(self, key: str) -> int:
        """Return ``no`` (the part's number, from 0) or ``count`` of a split model; -1 if missing."""
        value = self.metadata.get(f"split.{key}")
        return value if isinstance(value, int) else -1

    def get(self, key: str) -> Value | None:
        """Return the value of an architecture's key; ``key`` comes without the architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def integers(self, key: str) -> list[int]:
        """Return the value as a list, whether it is one number or one for each layer."""
        value = self.get(key)
        items = value if isinstance(value, list) else [value]
        return [item for item in items if isinstance(item, int)]

    def integer(self, key: str, default: int = 0) -> int:
        """Return the value, or the first layer's value."""
        return next(iter(self.integers(key)), default)

    def kv_numbers(self) -> int:
        """Return the fewest K/V numbers that a cell of a full cache can have; 0 if that is not known."""
        if self.integer("attention.kv_lora_rank"):
            return 0  # MLA stores K/V in another form
        heads = self.integers("attention.head_count_kv") or self.integers("attention.head_count")
        n_layer = self.integer("block_count") - self.integer("nextn_predict_layers")
        n_layer -= self.integer("attention.shared_kv_layers")  # these have no K/V of their own
        n_head = self.integer("attention.head_count")
        if n_head <= 0 or n_layer <= 0 or not heads:
            return 0
        sizes = self.head_sizes(n_head)
        of_window = (
            self.integer(f"attention.{kind}_length_swa", size)
            for kind, size in zip(("key", "value"), sizes, strict=True)
        )
        # With one number for all layers, some layers of a hybrid model have no K/V; in other models,
        # all have.
        return sum(sorted(heads)[:n_layer] if len(heads) > 1 else heads * n_layer) * min(
            sum(sizes), sum(of_window)
        )

    def state_numbers(self) -> int:
        """Return how many numbers a sequence's recurrent state has; 0 if that is not known.

        They are the last inputs of the convolutions and the states of the scans.
        """
        carried = self.integer("ssm.state_size") * self.integer("ssm.inner_size")
        n = 0
        for name, shape, _, _ in self.tensors:
            is_scanned = name.endswith(".ssm_conv1d.weight")
            if is_scanned or name.endswith(".shortconv.conv.weight"):
                n += (shape[0] - 1) * math.prod(shape[1:]) + is_scanned * carried
        return n

    def head_sizes(self, n_head: int) -> tuple[int, int]:
        """Return the sizes of keys and values of one of ``n_head`` heads."""
        usual = self.integer("embedding_length") // n_head
        key, value = (self.integer(f"attention.{kind}_length", usual) for kind in ("key", "value"))
        return key, value


class _Reader:
    """A position in the bytes of a file; every read beyond the end raises `struct.error`."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self.data = data
        self.size = size
        self.at = 0
        self.tokens: list[bytes] = []  # the array `tokenizer.ggml.tokens`

    def number(self, code: str) -> int:
        """Read one little-endian integer with this struct code."""
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

    def value(self, key: str) -> Value | None:
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
        """Read numbers; of a long array only the first ones, which are enough for the checks."""
        if kind not in _SCALARS:
            _reject(f"its header has a value of unknown type {kind}")
        length = count * struct.calcsize(_SCALARS[kind])
        if length > self.size - self.at:
            raise struct.error(_CUT_OFF)
        n_kept = min(count, _KEPT_ARRAY)
        values = struct.unpack_from(f"<{n_kept}{_SCALARS[kind]}", self.data, self.at)
        self.at += length
        return list(values)

    def _strings(self, count: int, keep: list[bytes] | None) -> None:
        """Read an array of strings. A vocabulary has 150,000 of them, so the loop is kept short."""
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


def read_header(path: str | Path, *, tensors: bool = True) -> Header:
    """Return the header of a model; for a split model, with the tensors of all parts.

    llama.cpp's gguf-split writes the metadata only into the first part. The other parts are found by
    name: ``tale-00001-of-00003.gguf`` and so on. ``tensors=False`` skips the lists of tensors.

    Raises:
        ModelLoadError: a file cannot be read, is not a GGUF file, or is truncated; a part is missing or
            belongs to another model; the path is a later part. No other error is raised, whatever the
            files contain.
    """
    path = Path(path)
    first = _read_file(path, tensors=tensors)
    count, number = first.split("count"), first.split("no")
    with _about(path):
        if number > 0 or (count > 1 and number < 0):
            _reject(*_later_part(path, number, count))
        if not first.architecture:
            _reject("its header has no general.architecture")
        if count < 2:
            return first
        named = _PART.fullmatch(path.name)
        if named is None or (int(named["number"]), int(named["count"])) != (1, count):
            _reject(
                f"it is the first of {count} parts, but its name does not end in "
                f"-00001-of-{count:05d}.gguf",
                "restore the original names of all parts, because llama.cpp finds them by name",
            )
        parts = [first]
        for i in range(1, count):
            part = _part_path(path, named["stem"], i, count)
            if not part.is_file():
                _reject(
                    f"part {i + 1} of {count} is missing: {part.name}",
                    "put all parts of the model in one folder",
                )
            header = _read_file(part, tensors=tensors)
            number, n = header.split("no"), header.split("count")
            if (number, n) != (i, count):
                place = f"part {number + 1} of {n}" if n > 0 else "not part of a split model"
                with _about(part):
                    _reject(
                        f"it is not part {i + 1} of {count} of a model: it is {place}",
                        "part of another file has this name; get the parts again",
                    )
            parts.append(header)
        all_tensors = [tensor for header in parts for tensor in header.tensors]
        expected = first.split("tensors.count")
        names = {tensor.name for tensor in all_tensors}
        if tensors and (len(names) < len(all_tensors) or expected not in (-1, len(all_tensors))):
            doubled = len(all_tensors) - len(names)
            _reject(
                f"its parts have {len(all_tensors)} tensors, {doubled} of them twice; it was split "
                f"from a model of {expected}",
                "the parts are of different models; get them again",
            )
    files, is_mappable = tuple(p for h in parts for p in h.parts), all(h.is_mappable for h in parts)
    return replace(first, tensors=all_tensors, parts=files, is_mappable=is_mappable)


def _part_path(path: Path, stem: str, index: int, count: int) -> Path:
    return path.with_name(f"{stem}-{index + 1:05d}-of-{count:05d}.gguf")


def _later_part(path: Path, number: int, count: int) -> tuple[str, str]:
    """Return the error message for a part other than the first, and a hint that names the first."""
    named, hint = _PART.fullmatch(path.name), f", whose name ends in -00001-of-{count:05d}.gguf"
    if named is not None:
        first = _part_path(path, named["stem"], 0, count)
        hint = f": {first if first.is_file() else f'{first.name}, which is not in the same folder'}"
    return f"it is part {number + 1} of {count} of a split model", f"use the first part{hint}"


def _read_file(path: Path, *, tensors: bool) -> Header:
    """Return the header of one file, which may be any part of a model, or not a model at all."""
    with _about(path):
        if not path.exists():
            _reject("there is no such file")
        if not path.is_file():
            _reject("it is not a file")
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                _reject("the file is empty", _DOWNLOAD_HINT)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                if data[:4] != b"GGUF":
                    _reject(f"it is not a GGUF file (it begins with {data[:16]!r})", _DOWNLOAD_HINT)
                return replace(_header(_Reader(data, size), tensors), parts=(path,))


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Turn errors of this block into a ModelLoadError that names the file."""
    try:
        yield
    except ModelLoadError as error:
        if error.message.startswith("cannot "):
            raise
        raise ModelLoadError(f"cannot load {path}: {error.message}", hint=error.hint) from None
    except (struct.error, IndexError, OverflowError, MemoryError):
        raise ModelLoadError(f"cannot load {path}: {_CUT_OFF}", hint=_DOWNLOAD_HINT) from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from None


def _reject(reason: str, hint: str | None = None) -> NoReturn:
    raise ModelLoadError(reason, hint=hint)


def _header(reader: _Reader, tensors: bool) -> Header:
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
            f"its header says {n_tensors} tensors and {n_values} values, more than fit in the file",
            _DOWNLOAD_HINT,
        )
    metadata: dict[str, Value | None] = {}
    for _ in range(n_values):
        key = reader.blob().decode("utf-8", "replace")
        if key in metadata:
            _reject(f"its header contains the key {key!r} twice")
        metadata[key] = reader.value(key)
    architecture = metadata.get("general.architecture")
    alignment, is_mappable = metadata.get("general.alignment", _ALIGNMENT), True
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        _reject(f"its general.alignment must be a power of two, not {alignment!r:.40}")
    infos = []
    for _ in range(n_tensors if tensors else 0):
        name, n_dimensions = reader.blob().decode("utf-8", "replace"), reader.number("I")
        if n_dimensions > _MAX_DIMENSIONS:
            _reject(f"the tensor {name!r} has {n_dimensions} dimensions", _DOWNLOAD_HINT)
        shape = tuple(reader.number("Q") for _ in range(n_dimensions))
        infos.append(TensorInfo(name, shape, reader.number("I"), reader.number("Q")))
    if infos:
        start = -(-reader.at // alignment) * alignment
        is_mappable = all((start + tensor.offset) % _ALIGNMENT == 0 for tensor in infos)
        missing = start + max(tensor.end for tensor in infos) - reader.size
        if missing > 0:
            reason = f"the file is truncated: its last {missing} bytes are missing"
            _reject(reason, _DOWNLOAD_HINT)
    name = architecture if isinstance(architecture, str) else ""
    return Header(name, metadata, reader.tokens, infos, is_mappable=is_mappable)
