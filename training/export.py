"""Write checkpoints as GGUF files: matrices Q8_0, norms F32, tokenizer and licence inside.

python -m training.export WORK_DIR OUT_DIR
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from torch import nn

from training.eagle import load_head
from training.head import Head
from training.loop import load_network
from training.model import Config, Network
from training.prepare import END

TYPES = {
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}
DESCRIPTIONS = {
    "target": "A small storyteller trained on public-domain tales and novels.",
    "draft": "The draft of tale-target for speculative decoding, distilled from it.",
    "eagle": "An EAGLE-3 head that drafts for tale-target with its hidden states.",
}


def gguf_name(parameter: str) -> str:
    """Return llama.cpp's name of a torch parameter."""
    name = parameter.replace("blocks.", "blk.").removesuffix(".weight")
    return name + ".weight"


def write_vocabulary(writer: gguf.GGUFWriter, tokenizer: Path) -> None:
    """Add the tokenizer keys of a byte-level BPE."""
    model = json.loads(tokenizer.read_text("utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    end = model["vocab"][END]
    types = [gguf.TokenType.CONTROL if t == END else gguf.TokenType.NORMAL for t in tokens]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_eot_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def write(network: Network, tokenizer: Path, role: str, kind: str, out: Path) -> None:
    """Write one GGUF file of a language model."""
    temporary = out.with_suffix(".tmp")
    writer = gguf.GGUFWriter(temporary, "llama")
    write_about(writer, network, network.config, role, kind)
    write_vocabulary(writer, tokenizer)
    names = {name: gguf_name(name) for name, _ in network.named_parameters()}
    write_tensors(writer, network, names, kind, temporary, out)


def write_head(head: Head, target: Network, tokenizer: Path, kind: str, out: Path) -> None:
    """Write an EAGLE-3 head for `target`; embedding and output matrix stay in the target's file."""
    config = replace(
        target.config,
        n_layers=1,
        ffn=head.config.ffn,
        n_heads=head.config.n_heads,
        n_kv_heads=head.config.n_kv_heads,
    )
    temporary = out.with_suffix(".tmp")
    writer = gguf.GGUFWriter(temporary, "eagle3")
    write_about(writer, head, config, "eagle", kind)
    writer.add_array("eagle3.target_layers", list(head.config.target_layers))
    writer.add_uint32("eagle3.target_hidden_size", target.config.width)
    write_vocabulary(writer, tokenizer)
    whole = ("fc.weight", "output_norm")  # not of the layer
    names = {
        name: gguf_name(name if name in whole else f"blocks.0.{name}")
        for name, _ in head.named_parameters()
    }
    write_tensors(writer, head, names, kind, temporary, out)


def write_about(
    writer: gguf.GGUFWriter, network: nn.Module, config: Config, role: str, kind: str
) -> None:
    """Add name, licence and shape."""
    writer.add_name(f"tale-{role}")
    writer.add_author("llamabranch")
    writer.add_description(DESCRIPTIONS.get(role, role))
    writer.add_license("mit")
    writer.add_languages(["en"])
    writer.add_size_label(f"{sum(p.numel() for p in network.parameters()) / 1e6:.1f}M")
    writer.add_file_type(TYPES[kind][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_vocab_size(config.vocab)


def write_tensors(
    writer: gguf.GGUFWriter,
    network: nn.Module,
    names: dict[str, str],
    kind: str,
    temporary: Path,
    out: Path,
) -> None:
    """Write the file with the weights, `names` by parameter; then give it its final name."""
    quantisation = TYPES[kind][0]
    for name, parameter in network.named_parameters():
        values = parameter.detach().float().numpy()
        if values.ndim == 2 and quantisation != gguf.GGMLQuantizationType.F32:
            blocks = gguf.quants.quantize(values, quantisation)
            writer.add_tensor(names[name], blocks, raw_dtype=quantisation)
        else:
            writer.add_tensor(names[name], values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(temporary, out)


def main() -> None:
    """Write the GGUF files."""
    parser = argparse.ArgumentParser(description="checkpoints to GGUF")
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=TYPES, default="q8_0", help="type of the weight matrices")
    parser.add_argument("--roles", nargs="+", default=["target", "draft"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = args.work / "tokenizer.json"
    for role in args.roles:
        out = args.out / f"tale-{role}-{args.type}.gguf"
        if role == "eagle":
            target = load_network(args.work / "target.pt")
            head = load_head(args.work / "eagle.pt", target)
            write_head(head, target, tokenizer, args.type, out)
        else:
            write(load_network(args.work / f"{role}.pt"), tokenizer, role, args.type, out)
        print(out.name, out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
