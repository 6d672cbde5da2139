"""Decoding: the only place that passes tokens to llama.cpp and reads logits, in transactions.

Every decode (a token, a batch, a tree, a head with its target) goes through ``Runner.transact``, which
submits and records it, and undoes it if it fails. A `Batch` packs tokens of any number of sequences
into as few decodes as possible. The caller must hold the context's lock and pass valid arguments:
:class:`~llamabranch.context.Context` checks the arguments of users, and branches pass checked ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from time import perf_counter

import numpy as np
import numpy.typing as npt

from ..errors import (
    CacheFullError,
    ConfigError,
    ContextLengthWarning,
    DecodeError,
    DecodeInterruptedError,
    warn,
)
from ..native import heads, staging
from ..native.interrupts import uninterrupted
from ..sampling import Sampler
from ..sampling.noise import DRAW
from .hidden_states import HiddenStates
from .logits import LogitsRow, lent
from .memory import END, Memory
from .threads import ThreadWatch

States = npt.NDArray[np.float32]
Read = Callable[[int, list[LogitsRow]], None]
# One decode: the number of tokens, the number of rows of logits, a function that submits it and returns
# llama.cpp's code, a function that records it in the memory (and returns False if nothing was decoded),
# and the index of each requested row in llama.cpp's rows, or None if they are already in order.
Piece = tuple[int, int, Callable[[], int], Callable[[], object], "list[int] | None"]

# A token, its position, its sequence, and whether its row is needed.
Entry = tuple[int, int, int, bool]

_LONG = 64  # the fewest tokens in a decode that measures the prompt speed
_FULL = 1  # llama_decode's return codes
_REFUSED = -1
_INTERRUPTED = 2
_NO_MEMORY = -2


class Runner:
    """Decodes batches, records them in the memory, and copies rows of logits before they are overwritten.

    Args:
        memory: where the tokens are written; its native context decodes them.
        n_trained: the number of positions the model was trained for; a longer sequence gets a warning.
            None = never warn.
        encoded: for a head with an encoder, how many numbers it reads per token; else 0.
        watch: changes the number of threads while other programs use the cores; None = it never
            changes.

    Attributes:
        n_trained: the position beyond which a sequence gets a warning.
        n_decodes: the number of decodes so far.
        stops: the requests to stop a decode.
        most_rows: how many tokens a decode can have if it computes the logits of all of them.
    """

    def __init__(
        self,
        memory: Memory,
        n_trained: int | None = None,
        encoded: int = 0,
        watch: ThreadWatch | None = None,
    ) -> None:
        self.handle = handle = memory.handle
        self.memory = memory
        self.n_decodes = 0
        self.stops = handle.stops
        self.most_rows = min(handle.n_chunk, handle.n_outputs_max)
        # With no more cells than that, no sequence can exceed it.
        self.n_trained = END if n_trained is None or handle.n_ctx_seq <= n_trained else n_trained
        self._row_bytes = 4 * handle.n_vocab
        self._live: list[LogitsRow] = []
        self._places: list[int] | None = None  # of the last rows, if llama.cpp has another order
        self._encoded = encoded
        self.watch = watch

    def check_open(self) -> None:
        """Raise ClosedError if the context is closed."""
        self.handle.ptr  # noqa: B018

    def close(self) -> None:
        """Copy the rows that are still needed, then free the native context."""
        self._protect_rows(0)
        self.handle.close()

    def make_room(self, n: int) -> None:
        """Free quarantined and cached cells if fewer than ``n`` cells are free without them."""
        memory = self.memory
        if (memory.order.n_cells or memory.prefix_seq_ids) and memory.n_vacant < n:
            memory.reclaim(n)

    # -- the transaction ---------------------------------------------------------------------------

    def transact(
        self,
        pieces: Iterable[Piece],
        starts: dict[int, int],
        replaced: Collection[int],
        read: Read | None = None,
        *,
        reclaims: bool = True,
    ) -> list[LogitsRow]:
        """Run several decodes, all or none; return the rows, unless ``read`` gets them.

        ``pieces`` yields each decode after the previous one was recorded. If one fails, or ``read``
        raises an exception, the sequences are cut back to ``starts``. The texts of ``replaced``
        sequences get new rows, so their last rows are not copied; pass none if there are several
        decodes, because a later one could fail. ``reclaims``: free cells if all are taken.
        """
        handle, memory, watch = self.handle, self.memory, self.watch
        handle.ptr  # noqa: B018  (raises ClosedError)
        all_rows: list[LogitsRow] = []
        expiring: list[LogitsRow] = []  # still valid if the decode fails without any change
        code = n = n_decoded = 0
        outer = self.stops.begin()
        try:
            for n, n_rows, submit, record, places in pieces:
                for row in all_rows:
                    row.detach()
                expiring = self._protect_rows(n_rows, replaced)
                began = perf_counter()
                code = submit() if watch is None else watch.decode(n, submit)
                while code == _FULL and reclaims and memory.reclaim(n):
                    expiring = self._protect_rows(n_rows, replaced)
                    code = submit()
                if code:
                    break
                if n >= _LONG:
                    memory.tokens_per_s = n / (perf_counter() - began)
                clock = memory.cells.clock
                record()
                if memory.hidden is not None:
                    memory.hidden.record(clock, n)
                self.n_decodes += 1
                rows: list[LogitsRow] = []
                self._live = rows
                # Views into llama.cpp's buffer. This is not a separate function, because it runs for
                # each token.
                if n_rows:
                    arrays, at = handle.rows(n_rows), handle.rows_address or 0
                    for i in range(n_rows):
                        rows.append(LogitsRow(arrays[i], at + i * self._row_bytes))
                for row in expiring:
                    row.invalidate()
                self._places = places
                if places is not None:
                    rows = [rows[place] for place in places]
                if read is None:
                    all_rows = all_rows + rows if all_rows else rows
                else:
                    n_decoded += n
                    with lent(rows):
                        read(n_decoded, rows)
            else:
                return all_rows
        except BaseException:  # Ctrl-C arrives when the call returns
            self.stops.resume()  # the decode may have been interrupted too
            self.undo(starts, expiring)
            raise
        finally:
            self.stops.end(outer)
        raise self._failure(code, starts, n, expiring)

    def _protect_rows(self, n_rows: int, replaced: Collection[int] = ()) -> list[LogitsRow]:
        """Copy the rows that are still needed before the next decode overwrites the buffer.

        Return the rows that are not copied because only the text of a ``replaced`` sequence has them.
        """
        hidden = self.memory.hidden
        if hidden is not None and not hidden.is_read():
            self.memory.hidden = None
            heads.extract(self.handle, hidden.layers, False)
        if n_rows > self.handle.row_capacity:
            replaced = ()  # the buffer is reallocated: every old row becomes invalid
        expiring: list[LogitsRow] = []
        for row in self._live:
            if not row.users:
                row.invalidate()
            elif row.users == 1 and row.seq_id in replaced:
                expiring.append(row)
            else:
                row.detach()
        self._live = expiring
        return expiring

    def _failure(
        self, code: int, starts: dict[int, int], n: int, expiring: Sequence[LogitsRow]
    ) -> DecodeError | CacheFullError:
        """Put the memory back as it was before all decodes; return the error for ``code``."""
        if code in (_FULL, _REFUSED):  # this decode has changed nothing
            self.undo(starts, ())
            if code == _FULL:
                return self.memory.full_error(n)
            return DecodeError("llama.cpp refused the batch as inconsistent", code=code)
        if code == _INTERRUPTED:
            self.stops.note_stopped()
        else:
            self.memory.distrust(starts)
            if code == _NO_MEMORY:
                self.handle.forget_rows()
        emptied = self.undo(starts, expiring)
        state = "the sequences of the batch are as before"
        if emptied:
            state = f"this memory cannot be cut: sequences {emptied} are now shorter, or empty"
        if code == _INTERRUPTED:
            return DecodeInterruptedError(
                f"the decode was interrupted; {state}", code=code, memory_changed=True
            )
        reason = "llama.cpp could not "
        reason += "allocate memory" if code == _NO_MEMORY else "compute the batch"
        return DecodeError(f"{reason} (code {code}); {state}", code=code, memory_changed=True)

    @uninterrupted
    def undo(self, starts: dict[int, int], expiring: Sequence[LogitsRow]) -> list[int]:
        """Cut every sequence of a failed batch back to its start; return those that got even shorter."""
        emptied = [s for s, start in starts.items() if self.memory.cut(s, start) < start]
        for row in expiring:
            row.invalidate()
        return emptied

    # -- decoding ----------------------------------------------------------------------------------

    def advance(
        self,
        seq_id: int,
        token: int,
        sampler: Sampler | None = None,
        seed: int = 0,
    ) -> LogitsRow:
        """Decode one token at the end of ``seq_id``; return its row. The hot path.

        If the compiled core supports the settings of ``sampler``, the same native call also draws the
        next token, with ``seed``, and the row keeps it.
        """
        handle, memory = self.handle, self.memory
        position = memory.next_position(seq_id)
        if position >= self.n_trained:
            self._warn_beyond_trained()
        compiled, measured, stepper = None, True, handle.stepper
        if sampler is not None and stepper is not None:
            compiled, measured = sampler.row_sampler, sampler.params.logprobs
        if compiled is not None and stepper is not None:
            submit = partial(stepper.step, token, position, seq_id, compiled, seed, DRAW, measured)
        else:
            submit = partial(self._submit, [(token, position, seq_id, True)], None)
        piece = (1, 1, submit, partial(memory.append, seq_id, 1), None)
        starts = {seq_id: position}
        row = self.transact((piece,), starts, starts)[0]
        if compiled is not None:
            row.note_step(compiled, seed, measured)
        return row

    def decode(
        self,
        batch: Batch,
        states: States | None = None,
        *,
        read: Read | None = None,
    ) -> list[list[LogitsRow]]:
        """Decode all runs of a batch, or none, in as few decodes as possible; return each run's rows.

        Args:
            batch: the tokens.
            states: the hidden states that a head reads with each token, float32 (n, n_embd).
            read: called after each decode with the number of tokens decoded so far and the new rows,
                which are valid until the next decode. If it is given, no rows are copied or returned.

        Raises:
            CacheFullError, DecodeError: all sequences are as before. So they are if ``read`` raises an
                exception.
        """
        seqs = dict.fromkeys(seq_id for _, seq_id, _ in batch.tokens)
        if not seqs:
            return [[] for _ in batch.n_rows]
        is_recorded = batch.positions is None
        starts = {s: self.memory.next_position(s) for s in seqs} if is_recorded else {}
        ends = dict(batch.positions or starts)
        entries: list[Entry] = []
        for token, seq_id, wants in batch.tokens:
            entries.append((token, ends[seq_id], seq_id, wants))
            ends[seq_id] += 1
        if max(ends.values()) > self.n_trained:
            self._warn_beyond_trained()
        parts = list(self._parts(entries))
        replaced: Collection[int] = ()
        if is_recorded and len(parts) > 1:
            self.make_room(len(entries))
        elif is_recorded and read is None:
            replaced = {seq_id for _, _, seq_id, wants in entries if wants}
        pieces = (
            self._piece(entries[part], None if states is None else states[part], is_recorded)
            for part in parts
        )
        rows = iter(self.transact(pieces, starts, replaced, read, reclaims=is_recorded))
        return [list(islice(rows, n)) for n in batch.n_rows]

    def _parts(self, entries: Sequence[Entry]) -> Iterator[slice]:
        """Yield the tokens of each decode, filling each with as many tokens and rows as it can have."""
        most, most_rows = self.handle.n_chunk, self.handle.n_outputs_max
        low = n_rows = 0
        for i, (_, _, _, wants) in enumerate(entries):
            if i - low == most or n_rows + wants > most_rows:
                yield slice(low, i)
                low, n_rows = i, 0
            n_rows += wants
        yield slice(low, len(entries))

    def _piece(self, entries: Sequence[Entry], states: States | None, is_recorded: bool) -> Piece:
        """Return one decode of at most n_batch tokens, in an order that llama.cpp can decode."""
        places: list[int] | None = None
        seqs = [seq_id for _, _, seq_id, _ in entries]
        wants_logits = [wants for _, _, _, wants in entries]
        order = self.memory.arranged(seqs)
        if order is not None:
            indices = [i for i in order if wants_logits[i]]
            places = sorted(range(len(indices)), key=indices.__getitem__)
            entries = [entries[i] for i in order]
            seqs = [seqs[i] for i in order]
            states = None if states is None else states[order]
        record = partial(self.memory.record, seqs if is_recorded else ())
        submit = partial(self._submit, entries, states)
        return len(entries), sum(wants_logits), submit, record, places

    def _submit(self, entries: Sequence[Entry], states: States | None) -> int:
        """Decode tokens, each in its sequence; return llama.cpp's code."""
        handle, n = self.handle, len(entries)
        tokens, positions, seqs, wants_logits = zip(*entries, strict=True)
        handle.tokens[:n] = tokens
        handle.positions[:n] = positions
        handle.wants_logits[:n] = wants_logits
        handle.seqs[:n] = seqs
        if states is not None:
            handle.states[:n] = states
        return handle.decode(n)

    def _warn_beyond_trained(self) -> None:
        trained, self.n_trained = self.n_trained, END
        scale = trained / self.handle.n_ctx
        warn(
            f"a text gets longer than the {trained} tokens this model was trained for: what follows is "
            "often gibberish. Let it end earlier (max_tokens, a shorter prompt), or stretch the "
            f"positions with RoPE scaling, such as rope_scaling='yarn', rope_freq_scale={scale:.3g}",
            ContextLengthWarning,
        )

    # -- hidden states -----------------------------------------------------------------------------

    def watch_hidden(
        self, layers: Sequence[int], is_read: Callable[[], bool] | None
    ) -> HiddenStates:
        """Keep the hidden states of all tokens from now on, until ``is_read`` is False.

        ``is_read`` None = until a head reads other layers.

        Raises:
            ConfigError: another head reads hidden states. It also raises the errors of ``HiddenStates``.
        """
        self._protect_rows(0)  # the buffer of the logits will move
        before = self.memory.hidden
        if before is not None and before.is_for_head:
            raise ConfigError(
                "another head drafts for this context already", hint="close its context first"
            )
        self.handle.forget_rows()
        hidden = HiddenStates(self.handle, self.memory.cells, layers, is_read)
        if before is not None:
            dropped = [layer for layer in before.layers if layer not in layers]
            heads.extract(self.handle, dropped, False)
        self.memory.hidden = hidden
        return hidden

    def final_states(self, tokens: Sequence[int], seq_id: int) -> States:
        """Decode tokens at the end of a sequence; return the states after the output norm, (n, n_embd).

        Raises:
            CacheFullError, DecodeError: the sequence is as before.
        """
        handle, states = self.handle, list[States]()

        self._protect_rows(0)  # the buffer of the logits will move
        handle.forget_rows()
        heads.extract_embeddings(handle, True)
        try:
            decode_run(
                self, tokens, seq_id, "all",
                lambda _, rows: states.append(heads.embedding_rows(handle, len(rows))),
            )  # fmt: skip
        finally:
            self._live = []
            handle.forget_rows()
            heads.extract_embeddings(handle, False)
        return np.concatenate(states)

    def output_states(self, n: int) -> States:
        """Return a copy of the states of the last decode's ``n`` rows of logits, float32 (n, n_embd_out).

        A head reads them with the next token of its draft.
        """
        rows = heads.extracted_rows(self.handle, self.handle.n_layer, n)
        return rows.copy() if self._places is None else rows[self._places]

    def use_mtp_layer(self, number: int) -> None:
        """Use another MTP layer from the next decode on; 0 = the first, which is the default."""
        staging.functions["set_layer_offset"](self.handle.ptr, number)

    def encode(self, features: States) -> States:
        """Return what a head's encoder computes from ``features``: states, float32 (n, n_embd), a copy.

        MTP layers have no encoder: they read the states as they are.

        Raises:
            DecodeError: llama.cpp cannot compute them; nothing has changed.
        """
        if not self._encoded:
            return features
        handle, most = self.handle, self.most_rows
        self._protect_rows(0)
        handle.forget_rows()
        parts = []
        for low in range(0, len(features), most):
            code, states = heads.encode(handle, features[low : low + most])
            if code == _INTERRUPTED:
                self.stops.note_stopped()
                raise DecodeInterruptedError("the encoding was interrupted", code=code)
            if code:
                raise DecodeError("llama.cpp could not encode the hidden states", code=code)
            parts.append(states)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Batch:
    """Runs of tokens, each at the end of a sequence, decoded in the order in which they were added.

    Args:
        positions: where the tokens of each sequence go; None = to its end. They are for a head that
            reads its target's memory and writes no cells of its own. The memory then does not record
            the tokens, and no cells are freed for them, because compaction would find texts with an
            unknown end.

    Attributes:
        tokens: the tokens of all runs, each with its sequence and whether its row is needed.
        n_rows: how many rows each run gets.
    """

    def __init__(self, positions: Mapping[int, int] | None = None) -> None:
        self.positions = positions
        self.tokens: list[tuple[int, int, bool]] = []
        self.n_rows: list[int] = []

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def add(self, seq_id: int, tokens: Sequence[int], logits: str | int = "last") -> None:
        """Add tokens to the end of ``seq_id``, after any that earlier runs of this batch add to it.

        Args:
            seq_id: the sequence.
            tokens: ids, at least one.
            logits: which rows to return: "all", "last", "none", or a number n for those from the n-th
                token on.
        """
        n = len(tokens)
        if isinstance(logits, str):
            logits = 0 if logits == "all" else n - (logits == "last")
        self.tokens += [(token, seq_id, i >= logits) for i, token in enumerate(tokens)]
        self.n_rows.append(max(0, n - logits))


def decode_run(
    runner: Runner,
    tokens: Sequence[int],
    seq_id: int,
    logits: str,
    read: Read | None = None,
) -> list[LogitsRow]:
    """Decode any number of tokens of one sequence, all or none; return the requested rows."""
    batch = Batch()
    batch.add(seq_id, tokens, logits)
    return runner.decode(batch, read=read)[0]
