"""A context: one K/V cache shared by many sequences, and all operations on it."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, Unpack

from ..arguments import byte_count, choice, instance, plain_int, real, shown, whole
from ..errors import (
    BranchStateError,
    ConfigError,
    LlamaBranchError,
    UnsupportedError,
)
from ..model import Model, TokenIds, token_list
from ..native.context import release_threads
from ..native.handle import forkable_lock
from ..sampling import Sampler, SamplingParams
from ..sampling.distribution import log_base, number_array
from ..sampling.params import settings_of
from .cell_table import Usage
from .compaction import rewrite_in_order
from .logits import LogitsRow
from .memory import END
from .opening import Capabilities, open_native
from .params import MOST_WITH_PREFIXES, ContextOptions, ContextParams
from .prefix_cache import PrefixCache
from .runner import decode_run
from .sequence_ids import SequenceIds
from .store import PrefixStore, open_folder

Logits = npt.NDArray[np.float32]


class Context:
    """Many sequences of one model over one K/V cache.

    The raw calls of this class may use the sequences 0 to n_seq_max - 1 unless a branch holds them;
    branches take the highest free ids. One lock serialises all calls from many threads.

    Users get the subclass in `llamabranch.engine`, which also generates text and documents the
    arguments and attributes.
    """

    model: Model
    target: Context | None
    capabilities: Capabilities

    def __init__(
        self,
        model: Model,
        params: ContextParams | None = None,
        *,
        owns_model: bool = False,
        target: Context | None = None,
        **options: Unpack[ContextOptions],
    ) -> None:
        instance("model", model, Model, "load a file with Model(path), or both with lb.load(path)")
        if target is not None:
            meant = "pass the context that generates, for example lb.load(), not its model or name"
            instance("target", target, Context, meant)
        given = ContextParams(**options) if params is None else replace(params, **options)
        # The decoder turns tokens into rows of logits. The K/V cache records which sequence holds
        # which cells, and what can be done with them. Both are for branches, not for users.
        folder = None if given.cache_dir is None else open_folder(given.cache_dir)
        resolved, self.capabilities, self.decoder = open_native(model, given, target)
        self.kv_cache = self.decoder.memory
        handle, native = self.decoder.handle, resolved.native()
        self.model, self.target = model, target
        self.kv_type = resolved.kv_type
        self.n_ctx, self.n_ctx_seq = handle.n_ctx, handle.n_ctx_seq
        self.n_batch, self.n_outputs_max = handle.n_batch, handle.n_outputs_max
        self.n_vocab = model.n_vocab
        self._owns_model = owns_model
        # Every call on this context or its branches holds this lock, except for counts such as
        # `n_seq_free`.
        self.lock = handle.lock
        self.n_seq_max = handle.n_seq_max
        self.n_threads: int = native["n_threads"]
        self.n_threads_batch: int = native["n_threads_batch"]
        self.params = resolved
        self.kv_cache.compact = self._compact
        self.sequences = SequenceIds(self.kv_cache, self._check_raw)
        # Returns the core that runs the texts of all callers, or None.
        self.core: Callable[[], object] | None = None
        # Held during a step of any core. With only a lock for each core, two threads whose functions use
        # each other's core would wait for each other.
        self.stepping = forkable_lock()
        self.records: object = None
        self._head: Context | None = None
        self.prefix_cache = None
        if resolved.prefix_cache:
            n_bytes = byte_count("cache_size", resolved.cache_size)
            try:
                store = None if folder is None else PrefixStore(folder, n_bytes, self)
            except BaseException:
                self.decoder.close()
                raise
            self.prefix_cache = PrefixCache(self.kv_cache, self.sequences, store)
            if store is not None:
                _close_at_exit(self)
        self._last_rows: list[LogitsRow] = []
        self._last_end = 0  # the position after the last of these rows
        self.release_threads()

    # -- life --------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after ``close()`` of the context or its model."""
        return self.decoder.handle.closed

    def close(self) -> None:
        """Free the context; branches on it raise ClosedError from now on. Idempotent."""
        self.decoder.handle.close_children()  # heads, which have locks of their own
        try:
            with self.lock:
                if self.prefix_cache is not None and not self.closed:
                    self.prefix_cache.close()
        finally:  # Ctrl-C may interrupt writing to the folder
            with self.lock:
                self.decoder.close()
            if self._owns_model:
                if not self.model.closed:
                    self.model.handle.name = "context"  # ClosedError names it
                self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<Context closed>"
        return f"<Context of {self.model.name!r}: {self.n_ctx} cells, {self.n_seq_max} sequences>"

    # -- interruption ------------------------------------------------------------------------------

    def release_threads(self) -> None:
        """Let another thread of this program decode next at full speed.

        Each thread that decodes has helper threads, which wait for its next decode. If another thread
        decodes in the meantime, there are more helpers than cores, and they slow each other down. A
        small decode then takes ten times as long, until the first thread calls this method or ends. A
        new context and an ``AsyncEngine`` call it in the thread that creates them.
        """
        release_threads()

    def interrupt(self) -> None:
        """Stop the decode running in another thread; if none is running, the next one stops at once.

        The call that is decoding raises DecodeInterruptedError and leaves its sequences as they were.
        You may call it from any thread and from a signal handler; it does not wait. llama.cpp stops
        between two operations of its graph; with recurrent memory, or layers on a GPU, it stops between
        micro-batches (``n_ubatch`` tokens).
        """
        self.decoder.stops.stop()

    def resume(self) -> None:
        """Undo an ``interrupt`` that has not stopped a decode yet, so that the next one runs."""
        self.decoder.stops.resume()

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Interrupt the decodes of the ``with`` block on this context after ``seconds``.

        The call that decodes then raises DecodeInterruptedError, as after ``interrupt``. The error's
        ``results`` contain what ``complete`` and ``chat`` had generated so far. Decodes of other
        threads are not interrupted; an ``AsyncEngine`` and agents decode in threads of their own.

        Raises:
            ConfigError: ``seconds`` is not a positive number.
        """
        seconds = real("a time limit", seconds)
        if not seconds > 0:
            raise ConfigError(f"a time limit is a positive number of seconds, not {seconds!r}")
        stops, key, thread = self.decoder.stops, object(), threading.get_ident()
        alarm = threading.Timer(
            min(seconds, threading.TIMEOUT_MAX), lambda: stops.stop_thread(key, thread)
        )
        alarm.daemon = True
        alarm.start()
        try:
            yield
        finally:
            alarm.cancel()
            alarm.join()
            stops.withdraw(key)

    # -- for the layers above, which hold the lock -------------------------------------------------

    @property
    def n_seq_free(self) -> int:
        """How many sequences are free now. Does not wait while another thread decodes."""
        return self.sequences.count_free()

    def _compact(self) -> bool:
        with self.lock:
            return rewrite_in_order(self.decoder, self.sequences.holders(), self.prefix_cache)

    def mtp_head(self) -> Context | None:
        """Return the context of this model's own MTP layers, which drafts for this one; opened once.

        None if the model has no such layers or they cannot be opened, for example because the memory
        that they would share is in use.
        """
        if self.model.n_mtp_layers and self._head is None:
            with self.lock, suppress(LlamaBranchError):
                self._head = Context(self.model, target=self)
        return self._head

    def keep_prefixes(self, *, always: bool = False) -> None:
        """Open the prefix cache, unless ``prefix_cache`` was set or too few sequence ids are left.

        Args:
            always: open it in any context, because the texts will come back. If no other ids are left,
                cached texts take sequences of the context until another text needs them.
        """
        with self.lock:
            can = self.kv_cache.can_draft and not self.kv_cache.forks_copy
            can = can and self.params.prefix_cache is None and self.n_seq_max <= MOST_WITH_PREFIXES
            if self.prefix_cache is None and (can or always):
                self.prefix_cache = PrefixCache(self.kv_cache, self.sequences)

    def _check_seq(self, seq_id: int) -> int:
        seq_id = whole("a sequence id", seq_id)
        if not 0 <= seq_id < self.n_seq_max:
            raise ConfigError(
                f"sequence id {shown(seq_id)} is out of range 0 to {self.n_seq_max - 1}",
                hint="create the context with a larger n_seq_max",
            )
        return seq_id

    # -- accounting --------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Return how full the cache is."""
        with self.lock:
            self.decoder.check_open()
            self.sequences.collect()
            return self.kv_cache.usage()

    def audit(self) -> None:
        """Compare the accounting with llama.cpp's own positions.

        Raises:
            DecodeError: they differ, which is a bug in this library. The message names the sequence.
        """
        if self.target is not None and self.model.shares_memory:
            self.target.audit()  # acquires the target's lock first
            return
        with self.lock:
            self.decoder.check_open()
            self.sequences.collect()
            self.kv_cache.audit()

    def _check_raw(self, *seq_ids: int) -> list[int]:
        self.decoder.check_open()
        if self.model.shares_memory:
            raise UnsupportedError(
                f"{self.model.name} has no memory: it reads the memory of its target",
                hint="it can only draft: MTPDrafter(ctx)",
            )
        self.sequences.collect()
        checked = [self._check_seq(seq_id) for seq_id in seq_ids]
        for seq_id in checked:
            if seq_id in self.sequences:
                raise BranchStateError(
                    f"sequence {seq_id} is held by {self.sequences.holder(seq_id)!r}"
                )
        return checked

    # -- raw calls ---------------------------------------------------------------------------------

    def decode(
        self, tokens: TokenIds, position: int, seq_id: int = 0, logits: str = "last"
    ) -> None:
        """Decode ``tokens`` at ``position``, ``position`` + 1, ... of a sequence, in chunks.

        Args:
            tokens: token ids, at least one.
            position: the end of the sequence: the number of tokens it has.
            seq_id: 0 to n_seq_max - 1, not held by a branch.
            logits: which rows to keep for ``logits()``: "last", "all" or "none".

        Raises:
            ConfigError: a bad argument.
            TokenizeError: a bad id.
            CacheFullError, DecodeError: the sequence is as it was before the call. The exception is
                memory that cannot drop tokens that were already decoded
                (``capabilities.can_truncate``): there the sequence goes back to its last checkpoint
                before the call, or is emptied. The same applies after Ctrl-C.
        """
        with self.lock:
            (seq_id,) = self._check_raw(seq_id)
            choice("logits", logits, ("last", "all", "none"))
            tokens = token_list(tokens)
            if not tokens:
                raise ConfigError("nothing to decode: no tokens")
            self.model.check_tokens(tokens)
            end = self.kv_cache.next_position(seq_id)
            if plain_int(position) != end:
                raise ConfigError(
                    f"sequence {seq_id} ends at position {end}, so tokens cannot go to {shown(position)}",
                    hint=f"decode at position {end}, or remove positions with kv_cache_remove first",
                )
            self._keep_last_rows(decode_run(self.decoder, tokens, seq_id, logits))
            self._last_end = end + len(tokens)

    def _keep_last_rows(self, rows: list[LogitsRow]) -> None:
        for row in self._last_rows:
            row.users -= 1
        self._last_rows = rows
        for row in rows:
            row.users += 1

    def _row(self, row: int) -> LogitsRow:
        self.decoder.check_open()
        n = len(self._last_rows)
        number = plain_int(row)
        if number is None or not -n <= number < n:
            raise ConfigError(
                f"no logits row {shown(row)}: the last decode kept {n}",
                hint="decode with logits='last' or 'all' first",
            )
        return self._last_rows[number]

    def logits(self, row: int = -1) -> Logits:
        """Return a copy of a row of the last raw ``decode``, float32 (V,); -1 is the last one.

        Raises:
            ConfigError: that decode did not keep this row.
        """
        with self.lock:
            return np.array(self._row(row).array)

    def sample(self, params: SamplingParams | None = None, row: int = -1) -> int:
        """Return a token drawn from a row of the last raw ``decode``, without appending it.

        The noise depends on ``params.seed`` and the position of the drawn token, so a second call gives
        the same token, and a :class:`Branch` with the same tokens draws it too.
        Penalties, DRY and grammars depend on earlier tokens; use a branch for them.

        Raises:
            ConfigError: a temperature above 0 and no seed.
            UnsupportedError: settings that need the tokens so far.
        """
        with self.lock:
            params = settings_of(params)
            if params.uses_history or params.logits_processor is not None:
                raise UnsupportedError(
                    "penalties, DRY and a logits processor look at the tokens so far: use a Branch"
                )
            row_logits, n_rows = self._row(row), len(self._last_rows)
            if params.seed in (None, -1) and params.temperature > 0:
                raise ConfigError(
                    "sampling above temperature 0 needs a seed: two calls give the same token",
                    hint="SamplingParams(seed=1); a Branch picks one itself",
                )
            seed, position = params.drawn_seed(0), self._last_end - (n_rows - 1 - int(row) % n_rows)
            sampler = Sampler(self.model, params)
            return sampler.distribution(row_logits.array, position, seed).draw(seed, position)

    def model_entropy(self, base: str = "nats", logits: Logits | None = None) -> float:
        """Return the entropy of softmax(logits) in "nats" or "bits"; default: the last row."""
        with self.lock:
            return self._row_or(logits).entropy() / log_base(base)

    def model_surprisal(
        self, token: SupportsIndex, base: str = "nats", logits: Logits | None = None
    ) -> float:
        """Return -log p(token) under softmax(logits) in "nats" or "bits"; default: the last row."""
        with self.lock:
            token = self.model.token_id(token)
            return -self._row_or(logits).logprob(token) / log_base(base)

    def _row_or(self, logits: Logits | None) -> LogitsRow:
        if logits is None:
            return self._row(-1)
        array = number_array("logits", logits, np.float32)
        if array.shape != (self.n_vocab,):
            raise ConfigError(f"logits must have shape ({self.n_vocab},), not {array.shape}")
        return LogitsRow(array)

    def kv_seq_copy(self, src: int, dst: int) -> None:
        """Make sequence ``dst`` a copy of ``src``. In a unified cache they share cells; no K/V is copied.

        The previous content of ``dst`` is dropped.
        """
        with self.lock:
            src, dst = self._check_raw(src, dst)
            if src != dst:
                self.kv_cache.fork(src, dst)

    def kv_cache_remove(self, seq_id: int, start: int = 0, end: int = -1) -> None:
        """Drop the positions [start, end) of a sequence; end -1 = to the end.

        Raises:
            UnsupportedError: this memory cannot drop a part of a sequence; nothing has changed.
        """
        with self.lock:
            (seq_id,) = self._check_raw(seq_id)
            start, end = whole("start", start), whole("end", end)
            if start < 0 or end < -1 or (end != -1 and end < start):
                raise ConfigError(f"invalid range of positions: [{shown(start)}, {shown(end)})")
            stop = END if end == -1 else end
            length = self.kv_cache.next_position(seq_id)
            if start >= min(stop, length):
                return
            partial = start > 0 or stop < length
            # If only the cells of a sliding window are left, llama.cpp would drop the positions, and
            # later decodes would miss cells that they need.
            cache = self.kv_cache
            can = not partial or (cache.can_draft and cache.usable(seq_id, start) == start)
            if not can or not cache.drop(seq_id, start, END if stop >= length else stop):
                raise UnsupportedError(
                    "this model's memory cannot drop a part of a sequence",
                    hint="remove the whole sequence and decode again, or fork first and drop the fork",
                )

    def kv_seq_keep(self, seq_id: int) -> None:
        """Drop all other sequences, unless a branch holds them."""
        with self.lock:
            (seq_id,) = self._check_raw(seq_id)
            for other in range(self.n_seq_max):
                if other != seq_id and other not in self.sequences:
                    self.kv_cache.drop(other, 0)

    def kv_cache_clear(self) -> None:
        """Empty the whole cache.

        Raises:
            BranchStateError: a branch still uses it.
        """
        with self.lock:
            self._check_raw()
            n_branches = self.sequences.n_held
            if n_branches:
                raise BranchStateError(
                    f"{n_branches} branches still use the cache",
                    hint="prune them first",
                )
            if self.prefix_cache is not None:
                self.prefix_cache.clear()
            self.kv_cache.clear()

    def kv_cache_size(self, seq_id: int) -> int:
        """Return how many tokens a sequence holds."""
        with self.lock:
            self.decoder.check_open()
            return self.kv_cache.cells.length(self._check_seq(seq_id))

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return ``model.tokenize(...)``."""
        return self.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: TokenIds, *, special: bool = False) -> str:
        """Return ``model.detokenize(...)``."""
        return self.model.detokenize(tokens, special=special)


def text_context(name: str, value: object) -> Context:
    """Return ``value`` if it is a context that can generate text.

    Raises:
        ConfigError: it is not a context; the message names the argument.
        UnsupportedError: it is the context of a head, which cannot generate by itself.
    """
    hint = 'lb.load("model.gguf") returns one, and so does Context(model)'
    context = instance(name, value, Context, hint)
    if context.target is not None:
        raise UnsupportedError(
            f"{context.model.name} is open as a head of {context.target.model.name}: it drafts for that "
            "context, and cannot generate text by itself",
            hint="EagleDrafter(head) or MTPDrafter(head) drafts with it; generate with the target",
        )
    return context


def _close_at_exit(context: Context) -> None:
    """Close a context at exit, before its llama.cpp context is freed, so that its texts are written."""
    reference = weakref.ref(context)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    atexit.register(close)
