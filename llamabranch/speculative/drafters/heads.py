"""Drafting with the target's hidden states: EAGLE-3 heads and MTP layers.

A head reads pairs of a token and a state. For the tokens of the text the states are the target's, after
the head's encoder if it has one; for drafted tokens they are the head's own, from the step before. So the
K/V of drafted pairs is dropped after each draft, and that of accepted tokens computed from the target's
states.

- EAGLE-3 (Li et al. 2025, 2503.01840): at position P the pair is (token P + 1, state P).
- MTP (DeepSeek-V3, 2412.19437): at position P the pair is (token P, state P - 1). Several layers form a
  chain: each drafts one token, and reads the states that the layers before it made of the draft.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from ...arguments import instance
from ...branch import Branch
from ...context import Context
from ...context.decode_times import context_key
from ...context.decoder import HeadInput
from ...context.logits import LogitsRow
from ...errors import CapacityError, ConfigError, GrammarError, UnsupportedError
from ...model import Model
from ...native.draft_loop import DraftStream
from ...sampling import Distribution, Grammar, Sampler, SamplingParams
from ...sampling.noise import DRAFT
from ..length.base import DraftLength
from ..rules import draft_seed
from .base import Draft, Drafter, DraftRequest, DraftState
from .compiled import LoopStream, share_costs, take_drawn
from .tree import check_rule, grow_tree, tree_settings, tree_width

__all__ = ["EagleDrafter", "MTPDrafter"]

States = npt.NDArray[np.float32]

_MOST_ROWS = 64  # tokens of a decode whose logits are all computed; longer ones are split


class _HeadDrafter(Drafter):
    """What both kinds share: one context, whose sequences follow the target's texts.

    Attributes:
        ctx: the head's context.
        sampling: the settings of its draws; None = the request's.
        ahead: by how many tokens a pair's token is ahead of its position.
    """

    ctx: Context
    sampling: SamplingParams | None
    ahead: int
    _width = 1

    @property
    def width(self) -> int:
        """Candidates per node; above 1 it proposes trees."""
        return self._width

    @property
    def n_layers(self) -> int:
        """How many layers draft in turn, each with K/V of its own; 1 = one drafts all tokens."""
        return 1

    def _check_target(self, target: Branch) -> None:
        if target.ctx is not self.ctx.target:
            raise ConfigError(
                f"{self.name} drafts for another context: it reads that one's hidden states",
                hint="open the head with target=, the context that generates",
            )

    def start(self, target: Branch, rule: str) -> DraftState:
        """Return a new state; it holds a sequence of the head's context.

        Raises:
            ConfigError: ``target`` belongs to another context than the head's target; trees under another
                rule than "seeded".
        """
        check_rule(self.width, rule)
        self._check_target(target)
        return HeadState(self, target, rule)

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft for all requests together: one decode of the head for each drafted position.

        Trees are drafted one by one.
        """
        states = [request.state for request in requests]
        ours = [state for state in states if isinstance(state, HeadState)]
        if self.width > 1 or not states or len(ours) < len(states):
            return super().propose_many(requests)
        return self.drafting(requests, ours).run()

    def drafting(self, requests: Sequence[DraftRequest], states: Sequence[HeadState]) -> _Drafting:
        """Return the work of drafting for these requests together."""
        kind = _Drafting if self.n_layers == 1 else _ChainDrafting
        if self.ctx.model.shares_memory:
            kind = _SharingDrafting
        return kind(self, requests, states)

    def settings(self, target: Branch) -> SamplingParams:
        """Return the settings with which drafts for ``target`` are drawn."""
        params = (self.sampling or target.sampling).replace(seed=target.seed, logprobs=False)
        return tree_settings(params) if self.width > 1 else params

    def ranks_by_noise(self, target: Branch) -> bool:
        """Return whether a tree's candidates are ranked with the noise of the target's draws."""
        return (self.sampling or target.sampling).temperature > 0.0


