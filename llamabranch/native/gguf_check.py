"""Refuse GGUF files on which llama.cpp would end the process, before it opens them.

For most bad files llama.cpp returns NULL, but some end the process: while the model is loaded, while a
context is created, or at the first decode. This module's test lists the cases known with
llama-cpp-python 0.3.36. llama.cpp may still reject a file that passes, with an error of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from ..errors import ModelLoadError
from .gguf_reader import Header, read_header

_F32 = 0
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
_MAX_HEADS = 1 << 20  # far above any model's
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Architectures whose graph asserts key length == value length, and those that use RoPE.
_EQUAL_HEADS = (
    "bert", "granite", "llama", "mistral3", "olmo2", "phi3", "qwen2", "qwen3", "qwen3moe",
)  # fmt: skip
_ROTATING = ("gemma", "gemma2", "gemma3", "lfm2", *_EQUAL_HEADS[1:])
_RWKV = ("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")
_LFM2 = ("lfm2", "lfm2moe")


def check_header(path: str | Path, *, vocab_only: bool = False) -> Header:
    """Return a file's header; raise ModelLoadError if it is not a model or would abort llama.cpp.

    ``vocab_only`` skips the checks of sizes and tensors, which llama.cpp then does not read. No other
    error is raised, whatever the file contains. A vocabulary of 150,000 tokens takes about 0.1 s.
    """
    header = read_header(path, tensors=not vocab_only)
    if not vocab_only and not header.tensors:
        contents = "only a vocabulary, no weights" if header.tokens else "no weights"
        hint = "Model(path, vocab_only=True) opens a vocabulary" if header.tokens else None
        raise ModelLoadError(f"cannot load {path}: it has {contents}", hint=hint)
    fault = find_fatal(header, vocab_only=vocab_only)
    if fault is not None:
        hint = "convert the model again" if fault[0] == "duplicate_tokens" else None
        raise ModelLoadError(f"cannot load {path}: {fault[1]}", hint=hint)
    return header


def find_fatal(header: Header, *, vocab_only: bool = False) -> tuple[str, str] | None:
    """Return the name and the reason of the first fatal case of a header, or None.

    Some checks refuse more values than are known to be fatal; a comment then says which values did no
    harm.
    """
    checks = (_vocabulary, _layers, _experts, _heads, _kinds_of_layers)
    kinds = checks[:1] if vocab_only else checks
    return next(chain.from_iterable(check(header) for check in kinds), None)


def _vocabulary(header: Header) -> Iterator[tuple[str, str]]:
    if header.metadata.get("tokenizer.ggml.model") in ("none", "no_vocab"):
        return
    tokens = header.tokens
    if any(b"\0" in token for token in tokens):  # llama.cpp reads them as C strings
        tokens = [token.split(b"\0", 1)[0] for token in tokens]
    named = [token for token in tokens if token]  # llama.cpp renames empty ones
    seen: set[bytes] = set()
    for token in named if len(set(named)) < len(named) else ():
        if token in seen:
            text = token.decode("utf-8", "replace")
            yield "duplicate_tokens", f"its vocabulary contains the token {text!r} twice"
        seen.add(token)


def _layers(header: Header) -> Iterator[tuple[str, str]]:
    blocks, extra = header.integer("block_count", 1), header.integer("nextn_predict_layers")
    if not 0 < blocks <= _MAX_LAYERS:
        yield "zero_blocks", f"block_count is {blocks}, not between 1 and {_MAX_LAYERS}"
    if not 0 <= extra <= blocks:
        yield "nextn_layers", f"nextn_predict_layers is {extra}, more than the {blocks} blocks"
    # Sizes that do not divide the embedding abort; 1, 16 and 32 for an embedding of 64 did not.
    if header.architecture in _RWKV and header.integer("wkv.head_size", 64) != 64:
        yield "rwkv_head_size", "wkv.head_size is not 64: llama.cpp would read out of bounds"
    for name in ("layer_norm_epsilon", "layer_norm_rms_epsilon"):
        epsilon = header.get(f"attention.{name}")
        if isinstance(epsilon, float) and not epsilon >= 0:
            yield "nan_epsilon", f"attention.{name} is {epsilon}"


def _experts(header: Header) -> Iterator[tuple[str, str]]:
    total = header.integer("expert_count")
    if header.architecture.startswith("hunyuan") and total <= 1:
        return  # llama.cpp ignores them here
    used = max(header.integers("expert_used_count"), default=0)
    groups, chosen = header.integer("expert_group_count"), header.integer("expert_group_used_count")
    if not 0 <= total <= _MAX_EXPERTS:
        yield "many_experts", f"expert_count is {total}, more than {_MAX_EXPERTS}"
    if used > total or (total and used < 1):
        yield "experts_unused", f"expert_used_count is {used} of expert_count {total}"
    if groups and groups >= total:
        yield "many_groups", f"expert_group_count is {groups} of expert_count {total}"
    if groups > 1 and (total % groups or not 0 < chosen < groups):
        yield "uneven_groups", f"{total} experts in {groups} groups, {chosen} of them used"


def _heads(header: Header) -> Iterator[tuple[str, str]]:
    scaling, architecture = header.get("rope.scaling.type"), header.architecture
    if isinstance(scaling, str) and scaling not in _ROPE_SCALINGS:
        known = ", ".join(_ROPE_SCALINGS)
        yield "rope_scaling", f"rope.scaling.type is {scaling!r}, not one of {known}"
    # This happened with head_count_kv, whose product wraps at 32 bits. llama.cpp itself refuses such
    # values of the other keys.
    for name in ("head_count", "head_count_kv", "key_length", "value_length"):
        if max(header.integers(f"attention.{name}"), default=0) > _MAX_HEADS:
            yield (
                "huge_head_count_kv",
                f"attention.{name} is too large: sizes computed from it would overflow",
            )
    n_head = header.integer("attention.head_count")
    if n_head <= 0:
        return
    d_key, d_value = header.head_sizes(n_head)
    # Happened with bert and qwen2; with llama, mistral3 and qwen3, llama.cpp refused the tensors'
    # shapes.
    if architecture in _EQUAL_HEADS and d_key != d_value:
        yield "unequal_heads", f"attention.key_length is {d_key}, but value_length is {d_value}"
    # Happened with gemma3, lfm2, mistral3, qwen2 and qwen3. With 0, gemma3 and lfm2 never end the
    # decode.
    rotated = d_key
    kinds = ("", "_swa") if architecture in _ROTATING else ()  # a window has its own sizes
    for kind in kinds:
        d_key = header.integer(f"attention.key_length{kind}", d_key)
        rotated = header.integer(f"rope.dimension_count{kind}", rotated)
        if not_a_rotation := rotation_fault(rotated, d_key):
            yield "odd_rotation", not_a_rotation


def rotation_fault(rotated: int, d_key: int) -> str:
    """Return why RoPE cannot rotate ``rotated`` numbers of a key; "" if it can."""
    if 0 < rotated <= d_key and not rotated % 2:
        return ""
    return f"rope.dimension_count is {rotated}, not an even part of the head size {d_key}"


def _kinds_of_layers(header: Header) -> Iterator[tuple[str, str]]:
    # LFM2 has two kinds of memory, and one of them would have no layers. This happened with a model
    # that has only attention layers.
    kinds = {heads == 0 for heads in header.integers("attention.head_count_kv")}
    if header.architecture in _LFM2 and len(kinds) == 1:
        reason = "it has no convolution layers or no attention layers, and needs both"
        yield "lfm2_one_kind_of_layer", reason
    pattern = header.get("attention.sliding_window_pattern")
    is_unused = pattern == 1 or (isinstance(pattern, list) and not any(pattern))
    has_window = header.integer("attention.sliding_window")
    if header.architecture.startswith("gemma3") and has_window and is_unused:
        yield "gemma3_pattern_1", "attention.sliding_window is set, but no layer uses it"
    for tensor in header.tensors:
        if tensor.name.endswith("norm.weight") and len(tensor.shape) == 1 and tensor.kind != _F32:
            yield (
                "half_precision_norms",
                f"the tensor {tensor.name!r} is not F32: llama.cpp would abort at the first decode",
            )
