"""Write small random-weight GGUF files, one function per architecture.

The same arguments give the same file, byte for byte. Weights are scaled so that the next-token
distributions are neither flat nor one-hot, so that tests can compare distributions. The files need no
tokenizer library. A vocabulary has 14 letters and two control tokens (`"small"`, every distribution can
be enumerated), or all 256 bytes and the same two control tokens (`"bytes"`, any text can be tokenized).

`BROKEN` names files that llama.cpp refuses, or that would end the process. `write_broken` writes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]
Shape = tuple[int, ...]
Metadata = dict[str, Value]
Shapes = dict[str, Shape]
Blocks = list[Shapes]  # the shapes of each block
Array = npt.NDArray[np.float32]
BOS = "<|bos|>"
EOS = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Weights that llama.cpp multiplies as matrices: the only ones that may be quantized.
_MATRICES = {
    "token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up",
    "ffn_down", "ssm_in", "ssm_out", "shortconv.in_proj", "shortconv.out_proj",
}  # fmt: skip
_FILE_TYPES = {
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "f32": gguf.LlamaFileType.ALL_F32,
}
_VALUE_TYPES: dict[type, gguf.GGUFValueType] = {
    bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING,
}  # fmt: skip
_NO_VOCABULARY: dict[str, Value] = {"tokenizer.ggml.model": "none", "vocab_size": 16}
_LOGIT_SPREAD = 1.8  # standard deviation of the logits over the vocabulary


def _byte_alphabet() -> list[str]:
    """Return GPT-2's printable character for each of the 256 byte values."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


@dataclass(frozen=True)
class Vocabulary:
    """Token strings of a byte-level BPE tokenizer; the first ``n_control`` are its control tokens."""

    tokens: tuple[str, ...]
    n_control: int = 2
    is_spm: bool = False

    @classmethod
    def named(cls, name: str | int | Vocabulary) -> Vocabulary:
        """Return `"small"` (16 tokens), `"bytes"` (258), or one of `name` tokens (an int)."""
        if isinstance(name, Vocabulary):
            return name
        alphabet = _byte_alphabet()
        if name == "small":
            return cls((BOS, EOS, *"abcdefghijklmn"))
        if name == "bytes":
            return cls((BOS, EOS, *alphabet))
        if not isinstance(name, int):
            raise ValueError(f"unknown vocabulary {name!r}")
        pairs = (left + right for left in alphabet for right in alphabet)
        return cls((BOS, EOS, *alphabet, *pairs)[:name])

    @classmethod
    def with_control(cls, bos: str, eos: str, *more: str, is_spm: bool = False) -> Vocabulary:
        """Return one of these control tokens and all 256 bytes, of SentencePiece or of BPE."""
        control = (bos, eos, *more)
        spm = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
        return cls((*control, *(spm if is_spm else _byte_alphabet())), len(control), is_spm)

    def metadata(self) -> Metadata:
        kinds = gguf.TokenType
        n_normal = len(self.tokens) - self.n_control - 256 * self.is_spm
        types = [kinds.CONTROL] * self.n_control + [kinds.BYTE] * 256 * self.is_spm
        shared: Metadata = {
            "tokenizer.ggml.model": "llama" if self.is_spm else "gpt2",
            "tokenizer.ggml.tokens": list(self.tokens),
            "tokenizer.ggml.token_type": [*map(int, types), *[int(kinds.NORMAL)] * n_normal],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
        }
        if self.is_spm:
            return shared | {"tokenizer.ggml.scores": [0.0] * len(self.tokens)}
        return shared | {
            "tokenizer.ggml.pre": "gpt-2",
            # llama.cpp insists on a merge; this one can never apply, so a byte stays a token.
            "tokenizer.ggml.merges": ["zz zz"],
            "tokenizer.ggml.add_bos_token": True,
        }


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: Array, weights: str, half: Sequence[str]
) -> None:
    is_matrix = _role(name) in _MATRICES
    if name in half:
        writer.add_tensor(name, values.astype(np.float16))
    elif is_matrix and weights == "q8_0":
        q8_0 = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, q8_0), raw_dtype=q8_0)
    else:
        writer.add_tensor(name, values)


