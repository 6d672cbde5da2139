"""The inside of a branch: its sequence, tokens, sampler and logits, kept in step with the memory.

:class:`~llamabranch.branch.Branch` is what users see; the speculative round works on this floor. Nothing
here checks what it is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .context import Context
from .distribution import Distribution
from .errors import BranchStateError
from .rows import LogitsRow
from .sampling import Sampler

__all__ = ["Judge", "Line", "Produced"]


@dataclass(frozen=True)
class Produced:
    """A token that a branch would say next.

    ``text`` is what it completes (a character split over several tokens comes with its last),
    ``is_stop`` whether it ends the generation. ``logprob`` and ``entropy`` (nats) are those of the
    model's own distribution, before any sampling setting.
    """

    token: int
    text: str
    is_stop: bool
    logprob: float
    entropy: float


class Judge:
    """The target's distributions along a line of drafted tokens, made one after another.

    ``distribution(i)`` follows the first i + 1 of ``tokens``; asking for it means that these stand, so
    the sampler accepts them, in a copy where it has a state.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokens: Sequence[int],
        rows: Sequence[LogitsRow],
        position: int,
        seed: int,
    ) -> None:
        self._samplers = [sampler]
        self._tokens = tokens
        self._rows = rows
        self._position = position
        self._seed = seed

    def sampler(self, i: int) -> Sampler:
        """Return the sampler that has accepted the first i + 1 tokens."""
        first = self._samplers[0]
        if first.is_stateless:
            return first
        while len(self._samplers) < i + 2:
            twin = self._samplers[-1].clone()
            twin.accept(self._tokens[len(self._samplers) - 1])
            self._samplers.append(twin)
        return self._samplers[i + 1]

    def distribution(self, i: int) -> Distribution:
        """Return what is drawn from after the first i + 1 tokens."""
        return self.sampler(i).distribution(self._rows[i].array, self._position + i, self._seed)


class Line:
    """A leased sequence and what is known of it."""

    def __init__(self, ctx: Context, sampler: Sampler, seed: int, source: Line | None) -> None:
        """Lease a sequence; with ``source`` start as its copy, sharing its cells."""
        self._ctx = ctx
        self._decoder = ctx.decoder
        self._lock = ctx.lock
        self._sampler = sampler
        self._seed = seed
        self._tokens: list[int] = []
        self._n_prompt = 0
        self._surprisals: list[float] = []
        self._pending = b""  # bytes of a UTF-8 character that is not complete
        self._row: LogitsRow | None = None
        self._produced: Produced | None = None
        self._finish_reason: str | None = None
        self._pruned = False
        self._parent: Line | None = source
        self._seq_id = ctx.lease(self)
        if source is not None:
            self._tokens += source._tokens
            self._n_prompt = source._n_prompt
            self._surprisals += source._surprisals
            self._pending = source._pending
            if source._tokens:
                self._decoder.share(source._seq_id, self._seq_id)
            self._set_row(source._row)
            self._produced = source._produced

    @property
    def position(self) -> int:
        """Number of tokens: where the next one goes."""
        return len(self._tokens)

    def _check(self) -> None:
        if self._pruned:
            raise BranchStateError("the branch is pruned")
        self._decoder.handle.ptr  # noqa: B018  (raises ClosedError)

    def _need_row(self) -> LogitsRow:
        """Return the logits after the last token, computing them again if they are not at hand."""
        self._check()
        row = self._row
        if row is not None and not row.lost:
            return row
        if not self._tokens:
            raise BranchStateError("the branch is empty: it has no logits", hint="prefill it first")
        tokens = self._tokens
        self._truncate(len(tokens) - 1)
        self._set_row(self._decoder.decode_run(tokens[-1:], self._seq_id, "last")[0])
        return self._row  # type: ignore[return-value]

    def _set_row(self, row: LogitsRow | None) -> None:
        if row is not None:
            row.users += 1
        if self._row is not None:
            self._row.users -= 1
        self._row = row
        self._produced = None

    def _given_up(self) -> tuple[LogitsRow, ...]:
        return () if self._row is None else (self._row,)

    def _append(self, token: int, surprisal: float) -> str:
        self._tokens.append(token)
        self._surprisals.append(surprisal)
        text, self._pending = self._ctx.model.text_after(token, self._pending)
        self._finish_reason = None
        return text

    def _truncate(self, position: int) -> None:
        """Make the memory hold exactly the first ``position`` tokens."""
        if self._ctx.capabilities.can_truncate and self._decoder.drop(self._seq_id, position):
            return
        parent = self._parent
        self._decoder.drop(self._seq_id, 0)
        done = 0
        if (
            parent is not None
            and not parent._pruned
            and parent.position <= position
            and parent._tokens == self._tokens[: parent.position]
        ):
            self._decoder.share(parent._seq_id, self._seq_id)
            done = parent.position
        if done < position:
            self._decoder.decode_run(self._tokens[done:position], self._seq_id, "none")

    def _pending_bytes(self) -> bytes:
        pending = b""
        # A UTF-8 character has at most four bytes: no more tokens than that can hold its start.
        for token in self._tokens[max(self._n_prompt, len(self._tokens) - 4) :]:
            pending = self._ctx.model.text_after(token, pending)[1]
        return pending

    def verify(self, tokens: Sequence[int]) -> list[LogitsRow]:
        """Decode ``tokens`` after this branch's end and return a row for each, valid until ``settle``.

        Only the memory moves; ``settle`` must follow, and says how many of them stay.

        Raises:
            CacheFullError, DecodeError: the branch is as before.
        """
        with self._lock:
            self._check()
            return self._decoder.decode_run(tokens, self._seq_id, "all")

    def judge(self, tokens: Sequence[int], rows: Sequence[LogitsRow]) -> Judge:
        """Return what this branch's sampler makes of ``rows``, token by token."""
        return Judge(self._sampler, tokens, rows, len(self._tokens) + 1, self._seed)

    def settle(self, kept: Sequence[int], rows: Sequence[LogitsRow], sampler: Sampler) -> list[str]:
        """Take the first ``len(kept)`` of the verified tokens and drop the others from memory.

        ``rows`` are theirs; ``sampler`` has accepted them. Returns what text each completed.
        """
        with self._lock:
            row = self._row
            end = len(self._tokens) + len(kept)
            texts = []
            for token, after in zip(kept, rows, strict=False):
                texts.append(self._append(token, math.nan if row is None else -row.logprob(token)))
                row = after
            self._sampler = sampler
            if self._decoder.cells.next_position(self._seq_id) > end:
                self._truncate(end)
            self._set_row(row)
            return texts

    def describe(self, token: int, row: LogitsRow) -> Produced:
        """Return ``token`` as what comes next, with what ``row`` says of it."""
        model = self._ctx.model
        is_stop = model.is_end(token)
        text = "" if is_stop else model.text_after(token, self._pending)[0]
        return Produced(token, text, is_stop, row.logprob(token), row.entropy())

    def follow(self, tokens: Sequence[int]) -> None:
        """Take ``tokens`` as the next ones, whatever they are, in as few decodes as possible.

        For drafters, which follow another line: no surprisal is computed for them.
        """
        if not tokens:
            return
        with self._lock:
            self._check()
            row = self._decoder.decode_run(tokens, self._seq_id, "last", self._given_up())[-1]
            sampler = self._sampler
            for token in tokens:
                if not sampler.is_stateless:
                    sampler.accept(token)
                self._append(token, math.nan)
            self._set_row(row)
