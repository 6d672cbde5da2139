"""Drafting with heads, which read the target's hidden states: EAGLE-3 heads and MTP layers.

A head reads pairs of a token and a state. For tokens of the text, the states come from the target
and go through the head's encoder, if it has one. For drafted tokens, they come from the head's own
previous step. So the K/V of drafted pairs is dropped after each draft, and the K/V of accepted tokens
is computed from the target's states.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..arguments import instance
from ..context import Context
from ..context.logits import LogitsRow
from ..context.runner import Batch
from ..context.token_states import kept_states
from ..errors import BranchStateError, CapacityError, ConfigError, UnsupportedError
from ..generation.drafter import DraftState
from ..generation.text import Text
from ..model import Model
from ..sampling import Sampler, SamplingParams
from .model import RunDrafter, RunState

States = npt.NDArray[np.float32]

_MOST_ROWS = 64  # the maximum number of tokens in a decode that computes all logits; more are split


class HeadState(RunState):
    """The sequences of the head's context that follow one text of the target.

    Attributes:
        seq_ids: a sequence for each layer that drafts; empty if the layers read the target's K/V.
        ahead: by how many tokens a pair's token is ahead of its position.
        made: the head's own states in this draft, (1, n_embd) each: one for each drafted token, and the
            one for the next.
    """

    _drafter: HeadDrafter
    _row: LogitsRow

    def __init__(self, drafter: HeadDrafter, target: Text, rule: str) -> None:
        super().__init__(drafter, target, rule)
        self._target = weakref.ref(target)  # so that the state does not keep it alive
        self.model = target.ctx.model
        self.ahead = drafter.ahead
        self.made: list[States] = []
        self._first, self._features = 0, np.empty((0, 0), dtype=np.float32)
        self._ctx: Context = drafter.ctx
        self._n_prompt = target.answer_start  # where a grammar begins
        # _reader is the sampler after the text, _sampler the one after the text and the draft.
        self._reader = Sampler(drafter.ctx.model, drafter.settings(target), target.grammar)
        self._sampler = self._reader
        # How many tokens _reader has accepted; None if it must accept all of them again.
        self._n_accepted: int | None = None
        # llama.cpp computes one layer at a time, and writes the K/V of that layer only. Two layers
        # could share a cell only if both wrote to the same one, which llama.cpp does not guarantee.
        self.seq_ids: list[int] = []
        try:
            for _ in range(0 if self._ctx.model.shares_memory else drafter.n_layers):
                self.seq_ids.append(self._ctx.sequences.allocate(self))
        except BaseException:
            self.close()
            raise

    @property
    def target(self) -> Text:
        """The text that is drafted for."""
        target = self._target()
        if target is None:
            raise BranchStateError("the text for which it drafts was closed")
        return target

    # -- reading -----------------------------------------------------------------------------------

    def n_pairs(self, layer: int = 0) -> int:
        """Return the number of the first pair that a layer has not read yet."""
        if not self.seq_ids:  # with the target's K/V, it reads only the last token
            return len(self.text) - 1
        return self._ctx.kv_cache.next_position(self.seq_ids[layer])

    def read_target(self, n_layers: int) -> None:
        """Get the target's states for the text that some of the first ``n_layers`` have not read.

        If all pairs were read, the last pair is read again, because the draft begins with its
        logits.

        Raises:
            CapacityError: the target lacks the states of some tokens and has no room to decode them
                again.
        """
        target, tokens = self.target, self.text
        self.observe(len(tokens) - 1)
        self.draft.n_read = len(tokens) - self.ahead - self.n_pairs()
        first = min(self.n_pairs(layer) for layer in range(n_layers))
        start = max(0, first + self.ahead - 1)
        with target.ctx.lock:
            target.check_usable()
            target.lacking()  # repairs the K/V if an earlier call failed halfway
            rows = kept_states(target.ctx, target.seq_id, list(tokens[:-1]), start)
        if first + self.ahead == 0:  # no state comes before the first token
            rows = np.concatenate((np.zeros((1, rows.shape[1]), dtype=np.float32), rows))
        self._first, self._features = first, rows  # _first: number of the pair of the first row
        self.unread = self.pairs(0)[0]
        if not self._reader.is_stateless:
            n = self._n_prompt
            if self._n_accepted is None:
                self._reader = self._reader.replay(tokens[:n], tokens[n:])
            else:
                for token in tokens[self._n_accepted :]:
                    self._reader.accept(token)
            self._n_accepted = len(tokens)
        self._sampler = self._reader

    def cut(self, n_tokens: int) -> None:
        """Keep only the pairs of the text's first ``n_tokens``. Hold the lock of the head's context."""
        n = max(0, n_tokens - self.ahead)
        cache = self._ctx.kv_cache
        for seq_id in self.seq_ids:
            if cache.next_position(seq_id) > n:
                cache.drop(seq_id, n)

    def observe(self, n_tokens: int) -> None:
        """Forget all tokens except the first ``n_tokens``."""
        if self._n_accepted is not None and self._n_accepted > n_tokens:
            self._n_accepted = None
        n = max(0, n_tokens - self.ahead)
        if any(self.n_pairs(layer) > n for layer in range(len(self.seq_ids))):
            with self._ctx.lock:
                self._ctx.decoder.check_open()
                self.cut(n_tokens)

    # -- a draft -----------------------------------------------------------------------------------

    @property
    def sampler(self) -> Sampler:
        """The sampler that has accepted the text and the draft."""
        return self._sampler

    def accept(self, token: int) -> None:
        """Let the sampler accept a drawn token."""
        self._sampler = self._sampler.after((token,))

    def row(self) -> LogitsRow:
        """Return the logits of the last decode."""
        return self._row

    def pairs(self, layer: int) -> tuple[list[int], list[States]]:
        """Return the tokens of text and draft that a layer has not read, and a state for each.

        Tokens of the text have the target's states, drafted ones the head's own.
        """
        n = max(self.n_pairs(layer), self._first)
        n_drafted = max(0, n + self.ahead - len(self.text))
        tokens = [*self.text[n + self.ahead :], *self.draft.tokens[n_drafted:]]
        features = self._features[n - self._first :]
        made = self.made[n_drafted : len(self.draft.tokens)]
        return tokens, [features, *made] if len(features) else made

    def note_read(self, row: LogitsRow, hidden: States) -> None:
        """Note that ``unread`` was decoded; keep the logits and the state after it."""
        self._row, self.unread = row, ()
        self.made.append(hidden[None])

    def drop_draft(self) -> None:
        """Drop the pairs of the draft."""
        self.made = []
        self._features = np.empty((0, 0), dtype=np.float32)  # not a view: the array may be large
        self.cut(len(self.text))

    # -- life --------------------------------------------------------------------------------------

    def fork(self, target: Text) -> HeadState:
        """Return a copy of this state that drafts for ``target``."""
        other = HeadState(self._drafter, target, self.rule)
        cache = self._ctx.kv_cache
        with self._ctx.lock:
            for mine, its in zip(self.seq_ids, other.seq_ids, strict=True):
                if cache.next_position(mine):
                    cache.fork(mine, its)
        return other

    def close(self) -> None:
        """Free its sequences."""
        if not self._ctx.closed:
            for seq_id in self.seq_ids:
                self._ctx.sequences.free(seq_id)


class HeadDrafter(RunDrafter[HeadState]):
    """Drafts in the context of a head, whose sequences follow the target's texts.

    Attributes:
        ahead: by how many tokens a pair's token is ahead of its position.
        n_layers: how many layers take turns at drafting, each with its own K/V; 1 = one drafts all
            tokens.
    """

    ahead: int
    n_layers = 1
    state_type = HeadState

    def check(self, target: Model) -> None:
        """Raise UnsupportedError, with the reason, unless the head fits ``target``."""
        reason = target.head_fault(self.ctx.model)
        if reason:
            raise UnsupportedError(f"{self.name} cannot draft for {target.name}: {reason}")

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state; it holds a sequence of the head's context.

        Raises:
            ConfigError: ``target`` does not belong to the context that the head drafts for.
        """
        if target.ctx is not self.ctx.target:
            raise ConfigError(
                f"{self.name} drafts for another context, and reads the hidden states of that context",
                hint="open the head with target=, the context that generates",
            )
        return HeadState(self, target, rule)

    def prepare(self, states: Sequence[HeadState]) -> None:
        """Get the target's states. This takes the target's lock, not this context's."""
        for state in states:
            if self.n_layers > 1:
                state.limit = min(state.limit, self.n_layers)
            try:
                state.read_target(min(self.n_layers, state.limit))
            except CapacityError:  # the other texts still get drafts
                state.end_draft("capacity")

    def end(self, states: Sequence[HeadState]) -> None:
        """Drop everything that belongs only to the draft."""
        for state in states:
            state.drop_draft()

    def decode(self, states: Sequence[HeadState]) -> None:
        """Decode what a layer has not read of all texts and drafts; several layers take turns."""
        decoder = self.ctx.decoder
        layer = len(states[0].draft.tokens) if self.n_layers > 1 else 0
        seqs = [state.seq_ids[layer] for state in states]
        pairs = [state.pairs(layer) for state in states]
        unread = [tokens for tokens, _ in pairs]
        inputs = np.concatenate([rows for _, several in pairs for rows in several])
        if not states[0].made:  # these states are the target's
            inputs = decoder.encode(inputs)
        if layer:
            decoder.use_mtp_layer(layer)
        try:
            lasts = np.cumsum([len(new) for new in unread]) - 1
            if len(inputs) > min(decoder.most_rows, _MOST_ROWS):
                early = Batch()
                for seq_id, new in zip(seqs, unread, strict=True):
                    early.add(seq_id, new[:-1], "none")
                decoder.decode(early, np.delete(inputs, lasts, axis=0))
                inputs, unread = inputs[lasts], [new[-1:] for new in unread]
                lasts = np.arange(len(states))
            # llama.cpp computes EAGLE-3's logits for every entry of a batch, and then returns the
            # first rows. So entries without logits must not come before entries with logits.
            batch = Batch()
            for seq_id, new in zip(seqs, unread, strict=True):
                batch.add(seq_id, new, "all")
            found = decoder.decode(batch, inputs)
            hidden = decoder.output_states(len(inputs))
        finally:
            if layer:
                decoder.use_mtp_layer(0)
        for state, rows, last in zip(states, found, lasts, strict=True):
            state.note_read(rows[-1], hidden[last])


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE-3 head, which reads the hidden states of three of the target's layers.

    Li et al. 2025, 2503.01840. At position P the pair is (token P + 1, state P).

    Args:
        ctx: a context of the head: ``Context(Model("head.gguf"), target=ctx)``. Each text to draft for
            takes one of its sequences.
        sampling: the settings with which drafts are drawn; None = the settings of each request.

    Raises:
        ConfigError: ``ctx`` is not the context of an EAGLE-3 head.
    """

    ahead = 1

    def __init__(self, ctx: Context, sampling: SamplingParams | None = None) -> None:
        instance("ctx", ctx, Context, 'EagleDrafter(Context(Model("head.gguf"), target=ctx))')
        if ctx.target is None or not ctx.model.target_layers:
            raise ConfigError(
                f"{ctx.model.name} is not open as an EAGLE-3 head",
                hint='EagleDrafter(Context(Model("head.gguf"), target=ctx))',
            )
        super().__init__(ctx, sampling)

    @property
    def name(self) -> str:
        """The head's name."""
        return self.ctx.model.name


