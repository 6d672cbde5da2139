"""llama.cpp's staging interface: hidden states and MTP layers, for heads.

It is exported under C++ names, is not in llama.h, and may change. The functions are looked up when this
module is imported. If one is missing, ``available`` is False, ``reason`` names it, and everything else
still works.
"""

from __future__ import annotations

import ctypes
from typing import Any

from llama_cpp import llama_cpp as C

from ..errors import UnsupportedError

KNOWN_RELEASE = "llama-cpp-python 0.3.36"

# Architectures whose graph provides the inputs of its layers, and those whose graph provides the state
# before the output norm. For anything else, llama.cpp aborts or returns zeros.
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

# Architectures whose MTP layers llama.cpp computes, and those that may have several. For the rest,
# llama.cpp aborts on a second layer.
MTP_LAYERS = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe",
    "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35",
})  # fmt: skip
# The architecture of heads that attend to another model's K/V, and the architecture of that model.
SHARING_HEAD, SHARING_TARGET = "gemma4-assistant", "gemma4"
MTP_CHAINS = frozenset({"hy_v3", "mimo2", "step35"})

_P, _I32, _U32, _BOOL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_bool
# Names in the Itanium C++ ABI, which GCC and Clang use: everywhere but on Windows with MSVC.
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
    """Return the functions, and the reason if some are missing, else ""."""
    by_name: dict[str, Any] = {}
    missing = []
    for name, (symbol, result, arguments) in STAGING.items():
        try:
            by_name[name] = ctypes.CFUNCTYPE(result, *arguments)((symbol, C._lib))
        except AttributeError:
            missing.append(symbol)
    missing += [
        f"llama_context_params.{name}"
        for name in ("ctx_type", "ctx_other")
        if not hasattr(C.llama_context_params, name)
    ]
    if not missing:
        return by_name, ""
    return by_name, (
        f"this llama.cpp lacks {missing[0]}"
        + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        + f"; {KNOWN_RELEASE} is known to work"
    )


functions, reason = look_up()
available = not reason


def check_available() -> None:
    """Raise UnsupportedError, with the reason, if this llama.cpp cannot provide hidden states."""
    if not available:
        raise UnsupportedError(f"heads that read hidden states are not available: {reason}")


def n_mtp_layers(model: Any) -> int:
    """Return how many MTP layers a llama_model has; 0 if that is not known."""
    return int(functions["n_layer_nextn"](model)) if "n_layer_nextn" in functions else 0


def target_layers(model: Any) -> tuple[int, ...]:
    """Return which layers of its target a head reads; () if it reads none."""
    n = int(functions["n_target_layers"](model)) if available else 0
    address = functions["target_layers"](model) if n else None
    return tuple((ctypes.c_int32 * n).from_address(address)) if address else ()
