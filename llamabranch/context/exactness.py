"""Find out whether a context is exact: whether rows have the same logits, to the bit, in any batch.

llama.cpp picks its kernels for the weights by the number of rows in a batch, and not all kernels add in
the same order. Whether they do depends on the type and shape of the weights, on the processor, and on
the build of llama.cpp. So we decode rows alone and in batches with another sequence, and compare. This
is done only for ``exact=True``, once per model and process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..model import Model
from .params import EXACT_KV_TYPES, ContextParams
from .runner import Batch, Runner, decode_run

_SIZES = (2, 3, 4, 5, 8, 9, 17, 64)  # where kernels change: blocks of 4, 8, 16 rows, tiles of 64
_ALONE = 9  # rows that are decoded one by one
_MOST_LISTED = 17  # sizes are tried one by one up to here to find which are exact


# By model and setting; 0 = batches of all sizes are exact.
_found: weakref.WeakKeyDictionary[Model, dict[str, int]] = weakref.WeakKeyDictionary()


def why_not_exact(model: Model, params: ContextParams, *, is_head: bool) -> str:
    """Return why a context with these resolved parameters cannot be exact; "" = only a trial can tell."""
    if model.on_gpu:
        return "layers may run on a GPU"
    if is_head:
        return "a head needs the states of its target"
    if model.memory_type == "sliding-window":
        return "cells of a sliding window may be used in another order"
    if model.memory_type != "attention":
        return f"not established for {model.memory_type} memory"
    if params.flash_attention is False:
        return "flash attention is off"
    if params.kv_type not in EXACT_KV_TYPES:  # f16 differs only after 500 tokens
        return f"the K/V type is {params.kv_type}, not {' or '.join(EXACT_KV_TYPES)}"
    return ""


def most_exact_rows(runner: Runner, model: Model, params: ContextParams) -> int:
    """Try out a context, which is empty before and after; return the most rows of an exact batch.

    llama.cpp cuts batches at ``n_ubatch``, so larger ones need not be tried. The result is ``n_ubatch``
    if all tried sizes are exact, and 1 if even two rows are not.
    """
    n_ubatch = params.n_ubatch or runner.handle.n_batch
    most = min(n_ubatch, _SIZES[-1])
    setting = f"{params.kv_type}, {params.n_threads} threads, {most} rows"
    setting += ", one sequence" if runner.memory.cells.n_seq_max < 2 else ""
    known = _found.setdefault(model, {})
    if setting not in known:
        known[setting] = _measure(runner, model, [*(n for n in _SIZES if n < most), most])
    return known[setting] or n_ubatch


def _measure(runner: Runner, model: Model, sizes: Sequence[int]) -> int:
    """Return the most rows of an exact batch; 0 if all sizes are exact."""
    own = [(7 * i + 3) % model.n_vocab for i in range(min(_ALONE, sizes[-1]))]
    alone: list[npt.NDArray[np.float32]] = []
    try:
        for token in own:
            alone.append(decode_run(runner, [token], 0, "last")[0].array.copy())
        if all(_is_exact(runner, own, alone, n) for n in sizes):
            return 0
        n = 1
        while n < min(_MOST_LISTED, sizes[-1]) and _is_exact(runner, own, alone, n + 1):
            n += 1
        return n
    finally:
        runner.memory.clear()


def _is_exact(
    runner: Runner, own: Sequence[int], alone: Sequence[npt.NDArray[np.float32]], n: int
) -> bool:
    """Return whether the rows of a batch of ``n`` equal those ``alone``, to the bit."""
    runner.memory.clear()
    n_own = min(n, len(own))
    # If there is another sequence, its rows come in between, and the last row is compared. Otherwise the
    # other rows follow in the same sequence.
    is_alone = runner.memory.cells.n_seq_max < 2
    step = 1 if is_alone else n // n_own
    start = 0 if is_alone else n - 1 - (n_own - 1) * step
    places = range(start, start + n_own * step, step)
    # llama.cpp aborts if a decode has more rows than its buffer.
    compared = places[-runner.handle.n_outputs_max :]
    batch = Batch()
    for i in range(n):
        if i in places:
            batch.add(0, [own[places.index(i)]], "last" if i in compared else "none")
        else:
            token = (own[i % n_own] + 1) % runner.handle.n_vocab
            batch.add(0 if is_alone else 1, [token], "none")
    rows = [row for run in runner.decode(batch) for row in run]
    expected = alone[n_own - len(compared) : n_own]
    return all(np.array_equal(row.array, one) for row, one in zip(rows, expected, strict=True))
