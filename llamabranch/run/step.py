"""One step of any number of texts: draft, decode once for all of them, verify, take tokens.

A generation runs one text (`run_round`); the core of a context runs the texts of all its callers
(`Step`). A step can also read prompts if its decode has room. The caller decides which
text gets a sequence and which one must wait. If the cache has no room for a step, nothing changes,
and the result says so.

Two threads may each generate on the context that the other one drafts with. So the calls that need
the target's lock (decode, verify, take) and those that may need the drafter's (draft, conclude)
never overlap: no thread waits for one lock while it holds the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from time import perf_counter
from typing import Protocol, TypeAlias

from ..context import Context
from ..context.logits import LogitsRow, lent
from ..context.runner import Batch
from ..errors import CacheFullError, CapacityError, LlamaBranchError
from ..generation.drafter import NO_DRAFT, NO_STATE, DraftRequest
from ..generation.output import Produced
from ..generation.text import Text
from .drafting import Drafting
from .running import PLAIN, RunningText

Around: TypeAlias = Callable[[], AbstractContextManager[object]]


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


def run_round(running: RunningText) -> list[Produced]:
    """Run a step of one text by itself; return the new tokens.

    Raises:
        LlamaBranchError: it cannot continue, or the drafter failed; the text is as before.
    """
    text = running.text
    if not text.is_behind:
        return [running.draw()]
    if running.state is NO_STATE or running.skips_draft():
        with text.lock:
            running.advance()
        running.conclude()
        return running.emitted
    step = Step(text.ctx, [running])
    step.draft_decode_take()
    error = step.no_room or running.error
    if error is not None:
        raise error
    return running.emitted


class Step:
    """A step of several texts, and its result. The new tokens are in ``RunningText.emitted``.

    Args:
        ctx: the context that generates.
        running: the texts; the cache lacks the last token of each.
        readers: read tokens into other texts in the same decode, if it has room.
        around: returns a context manager for a decode with readers; no other decode runs inside it.

    Attributes:
        members: ``running`` and ``readers``.
        n_tokens: how many tokens the decode had; 0 without a decode.
        draft_decodes: how many decodes each drafter made.
        verify_s: seconds of the decode.
        no_room: the error if the cache has no room for the step, else None. Nothing has changed
            then, and the caller must free cells.
        at: the caller whose functions the step may call now; None = no caller, or several.
    """

    def __init__(
        self,
        ctx: Context,
        running: Sequence[RunningText],
        readers: Sequence[Reader] = (),
        around: Around = nullcontext,
    ) -> None:
        self._ctx, self._running, self._readers, self._around = ctx, running, readers, around
        self.members: tuple[RunningText | Reader, ...] = (*running, *readers)
        self.n_tokens = 0
        self.draft_decodes: dict[Drafting, int] = {}
        self.verify_s = math.nan
        self.no_room: CacheFullError | None = None
        self.at: Drafting | RunningText | Reader | None = None

    def run(self) -> None:
        """Run the step, and let the draft lengths learn from it.

        Raises:
            DecodeError: the decode failed or was interrupted; all texts are as before.
            Exception: the drafter, which may be the user's code, raised it.
        """
        self.draft_decode_take()
        if not self.n_tokens:
            return
        # The time of a decode that also read prompts says nothing about drafts.
        verify_s = math.nan if self._readers else self.verify_s
        for drafting, members in self._drafted().items():
            self.at = drafting
            outcomes = [member.outcome for member in members]
            drafting.length.learn(outcomes, self.n_tokens, verify_s)
        self.at = None

    def draft_decode_take(self) -> None:
        """Run the step of texts that report their rounds themselves."""
        running = self._running
        for member in running:
            member.emitted, member.draft, member.error, member.outcome = [], NO_DRAFT, None, PLAIN
        for reader in self._readers:
            reader.n_decoded, reader.error = 0, None
        try:
            self._draft()
            try:
                self._decode()
            except CapacityError:
                if not any(member.draft.tokens for member in running):
                    raise
                for member in running:
                    if member.draft.tokens:
                        member.stats.count_stop("no room to verify")
                    member.drop_draft()
                self._decode()
        except LlamaBranchError as error:
            for member in running:
                member.drop_draft()
            if not isinstance(error, CacheFullError):
                raise
            self._note_full(error)
            return
        except BaseException:
            for member in running:
                member.abandon()
            raise
        for member in running:
            if member.error is None:
                self.at = member
                try:
                    member.conclude()
                except LlamaBranchError as error:
                    member.error = error
        self.at = None

    def _drafted(self) -> dict[Drafting, list[RunningText]]:
        """Return the texts that are drafted, grouped by `Drafting`."""
        groups: dict[Drafting, list[RunningText]] = {}
        for member in self._running:
            if member.drafting.drafts:
                groups.setdefault(member.drafting, []).append(member)
        return groups

    def _draft(self) -> None:
        """Give each text a draft that fits into the decode; count the drafters' decodes."""
        ctx, running = self._ctx, self._running
        groups = self._drafted()
        # Some memory cannot undo a decode that also reads prompts.
        if not groups or (self._readers and not ctx.kv_cache.can_draft):
            return
        room = ctx.n_outputs_max - len(self.members)
        for drafting, members in groups.items():
            self.at = drafting
            room = self._propose(drafting, members, room)
        self.at = None
        if len(running) > 1:
            self._fit_together()

    def _propose(self, drafting: Drafting, members: Sequence[RunningText], room: int) -> int:
        """Give texts drafts of at most ``room`` tokens in total; return how much room is left."""
        asked: list[RunningText] = []
        requests: list[DraftRequest] = []
        for member in members:
            n_lacking = int(member.text.is_behind)
            memory = self._ctx.kv_cache
            most = memory.room(member.text.seq_id, member.draft_limit + n_lacking) - n_lacking
            request = member.request(most)
            if request is not None:
                asked.append(member)
                requests.append(request)
        if not requests:
            return room
        n_decodes, versions = 0, [member.text.version for member in asked]
        drafts = drafting.drafter.propose_many(requests)
        for member, draft, version in zip(asked, drafts, versions, strict=True):
            member.text.check_unchanged(version)
            if len(draft.tokens) > room:
                draft.cut(max(0, room))
            room -= len(draft.tokens)
            n_decodes += draft.n_decodes
            member.set_draft(draft)
        self.draft_decodes[drafting] = n_decodes
        return room

    def _fit_together(self) -> None:
        """Cut the drafts of several texts so that one decode can verify all of them.

        How much of a draft fits depends on the other drafts' lengths, and those depend on drawn
        tokens. A draft that was drawn at random for a rule that compares distributions is therefore
        always dropped as a whole.
        """
        memory, drafts = self._ctx.kv_cache, [member.draft for member in self._running]
        if memory.can_draft:
            return
        for member in self._running:
            if member.draft.sources and member.rule != "seeded":
                member.draft.cut(0)
        fitting = memory.fit_together([len(draft.tokens) for draft in drafts])
        for draft, n in zip(drafts, fitting, strict=True):
            draft.cut(n)

    def _decode(self) -> None:
        """Decode last tokens, drafts and prompts together; each text takes its rows of logits."""
        with self._ctx.lock:  # the logits are valid until the next decode of any thread
            if len(self._running) == 1 and not self._readers:
                self._decode_alone(self._running[0])
            else:
                self._decode_together()

    def _decode_together(self) -> None:
        batch, texts = self._pack()
        start = perf_counter()
        with self._around():
            rows = self._ctx.decoder.decode(batch)
        self.verify_s = verify_s = perf_counter() - start
        self.n_tokens = n_tokens = sum(map(len, texts))
        with lent(chain.from_iterable(rows)):  # a user's function may decode before all are read
            for member, tokens, member_rows in zip(self.members, texts, rows, strict=True):
                self.at = member
                try:
                    if isinstance(member, RunningText):
                        member.take(member_rows, verify_s * len(tokens) / n_tokens)
                    else:
                        member.n_decoded = len(tokens)
                        if tokens:
                            member.read(tokens, member_rows)
                except LlamaBranchError as error:
                    member.error = error
        self.at = None

    def _decode_alone(self, running: RunningText) -> None:
        """Decode the plan of one text, which then takes its rows."""
        start = perf_counter()
        if running.draft.tokens:
            rows = running.plan().decode()
        else:  # the compiled core draws the next token in the same call
            rows = [running.text.decode_last(draws_next=True)]
        self.verify_s = perf_counter() - start
        self.n_tokens = 1 + len(running.draft.tokens)
        self.at = running
        try:
            with lent(rows):
                running.take(rows, self.verify_s)
        except LlamaBranchError as error:
            running.abandon()
            if isinstance(error, CapacityError):  # some memory decodes accepted tokens once more
                raise
            running.error = error
        self.at = None

    def _pack(self) -> tuple[Batch, list[list[int]]]:
        """Return the batch of a step, and the tokens of each member in it."""
        ctx, batch = self._ctx, Batch()
        texts = [
            member.plan().tokens if member.draft.tokens else member.text.lacking()
            for member in self._running
        ]
        for member, tokens in zip(self._running, texts, strict=True):
            batch.add(member.text.seq_id, tokens, "all")
        room = ctx.n_outputs_max - len(batch) - len(self._readers)
        for reader in self._readers:
            left, wants_rows = ctx.n_batch - len(batch), reader.wants_rows
            if wants_rows:
                left = min(left, 1 + max(0, room))
            unread = reader.unread()
            tokens = unread[: max(0, left)]
            if len(tokens) == len(unread):
                tokens = tokens[: ctx.kv_cache.n_first(len(tokens))]
            if wants_rows:
                room -= len(tokens) - 1
            is_last = len(tokens) == len(unread)
            logits = "all" if wants_rows else "last" if is_last else "none"
            batch.add(reader.text.seq_id, tokens, logits)
            texts.append(tokens)
        return batch, texts

    def _note_full(self, error: CacheFullError) -> None:
        """Set the error of each text whose part of the cache is full.

        If there is no such text, the whole cache is full: set ``no_room``.
        """
        for member in self.members:
            if not self._ctx.kv_cache.room(member.text.seq_id, 1):
                member.error = error
        if all(member.error is None for member in self.members):
            self.no_room = error
