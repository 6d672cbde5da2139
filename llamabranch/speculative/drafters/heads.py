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
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...branch import Branch
from ...context import Context
from ...context.decode_times import context_key
from ...context.logits import LogitsRow
from ...errors import CapacityError, ConfigError, GrammarError, UnsupportedError
from ...model import Model
from ...native.draft_loop import DraftStream
from ...sampling import Grammar, Sampler, SamplingParams
from ...sampling.noise import DRAFT
from ..length.base import DraftLength
from ..rules import draft_seed
from .base import Draft, Drafter, DraftRequest, DraftState
from .compiled import LoopStream, share_costs, take_drawn

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
            ConfigError: ``target`` belongs to another context than the head's target.
        """
        self._check_target(target)
        return HeadState(self, target, rule)

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft for all requests together: one decode of the head for each drafted position."""
        states = [request.state for request in requests]
        ours = [state for state in states if isinstance(state, HeadState)]
        if not states or len(ours) < len(states):
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
        params = self.sampling or target.sampling
        return params.replace(seed=target.seed, logprobs=False)


class EagleDrafter(_HeadDrafter):
    """Drafts with an EAGLE-3 head, which reads the hidden states of three layers of the target.

    Args:
        ctx: a context of the head: ``Context(Model("head.gguf"), target=ctx)``. Each state holds one
            of its sequences.
        sampling: the settings of its draws; None = the request's.

    Raises:
        ConfigError: not a context of a head.
    """

    ahead = 1

    def __init__(self, ctx: Context, sampling: SamplingParams | None = None) -> None:
        if ctx.target is None or not ctx.model.target_layers:
            raise ConfigError(
                f"{ctx.model.name} is not open as an EAGLE-3 head",
                hint='EagleDrafter(Context(Model("head.gguf"), target=ctx))',
            )
        self.ctx = ctx
        self.sampling = sampling

    @property
    def name(self) -> str:
        """The head's name."""
        return self.ctx.model.name

    @property
    def profile_keys(self) -> dict[str, str]:
        """The fingerprint of the head and the number of threads."""
        return {self.name: f"eagle {context_key(self.ctx)}"}

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
        UnsupportedError: the target has no MTP layers that can be computed, with the reason.
    """

    ahead = 0

    def __init__(self, target: Context, sampling: SamplingParams | None = None) -> None:
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
    """

    def __init__(self, drafter: _HeadDrafter, target: Branch, rule: str) -> None:
        self.target = target
        self.rule = rule
        self.tokens: list[int] = []
        self.seed = target.seed
        self._drafter = drafter
        self._ctx = drafter.ctx
        self._n_prompt = target.n_prompt
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

    def n_pairs(self, layer: int = 0) -> int:
        """Return how many pairs a layer has read."""
        return self._ctx.kv_cache.next_position(self.seq_ids[layer])

    def cut(self, n_tokens: int) -> None:
        """Keep the pairs of the first ``n_tokens`` of the text. Hold the lock of the head's context."""
        n = max(0, n_tokens - self._drafter.ahead)
        for layer, seq_id in enumerate(self.seq_ids):
            if self.n_pairs(layer) > n:
                self._ctx.kv_cache.drop(seq_id, n)

    def sampler(self) -> Sampler:
        """Return a sampler that has accepted ``tokens``, for one draft."""
        if not self._sampler.is_stateless:
            tokens, n = self.tokens, self._n_prompt
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
        return self._stream.begin(
            sampler,
            seed=self.seed,
            noise=noise,
            seq_id=self.seq_ids[0],
            n_drafted=n_drafted,
            length=length,
            limit=limit,
        )

    def observe(self, n_tokens: int) -> None:
        """Forget all tokens but the first ``n_tokens``."""
        if n_tokens >= len(self.tokens):
            return
        with self._ctx.lock:
            self._ctx.decoder.check_open()
            self.cut(n_tokens)
            del self.tokens[n_tokens:]
            if self._n_accepted is not None and self._n_accepted > n_tokens:
                self._n_accepted = None

    def fork(self, target: Branch) -> DraftState:
        """Return a copy of this state that drafts for ``target``."""
        other = HeadState(self._drafter, target, self.rule)
        with self._ctx.lock:
            for layer, (mine, its) in enumerate(zip(self.seq_ids, other.seq_ids, strict=True)):
                if self.n_pairs(layer):
                    self._ctx.kv_cache.share(mine, its)
            other.tokens = list(self.tokens)
        return other

    def close(self) -> None:
        """Free its sequences."""
        if not self._ctx.closed:
            for seq_id in self.seq_ids:
                self._ctx.return_lease(seq_id)


