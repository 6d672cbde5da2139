"""How far rounding moves logits on the machine at hand.

If a context is not exact, logits depend on how tokens are batched. How much depends on
llama.cpp's build and the processor. So tests with a tolerance measure it instead of using a fixed number.
"""

from __future__ import annotations

import numpy as np

from llamabranch import Context
from llamabranch.sampling.noise import DRAW, Floats, Ids, log_uniforms

N_TOKENS = 120
FACTOR = 4  # a test compares more rows than are measured here
LEAST = (
    0.02  # recurrent states amplify rounding along a text; a wrong state moves logits by several
)


def rounding(ctx: Context, least: float = LEAST) -> float:
    """Return the largest difference between right logits of contexts like ``ctx``.

    Measured in a fresh context, as the largest difference between the rows of one text decoded in
    batches of several sizes; at least ``least``.
    """
    tokens = [2 + 7 * i % (ctx.model.n_vocab - 2) for i in range(N_TOKENS)]
    with Context(ctx.model, ctx.params, prefix_cache=False) as fresh:
        runs = []
        for size in (1, 5, 17, min(N_TOKENS, fresh.n_batch)):
            rows = []
            for start in range(0, N_TOKENS, size):
                fresh.decode(tokens[start : start + size], start, logits="all")
                rows += [fresh.logits(i) for i in range(len(tokens[start : start + size]))]
            fresh.kv_cache_remove(0)
            runs.append(np.stack(rows))
    moved = max(float(np.abs(run - runs[0]).max()) for run in runs)
    return max(least, FACTOR * moved)


def gumbel_noise(seed: int, position: int, ids: Ids | int, purpose: int = DRAW) -> Floats:
    """Return the standard Gumbel noise of draws, float64 (K,); a number means the ids below it."""
    ids = np.arange(ids, dtype=np.int32) if isinstance(ids, int) else ids
    return np.asarray(-np.log(-log_uniforms(seed, position, ids, purpose)))
