"""Context settings: checked, completed with defaults, and turned into llama.cpp's numbers."""

from __future__ import annotations

import math
import os

from ..arguments import real, whole
from ..errors import ConfigError, ContextLengthWarning, warn
from ..model import Model
from ..native import ContextOptions, max_sequences
from ..native.context import FLASH_ATTENTION, KV_TYPES, ROPE_SCALING

__all__ = [
    "available_cores",
    "context_options",
    "resolve_kv_type",
    "threads_change_logits",
]

DEFAULT_N_CTX = 2048
DEFAULT_N_SEQ_MAX = 8
_STEP = 256  # llama.cpp rounds the cells of a cache up to a multiple of this

# Measured: with these, flash attention on, and Q8_0 weights, logits do not depend on the batch.
INVARIANT_KV_TYPES = ("bf16", "q8_0")


def available_cores() -> int:
    """Return the number of cores this process may use: more threads than that is a disaster."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def trained_length(
    model: Model, rope_scaling: str | None, rope_freq_base: float, rope_freq_scale: float
) -> int | None:
    """Return the tokens a text may have before it leaves what the model was trained for.

    None where that is not known: a recurrent state has no positions, and rope settings of one's own
    stretch them.
    """
    stretched = rope_scaling not in (None, "none") or rope_freq_base or rope_freq_scale
    if model.n_ctx_train <= 0 or model.memory_type == "recurrent" or stretched:
        return None
    return model.n_ctx_train


def default_n_ctx(trained: int | None) -> int:
    """Return the number of cells of a context whose user did not say: no more than was trained."""
    # llama.cpp has no smaller cache than its step of 256.
    return DEFAULT_N_CTX if trained is None else max(_STEP, min(DEFAULT_N_CTX, trained))


def warn_of_length(what: str, trained: int, n_ctx: int) -> None:
    """Warn that texts leave what the model was trained for; ``what`` does."""
    warn(
        f"{what} more than the {trained} tokens this model was trained for: beyond them, text is often "
        f"gibberish. Lower n_ctx, or stretch the positions with RoPE scaling, such as "
        f"rope_scaling='yarn', rope_freq_scale={trained / n_ctx:.3g}",
        ContextLengthWarning,
    )


def threads_change_logits(kv_type: str, flash_attention: bool | str, n_ctx: int) -> bool:
    """Return True if logits can depend, by rounding, on the number of threads.

    llama.cpp's flash attention cuts 512 cells and more of F16 or F32 K/V into a part for each thread.
    """
    return kv_type in ("f16", "f32") and flash_attention is not False and n_ctx > _STEP


def resolve_kv_type(
    model: Model, kv_type: str, flash_attention: bool | str, batch_invariant: bool | str
) -> str:
    """Return the K/V type "auto" stands for: bf16 where it makes batches exact, f16 elsewhere."""
    if kv_type != "auto":
        if kv_type not in KV_TYPES:
            raise ConfigError(
                f"unknown kv_type {kv_type!r}", hint=f"use one of {', '.join(KV_TYPES)}"
            )
        return kv_type
    exact = (
        batch_invariant is not False
        and flash_attention is not False
        and model.file_type == "Q8_0"
        and not model.on_gpu
    )
    return "bf16" if exact else "f16"


def context_options(
    *,
    n_ctx: int,
    n_seq_max: int,
    n_batch: int,
    n_ubatch: int | None,
    n_outputs_max: int | None,
    n_threads: int | None,
    n_threads_batch: int | None,
    flash_attention: bool | str,
    kv_type: str,
    swa_full: bool,
    offload_kqv: bool,
    rope_scaling: str | None,
    rope_freq_base: float,
    rope_freq_scale: float,
    yarn_ext_factor: float,
    yarn_attn_factor: float,
    yarn_beta_fast: float,
    yarn_beta_slow: float,
    yarn_orig_ctx: int,
) -> ContextOptions:
    """Return checked options.

    Raises:
        ConfigError: a value llama.cpp would abort on, or ignore.
    """
    n_ctx = whole("n_ctx", n_ctx, 1, 2**31 - 256)
    n_seq_max = whole("n_seq_max", n_seq_max, 1, max_sequences())
    n_batch = min(whole("n_batch", n_batch, 1, 2**24), n_ctx)
    if n_seq_max > n_batch:
        raise ConfigError(
            f"n_seq_max ({n_seq_max}) must not exceed n_batch ({n_batch}) or n_ctx ({n_ctx}): "
            f"every sequence may need a row of logits"
        )
    if n_ubatch is not None:
        n_ubatch = min(whole("n_ubatch", n_ubatch, 1, 2**24), n_batch)
    if n_outputs_max is None:
        n_outputs_max = max(n_seq_max, min(n_batch, 256))
    n_outputs_max = whole("n_outputs_max", n_outputs_max, n_seq_max, n_batch)
    cores = available_cores()
    n_threads = cores if n_threads is None else whole("n_threads", n_threads, 1, 512)
    n_threads_batch = (
        n_threads if n_threads_batch is None else whole("n_threads_batch", n_threads_batch, 1, 512)
    )
    if flash_attention not in ("auto", True, False):
        raise ConfigError(f"flash_attention must be 'auto', True or False, not {flash_attention!r}")
    if flash_attention is False and kv_type not in ("f32", "f16", "bf16"):
        raise ConfigError(f"kv_type {kv_type} needs flash attention")
    if rope_scaling not in ROPE_SCALING:
        known = ", ".join(repr(k) for k in ROPE_SCALING)
        raise ConfigError(f"unknown rope_scaling {rope_scaling!r}", hint=f"use one of {known}")
    floats = {
        "rope_freq_base": rope_freq_base,
        "rope_freq_scale": rope_freq_scale,
        "yarn_ext_factor": yarn_ext_factor,
        "yarn_attn_factor": yarn_attn_factor,
        "yarn_beta_fast": yarn_beta_fast,
        "yarn_beta_slow": yarn_beta_slow,
    }
    for name, value in floats.items():
        low = -1.0 if name.startswith("yarn") else 0.0
        floats[name] = value = real(name, value)
        if not (low <= value < math.inf):
            raise ConfigError(f"{name} must be at least {low:g} and finite, not {value}")
    return ContextOptions(
        n_ctx=n_ctx,
        n_seq_max=n_seq_max,
        n_batch=n_batch,
        n_ubatch=n_ubatch or n_batch,
        n_outputs_max=n_outputs_max,
        n_threads=n_threads,
        n_threads_batch=n_threads_batch,
        flash_attention=FLASH_ATTENTION[flash_attention],
        type_k=KV_TYPES[kv_type],
        type_v=KV_TYPES[kv_type],
        swa_full=bool(swa_full),
        offload_kqv=bool(offload_kqv),
        rope_scaling=ROPE_SCALING[rope_scaling],
        yarn_orig_ctx=whole("yarn_orig_ctx", yarn_orig_ctx, 0, 2**31 - 1),
        **floats,
    )
