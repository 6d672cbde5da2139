"""Drafting in the compiled core: decode, draw, decode, ... in one call, for one stream or several.

``core.c`` calls llama.cpp's own functions by their address; the GIL is released for all of it.
"""

from __future__ import annotations

import bisect
import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import core
from .heads import DraftHead

__all__ = ["DraftLoop", "DraftStream", "StopRule", "available"]

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.float32]

_STOPPED, _EOG = 2, 3  # states of a stream in ``core.c``

_LEAST_GAIN = 0.2  # tokens that a draft must be expected to gain: acceptance is not known exactly
_MOST_CANDIDATES = 1 << 17  # of all sources of a draft; a longer one goes back to Python


@dataclass(slots=True)
class StopRule:
    """When a draft ends, as numbers: for the compiled loop and for steps in Python.

    Attributes:
        most_entropy: no token is drawn above it, nats; inf = no limit.
        most_tokens: of the draft, whatever the entropy.
        edges: of the buckets of entropy, ascending.
        acceptance: the probability that a token of each bucket is accepted, one more than edges, and that
            of a token whose entropy is not known.
        costs: seconds of a round by the length of its draft; empty = only the limits count.
        mean: the acceptance of tokens whose entropy is not known yet.
        rate: tokens a second that a longer draft must exceed.
        is_probe: the first token is drawn even if that does not pay.
        weighs: drafting itself costs next to nothing: ``longest`` decides on all that could follow.
        n_drafted: tokens of the draft when the loop begins.
        reach: the product of the acceptance of the tokens drafted so far.
    """

    most_entropy: float
    most_tokens: int = (1 << 31) - 1
    edges: Sequence[float] = ()
    acceptance: Sequence[float] = ()
    costs: Sequence[float] = ()
    mean: float = 0.0
    rate: float = 0.0
    is_probe: bool = False
    weighs: bool = False
    n_drafted: int = 0
    reach: float = 1.0

    def reason(self, n_drafted: int, entropy: float) -> str:
        """Return why the draft ends after ``n_drafted`` tokens, "" if a token at ``entropy`` follows.

        The same arithmetic as in ``core.c``; NaN = the entropy is not known.
        """
        if entropy > self.most_entropy:
            return "entropy"
        if n_drafted >= self.most_tokens:
            return "goodput"
        if self.costs:
            bucket = -1 if math.isnan(entropy) else bisect.bisect(self.edges, entropy)
            acceptance = self.acceptance[bucket]
            if not (self.is_probe and n_drafted == 0) and not self._pays(n_drafted, acceptance):
                return "goodput"
            self.reach *= acceptance
        return ""

    def longest(self, entropies: Sequence[float]) -> int:
        """Return how many of the tokens that may follow, of which all is known, to draft.

        As many as gain the most over what their time would yield otherwise.
        """
        k, costs, reach, gained = self.n_drafted, self.costs, self.reach, 0.0
        best, n = _LEAST_GAIN, 0
        for i, entropy in enumerate(entropies, 1):
            if k + i >= len(costs) or k + i > self.most_tokens or entropy > self.most_entropy:
                break
            reach *= self.acceptance[
                -1 if math.isnan(entropy) else bisect.bisect(self.edges, entropy)
            ]
            gained += reach
            gain = gained - self.rate * (costs[k + i] - costs[k])
            if gain > best:
                best, n, self.reach = gain, i, reach
        self.n_drafted = k + n
        return n

    def _pays(self, k: int, acceptance: float) -> bool:
        """Return whether some draft longer than ``k`` gains more tokens than its time is worth."""
        costs, reach, gained = self.costs, self.reach, 0.0
        for longer in range(k + 1, len(costs)):
            reach *= acceptance
            gained += reach
            if gained > self.rate * (costs[longer] - costs[k]):
                return True
            acceptance = self.mean
        return False


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
        ("most_tokens", ctypes.c_int32),
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
        self._rule: StopRule | None = None
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
        position: int,
        limit: int,
        rule: StopRule | None,
    ) -> None:
        """Set what to draw; ``start`` sets after what.

        Args:
            sampler: draws and measures; its tokens are llama.cpp's and NumPy's.
            seed, purpose: of the noise.
            position: of the first draw in the text.
            limit: the most tokens to draw.
            rule: when to stop before; None = never, and entropies are not measured.
        """
        s = self.struct
        s.sampler = sampler.at
        s.seed, s.purpose, s.position = seed, purpose, position
        s.limit = min(limit, self.limit)
        s.measured = rule is not None
        s.costs = None
        self._rule = rule
        if rule is not None:
            s.most_entropy, s.most_tokens = rule.most_entropy, rule.most_tokens
            s.n_drafted = rule.n_drafted
            if rule.costs:
                arrays = _doubles(rule.costs), _doubles(rule.edges), _doubles(rule.acceptance)
                self._arrays = arrays
                s.costs, s.edges, s.acceptance = map(ctypes.addressof, arrays)
                s.n_costs, s.n_edges = len(rule.costs), len(rule.edges)
                s.mean, s.rate, s.reach = rule.mean, rule.rate, rule.reach
                s.is_probe = rule.is_probe

    def start(
        self, seq_id: int, row: int | None, hidden: int | None = None, behind: int = 0
    ) -> None:
        """Set the sequence that is continued, and the address of its logits: None = not decoded yet.

        Args:
            seq_id: the sequence.
            row: the address.
            hidden: of a head, the address of the state that goes in with the first drawn token.
            behind: by how much a token's position in a head is lower than in the text.
        """
        s = self.struct
        s.seq_id, s.row, s.hidden, s.behind = seq_id, row, hidden, behind

    def begin_at(self, output: int) -> None:
        """Set the number of its row in the first decode."""
        self.struct.first_output = output

    def note_reach(self) -> None:
        """Let the rule go on from the tokens that the loop has drawn."""
        if self._rule is not None and self._rule.costs:
            self._rule.reach = float(self.struct.reach)

    @property
    def reason(self) -> str:
        """Why the draft ends: "end" (an EOG token), "entropy" or "goodput"; "" for none of these."""
        if self.struct.state == _STOPPED and self._rule is not None:
            return "entropy" if self.entropies[-1] > self._rule.most_entropy else "goodput"
        return "end" if self.struct.state == _EOG else ""

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
        for stream in streams:
            stream.note_reach()
        code: int = loop.code
        return code

    @property
    def n_decodes(self) -> int:
        """How many decodes of the last run succeeded."""
        return int(self._struct.n_decodes)
