"""One step of any number of streams of a context: draft, one decode for all of them, accept.

A `Speculator` and a session run one stream, the engine and the sampled searches many; all of them run
them here. A step may read texts besides, such as prompts, as far as there is room in its decode. Who gets
a sequence and who gives way are the caller's decisions: a step for which the cache has no room has
changed nothing, and its result says so.

Two threads may each generate on the context that the other one drafts with. So what needs the target's
lock (decode, accept) and what may need the drafter's (draft, conclude) never overlap: no thread waits
for one lock while it holds the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from ..branch import Branch, Produced
from ..branch.sequence import TokenSequence
from ..context import Context
from ..context.logits import LogitsRow
from ..context.runner import Batch
from ..errors import CacheFullError, CapacityError, LlamaBranchError
from .drafters.base import NO_DRAFT, Drafter, DraftRequest, DraftState, NullState
from .length.auto import AutoLength
from .length.base import DraftLength
from .round import Stream
from .rules import Rule, rule_name
from .stats import SpeculativeStats

__all__ = ["Joint", "Outcome", "Reader", "Step"]


class Reader(Protocol):
    """A text that steps read into a sequence, in as many steps as it takes."""

    @property
    def sequence(self) -> TokenSequence:
        """The sequence that it is read into."""

    @property
    def wants_rows(self) -> bool:
        """Whether the logits after each token are wanted, or only after the last one of the text."""

    def unread(self) -> list[int]:
        """Return the tokens that are still to be read, at least one."""

    def read(self, tokens: Sequence[int], rows: Sequence[LogitsRow]) -> None:
        """Append decoded tokens, with the logits that are wanted. The context's lock is held."""


@dataclass(slots=True, eq=False)
class Outcome:
    """What a step has brought one stream or reader.

    Attributes:
        n_tokens: its tokens in the decode: the pending one and the draft, or those that were read.
        emitted: the tokens that the stream emits.
        error: why it cannot go on; full cells of its own, too.
    """

    n_tokens: int = 0
    emitted: list[Produced] = field(default_factory=list)
    error: LlamaBranchError | None = None


class Step:
    """What a step has done.

    Attributes:
        outcomes: of the streams, then of the readers, in their order.
        n_tokens: of the decode, rows that nobody reads among them; 0 if there was none.
        n_draft_decodes: of the drafter.
        verify_s: seconds of the decode.
        no_room: the cache has no room for the step: somebody must give way. Nothing has changed.
    """

    def __init__(self, n: int) -> None:
        self.outcomes = [Outcome() for _ in range(n)]
        self.n_tokens = 0
        self.n_draft_decodes = 0
        self.verify_s = math.nan
        self.no_room: CacheFullError | None = None