class EagleDrafter(_HeadDrafter):
    """Drafts with an EAGLE-3 head, which reads the hidden states of three layers of the target.

    Args:
        ctx: a context of the head: ``Context(Model("head.gguf"), target=ctx)``. Each state holds one
            of its sequences, more for a tree.
        sampling: the settings of its draws; None = the request's.
        width: candidates per node, 1 to 16; above 1 it proposes trees, which need the seeded rule.

    Raises:
        ConfigError: not a context of a head, or an invalid width.
    """

    ahead = 1

    def __init__(
        self, ctx: Context, sampling: SamplingParams | None = None, *, width: int = 1
    ) -> None:
        instance("ctx", ctx, Context, 'EagleDrafter(Context(Model("head.gguf"), target=ctx))')
        if ctx.target is None or not ctx.model.target_layers:
            raise ConfigError(
                f"{ctx.model.name} is not open as an EAGLE-3 head",
                hint='EagleDrafter(Context(Model("head.gguf"), target=ctx))',
            )
        self._width = tree_width(width)
        self.ctx = ctx
        self.sampling = sampling

    @property
    def name(self) -> str:
        """The head's name."""
        return self.ctx.model.name

    @property
    def profile_keys(self) -> dict[str, str]:
        """The fingerprint of the head, the number of threads, and the width of trees."""
        width = f" width {self.width}" if self.width > 1 else ""
        return {self.name: f"eagle {context_key(self.ctx)}{width}"}

    def check(self, target: Model) -> None:
        """Raise UnsupportedError, with the reason, unless the head fits ``target``."""
        reason = target.head_fault(self.ctx.model)
        if reason:
            raise UnsupportedError(f"{self.name} cannot draft for {target.name}: {reason}")


class MTPDrafter(_HeadDrafter):
    """Drafts with the MTP layers of the target itself, or with those of a file of their own.

    For the target's own it opens a context; ``close`` frees it, and so does closing the target. Several
    layers draft one token each, so a draft has at most as many tokens as there are layers.

    Args:
        target: the context that generates, of a model loaded with ``load_mtp=True``; or a context of
            MTP layers that is open already: ``Context(model, target=ctx)``.
        sampling: the settings of the draws; None = the request's.

    Raises:
        ConfigError: not a context.
        UnsupportedError: the target has no MTP layers that can be computed, with the reason.
    """

    ahead = 0

    def __init__(self, target: Context, sampling: SamplingParams | None = None) -> None:
        instance(
            "target", target, Context, "give the context that generates, for example lb.load()"
        )
        is_open = target.target is not None and not target.model.target_layers
        self.ctx = target if is_open else Context(target.model, target=target)
        self.sampling = sampling

    @property
    def n_layers(self) -> int:
        """How many MTP layers there are; of several, each drafts one token.

        1 for layers that read the target's K/V: llama.cpp computes all of them for each token.
        """
        return 1 if self.ctx.model.shares_memory else self.ctx.model.n_mtp_layers

    @property
    def name(self) -> str:
        """The name of the file's model, and "MTP"."""
        return f"{self.ctx.model.name} MTP"

    @property
    def profile_keys(self) -> dict[str, str]:
        """The fingerprint of the file and the number of threads."""
        return {self.name: f"mtp {context_key(self.ctx)}"}

    def check(self, target: Model) -> None:
        """Raise UnsupportedError, with the reason, unless the MTP layers fit ``target``."""
        reason = target.head_fault(self.ctx.model)
        if reason:
            raise UnsupportedError(f"{self.name} cannot draft for {target.name}: {reason}")

    def close(self) -> None:
        """Free the context of the MTP layers."""
        self.ctx.close()