def _role(name: str) -> str:
    """Return the tensor's name without block number and `.weight`."""
    bare = name.split(".", 2)[2] if name.startswith("blk.") else name
    return bare.removesuffix(".weight")


def _scaled(noise: Array, name: str, architecture: str) -> Array:
    """Return a tensor made of unit `noise`, at the scale that keeps activations near one."""
    role, shape = _role(name), noise.shape
    if role == "ssm_a":
        return -np.exp(noise)
    others = ("layer_output_scale", "rope_freqs", "time_mix_ln", "ssm_d")
    if role.endswith("norm") or "norm_" in role or role in others:
        return 1 + 0.1 * noise
    if role.endswith(".bias") or len(shape) == 1:
        return 0.1 * noise
    if role == "token_embd":  # Gemma multiplies embeddings by sqrt(n_embd)
        return noise / math.sqrt(shape[-1]) if architecture.startswith("gemma") else noise
    spread = _LOGIT_SPREAD if role == "output" else 1.0
    scaled: Array = noise * np.float32(spread / math.sqrt(shape[-1]))
    if (
        role == "nextn.eh_proj"
    ):  # mostly the token, as in the trunk, so that some drafts are accepted
        scaled[:, : shape[0]] += np.eye(shape[0], dtype=np.float32)
    return scaled


def _in_blocks(blocks: Blocks) -> Shapes:
    """Name each block's tensors; `.weight` is added to names without a dotted suffix of theirs."""
    bare = (".weight", ".bias")
    exact = ("ssm_a", "ssm_d")
    return {
        f"blk.{i}.{name}" + ("" if name.endswith(bare) or name in exact else ".weight"): shape
        for i, block in enumerate(blocks)
        for name, shape in block.items()
    }


