"""Drafting in the compiled core: decode, draw, decode, ... in one call, for one stream or several.

``core.c`` calls llama.cpp's own functions by their address; the GIL is released for all of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import core
from .heads import DraftHead

__all__ = ["EOG", "STOPPED", "TO_PYTHON", "DraftLoop", "DraftStream", "StopRule", "available"]

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.float32]

GOES_ON, FULL_LENGTH, STOPPED, EOG, TO_PYTHON = range(5)

_MOST_CANDIDATES = 1 << 17  # of all sources of a draft; a longer one goes back to Python


class StopRule(NamedTuple):
    """When a draft ends, as numbers.

    Attributes:
        most_entropy: no token is drawn above it, nats; inf = no limit.
        most_tokens: after so many Python is asked.
        edges: of the buckets of entropy, ascending.
        acceptance: the probability that a token of each bucket is accepted, one more than edges.
        costs: seconds of a round by the length of its draft; empty = only the limits count.
        mean: the acceptance of tokens whose entropy is not known yet.
        rate: tokens a second that a longer draft must exceed.
        is_probe: the first token is drawn even if that does not pay.
        reach: the product of the acceptance of the tokens drafted so far.
    """

    most_entropy: float
    most_tokens: int = 1 << 30
    edges: Sequence[float] = ()
    acceptance: Sequence[float] = ()
    costs: Sequence[float] = ()
    mean: float = 0.0
    rate: float = 0.0
    is_probe: bool = False
    reach: float = 1.0


class _Stream(ctypes.Structure):
    _fields_ = (
        ("sampler", ctypes.c_void_p),
        ("row", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("purpose", ctypes.c_int32),
        ("seq_id", ctypes.c_int32),
        ("limit", ctypes.c_int32),
        ("measured", ctypes.c_int32),
        ("most_entropy", ctypes.c_double),
        ("reach", ctypes.c_double),
        ("mean", ctypes.c_double),
        ("rate", ctypes.c_double),
        ("n_drafted", ctypes.c_int32),
        ("n_costs", ctypes.c_int32),
        ("is_probe", ctypes.c_int32),
        ("n_edges", ctypes.c_int32),
        ("costs", ctypes.c_void_p),
        ("edges", ctypes.c_void_p),
        ("acceptance", ctypes.c_void_p),
        ("room", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("entropies", ctypes.c_void_p),
        ("source_sizes", ctypes.c_void_p),
        ("source_ids", ctypes.c_void_p),
        ("source_weights", ctypes.c_void_p),
        ("n_tokens", ctypes.c_int32),
        ("n_entropies", ctypes.c_int32),
        ("n_decoded", ctypes.c_int32),
        ("n_sources", ctypes.c_int32),
        ("behind", ctypes.c_int32),
        ("first_output", ctypes.c_int32),
        ("output", ctypes.c_int32),
        ("state", ctypes.c_int32),
    )


class _Loop(ctypes.Structure):
    _fields_ = (
        ("decoder", ctypes.c_void_p),
        ("is_eog", ctypes.c_void_p),
        ("n_vocab", ctypes.c_int32),
        ("n_first", ctypes.c_int32),
        ("most_decodes", ctypes.c_int32),
        ("n_decodes", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("get_states", ctypes.c_void_p),
        ("n_state", ctypes.c_int32),
        ("encode", ctypes.c_void_p),
        ("features", ctypes.c_void_p),
    )


def _load() -> bool:
    library = core.library
    if library is None:
        return False
    library.lb_draft.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
    library.lb_draft.restype = None
    layout = 256 * ctypes.sizeof(_Stream) + ctypes.sizeof(_Loop)
    return int(library.lb_loop_layout()) == layout


available = _load()


def _doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(values))(*values)


class DraftStream:
    """One stream's part of a loop: what to draw, and what was drawn.

    Args:
        limit: the most tokens of a draft.
        n_vocab: the size of the vocabulary.
        keeps_sources: whether the distributions of the draws are wanted.
    """

    def __init__(self, limit: int, n_vocab: int, *, keeps_sources: bool) -> None:
        self.limit = limit
        self._tokens = (ctypes.c_int32 * limit)()
        self._entropies = (ctypes.c_double * (limit + 1))()
        self._sizes = (ctypes.c_int32 * limit)()
        room = min(limit * n_vocab, max(n_vocab, _MOST_CANDIDATES)) if keeps_sources else 0
        self._source_ids = np.empty(room, dtype=np.int32)
        self._source_weights = np.empty(room, dtype=np.float64)
        self._arrays: tuple[object, ...] = ()  # of the rule: kept alive here
        self.struct = _Stream(  # for ``DraftLoop``
            tokens=ctypes.addressof(self._tokens),
            entropies=ctypes.addressof(self._entropies),
            source_sizes=ctypes.addressof(self._sizes),
            source_ids=self._source_ids.ctypes.data if room else None,
            source_weights=self._source_weights.ctypes.data if room else None,
            room=room,
        )

    def begin(
        self,
        sampler: core.RowSampler,
        *,
        seed: int,
        purpose: int,
        seq_id: int,
        n_drafted: int,
        limit: int,
        rule: StopRule | None,
    ) -> None:
        """Set what to draw; ``start`` sets where.

        Args:
            sampler: draws and measures; its tokens are llama.cpp's and NumPy's.
            seed, purpose: of the noise.
            seq_id: the sequence that is continued.
            n_drafted: tokens of the draft so far.
            limit: the most tokens of the draft.
            rule: when to stop before; None = never, and entropies are not measured.
        """
        s = self.struct
        s.sampler = sampler.at
        s.seed, s.purpose = seed, purpose
        s.seq_id, s.n_drafted, s.limit = seq_id, n_drafted, min(limit, self.limit) - n_drafted
        s.measured = rule is not None
        s.costs = None
        if rule is not None:
            s.most_entropy = rule.most_entropy
            s.limit = min(s.limit, rule.most_tokens - n_drafted)
            if rule.costs:
                arrays = _doubles(rule.costs), _doubles(rule.edges), _doubles(rule.acceptance)
                self._arrays = arrays
                s.costs, s.edges, s.acceptance = map(ctypes.addressof, arrays)
                s.n_costs, s.n_edges = len(rule.costs), len(rule.edges)
                s.mean, s.rate, s.reach = rule.mean, rule.rate, rule.reach
                s.is_probe = rule.is_probe

    def start(self, position: int, row: int | None, hidden: int | None = None) -> None:
        """Set the position of the first draw, and the address of its logits: None = not decoded yet.

        ``hidden``: of a head, the address of the state that goes in with the first drawn token.
        """
        self.struct.position, self.struct.row, self.struct.hidden = position, row, hidden

    def set_behind(self, n: int) -> None:
        """Set by how much a token's position in a head is lower than in the text."""
        self.struct.behind = n

    def begin_at(self, output: int) -> None:
        """Set the number of its row in the first decode."""
        self.struct.first_output = output

    @property
    def state(self) -> int:
        """GOES_ON, FULL_LENGTH, STOPPED, EOG, or TO_PYTHON: Python makes the next draw."""
        return int(self.struct.state)

    @property
    def seq_id(self) -> int:
        """The sequence that is continued."""
        return int(self.struct.seq_id)

    @property
    def n_decoded(self) -> int:
        """How many of the drawn tokens were decoded."""
        return int(self.struct.n_decoded)

    @property
    def output(self) -> int:
        """The number of its row in the last decode, -1 if that had none."""
        return int(self.struct.output)

    @property
    def tokens(self) -> list[int]:
        """The drawn tokens."""
        return self._tokens[: self.struct.n_tokens]

    @property
    def entropies(self) -> list[float]:
        """The entropies of the distributions considered, nats; one more where that ended the draft."""
        return self._entropies[: self.struct.n_entropies]

    @property
    def sources(self) -> list[tuple[Ids, Floats]]:
        """Ids and log-weights (the largest 0) of the distribution of each draw, if kept; copies."""
        found: list[tuple[Ids, Floats]] = []
        at = 0
        if not len(self._source_ids):
            return found
        for size in self._sizes[: self.struct.n_tokens]:
            part = slice(at, at + size)
            found.append((self._source_ids[part].copy(), self._source_weights[part].copy()))
            at += size
        return found


