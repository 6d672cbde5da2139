"""The compiled core (``core.c``): measures and truncates a row of logits and draws from it in one call.

It is optional. If it is missing or turned off (``LLAMABRANCH_CORE=0``), ``available`` is False, and NumPy
and llama.cpp's samplers do the same work. If the token could depend on rounding, or a row contains NaN,
the core leaves the row to them. So using it never changes a token.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C

# CMakeLists.txt builds it into its own folder; next to this file, Python would import it as a module.
LIBRARY = Path(__file__).parent / "lib"
LIBRARY /= "_core" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]


class RowMeasure(ctypes.Structure):
    _fields_ = (
        ("logsumexp", ctypes.c_double),
        ("entropy", ctypes.c_double),
        ("top", ctypes.c_float),
        ("best", ctypes.c_int32),
    )


class _Sampler(ctypes.Structure):
    _fields_ = (
        ("n_vocab", ctypes.c_int32),
        ("greedy", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("temperature", ctypes.c_float),
        ("n_bias", ctypes.c_int32),
        ("bias_ids", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("biased", ctypes.c_void_p),
        ("maxima", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
    )


class _Choice(RowMeasure):
    _fields_ = (  # type: ignore[assignment]  # RowMeasure's fields come first
        ("logprob", ctypes.c_double),
        ("token", ctypes.c_int32),
        ("n", ctypes.c_int32),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("decode", ctypes.c_void_p),
        ("get_logits", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
        ("batch", C.llama_batch),
        ("logits", ctypes.c_void_p),
    )


_BATCH = ["n_tokens", "token", "embd", "pos", "n_seq_id", "seq_id", "logits"]  # of llama_batch


def _load() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or None, and a description of the code in use."""
    if os.environ.get("LLAMABRANCH_CORE") == "0":
        return None, "off (LLAMABRANCH_CORE=0): NumPy"
    if not LIBRARY.is_file():
        return None, "not built: NumPy"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        layout = int(library.lb_layout())
        library.lb_variant.restype = ctypes.c_char_p
        variant = (library.lb_variant() or b"").decode()
    except (OSError, AttributeError) as error:
        return None, f"unusable ({error}): NumPy"
    expected = 0
    for structure in (RowMeasure, _Sampler, _Choice, _Decoder):
        expected = 256 * expected + ctypes.sizeof(structure)
    if layout != expected or [field[0] for field in C.llama_batch._fields_] != _BATCH:
        return None, "built from another version: NumPy"
    pointer, i32, u64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint64
    library.lb_measure.argtypes = [pointer, i32, i32, pointer]
    library.lb_sample.argtypes = [pointer, pointer, u64, u64, u64, i32, pointer]
    library.lb_candidates.argtypes = [pointer, pointer, i32, pointer]
    library.lb_step.argtypes = [pointer, i32, i32, i32, pointer, u64, u64, i32, pointer]
    library.lb_softmax.argtypes = [pointer, i32, pointer]
    library.lb_pieces.argtypes = [pointer, pointer, i32, pointer, ctypes.c_int64, pointer]
    library.lb_pieces.restype = ctypes.c_int64
    return library, f"compiled ({variant})"


_library: Any  # None: not available
_library, description = _load()
available = _library is not None


def measure(address: int, n_vocab: int) -> tuple[int, float, float]:
    """Measure a row of logits, float32 (n_vocab,) at ``address``.

    Returns:
        (best token, log-sum-exp, entropy in nats). The best token is -1 and the numbers are NaN if the
        row contains NaN or has no finite maximum.
    """
    row = RowMeasure()
    _library.lb_measure(address, 1, n_vocab, ctypes.addressof(row))
    return row.best, row.logsumexp, row.entropy


def softmax(logits: Logits) -> Logits:
    """Return the probabilities of ``logits`` (n,) in 32-bit floats; the first must be the largest."""
    address, logits = address_of(logits)
    probs = np.empty(len(logits), dtype=np.float32)
    _library.lb_softmax(address, len(logits), probs.ctypes.data)
    return probs


