"""Drafting with a model that has the same vocabulary.

This module also has the code that draft models and heads (:mod:`.head`) share: both read the new text
and draw tokens after it. They draft for any number of texts together, with one decode for the next
token of all of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Generic, TypeVar

from ..context import Context
from ..context.context import text_context
from ..context.logits import LogitsRow, lent
from ..context.runner import Batch
from ..errors import (
    CapacityError,
    GrammarError,
    SequencesExhaustedError,
    VocabularyMismatchError,
)
from ..generation.drafter import Draft, Drafter, DraftLength, DraftRequest, DraftState
from ..generation.text import Text
from ..generation.verify import draft_seed
from ..model import Model
from ..sampling import Sampler, SamplingParams
from ..sampling.noise import DRAFT

S = TypeVar("S", bound="RunState")


# -- what models and heads share -------------------------------------------------------------------


class RunState(DraftState, ABC):
    """What a drafter with a context keeps for one text, and the draft that is being drawn.

    Args:
        drafter: the drafter that the state belongs to.
        target: the text that is drafted for.
        rule: the acceptance rule.

    Attributes:
        model: the model whose EOG tokens end a draft.
        seed: the seed with which the "seeded" rule draws; other rules derive their noise from it.
        draft: the draft that is being drawn.
        text: the tokens that the draft follows.
        unread: tokens that must be decoded before the next draw: new tokens of the text, or the
            token drawn last.
        is_done: the draft has ended.
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
        self._drafter = drafter

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Decode all new tokens in one decode, then draw token by token."""
        return self._drafter.propose_many([DraftRequest(self, tokens, length, limit)])[0]

    # -- what differs ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def sampler(self) -> Sampler:
        """The sampler that draws the next token."""

    @abstractmethod
    def row(self) -> LogitsRow:
        """Return the logits after the last decoded token, valid until the next decode."""

    def accept(self, token: int) -> None:
        """Let the sampler accept a drawn token, unless decoding the token does that."""

    # -- drawing -----------------------------------------------------------------------------------

    def open(self, request: DraftRequest) -> None:
        """Begin a draft; it ends at once if ``length`` allows none from this drafter."""
        self.draft = Draft(drafter=self._drafter.name)
        _, self.text, self.length, self.limit = request
        self.unread, self.is_done = (), False
        if not self.length.consider(self.draft.drafter):
            self.end_draft("off")

    def draw(self) -> None:
        """Draw the next token. Hold the lock of the drafter's context."""
        draft, length, row = self.draft, self.length, self.row()
        entropy = row.entropy() if length.reads_entropy else math.nan
        draft.entropies.append(entropy)
        if not length.goes_on(len(draft.tokens), entropy):
            return self.end_draft(length.reason)
        sampler, position, seed = self.sampler, len(self.text) + len(draft.tokens), self.seed
        try:
            if self.rule == "seeded":
                token = row.draw(sampler, seed, position, measured=False)
            else:
                source = sampler.distribution(row.array, position, seed)
                token = source.draw(draft_seed(seed, len(self.text)), position, DRAFT)
                draft.sources.append(source)
            draft.tokens.append(token)
            if self.model.is_eog(token):
                return self.end_draft("end")
            if len(draft.tokens) >= self.limit:
                self.is_done = True  # if this token is accepted, the next draft decodes it
                return None
            self.accept(token)
        except GrammarError:  # a dead end: the target raises the error if it gets there
            return self.end_draft("end")
        self.unread = (token,)
        return None

    def end_draft(self, reason: str) -> None:
        """End the draft, for this reason."""
        self.draft.stopped = reason
        self.is_done = True


