"""Drafting with a model: token by token or as a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter

from ...branch import Branch, BranchStore
from ...context import Context
from ...context.context import text_context
from ...context.decode_times import context_key
from ...context.logits import LogitsRow
from ...errors import CapacityError, GrammarError, VocabularyMismatchError
from ...model import Model
from ...native.draft_loop import DraftStream
from ...sampling import Distribution, SamplingParams
from ...sampling.noise import DRAFT, derive_seed
from ..length.base import DraftLength
from ..rules import draft_seed
from .base import Draft, Drafter, DraftRequest, DraftState
from .compiled import LoopStream, share_costs, take_drawn
from .cross_vocabulary import TranslatingState
from .tree import check_rule, grow_tree, tree_settings, tree_width

__all__ = ["ModelDrafter"]


class ModelDrafter(Drafter):
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
        self._width = tree_width(width)
        self.ctx = text_context("ctx", ctx)
        self.sampling = sampling
        self.translate = translate

    @property
    def width(self) -> int:
        """Candidates per node; above 1 it proposes trees."""
        return self._width

    @property
    def name(self) -> str:
        """The draft model's name."""
        return self.ctx.model.name

    @property
    def profile_keys(self) -> dict[str, str]:
        """The fingerprint of the model, the number of threads, and the width."""
        return {self.name: f"model {context_key(self.ctx)} width {self.width}"}

    def check(self, target: Model) -> None:
        """Raise VocabularyMismatchError unless it can draft by tokens or through the text."""
        report = target.compatibility(self.ctx.model)
        if report.path == "none" or (report.path == "text" and not self.translate):
            raise VocabularyMismatchError(
                f"{self.name} cannot draft for {target.name}: {report.reason}",
                hint="use a draft model of the target's family; see `llamabranch inspect`",
            )

    def start(self, target: Branch, rule: str) -> DraftState:
        """Return a new state; it holds a sequence of the draft context.

        Raises:
            ConfigError: trees under another rule than "seeded".
        """
        check_rule(self.width, rule)
        if target.ctx.model.compatibility(self.ctx.model).path == "text":
            # Its noise must not be the target's: the tokens differ, so nothing is gained, and the token
            # rule requires independent draws.
            params = self.sampling or target.sampling
            params = params.replace(seed=derive_seed(target.seed, 0), logit_bias={})
            return TranslatingState(Branch.create(self.ctx, params), target.ctx.model)
        branch = Branch.create(self.ctx, self.settings(target), target.grammar)
        kind = ModelState if self.width == 1 else TreeState
        return kind(self, branch, target, rule)

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft for all requests together: one decode of the draft model for each drafted position.

        Requests are drafted for one by one if the drafts are trees or go through the text, or if the
        draft model's memory cannot be truncated.
        """
        in_step: dict[int, ModelState] = {}
        if self.width == 1 and self.ctx.capabilities.can_truncate:
            states = enumerate(request.state for request in requests)
            in_step = {i: state for i, state in states if isinstance(state, ModelState)}
        if len(in_step) < 2:
            return super().propose_many(requests)
        found = _BatchedDrafting(
            self.ctx, [requests[i] for i in in_step], list(in_step.values())
        ).run()
        drafts = dict(zip(in_step, found, strict=True))
        rest = [i for i in range(len(requests)) if i not in drafts]
        alone = super().propose_many([requests[i] for i in rest])
        drafts.update(zip(rest, alone, strict=True))
        return [drafts[i] for i in range(len(requests))]

    def settings(self, target: Branch) -> SamplingParams:
        """Return the settings with which drafts for ``target`` are drawn."""
        params = self.sampling or target.sampling
        ours, theirs = self.ctx.n_vocab, target.ctx.n_vocab
        bias = {token: value for token, value in params.logit_bias.items() if token < ours}
        # Models of a family pad their vocabularies differently: never draw a token the target lacks.
        bias |= dict.fromkeys(range(theirs, ours), -math.inf)
        params = params.replace(seed=target.seed, logit_bias=bias, logprobs=False)
        return tree_settings(params) if self.width > 1 else params


class ModelState:
    """A branch of the draft model that follows the target's text and drafts ahead of it."""

    def __init__(self, drafter: ModelDrafter, branch: Branch, target: Branch, rule: str) -> None:
        self.branch = branch
        self.n_prompt = target.sequence.answer_start  # where a grammar begins
        self._name = drafter.name
        self._drafter = drafter
        self._rule = rule
        # A tree's candidates are ranked without noise if the draws are greedy.
        self._greedy = (drafter.sampling or target.sampling).temperature == 0.0
        self._noise = 0  # the seed of this draft's draws under the rules "token" and "block"
        self._ahead: Branch | None = None  # the fork it drafts on if its memory cannot be truncated
        self._stream = LoopStream(branch.ctx.n_vocab, rule)

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Decode the tokens that are new in one decode, then draw token by token."""
        draft = Draft(drafter=self._name)
        if not length.consider(draft.drafter):
            draft.stopped = "off"
            return draft
        start = perf_counter()
        decoder = self.branch.ctx.decoder
        decodes = decoder.n_decodes
        try:
            unread = self._catch_up(draft, tokens)
            self._draft(draft, unread, length, limit)
        except CapacityError:  # without room to draft the target goes on alone
            draft.stopped = "capacity"
        draft.n_decodes = decoder.n_decodes - decodes
        draft.seconds = perf_counter() - start
        return draft

    def _catch_up(self, draft: Draft, tokens: Sequence[int]) -> Sequence[int]:
        """Decode what is left of the prompt; return the tokens after it that are new."""
        sequence = self.branch.sequence
        self.take_cached(tokens)
        n_known = len(sequence.tokens)
        draft.n_read = len(tokens) - n_known
        if n_known < self.n_prompt:
            self.branch.prefill(tokens[n_known : self.n_prompt])
            n_known = len(sequence.tokens)
        return tokens[n_known:]

    def take_cached(self, tokens: Sequence[int]) -> None:
        """Begin with what the draft model's prefix cache has of ``tokens``, if nothing is read yet."""
        if not self.branch.sequence.tokens:
            self.branch.sequence.take_cached(tokens[:-1], self.n_prompt)

    def _draft(self, draft: Draft, unread: Sequence[int], length: DraftLength, limit: int) -> None:
        ctx, branch = self.branch.ctx, self.branch
        if not ctx.capabilities.can_truncate:
            branch.sequence.decode_unscored(unread)
            branch, unread = self._fork_ahead(), ()
        run = _Run(self, branch, draft, length, limit, unread)
        _draft_together(ctx, [run])

    def _fork_ahead(self) -> Branch:
        self._ahead = self.branch.fork()
        return self._ahead

    def begin_noise(self, position: int) -> None:
        """Begin a draft whose first token is at ``position``."""
        if self._rule != "seeded":
            self._noise = draft_seed(self.branch.seed, position)

    def stream(self, n_drafted: int, length: DraftLength, limit: int) -> DraftStream | None:
        """Return what the compiled loop needs to draw for this state; None: it cannot.

        The draft has ``n_drafted`` tokens so far, and at most ``limit``.
        """
        sequence = self.branch.sequence
        return self._stream.begin(
            sequence.sampler,
            seed=sequence.seed,
            noise=self._noise,
            seq_id=sequence.seq_id,
            n_drafted=n_drafted,
            length=length,
            limit=limit,
        )

    def draw(
        self, draft: Draft, length: DraftLength, branch: Branch, *, is_decided: bool = False
    ) -> int | None:
        """Draw the next token of ``branch`` and add it to the draft; return it if more may follow.

        ``is_decided``: the length was asked already, and goes on.
        """
        sequence = branch.sequence
        entropy = branch.entropy() if length.reads_entropy else math.nan
        draft.entropies.append(entropy)
        if not is_decided and not length.goes_on(len(draft.tokens), entropy):
            draft.stopped = length.reason
            return None
        try:
            if self._rule == "seeded":
                with sequence.ctx.lock:  # the logits are valid until the next decode of any thread
                    token = sequence.draw(sequence.logits_row())
            else:
                source = branch.distribution()
                token = source.draw(self._noise, branch.position, DRAFT)
                draft.sources.append(source)
        except GrammarError:  # a dead end of the grammar: the target raises it if it gets there
            draft.stopped = "end"
            return None
        draft.tokens.append(token)
        if sequence.ctx.model.is_eog(token):
            draft.stopped = "end"
            return None
        return token

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

    def fork(self, target: Branch) -> DraftState:
        """Return a copy of this state that drafts for ``target``."""
        branch = self.branch.fork()
        branch.detach()  # states may be closed in any order
        params = self._drafter.settings(target)
        if params == branch.sampling.replace(seed=params.seed):
            branch.reseed(target.seed)
        else:
            branch.resample(params)
        return type(self)(self._drafter, branch, target, self._rule)

    def close(self) -> None:
        """Free its sequences; a prefix cache of the draft model keeps what they have read."""
        if not self.branch.ctx.closed:
            self.branch.sequence.keep_cached()
            self.branch.prune_subtree()