class Joint:
    """Runs streams of one context together.

    Args:
        ctx: the context that generates.
        length: how long drafts are; it learns from the steps.
        drafter: drafts for all streams; None = none drafts.

    Attributes:
        curve: the times of the decodes, where the length learns them.
    """

    def __init__(self, ctx: Context, length: DraftLength, drafter: Drafter | None = None) -> None:
        self._ctx = ctx
        self.use(length, drafter)

    def use(self, length: DraftLength, drafter: Drafter | None) -> None:
        """Draft with another drafter from the next step on, as far as ``length`` says."""
        self.length = length
        self.drafter = drafter
        self.curve = length.curve if isinstance(length, AutoLength) else None

    def open(
        self,
        branch: Branch,
        rule: Rule,
        stats: SpeculativeStats,
        n_alternatives: int = 0,
        *,
        drafts: bool = True,
        like: DraftState | None = None,
    ) -> Stream:
        """Return a stream that continues ``branch`` beside others.

        Args:
            branch: has read its prompt.
            rule, stats, n_alternatives: see `Stream`.
            drafts: whether it is drafted for. Where the drafter has no room for it, it is not.
            like: the draft state of a text that begins like this one: the drafter then need not read
                those tokens again.
        """
        state: DraftState = NullState()
        if drafts and self.drafter is not None:
            with suppress(CapacityError):
                if like is None:
                    state = self.drafter.start(branch, rule_name(rule))
                else:
                    state = like.fork(branch)
        length = self.length.stream(shares_decode=True)
        return Stream(branch, state, length, rule, stats, n_alternatives)

    def round(self, stream: Stream, limit: int) -> list[Produced]:
        """Run a step of one stream by itself; return what it emits, at most ``limit`` + 1 tokens."""
        if stream.pending is None:
            return [stream.begin()]
        if self.drafter is None or stream.skips_draft():
            with self._ctx.lock:
                start = perf_counter()
                rows = stream.decode()
                emitted = stream.accept(rows, perf_counter() - start)
            stream.conclude()
            return emitted
        step = self._run([(stream, limit)], ())
        outcome = step.outcomes[0]
        error = step.no_room or outcome.error
        if error is not None:
            raise error
        return outcome.emitted

    def run(self, streams: Sequence[tuple[Stream, int]], readers: Sequence[Reader] = ()) -> Step:
        """Run a step of all streams, and read what there is room for.

        Args:
            streams: each with the most tokens that may be drafted for it.
            readers: texts that are read besides.

        Raises:
            DecodeError: the decode failed or was interrupted; all are as before. And what the drafter
                raises.
        """
        step = self._run(streams, readers)
        if not step.n_tokens:
            return step
        if self.drafter is not None:
            # The time of a decode that also read texts is not comparable.
            verify_s = math.nan if readers else step.verify_s
            lengths = [stream.length for stream, _ in streams]
            self.length.learn_decode(lengths, step.n_tokens, verify_s)
        elif self.curve is not None and not readers:
            self.curve.learn(step.n_tokens, step.verify_s)
        return step

    def _run(self, streams: Sequence[tuple[Stream, int]], readers: Sequence[Reader]) -> Step:
        step = Step(len(streams) + len(readers))
        every = [stream for stream, _ in streams]
        try:
            step.n_draft_decodes = self._draft(streams, len(readers))
            try:
                self._decode(step, every, readers)
            except CapacityError:
                if not any(stream.n_drafted for stream in every):
                    raise
                for stream in every:
                    if stream.n_drafted:
                        stream.stats.count_stop("no room to verify")
                    stream.drop_draft()
                self._decode(step, every, readers)
        except LlamaBranchError as error:
            for stream in every:
                stream.drop_draft()
            if not isinstance(error, CacheFullError):
                raise
            self._note_full(step, every, error)
            return step
        except BaseException:
            for stream in every:
                stream.abandon()
            raise
        for stream, outcome in zip(every, step.outcomes, strict=False):
            if outcome.error is None:
                try:
                    stream.conclude()
                except LlamaBranchError as error:
                    outcome.error = error
        return step

    def _draft(self, streams: Sequence[tuple[Stream, int]], n_readers: int) -> int:
        """Give each stream a draft that fits into the decode; return how often the drafter decoded."""
        ctx, drafter = self._ctx, self.drafter
        if drafter is None:
            return 0
        asked: list[Stream] = []
        requests: list[DraftRequest] = []
        for stream, limit in streams:
            limit = ctx.kv_cache.room(stream.branch.seq_id, limit + 1) - 1
            request = stream.request(limit)
            if request is None:
                stream.set_draft(NO_DRAFT)
            else:
                asked.append(stream)
                requests.append(request)
        if not requests:
            return 0
        room = ctx.n_outputs_max - len(streams) - n_readers
        n_decodes = 0
        for stream, draft in zip(asked, drafter.propose_many(requests), strict=True):
            if len(draft.tokens) > room:
                draft.cut(max(0, room))
            room -= len(draft.tokens)
            n_decodes += draft.n_decodes
            stream.set_draft(draft)
        return n_decodes

    def _decode(self, step: Step, streams: Sequence[Stream], readers: Sequence[Reader]) -> None:
        """Decode pending tokens, drafts and texts together; let each take its rows."""
        is_exact = self._ctx.capabilities.batch_invariant
        if not is_exact and any(stream.rule == "seeded" for stream in streams):
            self._ctx.warn_if_inexact(len(streams) + sum(stream.n_drafted for stream in streams))
        filler = [] if readers else self._filler(streams)
        if len(streams) == 1 and not readers and not filler:
            return self._decode_alone(step, streams[0])
        ctx = self._ctx
        members: tuple[Stream | Reader, ...] = (*streams, *readers)
        batch, texts = self._pack(streams, readers)
        expiring = [row for member in members for row in member.sequence.expiring_rows()]
        if filler:
            batch.add(streams[-1].sequence.seq_id, filler, "all")
        with ctx.lock:  # the logits are valid until the next decode of any thread
            start = perf_counter()
            rows = batch.decode(ctx.decoder, expiring)
            step.verify_s = verify_s = perf_counter() - start
            n = sum(map(len, texts))
            step.n_tokens = n + len(filler)
            if filler:
                rows.pop()
                sequence = streams[-1].sequence
                ctx.kv_cache.drop(sequence.seq_id, sequence.position + len(texts[-1]))
            n_rows = step.n_tokens if len(members) == 1 else 0
            for member, tokens, its, outcome in zip(
                members, texts, rows, step.outcomes, strict=True
            ):
                outcome.n_tokens = len(tokens)
                try:
                    if isinstance(member, Stream):
                        outcome.emitted = member.accept(its, verify_s * len(tokens) / n, n_rows)
                    elif tokens:
                        member.read(tokens, its)
                except LlamaBranchError as error:
                    outcome.error = error
        return None

    def _decode_alone(self, step: Step, stream: Stream) -> None:
        """Decode the plan of one stream, a tree perhaps, and let it take its rows."""
        outcome = step.outcomes[0]
        with self._ctx.lock:
            start = perf_counter()
            rows = stream.decode()
            step.verify_s = perf_counter() - start
            step.n_tokens = outcome.n_tokens = 1 + stream.n_drafted
            try:
                outcome.emitted = stream.accept(rows, step.verify_s)
            except LlamaBranchError as error:
                stream.abandon()
                if isinstance(error, CapacityError):  # memory that decodes again to accept
                    raise
                outcome.error = error

    def _filler(self, streams: Sequence[Stream]) -> list[int]:
        """Return tokens that nobody reads, with which the decode ends on an edge of its curve.

        They go to the end of the last sequence, above all other cells, and are dropped at once.
        """
        if self.curve is None or not self.curve.fills:
            return []
        n = len(streams) + sum(stream.n_drafted for stream in streams)
        rows = self.curve.rows(n)
        ctx = self._ctx
        if rows == n or rows > ctx.n_outputs_max or ctx.kv_cache.n_vacant < rows:
            return []
        last = streams[-1]
        if last.has_tree or last.sequence.n_cached < last.sequence.position:
            return []
        return [last.plan[-1]] * (rows - n)

    def _pack(
        self, streams: Sequence[Stream], readers: Sequence[Reader]
    ) -> tuple[Batch, list[list[int]]]:
        """Return the batch of a step, and the tokens of each stream and reader in it."""
        ctx, batch = self._ctx, Batch()
        texts = [stream.plan for stream in streams]
        for stream, plan in zip(streams, texts, strict=True):
            batch.add(stream.sequence.seq_id, plan, "all")
        room = ctx.n_outputs_max - len(batch.tokens) - len(readers)
        for reader in readers:
            left, wants_rows = ctx.n_batch - len(batch.tokens), reader.wants_rows
            if wants_rows:
                left = min(left, 1 + max(0, room))
            unread = reader.unread()
            tokens = unread[: max(0, left)]
            if wants_rows:
                room -= len(tokens) - 1
            is_last = len(tokens) == len(unread)
            logits = "all" if wants_rows else "last" if is_last else "none"
            batch.add(reader.sequence.seq_id, tokens, logits)
            texts.append(tokens)
        return batch, texts

    def _note_full(self, step: Step, streams: Sequence[Stream], error: CacheFullError) -> None:
        """Note which streams have filled the cells of their own, or else that somebody must give way."""
        ctx = self._ctx
        for stream, outcome in zip(streams, step.outcomes, strict=False):
            if not ctx.kv_cache.room(stream.branch.seq_id, 1):
                outcome.error = error
        if all(outcome.error is None for outcome in step.outcomes):
            step.no_room = error