class MTPDrafter(HeadDrafter):
    """Drafts with the MTP layers of the target, from the target's file or from a separate one.

    DeepSeek-V3, 2412.19437. At position P the pair is (token P, state P - 1). Several layers form a
    chain: each drafts one token, and reads the states that earlier layers computed for the drafted
    tokens.

    If the layers are in the target's file, it opens a context for them, which is freed by ``close`` or
    when the target is closed. If there are several layers, each drafts one token, so a draft has at
    most as many tokens as layers.

    Args:
        target: the context that generates, of a model loaded with ``load_mtp=True``; or a context of
            MTP layers that is already open: ``Context(model, target=ctx)``.
        sampling: the settings with which drafts are drawn; None = the settings of each request.

    Raises:
        ConfigError: ``target`` is not a context.
        UnsupportedError: the target has no usable MTP layers; the message has the reason.
    """

    ahead = 0

    def __init__(self, target: Context, sampling: SamplingParams | None = None) -> None:
        instance(
            "target", target, Context, "pass the context that generates, for example lb.load()"
        )
        is_open = target.target is not None and not target.model.target_layers
        super().__init__(target if is_open else Context(target.model, target=target), sampling)
        model = self.ctx.model  # layers that read the target's K/V are all computed for each token
        self.n_layers = 1 if model.shares_memory else model.n_mtp_layers

    @property
    def name(self) -> str:
        """The name of the file's model, with "MTP"."""
        return f"{self.ctx.model.name} MTP"

    def decode(self, states: Sequence[HeadState]) -> None:
        """Decode the ``unread`` tokens of all states together.

        Layers that attend to the target's K/V compute only the last token of each text or draft.
        All tokens of a draft have the same position: the position of the text's last token, which
        the target has not decoded yet. This context shares the target's lock, so the K/V that is
        read does not change.
        """
        if not self.ctx.model.shares_memory:
            return super().decode(states)
        decoder = self.ctx.decoder
        batch = Batch({state.target.seq_id: len(state.text) - 1 for state in states})
        inputs = []
        for state in states:
            tokens, rows = state.pairs(0)
            batch.add(state.target.seq_id, tokens[-1:])
            inputs.append(rows[-1][-1:])
        found = decoder.decode(batch, np.concatenate(inputs))
        hidden = decoder.output_states(len(states))
        for state, (row,), its in zip(states, found, hidden, strict=True):
            state.note_read(row, its)
        return None

    def close(self) -> None:
        """Free the context of the MTP layers."""
        self.ctx.close()
