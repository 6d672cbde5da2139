"""Counter-based noise: every draw is a pure function of (seed, position, token).

There is no random state anywhere. The noise is a hash of a counter in the manner of Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3", with the 64-bit finalizer of MurmurHash3 as the mixing
function. So the same seed and the same logits give the same token in every call and in every batch.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from ..arguments import whole

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: successive multiples are well spread
_MIX_1, _MIX_2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53  # MurmurHash3 fmix64
# 0-d arrays, which NumPy handles faster than scalars.
_U_MIX_1, _U_MIX_2, _U_33, _U_11, _U_GOLDEN, _U_1 = (
    np.array(x, dtype=np.uint64) for x in (_MIX_1, _MIX_2, 33, 11, _GOLDEN, 1)
)
_TO_UNIT = 2.0**-53

# Purposes have independent noise: draws, rejection rules, XTC's decision, seeds of forks, and drafts
# under the rejection rules, whose draws must not depend on the target's.
DRAW, RULE, MIXTURE, FORK, DRAFT = 0, 1, 2, 3, 4


def _mix(x: int) -> int:
    x ^= x >> 33
    x = (x * _MIX_1) & _MASK
    x ^= x >> 33
    x = (x * _MIX_2) & _MASK
    return x ^ (x >> 33)


def _key(seed: int, position: int, purpose: int) -> int:
    if type(seed) is not int or type(position) is not int:  # fixed-width integers would overflow
        seed, position = whole("seed", seed), whole("position", position)
    key = _mix((seed + _GOLDEN) & _MASK)
    key = _mix((key ^ (position + 1) * _GOLDEN) & _MASK)
    return _mix(key ^ (purpose + 1) * _MIX_2 & _MASK)


def _unit(key: int, ids: Ids) -> Floats:
    """Return uniform numbers strictly between 0 and 1, one for each id."""
    x = ids.astype(np.uint64)
    x += _U_1
    x *= _U_GOLDEN
    x ^= np.uint64(key)
    shifted = x >> _U_33
    x ^= shifted
    x *= _U_MIX_1
    np.right_shift(x, _U_33, out=shifted)
    x ^= shifted
    x *= _U_MIX_2
    np.right_shift(x, _U_33, out=shifted)
    x ^= shifted
    x >>= _U_11  # the 53 bits that a float64 holds exactly
    unit: Floats = x.astype(np.float64)
    unit += 0.5
    unit *= _TO_UNIT
    return unit


def log_uniforms(seed: int, position: int, ids: Ids, purpose: int = DRAW) -> Floats:
    """Return log U of uniform noise in (0, 1), float64 (K,), a pure function of its arguments."""
    return np.asarray(np.log(_unit(_key(seed, position, purpose), ids)))


def uniform(seed: int, position: int, purpose: int = RULE, index: int = 0) -> float:
    """Return a number in (0, 1), a pure function of its arguments."""
    bits = _mix(_key(seed, position, purpose) ^ ((index + 1) * _GOLDEN & _MASK)) >> 11
    return (bits + 0.5) * _TO_UNIT


def seed_from_text(text: str) -> int:
    """Return a seed that depends only on ``text`` (FNV-1a over UTF-8, 64 bits)."""
    value = 0xCBF29CE484222325
    for byte in text.encode("utf-8", "surrogatepass"):
        value = ((value ^ byte) * 0x100000001B3) & _MASK
    return value


def derive_seed(seed: int, index: int) -> int:
    """Return the ``index``-th seed derived from ``seed``, 63 bits."""
    return _key(seed, index, FORK) >> 1


def random_seed() -> int:
    """Return a seed from the operating system's entropy."""
    return int.from_bytes(os.urandom(8), "little") >> 1
