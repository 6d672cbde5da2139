"""Drafting with a model: token by token or as a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...branch import Branch, BranchStore
from ...context import Context
from ...context.context import text_context
from ...context.logits import LogitsRow
from ...errors import SequencesExhaustedError, VocabularyMismatchError
from ...generation.drafter import Draft, DraftRequest, DraftState
from ...generation.text import Text
from ...model import Model
from ...sampling import Distribution, Sampler, SamplingParams
from ...sampling.noise import derive_seed
from .cross_vocabulary import TranslatingState
from .run import Drafting, DraftRun, RunDrafter, RunState
from .tree import check_rule

__all__ = ["ModelDrafter"]


class ModelDrafter(RunDrafter):
    """Drafts with a small model.

    A model of the same vocabulary drafts token by token. A model of another vocabulary drafts through
    the text (:mod:`.cross_vocabulary`), which costs more and has fewer tokens accepted.
    ``Model.compatibility`` returns which of them applies.

    Args:
        ctx: a context of the draft model; each state holds one of its sequences, more for a tree. With
            its own prefix cache it does not read the beginning of a text again either.
        sampling: the settings of its draws; None = the request's. With equal settings and seed the
            draft draws with the target's noise, which is why the two agree so often.
        width: candidates per node, 1 to 16; above 1 it proposes trees, which need the seeded rule.
        translate: whether to draft through the text if the vocabularies differ.

    Raises:
        ConfigError: not a context, or an invalid width.
        UnsupportedError: the context of a head.
    """

    def __init__(
        self,
        ctx: Context,
        sampling: SamplingParams | None = None,
        *,
        width: int = 1,
        translate: bool = True,
    ) -> None:
        super().__init__(text_context("ctx", ctx), sampling, width)
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
        """Return a new state; it holds a sequence of the draft context.

        Raises:
            ConfigError: trees under another rule than "seeded".
        """
        if target.ctx.model.compatibility(self.ctx.model).path == "text":
            # Its noise must not be the target's: the tokens differ, so nothing is gained, and the token
            # rule requires independent draws.
            params = self.sampling or target.sampling
            seed = derive_seed(target.seed, 0)
            params = params.replace(seed=seed, logit_bias={}, logits_processor=None)
            return TranslatingState(Branch.create(self.ctx, params), target.ctx.model)
        check_rule(self.width, rule)
        branch = Branch.create(self.ctx, self.settings(target), target.grammar)
        return ModelState(self, branch, target, rule)

    def draft_together(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the drafts for these requests."""
        return ModelDrafting(self, requests).run()

    def settings(self, target: Text) -> SamplingParams:
        """Return the settings with which drafts for ``target`` are drawn."""
        params = super().settings(target)
        ours, theirs = self.ctx.n_vocab, target.ctx.n_vocab
        bias = {token: value for token, value in params.logit_bias.items() if token < ours}
        # Models of a family pad their vocabularies differently: never draw a token the target lacks.
        return params.replace(logit_bias=bias | dict.fromkeys(range(theirs, ours), -math.inf))


class ModelState(RunState):
    """A branch of the draft model that follows the target's text and drafts ahead of it."""

    _drafter: ModelDrafter

    def __init__(self, drafter: ModelDrafter, branch: Branch, target: Text, rule: str) -> None:
        super().__init__(drafter, target, rule)
        self.branch = branch
        self.model = drafter.ctx.model
        self.n_prompt = target.answer_start  # where a grammar begins
        self._ahead: Branch | None = None  # the fork it drafts on if its memory cannot be truncated

    def fork_ahead(self) -> Branch:
        """Return a fork to draft on, for memory that cannot be truncated; ``observe`` prunes it."""
        if not self.branch.ctx.n_seq_free:  # to fork would search for garbage, in each round
            raise SequencesExhaustedError("no sequence is left to draft on")
        self._ahead = self.branch.fork()
        return self._ahead

    def observe(self, n_tokens: int) -> None:
        """Forget all tokens but the first ``n_tokens``."""
        if self._ahead is not None:
            self._ahead.prune()
            self._ahead = None
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


class ModelRun(DraftRun):
    """One stream's draft on a branch of the draft model."""

    def __init__(
        self, state: ModelState, branch: Branch, request: DraftRequest, draft: Draft
    ) -> None:
        super().__init__(state, request, draft)
        self.branch = branch
        self.unread = request.tokens[branch.sequence.position :]

    @property
    def sampler(self) -> Sampler:
        """The branch's."""
        return self.branch.sequence.sampler

    def row(self) -> LogitsRow:
        """Return the branch's logits."""
        return self.branch.sequence.logits_row()


class ModelDrafting(Drafting[ModelRun]):
    """The drafts of one or several branches of the draft model."""

    def begin(self, live: Sequence[int]) -> list[ModelRun]:
        """Read what is left of the prompts."""
        states: dict[int, ModelState] = {}
        prompts: dict[Branch, Sequence[int]] = {}
        for i in live:
            state, tokens = self.requests[i].state, self.requests[i].tokens
            if not isinstance(state, ModelState):
                raise TypeError("a model drafter drafts for its own states")
            branch = state.branch
            if not branch.sequence.position:
                branch.sequence.take_cached(tokens[:-1], state.n_prompt)
            self.drafts[i].n_read = len(tokens) - branch.sequence.position
            if branch.sequence.position < state.n_prompt:
                prompts[branch] = tokens[branch.sequence.position : state.n_prompt]
            states[i] = state
        if prompts:
            BranchStore(self.ctx).append(prompts)  # a fork's may follow what was generated
        return [self._begun(state, i) for i, state in states.items()]

    def _begun(self, state: ModelState, i: int) -> ModelRun:
        request, branch = self.requests[i], state.branch
        if self.width == 1 and not self.ctx.kv_cache.can_draft:
            branch.sequence.decode_unscored(request.tokens[branch.sequence.position :])
            branch = state.fork_ahead()
        return ModelRun(state, branch, request, self.drafts[i])

    def decode(self, runs: Sequence[ModelRun]) -> None:
        """Decode what is unread of each branch, together."""
        if len(runs) == 1:
            runs[0].branch.sequence.decode_unscored(runs[0].unread)
        else:
            BranchStore(self.ctx).append_unscored({run.branch: run.unread for run in runs})
        for run in runs:
            run.unread = ()

    def draft(self, runs: list[ModelRun]) -> None:
        """Finish the drafts, token by token or as trees of forks."""
        if self.width == 1:
            return super().draft(runs)
        for run in runs:
            self.decode([run])
            run.grow(_Forks(self.ctx), run.branch, self.width)
        return None


class _Forks:
    """The branches of a tree while it grows."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._store = BranchStore(ctx)

    def entropy(self, node: Branch) -> float:
        return node.entropy()

    def distribution(self, node: Branch) -> Distribution:
        return node.distribution()

    def position(self, node: Branch) -> int:
        return node.position

    def fork(self, node: Branch) -> Branch:
        fork = node.fork()
        fork.detach()
        return fork

    def free(self, node: Branch) -> None:
        node.prune_subtree()  # a Ctrl-C may have come before a fork of it was detached

    def decode(self, nodes: Sequence[Branch], tokens: Sequence[int]) -> None:
        self._store.commit(dict(zip(nodes, tokens, strict=True)))
