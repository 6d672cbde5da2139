"""Heads that read a model's hidden states: EAGLE-3 files, and MTP layers in the model's own file.

llama.cpp calls most of this its staging interface: exported under C++ names, not in llama.h, and allowed
to change. The functions are looked up once, when this module is imported. Where one is missing,
``available`` is False, ``reason`` names it, and nothing else is affected.

The caller holds the lock of the context that a function gets. What llama.cpp would abort on is checked
here: an extraction that the architecture cannot give, rows of a wrong width, too large batches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C

from ..errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from .context import ContextHandle

__all__ = [
    "KNOWN_RELEASE",
    "LAYER_INPUTS",
    "MTP_CHAINS",
    "MTP_LAYERS",
    "NEXTN_OUTPUT",
    "SHARING_HEAD",
    "SHARING_TARGET",
    "STAGING",
    "DraftHead",
    "Encoder",
    "ExtractedRows",
    "Rows",
    "available",
    "check_available",
    "extract_layers",
    "extract_nextn",
    "look_up",
    "n_mtp_layers",
    "nextn_rows",
    "reason",
    "target_layers",
    "use_mtp_layer",
]

Rows = npt.NDArray[np.float32]

KNOWN_RELEASE = "llama-cpp-python 0.3.36"

# Architectures whose graph has the inputs of its layers, and those whose graph has the state before the
# output norm. llama.cpp aborts, or gives zeros, where it is asked for what a graph does not have.
LAYER_INPUTS = frozenset({
    "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan_vl", "lfm2", "llama", "mimo2",
    "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "qwen3", "qwen35",
    "qwen35moe", "qwen3moe", "qwen3next",
})  # fmt: skip
NEXTN_OUTPUT = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "gemma4", "glm-dsa",
    "glm4moe", "gpt-oss", "hy_v3", "mimo2", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe",
    "qwen3next", "step35",
})  # fmt: skip

# Architectures whose MTP layers are computed, and those of which several are: of the others llama.cpp
# aborts on a second one.
MTP_LAYERS = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe",
    "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35",
})  # fmt: skip
# The architecture whose layers attend to the K/V of another model, and the one of that model.
SHARING_HEAD, SHARING_TARGET = "gemma4-assistant", "gemma4"
MTP_CHAINS = frozenset({"hy_v3", "mimo2", "step35"})

_P, _I32, _U32, _BOOL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_bool
# The names of the Itanium C++ ABI: GCC and Clang, on every system but Windows with MSVC.
STAGING: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "set_nextn": ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, (_P, _BOOL, _BOOL)),
    "get_nextn": ("_Z26llama_get_embeddings_nextnP13llama_context", _P, (_P,)),
    "set_layer_offset": ("_Z28llama_set_nextn_layer_offsetP13llama_contexti", None, (_P, _I32)),
    "set_layer": ("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, (_P, _U32, _BOOL)),
    "get_layer": ("_Z30llama_get_embeddings_layer_inpP13llama_contextj", _P, (_P, _U32)),
    "target_layers": ("_Z28llama_model_target_layer_idsPK11llama_model", _P, (_P,)),
    "n_target_layers": ("_Z30llama_model_target_layer_ids_nPK11llama_model", _U32, (_P,)),
    "n_layer_nextn": ("llama_model_n_layer_nextn", _I32, (_P,)),
}


def look_up() -> tuple[dict[str, Any], str]:
    """Return the functions, and why some cannot be used, "" if all can."""
    found: dict[str, Any] = {}
    missing = []
    for name, (symbol, result, arguments) in STAGING.items():
        try:
            found[name] = ctypes.CFUNCTYPE(result, *arguments)((symbol, C._lib))
        except AttributeError:
            missing.append(symbol)
    missing += [
        f"llama_context_params.{name}"
        for name in ("ctx_type", "ctx_other")
        if not hasattr(C.llama_context_params, name)
    ]
    if not missing:
        return found, ""
    return found, (
        f"this llama.cpp lacks {missing[0]}"
        + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        + f"; {KNOWN_RELEASE} is known to work"
    )


_functions, reason = look_up()
available = not reason


def check_available() -> None:
    """Raise UnsupportedError, with the reason, if this llama.cpp cannot give hidden states."""
    if not available:
        raise UnsupportedError(f"heads that read hidden states are not available: {reason}")


def n_mtp_layers(model: Any) -> int:
    """Return how many MTP layers a llama_model has, 0 where that is not known."""
    return int(_functions["n_layer_nextn"](model)) if "n_layer_nextn" in _functions else 0


def target_layers(model: Any) -> tuple[int, ...]:
    """Return which layers of its target a head reads; () if it reads none."""
    check_available()
    n = int(_functions["n_target_layers"](model))
    address = _functions["target_layers"](model) if n else None
    return tuple((ctypes.c_int32 * n).from_address(address)) if address else ()


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
            f"llama.cpp does not give the hidden states of {handle.architecture} models"
        )
    for layer in layers:
        if not 0 <= layer < handle.n_layer:
            raise ConfigError(f"there is no layer {layer}: the model has {handle.n_layer}")
    for layer in layers:
        _functions["set_layer"](handle.ptr, layer, on)


def extract_nextn(handle: ContextHandle, on: bool, *, masked: bool) -> None:
    """Give out the state before the output norm with each decode, or no longer.

    ``masked``: of the rows with logits only. Raises UnsupportedError as ``extract_layers``.
    """
    check_available()
    if on and not masked and handle.architecture not in NEXTN_OUTPUT:
        raise UnsupportedError(
            f"llama.cpp does not give the last hidden state of {handle.architecture} models"
        )
    _functions["set_nextn"](handle.ptr, on, masked)


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
            address = _functions["get_nextn"](handle.unchecked_ptr)
        else:
            address = _functions["get_layer"](handle.unchecked_ptr, layer)
        if not address or address != self._address:
            self._address = address
            self._rows = _view(address, handle.n_batch, self.width)
        return self._rows


def nextn_rows(handle: ContextHandle, n: int) -> Rows:
    """Return the first ``n`` rows of states before the output norm, float32 (n, n_embd_out), a view.

    Rows of all tokens, or of those with logits, as ``extract_nextn`` chose; valid until the next decode.
    """
    return _view(_functions["get_nextn"](handle.ptr), n, handle.n_embd_out)


def _view(address: int | None, n: int, width: int) -> Rows:
    if not address:
        raise UnsupportedError("llama.cpp gave no hidden states")
    raw = (ctypes.c_float * (n * width)).from_address(address)
    return np.ctypeslib.as_array(raw).reshape(n, width)


class DraftHead(NamedTuple):
    """What the compiled core needs to draft with a head.

    Attributes:
        get_states, encode: the addresses of llama.cpp's functions.
        n_state: numbers in a state.
    """

    get_states: int
    encode: int
    n_state: int

    @classmethod
    def of(cls, handle: ContextHandle) -> DraftHead:
        """Describe the head that a context computes."""
        addresses = [
            ctypes.cast(function, ctypes.c_void_p).value or 0
            for function in (_functions["get_nextn"], C._lib.llama_encode)
        ]
        return cls(addresses[0], addresses[1], handle.n_embd_out)


def use_mtp_layer(handle: ContextHandle, number: int) -> None:
    """Compute with the MTP layer of that number, 0 the first, from the next decode on."""
    _functions["set_layer_offset"](handle.ptr, number)


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