class _Run:
    """One stream's draft while it is being drawn.

    Attributes:
        row: the logits of the next token, valid until the next decode.
        hidden: the head's state for the next pair, (n_embd,).
        limit: the most tokens of the draft.
        is_drawn: the last token of the draft was drawn from ``row``, and is not decoded yet.
        is_done: the draft has ended.
        first, unread: of a chain, the target's states for the pairs from number ``first`` on.
        made: of a chain, the states that its layers made of the draft.
    """

    def __init__(self, state: HeadState, draft: Draft, length: DraftLength, limit: int) -> None:
        self.state = state
        self.draft = draft
        self.row: LogitsRow | None = None
        self.hidden: States | None = None
        self.is_drawn = self.is_done = False
        self.unread: States = np.empty((0, 0), dtype=np.float32)
        self.first = 0
        self.made: list[States] = []
        self._is_decided = False  # the length has been asked about the next token, and goes on
        self._length = length
        self.limit = limit
        self._sampler = state.sampler()
        self._noise = 0
        if state.rule != "seeded":
            self._noise = draft_seed(state.seed, len(state.tokens))

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
        position = len(state.tokens) + len(draft.tokens)
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

    def stream(self) -> DraftStream | None:
        """Return this run's part of the compiled loop, which begins at ``row``; None: it has none."""
        n, row, hidden = len(self.draft.tokens), self.row, self.hidden
        if row is None or hidden is None:
            return None
        stream = self.state.stream(self._sampler, self._noise, n, self._length, self.limit)
        if stream is not None:
            stream.start(len(self.state.tokens) + n, row.address, hidden.ctypes.data)
        return stream

    def take(self, stream: DraftStream, row: LogitsRow | None, hidden: States | None) -> None:
        """Add what the compiled loop has drawn; ``row`` and ``hidden`` follow its last decode."""
        draft = self.draft
        if row is not None:
            self.row, self.hidden = row, hidden
        self.is_drawn = len(stream.tokens) > stream.n_decoded
        taken = take_drawn(draft, stream, self._length, self.limit)
        self.is_done |= taken.is_done
        self._is_decided |= taken.is_decided
        if taken.ends_at is not None:
            draft.cut(taken.ends_at)
            draft.stopped = self._length.reason


