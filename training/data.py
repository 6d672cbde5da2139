"""Windows of tokens: random ones for training, fixed ones for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TRAINED_SHARES = {"fairy": 0.40, "children": 0.15, "novels": 0.45}


@dataclass(frozen=True)
class Mixture:
    """Token streams with their sampling weights. The windows depend only on the seed and the step."""

    streams: dict[str, np.ndarray]
    shares: dict[str, float]
    seed: int

    @classmethod
    def load(cls, work: Path, shares: dict[str, float], seed: int) -> Mixture:
        """Read `<name>.train.npy` for every name in `shares`."""
        return cls({name: np.load(work / f"{name}.train.npy") for name in shares}, shares, seed)

    def draw(self, step: int, n_rows: int, length: int) -> Tensor:
        """Return windows [n_rows, length + 1], int64: inputs and, shifted by one, targets."""
        random = np.random.default_rng([self.seed, step])
        names = list(self.shares)
        weights = np.array([self.shares[n] for n in names])
        rows = []
        for name in random.choice(names, size=n_rows, p=weights / weights.sum()):
            stream = self.streams[name]
            start = int(random.integers(0, max(1, len(stream) - length)))
            rows.append(np.resize(stream[start : start + length + 1], length + 1))
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def heldout_windows(work: Path, name: str, length: int, max_tokens: int = 24_000) -> Tensor:
    """Return the first `max_tokens` held-out tokens as consecutive windows [N, length + 1]."""
    stream = np.load(work / f"{name}.heldout.npy")[: max_tokens + 1]
    n_rows = max(1, (len(stream) - 1) // length)
    rows = [np.resize(stream[i * length : (i + 1) * length + 1], length + 1) for i in range(n_rows)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))
