"""Heads that read a model's hidden states: EAGLE-3 files, and MTP layers in the model's own file.

llama.cpp would abort on an extraction that the architecture does not support: it is refused here. The
caller holds the lock of the context.
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

    A layer equal to the number of layers means the state before the output norm.

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
    """Return the first ``n`` rows of the last decode that ``extract`` provides for a layer.

    float32 (n, n_embd), or (n, n_embd_out) if ``layer`` is the number of layers; a view, valid until the
    next decode. They are in the order of the batch. For a head's states there are only rows of tokens
    with logits.
    """
    if layer < handle.n_layer:
        return _view(functions["get_layer"](handle.ptr, layer), n, handle.n_embd)
    return _view(functions["get_nextn"](handle.ptr), n, handle.n_embd_out)


def extract_embeddings(handle: ContextHandle, on: bool) -> None:
    """Set whether each decode extracts the states after the output norm; then all rows need logits."""
    C.llama_set_embeddings(handle.ptr, on)


def embedding_rows(handle: ContextHandle, n: int) -> Rows:
    """Return the last decode's ``n`` rows of states after the output norm, a copy."""
    return np.array(_view(address_of(C.llama_get_embeddings(handle.ptr)), n, handle.n_embd_out))


def _view(address: int | None, n: int, width: int) -> Rows:
    if not address:
        raise UnsupportedError("llama.cpp gave no hidden states")
    raw = (ctypes.c_float * (n * width)).from_address(address)
    return np.ctypeslib.as_array(raw).reshape(n, width)


def encode(handle: ContextHandle, features: Rows) -> tuple[int, Rows]:
    """Encode features with a head's encoder; return llama_encode's code and, if it is 0, the states.

    It overwrites the logits of the context. ``features``: float32 (n, width), at most as many rows as
    a decode has. The states are float32 (n, n_embd), a copy.
    """
    n = len(features)
    # Without positions llama.cpp continues those of sequence 0; the encoder does not read them.
    outputs = np.ones(n, dtype=np.int8)
    batch = C.llama_batch()
    batch.n_tokens = n
    batch.logits = outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
    batch.embd = features.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    code = int(C.llama_encode(handle.ptr, batch))
    if code:
        return code, features[:0]
    return code, extracted_rows(handle, handle.n_layer, n).copy()
