"""Drafting with heads, which read the target's hidden states: EAGLE-3 heads and MTP layers.

A head reads pairs of a token and a state. For tokens of the text, the states come from the target
and go through the head's encoder, if it has one. For drafted tokens, they come from the head's own
previous step. So the K/V of drafted pairs is dropped after each draft. The K/V of accepted tokens
is then computed from the target's states.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType

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

_MOST_ROWS = 64  # the most tokens of one decode that computes all their logits; more are split


class HeadState(RunState):
    """The sequences of the head's context that follow one text of the target.

    Attributes:
        seq_ids: a sequence for each layer that drafts; empty if the layers read the target's K/V.
        n_read: how many tokens of the text the head has read.
        ahead: by how many tokens a pair's token is ahead of its position.
        hidden: the head's state for the next pair of the draft, (n_embd,); None before the first decode.
    """

    _drafter: HeadDrafter

    def __init__(self, drafter: HeadDrafter, target: Text, rule: str) -> None:
        super().__init__(drafter, target, rule)
        self._target = weakref.ref(target)  # a state must not keep it from being freed
        self.model = target.ctx.model
        self.ahead = drafter.ahead
        self.n_read = 0
        self.hidden: States | None = None
        self._row: LogitsRow | None = None
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
            raise BranchStateError("the text that was drafted for is gone")
        return target

    # -- reading -----------------------------------------------------------------------------------

    def n_pairs(self, layer: int = 0) -> int:
        """Return the number of the first pair that a layer has not read."""
        if not self.seq_ids:
            return 0
        return self._ctx.kv_cache.next_position(self.seq_ids[layer])

    def read_target(self, n_layers: int) -> None:
        """Get the target's states for the text that one of the first ``n_layers`` has not read.

        If all pairs were read, the last pair is read again, because the draft begins with its
        logits.

        Raises:
            CapacityError: the target lacks the states of some tokens, and the room to decode them again.
        """
        target, tokens = self.target, self.text
        self.observe(len(tokens) - 1)
        self.draft.n_read = len(tokens) - self.n_read
        first = len(tokens) - 1  # for layers that read the target's K/V: only the last token
        if self.seq_ids:
            first = min(self.n_pairs(layer) for layer in range(n_layers))
        start = max(0, first + self.ahead - 1)
        with target.ctx.lock:
            target.check_usable()
            target.lacking()  # repairs the K/V if an earlier call failed midway
            rows = kept_states(target.ctx, target.seq_id, list(tokens[:-1]), start)
        if first + self.ahead == 0:  # no state comes before the first token
            rows = np.concatenate((np.zeros((1, rows.shape[1]), dtype=np.float32), rows))
        self._first, self._features = first, rows  # _first: number of the pair of the first row
        self.unread = self.behind(0)[0]
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
        """Keep the pairs of the first ``n_tokens`` of the text. Hold the lock of the head's context."""
        n = max(0, n_tokens - self.ahead)
        cache = self._ctx.kv_cache
        for seq_id in self.seq_ids:
            if cache.next_position(seq_id) > n:
                cache.drop(seq_id, n)

    def observe(self, n_tokens: int) -> None:
        """Forget all tokens but the first ``n_tokens``."""
        if self._n_accepted is not None and self._n_accepted > n_tokens:
            self._n_accepted = None
        if n_tokens >= self.n_read:
            return
        with self._ctx.lock:
            self._ctx.decoder.check_open()
            self.cut(n_tokens)
            self.n_read = n_tokens

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
        if self._row is None:
            raise RuntimeError("nothing was decoded to draw from")
        return self._row

    def inputs(self) -> States:
        """Return the states to pair with ``unread``: the target's, or the head's own in a draft."""
        n = len(self.unread)
        if self.reads_text:
            return self._features[len(self._features) - n :]
        if self.hidden is None:
            raise RuntimeError("nothing was decoded")
        return self.hidden[None][:n]

    def behind(self, layer: int) -> tuple[list[int], States]:
        """Return the tokens of the text that a layer has not read, and the target's states for them."""
        n = max(self.n_pairs(layer), self._first)
        return list(self.text[n + self.ahead :]), self._features[n - self._first :]

    def note_read(self, row: LogitsRow, hidden: States) -> None:
        """Note that ``unread`` was decoded; keep the logits and the state after it."""
        if self.reads_text:
            self.n_read, self.reads_text = len(self.text), False
        self._row, self.hidden, self.unread = row, hidden, ()

    def drop_draft(self) -> None:
        """Drop the pairs of the draft, and the pairs of a text that was not read to its end."""
        self._row = self.hidden = None
        self._features = np.empty((0, 0), dtype=np.float32)  # no view: the array may be large
        self.cut(self.n_read)

    # -- life --------------------------------------------------------------------------------------

    def fork(self, target: Text) -> HeadState:
        """Return a copy of this state that drafts for ``target``."""
        other = HeadState(self._drafter, target, self.rule)
        cache = self._ctx.kv_cache
        with self._ctx.lock:
            for mine, its in zip(self.seq_ids, other.seq_ids, strict=True):
                if cache.next_position(mine):
                    cache.fork(mine, its)
            other.n_read = self.n_read
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
    """

    ahead: int
    state_type = HeadState

    @property
    def n_layers(self) -> int:
        """How many layers draft in turn, each with its own K/V; 1 = one layer drafts all tokens."""
        return 1

    def check(self, target: Model) -> None:
        """Raise UnsupportedError, with the reason, unless the head fits ``target``."""
        reason = target.head_fault(self.ctx.model)
        if reason:
            raise UnsupportedError(f"{self.name} cannot draft for {target.name}: {reason}")

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state; it holds a sequence of the head's context.

        Raises:
            ConfigError: ``target`` belongs to another context than the head's target.
        """
        if target.ctx is not self.ctx.target:
            raise ConfigError(
                f"{self.name} drafts for another context: it reads that one's hidden states",
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
        """Drop everything that belongs to the draft alone."""
        for state in states:
            state.drop_draft()

    def decode(self, states: Sequence[HeadState]) -> None:
        """Decode the ``unread`` tokens of all states together."""
        inputs = np.concatenate([state.inputs() for state in states])
        if states[0].reads_text:
            inputs = self.ctx.decoder.encode(inputs)
        found = self.read(states, [state.unread for state in states], inputs)
        for state, (row, hidden) in zip(states, found, strict=True):
            state.note_read(row, hidden)

    def read(
        self,
        states: Sequence[HeadState],
        unread: Sequence[Sequence[int]],
        inputs: States,
        layer: int = 0,
    ) -> list[tuple[LogitsRow, States]]:
        """Decode at least one pair of each text; return its last logits and its last state."""
        decoder = self.ctx.decoder
        seqs = [state.seq_ids[layer] for state in states]
        lasts = np.cumsum([len(new) for new in unread]) - 1
        if len(inputs) > min(decoder.n_chunk, self.ctx.n_outputs_max, _MOST_ROWS):
            early = Batch()
            for seq_id, new in zip(seqs, unread, strict=True):
                early.add(seq_id, new[:-1], "none")
            decoder.decode(early, np.delete(inputs, lasts, axis=0))
            inputs, unread = inputs[lasts], [new[-1:] for new in unread]
            lasts = np.arange(len(states))
        # llama.cpp computes EAGLE-3's logits for every entry of a batch, and then returns the first
        # rows. So entries without logits must not come before entries with logits.
        batch = Batch()
        for seq_id, new in zip(seqs, unread, strict=True):
            batch.add(seq_id, new, "all")
        rows = decoder.decode(batch, inputs)
        hidden = decoder.output_states(len(inputs))
        return [(its[-1], hidden[at]) for its, at in zip(rows, lasts, strict=True)]


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE-3 head, which reads the hidden states of three layers of the target.

    Li et al. 2025, 2503.01840. At position P the pair is (token P + 1, state P).

    Args:
        ctx: a context of the head: ``Context(Model("head.gguf"), target=ctx)``. Each text that is
            drafted for takes one of its sequences.
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

    For layers in the target's file it opens a context. ``close`` frees that context, and so does
    closing the target. If there are several layers, each drafts one token, so a draft has at most
    as many tokens as layers.

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

    @property
    def n_layers(self) -> int:
        """The number of MTP layers; if there are several, each drafts one token.

        It is 1 if the layers read the target's K/V, because llama.cpp then computes all layers for
        each token.
        """
        return 1 if self.ctx.model.shares_memory else self.ctx.model.n_mtp_layers

    @property
    def name(self) -> str:
        """The name of the file's model, and "MTP"."""
        return f"{self.ctx.model.name} MTP"

    def draw(self, states: Sequence[HeadState]) -> None:
        """Finish the drafts; several layers draft in turn, one decode for each.

        In its turn a layer reads the part of the text that it has not read yet, and the draft. If a
        draft ends before a layer's turn, the layer reads that text only when it drafts next.
        """
        if self.n_layers == 1:
            return super().draw(states)
        for layer in range(1, self.n_layers):
            behind = [state for state in states if layer < state.limit]
            behind = [state for state in behind if len(state.behind(layer)[0]) > _MOST_ROWS]
            if behind:
                self._read_text(behind, layer)
        if states:
            self.decode(states)
        made: dict[HeadState, list[States]] = {state: [] for state in states}
        for layer in range(1, self.n_layers + 1):
            for state in states:
                state.draw()
            states = [state for state in states if not state.is_done]
            if not states:
                break
            for state in states:
                made[state].append(state.inputs())
            found = self._read_text(states, layer, made)
            for state, (row, hidden) in zip(states, found, strict=True):
                state.note_read(row, hidden)
        return None

    def _read_text(
        self,
        states: Sequence[HeadState],
        layer: int,
        made: Mapping[HeadState, Sequence[States]] = MappingProxyType({}),
    ) -> list[tuple[LogitsRow, States]]:
        """Let a layer read the text it has not read, and the draft; ``made`` has its states."""
        unread, inputs = [], []
        for state in states:
            tokens, features = state.behind(layer)
            drafted = made.get(state, ())
            unread.append(tokens + state.draft.tokens[: len(drafted)])
            inputs += [features, *drafted]
        decoder = self.ctx.decoder
        decoder.use_mtp_layer(layer)
        try:
            return self.read(states, unread, np.concatenate(inputs), layer)
        finally:
            decoder.use_mtp_layer(0)

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
        for state in states:
            batch.add(state.target.seq_id, state.unread[-1:])
        rows = decoder.decode(batch, np.concatenate([state.inputs()[-1:] for state in states]))
        hidden = decoder.output_states(len(states))
        for state, (row,), its in zip(states, rows, hidden, strict=True):
            state.note_read(row, its)
        return None

    def close(self) -> None:
        """Free the context of the MTP layers."""
        self.ctx.close()
