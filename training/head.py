"""The EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) as llama.cpp computes it.

One layer over pairs of a token and a state. A state is first the target's: three of its layers'
inputs, fused by `fc`; while drafting it is the head's own output for the position before. Embedding and
output matrix are the target's. Without files and training.

Shapes in comments: B sequences, T tokens, N pairs, H heads, K key/value heads, D head size, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model import Network, rotary_angles, rotate


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head; its width, head size and context are the target's."""

    ffn: int
    n_heads: int
    n_kv_heads: int
    target_layers: tuple[int, int, int]


HEADS = {
    "eagle": HeadConfig(ffn=512, n_heads=4, n_kv_heads=2, target_layers=(1, 3, 5)),
    "tiny": HeadConfig(ffn=64, n_heads=2, n_kv_heads=1, target_layers=(0, 1, 1)),
}


def target_states(target: Network, tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the inputs of `layers`, concatenated [B, T, 3 W], and the target's logits [B, T, V]."""
    n = tokens.shape[1]
    cos, sin = target.cos[:n], target.sin[:n]
    x = target.token_embd(tokens)
    inputs = []
    for block in target.blocks:
        inputs.append(x)
        x = block(x, cos, sin, None, 0)
    x = F.rms_norm(x, (target.config.width,), target.output_norm, target.config.eps)
    return torch.cat([inputs[i] for i in layers], -1), F.linear(x, target.token_embd.weight)


class Head(nn.Module):
    """An EAGLE-3 head for `target`, whose embedding it shares."""

    cos: Tensor
    sin: Tensor
    token_embd: Tensor

    def __init__(self, config: HeadConfig, target: Network) -> None:
        super().__init__()
        self.config = config
        self.eps = target.config.eps
        width, head_size = target.config.width, target.config.width // config.n_heads
        self.head_size = head_size
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.attn_norm = nn.Parameter(torch.ones(width))  # of the tokens
        self.attn_norm_2 = nn.Parameter(torch.ones(width))  # of the states
        self.attn_q = nn.Linear(2 * width, config.n_heads * head_size, bias=False)
        self.attn_k = nn.Linear(2 * width, config.n_kv_heads * head_size, bias=False)
        self.attn_v = nn.Linear(2 * width, config.n_kv_heads * head_size, bias=False)
        self.attn_output = nn.Linear(config.n_heads * head_size, width, bias=False)
        self.ffn_norm = nn.Parameter(torch.ones(width))
        self.ffn_gate = nn.Linear(width, config.ffn, bias=False)
        self.ffn_up = nn.Linear(width, config.ffn, bias=False)
        self.ffn_down = nn.Linear(config.ffn, width, bias=False)
        self.output_norm = nn.Parameter(target.output_norm.detach().clone())
        cos, sin = rotary_angles(target.config, target.config.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("token_embd", target.token_embd.weight.detach(), persistent=False)
        with torch.no_grad():  # begin with the target's last extracted state, unchanged
            self.fc.weight.zero_()
            self.fc.weight[:, 2 * width :] = torch.eye(width)
        for matrix in (self.attn_output, self.ffn_down):
            nn.init.zeros_(matrix.weight)

    def step(
        self, tokens: Tensor, states: Tensor, earlier: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the logits [B, N, V] after N pairs and their states [B, N, W].

        Pair i of step k, counted from 0, has position i + k. It attends to the pairs 0 to i of step 0,
        to its own of the steps between, and to itself: what a draft of k + 1 tokens that begins
        after pair i sees. `earlier` holds the keys and values of the steps before; this step's are added.
        """
        B, N, W = states.shape
        D, k = self.head_size, len(earlier)
        embedded = F.embedding(tokens, self.token_embd)
        joined = torch.cat(
            (
                F.rms_norm(embedded, (W,), self.attn_norm, self.eps),
                F.rms_norm(states, (W,), self.attn_norm_2, self.eps),
            ),
            -1,
        )
        cos, sin = self.cos[k : k + N], self.sin[k : k + N]
        n_shared = self.config.n_heads // self.config.n_kv_heads
        q = rotate(self.attn_q(joined).view(B, N, -1, D).transpose(1, 2), cos, sin)  # B H N D
        key = rotate(self.attn_k(joined).view(B, N, -1, D).transpose(1, 2), cos, sin)
        value = self.attn_v(joined).view(B, N, -1, D).transpose(1, 2)
        key, value = key.repeat_interleave(n_shared, 1), value.repeat_interleave(n_shared, 1)
        earlier.append((key, value))
        if k == 0:
            mixed = F.scaled_dot_product_attention(q, key, value, is_causal=True)
        else:
            first_key, first_value = earlier[0]
            causal = torch.ones(N, N, dtype=torch.bool).tril()
            scores = (q @ first_key.mT).masked_fill(~causal, float("-inf"))  # B H N N
            own = [(q * k_own).sum(-1, keepdim=True) for k_own, _ in earlier[1:]]
            share = (torch.cat((scores, *own), -1) * D**-0.5).softmax(-1)
            mixed = share[..., :N] @ first_value
            for i, (_, v_own) in enumerate(earlier[1:]):
                mixed = mixed + share[..., N + i, None] * v_own
        x = states + self.attn_output(mixed.transpose(1, 2).reshape(B, N, -1))
        h = F.rms_norm(x, (W,), self.ffn_norm, self.eps)
        x = x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))
        normed = F.rms_norm(x, (W,), self.output_norm, self.eps)
        return F.linear(normed, self.token_embd), x