class _Run:
    """One stream's draft while it is being drawn.

    Attributes:
        unread: tokens that ``branch`` decodes before the next draw.
        is_done: the draft has ended.
        is_decided: the length has been asked about the next token, and goes on.
    """

    def __init__(
        self,
        state: ModelState,
        branch: Branch,
        draft: Draft,
        length: DraftLength,
        limit: int,
        unread: Sequence[int],
    ) -> None:
        self.state = state
        self.branch = branch
        self.draft = draft
        self.length = length
        self.limit = limit
        self.unread = unread
        self.is_done = self.is_decided = False
        state.begin_noise(len(branch.sequence.tokens) + len(unread))

    def draw(self) -> None:
        """Draw the next token in Python."""
        token = self.state.draw(self.draft, self.length, self.branch, is_decided=self.is_decided)
        self.is_decided = False
        if token is None or len(self.draft.tokens) >= self.limit:
            self.is_done = True  # the last token is decoded by the next catch-up, if it is accepted
        else:
            self.unread = (token,)

    def take(self, stream: DraftStream, row: LogitsRow | None) -> None:
        """Add what the compiled loop has drawn; ``row`` follows the last token that it decoded."""
        sequence = self.branch.sequence
        following = [*self.unread, *stream.tokens]
        n_new = sequence.n_cached - len(sequence.tokens)
        if n_new:
            sequence.append_unscored(following[:n_new], row)
        self.unread = following[n_new:]
        taken = take_drawn(self.draft, stream, self.length, self.limit)
        self.is_done |= taken.is_done
        self.is_decided |= taken.is_decided
        if taken.ends_at is not None:
            self._end_at(taken.ends_at)

    def _end_at(self, n: int) -> None:
        """End the draft after ``n`` tokens, as the length decides."""
        draft, sequence = self.draft, self.branch.sequence
        end = len(sequence.tokens) + len(self.unread) - (len(draft.tokens) - n)
        draft.cut(n)
        draft.stopped = self.length.reason
        if len(sequence.tokens) > end:  # tokens that it would not have drawn
            sequence.rewind(end)