class HeadState:
    """The sequences of the head's context that follow one text of the target.

    Attributes:
        seq_ids: a sequence for each layer that drafts; none where it reads the target's.
        target: the branch that is drafted for.
        tokens: the text that it has read.
        rule: the acceptance rule.
        ahead: by how many tokens a pair's token is ahead of its position.
        width: candidates per node of a tree; 1 = a chain.
        ranks_by_noise: whether they are ranked with the noise of the target's draws.
        n_skipped: how many of the first pairs its sequences lack: the states of these are not known.
    """

    def __init__(self, drafter: _HeadDrafter, target: Branch, rule: str) -> None:
        self.target = target
        self.rule = rule
        self.ahead = drafter.ahead
        self.width = drafter.width
        self.ranks_by_noise = drafter.ranks_by_noise(target)
        self.tokens: list[int] = []
        self.n_skipped = 0
        self.seed = target.seed
        self._drafter = drafter
        self._ctx = drafter.ctx
        self._n_prompt = target.sequence.answer_start  # where a grammar begins
        self._sampler = self._new_sampler(drafter.settings(target), target.grammar)
        # How many tokens the sampler has accepted; None if it must accept all of them again.
        self._n_accepted: int | None = None
        self._stream = LoopStream(drafter.ctx.n_vocab, rule)
        # llama.cpp computes one layer at a time, and writes K/V of that layer only. So a cell would not
        # serve two layers, unless the second wrote to the same one, which llama.cpp does not promise.
        self.seq_ids: list[int] = []
        try:
            for _ in range(0 if self._ctx.model.shares_memory else drafter.n_layers):
                self.seq_ids.append(self._ctx.lease(self))
        except BaseException:
            self.close()
            raise

    def _new_sampler(self, params: SamplingParams, grammar: Grammar | None) -> Sampler:
        return Sampler(self._ctx.model, params, grammar)

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Read the tokens that are new with the target's states of them, then draw token by token."""
        request = DraftRequest(self, list(tokens), length, limit)
        return self._drafter.drafting([request], [self]).run()[0]

    # -- what it has read --------------------------------------------------------------------------

    def n_pairs(self, layer: int = 0) -> int:
        """Return the number of the first pair that a layer has not read."""
        if not self.seq_ids:
            return 0
        return self.n_skipped + self._ctx.kv_cache.next_position(self.seq_ids[layer])

    def features(self, tokens: Sequence[int], n_layers: int) -> tuple[int, States]:
        """Return the first pair of the text that one of ``n_layers`` has not read, and what it reads.

        The last pair is read again if all were read: the draft begins at its logits. Where the target
        has no states of some tokens, and no room to decode them again, the head forgets what it has
        read and begins after them.

        Returns:
            the number of the pair, and the target's states for all from there on, float32 (n, width).

        Raises:
            CapacityError: the target has no state of the last token.
        """
        target = self.target
        self.observe(len(tokens) - 1)
        first = len(tokens) - 1  # where all that it reads of the text is the target's K/V
        if self.seq_ids:
            first = min(self.n_pairs(layer) for layer in range(n_layers))
        start = max(0, first + self.ahead - 1)
        with target.ctx.lock:
            sequence = target.sequence
            sequence.check_usable()
            sequence.catch_up()
            rows = target.ctx.hidden_states(sequence.seq_id, list(tokens[:-1]), start)
        if len(rows) < len(tokens) - 1 - start:
            first = len(tokens) - len(rows) - self.ahead
            self._skip(first)
        elif first + self.ahead == 0:  # no state comes before the first token
            rows = np.concatenate((np.zeros((1, rows.shape[1]), dtype=np.float32), rows))
        return first, rows

    def _skip(self, n: int) -> None:
        """Begin again with pair ``n``."""
        with self._ctx.lock:
            self._ctx.decoder.check_open()
            for seq_id in self.seq_ids:
                self._ctx.kv_cache.drop(seq_id, 0)
            self.n_skipped = n

    def cut(self, n_tokens: int) -> None:
        """Keep the pairs of the first ``n_tokens`` of the text. Hold the lock of the head's context."""
        n = max(0, n_tokens - self.ahead - self.n_skipped)
        cache = self._ctx.kv_cache
        for seq_id in self.seq_ids:
            if cache.next_position(seq_id) > n:
                cache.drop(seq_id, n)
        if n == 0:
            self.n_skipped = 0

    def observe(self, n_tokens: int) -> None:
        """Forget all tokens but the first ``n_tokens``."""
        if self._n_accepted is not None and self._n_accepted > n_tokens:
            self._n_accepted = None
        if n_tokens >= len(self.tokens):
            return
        with self._ctx.lock:
            self._ctx.decoder.check_open()
            self.cut(n_tokens)
            del self.tokens[n_tokens:]

    # -- drawing -----------------------------------------------------------------------------------

    def sampler(self, tokens: Sequence[int]) -> Sampler:
        """Return a sampler that has accepted ``tokens``, the text, for one draft."""
        if not self._sampler.is_stateless:
            n = self._n_prompt
            if self._n_accepted is None:
                self._sampler = self._sampler.replay(tokens[:n], tokens[n:])
            else:
                for token in tokens[self._n_accepted :]:
                    self._sampler.accept(token)
            self._n_accepted = len(tokens)
        return self._sampler

    def stream(
        self, sampler: Sampler, noise: int, n_drafted: int, length: DraftLength, limit: int
    ) -> DraftStream | None:
        """Return what the compiled loop needs to draw for this state; None: it cannot.

        The draft has ``n_drafted`` tokens so far, and at most ``limit``.
        """
        stream = self._stream.begin(
            sampler,
            seed=self.seed,
            noise=noise,
            seq_id=self.seq_ids[0],
            n_drafted=n_drafted,
            length=length,
            limit=limit,
        )
        if stream is not None:
            stream.set_behind(self.ahead + self.n_skipped)
        return stream

    # -- life --------------------------------------------------------------------------------------

    def fork(self, target: Branch) -> DraftState:
        """Return a copy of this state that drafts for ``target``."""
        other = HeadState(self._drafter, target, self.rule)
        cache = self._ctx.kv_cache
        with self._ctx.lock:
            for mine, its in zip(self.seq_ids, other.seq_ids, strict=True):
                if cache.next_position(mine):
                    cache.share(mine, its)
            other.tokens = list(self.tokens)
            other.n_skipped = self.n_skipped
        return other

    def close(self) -> None:
        """Free its sequences."""
        if not self._ctx.closed:
            for seq_id in self.seq_ids:
                self._ctx.return_lease(seq_id)


