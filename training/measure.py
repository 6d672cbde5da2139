"""Measure the finished pair on held-out text and print the tables of the model card.

On checkpoints, with teacher forcing: nats a token, bits a byte, and how well the draft matches the
target. Acceptance in the runtime is measured by the benchmarks.

    python -m training.measure WORK_DIR
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer

from training.data import TRAINED_SHARES, heldout_windows
from training.distill import agreement, sample
from training.loop import load_network
from training.train import mean_loss

LENGTH = 1024  # tokens of a window
HELDOUT_TOKENS = 65_536  # of each group, at most
N_SAMPLES = 3


def main() -> None:
    """Print the tables, then sample texts."""
    parser = argparse.ArgumentParser(description="measure the pair on held-out text")
    parser.add_argument("work", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)

    meta = json.loads((args.work / "meta.json").read_text())
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    networks = {role: load_network(args.work / f"{role}.pt") for role in ("target", "draft")}

    print(
        "| held-out text | tokens | target nats/token | bits/byte | draft nats/token | bits/byte |"
    )
    print("|---|---|---|---|---|---|")
    rows = []
    for group in TRAINED_SHARES:
        windows = heldout_windows(args.work, group, LENGTH, HELDOUT_TOKENS)
        size = meta[f"{group}.heldout"]
        tokens_a_byte = size["tokens"] / size["bytes"]
        cells = [group, f"{windows.numel() - len(windows):,}"]
        for network in networks.values():
            nats = mean_loss(network, windows)
            cells += [f"{nats:.3f}", f"{nats * tokens_a_byte / math.log(2):.3f}"]
        print("| " + " | ".join(cells) + " |", flush=True)
        rows.append((group, agreement(networks["target"], networks["draft"], windows)))

    print("\n| held-out text | KL(target, draft), nats/token | same arg-max | sum min(p, q) |")
    print("|---|---|---|---|")
    for group, m in rows:
        print(f"| {group} | {m['kl']:.3f} | {m['same_argmax']:.3f} | {m['acceptance']:.3f} |")

    prompts = torch.tensor([tokenizer.encode("Once upon a time there was").ids] * N_SAMPLES)
    warmth = torch.full((N_SAMPLES,), 0.8)
    for row in sample(networks["target"], prompts, 200, warmth).tolist():
        ids = row[: row.index(0)] if 0 in row else row
        print("\n> " + tokenizer.decode(ids).replace("\n", "\n> "))


if __name__ == "__main__":
    main()
