"""Train the target on next-token prediction.

python -m training.train WORK_DIR
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data import TRAINED_SHARES, Mixture, heldout_windows
from training.loop import Metrics, fit, make_network, options, parsed
from training.model import Network


def cross_entropy(network: Network, windows: Tensor) -> Tensor:
    """Return the mean loss in nats a token of windows [B, T + 1]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(windows[:, :-1])  # B T V
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def mean_loss(network: Network, windows: Tensor, n_rows: int = 8) -> float:
    """Return the mean loss of any number of windows, `n_rows` at a time."""
    parts = [cross_entropy(network, part) * len(part) for part in torch.split(windows, n_rows)]
    return float(torch.stack(parts).sum() / len(windows))


def main() -> None:
    """Train the target."""
    args = parsed(options("train the target", minutes=65, size="target"))
    network = make_network(args.size)
    mixture = Mixture.load(args.work, TRAINED_SHARES, args.seed)
    sets = {name: heldout_windows(args.work, name, args.long_length) for name in TRAINED_SHARES}

    def evaluate() -> Metrics:
        return {f"heldout_{name}": mean_loss(network, windows) for name, windows in sets.items()}

    def loss(windows: Tensor) -> Tensor:
        return cross_entropy(network, windows)

    fit(network, mixture.draw, loss, evaluate, args.work / "target.pt", args)


if __name__ == "__main__":
    main()
