"""Refuse GGUF files on which llama.cpp would end the process, before it opens them.

For most bad files llama.cpp returns NULL, but some end the process: while the model is loaded, while a
context is created, or at the first decode. ``FATAL`` lists what is known to do so, as it was seen; a
test runs every case without the check. A file that passes may still be rejected by llama.cpp, with an
error of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..errors import ModelLoadError
from .gguf_reader import Header, read_header

__all__ = ["FATAL", "FatalCase", "check_header", "find_fatal"]

_F32 = 0
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
_MAX_HEADS = 1 << 20  # far above any model's
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Architectures whose graph asserts key length == value length, and those that use RoPE.
_EQUAL_HEADS = (
    "bert",
    "granite",
    "llama",
    "mistral3",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3moe",
)
_ROTATING = ("gemma", "gemma2", "gemma3", "lfm2", *_EQUAL_HEADS[1:])
_RWKV = ("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")
_LFM2 = ("lfm2", "lfm2moe")


class FatalCase(NamedTuple):
    """What ends the process, and what was seen when it did; always by SIGABRT.

    Attributes:
        name: of the file that shows it, in ``tests/toys.py``.
        reason: returns why a file is refused; None if it is not.
        phase: where the process ended: "load" of the model, creating a "context", first "decode".
        symptom: what llama.cpp printed: the condition of the failed assertion, or its message.
        seen_in: the release of llama-cpp-python, which contains llama.cpp.
        hint: what to do about the file.
        in_vocabulary: whether llama.cpp reads it even if it loads the vocabulary only.
    """

    name: str
    reason: Callable[[Header], str | None]
    phase: str
    symptom: str
    seen_in: str = "0.3.36"
    hint: str | None = None
    in_vocabulary: bool = False


def check_header(path: str | Path, *, vocab_only: bool = False) -> Header:
    """Return the header of a file; raise ``ModelLoadError`` if it is no model or would abort llama.cpp.

    ``vocab_only`` skips the checks of sizes and tensors, which llama.cpp does not read in that case.
    Raises nothing else, whatever the file contains. A 150,000-token vocabulary takes about 0.1 s.
    """
    header = read_header(path, tensors=not vocab_only)
    found = find_fatal(header, vocab_only=vocab_only)
    if found is not None:
        case, reason = found
        raise ModelLoadError(f"cannot load {path}: {reason}", hint=case.hint)
    return header


def find_fatal(header: Header, *, vocab_only: bool = False) -> tuple[FatalCase, str] | None:
    """Return the first fatal case that a header meets, with the reason; None if it meets none."""
    for case in FATAL:
        if case.in_vocabulary or not vocab_only:
            reason = case.reason(header)
            if reason is not None:
                return case, reason
    return None


def _duplicate_token(header: Header) -> str | None:
    if header.metadata.get("tokenizer.ggml.model") in ("none", "no_vocab"):
        return None
    tokens = header.tokens
    if any(b"\0" in token for token in tokens):  # llama.cpp reads them as C strings
        tokens = [token.split(b"\0", 1)[0] for token in tokens]
    named = [token for token in tokens if token]  # llama.cpp renames empty ones
    if len(set(named)) == len(named):
        return None
    seen: set[bytes] = set()
    for token in named:
        if token in seen:
            text = token.decode("utf-8", "replace")
            return f"its vocabulary contains the token {text!r} twice"
        seen.add(token)
    return None


def _blocks(header: Header) -> str | None:
    blocks = header.integer("block_count", 1)
    if 0 < blocks <= _MAX_LAYERS:
        return None
    return f"block_count is {blocks}, not between 1 and {_MAX_LAYERS}"


def _nextn_layers(header: Header) -> str | None:
    blocks, extra = header.integer("block_count", 1), header.integer("nextn_predict_layers")
    if 0 <= extra <= blocks:
        return None
    return f"nextn_predict_layers is {extra}, more than the {blocks} blocks"


def _rwkv_head_size(header: Header) -> str | None:
    if header.architecture not in _RWKV or header.integer("wkv.head_size", 64) == 64:
        return None
    return "wkv.head_size is not 64: llama.cpp would read out of bounds"


def _epsilon(header: Header) -> str | None:
    for name in ("layer_norm_epsilon", "layer_norm_rms_epsilon"):
        epsilon = header.get(f"attention.{name}")
        if isinstance(epsilon, float) and not epsilon >= 0:
            return f"attention.{name} is {epsilon}"
    return None


class _Experts(NamedTuple):
    total: int
    used: int
    groups: int
    groups_used: int


def _experts(header: Header) -> _Experts:
    total = header.integer("expert_count")
    if header.architecture.startswith("hunyuan") and total <= 1:
        return _Experts(0, 0, 0, 0)  # llama.cpp ignores them here
    return _Experts(
        total,
        max(header.integers("expert_used_count"), default=0),
        header.integer("expert_group_count"),
        header.integer("expert_group_used_count"),
    )


def _many_experts(header: Header) -> str | None:
    experts = _experts(header).total
    if 0 <= experts <= _MAX_EXPERTS:
        return None
    return f"expert_count is {experts}, more than {_MAX_EXPERTS}"


def _experts_used(header: Header) -> str | None:
    experts = _experts(header)
    if experts.used <= experts.total and (not experts.total or experts.used >= 1):
        return None
    return f"expert_used_count is {experts.used} of expert_count {experts.total}"


def _many_groups(header: Header) -> str | None:
    experts = _experts(header)
    if not experts.groups or experts.groups < experts.total:
        return None
    return f"expert_group_count is {experts.groups} of expert_count {experts.total}"


def _groups_used(header: Header) -> str | None:
    total, _, groups, used = _experts(header)
    if groups <= 1 or (total % groups == 0 and 0 < used < groups):
        return None
    return f"{total} experts in {groups} groups, {used} of them used"


def _rope_scaling(header: Header) -> str | None:
    scaling = header.get("rope.scaling.type")
    if not isinstance(scaling, str) or scaling in _ROPE_SCALINGS:
        return None
    return f"rope.scaling.type is {scaling!r}, not one of {', '.join(_ROPE_SCALINGS)}"


def _huge_heads(header: Header) -> str | None:
    for name in ("head_count", "head_count_kv", "key_length", "value_length"):
        if max(header.integers(f"attention.{name}"), default=0) > _MAX_HEADS:
            return f"attention.{name} is too large: sizes computed from it would overflow"
    return None


def _head_sizes(header: Header) -> tuple[int, int] | None:
    """Return the sizes of keys and values of one head; None if there are no heads."""
    n_head = header.integer("attention.head_count")
    if n_head <= 0:
        return None
    usual = header.integer("embedding_length") // n_head
    return header.integer("attention.key_length", usual), header.integer(
        "attention.value_length", usual
    )


def _unequal_heads(header: Header) -> str | None:
    sizes = _head_sizes(header)
    if sizes is None or header.architecture not in _EQUAL_HEADS or sizes[0] == sizes[1]:
        return None
    return f"attention.key_length is {sizes[0]}, but value_length is {sizes[1]}"


def _rotation(header: Header) -> str | None:
    sizes = _head_sizes(header)
    if sizes is None or header.architecture not in _ROTATING:
        return None
    d_key = rotated = sizes[0]
    for kind in ("", "_swa"):  # sliding-window layers have sizes of their own
        d_key = header.integer(f"attention.key_length{kind}", d_key)
        rotated = header.integer(f"rope.dimension_count{kind}", rotated)
        if not 0 < rotated <= d_key or rotated % 2:
            return f"rope.dimension_count is {rotated}, not an even part of the head size {d_key}"
    return None


def _one_kind_of_layer(header: Header) -> str | None:
    """LFM2 has two kinds of memory, one of which would have no layers."""
    if header.architecture not in _LFM2:
        return None
    if len({heads == 0 for heads in header.integers("attention.head_count_kv")}) != 1:
        return None
    return "it has no convolution layers or no attention layers, and needs both"


def _unused_window(header: Header) -> str | None:
    if not header.architecture.startswith("gemma3"):
        return None
    if not header.integer("attention.sliding_window"):
        return None
    pattern = header.get("attention.sliding_window_pattern")
    if pattern == 1 or (isinstance(pattern, list) and not any(pattern)):
        return "attention.sliding_window is set, but no layer uses it"
    return None


def _half_precision_norm(header: Header) -> str | None:
    for tensor in header.tensors:
        if tensor.name.endswith("norm.weight") and len(tensor.shape) == 1 and tensor.kind != _F32:
            return (
                f"the tensor {tensor.name!r} is not F32: llama.cpp would abort at the first decode"
            )
    return None


# The first case that a file meets names the reason. A case may refuse more than was seen to be fatal;
# a comment then names what was not.
# fmt: off
FATAL = (
    FatalCase("duplicate_tokens", _duplicate_token, "load", "id_to_token.size() == token_to_id.size()",
              hint="convert the model again", in_vocabulary=True),
    FatalCase("zero_blocks", _blocks, "load", "hparams.n_layer_all > 0"),
    FatalCase("nextn_layers", _nextn_layers, "load", "hparams.n_layer_nextn <= hparams.n_layer_all"),
    # Sizes that do not divide the embedding abort; 1, 16 and 32 for an embedding of 64 did not.
    FatalCase("rwkv_head_size", _rwkv_head_size, "context", "ggml_nelements(a) == ne0*ne1*ne2"),
    FatalCase("nan_epsilon", _epsilon, "decode", "eps >= 0.0f"),
    FatalCase("many_experts", _many_experts, "load", "hparams.n_expert <= LLAMA_MAX_EXPERTS"),
    FatalCase("experts_unused", _experts_used, "load", "n_expert_used_max > 0"),
    FatalCase("many_groups", _many_groups, "load", "hparams.n_expert_groups < hparams.n_expert"),
    FatalCase("uneven_groups", _groups_used, "load", "hparams.n_expert % hparams.n_expert_groups == 0"),
    FatalCase("rope_scaling", _rope_scaling, "load",
              "hparams.rope_scaling_type_train != LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED"),
    # Seen with head_count_kv, whose product wraps at 32 bits; of the others none that llama.cpp accepts.
    FatalCase("huge_head_count_kv", _huge_heads, "context", "ggml_nelements(a) == ne0*ne1*ne2"),
    # Seen with bert and qwen2; llama.cpp refused llama, mistral3 and qwen3 for the shapes of tensors.
    FatalCase("unequal_heads", _unequal_heads, "context", "n_embd_head == hparams.n_embd_head_k()"),
    # Seen with gemma3, lfm2, mistral3, qwen2 and qwen3. With 0 gemma3 and lfm2 never end the decode.
    FatalCase("odd_rotation", _rotation, "decode", "n_dims % 2 == 0"),
    # Seen with attention only.
    FatalCase("lfm2_one_kind_of_layer", _one_kind_of_layer, "decode", "GGML_ASSERT(buffer)"),
    FatalCase("gemma3_pattern_1", _unused_window, "context", "hparams.is_swa_any()"),
    FatalCase("half_precision_norms", _half_precision_norm, "decode", "binary_op: unsupported types"),
)
# fmt: on