def _with_bias(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


@dataclass(frozen=True)
class Sizes:
    """Sizes for all architectures; each uses those that it has."""

    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 2
    n_head_kv: int = 1
    n_ff: int = 128
    n_ctx_train: int = 2048
    window: int = 32  # gemma3, gemma4, mimo2: sliding layers
    n_mtp: int = 3  # mimo2, hy_v3: MTP layers

    @property
    def d_head(self) -> int:
        return self.n_embd // self.n_head

    @property
    def n_kv(self) -> int:
        return self.d_head * self.n_head_kv

    def metadata(self, **more: Value) -> Metadata:
        """Return the keys of all architectures, and ``more`` keys whose names have no dots."""
        return {
            "context_length": self.n_ctx_train, "embedding_length": self.n_embd,
            "block_count": self.n_layer, **more,
        }  # fmt: skip

    def attention_metadata(self) -> Metadata:
        return self.metadata(feed_forward_length=self.n_ff) | {
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }

    def mtp_metadata(self, n_mtp: int) -> Metadata:
        counts = {"block_count": self.n_layer + n_mtp, "nextn_predict_layers": n_mtp}
        return self.attention_metadata() | counts | {"rope.dimension_count": self.d_head}

    def dense(self) -> Shapes:
        d, ff = self.n_embd, self.n_ff
        return {"ffn_gate": (ff, d), "ffn_up": (ff, d), "ffn_down": (d, ff)}

    def attention(self) -> Shapes:
        d, kv = self.n_embd, self.n_kv
        return {"attn_q": (d, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, d)}

    def feed_forward(self) -> Shapes:
        return {"ffn_norm": (self.n_embd,), **self.dense()}

    def attention_block(self) -> Shapes:
        return {"attn_norm": (self.n_embd,), **self.attention(), **self.feed_forward()}

    def nextn(self) -> Shapes:
        """Return the tensors that join a token's embedding and a state in an MTP layer."""
        d = self.n_embd
        return {"nextn.eh_proj": (d, 2 * d), "nextn.enorm": (d,), "nextn.hnorm": (d,)}


def _llama(s: Sizes) -> tuple[Metadata, Blocks]:
    return s.attention_metadata(), [s.attention_block()] * s.n_layer


def _gemma3(s: Sizes) -> tuple[Metadata, Blocks]:
    norms = _norms(s, "post_attention_norm", "post_ffw_norm")
    window = {"attention.sliding_window": s.window, "attention.sliding_window_pattern": 2}
    return s.attention_metadata() | window, [
        s.attention_block() | norms | _head_norms(s)
    ] * s.n_layer


def _norms(s: Sizes, *names: str) -> Shapes:
    return dict.fromkeys(names, (s.n_embd,))


def _head_norms(s: Sizes) -> Shapes:
    return dict.fromkeys(("attn_q_norm", "attn_k_norm"), (s.d_head,))


def _mamba(s: Sizes) -> tuple[Metadata, Blocks]:
    d, inner, state, rank, kernel = s.n_embd, 2 * s.n_embd, 8, 4, 4
    block: Shapes = {
        "attn_norm": (d,), "ssm_in": (2 * inner, d), "ssm_conv1d.weight": (inner, kernel),
        "ssm_conv1d.bias": (inner,), "ssm_x": (rank + 2 * state, inner), "ssm_dt.weight": (inner, rank),
        "ssm_dt.bias": (inner,), "ssm_a": (inner, state), "ssm_d": (inner,), "ssm_out": (d, inner),
    }  # fmt: skip
    ssm = {
        "ssm.conv_kernel": kernel, "ssm.inner_size": inner, "ssm.state_size": state,
        "ssm.time_step_rank": rank, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    return s.metadata() | ssm, [block] * s.n_layer


def _lfm2(s: Sizes) -> tuple[Metadata, Blocks]:
    d = s.n_embd
    convolution = _norms(s, "attn_norm") | s.feed_forward() | {
        "shortconv.conv": (d, 3), "shortconv.in_proj": (3 * d, d), "shortconv.out_proj": (d, d),
    }  # fmt: skip
    kinds = (convolution, s.attention_block() | _head_norms(s))
    heads = [s.n_head_kv * (i % 2) for i in range(s.n_layer)]
    own: Metadata = {"attention.head_count_kv": heads, "shortconv.l_cache": 3}
    return s.attention_metadata() | own, [kinds[i % 2] for i in range(s.n_layer)]


def _nemotron_h(s: Sizes) -> tuple[Metadata, Blocks]:
    """Mamba-2, full attention and a feed-forward layer in turn."""
    d, inner, state, n_head, group, kernel = s.n_embd, 64, 16, 4, 1, 4
    channels = inner + 2 * group * state
    scanned: Shapes = {
        "attn_norm": (d,), "ssm_in": (inner + channels + n_head, d),
        "ssm_conv1d.weight": (channels, kernel), "ssm_conv1d.bias": (channels,),
        "ssm_dt.bias": (n_head,), "ssm_a": (n_head, 1), "ssm_d": (n_head, 1),
        "ssm_norm": (group, inner // group), "ssm_out": (d, inner),
    }  # fmt: skip
    dense: Shapes = {"attn_norm": (d,), "ffn_up": (s.n_ff, d), "ffn_down": (d, s.n_ff)}
    kinds = [i % 3 for i in range(max(3, s.n_layer))]
    metadata = s.attention_metadata() | {
        "block_count": len(kinds), "attention.layer_norm_epsilon": 1e-5,
        "attention.head_count_kv": [s.n_head_kv * (kind == 1) for kind in kinds],
        "feed_forward_length": [s.n_ff * (kind == 2) for kind in kinds],
        "ssm.conv_kernel": kernel, "ssm.inner_size": inner, "ssm.state_size": state,
        "ssm.time_step_rank": n_head, "ssm.group_count": group,
    }  # fmt: skip
    blocks = [scanned, {"attn_norm": (d,)} | s.attention(), dense]
    return metadata, [blocks[kind] for kind in kinds]


def _rwkv7(s: Sizes) -> tuple[Metadata, Blocks]:
    d, ff, lora = s.n_embd, s.n_ff, 8
    block: Shapes = {}
    for norm in ("attn_norm", "attn_norm_2", "time_mix_ln"):
        block |= _with_bias(norm, d)
    for part in "wav":
        block |= {f"time_mix_{part}0": (d,), f"time_mix_{part}1": (lora, d)}
        block |= {f"time_mix_{part}2": (d, lora)}
    block |= {"time_mix_g1": (lora, d), "time_mix_g2": (d, lora)}
    block |= {"time_mix_lerp_fused": (6, 1, 1, d), "channel_mix_lerp_k": (1, 1, d)}
    block |= {f"time_mix_{part}": (d,) for part in ("k_k", "k_a", "r_k")}
    block |= {f"time_mix_{part}": (d, d) for part in ("key", "value", "receptance", "output")}
    block |= {"channel_mix_key": (ff, d), "channel_mix_value": (d, ff)}
    ranks = ("decay", "iclr", "value_residual_mix", "gate")
    own: Metadata = {"wkv.head_size": 64, "attention.layer_norm_epsilon": 1e-5}
    own |= {f"attention.{rank}_lora_rank": lora for rank in ranks}
    return s.metadata(feed_forward_length=ff) | own, [block] * s.n_layer


def _bert(s: Sizes) -> tuple[Metadata, Blocks]:
    d = s.n_embd
    block: Shapes = {f"attn_{part}": (d, d) for part in ("q", "k", "v", "output")}
    block |= {"ffn_up": (s.n_ff, d), "ffn_down": (d, s.n_ff)}
    block |= _with_bias("attn_output_norm", d) | _with_bias("layer_output_norm", d)
    metadata = s.metadata(feed_forward_length=s.n_ff, pooling_type=1) | {
        "attention.head_count": s.n_head, "attention.layer_norm_epsilon": 1e-5,
        "attention.causal": False, "tokenizer.ggml.token_type_count": 2,
    }  # fmt: skip
    return metadata, [block] * s.n_layer


def _eagle3(s: Sizes) -> tuple[Metadata, Blocks]:
    """A head for a target of the same width: give `target_layers` as metadata for another depth."""
    d, kv = s.n_embd, s.n_kv
    block = _norms(s, "attn_norm", "attn_norm_2") | s.feed_forward()
    block |= {"attn_q": (d, 2 * d), "attn_k": (kv, 2 * d), "attn_v": (kv, 2 * d)}
    own: Metadata = {"block_count": 1, "target_layers": [0, 1, 1], "target_hidden_size": d}
    metadata = s.attention_metadata() | own | {"rope.dimension_count": s.d_head}
    return metadata, [block | {"attn_output": (d, d)}]


def _glm4moe(s: Sizes) -> tuple[Metadata, Blocks]:
    """Attention only; dense layers, then one MTP layer with experts."""
    d, ff, n_experts = s.n_embd, s.n_ff // 2, 4
    shared = _norms(s, "attn_norm", "post_attention_norm") | s.attention()
    experts: Shapes = {
        "ffn_gate_inp": (n_experts, d), "exp_probs_b.bias": (n_experts,),
        "ffn_gate_exps": (n_experts, ff, d), "ffn_up_exps": (n_experts, ff, d),
        "ffn_down_exps": (n_experts, d, ff), "ffn_gate_shexp": (ff, d), "ffn_up_shexp": (ff, d),
        "ffn_down_shexp": (d, ff),
    }  # fmt: skip
    metadata = s.mtp_metadata(1) | {
        "leading_dense_block_count": s.n_layer, "expert_count": n_experts, "expert_used_count": 2,
        "expert_shared_count": 1, "expert_feed_forward_length": ff, "expert_weights_scale": 1.0,
    }  # fmt: skip
    return metadata, [*[shared | s.dense()] * s.n_layer, shared | experts | s.nextn()]


def _qwen35(s: Sizes) -> tuple[Metadata, Blocks]:
    """Linear and full attention in turn, then one MTP layer with full attention."""
    d, rank, state = s.n_embd, 2, 16
    rows = state * rank
    shared = _norms(s, "attn_norm", "post_attention_norm") | s.dense()
    full = shared | s.attention() | {"attn_q": (2 * d, d)} | _head_norms(s)
    linear = shared | {
        "attn_qkv": (3 * rows, d), "attn_gate": (rows, d), "ssm_conv1d.weight": (3 * rows, 4),
        "ssm_dt.bias": (rank,), "ssm_a": (rank,), "ssm_beta": (rank, d), "ssm_alpha": (rank, d),
        "ssm_norm": (state,), "ssm_out": (d, rows),
    }  # fmt: skip
    metadata = s.mtp_metadata(1) | {
        "full_attention_interval": 2, "attention.key_length": s.d_head,
        "attention.value_length": s.d_head, "rope.dimension_sections": [s.d_head // 2, 0, 0, 0],
        "ssm.conv_kernel": 4, "ssm.inner_size": rows, "ssm.state_size": state,
        "ssm.time_step_rank": rank, "ssm.group_count": rank,
    }  # fmt: skip
    trunk = [full if i % 2 else linear for i in range(s.n_layer)]
    return metadata, [*trunk, full | s.nextn()]


def _mimo2(s: Sizes) -> tuple[Metadata, Blocks]:
    """Full and sliding attention in turn, then MTP layers of both kinds."""
    trunk = s.attention_block()
    fused = {name: shape for name, shape in trunk.items() if name[:-1] != "attn_"}
    metadata = s.mtp_metadata(s.n_mtp) | {
        "expert_feed_forward_length": 0, "attention.sliding_window": s.window,
        "attention.sliding_window_pattern": [i % 2 for i in range(s.n_layer + s.n_mtp)],
    }  # fmt: skip
    head = fused | {"attn_qkv": (s.n_embd + 2 * s.n_kv, s.n_embd)} | s.nextn()
    return metadata, [trunk] * s.n_layer + [head] * s.n_mtp


def _hy_v3(s: Sizes) -> tuple[Metadata, Blocks]:
    """Attention only, dense layers, then MTP layers whose states are taken after their norm."""
    block = s.attention_block() | _head_norms(s)
    head = block | s.nextn() | _norms(s, "nextn.shared_head_norm")
    metadata = s.mtp_metadata(s.n_mtp) | {"expert_feed_forward_length": 0}
    return metadata, [block] * s.n_layer + [head] * s.n_mtp


def _gemma4(s: Sizes) -> tuple[Metadata, Blocks]:
    """Sliding and full attention in turn; the last layer is full, the one before it is not."""
    norms = _norms(s, "post_attention_norm", "post_ffw_norm") | _head_norms(s)
    return s.attention_metadata() | _gemma4_attention(s), [s.attention_block() | norms] * s.n_layer


def _gemma4_assistant(s: Sizes) -> tuple[Metadata, Blocks]:
    """MTP layers that read the K/V of a gemma4 with sizes `s`; half as wide, without keys and values."""
    half = replace(s, n_embd=s.n_embd // 2, n_ff=s.n_ff // 2)
    d, rows = half.n_embd, s.d_head * s.n_head
    block = _norms(half, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    block |= {"attn_q_norm": (s.d_head,), "attn_q": (rows, d), "attn_output": (d, rows)}
    block |= half.dense() | {"layer_output_scale": (1,)}
    metadata = half.attention_metadata() | _gemma4_attention(s)
    metadata |= {"embedding_length_out": s.n_embd, "nextn_predict_layers": s.n_layer}
    return metadata, [block] * s.n_layer


def _gemma4_attention(s: Sizes) -> Metadata:
    sizes = ("key_length", "value_length", "key_length_swa", "value_length_swa")
    return {
        "attention.sliding_window": s.window,
        "attention.sliding_window_pattern": [1 - i % 2 for i in range(s.n_layer)],
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": s.d_head,
        "rope.dimension_count_swa": s.d_head,
        **{f"attention.{size}": s.d_head for size in sizes},
    }


_ARCHITECTURES: dict[str, Callable[[Sizes], tuple[Metadata, Blocks]]] = {
    "llama": _llama, "gemma3": _gemma3, "mamba": _mamba, "lfm2": _lfm2, "rwkv7": _rwkv7,
    "nemotron_h": _nemotron_h, "bert": _bert, "eagle3": _eagle3, "glm4moe": _glm4moe,
    "qwen35": _qwen35, "mimo2": _mimo2,
    "hy_v3": _hy_v3, "gemma4": _gemma4, "gemma4-assistant": _gemma4_assistant,
}  # fmt: skip


def _last_tensors(architecture: str, s: Sizes) -> Shapes:
    """Return the tensors that come after the blocks."""
    if architecture not in ("gemma4", "gemma4-assistant"):
        return {}
    half = s.n_embd // 2
    last: Shapes = {"rope_freqs.weight": (s.d_head // 2,)}
    if architecture == "gemma4":
        return last
    joined: Shapes = {"nextn.pre_projection.weight": (half, 2 * s.n_embd)}
    return last | joined | {"nextn.post_projection.weight": (s.n_embd, half)}


def _outer_tensors(architecture: str, s: Sizes, n_vocab: int) -> Shapes:
    """Return the tensors outside the blocks; output weights are not tied to the embeddings,
    or a random model would mostly repeat its last token."""
    d = s.n_embd
    if architecture == "gemma4-assistant":  # its own embedding is also its output
        return {"token_embd.weight": (n_vocab, d // 2), "output_norm.weight": (d // 2,)}
    if architecture == "eagle3":  # embedding and output are the target's
        return {"fc.weight": (d, 3 * d), "output_norm.weight": (d,)}
    embedding: Shapes = {"token_embd.weight": (n_vocab, d)}
    if architecture == "bert":
        position: Shapes = {"position_embd.weight": (s.n_ctx_train, d)}
        return embedding | position | _with_bias("token_embd_norm", d)
    output: Shapes = {"output.weight": (n_vocab, d)}
    if architecture == "rwkv7":
        norms = _with_bias("token_embd_norm", d) | _with_bias("output_norm", d)
        return embedding | norms | output
    norm = "token_embd_norm.weight" if architecture == "lfm2" else "output_norm.weight"
    return embedding | {norm: (d,)} | output


def write_toy(
    path: str | Path,
    architecture: str = "llama",
    *,
    vocab: str | int | Vocabulary = "small",
    weights: str = "q8_0",
    seed: int = 0,
    drift: float = 0.0,
    metadata: Mapping[str, Value | None] | None = None,
    drop: Sequence[str] = (),
    half: Sequence[str] = (),
    values: Callable[[str, Array], Array] = lambda _, noise: noise,
    **sizes: int,
) -> Path:
    """Write a toy of `architecture` and return its path.

    `vocab` is `"small"`, `"bytes"`, `"none"` (16 rows, no tokenizer), a number of tokens or a
    `Vocabulary`; `weights` is `"q8_0"` or `"f32"`; `sizes` are fields of `Sizes`.
    `drift` in [0, 1] mixes in other noise: a file of the same seed and a small drift predicts
    much like the original (a draft model). `metadata` overrides keys (the architecture's prefix
    is added; None removes the key). `drop` names tensors to leave out, `"*"` all of them; `half`
    names tensors to store as F16; `values` returns what replaces a tensor of this name.
    """
    s = Sizes(**sizes)
    n_vocab, text = 16, _NO_VOCABULARY
    if vocab != "none":
        vocabulary = Vocabulary.named(vocab)
        n_vocab, text = len(vocabulary.tokens), vocabulary.metadata()
    own, blocks = _ARCHITECTURES[architecture](s)
    if weights not in _FILE_TYPES:
        raise ValueError(f"unknown weights {weights!r}")
    file_type = {"general.file_type": int(_FILE_TYPES[weights])}
    merged = {**file_type, **own, **text, **(metadata or {})}
    kept = {key: value for key, value in merged.items() if value is not None}
    shapes = _outer_tensors(architecture, s, n_vocab) | _in_blocks(blocks)
    shapes |= _last_tensors(architecture, s)
    shapes = {name: shape for name, shape in shapes.items() if name not in drop}
    path = Path(path)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in kept.items():
        shared = key.startswith(("general.", "tokenizer."))
        name = key if shared else f"{architecture}.{key}"
        if isinstance(value, bool | int | float | str):
            writer.add_key_value(name, value, _VALUE_TYPES[type(value)])
        else:
            writer.add_array(name, list(value))
    noise, other = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    for name, shape in ({} if "*" in drop else shapes).items():
        unit = noise.standard_normal(shape, dtype=np.float32)
        if drift:
            unit *= np.float32(math.sqrt(1 - drift * drift))
            unit += np.float32(drift) * other.standard_normal(shape, dtype=np.float32)
        tensor = values(name, _scaled(unit, name, architecture))
        _add_tensor(writer, name, tensor, weights, half)
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


write_llama, write_gemma3, write_mamba, write_lfm2, write_bert, write_eagle3 = (
    partial(write_toy, architecture=name)
    for name in ("llama", "gemma3", "mamba", "lfm2", "bert", "eagle3")
)


def _of(architecture: str, key: str, value: Value) -> dict[str, Any]:
    return {"architecture": architecture, "metadata": {key: value}}


def _experts(n_groups: int) -> dict[str, Value]:
    counts = {"expert_count": 4, "expert_used_count": 2, "expert_group_used_count": 1}
    return {**counts, "expert_group_count": n_groups}


# Options of `write_toy` for files that must be refused: they abort the process while loading or
# at the first decode, or llama.cpp returns NULL for them (truncated, no tensors).
BROKEN: dict[str, dict[str, Any]] = {
    "duplicate_tokens": {"vocab": Vocabulary((BOS, EOS, *"abcdefghijkla"))},
    "zero_blocks": _of("llama", "block_count", 0),
    "too_many_blocks": {"metadata": {"block_count": 100_000}},
    "nextn_layers": {"metadata": {"nextn_predict_layers": 3}},
    "rope_scaling": {"metadata": {"rope.scaling.type": "bogus"}},
    "experts_unused": {"metadata": {"expert_count": 4}},
    "many_experts": {"metadata": {"expert_count": 2000, "expert_used_count": 1}},
    "many_groups": {"metadata": _experts(n_groups=4)},
    "uneven_groups": {"metadata": _experts(n_groups=3)},
    "huge_head_count_kv": {"metadata": {"attention.head_count_kv": 1 + (1 << 27)}},
    "nan_epsilon": {"metadata": {"attention.layer_norm_rms_epsilon": math.nan}},
    "gemma3_pattern_1": _of("gemma3", "attention.sliding_window_pattern", 1),
    "rwkv_head_size": _of("rwkv7", "wkv.head_size", 128),
    "lfm2_one_kind_of_layer": {"architecture": "lfm2", "n_layer": 1},
    "odd_rotation": _of("gemma3", "rope.dimension_count", 7),
    "unequal_heads": _of("bert", "attention.key_length", 16),
    "half_precision_norms": {"half": ("blk.0.attn_norm.weight",)},
    "alignment_0": {"metadata": {"general.alignment": 0}},
    "alignment_3": {"metadata": {"general.alignment": 3}},
    "alignment_huge": {"metadata": {"general.alignment": 1 << 31}},
    "alignment_text": {"metadata": {"general.alignment": "32"}},
    "alignment_list": {"metadata": {"general.alignment": [32]}},
    "alignment_float": {"metadata": {"general.alignment": 32.0}},
    "alignment_true": {"metadata": {"general.alignment": True}},
    "no_tensors": {"drop": ("*",)},
    "truncated": {},
}


def write_broken(path: str | Path, kind: str) -> Path:
    """Write one of the files of `BROKEN`, which must not be loaded; return its path."""
    written = write_toy(path, **BROKEN[kind])
    if kind == "truncated":
        written.write_bytes(written.read_bytes()[: written.stat().st_size * 2 // 3])
    return written


def write_renumbered(source: str | Path, path: str | Path) -> Path:
    """Write the model of `source` with the ids of its tokens in reverse order; return the path."""

    def value(name: str, old: Any) -> Any:
        if name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
            return old[::-1]
        is_id = name.startswith("tokenizer.ggml.") and name.endswith("_token_id")
        return n_vocab - 1 - old if is_id else old

    n_vocab = len(gguf.GGUFReader(source).fields["tokenizer.ggml.tokens"].contents())
    return _rewrite(source, path, value, lambda _, old: old)


def write_aligned(
    source: str | Path,
    path: str | Path,
    value: int,
    kind: gguf.GGUFValueType = gguf.GGUFValueType.UINT32,
    *,
    n_bytes: int = 0,
    n_parts: int = 1,
) -> Path:
    """Write the model of `source` with this `general.alignment` and return its path.

    If it is of the right kind, the weights have it. `n_bytes` of other metadata move the weights.
    """

    def more(writer: gguf.GGUFWriter) -> None:
        if kind == gguf.GGUFValueType.UINT32:
            writer.data_alignment = value
        writer.add_key_value("general.alignment", value, kind)
        writer.add_key_value("toy.padding", "p" * n_bytes, gguf.GGUFValueType.STRING)
        add_shards = writer.add_shard_kv_data

        def add_to_all() -> None:  # gguf-py would write the key into the first part only
            add_shards()
            for shard in writer.kv_data[1:]:
                shard["general.alignment"] = writer.kv_data[0]["general.alignment"]

        writer.add_shard_kv_data = add_to_all

    return _rewrite(source, path, n_parts=n_parts, more=more)


def write_chat(source: str | Path, path: str | Path, template: str, *control: str) -> Path:
    """Write the model of `source` with a chat template; its last tokens become these control tokens."""
    n = len(control)

    def value(name: str, old: Any) -> Any:
        if name == "tokenizer.ggml.tokens":
            return [*old[:-n], *control]
        if name == "tokenizer.ggml.token_type":
            return [*old[:-n], *[int(gguf.TokenType.CONTROL)] * n]
        return old[:-n] if name == "tokenizer.ggml.merges" else old

    return _rewrite(source, path, value, more=lambda writer: writer.add_chat_template(template))


def write_parts(source: str | Path, trunk: str | Path, layers: str | Path) -> None:
    """Write the model of `source` as two files: one without its MTP layers, one with them only."""
    fields = gguf.GGUFReader(source).fields
    architecture = str(fields["general.architecture"].contents())
    n = int(fields[f"{architecture}.block_count"].contents())
    first = n - int(fields[f"{architecture}.nextn_predict_layers"].contents())
    changed = {f"{architecture}.block_count": first, f"{architecture}.nextn_predict_layers": 0}

    def blocks(wanted: range) -> Callable[[str, npt.NDArray[Any]], npt.NDArray[Any] | None]:
        def data(name: str, old: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
            is_other = name.startswith("blk.") and int(name.split(".")[1]) not in wanted
            return None if is_other else old

        return data

    _rewrite(source, trunk, lambda name, old: changed.get(name, old), blocks(range(first)))
    _rewrite(source, layers, data=blocks(range(first, n)))


def write_split(
    source: str | Path, folder: str | Path, n_parts: int = 2, *, empty_first: bool = False
) -> list[Path]:
    """Write the model of `source` in parts, as gguf-py splits one, and return their paths.

    The metadata is in the first part only, which has no tensors with `empty_first`.
    """
    path = Path(folder, f"{Path(source).stem}.gguf")
    first = _rewrite(source, path, n_parts=n_parts, empty_first=empty_first)
    return [first.with_name(first.name.replace("00001", f"{i + 1:05d}", 1)) for i in range(n_parts)]


def _rewrite(
    source: str | Path,
    path: str | Path,
    value: Callable[[str, Any], Any] = lambda _, old: old,
    data: Callable[[str, npt.NDArray[Any]], npt.NDArray[Any] | None] = lambda _, old: old,
    *,
    n_parts: int = 1,
    empty_first: bool = False,
    more: Callable[[gguf.GGUFWriter], None] = lambda _: None,
) -> Path:
    """Write a file with the values and tensors that these functions return for those of `source`.

    `more` adds other values. The path of the first part is returned.
    """
    reader, path = gguf.GGUFReader(source), Path(path)
    architecture = str(reader.fields["general.architecture"].contents())
    n_tensors = -(-len(reader.tensors) // (n_parts - empty_first)) if n_parts > 1 else 0
    writer = gguf.GGUFWriter(
        path, architecture, split_max_tensors=n_tensors, small_first_shard=empty_first
    )
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value(name, field.contents()), kind, sub_type)
    more(writer)
    for tensor in reader.tensors:
        rows = data(tensor.name, tensor.data)
        if rows is not None:
            writer.add_tensor(tensor.name, np.ascontiguousarray(rows), raw_dtype=tensor.tensor_type)
    finish(writer, path)
    return path.with_name(f"{path.stem}-00001-of-{n_parts:05d}.gguf") if n_parts > 1 else path
