"""Distil the draft from the target: sample text from the target, then match its distributions.

The loss is the forward KL divergence from the target's full softmax at temperature 1 (Hinton et
al. 2015), at every position; half of the text is from the corpus, half was sampled from the target,
because drafts are accepted or rejected on such text. The draft's embedding starts as the best
low-rank approximation of the target's.

    python -m training.distill WORK_DIR
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.data import TRAINED_SHARES, Mixture, heldout_windows
from training.loop import Metrics, fit, load_network, make_network, options, parsed
from training.model import Network
from training.train import mean_loss

SAMPLED_SHARE = 0.5  # of the windows
PROMPT_SHARES = {"fairy": 0.6, "children": 0.2, "novels": 0.2}


@torch.no_grad()
def sample(network: Network, prompts: Tensor, n_tokens: int, temperatures: Tensor) -> Tensor:
    """Return `prompts` [B, P] continued to [B, P + n_tokens]; each row has its own temperature [B]."""
    past, batch = prompts.shape[1], len(prompts)
    cache = network.new_cache(batch, past + n_tokens)
    text = torch.cat((prompts, prompts.new_zeros(batch, n_tokens)), 1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(prompts, cache)[:, -1]
        for i in range(past, past + n_tokens):
            scaled = logits.float() / temperatures[:, None]
            # The argmax of logit - log(exponential noise) is a sample from the softmax (Gumbel-max).
            text[:, i] = (scaled - torch.empty_like(scaled).exponential_().log()).argmax(-1)
            logits = network(text[:, i : i + 1], cache, i)[:, -1]
    return text


def write_samples(
    target: Network,
    mixture: Mixture,
    args: argparse.Namespace,
    temperatures: tuple[float, float],
) -> None:
    """Continue snippets of the training text with the target; save the tokens as one stream."""
    began = time.monotonic()
    rounds: list[np.ndarray] = []
    while not rounds or time.monotonic() - began < 60 * args.sample_minutes:
        prompts = mixture.draw(len(rounds), args.sample_rows, args.prompt_length)[:, :-1]
        warmth = torch.linspace(*temperatures, args.sample_rows)
        n_new = args.sample_length - args.prompt_length
        rounds.append(sample(target, prompts, n_new, warmth).numpy().astype(np.uint16))
        if args.steps:
            break
    written = np.concatenate(rounds).reshape(-1)
    np.save(args.work / "sampled.train.npy", written)
    print(f"sampled {len(written)} tokens in {time.monotonic() - began:.0f} s", flush=True)


def divergence(target: Network, draft: Network, tokens: Tensor) -> Tensor:
    """Return the mean KL(target || draft) in nats a token over `tokens` [B, T]."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            wanted = target(tokens)
        drafted = draft(tokens)
    p = F.log_softmax(wanted.float(), -1)
    q = F.log_softmax(drafted.float(), -1)
    return (p.exp() * (p - q)).sum(-1).mean()


@torch.no_grad()
def agreement(target: Network, draft: Network, windows: Tensor) -> Metrics:
    """Return KL, the share of equal arg-maxima, and sum(min(p, q)): the expected acceptance."""
    kl, equal, overlap = [], [], []
    for part in torch.split(windows[:, :-1], 8):
        with torch.autocast("cpu", torch.bfloat16):
            p, q = target(part).float().softmax(-1), draft(part).float().softmax(-1)
        kl.append((p * (p.clamp_min(1e-20) / q.clamp_min(1e-20)).log()).sum(-1).mean(1))
        equal.append((p.argmax(-1) == q.argmax(-1)).float().mean(1))
        overlap.append(torch.minimum(p, q).sum(-1).mean(1))
    means = [float(torch.cat(values).mean()) for values in (kl, equal, overlap)]
    return dict(zip(("kl", "same_argmax", "acceptance"), means, strict=True))


def inherit_embedding(draft: Network, target: Network) -> None:
    """Set the draft's embedding to the target's leading singular directions."""
    u, s, _ = torch.linalg.svd(target.token_embd.weight.detach(), full_matrices=False)
    width = draft.config.width
    draft.token_embd.weight.data.copy_(u[:, :width] * s[:width])


def load_mixture(
    target: Network, args: argparse.Namespace, temperatures: tuple[float, float]
) -> Mixture:
    """Return what is trained on: the text, and as much that the target writes first."""
    if not (args.resume and (args.work / "sampled.train.npy").exists()):
        prompts = Mixture.load(args.work, PROMPT_SHARES, args.seed)
        write_samples(target, prompts, args, temperatures)
    shares = {name: share * (1 - SAMPLED_SHARE) for name, share in TRAINED_SHARES.items()}
    return Mixture.load(args.work, {**shares, "sampled": SAMPLED_SHARE}, args.seed)


def sampling_options(about: str, minutes: float, size: str) -> argparse.Namespace:
    """Return the options of a training on text that the target writes."""
    parser = options(about, minutes, size)
    parser.add_argument("--sample-minutes", type=float, default=4)
    parser.add_argument("--sample-rows", type=int, default=256)
    parser.add_argument("--sample-length", type=int, default=256, help="tokens, prompt included")
    parser.add_argument("--prompt-length", type=int, default=16)
    return parsed(parser)


def main() -> None:
    """Distil the draft."""
    args = sampling_options("distil the draft from the target", minutes=28, size="draft")
    target = load_network(args.work / "target.pt").requires_grad_(False)
    draft = make_network(args.size, target.config.vocab)
    inherit_embedding(draft, target)
    mixture = load_mixture(target, args, temperatures=(0.6, 1.0))
    sets = {name: heldout_windows(args.work, name, args.long_length) for name in TRAINED_SHARES}

    def evaluate() -> Metrics:
        metrics: Metrics = {}
        for name, windows in sets.items():
            metrics[f"heldout_{name}"] = mean_loss(draft, windows)
            for key, value in agreement(target, draft, windows).items():
                metrics[f"{key}_{name}"] = value
        return metrics

    def loss(windows: Tensor) -> Tensor:
        return divergence(target, draft, windows[:, :-1])

    fit(draft, mixture.draw, loss, evaluate, args.work / "draft.pt", args)


if __name__ == "__main__":
    main()
