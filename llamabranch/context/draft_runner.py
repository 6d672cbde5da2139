"""Drafting in the compiled loop: many decodes in one call, one transaction of the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..native import heads
from ..native.draft_loop import DraftLoop, DraftStream
from .logits import LogitsRow
from .runner import Runner

__all__ = ["DraftInput", "DraftRunner"]

States = npt.NDArray[np.float32]

_UNCHANGED = (0, 1, -1)  # llama_decode's codes after which what is decoded is recorded
_NO_MEMORY = -2


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


class DraftRunner:
    """Drafts for any number of sequences of a context, where the compiled core can.

    Args:
        runner: of the context.
        eog_tokens: ids that end a draft.
    """

    def __init__(self, runner: Runner, eog_tokens: Sequence[int]) -> None:
        self._runner = runner
        self._eog_tokens = eog_tokens
        self._loop: DraftLoop | None = None
        self._most = 0  # tokens of a decode in it; a larger one is made in Python

    def run(
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
        runner, n = self._runner, len(inputs)
        handle, memory = runner.handle, runner.memory
        runner.check_open()
        if not (handle.can_step and memory.can_draft) or memory.hidden is not None:
            return None
        order = memory.arranged([each.stream.seq_id for each in inputs])
        if order is not None:
            found = self.run([inputs[i] for i in order], most, encodes=encodes)
            return None if found is None else [found[order.index(i)] for i in range(n)]
        loop = self._opened()
        n_first = sum(len(each.unread) for each in inputs)
        if not self._fits_loop(inputs, n_first, most, encodes=encodes):
            return None
        expiring = [row for each in inputs for row in each.expiring]
        starts = {each.stream.seq_id: memory.next_position(each.stream.seq_id) for each in inputs}
        codes: list[int] = []

        def submit() -> int:
            features = self._take_states(inputs, n_first, encodes=encodes)
            self._write_unread(inputs, starts)
            streams = [each.stream for each in inputs]
            codes.append(loop.run(streams, n_first, handle.n_watched // n, features))
            return 0  # some of its decodes may have succeeded

        def record() -> bool:
            self._record_draft(inputs, loop.n_decodes)
            if codes[-1] in _UNCHANGED:
                # The last one is counted with its rows.
                runner.n_decodes += max(0, loop.n_decodes - 1)
                return loop.n_decodes > 0
            runner.n_decodes += loop.n_decodes
            runner.undo({seq_id: memory.next_position(seq_id) for seq_id in starts}, expiring)
            if codes[-1] == _NO_MEMORY:
                handle.forget_rows()
            return False

        n_rows = n_first if handle.is_head and n_first else n
        rows = runner.transact(((n, n_rows, submit, record, None),), starts, expiring)
        numbers = [each.stream.output for each in inputs]
        return [rows[i] if rows and i >= 0 else None for i in numbers]

    def _opened(self) -> DraftLoop:
        handle = self._runner.handle
        if self._loop is None:
            if handle.stepper is None:
                raise RuntimeError("the compiled core is not available")
            head = heads.DraftHead.of(handle) if handle.is_head else None
            self._loop = DraftLoop(handle.stepper, handle.n_vocab, self._eog_tokens, head)
            self._most = min(handle.n_watched, handle.n_chunk, handle.n_outputs_max)
        return self._loop

    def _fits_loop(
        self, inputs: Sequence[DraftInput], n_first: int, most: int, *, encodes: bool
    ) -> bool:
        """Return whether the compiled loop can decode what is unread and ``most`` tokens of each."""
        if max(n_first, len(inputs)) >= self._most:
            return False
        encoder = self._runner.encoder
        if encodes and encoder is not None and n_first > encoder.n_max:
            return False
        memory, longest = self._runner.memory, self._runner.n_trained - most
        for stream, unread, _, _ in inputs:
            if memory.next_position(stream.seq_id) + len(unread) > longest:
                return False
            if not memory.prepare(stream.seq_id, len(unread) + most):
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
        encoder = self._runner.encoder
        if encodes and encoder is not None:
            encoder.check(states)
            return np.ascontiguousarray(states)
        self._runner.handle.states[:n_first] = states
        return None

    def _write_unread(self, inputs: Sequence[DraftInput], starts: dict[int, int]) -> None:
        """Write what is unread into the batch, at the ends of the sequences."""
        handle, at = self._runner.handle, 0
        # llama.cpp computes EAGLE-3's logits for every entry and takes the first rows of them: entries
        # without logits may not come before others in a batch of a head.
        wants_all = handle.is_head
        for i, (stream, unread, _, _) in enumerate(inputs):
            seq_id = stream.seq_id
            for position, token in enumerate(unread, starts[seq_id]):
                handle.tokens[at] = token
                handle.positions[at] = position
                handle.seqs[at] = seq_id
                handle.wants_logits[at] = wants_all
                at += 1
            if unread:
                handle.wants_logits[at - 1] = 1
            stream.begin_at(at - 1 if wants_all else i)

    def _record_draft(self, inputs: Sequence[DraftInput], n_decodes: int) -> None:
        """Record the decodes of a draft: the unread tokens, then one of each stream that went on."""
        memory, streams = self._runner.memory, [each.stream for each in inputs]
        if len(inputs) == 1:
            n_read = len(inputs[0].unread) if n_decodes else 0
            memory.append(streams[0].seq_id, streams[0].n_decoded + n_read)
            return
        if n_decodes and inputs[0].unread:
            memory.record([each.stream.seq_id for each in inputs for _ in each.unread])
        for step in range(max(stream.n_decoded for stream in streams)):
            memory.record([stream.seq_id for stream in streams if stream.n_decoded > step])