def pieces(to_piece: int, vocab: int, n_vocab: int) -> list[bytes] | None:
    """Return the piece of each token (b"" for control tokens); None without the compiled core.

    Args:
        to_piece: the address of llama_token_to_piece.
        vocab: the address of the llama_vocab.
        n_vocab: its size.
    """
    if _library is None:
        return None
    sizes = np.empty(n_vocab, dtype=np.int32)
    room = 16 * n_vocab
    while True:
        text = np.empty(room, dtype=np.uint8)
        needed = _library.lb_pieces(
            to_piece, vocab, n_vocab, text.ctypes.data, room, sizes.ctypes.data
        )
        if needed <= room:
            break
        room = needed
    joined, ends = text.tobytes(), np.cumsum(sizes).tolist()
    return [joined[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def address_of(logits: Logits) -> tuple[int, Logits]:
    """Return a row's address and the array there, which is a copy if ``logits`` is not contiguous."""
    if logits.dtype != np.float32 or not logits.flags.c_contiguous:
        logits = np.array(logits, dtype=np.float32)
    return logits.ctypes.data, logits  # a copied row must be kept alive while its address is used


class RowSampler:
    """Truncates, draws from and measures rows of logits with fixed settings.

    It has its own working memory, so use it in one thread at a time.

    Args:
        n_vocab: length of a row.
        temperature: 0 = the largest logit.
        top_k: 0 = all.
        top_p: 1 = off.
        min_p: 0 = off.
        bias: maps a token to a number that is added to its logit.
        is_masked: whether ``use_mask`` will be called.

    Attributes:
        choice: the result of the last call; see ``core.c``.
        at, out: the addresses of the settings and of ``choice``.
    """

    def __init__(
        self,
        n_vocab: int,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        bias: Mapping[int, float],
        is_masked: bool = False,
    ) -> None:
        self._ids = np.empty(n_vocab, dtype=np.int32)
        self._weights = np.empty(n_vocab, dtype=np.float64)
        self._scratch = (
            np.empty(n_vocab, dtype=np.float32),
            np.empty(n_vocab, dtype=np.float32),
            np.empty(2 * n_vocab, dtype=np.uint64),
            np.empty(n_vocab if bias or is_masked else 0, dtype=np.float32),
            np.fromiter(bias, dtype=np.int32),
            np.fromiter((float(value) for value in bias.values()), dtype=np.float32),
        )
        maxima, logits, keys, biased, bias_ids, values = (a.ctypes.data for a in self._scratch)
        self._settings = _Sampler(
            n_vocab=n_vocab,
            greedy=int(temperature == 0.0),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            temperature=temperature,
            n_bias=len(bias),
            bias_ids=bias_ids,
            bias=values,
            biased=biased,
            maxima=maxima,
            keys=keys,
            ids=self._ids.ctypes.data,
            logits=logits,
            weights=self._weights.ctypes.data,
        )
        self.choice = _Choice()
        self._sample = _library.lb_sample
        self._candidates = _library.lb_candidates
        self.at = ctypes.addressof(self._settings)
        self.out = ctypes.addressof(self.choice)

    def use_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        """Allow only the tokens whose bit in ``mask`` is 1, ((n_vocab + 31) // 32,), from now on."""
        self._mask = mask  # kept alive
        self._settings.mask = mask.ctypes.data

    def sample(self, address: int, seed: int, position: int, purpose: int, measured: bool) -> int:
        """Draw from the row at ``address`` and, if ``measured``, measure it; return the token, -1 if
        undecided.

        If measured, ``choice`` has the row's ``best`` (-1 if that failed), ``logsumexp`` and
        ``entropy``, and the ``logprob`` of the token, nats.
        """
        if self._sample(self.at, address, seed, position, purpose, measured, self.out):
            return -1
        token: int = self.choice.token
        return token

    def candidates(self, address: int) -> tuple[Ids, Floats] | None:
        """Return the tokens of the row at ``address`` that survive truncation; None if undecided.

        They are copies: ids, int32 (K,), and log-weights, float64 (K,), the largest 0. Their order is
        llama.cpp's: descending if top-k or top-p sort them, otherwise by id.
        """
        if self._candidates(self.at, address, False, self.out):
            return None
        n = self.choice.n
        return self._ids[:n].copy(), self._weights[:n].copy()


class Stepper:
    """Decodes one token, measures its row and draws the next token, in one call without the GIL.

    Args:
        decode, get_logits: the addresses of llama_decode and llama_get_logits.
        ctx: the address of the llama_context.
        stop: the address of a byte; unless it is 0, no decode is started.
        batch: the llama_batch to use, a ctypes structure whose memory must outlive this object.
    """

    def __init__(
        self, decode: int, get_logits: int, ctx: int, stop: int, batch: ctypes.Structure
    ) -> None:
        self._decoder = _Decoder(decode, get_logits, ctx, stop, batch)
        self._at = ctypes.addressof(self._decoder)
        self._step = _library.lb_step

    def step(
        self,
        token: int,
        position: int,
        seq_id: int,
        sampler: RowSampler,
        seed: int,
        purpose: int,
        measured: bool,
    ) -> int:
        """Decode ``token`` at ``position``; draw the next token into ``sampler.choice``.

        Returns:
            llama_decode's code; unless it is 0, ``choice`` is as before.
        """
        code: int = self._step(
            self._at, token, position, seq_id, sampler.at, seed, purpose, measured, sampler.out
        )
        return code