class _Run:
    """One stream's draft while it is being drawn.

    Attributes:
        first: the number of the first pair of ``features``.
        features: the target's states, as far as a layer has not read them.
        unread: tokens of the text that the first layer reads before the first draw.
        row: the logits of the next token, valid until the next decode.
        hidden: the head's state for the next pair, (n_embd,).
        limit: the most tokens of the draft.
        is_drawn: the last token of the draft was drawn from ``row``, and is not decoded yet.
        is_done: the draft has ended.
    """

    def __init__(
        self,
        state: HeadState,
        request: DraftRequest,
        draft: Draft,
        features: tuple[int, States],
    ) -> None:
        self.state = state
        self.draft = draft
        self.first, self.features = features
        self.unread = request.tokens[max(state.n_pairs(), self.first) + state.ahead :]
        self.limit = request.limit
        self.row: LogitsRow | None = None
        self.hidden: States | None = None
        self.is_drawn = self.is_done = False
        self._text = request.tokens
        self._is_decided = False  # the length has been asked about the next token, and goes on
        self._length = request.length
        self._sampler = state.sampler(request.tokens)
        self._noise = 0
        if state.rule != "seeded":
            self._noise = draft_seed(state.seed, len(request.tokens))
        draft.n_read = len(request.tokens) - len(state.tokens)

    @property
    def first_features(self) -> States:
        """The features of ``unread``."""
        return self.features[len(self.features) - len(self.unread) :]

    def behind(self, layer: int) -> tuple[list[int], States]:
        """Return the tokens of the text that a layer has not read, and the target's states for them."""
        n = max(self.state.n_pairs(layer), self.first)
        return self._text[n + self.state.ahead :], self.features[n - self.first :]

    def note_read(self) -> None:
        """Note that ``unread`` was decoded."""
        self.state.tokens = list(self._text)
        self.unread = []

    def draw(self) -> None:
        """Draw the next token in Python."""
        self.is_drawn = True
        self.is_done = not self._draw()

    def _draw(self) -> bool:
        """Draw the next token; return whether another may follow it."""
        draft, length, row = self.draft, self._length, self.row
        if row is None:
            raise RuntimeError("nothing was decoded to draw from")
        entropy = row.entropy() if length.reads_entropy else math.nan
        draft.entropies.append(entropy)
        if not self._is_decided and not length.goes_on(len(draft.tokens), entropy):
            draft.stopped = length.reason
            return False
        self._is_decided = False
        state, sampler = self.state, self._sampler
        position = len(self._text) + len(draft.tokens)
        try:
            if state.rule == "seeded":
                token = row.draw(sampler, state.seed, position, measured=False)
            else:
                source = sampler.distribution(row.array, position, state.seed)
                token = source.draw(self._noise, position, DRAFT)
                draft.sources.append(source)
            draft.tokens.append(token)
            if state.target.ctx.model.is_eog(token):
                draft.stopped = "end"
                return False
            if len(draft.tokens) >= self.limit:
                return False
            if not sampler.is_stateless:
                self._sampler = sampler.after((token,))
        except GrammarError:  # a dead end of the grammar: the target raises it if it gets there
            draft.stopped = "end"
            return False
        return True

    def grow(self, ctx: Context) -> None:
        """Draft a tree in the head's context. The text is read."""
        state = self.state
        root = _Leaf(state.seq_ids[0], self._sampler, len(self._text), self.row, self.hidden)
        grow_tree(
            self.draft,
            _Leaves(ctx, state.seed),
            root,
            width=state.width,
            length=self._length,
            limit=self.limit,
            seed=state.seed if state.ranks_by_noise else None,
            is_eog=state.target.ctx.model.is_eog,
        )

    def stream(self) -> DraftStream | None:
        """Return this run's part of the compiled loop; None: it has none."""
        n, row, hidden = len(self.draft.tokens), self.row, self.hidden
        stream = self.state.stream(self._sampler, self._noise, n, self._length, self.limit)
        if stream is None:
            return None
        if self.unread:
            stream.start(len(self._text), None)
        elif row is None or hidden is None:
            return None
        else:
            stream.start(len(self._text) + n, row.address, hidden.ctypes.data)
        return stream

    def take(self, stream: DraftStream, row: LogitsRow | None) -> None:
        """Add what the compiled loop has drawn; ``row`` follows its last decode."""
        draft = self.draft
        if row is not None:
            self.row = row
        self.is_drawn = len(stream.tokens) > stream.n_decoded
        taken = take_drawn(draft, stream, self._length, self.limit)
        self.is_done |= taken.is_done
        self._is_decided |= taken.is_decided
        if taken.ends_at is not None:
            draft.cut(taken.ends_at)
            draft.stopped = self._length.reason


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Leaf:
    """A node of a tree: the sequence that holds it, and what follows it.

    Attributes:
        seq_id: the sequence.
        sampler: has accepted the text up to it.
        position: of the token that follows.
        row, hidden: the logits after it, valid until the next decode, and the head's state.
    """

    seq_id: int
    sampler: Sampler
    position: int
    row: LogitsRow | None
    hidden: States | None


