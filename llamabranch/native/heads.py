"""Heads that read a model's hidden states: EAGLE-3 files, and MTP layers in the model's own file.

What llama.cpp would abort on is checked here: an extraction that the architecture cannot give, rows of a
wrong width, too large batches. The caller holds the lock of the context that a function gets.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C

from ..errors import ConfigError, UnsupportedError
from .context import ContextHandle
from .staging import LAYER_INPUTS, NEXTN_OUTPUT, check_available, functions

__all__ = [
    "Encoder",
    "ExtractedRows",
    "Rows",
    "embedding_rows",
    "extract_embeddings",
    "extract_layers",
    "extract_nextn",
    "nextn_rows",
    "use_mtp_layer",
]

Rows = npt.NDArray[np.float32]

# -- what a context gives out --------------------------------------------------------------------------


def extract_layers(handle: ContextHandle, layers: Iterable[int], on: bool) -> None:
    """Give out the inputs of these layers with each decode, or no longer.

    Raises:
        UnsupportedError: no staging interface, or the architecture does not give them.
        ConfigError: no such layer.
    """
    check_available()
    layers = sorted(layers)
    if on and layers and handle.architecture not in LAYER_INPUTS:
        raise UnsupportedError(
            f"llama.cpp does not give the hidden states of inner layers of {handle.architecture} models",
            hint="layer -1, what the output matrix reads, is given for every architecture",
        )
    for layer in layers:
        if not 0 <= layer < handle.n_layer:
            raise ConfigError(f"there is no layer {layer}: the model has {handle.n_layer}")
    for layer in layers:
        functions["set_layer"](handle.ptr, layer, on)


def extract_nextn(handle: ContextHandle, on: bool, *, masked: bool) -> None:
    """Give out the state before the output norm with each decode, or no longer.

    ``masked``: of the rows with logits only. Raises UnsupportedError as ``extract_layers``.
    """
    check_available()
    if on and not masked and handle.architecture not in NEXTN_OUTPUT:
        raise UnsupportedError(
            f"llama.cpp does not give the last hidden state of {handle.architecture} models"
        )
    functions["set_nextn"](handle.ptr, on, masked)


def extract_embeddings(handle: ContextHandle, on: bool) -> None:
    """Give out the state after the output norm with each decode, or no longer; all rows need logits."""
    C.llama_set_embeddings(handle.ptr, on)


def embedding_rows(handle: ContextHandle, n: int) -> Rows:
    """Return the last decode's ``n`` rows of states after the output norm, a copy."""
    address = ctypes.cast(C.llama_get_embeddings(handle.ptr), ctypes.c_void_p).value
    return np.array(_view(address, n, handle.n_embd_out))


class ExtractedRows:
    """What a context gives out of each token: the inputs of a layer, or the state before the output norm.

    Args:
        handle: the context.
        layer: the number of layers = the state.
    """

    def __init__(self, handle: ContextHandle, layer: int) -> None:
        self._handle = handle
        self._layer = layer if layer < handle.n_layer else None
        self.width = handle.n_embd if layer < handle.n_layer else handle.n_embd_out
        self._address: int | None = None
        self._rows: Rows = np.empty((0, self.width), dtype=np.float32)

    def rows(self) -> Rows:
        """Return the rows of the last decode in the order of its batch, float32 (n_batch, width).

        A view, valid until the next decode; only as many rows as that had tokens are of it. It must have
        been extracted in that decode.
        """
        handle, layer = self._handle, self._layer
        if layer is None:
            address = functions["get_nextn"](handle.unchecked_ptr)
        else:
            address = functions["get_layer"](handle.unchecked_ptr, layer)
        if not address or address != self._address:
            self._address = address
            self._rows = _view(address, handle.n_batch, self.width)
        return self._rows


def nextn_rows(handle: ContextHandle, n: int) -> Rows:
    """Return the first ``n`` rows of states before the output norm, float32 (n, n_embd_out), a view.

    Rows of all tokens, or of those with logits, as ``extract_nextn`` chose; valid until the next decode.
    """
    return _view(functions["get_nextn"](handle.ptr), n, handle.n_embd_out)


def _view(address: int | None, n: int, width: int) -> Rows:
    if not address:
        raise UnsupportedError("llama.cpp gave no hidden states")
    raw = (ctypes.c_float * (n * width)).from_address(address)
    return np.ctypeslib.as_array(raw).reshape(n, width)


def use_mtp_layer(handle: ContextHandle, number: int) -> None:
    """Compute with the MTP layer of that number, 0 the first, from the next decode on."""
    functions["set_layer_offset"](handle.ptr, number)


# -- what goes in --------------------------------------------------------------------------------------


class Encoder:
    """The encoder of a head, which turns rows of features into states.

    Args:
        context: the head's context.
        width: numbers in a row.
        n_max: rows at a time.
    """

    def __init__(self, context: ContextHandle, width: int, n_max: int) -> None:
        check_available()
        self._context = context
        self.width = width
        self.n_max = n_max

    def check(self, features: Rows) -> None:
        """Raise ConfigError unless these are float32 rows of its width, 1 to ``n_max`` of them."""
        n = len(features)
        if features.shape != (n, self.width) or features.dtype != np.float32:
            raise ConfigError(
                f"the head reads float32 rows of {self.width}, not {features.dtype} {features.shape}"
            )
        if not 0 < n <= self.n_max:
            raise ConfigError(f"{n} rows do not fit the batch: 1 to {self.n_max} do")

    def encode(self, features: Rows) -> tuple[int, Rows]:
        """Return llama_encode's code and, if it is 0, the states, float32 (n, n_embd), a copy.

        It overwrites the logits of the context. ``features``: float32 (n, width), at most ``n_max`` rows.

        Raises:
            ConfigError: another shape or type.
        """
        self.check(features)
        features = np.ascontiguousarray(features)
        # Without positions llama.cpp continues those of sequence 0; the encoder reads none.
        outputs = np.ones(len(features), dtype=np.int8)
        batch = C.llama_batch()
        batch.n_tokens = len(features)
        batch.logits = outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        batch.embd = features.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        code = int(C.llama_encode(self._context.ptr, batch))
        return code, nextn_rows(self._context, len(features)).copy() if code == 0 else features[:0]
