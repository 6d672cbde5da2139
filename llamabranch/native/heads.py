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
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C

from ..errors import ConfigError, UnsupportedError
from .handle import Handle

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
    "FeatureBatch",
    "Rows",
    "available",
    "check_available",
    "extract_layers",
    "extract_nextn",
    "layer_rows",
    "look_up",
    "n_mtp_layers",
    "nextn_address",
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
    "batch_init": ("llama_batch_ext_init", _P, (_P,)),
    "batch_free": ("llama_batch_ext_free", None, (_P,)),
    "batch_clear": ("llama_batch_ext_clear", None, (_P,)),
    "batch_set_pos": ("llama_batch_ext_set_pos", _BOOL, (_P, _I32, _P)),
    "batch_set_output": ("llama_batch_ext_set_output_logits", _BOOL, (_P, _I32, _BOOL)),
    "process": ("llama_process", _I32, (_P, _I32, _P)),
    "n_layer_nextn": ("llama_model_n_layer_nextn", _I32, (_P,)),
}
_ENCODE = 0  # llama_process_type


class _Embd(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("n_rows", ctypes.c_size_t),
        ("n_embd", ctypes.c_size_t),
    )


def look_up() -> tuple[dict[str, Any], str]:
    """Return the functions, and why some cannot be used, "" if all can."""
    found: dict[str, Any] = {}
    wanted = {**STAGING, "batch_add_embd": ("llama_batch_ext_add_embd", _I32, (_P, _I32, _Embd))}
    missing = []
    for name, (symbol, result, arguments) in wanted.items():
        try:
            found[name] = ctypes.CFUNCTYPE(result, *arguments)((symbol, C._lib))
        except AttributeError:
            missing.append(symbol)
    fields = {name for name, _ in C.llama_context_params._fields_}
    missing += [
        f"llama_context_params.{name}" for name in ("ctx_type", "ctx_other") if name not in fields
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


def layer_rows(handle: ContextHandle, layer: int, n: int) -> Rows:
    """Return the inputs of a layer in the last decode of ``n`` tokens, float32 (n, n_embd).

    A view, valid until the next decode. The layer must have been extracted in that decode.
    """
    return _view(_functions["get_layer"](handle.ptr, layer), n, handle.n_embd)


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


def nextn_address() -> int:
    """Return the address of llama.cpp's function that returns the rows, for the compiled core."""
    return ctypes.cast(_functions["get_nextn"], ctypes.c_void_p).value or 0


def use_mtp_layer(handle: ContextHandle, number: int) -> None:
    """Compute with the MTP layer of that number, 0 the first, from the next decode on."""
    _functions["set_layer_offset"](handle.ptr, number)


# -- what goes in --------------------------------------------------------------------------------------


class FeatureBatch(Handle):
    """A llama_batch_ext of rows of features, which the encoder of a head turns into states.

    Args:
        context: the head's context; it is closed after this.
        width: numbers in a row.
        n_max: rows at a time.
    """

    closes_first = True

    def __init__(self, context: ContextHandle, width: int, n_max: int) -> None:
        check_available()
        functions = _functions
        ptr = functions["batch_init"](context.ptr)
        super().__init__(ptr, functions["batch_free"], name="batch", parent=context)
        self._context = context
        self.width = width
        self.n_max = n_max

    def encode(self, features: Rows) -> tuple[int, Rows]:
        """Return llama_process's code and, if it is 0, the states, float32 (n, n_embd), a copy.

        It overwrites the logits of the context. ``features``: float32 (n, width), at most ``n_max`` rows.

        Raises:
            ConfigError: another shape or type.
        """
        n = len(features)
        if features.shape != (n, self.width) or features.dtype != np.float32:
            raise ConfigError(
                f"the head reads float32 rows of {self.width}, not {features.dtype} {features.shape}"
            )
        if not 0 < n <= self.n_max:
            raise ConfigError(f"{n} rows do not fit the batch: 1 to {self.n_max} do")
        features = np.ascontiguousarray(features)
        functions, batch, ctx = _functions, self.ptr, self._context.ptr
        functions["batch_clear"](batch)
        # The encoder has no memory: any positions do that continue what sequence 0 holds.
        start = self._context.position_range(0)[1] + 1
        positions = np.arange(start, start + n, dtype=np.int32)
        row = _Embd(features.ctypes.data, 1, self.width)
        for i in range(n):
            row.data = features.ctypes.data + i * features.strides[0]
            at = functions["batch_add_embd"](batch, 0, row)
            if at < 0 or not functions["batch_set_pos"](batch, at, positions.ctypes.data + 4 * i):
                return -1, features[:0]
            functions["batch_set_output"](batch, at, True)
        code = int(functions["process"](ctx, _ENCODE, batch))
        return code, nextn_rows(self._context, n).copy() if code == 0 else features[:0]
