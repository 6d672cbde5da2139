"""The inside of a branch: its sequence, tokens, sampler and logits, kept in step with the memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from ..context import Context
from ..context.logits import LogitsRow
from ..errors import BranchStateError, ConfigError
from ..model.text import decode_utf8
from ..sampling import Distribution, Sampler, SamplingParams
from ..sampling.distribution import log_base
from ..sampling.grammar import Grammar

__all__ = ["Line", "Produced"]


class Produced(NamedTuple):
    """A token that a branch would say next.

    ``text`` is what it completes (a character split over several tokens comes with its last),
    ``is_stop`` whether it ends the generation. ``logprob`` and ``entropy`` (nats) are those of the
    model's own distribution, before any sampling setting.

    With ``is_stop`` it is no token of the text, but may carry text that was held back for a stop
    string: then ``token`` is the end token, or -1 (without numbers: NaN) where an error ends it.
    """

    token: int
    text: str
    is_stop: bool
    logprob: float
    entropy: float


class Line:
    """A leased sequence and what is known of it."""

    def __init__(self, ctx: Context, sampler: Sampler, seed: int, source: Line | None) -> None:
        """Lease a sequence; with ``source`` start as its copy, sharing its cells."""
        self._ctx = ctx
        self._decoder = ctx.decoder
        self._lock = ctx.lock
        self._sampler = sampler
        self._seed = seed
        given = sampler.params.seed is not None
        self._seed_given: bool = given if source is None else source._seed_given
        self._tokens: list[int] = []
        self._n_prompt = 0
        self._surprisals: list[float] = []
        # Bytes of a UTF-8 character that is not complete; None where nobody has asked for its text.
        self._pending: bytes | None = b""
        self._row: LogitsRow | None = None
        self._produced: Produced | None = None
        self._finish_reason: str | None = None
        self._pruned = False
        self._parent: Line | None = source
        self._seq_id = ctx.lease(self)
        self._fork_position = 0 if source is None else len(source._tokens)
        # Before it the memory is not whole: a restored sliding window cannot be cut further back.
        self._whole_from: int = 0 if source is None else source._whole_from
        if source is not None:
            self._tokens += source._tokens
            self._n_prompt = source._n_prompt
            self._surprisals += source._surprisals
            self._pending = source._pending
            if source._tokens:
                self._decoder.share(source._seq_id, self._seq_id)
            self._set_row(source._row)
            self._produced = source._produced

    # -- what it is --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<Branch seq {self._seq_id}, {len(self._tokens)} tokens, {self.state}>"

    @property
    def ctx(self) -> Context:
        """The context it lives in."""
        return self._ctx

    @property
    def seq_id(self) -> int:
        """The leased sequence."""
        return self._seq_id

    @property
    def state(self) -> str:
        """ "empty", "ready", "finished" or "pruned"."""
        if self._pruned:
            return "pruned"
        if not self._tokens:
            return "empty"
        return "ready" if self._finish_reason is None else "finished"

    @property
    def tokens(self) -> list[int]:
        """All token ids, prompt, inherited ones and those of a stop string included; a copy."""
        return list(self._tokens)

    @property
    def text(self) -> str:
        """The text of all tokens but control tokens.

        Of a generation that a stop string ended it holds that string, as ``tokens`` does; what the
        generation yielded leaves it out.
        """
        return b"".join(map(self._ctx.model.piece, self._tokens)).decode("utf-8", "replace")

    @property
    def generated(self) -> list[int]:
        """The token ids after the prompt; a copy."""
        return self._tokens[self._n_prompt :]

    @property
    def position(self) -> int:
        """Number of tokens: where the next one goes."""
        return len(self._tokens)

    @property
    def fork_position(self) -> int:
        """Number of tokens shared with the parent when it was forked; 0 for a root."""
        return 0 if self._parent is None else self._fork_position

    @property
    def sampling(self) -> SamplingParams:
        """The settings in force; a seed that was given is the branch's own, also after ``reseed``."""
        params = self._sampler.params
        # Forks share a sampler, so what it was made with tells nothing of the seed in force.
        if params.seed is None or params.seed == self._seed:
            return params
        return params.replace(seed=self._seed)

    @property
    def grammar(self) -> Grammar | None:
        """What its text follows, if anything."""
        return self._sampler.grammar

    @property
    def n_prompt(self) -> int:
        """How many of its tokens were read, not generated."""
        return self._n_prompt

    @property
    def seed(self) -> int:
        """What its draws are made of."""
        return self._seed

    @property
    def seed_given(self) -> bool:
        """True if its seed, or the one that is derived from, was chosen by the user, not picked here."""
        return self._seed_given

    @property
    def is_stop(self) -> bool:
        """True if a generation ended here with an end token or a stop string."""
        return self._finish_reason == "stop"

    @property
    def finish_reason(self) -> str | None:
        """Why the last ``generate`` ended: "stop" or "length"; None before that."""
        return self._finish_reason

    # -- reading -----------------------------------------------------------------------------------

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """The model's logits after the last token, float32 (V,), a copy."""
        with self._lock:
            return self._need_row().array.copy()

    def distribution(self) -> Distribution:
        """Return what the next token is drawn from: after all sampling settings and the grammar."""
        with self._lock:
            row = self._need_row()
            return self._sampler.distribution(row.array, len(self._tokens), self._seed)

    def entropy(self, base: str = "nats") -> float:
        """Return the entropy of the model's own next-token distribution."""
        with self._lock:
            return self._need_row().entropy() / log_base(base)

    def surprisal(self, token: SupportsIndex, base: str = "nats") -> float:
        """Return -log p(token) under the model's own next-token distribution."""
        with self._lock:
            token = self._ctx.model.token_id(token)
            return -self._need_row().logprob(token) / log_base(base)

    def perplexity(self, since: str = "prompt") -> float:
        """Return exp(mean surprisal) of the committed tokens, under the model's own distribution.

        Args:
            since: "prompt" = all that were generated on this line, inherited ones included, so that
                branches can be compared wherever they were forked; "fork" = those after the fork
                point. Prompt tokens have no surprisal here: they were read, not predicted. Nor has
                the first token of a branch without a prompt, which nothing came before.

        Raises:
            BranchStateError: there are no such tokens, or some were taken without a surprisal.
            ConfigError: an unknown ``since``.
        """
        with self._lock:
            counted = self._scored(since)
            if not counted:
                raise BranchStateError(
                    f"no token was generated since the {since}: there is no perplexity",
                    hint="generate or extend first; log_likelihood() is 0 there",
                )
            try:
                return math.exp(math.fsum(counted) / len(counted))
            except OverflowError:
                return math.inf

    def log_likelihood(self, since: str = "prompt", base: str = "nats") -> float:
        """Return the sum of log p of the committed tokens, under the model's own distribution.

        0 where there are none. It falls with every token: compare texts of one length by it, and
        others by ``perplexity``.

        Args:
            since: "prompt" or "fork", as for ``perplexity``.
            base: "nats" or "bits".

        Raises:
            BranchStateError: some tokens were taken without a surprisal.
            ConfigError: an unknown ``since`` or ``base``.
        """
        with self._lock:
            divisor = log_base(base)
            try:
                return math.fsum(-surprisal for surprisal in self._scored(since)) / divisor
            except OverflowError:
                return -math.inf

    def _scored(self, since: str) -> list[float]:
        """Return the surprisals of the tokens since the prompt or the fork, nats."""
        if since not in ("fork", "prompt"):
            raise ConfigError(f"since must be 'fork' or 'prompt', not {since!r}")
        start = self.fork_position if since == "fork" else 0
        counted = self._surprisals[max(start, self._n_prompt, 1) - self._n_prompt :]
        if any(map(math.isnan, counted)):
            # Of tokens that were followed, not predicted; an order by NaN would be none.
            raise BranchStateError(
                f"{sum(map(math.isnan, counted))} of {len(counted)} tokens have no surprisal",
                hint="they were taken without their logits; extend a new branch by them",
            )
        return counted

    def next_row(self) -> LogitsRow:
        """Return the logits after the last token as they lie, valid while the lock is held."""
        with self._lock:
            return self._need_row()

    # -- the inside --------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._pruned:
            raise BranchStateError("the branch is pruned")
        self._decoder.handle.ptr  # noqa: B018  (raises ClosedError)

    def _need_row(self) -> LogitsRow:
        """Return the logits after the last token, computing them again if they are not at hand."""
        self._check()
        row = self._row
        if row is not None and not row.lost:
            return row
        if not self._tokens:
            raise BranchStateError("the branch is empty: it has no logits", hint="prefill it first")
        tokens = self._tokens
        self._truncate(len(tokens) - 1)
        self._set_row(self._decoder.decode_run(tokens[-1:], self._seq_id, "last")[0])
        return self._row  # type: ignore[return-value]

    def _catch_up(self) -> None:
        """Bring the memory in step again, if a call was broken off.

        A full cache may have kept ``_need_row`` from the last token; memory that cannot drop a tail
        was emptied when a decode failed; a Ctrl-C may have come between a decode and what follows it.
        """
        ahead = self._decoder.cells.next_position(self._seq_id) - len(self._tokens)
        if ahead > 0:
            self._truncate(len(self._tokens))
        elif ahead < 0:
            self._set_row(None)
            self._need_row()

    def _set_row(self, row: LogitsRow | None) -> None:
        if row is not None:
            row.users += 1
        if self._row is not None:
            self._row.users -= 1
        self._row = row
        self._produced = None

    def expiring_rows(self) -> tuple[LogitsRow, ...]:
        """Return the rows that need not survive the next decode, because it replaces them."""
        return () if self._row is None else (self._row,)

    def check_prefill(self, tokens: Sequence[int]) -> None:
        """Raise unless ``append_prompt`` may follow the decode of ``tokens``."""
        self._check()
        if not tokens:
            raise ConfigError("nothing to prefill: no tokens")
        if len(self._tokens) > self._n_prompt:
            raise BranchStateError(
                "prefill comes before anything is generated", hint="use extend or commit"
            )
        self._ctx.model.check_tokens(tokens)
        self._catch_up()

    def append_prompt(self, tokens: Sequence[int], row: LogitsRow | None) -> None:
        """Take decoded prompt tokens; ``row`` follows them, if it was kept."""
        n = len(self._tokens)
        try:
            self._sampler.accept_prompt(tokens)
            self._tokens += tokens
            self._n_prompt = len(self._tokens)
            self._pending = b""
            self._finish_reason = None
            self._set_row(row)
        except BaseException:
            self._forget(n)
            raise

    def check_commit(self, token: int) -> float:
        """Raise unless ``take`` may follow the decode of ``token``; return its surprisal, nats.

        Whoever calls it has made it a token of the vocabulary.
        """
        if self._decoder.cells.next_position(self._seq_id) != len(self._tokens):
            self._check()
            self._catch_up()
        row = self._need_row()
        if not self._sampler.is_stateless and not self._sampler.allows(token):
            self._sampler.accept(token)  # raises GrammarError, with the reason
        return -row.logprob(token)

    def take(self, token: int, surprisal: float, row: LogitsRow | None) -> None:
        """Take a token; ``row`` follows it, None if it could not be decoded yet."""
        n = len(self._tokens)
        try:
            if not self._sampler.is_stateless:
                self._sampler.accept(token)
            self._append(token, surprisal)
            self._set_row(row)
        except BaseException:
            self._forget(n)
            raise

    def finish(self) -> None:
        """Note that an end token was produced here."""
        self._finish_reason = "stop"

    def _append(self, token: int, surprisal: float) -> str:
        pending = self.pending
        self._tokens.append(token)
        self._surprisals.append(surprisal)
        self._finish_reason = None
        text, self._pending = self._ctx.model.text_after(token, pending)
        return text

    def draw(self, row: LogitsRow) -> int:
        """Return the token that this line says after its last, whose logits are ``row``."""
        position = len(self._tokens)
        if not self._sampler.is_argmax:
            choice = self._sampler.distribution(row.array, position, self._seed)
            return choice.draw(self._seed, position)
        token = row.best
        if row.array[token] != row.array[token]:
            raise ConfigError("no token can be drawn: the logits are not numbers")
        return token

    def describe(self, token: int, row: LogitsRow) -> Produced:
        """Return ``token`` as what comes next, with what ``row`` says of it."""
        model = self._ctx.model
        is_stop = model.is_eog(token)
        text = "" if is_stop else model.text_after(token, self.pending)[0]
        return Produced(token, text, is_stop, row.logprob(token), row.entropy())

    def decode_run(
        self, tokens: Sequence[int], logits: str, replaced: Sequence[LogitsRow] = ()
    ) -> list[LogitsRow]:
        """Decode ``tokens`` at this line's end; if that fails the memory is as before."""
        self._catch_up()
        return self._decoder.decode_run(tokens, self._seq_id, logits, replaced)

    def _truncate(self, position: int) -> None:
        """Make the memory hold exactly the first ``position`` tokens."""
        held = self._decoder.cells.next_position
        can = self._ctx.capabilities.can_truncate and position >= self._whole_from
        if can and held(self._seq_id) >= position and self._decoder.drop(self._seq_id, position):
            return
        parent = self._parent
        self._decoder.drop(self._seq_id, 0)
        self._whole_from = done = 0
        if (
            parent is not None
            and not parent._pruned
            and parent.position <= position
            and parent._tokens == self._tokens[: parent.position]
            and held(parent._seq_id) == parent.position
        ):
            self._decoder.share(parent._seq_id, self._seq_id)
            done = parent.position
            self._whole_from = parent._whole_from
        if done < position:
            self._decoder.decode_run(self._tokens[done:position], self._seq_id, "none")

    def _forget(self, position: int) -> None:
        """Make everything but the memory be as after the first ``position`` tokens."""
        del self._tokens[position:]
        self._n_prompt = min(self._n_prompt, position)
        del self._surprisals[position - self._n_prompt :]
        if not self._sampler.is_stateless:
            n = self._n_prompt
            self._sampler = self._sampler.replay(self._tokens[:n], self._tokens[n:])
        self._pending = None
        self._finish_reason = None
        self._set_row(None)

    @property
    def pending(self) -> bytes:
        """The bytes of a UTF-8 character that is not complete after the last token."""
        if self._pending is None:
            self._pending = self._pending_bytes()
        return self._pending

    def _pending_bytes(self) -> bytes:
        model = self._ctx.model
        tail = b""
        if model.has_text:
            # Of a UTF-8 character at most three bytes can wait for more. Tokens without text may lie
            # between them, so bytes are counted, not tokens.
            for token in reversed(self._tokens[self._n_prompt :]):
                tail = model.piece(token) + tail
                if len(tail) >= 3:
                    break
        return decode_utf8(tail)[1]
