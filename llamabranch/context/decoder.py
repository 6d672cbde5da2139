"""Decoding into a shared cache: the one place where tokens go in and logits come out.

Everything here expects valid arguments and a caller that holds the context's lock;
:class:`~llamabranch.context.Context` checks the arguments of users, branches pass only checked ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CacheFullError, ConfigError, DecodeError, DecodeInterruptedError
from ..native import ContextHandle, heads
from ..native.context import DecodeHook
from ..native.draft_loop import DraftLoop, DraftStream
from ..sampling import Sampler
from ..sampling.noise import DRAW
from .hidden_states import HiddenStates
from .kv_cache import END, KVCache
from .logits import LogitsRow
from .params import warn_of_length
from .thread_watch import ThreadWatch

__all__ = ["DecodeHook", "Decoder", "DraftInput"]

States = npt.NDArray[np.float32]


class DraftInput(NamedTuple):
    """What one stream brings into the compiled loop.

    Attributes:
        stream: what to draw; it begins at the end of its sequence.
        unread: tokens that are decoded first.
        expiring: the rows of its sequence.
        states: of a head: what goes in with ``unread``, float32 (tokens, width).
    """

    stream: DraftStream
    unread: Sequence[int]
    expiring: Sequence[LogitsRow] = ()
    states: States | None = None


_INTERRUPTED = 2
_LONG = 32  # tokens from which a decode tells how long reading takes
_WATCHED = ThreadWatch.EVERY - 1


class Decoder:
    """Decodes batches, updates the cache, and copies rows of logits before they are overwritten.

    Args:
        handle: the native context.
        cache: where the tokens are written.
        reclaim: called with a number of tokens when the cache has no room for them: it frees cells
            that are reserved, or that only the prefix cache uses, and returns whether it freed any.
            Default: the reserved ones are released, and the order of cells is lost.
        n_trained: positions the model was trained for, beyond which it warns; None to never warn.
        watch: times every eighth decode where several threads compute; None to time none.
        eog_tokens: ids that end a draft.
        encoder: of a head that does not read hidden states as they are: what they go through.
    """

    def __init__(
        self,
        handle: ContextHandle,
        cache: KVCache,
        reclaim: Callable[[int], bool] | None = None,
        n_trained: int | None = None,
        watch: ThreadWatch | None = None,
        eog_tokens: Sequence[int] = (),
        encoder: heads.Encoder | None = None,
    ) -> None:
        self.handle = handle
        self.n_decodes = 0
        self.read_s = math.nan  # seconds for each token of a long chunk, smoothed
        self.cache = cache
        self._reclaim = reclaim
        # No sequence can exceed it where the cells end before.
        self._n_trained = END if n_trained is None or handle.n_ctx_seq <= n_trained else n_trained
        self.watch = watch
        self._live: list[LogitsRow] = []
        self._places: list[int] | None = None  # of the last rows in llama.cpp's order, if another
        self._eog_tokens = eog_tokens
        self._encoder = encoder
        self._loop: DraftLoop | None = None
        self._most_loop = 0  # tokens of a decode in it; a larger one is made in Python

    @property
    def n_chunk(self) -> int:
        """The most tokens of a decode that can be interrupted."""
        return self.handle.n_chunk

    def hook(self, around: DecodeHook | None) -> DecodeHook | None:
        """Let ``around`` call each decode from now on (see ``ContextHandle``); return the one before."""
        before, self.handle.around = self.handle.around, around
        return before

    @property
    def most_hidden(self) -> int:
        """The most numbers that the hidden states of one token can have, of all layers together."""
        handle = self.handle
        return handle.n_layer * handle.n_embd + handle.n_embd_out

    def check_open(self) -> None:
        """Raise ClosedError if the context is closed."""
        self.handle.ptr  # noqa: B018

    def close(self) -> None:
        """Copy the rows that are still needed, then free the native context."""
        self._protect_rows(0, ())
        self.handle.close()

    def _protect_rows(self, n_outputs: int, expiring: Iterable[LogitsRow]) -> None:
        """Copy the rows that are still needed before the next decode overwrites the buffer."""
        hidden = self.cache.hidden
        if hidden is not None and not hidden.is_read():
            self.cache.hidden = None
            hidden.turn(on=False)
        live = self._live
        if not live:
            return
        if n_outputs > self.handle.row_capacity:
            expiring = ()  # the buffer is reallocated: every old row becomes invalid
        for row in live:
            if row.users and row.users > [r is row for r in expiring].count(True):
                row.detach()
        self._live = []

    def advance(
        self,
        seq_id: int,
        token: int,
        expiring: LogitsRow | None,
        sampler: Sampler | None = None,
        seed: int = 0,
    ) -> LogitsRow:
        """Decode one token at the end of ``seq_id``; return its row. The hot path.

        ``sampler`` and ``seed``: the next token will be drawn with these. Where the compiled core has
        the settings, it is drawn in the same native call, and the row remembers it.
        """
        handle = self.handle
        handle.ptr  # noqa: B018  (raises ClosedError)
        position = self.cache.next_position(seq_id)
        if position >= self._n_trained:
            self._warn_beyond_trained()
        self._protect_rows(1, () if expiring is None else (expiring,))
        compiled, measured = None, True
        if sampler is not None and handle.can_step and self.n_decodes & _WATCHED:
            compiled, measured = sampler.row_sampler, sampler.params.logprobs
        try:
            if compiled is not None:
                code = handle.step(token, position, seq_id, compiled, seed, DRAW, measured)
            else:
                handle.tokens[0] = token
                handle.positions[0] = position
                handle.seqs[0] = seq_id
                handle.wants_logits[0] = 1
                code = handle.decode(1) if self.n_decodes & _WATCHED else self._watched(1)
            if code == 1 and self._make_room(1, () if expiring is None else (expiring,)):
                return self.advance(seq_id, token, expiring, sampler, seed)
            if code == 0:
                self.cache.append(seq_id, 1)
                self.n_decodes += 1
                if self.cache.hidden is not None:
                    self.cache.hidden.record(self.cache.ledger.clock - 1, 1)
                row = LogitsRow(handle.rows(1)[0], handle.rows_address or 0)
                if compiled is not None:
                    row.note_step(compiled, seed, measured)
                self._live = [row]
                if expiring is not None:
                    expiring.invalidate()
                return row
        except BaseException:  # Ctrl-C arrives when the call returns
            handle.resume()  # it may have been interrupted too
            self._undo({seq_id: position}, () if expiring is None else (expiring,))
            raise
        raise self._failure(code, {seq_id: position}, 1, () if expiring is None else (expiring,))

    def decode(
        self,
        tokens: Sequence[int],
        seqs: Sequence[int],
        wants_logits: Sequence[bool],
        expiring: Iterable[LogitsRow] = (),
        states: States | None = None,
    ) -> list[LogitsRow]:
        """Decode at most n_batch tokens, each at the end of its sequence; return the rows wanted.

        ``states``: what a head reads with each token, float32 (n, n_embd).
        """
        handle = self.handle
        handle.ptr  # noqa: B018  (raises ClosedError)
        n = len(tokens)
        ends: dict[int, int] = {}
        positions = []
        for seq_id in seqs:
            at = ends.get(seq_id)
            if at is None:
                at = self.cache.next_position(seq_id)
            positions.append(at)
            ends[seq_id] = at + 1
        if max(ends.values()) > self._n_trained:
            self._warn_beyond_trained()
        order: list[int] | None = None
        if not handle.kv_unified and len(ends) > 1:
            # llama.cpp computes sequences with own cells at once only in the order of their ids.
            order = sorted(range(n), key=seqs.__getitem__)
            tokens = [tokens[i] for i in order]
            positions = [positions[i] for i in order]
            seqs = [seqs[i] for i in order]
            wants_logits = [wants_logits[i] for i in order]
            states = None if states is None else states[order]
        n_outputs = sum(wants_logits)
        self._protect_rows(n_outputs, expiring)
        handle.tokens[:n] = tokens
        handle.positions[:n] = positions
        handle.seqs[:n] = seqs
        handle.wants_logits[:n] = wants_logits
        if states is not None:
            handle.states[:n] = states
        starts = {seq_id: self.cache.next_position(seq_id) for seq_id in ends}
        try:
            code = handle.decode(n) if n < _LONG and self.n_decodes & _WATCHED else self._watched(n)
            if code == 1 and self._make_room(n, expiring):
                return self.decode(tokens, seqs, wants_logits, expiring, states)
            if code == 0:
                self.cache.record(seqs)
                if self.cache.hidden is not None:
                    self.cache.hidden.record(self.cache.ledger.clock - n, n)
                rows = self._read(n_outputs)
                for row in expiring:
                    row.invalidate()
                if order is None:
                    return rows
                wanted = [i for i, wants in zip(order, wants_logits, strict=True) if wants]
                self._places = [wanted.index(i) for i in sorted(wanted)]
                return [rows[place] for place in self._places]
        except BaseException:  # Ctrl-C arrives when the call returns
            handle.resume()  # it may have been interrupted too
            self._undo(starts, expiring)
            raise
        raise self._failure(code, starts, n, expiring)

    def draft(
        self, inputs: Sequence[DraftInput], most: int, *, encodes: bool = False
    ) -> list[LogitsRow | None] | None:
        """Decode what is unread and draft after it, with one decode for each position of all streams.

        Args:
            inputs: of each stream; all of them have something unread, or none, and their rows then.
            most: tokens that a stream draws at most.
            encodes: of a head: whether its encoder makes the states of those that are given.

        Returns:
            for each stream the row after its last decoded token, None if a later decode has overwritten
            it. What was decoded is recorded; a decode that failed is undone, and ends the draft: the
            caller repeats it to learn why. None if the compiled loop cannot take these streams.
        """
        handle, cache, n = self.handle, self.cache, len(inputs)
        handle.ptr  # noqa: B018  (raises ClosedError)
        if not handle.can_step or handle.stepper is None or cache.hidden is not None:
            return None
        order = sorted(range(n), key=lambda i: inputs[i].stream.seq_id)
        if not handle.kv_unified and order != list(range(n)):  # as in ``decode``
            found = self.draft([inputs[i] for i in order], most, encodes=encodes)
            return None if found is None else [found[order.index(i)] for i in range(n)]
        if self._loop is None:
            head = heads.DraftHead.of(handle) if handle.is_head else None
            self._loop = DraftLoop(handle.stepper, handle.n_vocab, self._eog_tokens, head)
            self._most_loop = min(handle.n_watched, handle.n_chunk, handle.n_outputs_max)
        n_first = sum(len(each.unread) for each in inputs)
        if not self._fits_loop(inputs, n_first, most, encodes=encodes):
            return None
        features = self._take_states(inputs, n_first, encodes=encodes)
        expiring = [row for each in inputs for row in each.expiring]
        n_outputs = n_first if handle.is_head and n_first else n
        self._protect_rows(n_outputs, expiring)
        starts = self._write_unread(inputs)
        timed = self.watch if n_first in (0, n) and features is None else None
        start_s, start_cpu = (perf_counter(), process_time()) if timed else (0.0, 0.0)
        try:
            code = self._loop.run(
                [each.stream for each in inputs], n_first, handle.n_watched // n, features
            )
            n_decodes = self._loop.n_decodes
            if timed and code == 0 and (self.n_decodes & _WATCHED) + n_decodes > _WATCHED:
                spent = perf_counter() - start_s, process_time() - start_cpu
                timed.note_loop(n, n_decodes, *spent)
            self._record_draft(inputs, n_decodes)
        except BaseException:  # Ctrl-C arrives when the call returns
            self._undo(starts, expiring)
            raise
        self.n_decodes += n_decodes
        self._places = None
        if code not in (0, 1, -1):
            self._undo({seq_id: cache.next_position(seq_id) for seq_id in starts}, expiring)
            if code == -2:
                handle.forget_rows()
            return [None] * n
        if not n_decodes:
            self._live = [row for row in expiring if row.users > 0]
            return [None] * n
        for row in expiring:
            row.invalidate()
        found = self._rows_of([each.stream.output for each in inputs], n_outputs)
        self._live = [row for row in found if row is not None]
        return found

    def _fits_loop(
        self, inputs: Sequence[DraftInput], n_first: int, most: int, *, encodes: bool
    ) -> bool:
        """Return whether the compiled loop can decode what is unread and ``most`` tokens of each."""
        if max(n_first, len(inputs)) >= self._most_loop:
            return False
        if encodes and self._encoder is not None and n_first > self._encoder.n_max:
            return False
        cache, longest = self.cache, self._n_trained - most
        for stream, unread, _, _ in inputs:
            if cache.next_position(stream.seq_id) + len(unread) > longest:
                return False
            if not cache.hold_window(stream.seq_id, len(unread) + most):
                return False
        return True

    def _take_states(
        self, inputs: Sequence[DraftInput], n_first: int, *, encodes: bool
    ) -> States | None:
        """Write what a head reads with what is unread; return it if it must be encoded first."""
        given = [each.states for each in inputs if each.states is not None]
        if not n_first or not given:
            return None
        states = given[0] if len(given) == 1 else np.concatenate(given)
        if encodes and self._encoder is not None:
            self._encoder.check(states)
            return np.ascontiguousarray(states)
        self.handle.states[:n_first] = states
        return None

    def _write_unread(self, inputs: Sequence[DraftInput]) -> dict[int, int]:
        """Write what is unread into the batch; return where the sequences end."""
        handle, at = self.handle, 0
        # llama.cpp computes EAGLE-3's logits for every entry and takes the first rows of them: entries
        # without logits may not come before others in a batch of a head.
        wants_all = handle.is_head
        starts: dict[int, int] = {}
        for i, (stream, unread, _, _) in enumerate(inputs):
            seq_id = stream.seq_id
            starts[seq_id] = self.cache.next_position(seq_id)
            for position, token in enumerate(unread, starts[seq_id]):
                handle.tokens[at] = token
                handle.positions[at] = position
                handle.seqs[at] = seq_id
                handle.wants_logits[at] = wants_all
                at += 1
            if unread:
                handle.wants_logits[at - 1] = 1
            stream.begin_at(at - 1 if wants_all else i)
        return starts

    def _rows_of(self, numbers: Sequence[int], n_outputs: int) -> list[LogitsRow | None]:
        """Return the rows of these numbers, None for -1, of a decode that had ``n_outputs`` at first."""
        arrays = self.handle.rows(n_outputs)
        at, size = self.handle.rows_address or 0, 4 * self.handle.n_vocab
        return [LogitsRow(arrays[i], at + i * size) if i >= 0 else None for i in numbers]

    def _record_draft(self, inputs: Sequence[DraftInput], n_decodes: int) -> None:
        """Record the decodes of a draft: the unread tokens, then one of each stream that went on."""
        cache, streams = self.cache, [each.stream for each in inputs]
        if len(inputs) == 1:
            n_read = len(inputs[0].unread) if n_decodes else 0
            cache.append(streams[0].seq_id, streams[0].n_decoded + n_read)
            return
        if n_decodes and inputs[0].unread:
            cache.record([each.stream.seq_id for each in inputs for _ in each.unread])
        for step in range(max(stream.n_decoded for stream in streams)):
            cache.record([stream.seq_id for stream in streams if stream.n_decoded > step])

    def _warn_beyond_trained(self) -> None:
        trained, self._n_trained = self._n_trained, END
        warn_of_length("a sequence gets", trained, self.handle.n_ctx)

    def _watched(self, n: int) -> int:
        """Decode the first ``n`` entries of the arrays, timed; return llama.cpp's code."""
        watch = self.watch
        if n < _LONG:
            return self.handle.decode(n) if watch is None else watch.decode(n)
        begun = perf_counter()
        code = self.handle.decode(n)
        if code == 0:
            took, known = (perf_counter() - begun) / n, self.read_s
            self.read_s = took if known != known else 0.9 * known + 0.1 * took
        return code

    def _read(self, n_outputs: int) -> list[LogitsRow]:
        """Return the rows of the decode that has just succeeded, as llama.cpp has them."""
        self.n_decodes += 1
        self._places = None
        if n_outputs == 0:
            return []
        arrays = self.handle.rows(n_outputs)[:n_outputs]
        at, size = self.handle.rows_address or 0, 4 * self.handle.n_vocab
        rows = [LogitsRow(array, at + i * size) for i, array in enumerate(arrays)]
        self._live = list(rows)
        return rows

    def _make_room(self, n: int, expiring: Iterable[LogitsRow]) -> bool:
        """Free cells for ``n`` tokens, if any can be freed; True if the decode may be tried again."""
        if not self.handle.kv_unified:  # others cannot give cells to a sequence
            return False
        if not self.cache.n_reserved and not self.cache.prefix_seq_ids:
            return False
        for row in expiring:
            row.detach()
        return self.cache.release_reserved() if self._reclaim is None else self._reclaim(n)

    def decode_tree(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        members: Sequence[Sequence[int]],
        wants_logits: Sequence[bool] | None = None,
    ) -> list[LogitsRow]:
        """Decode tokens that belong to several sequences each; return the rows wanted, by default all.

        The cache's ledger does not record them: ``KVCache.adopt`` the accepted path, then drop the other
        sequences.
        """
        handle = self.handle
        handle.ptr  # noqa: B018  (raises ClosedError)
        n = len(tokens)
        wants_logits = [True] * n if wants_logits is None else wants_logits
        n_outputs = sum(wants_logits)
        if max(positions) >= self._n_trained:
            self._warn_beyond_trained()
        self._protect_rows(n_outputs, ())
        handle.tokens[:n] = tokens
        handle.positions[:n] = positions
        handle.wants_logits[:n] = wants_logits
        starts = {seq: self.cache.next_position(seq) for group in members for seq in group}
        try:
            code = handle.decode_tree(n, members)
            if code == 0:
                if self.cache.hidden is not None:
                    # ``KVCache.adopt`` counts on from the same index
                    self.cache.hidden.record(self.cache.ledger.clock, n)
                return self._read(n_outputs)
        except BaseException:
            self._undo(starts, ())
            raise
        raise self._failure(code, starts, n, ())

    def _failure(
        self, code: int, starts: dict[int, int], n: int, expiring: Iterable[LogitsRow]
    ) -> DecodeError | CacheFullError:
        """Put the memory back as it was before the batch; return what llama.cpp's ``code`` means."""
        if code in (1, -1):  # nothing has changed: the rows that were to expire are still valid
            self._live = [row for row in expiring if row.users > 0]
            if code == -1:
                return DecodeError("llama.cpp refused the batch as inconsistent", code=code)
            usage = self.cache.usage()
            if usage.cells_per_sequence is not None:
                return CacheFullError(
                    f"a sequence is full: each has {usage.cells_per_sequence} cells of its own",
                    hint="create the context with a larger n_ctx, which is divided among the sequences",
                )
            return CacheFullError(
                f"the cache is full: {n} tokens need cells, {usage.cells_free} of "
                f"{usage.cells_total} are free ({usage.cells_shared} shared)",
                hint="prune branches, or create the context with a larger n_ctx",
            )
        if code == _INTERRUPTED:
            self.handle.resume()
        elif code == -2:
            self.handle.forget_rows()
        emptied = self._undo(starts, expiring)
        state = "the sequences of the batch are as before"
        if emptied:
            state = f"this memory cannot drop a tail: sequences {emptied} are now empty"
        if code == _INTERRUPTED:
            return DecodeInterruptedError(
                f"the decode was interrupted; {state}", code=code, memory_changed=True
            )
        reason = "llama.cpp could not " + ("allocate memory" if code == -2 else "compute the batch")
        return DecodeError(f"{reason} (code {code}); {state}", code=code, memory_changed=True)

    def _undo(self, starts: dict[int, int], expiring: Iterable[LogitsRow]) -> list[int]:
        """Truncate every sequence of a failed batch to its start; return those that had to be emptied."""
        emptied = [seq_id for seq_id, start in starts.items() if not self.cache.cut(seq_id, start)]
        for row in expiring:
            row.invalidate()
        return emptied

    def watch_hidden(
        self, layers: Sequence[int], is_read: Callable[[], bool] | None
    ) -> HiddenStates:
        """Keep the hidden states of all tokens from now on, until ``is_read`` is False.

        None: until a head reads others.

        Raises:
            ConfigError: another head reads them. And as ``HiddenStates``, which raises UnsupportedError.
        """
        self._protect_rows(0, ())  # the buffer of the logits will move
        before = self.cache.hidden
        if before is not None and before.is_for_head:
            raise ConfigError(
                "another head drafts for this context already", hint="close its context first"
            )
        self.handle.forget_rows()
        if before is not None:
            before.turn(on=False)
            self.cache.hidden = None
        try:
            self.cache.hidden = HiddenStates(self.handle, self.cache.ledger, layers, is_read)
        except BaseException:
            if before is not None:
                before.turn(on=True)
                self.cache.hidden = before
            raise
        return self.cache.hidden

    def final_states(self, tokens: Sequence[int], seq_id: int) -> States:
        """Decode tokens at the end of a sequence; return the states after the output norm, (n, n_embd).

        Raises:
            CacheFullError, DecodeError: those before are decoded; cut the sequence.
        """
        handle, found = self.handle, []
        most = min(handle.n_chunk, handle.n_outputs_max)
        self._protect_rows(0, ())  # the buffer of the logits will move
        handle.forget_rows()
        heads.extract_embeddings(handle, True)
        try:
            for low in range(0, len(tokens), most):
                part = tokens[low : low + most]
                self.decode(part, [seq_id] * len(part), [True] * len(part))
                found.append(heads.embedding_rows(handle, len(part)))
        finally:
            self._live = []
            handle.forget_rows()
            heads.extract_embeddings(handle, False)
        return np.concatenate(found)

    def output_states(self, n: int) -> States:
        """Return the states of the last decode's ``n`` rows of logits, float32 (n, n_embd_out), a copy.

        For a head, which reads them with the next token of its draft.
        """
        rows = heads.nextn_rows(self.handle, n)
        return rows.copy() if self._places is None else rows[self._places]

    def decode_beside(
        self, tokens: Sequence[int], seqs: Sequence[int], positions: Sequence[int], states: States
    ) -> list[LogitsRow]:
        """Decode a token for each of the target's sequences, of which nothing is kept; return their rows.

        For a head without memory of its own. Hold the target's lock.

        Args:
            tokens: at most n_seq_max.
            seqs: sequences of the target.
            positions: the next ones of these sequences.
            states: what the head reads with each token, float32 (n, n_embd_out).

        Raises:
            CacheFullError: llama.cpp wants a free cell for each token, although it writes none.
        """
        handle, n = self.handle, len(tokens)
        handle.ptr  # noqa: B018  (raises ClosedError)
        self._protect_rows(n, ())
        handle.tokens[:n] = tokens
        handle.positions[:n] = positions
        handle.seqs[:n] = seqs
        handle.wants_logits[:n] = 1
        handle.states[:n] = states
        code = handle.decode(n)
        if code == 0:
            return self._read(n)
        if code == 1:
            raise CacheFullError("the target's cache is full: a draft needs a free cell in it")
        raise self._failure(code, {}, n, ())

    def use_mtp_layer(self, number: int) -> None:
        """Compute with another MTP layer from the next decode on; 0 = the first, which is the default."""
        heads.use_mtp_layer(self.handle, number)

    def encode(self, features: States) -> States:
        """Return the states that a head's encoder makes of ``features``, float32 (n, n_embd), a copy.

        MTP layers have none: they read the states as they are.

        Raises:
            DecodeError: llama.cpp cannot compute them; nothing has changed.
        """
        encoder = self._encoder
        if encoder is None:
            return features
        self._protect_rows(0, ())
        self.handle.forget_rows()
        parts = []
        for low in range(0, len(features), encoder.n_max):
            code, states = encoder.encode(features[low : low + encoder.n_max])
            if code == _INTERRUPTED:
                self.handle.resume()
                raise DecodeInterruptedError("the encoding was interrupted", code=code)
            if code:
                raise DecodeError("llama.cpp could not encode the hidden states", code=code)
            parts.append(states)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def make_room(self, n: int) -> None:
        """Free reserved and cached cells if ``n`` cells would not be free otherwise."""
        cache = self.cache
        if (cache.n_reserved or cache.prefix_seq_ids) and cache.n_vacant < n:
            self._make_room(n, ())
