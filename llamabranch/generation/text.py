"""The state of a text: its sequence id, tokens, sampler and logits, in step with the K/V cache.

``Branch`` wraps it for users; the loop, drafters and the engine work on it directly. Unless
documented otherwise, methods expect valid arguments, and the caller must hold the context's lock.

The last token may be drawn but not decoded yet. The cache is then one token shorter than the text;
there is no flag for this. Code that needs that token's cell, or the logits after it, decodes it first
(``settle``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import get_ident

import numpy as np
import numpy.typing as npt

from ..arguments import function
from ..context import Context
from ..context.logits import LogitsRow
from ..context.progress import OnPromptProgress, Reading
from ..context.runner import decode_run
from ..context.sessions import Session
from ..errors import BranchStateError, CapacityError, ConfigError
from ..model.text import decode_utf8
from ..model.tree import TextNode
from ..sampling import Grammar, Sampler, SamplingParams
from ..sampling.constraint import ConstraintState
from .output import Produced


class Text(TextNode):
    """A sequence id with its tokens, sampler and logits.

    Args:
        ctx: the context that holds it.
        seq_id: an empty sequence that the caller holds; None = allocate one, which is freed
            together with this text.
        sampler: turns the logits into distributions. It must have accepted the tokens of
            ``parent``, if there is one.
        seed: the seed of its draws.
        parent: the sequence to start as a copy of, sharing its cells; None = start empty.
        beginning: without ``seq_id``, the tokens that the text will begin with, if known. The
            prefix cache may have them.

    Attributes:
        lock: the lock of the context.
        tokens: all ids, including the prompt and inherited tokens.
        n_prompt: how many of them were prefilled rather than generated.
        appended: (start, end) of each later run of tokens that were read rather than generated, in
            order.
        surprisals: -log p of the tokens after the prompt, nats; NaN where it was not computed.
        parent, at: the text that it was forked from, and how many tokens they share.
        finish_reason: why the last generation ended, see `OutputBuffer`; None before the first one
            and after a change of the text.
        is_pruned: True once the sequence id has been freed.
        row: the logits after the last token; None or invalid if unavailable, see ``logits_row``.
        held: the tokens of the last round that were not handed out yet. ``tokens`` ends with them,
            except for an EOG token, which is never in ``tokens``. Code that changes the text, or asks
            for its next token, drops them.
        version: a number that changes whenever the text changes.
        draft_state: the draft state that is kept between generations, or None; see `DraftStates`.
    """

    def __init__(
        self,
        ctx: Context,
        seq_id: int | None,
        sampler: Sampler,
        seed: int,
        parent: Text | None = None,
        *,
        beginning: Sequence[int] = (),
    ) -> None:
        self.tokens: list[int] = []  # set first, because error messages show them
        self.seq_id = -1
        if seq_id is None:
            seq_id = ctx.sequences.allocate(self, beginning)
        self.seq_id = seq_id
        self.ctx = ctx
        self.lock = ctx.lock
        super().__init__(parent)
        self.at = 0 if parent is None else len(parent.tokens)
        self.sampler = sampler
        self.n_prompt = 0
        self.appended: list[tuple[int, int]] = []
        self.surprisals: list[float] = []
        self.finish_reason: str | None = None
        self.is_pruned = False
        self.row: LogitsRow | None = None
        self.held: list[Produced] = []
        self.version = 0
        self.draft_state: object = None
        self._seed = seed
        self._cache = ctx.kv_cache
        self._decoder = ctx.decoder
        # Bytes of an incomplete UTF-8 character at the end; None if not computed yet.
        self._incomplete: bytes | None = b""
        self._produced: Produced | None = None
        self._incomplete_after = b""  # the bytes that stay incomplete after ``_produced``
        self._owned_by_prefix_cache = False  # whether it owns the sequence id
        self._is_generating = False
        self._reader = 0  # the thread that is reading a prompt into it
        if parent is not None:
            self.tokens += parent.tokens
            self.n_prompt = parent.n_prompt
            self.appended += parent.appended
            self.surprisals += parent.surprisals
            self._incomplete = parent._incomplete
            if parent.tokens:
                self._cache.fork(parent.seq_id, seq_id)
            self.set_row(parent.row)
            self._produced, self._incomplete_after = parent._produced, parent._incomplete_after

    def __repr__(self) -> str:
        return f"<Text of {len(self.tokens)} tokens in sequence {self.seq_id}>"

    # -- properties --------------------------------------------------------------------------------

    @property
    def n_held(self) -> int:
        """How many of ``tokens`` were not handed out yet."""
        return len(self.held) - self.held[-1].is_stop if self.held else 0

    @property
    def position(self) -> int:
        """The number of tokens that were handed out, which is the position of the next one."""
        return len(self.tokens) - self.n_held

    @property
    def shown(self) -> list[int]:
        """The tokens that were handed out. Do not change the list."""
        return self.tokens[: self.position] if self.held else self.tokens

    @property
    def sampling(self) -> SamplingParams:
        """The settings in effect, with the current seed, even after ``seed`` was set."""
        params = self.sampler.params
        # Forks share the sampler's settings, so the seed in effect is kept separately.
        if params.seed in (None, -1, self._seed):
            return params
        return params.replace(seed=self._seed)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that constrains it, if any."""
        return self.sampler.grammar

    @property
    def answer_start(self) -> int:
        """The position after the last token that was read, not generated; grammars begin there."""
        return self.appended[-1][1] if self.appended else self.n_prompt

    def generated_positions(self, start: int = 0) -> Iterator[int]:
        """Yield the positions of generated tokens from ``start`` on."""
        at = max(start, self.n_prompt)
        for read_from, read_to in [*self.appended, (self.position, 0)]:
            yield from range(at, read_from)
            at = max(at, read_to)

    def replayed(self, sampler: Sampler) -> Sampler:
        """Return a copy of ``sampler``, with the same settings, that has accepted this text's tokens."""
        n = self.answer_start
        return sampler.replay(self.tokens[:n], self.tokens[n:])

    @property
    def n_cached(self) -> int:
        """How many tokens the cache holds."""
        return self._cache.next_position(self.seq_id)

    @property
    def is_behind(self) -> bool:
        """Whether the cache lacks the last token, because it was drawn but not decoded yet."""
        return self._cache.next_position(self.seq_id) < len(self.tokens)

    @property
    def n_decoded(self) -> int:
        """The number of tokens, not counting the last one if it was not decoded yet."""
        return len(self.tokens) - self.is_behind

    @property
    def state(self) -> str:
        """ "empty", "ready", "finished" or "pruned"."""
        if self.is_pruned:
            return "pruned"
        if not self.tokens:
            return "empty"
        return "ready" if self.finish_reason is None else "finished"

    @property
    def seed(self) -> int:
        """The seed of its draws."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        self._produced = None
        self.version += 1

    def use_sampler(self, sampler: Sampler) -> None:
        """Use another sampler from here on. It must have accepted the tokens."""
        self.sampler = sampler
        self._produced = None
        self.version += 1

    def resample(self, sampling: SamplingParams) -> None:
        """Use other settings from here on; if they have no seed, the seed stays. Takes the lock."""
        with self.lock:
            self.check_usable()
            self.drop_held()
            sampler = Sampler(self.ctx.model, sampling, self.sampler.grammar)
            self.use_sampler(self.replayed(sampler))
            if sampling.seed is not None:
                self.seed = sampling.drawn_seed()

    def begin_anew(self, position: int, sampler: Sampler) -> None:
        """Continue from the first ``position`` tokens, which count as read, with a new sampler.

        If the memory cannot be cut there, fewer tokens are left, and the caller reads the others again.
        """
        with self.lock:
            if position < len(self.tokens):
                self.forget(self._cache.cut(self.seq_id, position))
                self.at = min(self.at, len(self.tokens))
            sampler.accept_prompt(self.tokens)
            self.n_prompt, self.appended, self.surprisals = len(self.tokens), [], []
            self._incomplete = b""
            self.finish_reason = None
            self.use_sampler(sampler)

    def constrain(self, state: ConstraintState | None) -> None:
        """Constrain the text after the last token that was read; None removes the constraint."""
        with self.lock:
            if state is not None:
                for token in self.tokens[self.answer_start :]:
                    state = state.accept(token)
            self.use_sampler(self.sampler.constrained(state))

    def check_usable(self) -> None:
        """Raise BranchStateError if it is pruned or being read, ClosedError if the context is closed."""
        if self.is_pruned:
            raise BranchStateError("the branch is pruned")
        self._decoder.check_open()
        self.check_not_reading()

    def check_not_reading(self) -> None:
        """Raise BranchStateError if ``on_prompt_progress`` called this while the text is being read."""
        if self._reader == get_ident():
            raise BranchStateError(
                "the branch reads text: on_prompt_progress cannot use this branch",
                hint="use it when the call that reads has returned",
            )

    def check_not_empty(self, what: str) -> None:
        """Raise BranchStateError if it has no tokens; ``what`` is the missing thing."""
        if not self.tokens:
            raise BranchStateError(
                f"the branch is empty: it has no {what}", hint="prefill it first"
            )

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Raise BranchStateError if another generation of it is running."""
        with self.lock:
            if self._is_generating:
                raise BranchStateError(
                    "another generation of this branch is running",
                    hint="finish or close() it first; fork() the branch for two texts at a time",
                )
            self._is_generating = True
        try:
            yield
        finally:
            self._is_generating = False

    def release(self) -> None:
        """Free the sequence id; a second call does nothing. Takes the lock."""
        with self.lock:
            if self.is_pruned:
                return
            self.check_not_reading()
            self.is_pruned = True
            self.version += 1
            self.draft_state = None  # frees its sequence once nobody uses it
            self.set_row(None)
            if not self._owned_by_prefix_cache:
                self.ctx.sequences.free(self.seq_id)

    # -- logits ------------------------------------------------------------------------------------

    def logits_row(self) -> LogitsRow:
        """Return the logits after the last token, valid while the lock is held.

        It first checks that the text is usable. If there are no logits, it decodes the last token.
        """
        self.check_usable()
        if self.held:
            self.drop_held()
        row = self.row
        if row is not None and row.is_valid:
            return row
        self.check_not_empty("logits")
        return self.decode_last()

    def decode_last(self, *, draws_next: bool = False) -> LogitsRow:
        """Decode the last token; return the logits after it.

        With ``draws_next``, the same native call draws the next token, if possible.
        """
        if self.is_pruned:
            self.check_usable()
        n = len(self.tokens) - 1
        if self._cache.next_position(self.seq_id) != n:
            self.truncate(n)
        sampler = self.sampler if draws_next else None
        row = self._decoder.advance(self.seq_id, self.tokens[n], sampler, self._seed)
        self.set_row(row)
        return row

    def set_row(self, row: LogitsRow | None) -> None:
        """Set the logits after the last token."""
        if row is not None:
            row.users += 1
        old, self.row = self.row, row
        if old is not None:
            old.users -= 1
            if old.seq_id == self.seq_id:
                old.seq_id = -1
        if row is not None and row.seq_id < 0:  # a fork may have it too
            row.seq_id = self.seq_id
        self._produced = None

    # -- drawing -----------------------------------------------------------------------------------

    def produce(self) -> Produced:
        """Return the next token. Every call returns the same token until the state changes."""
        if self._produced is None or self.held:
            return self.produce_from(self.logits_row())
        self.check_usable()
        return self._produced

    def produce_from(self, row: LogitsRow) -> Produced:
        """Return the next token; ``row`` has the logits after the last one."""
        sampler, version = self.sampler, self.version
        token = row.draw(sampler, self._seed, len(self.tokens), measured=sampler.params.logprobs)
        self.check_unchanged(version)
        self._produced, self._incomplete_after = self.describe(token, row)
        return self._produced

    def check_unchanged(self, version: int) -> None:
        """Raise BranchStateError if a user's function has changed the text since this ``version``."""
        if self.version != version:
            raise BranchStateError(
                "a function that the branch calls has changed the branch",
                hint="fork() the branch in the function, and change the fork",
            )

    def describe(self, token: int, row: LogitsRow) -> tuple[Produced, bytes]:
        """Return ``token`` as the next token, with its log-probability and the entropy of ``row``.

        Also return the bytes of a character that is incomplete after it.
        """
        model = self.ctx.model
        if self.sampler.params.logprobs:
            logprob, entropy = row.logprob(token), row.entropy()
        else:
            logprob = entropy = math.nan
        if model.is_eog(token):
            return Produced(token, "", True, logprob, entropy), b""
        text, incomplete = model.text_after(token, self.incomplete)
        return Produced(token, text, False, logprob, entropy), incomplete

    # -- memory ------------------------------------------------------------------------------------

    def drop_held(self) -> None:
        """Drop the tokens that were not handed out."""
        if self.n_held:
            self.rewind(self.position)

    def lacking(self) -> list[int]:
        """Return the last token if the cache lacks it, so that the next decode can begin with it."""
        n = len(self.tokens)
        n_lacking = n - self._cache.next_position(self.seq_id)
        if n_lacking not in (0, 1):  # an earlier call failed midway
            self.truncate(n - 1)
            n_lacking = 1
        return self.tokens[n - n_lacking :]

    def settle(self) -> None:
        """Make the cache hold exactly the tokens that were handed out.

        There are four reasons why it may not. The last token was not decoded yet. ``logits_row``
        dropped it and then found the cache full. A decode failed, and memory that cannot drop a tail
        was emptied. Or Ctrl-C came between a decode and its bookkeeping.
        """
        self.drop_held()
        ahead = self._cache.next_position(self.seq_id) - len(self.tokens)
        if ahead > 0:
            self.truncate(len(self.tokens))
        elif ahead < 0:
            self.set_row(None)
            self.logits_row()

    def unsettle(self) -> None:
        """Make the next decode include the last token, unless the logits after it are valid."""
        with self.lock:
            if not self.is_behind and (self.row is None or not self.row.is_valid):
                self.truncate(len(self.tokens) - 1)

    def decode_run(
        self, tokens: Sequence[int], report: OnPromptProgress | None = None
    ) -> LogitsRow:
        """Decode ``tokens``; return the logits after the last one. Call ``settle`` first.

        If that fails, the cache is as before. ``report`` is called after each decode.
        """
        if report is None:
            return decode_run(self._decoder, tokens, self.seq_id, "last")[-1]
        function("on_prompt_progress", report)
        n, last = len(self.tokens), list[LogitsRow]()
        reading = Reading(n, n + len(tokens))
        report(reading.progress(n))

        def read(n_decoded: int, rows: list[LogitsRow]) -> None:
            last[:] = rows
            report(reading.progress(n + n_decoded))

        decode_run(self._decoder, tokens, self.seq_id, "last", read)
        return last[0]

    def read(
        self,
        tokens: Sequence[int],
        *,
        as_prompt: bool = False,
        report: OnPromptProgress | None = None,
    ) -> None:
        """Check tokens with ``check_read``, decode them, and append them as read text."""
        self.check_read(tokens, as_prompt=as_prompt)
        if self.row is not None and self.row.is_valid:
            self._cache.mark(self.seq_id, self.row.array)
        self._reader = get_ident()
        try:
            row = self.decode_run(tokens, report)
        finally:
            self._reader = 0
        self.append_prompt(tokens, row)

    def truncate(self, position: int) -> None:
        """Make the cache hold exactly the first ``position`` tokens; change nothing else."""
        cache, parent = self._cache, self.parent
        done = cache.cut(self.seq_id, position)
        if done < position and parent is not None and not parent.is_pruned:
            n = min(position, cache.next_position(parent.seq_id))
            n = cache.usable(parent.seq_id, n)
            if n > done and parent.tokens[:n] == self.tokens[:n]:
                done = cache.fork(parent.seq_id, self.seq_id, n)
        if done < position:
            decode_run(self._decoder, self.tokens[done:position], self.seq_id, "none")

    # -- tokens ------------------------------------------------------------------------------------

    def check_read(self, tokens: Sequence[int], *, as_prompt: bool = False) -> None:
        """Raise an error unless ``tokens`` can be decoded and passed to ``append_prompt``.

        ``as_prompt``: whether they must become part of the prompt.
        """
        self.check_usable()
        if not tokens:
            raise ConfigError(f"nothing to {'prefill' if as_prompt else 'append'}: no tokens")
        if as_prompt and len(self.tokens) > self.n_prompt:
            raise BranchStateError(
                "prefill comes before anything is generated",
                hint="append adds text that the model reads; extend and commit add text as if generated",
            )
        self.ctx.model.check_tokens(tokens)
        self.settle()

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """If the block raises anything, reset everything but the cache to the state before it."""
        n = len(self.tokens)
        try:
            yield
        except BaseException:
            self.forget(n)
            raise

    def append_prompt(self, tokens: Sequence[int], row: LogitsRow | None) -> None:
        """Append decoded tokens that were read rather than generated.

        ``row`` has the logits after them, or is None if they were not kept. The tokens count for
        penalties; after them, a grammar starts from its beginning.
        """
        n = len(self.tokens)
        if row is not None:
            self._cache.mark(self.seq_id, row.array)
        with self.undone_on_error():
            self.tokens += tokens
            if n == self.n_prompt:
                self.n_prompt = len(self.tokens)
            else:
                start = n
                if self.answer_start == n:
                    start = self.appended.pop()[0]
                self.appended.append((start, len(self.tokens)))
                self.surprisals += [math.nan] * len(tokens)
            if self.sampler.grammar is None or self.n_prompt == len(self.tokens):
                self.sampler.accept_prompt(tokens)
            else:
                self.sampler = self.replayed(self.sampler)
            self._incomplete = b""
            self.finish_reason = None
            self.version += 1
            self.set_row(row)

    def check_commit(self, token: int) -> float:
        """Check that ``token`` can be decoded and appended; return its surprisal in nats.

        The caller has checked that it is in the vocabulary.
        """
        if self.held or self._cache.next_position(self.seq_id) != len(self.tokens):
            self.check_usable()
            self.settle()
        row = self.logits_row()
        if not self.sampler.is_stateless and not self.sampler.allows(token):
            self.sampler.accept(token)  # raises GrammarError, with the reason
        return -row.logprob(token) if self.sampler.params.logprobs else math.nan

    def commit(self, token: int, *, draws_next: bool = False) -> None:
        """Check ``token``, decode it and append it. If anything fails, nothing has changed.

        ``draws_next``: whether ``produce`` is called next. If possible, the next token is then drawn in
        the same native call.
        """
        surprisal = self.check_commit(token)
        sampler = self.sampler if draws_next else None
        row = self._decoder.advance(self.seq_id, token, sampler, self._seed)
        self.append(token, surprisal, row)

    def append(self, token: int, surprisal: float, row: LogitsRow | None) -> None:
        """Append a token. ``row``: the logits after it, or None if it was not decoded yet."""
        n = len(self.tokens)
        try:
            if not self.sampler.is_stateless:
                self.sampler.accept(token)
            self.append_accepted(token, surprisal)
            self.set_row(row)
        except BaseException:
            self.forget(n)
            raise

    def append_accepted(self, token: int, surprisal: float) -> str:
        """Append a token that the sampler has accepted; return the text it completes."""
        produced = self._produced
        if produced is not None and produced.token == token and not produced.is_stop:
            text, incomplete = produced.text, self._incomplete_after
        else:
            text, incomplete = self.ctx.model.text_after(token, self.incomplete)
        self.tokens.append(token)
        self.surprisals.append(surprisal)
        self.finish_reason = None
        self.version += 1
        self._incomplete = incomplete
        self._produced = None
        return text

    def extend(self, tokens: list[int], *, keeps_all: bool) -> list[npt.NDArray[np.float32]]:
        """Decode tokens and append them with their surprisals.

        Each batch of rows is read before the next one overwrites it, so many tokens take no more memory
        than a few.

        Returns:
            copies of the logits, (V,), after each token or only after the last one.
        """
        if not tokens:
            raise ConfigError("nothing to extend with: no tokens")
        self.ctx.model.check_tokens(tokens)
        self.check_usable()
        self.drop_held()
        sampler = self.sampler.after(tokens)  # raises GrammarError before anything is decoded
        scored, is_first = sampler.params.logprobs, not self.tokens
        surprisals = [math.nan if is_first or not scored else -self.logits_row().logprob(tokens[0])]
        self.settle()
        last: list[LogitsRow] = []
        kept: list[npt.NDArray[np.float32]] = []

        def read(n: int, rows: list[LogitsRow]) -> None:
            for row, token in zip(rows, tokens[n - len(rows) + 1 : n + 1], strict=False):
                surprisals.append(-row.logprob(token) if scored else math.nan)
            kept.extend(row.array.copy() for row in rows if keeps_all)
            last[:] = rows[-1:]

        decode_run(self._decoder, tokens, self.seq_id, "all", read)
        with self.undone_on_error():
            for token, surprisal in zip(tokens, surprisals, strict=True):
                self.append_accepted(token, surprisal)
            self.use_sampler(sampler)
            self.set_row(last[0])
        return kept or [last[0].array.copy()]

    def append_unscored(
        self, tokens: Sequence[int], row: LogitsRow | None, n_read: int = 0
    ) -> None:
        """Append decoded tokens without surprisals.

        Args:
            tokens: the first ``n_read`` of them count as read, the others as generated.
            row: the logits after them, or None.
        """
        if n_read > 0:
            self.append_prompt(tokens[:n_read], row if len(tokens) <= n_read else None)
            tokens = tokens[n_read:]
            if not tokens:
                return
        n = len(self.tokens)
        try:
            if not self.sampler.is_stateless:
                for token in tokens:
                    self.sampler.accept(token)
            self.tokens += tokens
            self.surprisals += [math.nan] * len(tokens)
            self._incomplete = None
            self.finish_reason = None
            self.version += 1
            self.set_row(row)
        except BaseException:  # not `undone_on_error`, which would double the time
            self.forget(n)
            raise

    def decode_unscored(self, tokens: Sequence[int], n_read: int = 0) -> None:
        """Decode ``tokens`` in as few decodes as possible; append them as ``append_unscored`` does.

        This is for drafters, whose sequence follows the target's. Takes the lock and checks the
        sequence.
        """
        if not tokens:
            return
        with self.lock:
            self.check_usable()
            self.settle()
            known = self.row
            if len(tokens) == 1 and known is not None and known.is_valid:
                row = self._decoder.advance(self.seq_id, tokens[0])
            else:
                row = self.decode_run(tokens)
            self.append_unscored(tokens, row, n_read)

    def share_prefix(self, source: Text, n: int) -> None:
        """Make the first ``n`` tokens of ``source`` this empty sequence's prompt; share their cells."""
        with self.lock:
            self._cache.fork(source.seq_id, self.seq_id, n)
            self.append_prompt(source.tokens[:n], None)
            if self.n_cached < n:  # a saved state could not be restored
                self.truncate(n)

    def take_cached(self, tokens: Sequence[int], n_prompt: int | None = None) -> int:
        """Start this empty sequence with the longest prefix of ``tokens`` that the prefix cache has.

        If the sequence was allocated with a cached beginning, it keeps that beginning. The first
        ``n_prompt`` tokens (None = all) count as the prompt, the others as generated. Return how many
        tokens the sequence begins with; the caller decodes the rest.
        """
        prefixes = self.ctx.prefix_cache
        if prefixes is None:
            return 0
        with self.lock:
            n = self.n_cached or prefixes.take(self.seq_id, tokens)
            if n:
                self.append_unscored(tokens[:n], None, n if n_prompt is None else n_prompt)
            return n

    def keep_cached(self, session: Session | None = None, *, is_last: bool = False) -> None:
        """Keep its K/V in the prefix cache, if there is one, for use after this text ends.

        Args:
            session: the session that it belongs to, if any.
            is_last: whether ``release`` is called next.
        """
        prefixes = self.ctx.prefix_cache
        if prefixes is None or self.is_pruned or self.ctx.closed:
            return
        with self.lock:
            n = self._cache.next_position(self.seq_id)
            if n > len(self.tokens):  # a round was interrupted, and the tail is a draft
                return
            if n >= len(self.tokens) - 1 or self._cache.can_draft:
                self._owned_by_prefix_cache = prefixes.put(
                    self.seq_id, self.tokens[:n], session, is_last=is_last
                )

    def restore(
        self,
        tokens: list[int],
        n_prompt: int,
        appended: Sequence[tuple[int, int]],
        surprisals: list[float],
        incomplete: bytes,
        sampler: Sampler,
        seed: int,
    ) -> None:
        """Set the state from a snapshot, except for the last row and the K/V.

        The cache already holds the K/V.
        """
        self.tokens, self.n_prompt, self.appended = tokens, n_prompt, list(appended)
        self.surprisals, self._incomplete = surprisals, incomplete
        self.seed = seed
        self.use_sampler(sampler)

    def forget(self, position: int) -> None:
        """Reset everything but the cache to the state after the first ``position`` tokens.

        If this raises an error, nothing has changed.
        """
        n_prompt = min(self.n_prompt, position)
        appended = [(a, min(b, position)) for a, b in self.appended if a < position]
        start = appended[-1][1] if appended else n_prompt
        # This takes long and Ctrl-C may interrupt it, so it comes before all changes.
        sampler = self.sampler.replay(self.tokens[:start], self.tokens[start:position])

        def change() -> None:
            self.set_row(None)
            del self.tokens[position:]
            del self.surprisals[position - n_prompt :]
            self.n_prompt, self.appended, self.sampler = n_prompt, appended, sampler
            self._incomplete = None
            self.finish_reason = None
            self.held = []
            self.version += 1

        try:
            change()
        except BaseException:
            change()
            raise

    def rewind(self, position: int) -> None:
        """Drop all tokens from ``position`` on, in the cache too.

        If the memory cannot be cut there, the remaining tokens are decoded again, except the last one,
        which is left to the call that needs its logits.
        """
        is_there = self._cache.usable(self.seq_id, position) == position
        self.truncate(position if is_there else position - 1)
        self.forget(position)
        row = self._cache.row(self.seq_id) if is_there else None
        if row is not None:
            self.set_row(LogitsRow(row))
        self.at = min(self.at, position)

    def keep(self, n: int) -> None:
        """Keep at most the first ``n`` tokens. Takes the lock."""
        with self.lock:
            self.check_usable()
            if n < self.position:
                self.rewind(n)

    def end_at(self, position: int, *, decodes: bool) -> None:
        """Keep exactly the first ``position`` tokens. Takes the lock.

        ``decodes``: whether to decode the last one now, if the cache has room, or only when its logits
        are needed.
        """
        with self.lock:
            if self.is_pruned:
                return
            reason = self.finish_reason
            if len(self.tokens) > position:
                self.rewind(position)
            self.held = []
            if decodes:
                with suppress(CapacityError):
                    self.settle()
            self.finish_reason = reason

    @property
    def incomplete(self) -> bytes:
        """The bytes of an incomplete UTF-8 character after the last token."""
        if self._incomplete is None:
            model, tail = self.ctx.model, b""
            if model.has_text:
                # An incomplete UTF-8 character has at most three bytes. Tokens without text may come
                # between them, so bytes are counted, not tokens.
                for token in reversed(self.tokens[self.answer_start :]):
                    tail = model.piece(token) + tail
                    if len(tail) >= 3:
                        break
            self._incomplete = decode_utf8(tail)[1]
        return self._incomplete
