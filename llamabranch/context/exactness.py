"""Measure exactness: the batch sizes at which a row has, to the bit, the logits that it has alone.

llama.cpp uses other kernels for the weights if a batch has more rows, and not all kernels add in the same
order. Whether they do depends on the type and shape of the weights, on the processor, and on the build
of llama.cpp. So rows are decoded alone and in batches, together with another sequence, and compared. The
result is kept in the profile, for each file, build, processor, number of threads and K/V type.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..model import Model
from ..native import engine_versions, system_info
from ..profile import is_off, read_entry, write_entries
from .params import INVARIANT_KV_TYPES, ContextParams
from .runner import Batch, Runner, decode_run

__all__ = ["Exactness", "exactness_of"]

_SIZES = (2, 3, 4, 5, 8, 9, 17, 64)  # where kernels change: blocks of 4, 8, 16 rows, tiles of 64
_ALONE = 9  # rows that are decoded one by one
# Models of up to _ALL parameters try all sizes, larger ones of up to _SOME parameters try a few: about 2
# s. The model's size decides, not the clock, because the result must not depend on what else the machine
# does.
_ALL, _SOME = 1e9, 4e9
_FEW = (2, 5, 17)
_FEW_ALONE = 3
_MOST_LISTED = 17  # sizes are tried one by one up to here to find which are exact
_SECTION = "exact rows"


class Exactness(NamedTuple):
    """The largest exact batch, how far larger batches are off, and why; see `Capabilities`."""

    rows: int
    total_variation: float | None = None
    reason: str = ""


_found: weakref.WeakKeyDictionary[Model, dict[str, Exactness]] = weakref.WeakKeyDictionary()


def exactness_of(
    runner: Runner, model: Model, params: ContextParams, *, is_head: bool
) -> Exactness:
    """Return the exactness of an empty context: set by the user, excluded by a rule, or measured."""
    if params.batch_invariant is False:
        return Exactness(0, reason="not asked for")
    n_ubatch = params.n_ubatch or runner.handle.n_batch
    reason = ""
    if model.on_gpu:
        reason = "layers may run on a GPU"
    elif model.memory_type not in ("attention", "sliding-window"):
        reason = f"not established for {model.memory_type} memory"
    elif params.flash_attention is False:
        reason = "flash attention is off"
    elif is_head:
        reason = "not measured for a head, which needs the states of its target"
    slides, limit = model.memory_type == "sliding-window", ""
    if params.kv_type not in INVARIANT_KV_TYPES:  # f16 differs only after 500 tokens
        limit = f"the K/V type is {params.kv_type}, not {' or '.join(INVARIANT_KV_TYPES)}"
    elif slides:
        limit = "cells of a sliding window may be used in another order"
    if reason or (limit and not slides):
        return Exactness(0, reason=reason or limit)
    ask = params.batch_invariant is True
    setting = f"K/V {params.kv_type}, {params.n_threads} threads"
    measured = _measured(runner, model, n_ubatch, setting=setting, ask=ask)
    rows, variation, _ = measured or Exactness(0)
    if measured is None:
        reason = "not measured: it would take more than 2 s (batch_invariant=True asks for it)"
    elif rows >= n_ubatch:
        reason = "measured: the logits of batches are equal to the bit"
    else:
        size = f"more than {rows}" if rows > 1 else "two"
        reason = (
            f"measured: logits of batches of {size} tokens differ, "
            f"probabilities by a total variation of up to {variation:.2g}"
        )
    if limit:
        reason = f"{limit}; {reason}"
        rows = rows if params.kv_type in INVARIANT_KV_TYPES else 0
    return Exactness(rows, variation, reason)


def _measured(
    runner: Runner, model: Model, most: int, *, setting: str, ask: bool
) -> Exactness | None:
    """Return the most rows with which batches are exact, and how far larger batches are off.

    The context is empty before and after. The result is ``n_batch`` if all tried sizes are exact, and 1
    if not even two rows are.

    Args:
        runner, model: the runner and the model of the context.
        most: rows that llama.cpp computes at once; it cuts larger batches, so only sizes up to this are
            tried.
        setting: the other things that the result depends on: K/V type and threads.
        ask: True = measure all sizes, however long it takes. Otherwise models of more than a billion
            parameters are measured with fewer sizes. For more than four billion, which would take more
            than 2 s, None is returned.
    """
    n_params = model.handle.number("n_params")
    is_part = n_params > _ALL and not ask
    if n_params > _SOME and not ask:
        return None
    most = min(most, runner.handle.n_batch)
    setting += f", up to {min(most, max(_SIZES))} rows" + (", few sizes" if is_part else "")
    setting += ", one sequence" if runner.memory.cells.n_seq_max < 2 else ""
    known = _found.setdefault(model, {})
    if setting not in known:
        key = _key(model, setting)
        exactness = _read(key)
        if exactness is None:
            of_all = _FEW if is_part else _SIZES
            most = min(most, of_all[-1])
            sizes = [*(n for n in of_all if n < most), most]
            exactness = _measure(runner, model, sizes, _FEW_ALONE if is_part else _ALONE)
            if key is not None:
                entry: dict[str, object] = exactness._asdict()
                del entry["reason"]
                write_entries([(_SECTION, key, entry)])
        known[setting] = exactness
    result = known[setting]
    return result._replace(rows=result.rows or runner.handle.n_batch)


def _key(model: Model, setting: str) -> str | None:
    if is_off():
        return None
    kind = "repacked, " if model.extra_buffers else ""
    try:  # the kernels of the build decide, not the machine's name
        build = f"{engine_versions()['llama_cpp_python']}, {system_info()}"
        return f"{build}, {model.quick_key[:32]}, {kind}{setting}"
    except OSError:  # the file is gone
        return None


def _read(key: str | None) -> Exactness | None:
    entry = read_entry(_SECTION, key) or {}
    rows, variation = entry.get("rows"), entry.get("total_variation")
    if type(rows) is int and rows >= 0 and type(variation) is float and 0 <= variation <= 1:
        return Exactness(rows, variation)
    return None


def _measure(runner: Runner, model: Model, sizes: Sequence[int], n_alone: int) -> Exactness:
    own = [(7 * i + 3) % model.n_vocab for i in range(min(n_alone, sizes[-1]))]
    alone: list[npt.NDArray[np.float32]] = []
    try:
        n_steps = len(own) + len(sizes)
        for step, token in enumerate(own):
            model.measuring(f"which batches are exact, {step} of {n_steps}")
            alone.append(decode_run(runner, [token], 0, "last")[0].array.copy())
        variation = 0.0
        for step, n in enumerate(sizes, start=len(own)):
            model.measuring(f"which batches are exact, {step} of {n_steps}")
            variation = max(variation, _variation(runner, own, alone, n))
        if not variation:
            return Exactness(0, 0.0)
        n = 1
        while n < min(_MOST_LISTED, sizes[-1]) and not _variation(runner, own, alone, n + 1):
            n += 1
            model.measuring(f"which batches are exact, up to {n} rows")
        return Exactness(n, variation)
    finally:
        runner.memory.clear()


def _variation(
    runner: Runner,
    own: Sequence[int],
    alone: Sequence[npt.NDArray[np.float32]],
    n: int,
) -> float:
    """Return the largest total variation between rows in a batch of ``n`` and those ``alone``.

    It is above 0 if they differ in a single bit.
    """
    runner.memory.clear()
    n_own = min(n, len(own))
    others = [(token + 1) % runner.handle.n_vocab for token in own] * -(-n // len(own))
    # If there is another sequence, its rows come in between; the last row is compared.
    is_own = [
        (n - 1 - i) % (n // n_own) == 0 and n - 1 - i < n_own * (n // n_own) for i in range(n)
    ]
    if runner.memory.cells.n_seq_max < 2:  # the other rows follow in the same sequence
        is_own.sort(reverse=True)
    own_tokens, other_tokens = iter(own), iter(others)
    # llama.cpp aborts if a decode has more rows than its buffer.
    compared = [i for i in range(n) if is_own[i]][-runner.handle.n_outputs_max :]
    batch = Batch()
    for i, is_mine in enumerate(is_own):
        seq_id = 0 if is_mine or runner.memory.cells.n_seq_max < 2 else 1
        token = next(own_tokens) if is_mine else next(other_tokens)
        batch.add(seq_id, [token], "last" if i in compared else "none")
    rows = [row for run in batch.decode(runner) for row in run]
    expected = alone[n_own - len(compared) : n_own]
    largest = 0.0
    for row, expected_row in zip(rows, expected, strict=True):
        if not np.array_equal(row.array, expected_row):
            p, q = (np.exp(x - x.max(), dtype=np.float64) for x in (row.array, expected_row))
            apart = float(np.abs(p / p.sum() - q / q.sum()).sum()) / 2
            largest = max(largest, apart if math.isfinite(apart) else 1.0, 1e-12)
    return min(largest, 1.0)
