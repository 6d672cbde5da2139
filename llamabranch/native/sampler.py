"""llama_sampler chains that transform candidates: they mask, truncate and scale, but never draw."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C

from . import core
from .handle import Handle
from .model import ModelHandle

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class SamplerHandle(Handle):
    """One llama_sampler, usually a chain."""

    def __init__(self, ptr: Any, model: ModelHandle) -> None:
        super().__init__(ptr, C.llama_sampler_free, name="sampler", parents=(model,))
        self._model = model

    @classmethod
    def chain(cls, model: ModelHandle) -> SamplerHandle:
        """Return an empty chain."""
        params = C.llama_sampler_chain_default_params()
        params.no_perf = True
        return cls(C.llama_sampler_chain_init(params), model)

    def add(self, name: str, *arguments: float) -> None:
        """Append llama_sampler_init_<name>(*arguments) to this chain."""
        C.llama_sampler_chain_add(self.ptr, getattr(C, f"llama_sampler_init_{name}")(*arguments))

    def add_dry(
        self,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Sequence[str],
    ) -> None:
        encoded = (ctypes.c_char_p * max(1, len(breakers)))(*(b.encode() for b in breakers))
        ptr = C.llama_sampler_init_dry(
            self._model.vocab, multiplier, base, allowed_length, last_n, encoded, len(breakers)
        )
        C.llama_sampler_chain_add(self.ptr, ptr)

    def __len__(self) -> int:
        return int(C.llama_sampler_chain_n(self.ptr))

    def apply(self, candidates: CandidateBuffer) -> None:
        C.llama_sampler_apply(self.ptr, candidates.reference)

    def accept(self, token: int) -> None:
        C.llama_sampler_accept(self.ptr, token)

    def clone(self) -> SamplerHandle:
        """Return a copy with its own state."""
        return SamplerHandle(C.llama_sampler_clone(self.ptr), self._model)


class CandidateBuffer:
    """A llama_token_data_array over NumPy memory, filled from a row of logits."""

    def __init__(self, n_vocab: int) -> None:
        data = np.zeros(n_vocab, dtype=_CANDIDATE)
        self._ids, self._logits = data["id"], data["logit"]
        self.probs = data["p"]  # valid once a sampler has computed them
        self._all_ids = np.arange(n_vocab, dtype=np.int32)
        self._address = data.ctypes.data
        self._pointer = ctypes.cast(self._address, C.llama_token_data_p)
        self._array = C.llama_token_data_array()
        self._start = ctypes.c_void_p.from_buffer(self._array)  # its field ``data``, as a number
        self.reference = ctypes.byref(self._array)

    def fill(
        self, logits: npt.NDArray[np.float32], ids: npt.NDArray[np.integer] | None = None
    ) -> None:
        """Load all tokens, or only ``ids`` with their ``logits`` (K,)."""
        n = len(logits)
        self._ids[:n] = self._all_ids if ids is None else ids
        self._logits[:n] = logits
        self._array.data = self._pointer
        self._array.size = n
        self._array.selected = -1
        self._array.sorted = False

    def sorted_reference(self) -> Any:
        """Return the reference, marked as sorted, so that samplers do not move the logits."""
        self._array.sorted = True
        return self.reference

    def read(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return the remaining candidates: ids int32 (K,) and logits float32 (K,), copies."""
        # A sampler may move the data pointer forward instead of moving the data.
        first = ((self._start.value or 0) - self._address) // _CANDIDATE.itemsize
        last = first + self._array.size
        return self._ids[first:last].copy(), self._logits[first:last].copy()


@cache
def softmax_agrees() -> bool:
    """Return True if llama.cpp's 32-bit softmax equals the compiled core's to the bit.

    Both call the C library's ``expf``. If they are linked to different C libraries, top-p is left to
    llama.cpp.
    """
    if not core.available:
        return False
    logits = np.concatenate(([0.0], -np.geomspace(1e-4, 90.0, 4095))).astype(np.float32)
    buffer = CandidateBuffer(len(logits))
    buffer.fill(logits)
    top_p = C.llama_sampler_init_top_p(0.5, 1)
    try:
        C.llama_sampler_apply(top_p, buffer.sorted_reference())
    finally:
        C.llama_sampler_free(top_p)
    return np.array_equal(buffer.probs, core.softmax(logits))
