"""The loop that generates: draft, decode once for all running texts, verify, take tokens.

A generation runs one text; the engine and the sampled searches run many. All of them use this loop.
A step can also read prompts, as far as its decode has room. The caller decides which text gets a
sequence and which one must wait. If the cache has no room for a step, nothing changes, and the
result says so.

Two threads may each generate on the context that the other one drafts with. So the calls that need
the target's lock (decode, verify, take) and those that may need the drafter's (draft, conclude)
never overlap: no thread waits for one lock while it holds the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Protocol, TypeAlias

from ..arguments import instance
from ..context import Context
from ..context.context import text_context
from ..context.logits import LogitsRow, lent
from ..context.runner import Batch
from ..errors import CacheFullError, CapacityError, LlamaBranchError
from ..generation.config import SpeculativeConfig, draft_length
from ..generation.draft_states import Beginning, DraftStates
from ..generation.drafter import (
    NO_DRAFT,
    NO_STATE,
    Drafter,
    DraftRequest,
    FixedLength,
    NullDrafter,
    SpeculativeStats,
    checked_drafter,
)
from ..generation.output import Produced
from ..generation.text import Text
from ..native.handle import forkable_lock
from .running import PLAIN, RunningText

__all__ = ["Loop", "Reader", "Step"]

Around: TypeAlias = Callable[[], AbstractContextManager[object]]
_stats_lock = forkable_lock()  # for the totals of all loops


class Reader(Protocol):
    """Reads tokens into a text in as many steps as needed: a `Job` that reads its prompt.

    Attributes:
        n_decoded: how many of its tokens the last step has read.
        error: why it cannot continue.
    """

    n_decoded: int
    error: LlamaBranchError | None

    @property
    def text(self) -> Text:
        """The text that gets the tokens."""

    @property
    def wants_rows(self) -> bool:
        """Whether it needs the logits after each token; if not, only those after the last one."""

    def unread(self) -> list[int]:
        """Return the tokens that are not decoded yet, at least one."""

    def read(self, tokens: Sequence[int], rows: Sequence[LogitsRow]) -> None:
        """Take decoded tokens, with the logits it needs. The context's lock is held."""


@dataclass(slots=True)
class Step:
    """The result of a step. The new tokens are in ``RunningText.emitted``.

    Attributes:
        n_tokens: tokens of the decode; 0 without a decode.
        n_draft_decodes: decodes of the drafter.
        verify_s: seconds of the decode.
        no_room: the error if the cache has no room for the step, else None. Nothing has changed
            then, and the caller must free cells.
    """

    n_tokens: int = 0
    n_draft_decodes: int = 0
    verify_s: float = math.nan
    no_room: CacheFullError | None = None