def _draft_together(ctx: Context, runs: Sequence[_Run]) -> None:
    """Finish the drafts of streams of ``ctx``, with one decode for each position of all of them.

    The compiled loop decodes and draws as far as it can. Where it cannot, and where one of its decodes
    fails, a step is made here, which raises what there is to raise.
    """
    may_loop = ctx.capabilities.can_truncate
    live = list(runs)
    while live:
        if may_loop and len({not run.unread for run in live}) == 1:
            may_loop = _loop(ctx, live)
            live = [run for run in live if not run.is_done]
            if not live:
                return
        if all(run.unread for run in live):
            _decode(ctx, live)
        for run in live:
            if not run.unread:
                run.draw()
        live = [run for run in live if not run.is_done]


def _decode(ctx: Context, runs: Sequence[_Run]) -> None:
    if len(runs) == 1:
        runs[0].branch.sequence.decode_unscored(runs[0].unread)
    else:
        BranchStore(ctx).append_unscored({run.branch: run.unread for run in runs})
    for run in runs:
        run.unread = ()


def _loop(ctx: Context, runs: Sequence[_Run]) -> bool:
    """Draft in the compiled core; return False if it cannot draft for these streams."""
    streams: list[DraftStream] = []
    for run in runs:
        stream = run.state.stream(len(run.draft.tokens), run.length, run.limit)
        if stream is None:
            return False
        streams.append(stream)
    with ctx.lock:
        sequences = [run.branch.sequence for run in runs]
        for sequence in sequences:
            sequence.check_usable()
            sequence.catch_up()
        addresses: list[int | None] = [None] * len(runs)
        if not runs[0].unread:  # nor has any other
            rows = [sequence.logits_row() for sequence in sequences]
            addresses = [row.address for row in rows]
        expiring = [row for sequence in sequences for row in sequence.expiring_rows()]
        for stream, run, address in zip(streams, runs, addresses, strict=True):
            stream.start(len(run.branch.sequence.tokens) + len(run.unread), address)
        found = ctx.decoder.draft(
            streams, [run.unread for run in runs], max(run.limit for run in runs), expiring
        )
        if found is None:
            return False
        for run, stream, row in zip(runs, streams, found, strict=True):
            run.take(stream, row)
    return True


