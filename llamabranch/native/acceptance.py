"""Acceptance rules in the compiled core: a draft is accepted or corrected in one call.

``core.c`` applies the rules of :mod:`llamabranch.generation.rules` to rows of logits. Where rounding
could decide, or a row holds NaN, it leaves the draft to them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import core

__all__ = ["RULES", "Verdict", "accept_rows", "available"]

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

RULES = ("seeded", "token", "block")  # by their numbers in ``core.c``


class _Call(ctypes.Structure):
    _fields_ = (
        ("sampler", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("source_ids", ctypes.c_void_p),
        ("source_weights", ctypes.c_void_p),
        ("source_sizes", ctypes.c_void_p),
        ("measures", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("n", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("measured", ctypes.c_int32),
        ("n_accepted", ctypes.c_int32),
        ("token", ctypes.c_int32),
    )


def _load() -> bool:
    library = core.library
    if library is None or not hasattr(library, "lb_accept"):  # built from an older version
        return False
    library.lb_accept.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return int(library.lb_accept_layout()) == ctypes.sizeof(_Call)


available = _load()


class Verdict(NamedTuple):
    """What a rule decided.

    Attributes:
        n_accepted: tokens of the draft.
        token: follows them.
        measures: (best token, log-sum-exp, entropy in nats) of the rows that they were chosen from, one
            more than ``n_accepted``; empty if not asked for.
    """

    n_accepted: int
    token: int
    measures: list[tuple[int, float, float]]


def accept_rows(
    sampler: core.RowSampler,
    rows: int,
    drafted: Sequence[int],
    sources: Sequence[tuple[Ids, Floats]],
    rule: str,
    *,
    seed: int,
    position: int,
    measured: bool,
) -> Verdict | None:
    """Apply ``rule`` to a draft, with the noise of (seed, position).

    Args:
        sampler: the target's settings; they do not depend on earlier tokens.
        rows: address of the target's logits before each drafted token and after the last, float32
            (len(drafted) + 1, V).
        drafted: the drafted tokens.
        sources: ids int32 (K,) and log-weights float64 (K,) that each was drawn from, contiguous; empty =
            they were not drawn at random. The seeded rule ignores them.
        rule: one of ``RULES``.
        seed, position: of the noise; the position is that of the first drafted token.
        measured: whether log-sum-exps and entropies are wanted.

    Returns:
        None where the core leaves the decision to Python.
    """
    library = core.library
    if library is None:
        raise RuntimeError("the compiled core is not available")
    n = len(drafted)
    tokens = (ctypes.c_int32 * n)(*drafted)
    found = (core.RowMeasure * (n + 1))()
    call = _Call(
        sampler=sampler.at,
        rows=rows,
        tokens=ctypes.addressof(tokens),
        measures=ctypes.addressof(found),
        seed=seed,
        position=position,
        n=n,
        rule=RULES.index(rule),
        measured=measured,
    )
    work = None
    if rule != "seeded":
        work = (ctypes.c_double * (3 * (n + 1)))()
        if sources:
            ids, weights = zip(*sources, strict=True)
            kept = (
                (ctypes.c_void_p * n)(*(array.ctypes.data for array in ids)),
                (ctypes.c_void_p * n)(*(array.ctypes.data for array in weights)),
                (ctypes.c_int32 * n)(*map(len, ids)),
            )
            call.source_ids = ctypes.addressof(kept[0])
            call.source_weights = ctypes.addressof(kept[1])
            call.source_sizes = ctypes.addressof(kept[2])
    if library.lb_accept(ctypes.addressof(call), None if work is None else ctypes.addressof(work)):
        return None
    measures = []
    if measured:
        measures = [(row.best, row.logsumexp, row.entropy) for row in found[: call.n_accepted + 1]]
    return Verdict(call.n_accepted, call.token, measures)
