"""Which machine this is, as far as numbers tell: logits straight from llama.cpp, without the library.

Another processor, or llama.cpp compiled otherwise, may round differently. Because the library has no
part in this key, a change of the library cannot pass for another machine.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as C

__all__ = ["machine_key"]

N_TOKENS = 48
BF16 = 30  # ggml's number of the type


def machine_key(path: str | Path) -> str:
    """Return a digest of a model's file and of the logits that llama.cpp computes with it.

    A prompt in one decode and then token by token, on one thread, with the settings of a batch-invariant
    context. The file counts because a toy's weights are themselves computed on the machine.
    """
    digest = hashlib.sha256(Path(path).read_bytes())
    options = C.llama_model_default_params()
    options.n_gpu_layers = 0
    options.use_extra_bufts = False  # as the library does
    model = C.llama_model_load_from_file(str(path).encode(), options)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
    params = C.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 256, 64, 64
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.type_k = params.type_v = BF16
    ctx = C.llama_init_from_model(model, params)
    if not ctx:
        raise RuntimeError(f"llama.cpp cannot open a context of {path}")
    tokens = (ctypes.c_int32 * N_TOKENS)(*((7 * i + 3) % n_vocab for i in range(N_TOKENS)))
    try:
        for low, n in ((0, 40), *((i, 1) for i in range(40, N_TOKENS))):
            pointer = ctypes.cast(ctypes.byref(tokens, 4 * low), ctypes.POINTER(ctypes.c_int32))
            if C.llama_decode(ctx, C.llama_batch_get_one(pointer, n)) != 0:
                raise RuntimeError(f"llama.cpp cannot decode with {path}")
            row = C.llama_get_logits_ith(ctx, -1)
            digest.update(np.ctypeslib.as_array(row, (n_vocab,)).tobytes())
    finally:
        C.llama_free(ctx)
        C.llama_model_free(model)
    return digest.hexdigest()[:32]
