"""Heads that read a model's hidden states: EAGLE-3 files, and MTP layers in the model's own file.

llama.cpp would abort on an extraction that the architecture does not support, so it is refused here.
The caller holds the context's lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C

from ..errors import ConfigError, UnsupportedError
from .context import ContextHandle
from .library import address_of
from .staging import LAYER_INPUTS, NEXTN_OUTPUT, check_available, functions

Rows = npt.NDArray[np.float32]


def extract(handle: ContextHandle, layers: Sequence[int], on: bool) -> None:
    """Set whether each decode extracts the inputs of these layers.

    The number of layers stands for the state before the output norm.

    Raises:
        UnsupportedError: no staging interface, or the architecture does not provide them.
        ConfigError: no such layer.
    """
    check_available()
    n = handle.n_layer
    bad = [layer for layer in layers if not 0 <= layer <= n]
    if bad:
        raise ConfigError(f"there is no layer {bad[0]}: the model has {n}")
    has_last, inner = n in layers, [layer for layer in layers if layer < n]
    if on and has_last and handle.architecture not in NEXTN_OUTPUT:
        raise UnsupportedError(
            f"llama.cpp does not provide the last hidden state of {handle.architecture} models"
        )
    if on and inner and handle.architecture not in LAYER_INPUTS:
        raise UnsupportedError(
            f"llama.cpp does not provide hidden states of inner layers of {handle.architecture} models",
            hint="layer -1, the input of the output matrix, is available for every architecture",
        )
    if on or has_last:
        functions["set_nextn"](handle.ptr, on and has_last, False)
    for layer in inner:
        functions["set_layer"](handle.ptr, layer, on)


def extracted_rows(handle: ContextHandle, layer: int, n: int) -> Rows:
    """Return the first ``n`` rows that ``extract`` made the last decode provide for a layer.

    A view, valid until the next decode: float32 (n, n_embd), or (n, n_embd_out) if ``layer`` is the
    number of layers, in the order of the batch. A head's states have rows only for tokens with logits.
    """
    if layer < handle.n_layer:
        return _view(functions["get_layer"](handle.ptr, layer), n, handle.n_embd)
    return _view(functions["get_nextn"](handle.ptr), n, handle.n_embd_out)


def extract_embeddings(handle: ContextHandle, on: bool) -> None:
    """Set whether decodes extract the states after the output norm; all rows then need logits."""
    C.llama_set_embeddings(handle.ptr, on)


def embedding_rows(handle: ContextHandle, n: int) -> Rows:
    """Return a copy of the last decode's ``n`` rows of states after the output norm."""
    return np.array(_view(address_of(C.llama_get_embeddings(handle.ptr)), n, handle.n_embd_out))


def _view(address: int | None, n: int, width: int) -> Rows:
    if not address:
        raise UnsupportedError("llama.cpp gave no hidden states")
    raw = (ctypes.c_float * (n * width)).from_address(address)
    return np.ctypeslib.as_array(raw).reshape(n, width)


def encode(handle: ContextHandle, features: Rows) -> tuple[int, Rows]:
    """Encode features with a head's encoder; return llama_encode's code and, if it is 0, the states.

    It overwrites the context's logits. ``features`` is float32 (n, width), with at most as many rows as
    a decode can have. The states are a copy, float32 (n, n_embd).
    """
    n = len(features)
    # Without positions, llama.cpp continues sequence 0; the encoder does not read positions.
    outputs = np.ones(n, dtype=np.int8)
    batch = C.llama_batch()
    batch.n_tokens = n
    batch.logits = outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
    batch.embd = features.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    code = int(C.llama_encode(handle.ptr, batch))
    if code:
        return code, features[:0]
    return code, extracted_rows(handle, handle.n_layer, n).copy()
