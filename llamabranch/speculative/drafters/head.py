"""What EAGLE-3 heads and MTP layers share: they read the target's hidden states.

A head reads pairs of a token and a state. For the tokens of the text the states are the target's, after
the head's encoder if it has one; for drafted tokens they are the head's own, from the step before. So the
K/V of drafted pairs is dropped after each draft, and that of accepted tokens computed from the target's
states.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...context import Context
from ...context.logits import LogitsRow
from ...context.runner import Batch
from ...context.token_states import kept_states
from ...errors import BranchStateError, ConfigError, UnsupportedError
from ...generation.drafter import Draft, DraftRequest, DraftState
from ...generation.text import Text
from ...model import Model
from ...sampling import Sampler
from .run import Drafting, DraftRun, RunDrafter, RunState
from .tree import check_rule

__all__ = [
    "MOST_ROWS",
    "HeadDrafter",
    "HeadDrafting",
    "HeadRun",
    "HeadState",
    "States",
]

States = npt.NDArray[np.float32]

MOST_ROWS = 64  # tokens of a decode whose logits are all computed; longer ones are split


class HeadDrafter(RunDrafter):
    """Drafts in the context of a head, whose sequences follow the target's texts.

    Attributes:
        ahead: by how many tokens a pair's token is ahead of its position.
    """

    ahead: int

    @property
    def n_layers(self) -> int:
        """How many layers draft in turn, each with K/V of its own; 1 = one drafts all tokens."""
        return 1

    def check(self, target: Model) -> None:
        """Raise UnsupportedError, with the reason, unless the head fits ``target``."""
        reason = target.head_fault(self.ctx.model)
        if reason:
            raise UnsupportedError(f"{self.name} cannot draft for {target.name}: {reason}")

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state; it holds a sequence of the head's context.

        Raises:
            ConfigError: ``target`` belongs to another context than the head's target; trees under another
                rule than "seeded".
        """
        check_rule(self.width, rule)
        if target.ctx is not self.ctx.target:
            raise ConfigError(
                f"{self.name} drafts for another context: it reads that one's hidden states",
                hint="open the head with target=, the context that generates",
            )
        return HeadState(self, target, rule)


class HeadState(RunState):
    """The sequences of the head's context that follow one text of the target.

    Attributes:
        seq_ids: a sequence for each layer that drafts; none where it reads the target's.
        tokens: the text that it has read.
        ahead: by how many tokens a pair's token is ahead of its position.
        n_skipped: how many of the first pairs its sequences lack: the states of these are not known.
    """

    _drafter: HeadDrafter

    def __init__(self, drafter: HeadDrafter, target: Text, rule: str) -> None:
        super().__init__(drafter, target, rule)
        self._target = weakref.ref(target)  # a state must not keep it from being freed
        self.model = target.ctx.model
        self.ahead = drafter.ahead
        self.tokens: list[int] = []
        self.n_skipped = 0
        self._ctx: Context = drafter.ctx
        self._n_prompt = target.answer_start  # where a grammar begins
        self._sampler = Sampler(drafter.ctx.model, drafter.settings(target), target.grammar)
        # How many tokens the sampler has accepted; None if it must accept all of them again.
        self._n_accepted: int | None = None
        # llama.cpp computes one layer at a time, and writes K/V of that layer only. So a cell would not
        # serve two layers, unless the second wrote to the same one, which llama.cpp does not promise.
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
            target.check_usable()
            target.lacking()  # what comes before the last token is decoded, whatever failed
            rows = kept_states(target.ctx, target.seq_id, list(tokens[:-1]), start)
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

    # -- life --------------------------------------------------------------------------------------

    def fork(self, target: Text) -> HeadState:
        """Return a copy of this state that drafts for ``target``."""
        other = HeadState(self._drafter, target, self.rule)
        cache = self._ctx.kv_cache
        with self._ctx.lock:
            for mine, its in zip(self.seq_ids, other.seq_ids, strict=True):
                if cache.next_position(mine):
                    cache.fork(mine, its)
            other.tokens = list(self.tokens)
            other.n_skipped = self.n_skipped
        return other

    def close(self) -> None:
        """Free its sequences."""
        if not self._ctx.closed:
            for seq_id in self.seq_ids:
                self._ctx.sequences.free(seq_id)


