"""How draft models and heads draft: they read the text that is new, and draw tokens after it.

Any number of texts are drafted for together, with one decode for each position of all of them.

What differs is in :mod:`.model` and :mod:`.head`: what a text's state reads, and where its logits are.
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
from ...generation.drafter import Draft, Drafter, DraftLength, DraftRequest, DraftState
from ...generation.rules import draft_seed
from ...generation.text import Text
from ...model import Model
from ...sampling import Sampler, SamplingParams
from ...sampling.noise import DRAFT

__all__ = ["RunDrafter", "RunState"]

S = TypeVar("S", bound="RunState")


class RunState(DraftState, ABC):
    """What a drafter with a context keeps of one text, and its draft while that is drawn.

    Args:
        drafter: whose state it is.
        target: the text that is drafted for.
        rule: the acceptance rule.

    Attributes:
        model: whose EOG tokens end a draft.
        seed: of the draws under the seeded rule; the noise of other rules is derived from it.
        draft: the one that is drawn.
        text: the tokens that it follows.
        unread: tokens that are decoded before the next draw: of the text, or the last one drawn.
        is_done: the draft has ended.
        reads_text: what is unread belongs to the text; so it is for every state that drafts together.
    """

    model: Model
    draft: Draft
    text: Sequence[int]
    length: DraftLength
    limit: int

    def __init__(self, drafter: Drafter, target: Text, rule: str) -> None:
        self.rule = rule
        self.seed = target.seed
        self.unread: Sequence[int] = ()
        self.is_done = False
        self.reads_text = True
        self._drafter = drafter

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Decode the tokens that are new in one decode, then draw token by token."""
        return self._drafter.propose_many([DraftRequest(self, tokens, length, limit)])[0]

    # -- what differs ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def sampler(self) -> Sampler:
        """Draws the next token."""

    @abstractmethod
    def row(self) -> LogitsRow:
        """Return the logits after the last decoded token, valid until the next decode."""

    def accept(self, token: int) -> None:
        """Let the sampler accept a drawn token, unless it does when the token is decoded."""

    # -- drawing -----------------------------------------------------------------------------------

    def open(self, request: DraftRequest) -> None:
        """Begin a draft; it has ended at once if the length wants none of this drafter."""
        self.draft = Draft(drafter=self._drafter.name)
        _, self.text, self.length, self.limit = request
        self.unread, self.is_done, self.reads_text = (), False, True
        if not self.length.consider(self.draft.drafter):
            self._end("off")

    @property
    def position(self) -> int:
        """Where the next token that is drawn goes in the text."""
        return len(self.text) + len(self.draft.tokens)

    def draw(self) -> None:
        """Draw the next token. Hold the lock of the drafter's context."""
        draft, length, row = self.draft, self.length, self.row()
        entropy = row.entropy() if length.reads_entropy else math.nan
        draft.entropies.append(entropy)
        if not length.goes_on(len(draft.tokens), entropy):
            return self._end(length.reason)
        sampler, position, seed = self.sampler, self.position, self.seed
        try:
            if self.rule == "seeded":
                token = row.draw(sampler, seed, position, measured=False)
            else:
                source = sampler.distribution(row.array, position, seed)
                token = source.draw(draft_seed(seed, len(self.text)), position, DRAFT)
                draft.sources.append(source)
            draft.tokens.append(token)
            if self.model.is_eog(token):
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


class RunDrafter(Drafter, Generic[S]):
    """A drafter with a context, whose sequences follow the target's texts.

    Attributes:
        ctx: the context it drafts in.
        sampling: the settings of its draws; None = the request's.
        state_type: of its states.
    """

    state_type: type[S]

    def __init__(self, ctx: Context, sampling: SamplingParams | None) -> None:
        self.ctx = ctx
        self.sampling = sampling

    @property
    def contexts(self) -> list[Context]:
        """Its own."""
        return [self.ctx]

    def settings(self, target: Text) -> SamplingParams:
        """Return the settings with which drafts for ``target`` are drawn: without a logits processor."""
        params = self.sampling or target.sampling
        return params.replace(seed=target.seed, logprobs=False, logits_processor=None)

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft for all requests together: one decode for each drafted position.

        Requests are drafted for one by one if the drafts go through the text, or on forks because the
        memory of a draft model cannot be truncated.
        """
        states = [r.state for r in requests if isinstance(r.state, self.state_type)]
        if not states or len(states) < len(requests):  # they go through the text
            return super().propose_many(requests)
        for state, request in zip(states, requests, strict=True):
            state.open(request)
        if self.ctx.target is not None or self.ctx.kv_cache.can_draft:
            return self._draft(states)
        return [draft for state in states for draft in self._draft([state])]

    # -- what differs ------------------------------------------------------------------------------

    def prepare(self, states: Sequence[S]) -> None:
        """Get what they need from the target, before the lock of the drafter's context is taken."""

    def begin(self, states: Sequence[S]) -> None:
        """Read what has to be read before all that is unread is decoded."""

    @abstractmethod
    def decode(self, states: Sequence[S]) -> None:
        """Decode what is unread of each state, together."""

    def end(self, states: Sequence[S]) -> None:
        """Drop what must not be kept after a draft, whatever was raised."""

    # -- drafting ----------------------------------------------------------------------------------

    def _draft(self, states: Sequence[S]) -> list[Draft]:
        """Draw the drafts that were begun; without room for them the target goes on alone."""
        start, decoder = perf_counter(), self.ctx.decoder
        n_decodes = decoder.n_decodes
        live = [state for state in states if not state.is_done]
        try:
            self.prepare(live)
            with self.ctx.lock:
                decoder.check_open()
                try:
                    self.begin(live)
                    self.draw(live)
                finally:
                    self.end(live)
        except CapacityError:
            for state in live:
                if not state.is_done:
                    state.draft.stopped = "capacity"
        # The time is divided by the steps of each draft; the first draft gets all decodes.
        drafts, seconds = [state.draft for state in states], perf_counter() - start
        steps = [len(draft.entropies) for draft in drafts]
        if not any(steps):
            steps = [1] * len(drafts)
        for draft, n in zip(drafts, steps, strict=True):
            draft.seconds = seconds * n / sum(steps)
        drafts[0].n_decodes = decoder.n_decodes - n_decodes
        return drafts

    def draw(self, states: Sequence[S]) -> None:
        """Finish the drafts, token by token."""
        while states:
            if all(state.unread for state in states):
                self.decode(states)
            for state in states:
                if not state.unread:
                    state.draw()
            states = [state for state in states if not state.is_done]
