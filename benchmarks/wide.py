"""A model with a large vocabulary and almost no layers, to measure a token's cost besides the layers."""

from __future__ import annotations

import os
from itertools import chain, islice, product
from pathlib import Path

import gguf
import numpy as np

__all__ = ["cached_wide", "make_wide"]

_WIDTH, _FEED_FORWARD = 64, 128
_SPREAD = 2.0  # standard deviation of the logits


def make_wide(path: Path, n_vocab: int, seed: int = 1) -> Path:
    """Write a llama of one layer with random weights, ``n_vocab`` tokens and byte-level BPE."""
    temporary = path.with_suffix(".tmp")
    writer = gguf.GGUFWriter(temporary, "llama")
    writer.add_name(f"wide-{n_vocab}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(1 << 15)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(_tokens(n_vocab))
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control] * 2 + [normal] * (n_vocab - 2))
    writer.add_token_merges(["zz zz"])  # llama.cpp requires one; it never applies
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    generator = np.random.default_rng(seed)
    half = _WIDTH // 2
    matrices = {
        "token_embd": (n_vocab, _WIDTH),
        "blk.0.attn_q": (_WIDTH, _WIDTH),
        "blk.0.attn_k": (half, _WIDTH),
        "blk.0.attn_v": (half, _WIDTH),
        "blk.0.attn_output": (_WIDTH, _WIDTH),
        "blk.0.ffn_gate": (_FEED_FORWARD, _WIDTH),
        "blk.0.ffn_up": (_FEED_FORWARD, _WIDTH),
        "blk.0.ffn_down": (_WIDTH, _FEED_FORWARD),
        "output": (n_vocab, _WIDTH),
    }
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, dtype=np.float32))
    for name, shape in matrices.items():
        values = generator.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[1]))
        if name == "output":
            values *= np.float32(_SPREAD)
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(temporary, path)
    return path


def cached_wide(folder: Path, n_vocab: int) -> Path:
    """Return the path of the model with ``n_vocab`` tokens in ``folder``; write it if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"wide-{n_vocab}.gguf"
    return path if path.exists() else make_wide(path, n_vocab)


def _tokens(n: int) -> list[str]:
    """Return two control tokens, then strings of GPT-2's characters for the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(68)]
    longer = ("".join(parts) for size in (2, 3) for parts in product(alphabet, repeat=size))
    return ["<s>", "</s>", *islice(chain(alphabet, longer), n - 2)]