class HeadRun(DraftRun):
    """One stream's draft on sequences of the head's context.

    Attributes:
        state: of the stream.
        hidden: the head's state for the next pair, (n_embd,); None before the first decode.
    """

    def __init__(
        self, state: HeadState, request: DraftRequest, draft: Draft, features: tuple[int, States]
    ) -> None:
        super().__init__(state, request, draft)
        self.state = state
        self.hidden: States | None = None
        self._first, self._features = features  # the number of their first pair
        self._row: LogitsRow | None = None
        self._sampler = state.sampler(request.tokens)
        self.unread = self.behind(0)[0]
        draft.n_read = len(request.tokens) - len(state.tokens)

    @property
    def sampler(self) -> Sampler:
        """One that has accepted the text and the draft."""
        return self._sampler

    def accept(self, token: int) -> None:
        """Let the sampler accept a drawn token."""
        self._sampler = self._sampler.after((token,))

    def row(self) -> LogitsRow:
        """Return the logits of the last decode."""
        if self._row is None:
            raise RuntimeError("nothing was decoded to draw from")
        return self._row

    def states(self) -> States:
        """Return what goes in with ``unread``: the target's states, or the head's own of the draft."""
        n = len(self.unread)
        if self.reads_text:
            return self._features[len(self._features) - n :]
        if self.hidden is None:
            raise RuntimeError("nothing was decoded")
        return self.hidden[None][:n]

    def behind(self, layer: int) -> tuple[list[int], States]:
        """Return the tokens of the text that a layer has not read, and the target's states for them."""
        n = max(self.state.n_pairs(layer), self._first)
        return list(self.text[n + self.state.ahead :]), self._features[n - self._first :]

    def note_read(self, row: LogitsRow, hidden: States) -> None:
        """Note that what was unread was decoded: the logits and the state after it."""
        if self.reads_text:
            self.state.tokens, self.reads_text = list(self.text), False
        self._row, self.hidden, self.unread = row, hidden, ()


class HeadDrafting(Drafting[HeadRun]):
    """The drafts of one or several streams, one decode of the head per drafted position."""

    n_layers = 1
    _features: Sequence[tuple[int, States]] = ()

    def _state(self, i: int) -> HeadState:
        state = self.requests[i].state
        if not isinstance(state, HeadState):
            raise TypeError("a head drafts for its own states")
        return state

    def prepare(self, live: Sequence[int]) -> None:
        """Get the target's states: under its lock, not this context's."""
        self._features = [
            self._state(i).features(request.tokens, min(self.n_layers, request.limit))
            for i, request in ((i, self.requests[i]) for i in live)
        ]

    def begin(self, live: Sequence[int]) -> list[HeadRun]:
        """Return a run for each of these requests."""
        return [
            HeadRun(self._state(i), self.requests[i], self.drafts[i], found)
            for i, found in zip(live, self._features, strict=True)
        ]

    def end(self, live: Sequence[int]) -> None:
        """Drop pairs with the head's own states, or of a text that was not read to its end."""
        for i in live:
            state = self._state(i)
            state.cut(len(state.tokens))

    def decode(self, runs: Sequence[HeadRun]) -> None:
        """Decode what is unread of each run, together."""
        states = np.concatenate([run.states() for run in runs])
        if runs[0].reads_text:
            states = self.ctx.decoder.encode(states)
        found = self.read(runs, [run.unread for run in runs], states)
        for run, (row, hidden) in zip(runs, found, strict=True):
            run.note_read(row, hidden)

    def read(
        self,
        runs: Sequence[HeadRun],
        unread: Sequence[Sequence[int]],
        states: States,
        layer: int = 0,
    ) -> list[tuple[LogitsRow, States]]:
        """Decode pairs of each run, at least one; return the logits and the state after its last."""
        decoder = self.ctx.decoder
        seqs = [run.state.seq_ids[layer] for run in runs]
        lasts = np.cumsum([len(new) for new in unread]) - 1
        if len(states) > min(decoder.n_chunk, self.ctx.n_outputs_max, MOST_ROWS):
            early = Batch()
            for seq_id, new in zip(seqs, unread, strict=True):
                early.add(seq_id, new[:-1], "none")
            early.decode(decoder, states=np.delete(states, lasts, axis=0))
            states, unread, lasts = (
                states[lasts],
                [new[-1:] for new in unread],
                np.arange(len(runs)),
            )
        # llama.cpp computes EAGLE-3's logits for every entry and takes the first rows of them: entries
        # without logits may not come before others in a batch.
        batch = Batch()
        for seq_id, new in zip(seqs, unread, strict=True):
            batch.add(seq_id, new, "all")
        rows = batch.decode(decoder, states=states)
        hidden = decoder.output_states(len(states))
        return [(its[-1], hidden[at]) for its, at in zip(rows, lasts, strict=True)]
