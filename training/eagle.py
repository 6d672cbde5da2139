"""Train an EAGLE-3 head for the target, with its own drafts in the loop.

The loss is the cross-entropy with the target's whole distribution at temperature 1, summed over a few
steps: the first reads the target's hidden states, each later one the states that the step before
computed, as in drafting (the training-time test of EAGLE-3, Li et al. 2025, arXiv 2503.01840, section 3).
Half of the text is from the corpus, half was sampled from the target.

    python -m training.eagle WORK_DIR
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data import heldout_windows
from training.distill import load_mixture, sampling_options
from training.head import HEADS, Head, HeadConfig, target_states
from training.loop import Metrics, fit, load_network
from training.model import Network

N_STEPS = 3  # of the head on its own states, the first included
DECAY = 0.8  # weight of a step over the one before


def unroll(
    target: Network, head: Head, windows: Tensor, n_steps: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the target's logits [B, T, V] over windows [B, T], and each step's logits [B, N, V].

    N is T - n_steps; entry i of step k, counted from 0, is a distribution of the token after i + k + 1.
    """
    with torch.no_grad():
        features, wanted = target_states(target, windows, head.config.target_layers)
    n = windows.shape[1] - n_steps
    states = head.fc(features[:, :n])
    earlier: list[tuple[Tensor, Tensor]] = []
    unrolled = []
    for k in range(n_steps):
        logits, states = head.step(windows[:, k + 1 : k + 1 + n], states, earlier)
        unrolled.append(logits)
    return wanted, unrolled


def draft_loss(target: Network, head: Head, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy over the steps in nats, step k weighted by DECAY^k."""
    wanted, unrolled = unroll(target, head, windows, N_STEPS)
    p = wanted.softmax(-1)
    total = torch.zeros(())
    for k, logits in enumerate(unrolled):
        n = logits.shape[1]
        part = -(p[:, k + 1 : k + 1 + n] * F.log_softmax(logits, -1)).sum(-1).mean()
        total = total + DECAY**k * part
    return total / sum(DECAY**k for k in range(N_STEPS))


@torch.no_grad()
def agreement(target: Network, head: Head, windows: Tensor, n_steps: int = 4) -> Metrics:
    """Return for each step the share of equal arg-maxima and sum(min(p, q)), text given."""
    sums: dict[str, float] = {}
    parts = torch.split(windows, 8)
    for part in parts:
        wanted, unrolled = unroll(target, head, part, n_steps)
        for k, logits in enumerate(unrolled):
            theirs = wanted[:, k + 1 : k + 1 + logits.shape[1]]
            same = (theirs.argmax(-1) == logits.argmax(-1)).float().mean()
            overlap = torch.minimum(theirs.softmax(-1), logits.softmax(-1)).sum(-1).mean()
            for name, value in ((f"same_argmax_{k + 1}", same), (f"acceptance_{k + 1}", overlap)):
                sums[name] = sums.get(name, 0.0) + float(value) * len(part) / len(windows)
    return sums


def load_head(path: Path, target: Network) -> Head:
    """Return the head of a checkpoint."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    config = state["config"]
    layers = tuple(config["target_layers"])
    head = Head(HeadConfig(**{**config, "target_layers": layers}), target)
    head.load_state_dict(state["model"])
    return head


def main() -> None:
    """Train the head."""
    args = sampling_options("train an EAGLE-3 head for the target", minutes=60, size="eagle")
    target = load_network(args.work / "target.pt").requires_grad_(False)
    head = Head(HEADS[args.size], target)
    mixture = load_mixture(target, args, temperatures=(0.05, 1.0))
    fairy = heldout_windows(args.work, "fairy", args.length, 12_000)

    def evaluate() -> Metrics:
        return agreement(target, head, fairy)

    def loss(windows: Tensor) -> Tensor:
        return draft_loss(target, head, windows[:, :-1])

    fit(head, mixture.draw, loss, evaluate, args.work / "eagle.pt", args)


if __name__ == "__main__":
    main()