class _Drafting:
    """The drafts of one or several streams, one decode of the head per drafted position."""

    def __init__(
        self, drafter: _HeadDrafter, requests: Sequence[DraftRequest], states: Sequence[HeadState]
    ) -> None:
        self._ctx = drafter.ctx
        self._ahead = drafter.ahead
        self._n_layers = drafter.n_layers
        self._requests = requests
        self._states = states
        self._drafts = [Draft(drafter=drafter.name) for _ in requests]
        self._rows: list[LogitsRow] = []  # after each run's last pair
        self._hidden: States = np.empty((0, 0), dtype=np.float32)

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
            features = [self._features(i) for i in live]  # under the target's lock, not this one's
            with ctx.lock:
                ctx.decoder.check_open()
                try:
                    self._draft(self._catch_up(live, features))
                finally:
                    for i in live:  # pairs with the head's own states
                        self._states[i].cut(len(self._states[i].tokens))
        except CapacityError:  # without room to draft the target goes on alone
            for i in live:
                if self._drafts[i].stopped == "length":
                    self._drafts[i].stopped = "capacity"
        share_costs(self._drafts, perf_counter() - start, ctx.decoder.n_decodes - decodes)
        return self._drafts

    def _features(self, i: int) -> States:
        """Return the target's states for the pairs that stream i has not read yet."""
        tokens, target = self._requests[i].tokens, self._states[i].target
        start = self._first_pair(i) + self._ahead - 1
        with target.ctx.lock:
            sequence = target.sequence
            sequence.check_usable()
            sequence.catch_up()
            rows = target.ctx.hidden_states(sequence.seq_id, tokens[:-1], max(0, start))
        if start >= 0:
            return rows
        return np.concatenate((np.zeros((1, rows.shape[1]), dtype=np.float32), rows))

    def _first_pair(self, i: int) -> int:
        """Return the first pair of stream i that is not read yet."""
        return self._states[i].n_pairs()

    def _catch_up(self, live: Sequence[int], features: Sequence[States]) -> list[_Run]:
        """Decode the pairs that are new; return the runs, each with the logits after the text."""
        if not live:
            return []
        ctx = self._ctx
        encoded = ctx.encode(np.concatenate(features))
        tokens: list[int] = []
        seqs: list[int] = []
        lasts: list[int] = []
        for i in live:
            state, text = self._states[i], self._requests[i].tokens
            self._drafts[i].n_read = len(text) - len(state.tokens)
            unread = text[state.n_pairs() + self._ahead :]
            tokens += unread
            seqs += [state.seq_ids[0]] * len(unread)
            lasts.append(len(tokens) - 1)
        runs = []
        try:
            self._decode(tokens, seqs, lasts, encoded)
        except BaseException:
            for i in live:
                self._states[i].cut(len(self._states[i].tokens))
            raise
        for i in live:
            _, text, length, limit = self._requests[i]
            self._states[i].tokens = list(text)
            runs.append(_Run(self._states[i], self._drafts[i], length, limit))
        self._take(runs)
        return runs

    def _decode(
        self, tokens: list[int], seqs: list[int], lasts: Sequence[int], states: States
    ) -> None:
        """Decode pairs; logits and state after those numbered ``lasts`` are kept."""
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
        kept = [number[at] for at in lasts]
        self._rows = [rows[i] for i in kept]
        self._hidden = hidden[kept]

    def _take(self, runs: Sequence[_Run]) -> None:
        """Give each run its row of the last decode, and the head's state for its next pair."""
        for run, row, hidden in zip(runs, self._rows, self._hidden, strict=True):
            run.row, run.hidden, run.is_drawn = row, hidden, False

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
        found = decoder.draft(streams, [()] * len(runs), max(run.limit for run in runs), ())
        if found is None:
            return False
        states: list[States | None] = [None] * len(runs)
        if decoder.n_decodes > n_decodes and any(row is not None for row in found):
            kept = decoder.output_states(1 + max(stream.output for stream in streams))
            states = [kept[stream.output] if stream.output >= 0 else None for stream in streams]
        for run, stream, row, hidden in zip(runs, streams, found, states, strict=True):
            run.take(stream, row, hidden)
        return True

    def _draft(self, runs: list[_Run]) -> None:
        """Draft in the compiled loop as far as it can; where it cannot, make that step here."""
        may_loop = True
        while runs:
            if may_loop:
                may_loop = self._loop(runs)
                runs = [run for run in runs if not run.is_done]
            for run in runs:
                if not run.is_drawn:
                    run.draw()
            runs = [run for run in runs if not run.is_done]
            if not runs:
                return
            self._decode(
                [run.draft.tokens[-1] for run in runs],
                [run.state.seq_ids[0] for run in runs],
                range(len(runs)),
                np.stack([run.hidden for run in runs if run.hidden is not None]),
            )
            self._take(runs)


class _Pairs(NamedTuple):
    """Pairs that a layer of a chain reads: the tokens, and their states in parts."""

    state: HeadState
    tokens: list[int]
    states: list[States]