class _Leaves:
    """The sequences of a tree while it grows."""

    def __init__(self, ctx: Context, seed: int) -> None:
        self._ctx = ctx
        self._seed = seed
        self._decoder = ctx.decoder

    def entropy(self, node: _Leaf) -> float:
        return _row_of(node).entropy()

    def distribution(self, node: _Leaf) -> Distribution:
        return node.sampler.distribution(_row_of(node).array, node.position, self._seed)

    def position(self, node: _Leaf) -> int:
        return node.position

    def fork(self, node: _Leaf) -> _Leaf:
        fork = _Leaf(-1, node.sampler, node.position, None, node.hidden)
        fork.seq_id = self._ctx.lease(fork)
        self._ctx.kv_cache.share(node.seq_id, fork.seq_id)
        return fork

    def free(self, node: _Leaf) -> None:
        self._ctx.return_lease(node.seq_id)

    def decode(self, nodes: Sequence[_Leaf], tokens: Sequence[int]) -> None:
        states = np.stack([node.hidden for node in nodes if node.hidden is not None])
        seqs = [node.seq_id for node in nodes]
        rows = self._decoder.decode(tokens, seqs, [True] * len(seqs), (), states)
        kept = self._decoder.output_states(len(seqs))
        for node, token, row, hidden in zip(nodes, tokens, rows, kept, strict=True):
            node.row, node.hidden = row, hidden
            node.position += 1
            if not node.sampler.is_stateless:
                node.sampler = node.sampler.after((token,))


def _row_of(node: _Leaf) -> LogitsRow:
    if node.row is None:
        raise RuntimeError("this node of the tree was not decoded")
    return node.row


