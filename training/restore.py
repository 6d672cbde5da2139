"""Read a model back from its GGUF file: checkpoint and tokenizer, for trainings that build on it.

Writes `<role>.pt` and `tokenizer.json`; the weights are those of the file, dequantised.

    python -m training.restore MODEL.gguf WORK_DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from training.export import gguf_name
from training.model import Config, Network
from training.prepare import END


def read_network(reader: gguf.GGUFReader) -> Network:
    """Return the network of a GGUF file that `training.export` wrote."""

    def value(key: str) -> float:
        # Stored in 32 bits: the decimal number that was written has at most seven digits.
        return float(f"{float(reader.fields[f'llama.{key}'].contents()):.7g}")

    n_heads = int(value("attention.head_count"))
    config = Config(
        n_layers=int(value("block_count")),
        width=int(value("embedding_length")),
        ffn=int(value("feed_forward_length")),
        n_heads=n_heads,
        n_kv_heads=int(value("attention.head_count_kv")),
        vocab=int(value("vocab_size")),
        context=int(value("context_length")),
        rope_base=value("rope.freq_base"),
        eps=value("attention.layer_norm_rms_epsilon"),
    )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    network = Network(config)
    for name, parameter in network.named_parameters():
        tensor = tensors[gguf_name(name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        parameter.data.copy_(torch.from_numpy(np.array(values, np.float32)))
    return network


def read_tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """Return the byte-level BPE of a GGUF file."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer


def main() -> None:
    """Write the checkpoint and the tokenizer."""
    parser = argparse.ArgumentParser(description="GGUF to checkpoint and tokenizer")
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--role", default="target", help="name of the checkpoint")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(args.model)
    network = read_network(reader)
    torch.save(
        {"config": vars(network.config), "model": network.state_dict()},
        args.work / f"{args.role}.pt",
    )
    read_tokenizer(reader).save(str(args.work / "tokenizer.json"))
    print(f"{args.role}.pt: {sum(p.numel() for p in network.parameters())} parameters")


if __name__ == "__main__":
    main()