class _ChainDrafting(_Drafting):
    """Drafts of several MTP layers in turn: one decode for each, of what it has not read and the draft.

    A layer that did not draft, because the draft ended before, is behind in the text until it drafts.
    """

    def __init__(
        self, drafter: _HeadDrafter, requests: Sequence[DraftRequest], states: Sequence[HeadState]
    ) -> None:
        super().__init__(
            drafter,
            [request._replace(limit=min(request.limit, drafter.n_layers)) for request in requests],
            states,
        )

    def _first_pair(self, i: int) -> int:
        return min(self._states[i].n_pairs(layer) for layer in range(self._requests[i].limit))

    def _catch_up(self, live: Sequence[int], features: Sequence[States]) -> list[_Run]:
        firsts = [self._first_pair(i) for i in live]
        texts = list(zip(live, firsts, features, strict=True))
        for layer in range(1, self._n_layers):
            behind = []
            for i, first, rows in texts:
                state, n = self._states[i], self._states[i].n_pairs(layer)
                unread = self._requests[i].tokens[n:]
                if layer < self._requests[i].limit and len(unread) > _MOST_ROWS:
                    behind.append(_Pairs(state, unread, [rows[n - first :]]))
            if behind:
                self._read(layer, behind)
        own = [rows[self._states[i].n_pairs() - first :] for i, first, rows in texts]
        runs = super()._catch_up(live, own)
        for run, first, rows in zip(runs, firsts, features, strict=True):
            run.first, run.unread = first, rows
        return runs

    def _draft(self, runs: list[_Run]) -> None:
        for layer in range(1, self._n_layers + 1):
            for run in runs:
                run.draw()
            runs = [run for run in runs if not run.is_done]
            if not runs:
                return
            pairs = []
            for run in runs:
                if run.hidden is not None:
                    run.made.append(run.hidden[None])
                n = run.state.n_pairs(layer)
                states = [run.unread[n - run.first :], *run.made]
                pairs.append(_Pairs(run.state, run.state.tokens[n:] + run.draft.tokens, states))
            self._read(layer, pairs)
            self._take(runs)

    def _read(self, layer: int, pairs: Sequence[_Pairs]) -> None:
        """Let a layer read pairs; the logits and states after the last of each are kept."""
        tokens: list[int] = []
        seqs: list[int] = []
        lasts: list[int] = []
        for state, unread, _ in pairs:
            tokens += unread
            seqs += [state.seq_ids[layer]] * len(unread)
            lasts.append(len(tokens) - 1)
        decoder = self._ctx.decoder
        decoder.use_mtp_layer(layer)
        try:
            self._decode(
                tokens,
                seqs,
                lasts,
                np.concatenate([part for each in pairs for part in each.states]),
            )
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

    def _first_pair(self, i: int) -> int:
        return len(self._requests[i].tokens) - 1

    def _catch_up(self, live: Sequence[int], features: Sequence[States]) -> list[_Run]:
        runs = []
        for i, rows in zip(live, features, strict=True):
            state, (_, text, length, limit) = self._states[i], self._requests[i]
            state.tokens = list(text)
            run = _Run(state, self._drafts[i], length, limit)
            run.hidden = rows[-1]
            runs.append(run)
        if runs:
            self._step(runs)
        return runs

    def _draft(self, runs: list[_Run]) -> None:
        while runs:
            for run in runs:
                run.draw()
            runs = [run for run in runs if not run.is_done]
            if runs:
                self._step(runs)

    def _step(self, runs: Sequence[_Run]) -> None:
        """Compute the layers for the last token of each text or draft."""
        decoder = self._ctx.decoder
        self._rows = decoder.decode_beside(
            [(run.draft.tokens or run.state.tokens)[-1] for run in runs],
            [run.state.target.sequence.seq_id for run in runs],
            [len(run.state.tokens) - 1 for run in runs],
            np.stack([run.hidden for run in runs if run.hidden is not None]),
        )
        self._hidden = decoder.output_states(len(runs))
        self._take(runs)