class Loop:
    """Runs texts of one context, alone or together, with drafts from one drafter.

    Threads may share a loop if each uses its own texts.

    Args:
        ctx: the context that generates.
        drafter: proposes the drafts; None = no drafts.
        config: how much to draft.
        batched: whether texts share decodes, as in an engine. Then nothing is drafted if the
            context's memory cannot drop the last tokens of a sequence.

    Raises:
        ConfigError: an argument has the wrong type.
        UnsupportedError: ``ctx`` is the context of a head, or the drafter is a head for another model.
        VocabularyMismatchError: the drafter cannot draft for the context's vocabulary.

    Attributes:
        drafter: the drafter; a `NullDrafter` if nothing is drafted.
        drafts: whether anything is drafted.
        states: keeps draft states between generations.
        length: decides how long drafts are; it learns from all generations.
        stats: counts and times of all generations that have ended.
    """

    def __init__(
        self,
        ctx: Context,
        drafter: Drafter | None = None,
        config: SpeculativeConfig | None = None,
        *,
        batched: bool = False,
    ) -> None:
        self.ctx = text_context("target", ctx)
        self._lock = ctx.lock
        self.drafter = checked_drafter(drafter, ctx.model)
        config = SpeculativeConfig() if config is None else config
        self.config = instance("config", config, SpeculativeConfig)
        self.stats = SpeculativeStats()
        self.states = DraftStates(self.drafter)
        self.drafts = not isinstance(self.drafter, NullDrafter) and (
            not batched or ctx.kv_cache.undoes(1)
        )
        self.length = (
            draft_length(self.config, self.drafter, ctx) if self.drafts else FixedLength(0)
        )

    def beginning(self, text: Text) -> Beginning:
        """Return a beginning for jobs that continue ``text``; its draft state is made when needed."""
        return Beginning(text, self.drafter if self.drafts else None, self.config.rule)

    # -- texts that run alone ----------------------------------------------------------------------

    def open(self, text: Text, stats: SpeculativeStats, n_alternatives: int = 0) -> RunningText:
        """Return a running text for ``text`` that shares no decode. Call ``close`` at the end."""
        rule = self.config.rule if text.sampler.constraint is None else "seeded"
        state = self.states.take(text, rule) if self.drafts else NO_STATE
        length = self.length.stream()
        return RunningText(text, state, length, rule, stats, n_alternatives, alone=True)

    def close(self, running: RunningText, *, keep: bool, is_changed: bool = False) -> None:
        """Report the last steps. With ``keep`` the draft state is kept for the text, else freed.

        ``is_changed``: whether other code has changed the text since its last round.
        """
        running.report()
        text = running.text
        tokens = running.state_tokens if is_changed else list(text.shown)
        self.states.give_back(text, running.state, tokens if keep else None)

    def add_stats(self, stats: SpeculativeStats) -> None:
        """Add the counts and times of a finished generation."""
        with _stats_lock:
            self.stats.add(stats)

    def total(self) -> SpeculativeStats:
        """Return a copy of ``stats``. No other thread changes the numbers while they are copied."""
        total = SpeculativeStats()
        with _stats_lock:
            total.add(self.stats)
        return total

    def round(self, running: RunningText) -> list[Produced]:
        """Run a step of one text by itself; return the new tokens."""
        text = running.text
        if not text.is_behind:
            return [running.draw()]
        if running.state is NO_STATE or running.skips_draft():
            with self._lock:
                running.advance()
            running.conclude()
            return running.emitted
        step = self._run([running])
        error = step.no_room or running.error
        if error is not None:
            raise error
        return running.emitted

    def step(
        self,
        running: Sequence[RunningText],
        readers: Sequence[Reader] = (),
        around: Around = nullcontext,
    ) -> Step:
        """Run a step of all texts, and read as many prompt tokens as fit beside them.

        Args:
            running: the texts; the cache lacks the last token of each.
            readers: read tokens into other texts, in the same decode.
            around: returns a context for a decode with readers; no other decode runs meanwhile.

        Raises:
            DecodeError: the decode failed or was interrupted; all texts are as before.
            Exception: the drafter, which may be the user's code, raised it.
        """
        step = self._run(running, readers, around)
        if step.n_tokens and running and self.drafts:
            # The time of a decode that also read prompts says nothing about drafts.
            verify_s = math.nan if readers else step.verify_s
            self.length.learn([member.outcome for member in running], step.n_tokens, verify_s)
        return step

    def _run(
        self,
        running: Sequence[RunningText],
        readers: Sequence[Reader] = (),
        around: Around = nullcontext,
    ) -> Step:
        step = Step()
        for member in running:
            member.emitted, member.draft, member.error, member.outcome = [], NO_DRAFT, None, PLAIN
        for reader in readers:
            reader.n_decoded, reader.error = 0, None
        try:
            step.n_draft_decodes = self._draft(running, len(readers))
            try:
                self._decode(step, running, readers, around)
            except CapacityError:
                if not any(member.draft.tokens for member in running):
                    raise
                for member in running:
                    if member.draft.tokens:
                        member.stats.count_stop("no room to verify")
                    member.drop_draft()
                self._decode(step, running, readers, around)
        except LlamaBranchError as error:
            for member in running:
                member.drop_draft()
            if not isinstance(error, CacheFullError):
                raise
            self._note_full(step, [*running, *readers], error)
            return step
        except BaseException:
            for member in running:
                member.abandon()
            raise
        for member in running:
            if member.error is None:
                try:
                    member.conclude()
                except LlamaBranchError as error:
                    member.error = error
        return step

    def _draft(self, running: Sequence[RunningText], n_readers: int) -> int:
        """Give each text a draft that fits into the decode; return how often the drafter decoded."""
        ctx, drafter = self.ctx, self.drafter
        # Some memory cannot undo a decode that also reads prompts.
        if not self.drafts or (n_readers and not ctx.kv_cache.can_draft):
            return 0
        asked: list[RunningText] = []
        requests: list[DraftRequest] = []
        for member in running:
            n_lacking = int(member.text.is_behind)
            room = ctx.kv_cache.room(member.text.seq_id, member.draft_limit + n_lacking) - n_lacking
            request = member.request(room)
            if request is not None:
                asked.append(member)
                requests.append(request)
        if not requests:
            return 0
        room = ctx.n_outputs_max - len(running) - n_readers
        n_decodes, versions = 0, [member.text.version for member in asked]
        drafts = drafter.propose_many(requests)
        for member, draft, version in zip(asked, drafts, versions, strict=True):
            member.text.check_unchanged(version)
            if len(draft.tokens) > room:
                draft.cut(max(0, room))
            room -= len(draft.tokens)
            n_decodes += draft.n_decodes
            member.set_draft(draft)
        if len(running) > 1:
            self._fit_together(running)
        return n_decodes

    def _fit_together(self, running: Sequence[RunningText]) -> None:
        """Cut the drafts of several texts so that one decode can verify all of them.

        How much of a draft fits depends on the other drafts' lengths, and those depend on drawn
        tokens. A draft that was drawn at random for a rule that compares distributions is therefore
        always dropped as a whole.
        """
        memory, drafts = self.ctx.kv_cache, [member.draft for member in running]
        if memory.can_draft:
            return
        for member in running:
            if member.draft.sources and member.rule != "seeded":
                member.draft.cut(0)
        fitting = memory.fit_together([len(draft.tokens) for draft in drafts])
        for draft, n in zip(drafts, fitting, strict=True):
            draft.cut(n)

    def _decode(
        self,
        step: Step,
        running: Sequence[RunningText],
        readers: Sequence[Reader],
        around: Around,
    ) -> None:
        """Decode last tokens, drafts and prompts together; each text takes its rows of logits."""
        with self._lock:  # the logits are valid until the next decode of any thread
            if len(running) == 1 and not readers:
                self._decode_alone(step, running[0])
            else:
                self._decode_together(step, running, readers, around)

    def _decode_together(
        self,
        step: Step,
        running: Sequence[RunningText],
        readers: Sequence[Reader],
        around: Around,
    ) -> None:
        ctx = self.ctx
        members: tuple[RunningText | Reader, ...] = (*running, *readers)
        batch, texts = self._pack(running, readers)
        start = perf_counter()
        with around():
            rows = ctx.decoder.decode(batch)
        step.verify_s = verify_s = perf_counter() - start
        step.n_tokens = sum(map(len, texts))
        with lent(chain.from_iterable(rows)):  # a user's function may decode before all are read
            for member, tokens, member_rows in zip(members, texts, rows, strict=True):
                try:
                    if isinstance(member, RunningText):
                        member.take(member_rows, verify_s * len(tokens) / step.n_tokens)
                    else:
                        member.n_decoded = len(tokens)
                        if tokens:
                            member.read(tokens, member_rows)
                except LlamaBranchError as error:
                    member.error = error

    def _decode_alone(self, step: Step, running: RunningText) -> None:
        """Decode the plan of one text, which then takes its rows."""
        start = perf_counter()
        if running.draft.tokens:
            rows = running.plan().decode()
        else:  # the compiled core draws the next token in the same call
            rows = [running.text.decode_last(draws_next=True)]
        step.verify_s = perf_counter() - start
        step.n_tokens = 1 + len(running.draft.tokens)
        try:
            with lent(rows):
                running.take(rows, step.verify_s)
        except LlamaBranchError as error:
            running.abandon()
            if isinstance(error, CapacityError):  # some memory decodes accepted tokens once more
                raise
            running.error = error

    def _pack(
        self, running: Sequence[RunningText], readers: Sequence[Reader]
    ) -> tuple[Batch, list[list[int]]]:
        """Return the batch of a step, and the tokens in it of each running text and each reader."""
        ctx, batch = self.ctx, Batch()
        texts = [
            member.plan().tokens if member.draft.tokens else member.text.lacking()
            for member in running
        ]
        for member, tokens in zip(running, texts, strict=True):
            batch.add(member.text.seq_id, tokens, "all")
        room = ctx.n_outputs_max - len(batch) - len(readers)
        for reader in readers:
            left, wants_rows = ctx.n_batch - len(batch), reader.wants_rows
            if wants_rows:
                left = min(left, 1 + max(0, room))
            unread = reader.unread()
            tokens = unread[: max(0, left)]
            if wants_rows:
                room -= len(tokens) - 1
            is_last = len(tokens) == len(unread)
            logits = "all" if wants_rows else "last" if is_last else "none"
            batch.add(reader.text.seq_id, tokens, logits)
            texts.append(tokens)
        return batch, texts

    def _note_full(
        self, step: Step, members: Sequence[RunningText | Reader], error: CacheFullError
    ) -> None:
        """Set the error of each text whose part of the cache is full.

        If there is no such text, the whole cache is full: set ``no_room``.
        """
        ctx = self.ctx
        for member in members:
            if not ctx.kv_cache.room(member.text.seq_id, 1):
                member.error = error
        if all(member.error is None for member in members):
            step.no_room = error
