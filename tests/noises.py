"""The noise of a draw in its usual forms, from the logarithms that the package draws with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llamabranch.sampling.noise import DRAW, log_uniforms

__all__ = ["exponential_noise", "gumbel_noise"]

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


def exponential_noise(seed: int, position: int, ids: Ids | int, purpose: int = DRAW) -> Floats:
    """Return Exp(1) noise, float64 (K,), a pure function of its arguments."""
    return -log_uniforms(seed, position, ids, purpose)


def gumbel_noise(seed: int, position: int, ids: Ids | int, purpose: int = DRAW) -> Floats:
    """Return standard Gumbel noise, float64 (K,): -log of the exponential noise."""
    return -np.asarray(np.log(exponential_noise(seed, position, ids, purpose)))
