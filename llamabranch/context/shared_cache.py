"""A cache that many sequences share: opening it, lending sequences, keeping count."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

from typing_extensions import Self

from ..arguments import real, shown, whole
from ..errors import ConfigError, DecodeError, DecodeInterruptedError, UnsupportedError
from ..model import Model
from ..native import ContextHandle, max_sequences
from .capabilities import probe
from .cell_ledger import Usage, n_common
from .cell_order import CellOrder
from .decoder import Decoder
from .logits import LogitsRow
from .params import (
    DEFAULT_N_SEQ_MAX,
    context_options,
    default_n_ctx,
    resolve_kv_type,
    threads_change_logits,
    trained_length,
    warn_of_length,
)
from .sequence_ids import Replayable, SequenceIds
from .threads import ThreadTuner, ThreadWatch

__all__ = ["SharedCache"]


class SharedCache:
    """The part of a :class:`~llamabranch.context.Context` that is not about tokens.

    It opens and closes, lends sequences, writes all branches anew where the order of cells is at
    stake, and counts.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int | None = None,
        n_seq_max: int | None = None,
        n_batch: int = 512,
        n_ubatch: int | None = None,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        flash_attention: bool | str = "auto",
        kv_type: str = "auto",
        batch_invariant: bool | str = "auto",
        swa_full: bool = True,
        offload_kqv: bool = True,
        rope_scaling: str | None = None,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = -1.0,
        yarn_beta_fast: float = -1.0,
        yarn_beta_slow: float = -1.0,
        yarn_orig_ctx: int = 0,
        n_outputs_max: int | None = None,
    ) -> None:
        if model.vocab_only or not model.can_generate:
            kind = "only its vocabulary is loaded" if model.vocab_only else "it predicts no tokens"
            raise UnsupportedError(f"{model.name} opens no context: {kind}")
        if batch_invariant not in ("auto", True, False):
            raise ConfigError(
                f"batch_invariant must be 'auto', True or False, not {batch_invariant!r}"
            )
        self.model = model
        trained = trained_length(model, rope_scaling, rope_freq_base, rope_freq_scale)
        # One who asks for many cells and several sequences wants many texts; else, a long one.
        one_text = n_ctx is not None and n_seq_max in (None, 1)
        n_ctx = default_n_ctx(trained) if n_ctx is None else n_ctx
        n_seq_max = DEFAULT_N_SEQ_MAX if n_seq_max is None else n_seq_max
        self.kv_type = resolve_kv_type(model, kv_type, flash_attention, batch_invariant)
        options = context_options(
            n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch, n_ubatch=n_ubatch,
            n_outputs_max=n_outputs_max, n_threads=n_threads, n_threads_batch=n_threads_batch,
            flash_attention=flash_attention, kv_type=self.kv_type, swa_full=swa_full,
            offload_kqv=offload_kqv, rope_scaling=rope_scaling, rope_freq_base=rope_freq_base,
            rope_freq_scale=rope_freq_scale, yarn_ext_factor=yarn_ext_factor,
            yarn_attn_factor=yarn_attn_factor, yarn_beta_fast=yarn_beta_fast,
            yarn_beta_slow=yarn_beta_slow, yarn_orig_ctx=yarn_orig_ctx,
        )  # fmt: skip
        warned = False
        if trained is not None and one_text and n_ctx > trained:
            warned = True
            warn_of_length(f"n_ctx={n_ctx} is", trained, n_ctx)
        changes_logits = model.memory_type != "recurrent" and threads_change_logits(
            self.kv_type, flash_attention, n_ctx
        )
        tuner = ThreadTuner(model, n_threads, n_threads_batch, changes_logits=changes_logits)
        options = replace(options, n_threads=tuner.n_threads, n_threads_batch=tuner.n_threads_batch)
        handle = ContextHandle(model.handle, options)
        if not handle.has_memory:
            handle.close()
            raise UnsupportedError(f"{model.name} has no memory: it cannot generate")
        self.n_ctx = handle.n_ctx
        self.n_batch = handle.n_batch
        self.n_seq_max = n_seq_max = options.n_seq_max
        self.n_vocab = model.n_vocab
        self._owns_model = False
        self._lock = handle.lock
        self._decoder = Decoder(handle, n_seq_max)
        self._leases = SequenceIds(n_seq_max)
        self._last_rows: list[LogitsRow] = []
        try:
            tuner.tune(handle)
            self.capabilities = probe(
                self._decoder,
                model,
                kv_type=self.kv_type,
                flash_attention=flash_attention,
                swa_full=swa_full,
                batch_invariant=batch_invariant,
            )
        except BaseException:
            handle.close()
            raise
        self.options = replace(
            options, n_threads=tuner.n_threads, n_threads_batch=tuner.n_threads_batch
        )
        if trained is not None and not warned:
            self._decoder.n_trained = trained
        self._decoder.watch = ThreadWatch.of(handle, model, tuner)
        self._decoder.can_truncate = self.capabilities.can_truncate
        if self.capabilities.batch_invariant and n_seq_max < max_sequences():
            cells = self._decoder.cells
            self._decoder.cell_order = CellOrder(handle, cells, max_sequences() - 1)
            self._decoder.compact = self._compact

    # -- life --------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after ``close()`` of the context or its model."""
        return self._decoder.handle.closed

    def close(self) -> None:
        """Free the context; branches on it raise ClosedError from now on. Idempotent."""
        with self._lock:
            self._decoder.close()
            if self._owns_model:
                self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<Context closed>"
        return f"<Context of {self.model.name!r}: {self.n_ctx} cells, {self.n_seq_max} sequences>"

    def _check_open(self) -> None:
        self._decoder.handle.ptr  # noqa: B018  (raises ClosedError)

    # -- interruption ------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Stop the decode under way in another thread; without one, the next decode stops at once.

        The call that is decoding raises DecodeInterruptedError and leaves its sequences as they were.
        Callable from any thread and from a signal's handler; returns without waiting. llama.cpp looks
        between the operations of its graph; with recurrent memory, or layers on a GPU, the decode
        stops between micro-batches (``n_ubatch`` tokens).
        """
        self._decoder.handle.stop()

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Interrupt what the ``with`` block decodes on this context after ``seconds``.

        The call that decodes then raises DecodeInterruptedError, as after ``interrupt``. The block
        is entered from one thread; what other threads decode here counts too.

        Raises:
            ConfigError: ``seconds`` is not a positive number.
        """
        seconds = real("a time limit", seconds)
        if not seconds > 0:
            raise ConfigError(f"a time limit is a positive number of seconds, not {seconds!r}")
        passed = threading.Event()

        def stop() -> None:
            passed.set()
            self.interrupt()

        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), stop)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            if passed.is_set():  # nothing that comes after the block is meant
                self._decoder.handle.resume()

    # -- for the layers above: the lock is held --------------------------------------------------------

    @property
    def lock(self) -> threading.RLock:
        """Held by every call on this context or a branch of it."""
        return self._lock

    @property
    def decoder(self) -> Decoder:
        """The unchecked inside; for branches, not for users."""
        return self._decoder

    def lease(self, holder: object) -> int:
        """Lend ``holder`` an empty sequence until ``return_lease`` or its garbage collection.

        Raises:
            SequencesExhaustedError: all are taken; says by whom.
        """
        with self._lock:
            self._check_open()
            self._collect_forgotten()
            cells = self._decoder.cells
            if len(self._leases) == self.n_seq_max:
                gc.collect()  # a forgotten branch may wait in a reference cycle
                self._collect_forgotten(noted=False)
            return self._leases.lend(holder, lambda seq_id: cells.first_position(seq_id) < 0)

    def return_lease(self, seq_id: int) -> None:
        """Take a lent sequence back and empty it."""
        with self._lock:
            if seq_id in self._leases:
                if not self.closed:
                    self._decoder.drop(seq_id, 0)
                self._leases.end(seq_id)

    def _collect_forgotten(self, *, noted: bool = True) -> None:
        for seq_id in self._leases.forgotten(noted=noted):
            self.return_lease(seq_id)

    @property
    def n_seq_free(self) -> int:
        """How many sequences could be leased now."""
        with self._lock:
            self._collect_forgotten()
            first = self._decoder.cells.first_position
            seqs = range(self.n_seq_max)
            return sum(1 for seq_id in seqs if seq_id not in self._leases and first(seq_id) < 0)

    def holders(self) -> list[object]:
        """Return who holds sequences now, in the order of their ids."""
        with self._lock:
            self._collect_forgotten()
            found = (self._leases.holder(seq_id) for seq_id in range(self.n_seq_max))
            return [holder for holder in found if holder is not None]

    def _compact(self) -> bool:
        """Decode all branches anew, in order and without holes; False if something else is there."""
        cells = self._decoder.cells
        lines = [holder for holder in self.holders() if isinstance(holder, Replayable)]
        held = {line.seq_id: cells.next_position(line.seq_id) for line in lines}
        if any(seq_id not in held for seq_id in cells.usage().sequences):
            return False  # raw sequences, or a verification under way: only their owners know
        if any(held[line.seq_id] > line.position for line in lines):
            return False
        self._decoder.clear()
        done: list[tuple[int, list[int]]] = []
        interruption: KeyboardInterrupt | DecodeInterruptedError | None = None
        for line in sorted(lines, key=lambda line: held[line.seq_id]):
            tokens, source, n = line.tokens[: held[line.seq_id]], -1, 0
            for seq_id, other in done:
                same = n_common(other, tokens)
                if same > n:
                    source, n = seq_id, same
            if n:
                self._decoder.share(source, line.seq_id, 0, n)
            while cells.next_position(line.seq_id) < len(tokens):
                try:
                    self._decoder.decode_run(tokens[n:], line.seq_id, "none")
                except (KeyboardInterrupt, DecodeInterruptedError) as error:
                    # Nobody may be left without its cells.
                    interruption = error
            done.append((line.seq_id, tokens))
        if interruption is not None:
            raise interruption
        return True

    def _check_seq(self, seq_id: int) -> int:
        seq_id = whole("a sequence id", seq_id)
        if not 0 <= seq_id < self.n_seq_max:
            raise ConfigError(
                f"sequence id {shown(seq_id)} is out of range 0 to {self.n_seq_max - 1}",
                hint="open the context with a larger n_seq_max",
            )
        return seq_id

    # -- accounting --------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Return how full the cache is."""
        with self._lock:
            self._check_open()
            self._collect_forgotten()
            usage = self._decoder.cells.usage()
            cell_order = self._decoder.cell_order
            if cell_order is None:
                return usage
            return replace(usage, cells_reserved=cell_order.n_cells, in_order=cell_order.in_order)

    def audit(self) -> None:
        """Compare the accounting with llama.cpp's own positions.

        Raises:
            DecodeError: they differ; says where. That is a bug in this library.
        """
        with self._lock:
            self._check_open()
            self._collect_forgotten()
            for seq_id in range(self.n_seq_max):
                ours = (
                    self._decoder.cells.first_position(seq_id),
                    self._decoder.cells.next_position(seq_id) - 1,
                )
                theirs = self._decoder.handle.position_range(seq_id)
                if self.capabilities.recurrent or self.capabilities.sliding_window:
                    ours, theirs = (ours[1], ours[1]), (theirs[1], theirs[1])
                if ours != theirs:
                    raise DecodeError(
                        f"sequence {seq_id} should hold positions {ours}, llama.cpp says {theirs}"
                    )