class _Drafting:
    """The drafts of one or several streams, one decode of the head per drafted position."""

    n_layers = 1

    def __init__(
        self, drafter: _HeadDrafter, requests: Sequence[DraftRequest], states: Sequence[HeadState]
    ) -> None:
        self._ctx = drafter.ctx
        self._requests = requests
        self._states = states
        self._drafts = [Draft(drafter=drafter.name) for _ in requests]

    def run(self) -> list[Draft]:
        start = perf_counter()
        ctx = self._ctx
        decodes = ctx.decoder.n_decodes
        live = []
        for i, request in enumerate(self._requests):
            if request.length.consider(self._drafts[i].drafter):
                live.append(i)
            else:
                self._drafts[i].stopped = "off"
        try:
            # Under the target's lock, not this one's.
            features = [
                self._states[i].features(
                    self._requests[i].tokens, min(self.n_layers, self._requests[i].limit)
                )
                for i in live
            ]
            with ctx.lock:
                ctx.decoder.check_open()
                runs = [
                    _Run(self._states[i], self._requests[i], self._drafts[i], found)
                    for i, found in zip(live, features, strict=True)
                ]
                try:
                    self._draft(runs)
                finally:  # pairs with the head's own states, or of a text that was not read to its end
                    for i in live:
                        self._states[i].cut(len(self._states[i].tokens))
        except CapacityError:  # without room to draft the target goes on alone
            for i in live:
                if self._drafts[i].stopped == "length":
                    self._drafts[i].stopped = "capacity"
        share_costs(self._drafts, perf_counter() - start, ctx.decoder.n_decodes - decodes)
        return self._drafts

    def _draft(self, runs: list[_Run]) -> None:
        """Draft in the compiled loop as far as it can; where it cannot, make that step here."""
        if any(run.state.width > 1 for run in runs):
            self._catch_up(runs)
            for run in runs:  # one: the rows of others would not outlive its decodes
                run.grow(self._ctx)
            return
        may_loop = True
        while runs:
            if may_loop:
                may_loop = self._loop(runs)
                runs = [run for run in runs if not run.is_done]
            if runs and runs[0].unread:  # and so has every other
                self._catch_up(runs)
                continue
            for run in runs:
                if not run.is_drawn:
                    run.draw()
            runs = [run for run in runs if not run.is_done]
            if runs:
                states = [run.hidden for run in runs if run.hidden is not None]
                self._read(runs, [run.draft.tokens[-1:] for run in runs], np.stack(states))

    def _loop(self, runs: Sequence[_Run]) -> bool:
        """Draft in the compiled core; return False if it cannot draft for these streams."""
        streams: list[DraftStream] = []
        for run in runs:
            stream = run.stream()
            if stream is None:
                return False
            streams.append(stream)
        decoder = self._ctx.decoder
        n_decodes = decoder.n_decodes
        found = decoder.draft(
            streams,
            [run.unread for run in runs],
            max(run.limit for run in runs),
            (),
            HeadInput([run.first_features for run in runs], self._ctx.encoder),
        )
        if found is None:
            return False
        is_decoded = decoder.n_decodes > n_decodes
        for run, stream, row in zip(runs, streams, found, strict=True):
            if is_decoded and run.unread:
                run.note_read()
            run.take(stream, row)
        if is_decoded and not all(run.is_done for run in runs):
            kept = decoder.output_states(1 + max(stream.output for stream in streams))
            for run, stream in zip(runs, streams, strict=True):
                run.hidden = kept[stream.output] if stream.output >= 0 else None
        return True

    def _catch_up(self, runs: Sequence[_Run]) -> None:
        """Let the first layer read the text: each run then has the logits and the state after it."""
        states = self._ctx.encode(np.concatenate([run.first_features for run in runs]))
        self._read(runs, [run.unread for run in runs], states)
        for run in runs:
            run.note_read()

    def _read(
        self, runs: Sequence[_Run], unread: Sequence[list[int]], states: States, layer: int = 0
    ) -> None:
        """Decode pairs of each run, at least one; it gets the logits and the state after its last."""
        tokens: list[int] = []
        seqs: list[int] = []
        lasts: list[int] = []
        for run, new in zip(runs, unread, strict=True):
            tokens += new
            seqs += [run.state.seq_ids[layer]] * len(new)
            lasts.append(len(tokens) - 1)
        decoder = self._ctx.decoder
        size = decoder.handle.n_chunk
        final = list(range(len(tokens)))
        if len(tokens) > min(size, decoder.handle.n_outputs_max, _MOST_ROWS):
            final = list(lasts)
            wanted = set(lasts)
            early = [at for at in range(len(tokens)) if at not in wanted]
            for low in range(0, len(early), size):
                part = early[low : low + size]
                decoder.decode(
                    [tokens[at] for at in part],
                    [seqs[at] for at in part],
                    [False] * len(part),
                    (),
                    states[part],
                )
        # llama.cpp computes EAGLE-3's logits for every entry and takes the first rows of them: entries
        # without logits may not come before others in a batch.
        rows = decoder.decode(
            [tokens[at] for at in final],
            [seqs[at] for at in final],
            [True] * len(final),
            (),
            states[final],
        )
        hidden = decoder.output_states(len(final))
        number = {at: i for i, at in enumerate(final)}
        for run, at in zip(runs, lasts, strict=True):
            run.row, run.hidden, run.is_drawn = rows[number[at]], hidden[number[at]], False


