"""A branch: one line of thought, forked from another at almost no cost."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from ..arguments import whole
from ..context import Context
from ..errors import BranchStateError, ConfigError, LlamaBranchError
from ..model import NO_TOKEN, StopStrings, TokenIds, token_list
from ..sampling import Sampler, SamplingParams
from ..sampling.grammar import Grammar
from ..sampling.noise import derive_seed
from .saving import SavableLine
from .sequence import Produced

__all__ = ["Branch", "Produced"]

_serial = itertools.count()  # tells older children from younger ones


class Branch(SavableLine):
    """One line of thought: a leased sequence, its tokens, and the sampler that goes with it.

    Made by :meth:`start` or :meth:`create`, multiplied by :meth:`fork`, ended by :meth:`prune` (or by
    leaving its ``with`` block; a forgotten branch gives its sequence back when it is collected).
    """

    def __init__(self, ctx: Context, sampler: Sampler, seed: int, parent: Branch | None) -> None:
        """Lease a sequence. For ``create`` and ``fork``, not for users."""
        super().__init__(ctx, sampler, seed, parent)
        self._parent: Branch | None = parent
        self._children: weakref.WeakSet[Branch] = weakref.WeakSet()
        self._serial = next(_serial)
        if parent is not None:
            parent._children.add(self)

    # -- beginnings --------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        ctx: Context,
        sampling: SamplingParams | None = None,
        grammar: Grammar | str | None = None,
    ) -> Branch:
        """Return an empty branch; ``prefill`` it next.

        Raises:
            SequencesExhaustedError, GrammarError, ConfigError.
        """
        params = sampling or SamplingParams()
        if isinstance(grammar, str):
            grammar = Grammar(grammar)
        with ctx.lock:
            ctx.decoder.handle.ptr  # noqa: B018  (raises ClosedError)
            seed = random_seed() if params.seed is None else params.seed
            return cls(ctx, Sampler(ctx.model, params, grammar), seed, parent=None)

    @classmethod
    def start(
        cls,
        ctx: Context,
        prompt: str | TokenIds,
        *,
        grammar: Grammar | str | None = None,
        sampling: SamplingParams | None = None,
        **settings: object,
    ) -> Branch:
        """Return a branch that has read ``prompt`` (text or token ids).

        Args:
            ctx: where it lives.
            prompt: text, tokenized with the model's beginning token if it has one; or ids.
            grammar: what the generated text must follow.
            sampling: settings; single ones may be given by name instead: ``temperature=0.8, seed=1``.
        """
        params = (sampling or SamplingParams()).replace(**settings)
        branch = cls.create(ctx, params, grammar)
        try:
            branch.prefill(ctx.model.prompt_tokens(prompt))
        except BaseException:
            branch.prune()
            raise
        return branch

    # -- state -------------------------------------------------------------------------------------

    def __enter__(self) -> Branch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._pruned and not self._ctx.closed:
            self.prune_subtree()

    @property
    def parent(self) -> Branch | None:
        """The branch this one was forked from, None for a root."""
        return self._parent

    @property
    def children(self) -> list[Branch]:
        """The living forks of this branch, oldest first."""
        return sorted((c for c in self._children if not c._pruned), key=lambda c: c._serial)

    # -- moving ------------------------------------------------------------------------------------

    def prefill(self, tokens: TokenIds) -> None:
        """Read ``tokens`` in chunks. They count for penalties, not for the grammar.

        Raises:
            TokenizeError, CacheFullError, DecodeError: the branch is as before.
        """
        with self._lock:
            tokens = token_list(tokens)
            self.check_prefill(tokens)
            rows = self.decode_run(tokens, "last", self.expiring_rows())
            self.append_prompt(tokens, rows[-1])

    def produce(self) -> Produced:
        """Return the token this branch says next; changes nothing.

        The same answer until the state changes: the draw is a pure function of the logits, the
        settings, the seed and the position.

        Raises:
            BranchStateError: pruned or empty. GrammarError: nothing may follow.
        """
        with self._lock:
            if self._produced is None:
                row = self._need_row()
                self._produced = self.describe(self.draw(row), row)
            else:
                self._check()
            return self._produced

    def commit(self, token: SupportsIndex) -> None:
        """Take ``token`` as the next one: decode it and let the sampler remember it.

        Raises:
            TokenizeError, GrammarError, CacheFullError, DecodeError: the branch is as before.
        """
        with self._lock:
            token = self._ctx.model.token_id(token)
            surprisal = self.check_commit(token)
            self.take(token, surprisal, self._decoder.advance(self._seq_id, token, self._row))

    def step(self) -> Produced:
        """Produce and commit one token; an end token is returned but not committed."""
        with self._lock:
            produced = self.produce()
            if produced.is_stop:
                self.finish()
            else:
                self.commit(produced.token)
            return produced

    def generate(
        self, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Iterator[Produced]:
        """Yield tokens, committed one by one, until the end.

        It ends at an end token (not committed, and yielded only to carry text that was held back for
        a stop string), after ``max_tokens``, or when the text contains a stop string: text from there
        on is not yielded, but the tokens that completed it are, and stay: ``tokens`` and ``text`` of
        the branch hold the stop string. ``finish_reason`` says which. Without ``max_tokens`` it goes
        on until the model stops or the cache is full.

        Raises:
            CacheFullError: no cell is left; the branch holds all tokens that were yielded. Before this
            and any other error, text that was held back comes with ``is_stop`` and the token id -1.
        """
        if max_tokens is not None:
            max_tokens = whole("max_tokens", max_tokens, 0)
        stops = StopStrings(stop)
        return self._generate(max_tokens, stops)

    def _generate(self, max_tokens: int | None, stops: StopStrings) -> Iterator[Produced]:
        self._finish_reason = None
        n = 0
        while max_tokens is None or n < max_tokens:
            try:
                produced = self.step()
            except LlamaBranchError:
                held = stops.flush()
                if held:
                    yield Produced(NO_TOKEN, held, True, math.nan, math.nan)
                raise
            if produced.is_stop:
                held = stops.flush()
                if held:
                    yield produced._replace(text=held)
                return
            n += 1
            text = stops.show(produced.text, last=n == max_tokens)
            if text != produced.text:
                produced = produced._replace(text=text)
            if stops.found:
                self._finish_reason = "stop"
            yield produced
            if stops.found:
                return
        if self._finish_reason is None:
            self._finish_reason = "length"

    def extend(self, tokens: TokenIds, logits: str = "all") -> list[npt.NDArray[np.float32]]:
        """Decode several tokens at once and take them as the next ones.

        Args:
            tokens: ids, at least one; a grammar must allow them.
            logits: "all" or "last": whose rows to return.

        Returns:
            the logits after each token (or after the last one), float32 (V,), copies.

        Raises:
            TokenizeError, GrammarError, CacheFullError, DecodeError: the branch is as before.
        """
        with self._lock:
            if logits not in ("all", "last"):
                raise ConfigError(f"logits must be 'all' or 'last', not {logits!r}")
            tokens = token_list(tokens)
            if not tokens:
                raise ConfigError("nothing to extend by: no tokens")
            self._ctx.model.check_tokens(tokens)
            sampler = self._sampler
            if not sampler.is_stateless:
                sampler = sampler.clone()
                for token in tokens:
                    sampler.accept(token)
            if self._tokens:
                self._need_row()
            rows = self.decode_run(tokens, "all")
            kept = [row.array.copy() for row in (rows if logits == "all" else rows[-1:])]
            self.settle(tokens, rows, sampler)
            return kept

    # -- branching ---------------------------------------------------------------------------------

    def fork(self) -> Branch:
        """Return a child that goes on from here.

        It shares the prefix's cells and has its own copy of the sampler's and the grammar's state, the
        tokens and the metrics; it draws like its parent until reseeded. No K/V is copied.

        Raises:
            SequencesExhaustedError: no sequence is free. BranchStateError: pruned.
        """
        with self._lock:
            self._check()
            return Branch(self._ctx, self._sampler.clone(), self._seed, parent=self)

    def fork_many(self, n: int) -> list[Branch]:
        """Return ``n`` children, each reseeded: the i-th draws from a seed derived from ours and i.

        Raises:
            SequencesExhaustedError: not enough sequences; none is forked.
        """
        n = whole("n", n, 0)
        children: list[Branch] = []
        try:
            for i in range(n):
                children.append(self.fork())
                children[-1].reseed(derive_seed(self._seed, i + 1))
                children[-1]._seed_given = self._seed_given
        except BaseException:
            for child in children:
                child.prune()
            raise
        return children

    def reseed(self, seed: int | None = None) -> None:
        """Draw differently from here on; without a ``seed`` a new one is picked."""
        given = seed is not None
        seed = random_seed() if seed is None else whole("seed", seed)
        with self._lock:
            self._check()
            self._seed = seed
            self._seed_given |= given
            self._produced = None

    def steer(self, bias: Mapping[int, float]) -> None:
        """Add ``bias`` to logits from here on; forks inherit it, an empty mapping ends it."""
        self.resample(self.sampling.replace(logit_bias=bias))

    def resample(self, sampling: SamplingParams) -> None:
        """Use other sampling settings from here on; the seed stays unless they have one."""
        with self._lock:
            self._check()
            old = self._sampler
            grammar_free = old.grammar is None
            sampler = Sampler(self._ctx.model, sampling, old.grammar)
            sampler.accept_prompt(self._tokens if grammar_free else self._tokens[: self._n_prompt])
            if not grammar_free:
                for token in self._tokens[self._n_prompt :]:
                    sampler.accept(token)
            self._sampler = sampler
            if sampling.seed is not None:
                self._seed = sampling.seed
                self._seed_given = True
            self._produced = None

    def rewind(self, position: int) -> None:
        """Forget everything from ``position`` on, as if it had never been.

        The K/V is truncated; where this memory cannot truncate, the kept tokens are decoded again,
        from the parent's state if that still stands at or before ``position``.

        Raises:
            ConfigError: not between 0 and the branch's position.
        """
        with self._lock:
            self._check()
            position = whole("position", position, 0, len(self._tokens))
            if position == len(self._tokens):
                return
            self._truncate(position)
            self._forget(position)
            self._fork_position = min(self._fork_position, position)

    # -- endings -----------------------------------------------------------------------------------

    def prune(self) -> None:
        """Free the sequence; the second time does nothing.

        Raises:
            BranchStateError: it has children; see ``prune_subtree``.
        """
        with self._lock:
            if self._pruned:
                return
            if self.children:
                raise BranchStateError(
                    f"the branch has {len(self.children)} children",
                    hint="prune them first, or call prune_subtree()",
                )
            self._pruned = True
            self._set_row(None)
            self._ctx.return_lease(self._seq_id)
            if self._parent is not None:
                self._parent._children.discard(self)

    def prune_subtree(self) -> None:
        """Free the sequences of this branch and all its descendants."""
        with self._lock:
            for child in self.children:
                child.prune_subtree()
            self.prune()

    def promote(self) -> None:
        """Take the parent's place: the parent and this branch's siblings are pruned.

        Raises:
            BranchStateError: it has no parent.
        """
        with self._lock:
            self._check()
            parent = self._parent
            if parent is None:
                raise BranchStateError("a root has no parent to replace")
            for sibling in parent.children:
                if sibling is not self:
                    sibling.prune_subtree()
            parent._children.discard(self)
            self._parent = parent._parent
            self._fork_position = parent._fork_position
            if self._parent is not None:
                self._parent._children.add(self)
            parent.prune()

    def detach(self) -> None:
        """Become a root: the parent stays, but knows this branch no more."""
        with self._lock:
            self._check()
            if self._parent is not None:
                self._parent._children.discard(self)
                self._parent = None
                self._fork_position = 0


def random_seed() -> int:
    """Return a seed from the operating system's entropy."""
    return int.from_bytes(os.urandom(8), "little") >> 1
