"""The parameters of a context: a frozen object that validates itself, and its form for llama.cpp."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import TypedDict

from ..arguments import byte_count, choice, real, whole
from ..errors import ConfigError, UnsupportedError
from ..model import Model
from ..native.context import (
    FLASH_ATTENTION,
    KV_TYPES,
    NATIVE_NAMES,
    ROPE_SCALING,
    NativeContextParams,
)
from ..native.library import available_cores, max_sequences

DEFAULT_N_CTX = 2048
# Another sequence costs nothing in a shared attention cache; other kinds of memory allocate room for
# it. With nine sequences, a branch can have eight forks.
DEFAULT_N_SEQ_MAX = 16
_SEQUENCES_WITH_MEMORY = 9
# The most sequences, so that some ids are left for cached prefixes.
MOST_WITH_PREFIXES = max_sequences() - 16
_STEP = 256  # llama.cpp rounds the cells of a cache up to a multiple of this

# With these types and flash attention, attention does not depend on the batch. If K and V are both f16,
# llama.cpp switches to another path at 512 cells and at 64 rows. The effect of the weights is measured
# in exactness.py.
EXACT_KV_TYPES = ("bf16", "q8_0", "q8_0/f16")


class ContextOptions(TypedDict, total=False):
    """The fields of :class:`ContextParams` as keyword arguments, for type checkers."""

    n_ctx: int | None
    n_seq_max: int | None
    n_batch: int
    n_ubatch: int | None
    n_outputs_max: int | None
    n_threads: int | None
    n_threads_batch: int | None
    flash_attention: bool | str
    kv_type: str
    exact: bool
    swa_full: bool
    offload_kqv: bool
    kv_unified: bool | str
    prefix_cache: bool | None
    checkpoint_ram: int
    cache_dir: str | PathLike[str] | None
    cache_size: int | str
    n_rs_seq: int | str
    rope_scaling: str | None
    rope_freq_base: float
    rope_freq_scale: float
    yarn_orig_ctx: int


@dataclass(frozen=True)
class ContextParams:
    """How to create a context.

    The defaults for the K/V type, the attention and the threads follow fixed rules, the same on every
    machine. Nothing is measured, except whether batches are exact if ``exact=True``. K and V are f16,
    or bf16 in an exact context. Flash attention is used wherever llama.cpp supports it. There is one
    thread per physical core that the process may use, and fewer while other programs use the cores.
    With a 1.5B model, no other setting was more than a fifth faster at anything. Small models often
    generate much faster with plain attention: ``llamabranch bench`` measures it.

    Args:
        n_ctx: cells of the cache, shared by all sequences; rounded up to a multiple of 256. None = 2048,
            or the trained length if that is less. With ``kv_unified=False`` the cells are divided evenly
            and each part is rounded up; None then means that number for each sequence.
        n_seq_max: the most sequences (branches) at a time, 1 to 256. None = 16, or 9 if each sequence
            takes its own memory (recurrent and hybrid memory, ``kv_unified=False``), but at most
            ``n_batch``.
        n_batch: the token limit of a decode. n_ubatch: how many tokens are computed at once (None =
            n_batch). With a sliding window, the smaller of the two is used for both.
        n_outputs_max: the most rows of logits per decode, from n_seq_max to n_batch. None =
            max(n_seq_max, min(n_batch, 256)).
        n_threads, n_threads_batch: threads for one token and for many. None = one per physical core
            that this process may use, and fewer while other programs use the cores.
        flash_attention: "auto" (wherever llama.cpp supports it), True or False. kv_type: "auto" (f16,
            or bf16 in an exact context), "f16", "bf16", "q8_0", ..., or "q8_0/f16" (K in q8_0, V in
            f16).
        exact: True = a token's logits do not depend, to the bit, on what else is in the batch or the
            cache, so the same seed gives the same text. This is tried out with the model when the
            context is created, which raises UnsupportedError if it fails. False = nothing is tried out
            or promised; rounding may change a text.
        swa_full: keep the K/V of all positions in sliding-window layers, so that they can be rewound.
        offload_kqv: keep the cache on the GPU if the model is there.
        kv_unified: True = one cache for all sequences, in which forks share cells. False = each
            sequence has its own cells and attends only to them, which is faster with many long texts
            that share little. Forks then copy K/V, and each cached prefix takes a sequence until
            another text needs it. Only for plain attention memory. "auto" = False if the memory can be
            divided, else True.
        prefix_cache: keep the K/V of prompts and finished texts until its cells are needed, so that a
            prompt that begins like one of them is not processed again. None = on after the first call of
            ``complete`` or ``chat``, or with an ``AsyncEngine``, if the memory can share cells. A `Chat`
            opens it in any context, even if it is False.
        checkpoint_ram: bytes of host memory for checkpoints, in contexts whose memory cannot drop the
            end of a text (recurrent, hybrid, ``swa_full=False``). A checkpoint is the state at an
            earlier position. Rewinds and the prefix cache go back to the last checkpoint before the
            position they need and decode the tokens after it. 0 = no checkpoints; the whole text is
            decoded again.
        cache_dir: a folder for the K/V of texts of at least 512 tokens. A text is written when the
            prefix cache evicts it or the context is closed. A prompt that begins like one of them gets
            its K/V from there, if that is faster, even after a restart. Several contexts and processes
            may use one folder; a file is used only where the K/V would be the same. It turns the prefix
            cache on.
        cache_size: the most bytes that these files may take ("8GiB", or a number); the least recently
            used are deleted first.
        n_rs_seq: how many of each sequence's last tokens llama.cpp keeps the state for, if the memory
            is recurrent or hybrid and the model's architecture supports it. Drafts of up to this many
            tokens are verified in place; longer drafts are verified on a fork. "auto" = 8 or 4 if these
            states together take at most an eighth of the machine's memory, else 0. 0 = none.
        rope_scaling: None (the model's own), "none", "linear", "yarn" or "longrope";
            rope_freq_base, rope_freq_scale, yarn_orig_ctx: as in llama.cpp, 0 = the model's own.

    Raises:
        ConfigError: a value on which llama.cpp would abort, or that it would ignore.
    """

    n_ctx: int | None = None
    n_seq_max: int | None = None
    n_batch: int = 512
    n_ubatch: int | None = None
    n_outputs_max: int | None = None
    n_threads: int | None = None
    n_threads_batch: int | None = None
    flash_attention: bool | str = "auto"
    kv_type: str = "auto"
    exact: bool = False
    swa_full: bool = True
    offload_kqv: bool = True
    kv_unified: bool | str = True
    prefix_cache: bool | None = None
    checkpoint_ram: int = 512 << 20
    cache_dir: str | PathLike[str] | None = None
    cache_size: int | str = "8GiB"
    n_rs_seq: int | str = "auto"
    rope_scaling: str | None = None
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_orig_ctx: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name in _REQUIRED:
                object.__setattr__(self, name, whole(name, value, low, high))
        for name in ("rope_freq_base", "rope_freq_scale"):
            value = real(name, getattr(self, name))
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"{name} must be at least 0 and finite, not {value}")
            object.__setattr__(self, name, value)
        if self.exact not in (True, False):
            raise ConfigError(f"exact must be True or False, not {self.exact!r}")
        for name in ("exact", "swa_full", "offload_kqv"):
            object.__setattr__(self, name, bool(getattr(self, name)))
        byte_count("cache_size", self.cache_size)
        if self.cache_dir is not None:
            if self.prefix_cache is False:
                raise ConfigError("cache_dir needs the prefix cache: leave prefix_cache=False out")
            object.__setattr__(self, "prefix_cache", True)
        if self.prefix_cache is not None:
            object.__setattr__(self, "prefix_cache", bool(self.prefix_cache))
        for name in ("flash_attention", "kv_unified"):
            if getattr(self, name) not in ("auto", True, False):
                raise ConfigError(
                    f"{name} must be 'auto', True or False, not {getattr(self, name)!r}"
                )
        if self.n_rs_seq != "auto":
            object.__setattr__(self, "n_rs_seq", whole("n_rs_seq", self.n_rs_seq, 0, MOST_ROLLBACK))
        choice("kv_type", self.kv_type, ("auto", *KV_TYPES))
        if self.flash_attention is False and self.kv_type not in ("auto", "f32", "f16", "bf16"):
            raise ConfigError(f"kv_type {self.kv_type} needs flash attention")
        if self.rope_scaling is not None:
            choice("rope_scaling", self.rope_scaling, [name for name in ROPE_SCALING if name])

    def resolve(self, model: Model) -> ContextParams:
        """Return a copy with all defaults resolved for ``model``, by fixed rules; nothing is measured.

        Raises:
            ConfigError: values that do not fit together.
            UnsupportedError: ``kv_unified=False`` with memory that is not plain attention.
        """
        is_attention, unified = model.memory_type == "attention", self.kv_unified
        if unified == "auto":
            n_chunk = min(self.n_batch, self.n_ubatch or self.n_batch)
            unified = not is_attention or (self.n_seq_max or _SEQUENCES_WITH_MEMORY) > n_chunk
        is_shared = unified and model.memory_type in ("attention", "sliding-window")
        n_seq_max = DEFAULT_N_SEQ_MAX if is_shared else _SEQUENCES_WITH_MEMORY
        n_seq_max = self.n_seq_max or min(n_seq_max, self.n_batch)
        kv_unified = bool(unified) or n_seq_max == 1  # the same for one sequence
        # llama.cpp's smallest cache has 256 cells.
        usual = max(_STEP, min(DEFAULT_N_CTX, self.trained_length(model) or DEFAULT_N_CTX))
        n_ctx = self.n_ctx or usual * (1 if kv_unified else n_seq_max)
        n_batch = min(self.n_batch, n_ctx)
        if n_seq_max > n_batch:
            raise ConfigError(
                f"n_seq_max ({n_seq_max}) must not exceed n_batch ({n_batch}) or n_ctx ({n_ctx}): "
                f"every sequence may need a row of logits"
            )
        if self.prefix_cache and kv_unified and n_seq_max > MOST_WITH_PREFIXES:
            raise ConfigError(
                f"n_seq_max must be at most {MOST_WITH_PREFIXES} with a prefix cache, not {n_seq_max}",
                hint="the prefix cache needs sequence ids of its own",
            )
        n_ubatch = min(self.n_ubatch or n_batch, n_batch)
        if not kv_unified:
            if not is_attention:
                raise UnsupportedError(
                    f"kv_unified=False is not possible with {model.memory_type} memory",
                    hint="leave it out; it is only for plain attention memory",
                )
            if n_ubatch < n_seq_max:
                raise ConfigError(
                    f"n_ubatch ({n_ubatch}) must be at least n_seq_max ({n_seq_max}) with "
                    f"kv_unified=False: llama.cpp computes a token of every sequence at once"
                )
        if model.memory_type == "sliding-window":  # see ``Windowed``
            n_batch = n_ubatch = max(n_ubatch, n_seq_max)
        n_outputs_max = max(n_seq_max, min(n_batch, 256))
        if self.n_outputs_max is not None:
            n_outputs_max = whole("n_outputs_max", self.n_outputs_max, n_seq_max, n_batch)
        n_rs_seq = 0
        if self.n_rs_seq != "auto" and model.memory_type in ("recurrent", "hybrid"):
            n_rs_seq = int(self.n_rs_seq)
        n_threads = self.n_threads or available_cores()
        usual_type = "bf16" if self.exact else "f16"
        resolved = replace(
            self,
            n_rs_seq=n_rs_seq,
            n_threads=n_threads,
            n_threads_batch=self.n_threads_batch or n_threads,
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_outputs_max=n_outputs_max,
            kv_unified=kv_unified,
            kv_type=usual_type if self.kv_type == "auto" else self.kv_type,
        )
        if n_rs_seq > max(0, resolved.most_rollback):
            raise ConfigError(
                f"n_rs_seq ({n_rs_seq}) must be below n_ubatch - 1, which is {n_ubatch - 1}",
                hint="llama.cpp computes all tokens that can be undone, and more, in one micro-batch",
            )
        return resolved

    @property
    def most_rollback(self) -> int:
        """How many last tokens llama.cpp can keep the states for; needs resolved parameters."""
        return (self.n_ubatch or self.n_batch) - 2

    def trained_length(self, model: Model) -> int | None:
        """Return the number of tokens the model was trained for.

        None = no limit, because a recurrent state has no positions, or because rope settings stretch
        them.
        """
        scaled = self.rope_scaling not in (None, "none")
        stretched = scaled or self.rope_freq_base or self.rope_freq_scale
        if model.n_ctx_train <= 0 or model.memory_type == "recurrent" or stretched:
            return None
        return model.n_ctx_train

    def native(self) -> NativeContextParams:
        """Return llama.cpp's parameters. All defaults must be resolved."""
        type_k, type_v = KV_TYPES[self.kv_type]
        n_threads = self.n_threads or 1
        own_values = {f.name: getattr(self, f.name) for f in fields(self) if f.name in NATIVE_NAMES}
        return {
            "rope_scaling_type": ROPE_SCALING[self.rope_scaling],
            **own_values,
            "n_threads": n_threads,
            "n_threads_batch": self.n_threads_batch or n_threads,
            "flash_attn_type": FLASH_ATTENTION[self.flash_attention],
            "type_k": type_k,
            "type_v": type_v,
        }


MOST_ROLLBACK = 64  # earlier states of a sequence that can be kept
_RANGES = {
    "n_ctx": (1, 2**31 - 256),
    "n_seq_max": (1, max_sequences()),
    "n_batch": (1, 2**24),
    "n_ubatch": (1, 2**24),
    "n_outputs_max": (1, 2**24),
    "n_threads": (1, 512),
    "n_threads_batch": (1, 512),
    "yarn_orig_ctx": (0, 2**31 - 1),
    "checkpoint_ram": (0, 2**62),
}
_REQUIRED = (
    "n_batch",
    "checkpoint_ram",
    "cache_size",
    "yarn_orig_ctx",
)  # None is not a valid value for these