class _BatchedDrafting:
    """The drafts of several streams, one batched decode per drafted position."""

    def __init__(
        self, ctx: Context, requests: Sequence[DraftRequest], states: Sequence[ModelState]
    ) -> None:
        self._ctx = ctx
        self._requests = requests
        self._states = states
        self._drafts = [Draft(drafter=ctx.model.name) for _ in requests]

    def run(self) -> list[Draft]:
        start = perf_counter()
        decodes = self._ctx.decoder.n_decodes
        live = []
        for i, request in enumerate(self._requests):
            if request.length.consider(self._drafts[i].drafter):
                live.append(i)
            else:
                self._drafts[i].stopped = "off"
        runs: list[_Run] = []
        try:
            runs = self._catch_up(live)
            _draft_together(self._ctx, runs)
        except CapacityError:  # without room to draft the target goes on alone
            unfinished = [run.draft for run in runs if not run.is_done]
            for draft in unfinished if runs else [self._drafts[i] for i in live]:
                draft.stopped = "capacity"
        share_costs(self._drafts, perf_counter() - start, self._ctx.decoder.n_decodes - decodes)
        return self._drafts

    def _catch_up(self, live: Sequence[int]) -> list[_Run]:
        """Decode what is left of the prompts; return the runs that follow."""
        prompts: dict[Branch, list[int]] = {}
        for i in live:
            state, tokens = self._states[i], self._requests[i].tokens
            state.take_cached(tokens)
            self._drafts[i].n_read = len(tokens) - state.branch.position
            prompts[state.branch] = tokens[state.branch.position : state.n_prompt]
        store = BranchStore(self._ctx)
        store.prefill({branch: tokens for branch, tokens in prompts.items() if tokens})
        runs = []
        for i in live:
            (_, tokens, length, limit), state = self._requests[i], self._states[i]
            unread = tokens[state.branch.position :]
            runs.append(_Run(state, state.branch, self._drafts[i], length, limit, unread))
        return runs


class TreeState(ModelState):
    """Proposes a tree of forks of its branch (:mod:`.tree`)."""

    def _draft(self, draft: Draft, unread: Sequence[int], length: DraftLength, limit: int) -> None:
        branch = self.branch
        branch.sequence.decode_unscored(unread)
        grow_tree(
            draft,
            _Forks(branch.ctx),
            branch,
            width=self._drafter.width,
            length=length,
            limit=limit,
            seed=None if self._greedy else branch.seed,
            is_eog=branch.ctx.model.is_eog,
        )


class _Forks:
    """The branches of a tree while it grows."""

    def __init__(self, ctx: Context) -> None:
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
        node.prune()

    def decode(self, nodes: Sequence[Branch], tokens: Sequence[int]) -> None:
        self._store.commit(dict(zip(nodes, tokens, strict=True)))