class _ChainDrafting(_Drafting):
    """Drafts of several MTP layers in turn: one decode for each, of what it has not read and the draft.

    A layer that did not draft, because the draft ended before, is behind in the text until it drafts.
    """

    def __init__(
        self, drafter: _HeadDrafter, requests: Sequence[DraftRequest], states: Sequence[HeadState]
    ) -> None:
        self.n_layers = n = drafter.n_layers
        limited = [request._replace(limit=min(request.limit, n)) for request in requests]
        super().__init__(drafter, limited, states)

    def _draft(self, runs: list[_Run]) -> None:
        for layer in range(1, self.n_layers):
            behind = [run for run in runs if layer < run.limit]
            behind = [run for run in behind if len(run.behind(layer)[0]) > _MOST_ROWS]
            if behind:
                self._read_text(behind, layer)
        if runs:
            self._catch_up(runs)
        made: dict[_Run, list[States]] = {run: [] for run in runs}
        for layer in range(1, self.n_layers + 1):
            for run in runs:
                run.draw()
            runs = [run for run in runs if not run.is_done]
            if not runs:
                return
            for run in runs:
                if run.hidden is not None:
                    made[run].append(run.hidden[None])
            self._read_text(runs, layer, made)

    def _read_text(
        self, runs: Sequence[_Run], layer: int, made: Mapping[_Run, list[States]] | None = None
    ) -> None:
        """Let a layer read what it has not read of the text, and the draft with the states ``made``."""
        unread, states = [], []
        for run in runs:
            tokens, features = run.behind(layer)
            drafted = [] if made is None else made[run]
            unread.append(tokens + run.draft.tokens[: len(drafted)])
            states += [features, *drafted]
        decoder = self._ctx.decoder
        decoder.use_mtp_layer(layer)
        try:
            self._read(runs, unread, np.concatenate(states), layer)
        finally:
            decoder.use_mtp_layer(0)


class _SharingDrafting(_Drafting):
    """Drafts of MTP layers that attend to the target's K/V: all tokens of a draft have one position.

    That is the position of the text's last token, which the target has not decoded yet.
    """

    def run(self) -> list[Draft]:
        target = self._ctx.target
        if target is None:
            raise RuntimeError("a head without its target")
        with target.lock:  # the K/V that is read must not change
            return super().run()

    def _draft(self, runs: list[_Run]) -> None:
        for run in runs:
            run.note_read()
            run.hidden = run.features[-1]
        while runs:
            self._step(runs)
            for run in runs:
                run.draw()
            runs = [run for run in runs if not run.is_done]

    def _step(self, runs: Sequence[_Run]) -> None:
        """Compute the layers for the last token of each text or draft."""
        decoder = self._ctx.decoder
        rows = decoder.decode_beside(
            [(run.draft.tokens or run.state.tokens)[-1] for run in runs],
            [run.state.target.sequence.seq_id for run in runs],
            [len(run.state.tokens) - 1 for run in runs],
            np.stack([run.hidden for run in runs if run.hidden is not None]),
        )
        for run, row, hidden in zip(runs, rows, decoder.output_states(len(runs)), strict=True):
            run.row, run.hidden, run.is_drawn = row, hidden, False
