"""The two networks: the `llama` architecture in a small size, exactly as llama.cpp computes it.

RMSNorm, rotary positions on neighbouring pairs (2i, 2i+1), grouped K/V heads, SwiGLU and an
embedding that is also the output matrix. Without files, tokenizers and training.

Shapes in comments: B sequences, T tokens, H heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Config:
    """The shape of a network; `context` is the longest sequence it was trained on, in tokens."""

    n_layers: int
    width: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    vocab: int = 4096
    context: int = 1024
    rope_base: float = 10_000.0
    eps: float = 1e-5

    @property
    def head_size(self) -> int:
        """Return the width of one attention head."""
        return self.width // self.n_heads


SIZES = {
    "target": Config(n_layers=6, width=256, ffn=768, n_heads=4, n_kv_heads=2),
    "draft": Config(n_layers=2, width=128, ffn=384, n_heads=4, n_kv_heads=2),
    "tiny": Config(n_layers=2, width=64, ffn=96, n_heads=2, n_kv_heads=1, vocab=320),
}


def rotary_angles(config: Config, n_positions: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines, each [n_positions, head_size / 2], float32."""
    exponent = torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size
    angles = torch.arange(n_positions, dtype=torch.float64)[:, None] / config.rope_base**exponent
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each neighbouring pair of `x` [B, H, T, D] by its position's angle."""
    even, odd = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)  # B H T D/2
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).type_as(x)


class Block(nn.Module):
    """One layer: attention, then the gated feed-forward network, each added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, kv_width = config.width, config.n_kv_heads * config.head_size
        self.config = config
        self.attn_norm = nn.Parameter(torch.ones(width))
        self.attn_q = nn.Linear(width, width, bias=False)
        self.attn_k = nn.Linear(width, kv_width, bias=False)
        self.attn_v = nn.Linear(width, kv_width, bias=False)
        self.attn_output = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.Parameter(torch.ones(width))
        self.ffn_gate = nn.Linear(width, config.ffn, bias=False)
        self.ffn_up = nn.Linear(width, config.ffn, bias=False)
        self.ffn_down = nn.Linear(config.ffn, width, bias=False)

    def attend(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: tuple[Tensor, Tensor] | None, past: int
    ) -> Tensor:
        """Return causal self-attention of `x` [B, T, width], reading and extending `kv`."""
        B, T, _ = x.shape
        D = self.config.head_size
        q = self.attn_q(x).view(B, T, -1, D).transpose(1, 2)  # B H T D
        k = self.attn_k(x).view(B, T, -1, D).transpose(1, 2)  # B K T D
        v = self.attn_v(x).view(B, T, -1, D).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if kv is not None:
            kv[0][:, :, past : past + T], kv[1][:, :, past : past + T] = k, v
            k, v = kv[0][:, :, : past + T].type_as(q), kv[1][:, :, : past + T].type_as(q)
        if T == 1:  # query heads that share a key head become rows of one query: no copies
            mixed = F.scaled_dot_product_attention(q.reshape(B, k.shape[1], -1, D), k, v)
        else:
            n_shared = self.config.n_heads // self.config.n_kv_heads
            k, v = k.repeat_interleave(n_shared, 1), v.repeat_interleave(n_shared, 1)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(
                1, 2
            )  # B T H D
        out: Tensor = self.attn_output(mixed.reshape(B, T, -1))
        return out

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: tuple[Tensor, Tensor] | None, past: int
    ) -> Tensor:
        """Return the layer's output [B, T, width]."""
        shape, eps = (self.config.width,), self.config.eps
        x = x + self.attend(F.rms_norm(x, shape, self.attn_norm, eps), cos, sin, kv, past)
        h = F.rms_norm(x, shape, self.ffn_norm, eps)
        out: Tensor = x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))
        return out


class Network(nn.Module):
    """A causal language model over `config.vocab` tokens."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.output_norm = nn.Parameter(torch.ones(config.width))
        cos, sin = rotary_angles(config, config.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        nn.init.normal_(self.token_embd.weight, std=0.02)
        for block in self.blocks:
            assert isinstance(block, Block)
            for matrix in (block.attn_output, block.ffn_down):
                nn.init.zeros_(matrix.weight)  # every layer starts as the identity

    def new_cache(self, batch: int, n_positions: int) -> Cache:
        """Return an empty K/V cache for `batch` sequences, bfloat16."""
        config = self.config
        shape = (batch, config.n_kv_heads, n_positions, config.head_size)
        new = torch.zeros
        return [
            (new(shape, dtype=torch.bfloat16), new(shape, dtype=torch.bfloat16))
            for _ in range(config.n_layers)
        ]

    def forward(self, tokens: Tensor, cache: Cache | None = None, past: int = 0) -> Tensor:
        """Return the logits [B, T, V] of `tokens` [B, T].

        With a cache, it has `past` tokens already: then T is 1, or `past` is 0.
        """
        cos, sin = self.cos[past : past + tokens.shape[1]], self.sin[past : past + tokens.shape[1]]
        x = self.token_embd(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, cache[i] if cache else None, past)
        x = F.rms_norm(x, (self.config.width,), self.output_norm, self.config.eps)
        logits: Tensor = F.linear(x, self.token_embd.weight)
        return logits