class DraftLoop:
    """The loop over the streams of one context. Hold its lock; the streams' samplers are in use too.

    Args:
        stepper: decodes in the context.
        n_vocab: the size of the vocabulary.
        eog_tokens: the ids that end a text.
        head: of a context that computes a head.
    """

    def __init__(
        self,
        stepper: core.Stepper,
        n_vocab: int,
        eog_tokens: Sequence[int],
        head: DraftHead | None = None,
    ) -> None:
        self._stepper = stepper
        self._is_eog = np.zeros(n_vocab, dtype=np.uint8)
        self._is_eog[list(eog_tokens)] = 1
        self._struct = _Loop(decoder=stepper.at, is_eog=self._is_eog.ctypes.data, n_vocab=n_vocab)
        if head is not None:
            self._struct.get_states, self._struct.encode = head.get_states, head.encode
            self._struct.n_state = head.n_state

    def run(
        self,
        streams: Sequence[DraftStream],
        n_first: int,
        most_decodes: int,
        features: Rows | None = None,
    ) -> int:
        """Decode and draw in turns; return llama.cpp's code if a decode failed, else 0.

        Ends once every stream has ended, when one must go on in Python, and after ``most_decodes``
        decodes.

        Args:
            n_first: entries of the handle's batch arrays that are decoded first; 0 = every stream has a
                row.
            features: what a head's encoder makes the states of these entries of, contiguous float32
                (n_first, width); None = the states are there.
        """
        library = core.library
        if library is None:
            raise RuntimeError("the compiled core is not available")
        loop, n = self._struct, len(streams)
        loop.n_first, loop.most_decodes = n_first, most_decodes
        loop.features = None if features is None else features.ctypes.data
        if n == 1:
            library.lb_draft(ctypes.addressof(loop), ctypes.addressof(streams[0].struct), 1)
        else:
            array = (_Stream * n)(*(stream.struct for stream in streams))
            library.lb_draft(ctypes.addressof(loop), ctypes.addressof(array), n)
            size = ctypes.sizeof(_Stream)
            for i, stream in enumerate(streams):
                ctypes.memmove(
                    ctypes.addressof(stream.struct), ctypes.addressof(array) + i * size, size
                )
        code: int = loop.code
        return code

    @property
    def n_decodes(self) -> int:
        """How many decodes of the last run succeeded."""
        return int(self._struct.n_decodes)
