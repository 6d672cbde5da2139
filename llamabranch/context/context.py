"""A context: one K/V cache shared by many sequences, and everything that can be done to it."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from ..arguments import plain_int, shown, whole
from ..errors import BranchStateError, ConfigError, UnsupportedError
from ..model import TokenIds, token_list
from ..sampling import Sampler, SamplingParams
from ..sampling.distribution import log_base
from .capabilities import Capabilities
from .logits import LogitsRow
from .shared_cache import SharedCache

__all__ = ["Capabilities", "Context"]

Logits = npt.NDArray[np.float32]


class Context(SharedCache):
    """Many sequences of one model over one unified K/V cache.

    Args:
        model: a :class:`Model`; several contexts may share it.
        n_ctx: cells of the cache, shared by all sequences; rounded up to a multiple of 256. Default:
            2048, or what the model was trained for if that is less.
        n_seq_max: sequences (branches) at a time, 1 to 256; default 8.
        n_batch: tokens per decode at most; n_ubatch: tokens computed at once (default n_batch).
        n_threads, n_threads_batch: for one token and for many. Default: what is fastest when the context
            opens, of one thread, half of the cores this process may use, and all; kept for the next
            time. All cores where ``LLAMABRANCH_PROFILE=0``, and for one token where the number would
            change logits: flash attention over more than 256 cells of f16 or f32 K/V.
        flash_attention: "auto", True or False.
        kv_type: "f16", "bf16", "q8_0", ...; "auto" is bf16 where that makes the context
            batch-invariant and f16 elsewhere.
        batch_invariant: "auto" turns it on where it can hold, True raises where it cannot.
        swa_full: keep the whole context of sliding-window layers, so that they can be rewound.
        offload_kqv: keep the cache on the GPU if the model is there.
        rope_scaling: None (the model's own), "none", "linear", "yarn" or "longrope";
            rope_freq_base, rope_freq_scale, yarn_*: as in llama.cpp, 0 (yarn: -1) = the model's own.
        n_outputs_max: rows of logits per decode at most; default max(n_seq_max, min(n_batch, 256)).

    Raises:
        ConfigError: a bad option, or llama.cpp cannot open the context (the reason is given).
        UnsupportedError: the model cannot generate, or ``batch_invariant=True`` cannot hold.

    Warns:
        ContextLengthWarning: a text may get longer than the model was trained for. At once if ``n_ctx``
            is larger and not meant for several sequences (``n_seq_max`` is not given, or 1), else when
            a sequence does. Not where rope settings are given, nor with recurrent memory.
        PerformanceWarning: once, if decoding becomes far slower because other programs use the cores.

    Sequences 0 to n_seq_max - 1 are open to the raw calls of this class unless a branch has leased
    them; branches take them from the top. One lock serialises all calls from many threads.
    """

    def _check_raw(self, *seq_ids: int) -> list[int]:
        self._check_open()
        self._collect_forgotten()
        checked = [self._check_seq(seq_id) for seq_id in seq_ids]
        for seq_id in checked:
            if seq_id in self._leases:
                raise BranchStateError(
                    f"sequence {seq_id} is leased to {self._leases.holder(seq_id)!r}"
                )
        return checked

    # -- raw calls ---------------------------------------------------------------------------------

    def decode(
        self, tokens: TokenIds, position: int, seq_id: int = 0, logits: str = "last"
    ) -> None:
        """Decode ``tokens`` at ``position``, ``position`` + 1, ... of a sequence, in chunks.

        Args:
            tokens: ids, at least one.
            position: must be the end of the sequence: its number of tokens.
            seq_id: 0 to n_seq_max - 1, not leased to a branch.
            logits: whose rows to keep for ``logits()``: "last", "all" or "none".

        Raises:
            ConfigError: a bad argument. TokenizeError: a bad id. CacheFullError, DecodeError: the
            sequence is as it was before the call, or empty if some of the tokens were in and this
            memory cannot drop them (``capabilities.can_truncate``); after Ctrl-C, too.
        """
        with self._lock:
            (seq_id,) = self._check_raw(seq_id)
            if logits not in ("last", "all", "none"):
                raise ConfigError(f"logits must be 'last', 'all' or 'none', not {logits!r}")
            tokens = token_list(tokens)
            if not tokens:
                raise ConfigError("nothing to decode: no tokens")
            self.model.check_tokens(tokens)
            end = self._decoder.cells.next_position(seq_id)
            if plain_int(position) != end:
                raise ConfigError(
                    f"sequence {seq_id} ends at position {end}, so tokens cannot go to {shown(position)}",
                    hint=f"decode at position {end}, or remove positions with kv_cache_remove first",
                )
            self._keep_last_rows(self._decoder.decode_run(tokens, seq_id, logits))

    def _keep_last_rows(self, rows: list[LogitsRow]) -> None:
        for row in self._last_rows:
            row.users -= 1
        self._last_rows = rows
        for row in rows:
            row.users += 1

    def _row(self, row: int) -> LogitsRow:
        self._check_open()
        n = len(self._last_rows)
        number = plain_int(row)
        if number is None or not -n <= number < n:
            raise ConfigError(
                f"no logits row {shown(row)}: the last decode kept {n}",
                hint="decode with logits='last' or 'all' first",
            )
        return self._last_rows[number]

    def logits(self, row: int = -1) -> Logits:
        """Return a row of the last raw ``decode``, float32 (V,), a copy; -1 is the last one.

        Raises:
            ConfigError: that decode kept no such row.
        """
        with self._lock:
            return self._row(row).array.copy()

    def sample(self, params: SamplingParams | None = None, row: int = -1) -> int:
        """Return the token drawn from a row of the last raw ``decode``; changes nothing.

        The noise comes from ``params.seed`` (None counts as 0) and the number of tokens the context
        has decoded, so calling it twice gives the same token. Penalties and DRY need a history and a
        grammar a state: those belong to a :class:`Branch`.

        Raises:
            UnsupportedError: settings that need the tokens so far.
        """
        with self._lock:
            params = params or SamplingParams()
            if params.uses_history:
                raise UnsupportedError("penalties and DRY look at the tokens so far: use a Branch")
            seed, position = params.seed or 0, self._decoder.n_decodes
            sampler = Sampler(self.model, params)
            return sampler.distribution(self._row(row).array, position, seed).draw(seed, position)

    def model_entropy(self, base: str = "nats", logits: Logits | None = None) -> float:
        """Return the entropy of softmax(logits) in "nats" or "bits"; default: the last row."""
        with self._lock:
            row = self._row(-1) if logits is None else LogitsRow(self._check_logits(logits))
            return row.entropy() / log_base(base)

    def model_surprisal(
        self, token: SupportsIndex, base: str = "nats", logits: Logits | None = None
    ) -> float:
        """Return -log p(token) under softmax(logits) in "nats" or "bits"; default: the last row."""
        with self._lock:
            token = self.model.token_id(token)
            row = self._row(-1) if logits is None else LogitsRow(self._check_logits(logits))
            return -row.logprob(token) / log_base(base)

    def _check_logits(self, logits: Logits) -> Logits:
        array = np.asarray(logits, dtype=np.float32)
        if array.shape != (self.n_vocab,):
            raise ConfigError(f"logits must have shape ({self.n_vocab},), not {array.shape}")
        return array

    def kv_seq_copy(self, src: int, dst: int) -> None:
        """Make sequence ``dst`` hold what ``src`` holds. Cells are shared, no K/V is copied.

        What ``dst`` held before is dropped.
        """
        with self._lock:
            src, dst = self._check_raw(src, dst)
            if src != dst:
                self._decoder.share(src, dst)

    def kv_cache_remove(self, seq_id: int, start: int = 0, end: int = -1) -> None:
        """Drop the positions [start, end) of a sequence; end -1 = to the end.

        Raises:
            UnsupportedError: this memory cannot drop a part of a sequence; nothing has changed.
        """
        with self._lock:
            (seq_id,) = self._check_raw(seq_id)
            start, end = whole("start", start), whole("end", end)
            if start < 0 or end < -1 or (end != -1 and end < start):
                raise ConfigError(f"no such range of positions: [{shown(start)}, {shown(end)})")
            stop = (1 << 31) if end == -1 else end
            length = self._decoder.cells.next_position(seq_id)
            if start >= min(stop, length):
                return
            partial = start > 0 or stop < length
            # Memory that lost a part of its window would say yes and then compute from what is gone.
            if (partial and not self.capabilities.can_truncate) or not self._decoder.drop(
                seq_id, start, 1 << 31 if stop >= length else stop
            ):
                raise UnsupportedError(
                    "this model's memory cannot drop a part of a sequence",
                    hint="remove the whole sequence and decode again, or fork before you try things",
                )

    def kv_seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence that no branch has leased."""
        with self._lock:
            (seq_id,) = self._check_raw(seq_id)
            for other in range(self.n_seq_max):
                if other != seq_id and other not in self._leases:
                    self._decoder.drop(other, 0)

    def kv_cache_clear(self) -> None:
        """Empty the whole cache.

        Raises:
            BranchStateError: a branch still uses it.
        """
        with self._lock:
            self._check_open()
            self._collect_forgotten()
            if self._leases:
                raise BranchStateError(
                    f"{len(self._leases)} branches still use the cache",
                    hint="prune them first",
                )
            self._decoder.clear()

    def kv_cache_size(self, seq_id: int) -> int:
        """Return how many tokens a sequence holds."""
        with self._lock:
            self._check_open()
            return self._decoder.cells.length(self._check_seq(seq_id))

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return ``model.tokenize(...)``."""
        return self.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: TokenIds, *, special: bool = False) -> str:
        """Return ``model.detokenize(...)``."""
        return self.model.detokenize(tokens, special=special)
