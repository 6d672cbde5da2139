"""The training loop that target, draft and head share: schedule, optimizers, log, checkpoints.

Text and loss are passed as functions. Progress goes from 0 to 1 over a wall-clock budget (or a number
of steps); the learning rates and the sequence length depend only on it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from training.model import SIZES, Config, Network

Metrics = dict[str, float]
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 0.02, 3e-3, 0.1
FLAT_UNTIL = 0.4  # progress at which the learning rate begins to fall to 0
LONG_FROM = 0.78  # progress at which the long sequences begin


def options(about: str, minutes: float, size: str) -> argparse.ArgumentParser:
    """Return a parser of the loop's options; by default those that the bundled pair was trained with."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("work", type=Path, help="directory that training.prepare wrote")
    parser.add_argument("--minutes", type=float, default=minutes, help="wall-clock budget")
    parser.add_argument("--steps", type=int, default=0, help="a budget in steps instead")
    parser.add_argument("--tokens", type=int, default=6144, help="tokens a step")
    parser.add_argument("--length", type=int, default=256, help="tokens a sequence")
    parser.add_argument(
        "--long-length", type=int, default=1024, help="tokens a sequence near the end"
    )
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--eval-every", type=int, default=300, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true", help="slower steps, no C++ compiler")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--size", default=size)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options of the command line, after the seed and the threads are set in torch."""
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    return args


def make_network(size: str, vocab: int | None = None) -> Network:
    """Return a fresh network of a named size."""
    config = SIZES[size]
    return Network(Config(**{**vars(config), "vocab": vocab or config.vocab}))


def load_network(path: Path) -> Network:
    """Return the network of a checkpoint."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    network = Network(Config(**state["config"]))
    network.load_state_dict(state["model"])
    return network


def optimizers(network: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    named = list(network.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and not name.startswith("token_embd")]
    others = [p for name, p in named if p.ndim != 2 or name.startswith("token_embd")]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate(progress: float, step: int, warmup_steps: int) -> float:
    """Return the factor of the learning rate: warm-up, constant, linear to zero."""
    cooled = (1 - progress) / (1 - FLAT_UNTIL)
    return float(max(0.0, min(1.0, (step + 1) / warmup_steps, cooled)))


def fit(
    network: nn.Module,
    batch: Callable[[int, int, int], Tensor],
    loss: Callable[[Tensor], Tensor],
    evaluate: Callable[[], Metrics],
    out: Path,
    args: argparse.Namespace,
) -> Metrics:
    """Train `network` in place and return its last metrics.

    `batch(step, n_rows, length)` returns windows [n_rows, length + 1]; `loss` their mean loss.
    Writes `out` (a checkpoint) and one JSON line for each report to `out` with the suffix `.log`.
    """
    optims = optimizers(network)
    step, spent, n_tokens = 0, 0.0, 0
    if args.resume and out.exists():
        state = torch.load(out, map_location="cpu", weights_only=True)
        network.load_state_dict(state["model"])
        for optim, saved in zip(optims, state["optimizers"], strict=True):
            optim.load_state_dict(saved)
        step, spent, n_tokens = state["step"], state["spent"], state["n_tokens"]
    log = out.with_suffix(".log")

    def report(metrics: Metrics) -> None:
        line = json.dumps({k: round(v, 4) for k, v in metrics.items()})
        print(line, flush=True)
        with log.open("a") as file:
            file.write(line + "\n")

    def save() -> None:
        temporary = out.with_suffix(".tmp")
        torch.save(
            {
                "config": vars(network.config),
                "model": network.state_dict(),
                "optimizers": [optim.state_dict() for optim in optims],
                "step": step,
                "spent": time.monotonic() - began,
                "n_tokens": n_tokens,
            },
            temporary,
        )
        os.replace(temporary, out)

    step_loss = loss if args.no_compile else torch.compile(loss, dynamic=False)
    began = time.monotonic() - spent
    recent, marked, marked_tokens = torch.zeros(()), time.monotonic(), n_tokens
    n_recent = 0
    while True:
        elapsed = time.monotonic() - began
        progress = step / args.steps if args.steps else elapsed / (60 * args.minutes)
        if progress >= 1:
            break
        length = args.length if progress < LONG_FROM else args.long_length
        windows = batch(step, max(1, args.tokens // length), length)
        value = step_loss(windows)
        value.backward()  # type: ignore[no-untyped-call]
        share = rate(progress, step, args.warmup_steps)
        for optim, full in zip(optims, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optim.param_groups:
                group["lr"] = full * share
            optim.step()
            optim.zero_grad(set_to_none=True)
        step, n_tokens = step + 1, n_tokens + windows.shape[0] * length
        recent, n_recent = recent + value.detach(), n_recent + 1
        if step % 20 == 0:
            now = time.monotonic()
            speed = (n_tokens - marked_tokens) / (now - marked)
            report(
                {"step": step, "minutes": (now - began) / 60, "loss": float(recent) / n_recent}
                | {"rate": share, "tokens": n_tokens, "tokens_per_second": speed, "length": length}
            )
            recent, n_recent, marked, marked_tokens = torch.zeros(()), 0, now, n_tokens
        if step % args.eval_every == 0:
            save()
            report({"step": step, **evaluate()})
            marked = time.monotonic()
    save()
    minutes = (time.monotonic() - began) / 60
    last = {"step": step, "tokens": n_tokens, "minutes": minutes, "final": 1.0, **evaluate()}
    report(last)
    return last
