"""Drafting with a model, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...branch import Branch, BranchStore
from ...context import Context
from ...context.context import text_context
from ...context.logits import LogitsRow
from ...errors import SequencesExhaustedError, VocabularyMismatchError
from ...generation.drafter import DraftState
from ...generation.text import Text
from ...model import Model
from ...sampling import Sampler, SamplingParams
from ...sampling.noise import derive_seed
from .cross_vocabulary import TranslatingState
from .run import RunDrafter, RunState

__all__ = ["ModelDrafter"]


class ModelState(RunState):
    """A branch of the draft model that follows the target's text and drafts ahead of it.

    Attributes:
        branch: holds the text.
        tip: what the draft is drawn on: ``branch``, or a fork of it if its memory cannot be truncated.
    """

    _drafter: ModelDrafter

    def __init__(self, drafter: ModelDrafter, branch: Branch, target: Text, rule: str) -> None:
        super().__init__(drafter, target, rule)
        self.branch = self.tip = branch
        self.model = drafter.ctx.model
        self.n_prompt = target.answer_start  # where a grammar begins

    @property
    def sampler(self) -> Sampler:
        """The branch's."""
        return self.tip.sequence.sampler

    def row(self) -> LogitsRow:
        """Return the branch's logits."""
        return self.tip.sequence.logits_row()

    def fork_ahead(self) -> None:
        """Read the text, and draft on a fork, which ``observe`` prunes."""
        self.branch.sequence.decode_unscored(self.text[self.branch.position :])
        if not self.branch.ctx.n_seq_free:  # to fork would search for garbage, in each round
            raise SequencesExhaustedError("no sequence is left to draft on")
        self.tip = self.branch.fork()

    def observe(self, n_tokens: int) -> None:
        """Forget all tokens but the first ``n_tokens``."""
        if self.tip is not self.branch:
            self.tip.prune()
            self.tip = self.branch
        sequence = self.branch.sequence
        if n_tokens < len(sequence.tokens):
            with sequence.ctx.lock:
                sequence.check_usable()
                sequence.rewind(n_tokens)

    def fork(self, target: Text) -> ModelState:
        """Return a copy of this state that drafts for ``target``."""
        branch = self.branch.fork()
        branch.detach()  # states may be closed in any order
        params = self._drafter.settings(target)
        if params == branch.sampling.replace(seed=params.seed):
            branch.reseed(target.seed)
        else:
            branch.resample(params)
        return ModelState(self._drafter, branch, target, self.rule)

    def close(self) -> None:
        """Free its sequences; a prefix cache of the draft model keeps what they have read."""
        if not self.branch.ctx.closed:
            self.branch.sequence.keep_cached()
            self.branch.prune_subtree()


class ModelDrafter(RunDrafter[ModelState]):
    """Drafts with a small model.

    A model of the same vocabulary drafts token by token. A model of another vocabulary drafts through
    the text (:mod:`.cross_vocabulary`), which costs more and has fewer tokens accepted.
    ``Model.compatibility`` returns which of them applies.

    Args:
        ctx: a context of the draft model; each state holds one of its sequences. With its own prefix
            cache it does not read the beginning of a text again either.
        sampling: the settings of its draws; None = the request's. With equal settings and seed the
            draft draws with the target's noise, which is why the two agree so often.
        translate: whether to draft through the text if the vocabularies differ.

    Raises:
        ConfigError: not a context.
        UnsupportedError: the context of a head.
    """

    state_type = ModelState

    def __init__(
        self,
        ctx: Context,
        sampling: SamplingParams | None = None,
        *,
        translate: bool = True,
    ) -> None:
        super().__init__(text_context("ctx", ctx), sampling)
        self.translate = translate

    @property
    def name(self) -> str:
        """The draft model's name."""
        return self.ctx.model.name

    def check(self, target: Model) -> None:
        """Raise VocabularyMismatchError unless it can draft by tokens or through the text."""
        report = target.compatibility(self.ctx.model)
        if report.path == "none" or (report.path == "text" and not self.translate):
            raise VocabularyMismatchError(
                f"{self.name} cannot draft for {target.name}: {report.reason}",
                hint="use a draft model of the target's family; see `llamabranch models show`",
            )

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state; it holds a sequence of the draft context."""
        if target.ctx.model.compatibility(self.ctx.model).path == "text":
            # Its noise must not be the target's: the tokens differ, so nothing is gained, and the token
            # rule requires independent draws.
            params = self.sampling or target.sampling
            seed = derive_seed(target.seed, 0)
            params = params.replace(seed=seed, logit_bias={}, logits_processor=None)
            return TranslatingState(Branch.create(self.ctx, params), target.ctx.model)
        branch = Branch.create(self.ctx, self.settings(target), target.grammar)
        return ModelState(self, branch, target, rule)

    def settings(self, target: Text) -> SamplingParams:
        """Return the settings with which drafts for ``target`` are drawn."""
        params = super().settings(target)
        ours, theirs = self.ctx.n_vocab, target.ctx.n_vocab
        bias = {token: value for token, value in params.logit_bias.items() if token < ours}
        # Models of a family pad their vocabularies differently: never draw a token the target lacks.
        return params.replace(logit_bias=bias | dict.fromkeys(range(theirs, ours), -math.inf))

    def begin(self, states: Sequence[ModelState]) -> None:
        """Read what is left of the prompts."""
        prompts: dict[Branch, Sequence[int]] = {}
        for state in states:
            text, sequence = state.text, state.branch.sequence
            if not sequence.position:
                sequence.take_cached(text[:-1], state.n_prompt)
            state.draft.n_read = len(text) - sequence.position
            if sequence.position < state.n_prompt:
                prompts[state.branch] = text[sequence.position : state.n_prompt]
        if prompts:
            BranchStore(self.ctx).append(prompts)  # a fork's may follow what was generated
        for state in states:
            if not self.ctx.kv_cache.can_draft:
                state.fork_ahead()
            state.unread = state.text[state.tip.position :]

    def decode(self, states: Sequence[ModelState]) -> None:
        """Decode what is unread of each branch, together."""
        if len(states) == 1:
            states[0].tip.sequence.decode_unscored(states[0].unread)
        else:
            BranchStore(self.ctx).append_unscored({state.tip: state.unread for state in states})
        for state in states:
            state.unread = ()
