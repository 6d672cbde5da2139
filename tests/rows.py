"""Rows of logits that are hard for a sampler, and the settings that the compiled core knows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "temperature 1": {"temperature": 1.0},
    "temperature alone": {"temperature": 0.7, **OFF},
    "nothing": {"temperature": 1.0, **OFF},
    "tiny temperature": {"temperature": 1e-30, **OFF},
    "small temperature": {"temperature": 1e-6},
    "huge temperature": {"temperature": 1e4, **OFF},
    "top-k alone": {"top_k": 7, "top_p": 1.0, "min_p": 0.0},
    "top-k 1": {"top_k": 1},
    "large top-k": {"top_k": 500, "top_p": 0.99, "min_p": 0.0},
    "top-k of all": {"top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0},
    "top-p alone": {"top_k": 0, "top_p": 0.9, "min_p": 0.0},
    "top-p of nearly all": {"top_k": 0, "top_p": 0.9999, "min_p": 0.0},
    "tiny top-p": {"top_k": 0, "top_p": 1e-6, "min_p": 0.0},
    "top-p and min-p": {"top_k": 0, "top_p": 0.9, "min_p": 0.02},
    "min-p alone": {"top_k": 0, "top_p": 1.0, "min_p": 0.05},
    "min-p 1": {"top_k": 0, "top_p": 1.0, "min_p": 1.0},
    "tiny min-p": {"top_k": 0, "top_p": 1.0, "min_p": 1e-6},
    "narrow": {"top_k": 5, "top_p": 0.5, "min_p": 0.2},
    "bias": {"logit_bias": {0: 3.0, 1: -math.inf}},
    "greedy": {"temperature": 0.0},
    "greedy with bias": {"temperature": 0.0, "logit_bias": {0: 30.0, 1: -math.inf}},
}

_MAKE: dict[str, Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]] = {
    "plain": lambda x: x,
    "flat": lambda x: x * 0.01,
    "steep": lambda x: x * 30.0,
    "whole numbers": np.round,
    "quarters": lambda x: np.round(4.0 * x) / 4.0,
    "half masked": lambda x: x,
    "sorted": lambda x: np.sort(x)[::-1],
    "equal": lambda x: np.full_like(x, x[0]),
    "far from 0": lambda x: x - 1e4,
    "tiny": lambda x: x * 1e-30,
    "huge": lambda x: x * 1e30,
}
KINDS = tuple(_MAKE)


def row(rng: np.random.Generator, n_vocab: int, kind: str) -> Row:
    """Return a row of logits, float32 (n_vocab,), with at least one finite one."""
    x = _MAKE[kind](rng.standard_normal(n_vocab) * 3.0)
    if kind == "half masked":
        x[rng.random(n_vocab) < 0.5] = -math.inf
        x[int(rng.integers(n_vocab))] = 1.0
    return x.astype(np.float32)
