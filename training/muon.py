"""The Muon optimizer (Jordan et al. 2024, "Muon: An optimizer for hidden layers").

The update of a matrix is its momentum, made nearly orthogonal by five quintic Newton-Schulz steps.
Different from the original: matrices of equal shape are processed as one batch, which uses two CPU
cores better for matrices of this size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
N_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return [N, rows, columns] with all singular values near 1, bfloat16."""
    a, b, c = QUINTIC
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # so that the Gram matrix is the smaller one
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(N_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    update: Tensor = x.mT if tall else x
    return update


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum with decoupled weight decay; only for the matrices of the layers."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for p in parameters:
            by_shape.setdefault(tuple(p.shape), []).append(p)
        groups = [{"params": ps} for ps in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change every parameter in place."""
        for group in self.param_groups:
            matrices = group["params"]
            grad = torch.stack([p.grad for p in matrices])
            state = self.state[matrices[0]]  # one buffer for all matrices of this shape
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(grad)
            average = state["momentum"].lerp_(grad, 1 - group["momentum"])
            update = orthogonalise(grad.lerp(average, group["momentum"])).float()
            rows, columns = update.shape[-2:]
            rate = group["lr"] * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, list(update.unbind()), alpha=-rate)
