"""Load a file with llama.cpp itself, without a check: ``python load_unchecked.py FILE [vocab_only]``.

Each phase is printed before it begins; a phase that llama.cpp refuses is followed by "refused", the
end of the last one by "ran". A crash is seen in how the process ends and in its standard error.
"""

from __future__ import annotations

import sys

import llama_cpp


def run(path: str, vocab_only: bool) -> str:
    """Return how the last phase ended."""
    llama_cpp.llama_backend_init()
    print("load", flush=True)
    settings = llama_cpp.llama_model_default_params()
    settings.n_gpu_layers, settings.vocab_only = 0, vocab_only
    settings.use_extra_bufts = False  # llama.cpp's AMX kernels crash with any weights
    model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
    if not model:
        return "refused"
    if vocab_only:
        return "ran"
    print("context", flush=True)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_threads = 256, 32, 1
    options.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        return "refused"
    print("decode", flush=True)
    tokens = (llama_cpp.llama_token * 3)(2, 3, 4)
    if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, 3)):
        return "refused"
    return "ran"


if __name__ == "__main__":
    print(run(sys.argv[1], "vocab_only" in sys.argv[2:]))