class RunDrafter(Drafter, Generic[S]):
    """A drafter with a context, whose sequences follow the target's texts.

    Attributes:
        ctx: the context it drafts in.
        sampling: the settings of its draws; None = the request's.
        state_type: the class of its states.
    """

    state_type: type[S]

    def __init__(self, ctx: Context, sampling: SamplingParams | None) -> None:
        self.ctx = ctx
        self.sampling = sampling

    @property
    def contexts(self) -> list[Context]:
        """Its own context."""
        return [self.ctx]

    def settings(self, target: Text) -> SamplingParams:
        """Return the settings for drafts for ``target``, which leave out a logits processor."""
        params = self.sampling or target.sampling
        return params.replace(seed=target.seed, logprobs=False, logits_processor=None)

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft for all requests together: one decode for each drafted position.

        If the draft model's memory cannot be truncated, each draft needs a fork, so requests are served
        one by one.
        """
        states = [r.state for r in requests if isinstance(r.state, self.state_type)]
        if not states or len(states) < len(requests):  # one of them got no sequence
            return super().propose_many(requests)
        for state, request in zip(states, requests, strict=True):
            state.open(request)
        if self.ctx.target is not None or self.ctx.kv_cache.can_draft:
            return self._draft(states)
        return [draft for state in states for draft in self._draft([state])]

    # -- what differs ------------------------------------------------------------------------------

    def prepare(self, states: Sequence[S]) -> None:
        """Get what the states need from the target, before this context's lock is taken.

        End the drafts of states that cannot get it.
        """

    def begin(self, states: Sequence[S]) -> None:
        """Read tokens that cannot wait for ``decode``."""

    @abstractmethod
    def decode(self, states: Sequence[S]) -> None:
        """Decode the ``unread`` tokens of all states together."""

    def end(self, states: Sequence[S]) -> None:
        """Drop everything that belongs only to the draft. Also called after an exception."""

    # -- drafting ----------------------------------------------------------------------------------

    def _draft(self, states: Sequence[S]) -> list[Draft]:
        """Draw the drafts that were begun. If there is no room, the target continues without drafts."""
        start, decoder = perf_counter(), self.ctx.decoder
        n_decodes = decoder.n_decodes
        live = [state for state in states if not state.is_done]
        try:
            self.prepare(live)
            live = [state for state in live if not state.is_done]
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
        # The time is shared out by the steps of each draft; all decodes count for the first draft.
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
            waiting = [state for state in states if not state.unread]
            with lent([state.row() for state in waiting]):  # `DraftLength` may be user code
                for state in waiting:
                    state.draw()
            states = [state for state in states if not state.is_done]


# -- draft models ----------------------------------------------------------------------------------


class ModelState(RunState):
    """A text of the draft model, which follows the target's text and drafts ahead of it.

    Attributes:
        own: the draft model's text.
        tip: the text that the draft is drawn on: ``own``, or a fork of it if the draft model's
            memory cannot be truncated.
        n_prompt: how many tokens were read rather than generated; a grammar begins after them.
    """

    _drafter: ModelDrafter

    def __init__(self, drafter: ModelDrafter, own: Text, target: Text, rule: str) -> None:
        super().__init__(drafter, target, rule)
        self.own = self.tip = own
        self.model = drafter.ctx.model
        self.n_prompt = target.answer_start

    @property
    def sampler(self) -> Sampler:
        """The sampler of ``tip``."""
        return self.tip.sampler

    def row(self) -> LogitsRow:
        """Return the logits of ``tip``."""
        return self.tip.logits_row()

    def fork_ahead(self) -> None:
        """Read the text, and draft on a fork, which ``observe`` frees."""
        at = self.own.position
        self.own.decode_unscored(self.text[at:], self.n_prompt - at)
        if not self.own.ctx.n_seq_free:  # a fork would run the garbage collector in every round
            raise SequencesExhaustedError("no sequence is left to draft on")
        self.tip = _forked(self.own)

    def observe(self, n_tokens: int) -> None:
        """Forget all tokens but the first ``n_tokens``."""
        if self.tip is not self.own:
            self.tip.release()
            self.tip = self.own
        if n_tokens < len(self.own.tokens):
            self.own.keep(n_tokens)

    def fork(self, target: Text) -> ModelState:
        """Return a copy of this state that drafts for ``target``."""
        text, params = _forked(self.own), self._drafter.settings(target)
        text.hang(None)  # states may be closed in any order
        if params != text.sampling.replace(seed=params.seed):
            text.resample(params)
        text.seed = target.seed
        return ModelState(self._drafter, text, target, self.rule)

    def close(self) -> None:
        """Free its sequences; if the draft model has a prefix cache, that keeps their K/V."""
        self.own.keep_cached()
        self.tip.release()
        self.own.release()


class ModelDrafter(RunDrafter[ModelState]):
    """Drafts with a small model.

    It must have the target's vocabulary, apart from padding (``Model.compatibility``).

    Args:
        ctx: a context of the draft model. Each text to draft for takes one of its sequences. If the
            context has a prefix cache, it does not process known beginnings of texts again.
        sampling: the settings with which drafts are drawn; None = the settings of each request. With
            the target's settings and seed, the draft is drawn with the target's noise, so both often
            draw the same token.

    Raises:
        ConfigError: it is not a context.
        UnsupportedError: it is the context of a head.
    """

    state_type = ModelState

    def __init__(self, ctx: Context, sampling: SamplingParams | None = None) -> None:
        super().__init__(text_context("ctx", ctx), sampling)

    @property
    def name(self) -> str:
        """The draft model's name."""
        return self.ctx.model.name

    def check(self, target: Model) -> None:
        """Raise VocabularyMismatchError if the vocabularies differ."""
        report = target.compatibility(self.ctx.model)
        if not report:
            raise VocabularyMismatchError(
                f"{self.name} cannot draft for {target.name}: {report.reason}",
                hint="use a draft model of the target's family; see `llamabranch models show`",
            )

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state; it holds a sequence of the draft context."""
        sampler = Sampler(self.ctx.model, self.settings(target), target.grammar)
        return ModelState(self, Text(self.ctx, None, sampler, target.seed), target, rule)

    def settings(self, target: Text) -> SamplingParams:
        """Return the settings with which drafts for ``target`` are drawn."""
        params = super().settings(target)
        ours, theirs = self.ctx.n_vocab, target.ctx.n_vocab
        bias = {token: value for token, value in params.logit_bias.items() if token < ours}
        # Models of a family pad their vocabularies differently, so never draw a token that the target
        # lacks.
        return params.replace(logit_bias=bias | dict.fromkeys(range(theirs, ours), -math.inf))

    def begin(self, states: Sequence[ModelState]) -> None:
        """Note which tokens were not read yet. Memory that cannot be cut reads them now."""
        for state in states:
            text, own = state.text, state.own
            if not own.position:
                own.take_cached(text[:-1], state.n_prompt)
            state.draft.n_read = len(text) - own.position
            self.ctx.model.check_tokens(text[own.position : state.n_prompt])
            if not self.ctx.kv_cache.can_draft:
                state.fork_ahead()
            state.unread = text[state.tip.position :]

    def decode(self, states: Sequence[ModelState]) -> None:
        """Decode the ``unread`` tokens of all states together."""
        if len(states) == 1:
            (state,) = states
            state.tip.decode_unscored(state.unread, state.n_prompt - state.tip.position)
        else:
            batch = Batch()
            for state in states:
                state.tip.check_usable()
                state.tip.settle()
                batch.add(state.tip.seq_id, state.unread)
            for state, rows in zip(states, self.ctx.decoder.decode(batch), strict=True):
                tip = state.tip
                tip.append_unscored(state.unread, rows[-1], state.n_prompt - tip.position)
        for state in states:
            state.unread = ()


def _forked(text: Text) -> Text:
    """Return a copy of a text of the draft model, in another sequence."""
    with text.lock:
        text.check_usable()
        with suppress(CapacityError):  # if it fails, both decode the last token when needed
            text.settle()
        return Text(text.ctx, None, text.sampler.clone(), text.seed, text)
