"""A drafting run: how draft models and heads read the text that is new, and draw tokens after it.

Any number of texts are drafted for together, with one decode for each position of all of them.

What differs is in :mod:`.model` and :mod:`.head`: what a stream reads, and where its logits are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Generic, TypeVar

from ...context import Context
from ...context.logits import LogitsRow
from ...errors import CapacityError, GrammarError
from ...generation.drafter import Draft, Drafter, DraftLength, DraftRequest
from ...generation.rules import draft_seed
from ...generation.text import Text
from ...model import Model
from ...sampling import Sampler, SamplingParams
from ...sampling.noise import DRAFT
from .tree import TreeMemory, grow_tree, tree_settings, tree_width

__all__ = ["DraftRun", "Drafting", "RunDrafter", "RunState"]

N = TypeVar("N")
R = TypeVar("R", bound="DraftRun")


class RunDrafter(Drafter):
    """A drafter with a context, whose sequences follow the target's texts.

    Attributes:
        ctx: the context it drafts in.
        sampling: the settings of its draws; None = the request's.
    """

    def __init__(self, ctx: Context, sampling: SamplingParams | None, width: int = 1) -> None:
        self._width = tree_width(width)
        self.ctx = ctx
        self.sampling = sampling

    @property
    def width(self) -> int:
        """Candidates per node; above 1 it proposes trees."""
        return self._width

    @property
    def contexts(self) -> list[Context]:
        """Its own."""
        return [self.ctx]

    def settings(self, target: Text) -> SamplingParams:
        """Return the settings with which drafts for ``target`` are drawn: without a logits processor."""
        params = self.sampling or target.sampling
        params = params.replace(seed=target.seed, logprobs=False, logits_processor=None)
        return tree_settings(params) if self.width > 1 else params

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft for all requests together: one decode for each drafted position.

        Requests are drafted for one by one if the drafts are trees or go through the text, or on forks
        because the memory of a draft model cannot be truncated.
        """
        on_forks = self.ctx.target is None and not self.ctx.kv_cache.can_draft
        together = self.width == 1 and not on_forks
        if not (together and requests and all(isinstance(r.state, RunState) for r in requests)):
            return super().propose_many(requests)
        return self.draft_together(requests)

    @abstractmethod
    def draft_together(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the drafts for these requests, whose states are all its own."""


class RunState(ABC):
    """What a drafting run keeps of one text between drafts.

    Args:
        drafter: whose state it is.
        target: the branch that is drafted for.
        rule: the acceptance rule.
        seed: of the draws under the seeded rule; the noise of other rules is derived from it.

    Attributes:
        model: whose EOG tokens end a draft.
        ranks_by_noise: whether a tree's candidates are ranked with the noise of the target's draws.
    """

    model: Model

    def __init__(self, drafter: RunDrafter, target: Text, rule: str) -> None:
        self.rule = rule
        self.seed = target.seed
        self.ranks_by_noise = (drafter.sampling or target.sampling).temperature > 0.0
        self._drafter = drafter

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Decode the tokens that are new in one decode, then draw token by token."""
        return self._drafter.draft_together([DraftRequest(self, tokens, length, limit)])[0]

    @abstractmethod
    def observe(self, n_tokens: int) -> None:
        """Forget all tokens but the first ``n_tokens``."""

    @abstractmethod
    def fork(self, target: Text) -> RunState:
        """Return a copy of this state that drafts for ``target``."""

    @abstractmethod
    def close(self) -> None:
        """Free its sequences."""


class DraftRun(ABC):
    """One stream's draft while it is drawn. Hold the lock of the drafter's context.

    Attributes:
        text: the tokens that the draft follows.
        unread: tokens that are decoded before the next draw: of the text, or the last one drawn.
        is_done: the draft has ended.
        reads_text: what is unread belongs to the text; so it is for every run of a drafting.
    """

    reads_text = True

    def __init__(self, state: RunState, request: DraftRequest, draft: Draft) -> None:
        self.draft = draft
        self.text = request.tokens
        self.length = request.length
        self.limit = request.limit
        self.unread: Sequence[int] = ()
        self.is_done = False
        self._state = state
        self._is_seeded = state.rule == "seeded"
        self._noise = state.seed if self._is_seeded else draft_seed(state.seed, len(self.text))

    # -- what differs ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def sampler(self) -> Sampler:
        """Draws the next token."""

    @abstractmethod
    def row(self) -> LogitsRow:
        """Return the logits after the last decoded token, valid until the next decode."""

    def accept(self, token: int) -> None:  # noqa: B027  (nothing to do where the decode does it)
        """Let the sampler accept a drawn token, unless it does when the token is decoded."""

    # -- drawing -----------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Where the next token that is drawn goes in the text."""
        return len(self.text) + len(self.draft.tokens)

    def draw(self) -> None:
        """Draw the next token."""
        draft, length, row = self.draft, self.length, self.row()
        entropy = row.entropy() if length.reads_entropy else math.nan
        draft.entropies.append(entropy)
        if not length.goes_on(len(draft.tokens), entropy):
            return self._end(length.reason)
        sampler, position, seed = self.sampler, self.position, self._state.seed
        try:
            if self._is_seeded:
                token = row.draw(sampler, seed, position, measured=False)
            else:
                source = sampler.distribution(row.array, position, seed)
                token = source.draw(self._noise, position, DRAFT)
                draft.sources.append(source)
            draft.tokens.append(token)
            if self._state.model.is_eog(token):
                return self._end("end")
            if len(draft.tokens) >= self.limit:
                self.is_done = True  # the next draft decodes it with the new text, if accepted
                return None
            self.accept(token)
        except GrammarError:  # a dead end of the grammar: the target raises it if it gets there
            return self._end("end")
        self.unread = (token,)
        return None

    def _end(self, reason: str) -> None:
        self.draft.stopped = reason
        self.is_done = True

    def grow(self, memory: TreeMemory[N], root: N, width: int) -> None:
        """Draft a tree after ``root``, the text."""
        grow_tree(
            self.draft,
            memory,
            root,
            width=width,
            length=self.length,
            limit=self.limit,
            seed=self._state.seed if self._state.ranks_by_noise else None,
            is_eog=self._state.model.is_eog,
        )


class Drafting(ABC, Generic[R]):
    """The drafts of one or several streams of a context.

    Args:
        drafter: whose drafts they are.
        requests: with states of that drafter.
    """

    def __init__(self, drafter: RunDrafter, requests: Sequence[DraftRequest]) -> None:
        self.ctx = drafter.ctx
        self.width = drafter.width
        self.requests = requests
        self.drafts = [Draft(drafter=drafter.name) for _ in requests]

    # -- what differs ------------------------------------------------------------------------------

    def prepare(self, live: Sequence[int]) -> None:
        """Get what the requests of these numbers need from the target, before the lock is taken."""

    @abstractmethod
    def begin(self, live: Sequence[int]) -> list[R]:
        """Return a run for each of these requests."""

    @abstractmethod
    def decode(self, runs: Sequence[R]) -> None:
        """Decode what is unread of each run, together."""

    def end(self, live: Sequence[int]) -> None:
        """Drop what must not be kept after a draft, whatever was raised."""

    # -- drafting ----------------------------------------------------------------------------------

    def run(self) -> list[Draft]:
        """Return the drafts; without room for them the target goes on alone."""
        start, decoder = perf_counter(), self.ctx.decoder
        n_decodes = decoder.n_decodes
        live = []
        for i, request in enumerate(self.requests):
            if request.length.consider(self.drafts[i].drafter):
                live.append(i)
            else:
                self.drafts[i].stopped = "off"
        runs: list[R] = []
        try:
            self.prepare(live)
            with self.ctx.lock:
                decoder.check_open()
                try:
                    runs = self.begin(live)
                    self.draft(runs)
                finally:
                    self.end(live)
        except CapacityError:
            unfinished = [run.draft for run in runs if not run.is_done]
            for draft in unfinished if runs else [self.drafts[i] for i in live]:
                draft.stopped = "capacity"
        self._share_costs(perf_counter() - start, decoder.n_decodes - n_decodes)
        return self.drafts

    def draft(self, runs: list[R]) -> None:
        """Finish the drafts, token by token."""
        while runs:
            if all(run.unread for run in runs):
                self.decode(runs)
            for run in runs:
                if not run.unread:
                    run.draw()
            runs = [run for run in runs if not run.is_done]

    def _share_costs(self, seconds: float, n_decodes: int) -> None:
        """Divide the time by the steps of each draft; the first draft gets all decodes."""
        drafts = self.drafts
        steps = [len(draft.entropies) for draft in drafts]
        if not any(steps):
            steps = [1] * len(drafts)
        for draft, n in zip(drafts, steps, strict=True):
            draft.seconds = seconds * n / sum(steps)
        drafts[0].n_decodes = n_decodes
