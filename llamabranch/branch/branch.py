"""A branch: a sequence with its tokens and sampler, which can be forked at almost no cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

from ..arguments import choice, instance, whole
from ..context import Context, TokenScore
from ..context.context import text_context
from ..context.progress import OnPromptProgress
from ..context.token_states import layer_states
from ..errors import (
    BranchStateError,
    CacheFullError,
    CapacityError,
    SequencesExhaustedError,
)
from ..generation.config import SpeculativeConfig
from ..generation.drafter import Drafter
from ..generation.output import OutputBuffer, Produced
from ..generation.text import Text
from ..model import Prompt, TokenIds, stop_strings, token_list
from ..model.tree import TextNode
from ..pictures import last_words
from ..run.drafting import Drafting
from ..sampling import Distribution, Grammar, Sampler, SamplingParams, SamplingSettings
from ..sampling.constraint import ConstraintCalls, ConstraintLike, ConstraintState
from ..sampling.distribution import log_base
from ..sampling.noise import derive_seed
from ..sampling.params import settings_of
from . import scorer
from .generation import Generation
from .snapshot import Snapshot, capture, fill


class Branch(TextNode):
    """A text: a sequence of the cache, its tokens and its sampler.

    Create one with :meth:`start`, :meth:`create` or :meth:`fork`. :meth:`prune`, or the end of its
    ``with`` block, frees its sequence. So does garbage collection, if you drop the branch.

    Attributes:
        ctx: the context that holds it.
        parent: the branch that this one was forked from; None for a root.
        sequence: its tokens, sampler and logits, in step with the K/V cache. This is for drafters, not
            for users.
    """

    def __init__(
        self,
        ctx: Context,
        sampler: Sampler,
        seed: int,
        parent: Branch | None,
        beginning: Sequence[int] = (),
    ) -> None:
        """Allocate a sequence. For ``create`` and ``fork``, not for users."""
        inherited = None if parent is None else parent.sequence
        seq_id = ctx.sequences.allocate(self, beginning)
        self.sequence: Text = Text(ctx, seq_id, sampler, seed, inherited)
        self.ctx = ctx
        self._lock = ctx.lock
        super().__init__(parent)

    @classmethod
    def create(
        cls,
        ctx: Context,
        sampling: SamplingParams | None = None,
        grammar: Grammar | str | None = None,
        *,
        beginning: Sequence[int] = (),
    ) -> Branch:
        """Return an empty branch; call ``prefill`` next. Arguments and errors: see ``start``.

        ``beginning`` has the tokens that it will begin with, if known: the prefix cache may have them.
        """
        text_context("ctx", ctx)
        params = settings_of(sampling)
        if isinstance(grammar, str):
            grammar = Grammar(grammar)
        with ctx.lock:
            ctx.decoder.check_open()
            seed = params.drawn_seed()
            sampler = Sampler(ctx.model, params, grammar)
            return cls(ctx, sampler, seed, None, beginning)

    @classmethod
    def start(
        cls,
        ctx: Context,
        prompt: Prompt,
        *,
        grammar: Grammar | str | None = None,
        sampling: SamplingParams | None = None,
        parse_special: bool = True,
        on_prompt_progress: OnPromptProgress | None = None,
        **settings: Unpack[SamplingSettings],
    ) -> Branch:
        """Return a branch that begins with ``prompt``. The part that the prefix cache has is reused.

        Args:
            ctx: the context that holds it.
            prompt: text, token ids, or messages (``[{"role": "user", "content": "Hello"}]``). Text is
                tokenized with the model's BOS token, if it has one. Messages are rendered by the
                model's chat template.
            grammar: constrains the generated text.
            sampling: settings.
            parse_special: whether control tokens written in a text, such as ``<|im_start|>``, are
                parsed, see ``Model.prompt_tokens``; False for untrusted text.
            on_prompt_progress: as for ``prefill``.
            settings: fields of `SamplingParams` by name, which override ``sampling``:
                ``temperature=0.8, top_p=0.9, seed=1``.

        Raises:
            ConfigError: an unknown setting or a value out of range. TokenizeError, GrammarError,
            SequencesExhaustedError, CacheFullError, DecodeError: no branch is created.
        """
        params = settings_of(sampling, **settings)
        text_context("ctx", ctx)
        tokens = ctx.model.prompt_tokens(prompt, parse_special=parse_special)
        if len(tokens) > ctx.n_ctx_seq:
            raise CacheFullError.of_prompt(len(tokens), ctx.n_ctx_seq)
        branch = cls.create(ctx, params, grammar, beginning=tokens[:-1])
        try:
            n_cached = branch.sequence.take_cached(tokens[:-1])
            branch.prefill(tokens[n_cached:], on_prompt_progress=on_prompt_progress)
            branch.sequence.keep_cached()
        except BaseException:
            branch.prune()
            raise
        return branch

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.sequence.is_pruned and not self.ctx.closed:
            self.prune_subtree()

    # -- properties --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        about = f"Branch seq {self.seq_id}, {self.position} tokens, {self.state}"
        if self.sequence.is_pruned or self.ctx.closed:
            return f"<{about}>"
        score = ""
        with suppress(BranchStateError):  # no generated tokens, or some have no surprisal
            score = f", perplexity {self.perplexity():.2f}"
        tail = b"".join(map(self.ctx.model.piece, self.sequence.shown[-64:]))
        return f"<{about}: {last_words(tail.decode('utf-8', 'replace'), 24)!r}{score}>"

    @property
    def seq_id(self) -> int:
        """The id of its sequence."""
        return self.sequence.seq_id

    @property
    def state(self) -> str:
        """ "empty", "ready", "finished" or "pruned"."""
        return self.sequence.state

    @property
    def tokens(self) -> list[int]:
        """A copy of all token ids, including the prompt, inherited tokens and a stop string."""
        return list(self.sequence.shown)

    @property
    def text(self) -> str:
        """The text of ``tokens``, without control tokens."""
        pieces = map(self.ctx.model.piece, self.sequence.shown)
        return b"".join(pieces).decode("utf-8", "replace")

    @property
    def generated_tokens(self) -> list[int]:
        """The generated token ids, without the prompt and appended text; a copy."""
        tokens = self.sequence.tokens
        return [tokens[position] for position in self.sequence.generated_positions()]

    @property
    def position(self) -> int:
        """The number of tokens, which is the position of the next one."""
        return self.sequence.position

    @property
    def n_prompt(self) -> int:
        """The number of prompt tokens at its beginning."""
        return self.sequence.n_prompt

    @property
    def sampling(self) -> SamplingParams:
        """The settings in effect, with the current seed, even after ``reseed``."""
        return self.sequence.sampling

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that constrains its text, if any."""
        return self.sequence.grammar

    @property
    def seed(self) -> int:
        """The seed of its draws."""
        return self.sequence.seed

    @property
    def is_stop(self) -> bool:
        """True if a generation ended here with an EOG token or a stop string."""
        return self.sequence.finish_reason == "stop"

    @property
    def finish_reason(self) -> str | None:
        """Why the last ``generate`` ended: "stop", "length", "constraint"; None before that."""
        return self.sequence.finish_reason

    @property
    def children(self) -> list[Branch]:
        """The forks of this branch that are not pruned, oldest first."""
        return [child for child in super().children if not child.sequence.is_pruned]

    # -- reading -----------------------------------------------------------------------------------

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """The model's logits after the last token, float32 (V,), a copy."""
        with self._lock:
            return np.array(self.sequence.logits_row().array)

    def distribution(self) -> Distribution:
        """Return the distribution of the next token, after all sampling settings and the grammar."""
        with self._lock:
            sequence = self.sequence
            row = sequence.logits_row()
            return sequence.sampler.distribution(row.array, sequence.position, sequence.seed)

    def log_probs(self) -> npt.NDArray[np.float64]:
        """Return the model's own log-probabilities of the next token in nats, float64 (V,), a copy.

        Sampling settings and the grammar are not applied; `distribution` applies them.
        """
        with self._lock:
            return self.sequence.logits_row().log_probs()

    def entropy(self, base: str = "nats") -> float:
        """Return the entropy of the model's own next-token distribution."""
        with self._lock:
            return self.sequence.logits_row().entropy() / log_base(base)

    def surprisal(self, token: SupportsIndex, base: str = "nats") -> float:
        """Return -log p(token) under the model's own next-token distribution."""
        with self._lock:
            row = self.sequence.logits_row()
            return -row.logprob(self.ctx.model.token_id(token)) / log_base(base)

    def perplexity(self, since: str = "prompt") -> float:
        """Return exp(mean surprisal) of the generated tokens, under the model's own distribution.

        Tokens of the prompt and of ``append`` do not count. Without a prompt, the first token does not
        count either.

        Args:
            since: "prompt" = all generated tokens, including inherited ones; "fork" = only those after
                the fork.

        Raises:
            BranchStateError: there are no such tokens, or some were appended without a surprisal.
            ConfigError: an unknown ``since``.
        """
        with self._lock:
            return scorer.perplexity(self.sequence, since)

    def log_likelihood(self, since: str = "prompt", base: str = "nats") -> float:
        """Return the sum of log p of the tokens that ``perplexity`` counts; 0 without tokens.

        Every token lowers it, so compare only texts with the same number of tokens. ``base``: "nats" or
            "bits".
        """
        with self._lock:
            return scorer.log_likelihood(self.sequence, since) / log_base(base)

    def score(self, text: str | TokenIds, top: int = 0) -> list[TokenScore]:
        """Score a text as the continuation of this branch, which does not change.

        Args:
            text: token ids, or text. Text is tokenized by itself and without a BOS token, so begin it
                with a space if it needs one. Control tokens written in it stay text.
            top: how many of the most probable tokens to return for each token.

        Returns:
            for each token its log-probability, rank and entropy, and the most probable tokens at its
            position, all under the model's own distribution, without sampling settings or grammar.

        Raises:
            BranchStateError, ConfigError, TokenizeError, CacheFullError, DecodeError: nothing has
                changed.
        """
        with self._lock:
            tokens = scorer.continuation(self.ctx.model, text)
            return scorer.score(self.ctx, self.sequence, tokens, whole("top", top, 0))

    # -- moving ------------------------------------------------------------------------------------

    def prefill(
        self, tokens: TokenIds, *, on_prompt_progress: OnPromptProgress | None = None
    ) -> None:
        """Decode ``tokens`` as the prompt, in chunks. They count for penalties, not for the grammar.

        Args:
            tokens: ids.
            on_prompt_progress: called with a `PromptProgress` before the first chunk and after each one.
                Tokens that the branch already has count as cached.

        Raises:
            TokenizeError, CacheFullError, DecodeError, and errors of ``on_prompt_progress``: the branch
                is as before.
        """
        with self._lock:
            self.sequence.read(token_list(tokens), as_prompt=True, report=on_prompt_progress)

    def append(
        self,
        text: str | TokenIds,
        *,
        parse_special: bool = True,
        on_prompt_progress: OnPromptProgress | None = None,
    ) -> None:
        """Append text that the model reads but did not generate, such as a user's next message.

        Its tokens count for penalties. They are not part of ``generated`` and have no surprisal. After
        them, a grammar starts from its beginning.

        Args:
            text: token ids, or text, which is tokenized by itself and without a BOS token. For a chat
                turn, pass everything that the template writes between two answers, including the EOG
                token.
            parse_special: whether control tokens written in a text, such as ``<|im_end|>``, become
                their ids. Pass False for text from others, which must not end a turn.
            on_prompt_progress: as for ``prefill``.

        Raises:
            ConfigError, TokenizeError, CacheFullError, DecodeError: the branch is as before.
        """
        with self._lock:
            if isinstance(text, str):
                model = self.ctx.model
                text = model.tokenize(text, add_special=False, parse_special=parse_special)
            self.sequence.read(token_list(text), report=on_prompt_progress)

    def produce(self) -> Produced:
        """Return the next token, which depends on logits, settings, seed and position; do not append it.

        Raises:
            BranchStateError: pruned or empty. GrammarError: the grammar allows no token.
        """
        with self._lock:
            return self.sequence.produce()

    def commit(self, token: SupportsIndex) -> None:
        """Append ``token``: decode it and update the sampler.

        After a TokenizeError, GrammarError, CacheFullError or DecodeError the branch is as before.
        """
        with self._lock:
            self.sequence.commit(self.ctx.model.token_id(token))

    def step(self) -> Produced:
        """Produce and commit one token; an EOG token is returned but not committed."""
        with self._lock:
            produced = self.sequence.produce()
            if produced.is_stop:
                self.sequence.finish_reason = "stop"
            else:
                self.sequence.commit(produced.token, draws_next=True)
            return produced

    def generate(
        self,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        *,
        drafter: Drafter | None = None,
        config: SpeculativeConfig | None = None,
        top_logprobs: int = 0,
        constraint: ConstraintLike | None = None,
    ) -> Generation:
        """Return an iterator that generates tokens (:class:`Produced`) while you iterate.

        It ends at an EOG token, after ``max_tokens``, or when the text contains a stop string. The
        branch does not keep the EOG token; it is yielded only if text was held back for a stop string.
        The branch keeps the stop string, but the yielded text does not include it. ``finish_reason`` is
        "stop", "length" or "constraint".

        Between two tokens you may read, fork, rewind or extend the branch; the generation continues from
        there.

        Args:
            max_tokens: the token limit; None = until the model stops or the cache is full.
            stop: strings that end the text.
            drafter: proposes tokens; None = plain decoding. The branch keeps the drafter's state until
                you pass another drafter, and its forks start with copies of the state.
            config: how much to draft, and which rule accepts drafts.
            top_logprobs: how many alternatives to report with each token.
            constraint: a function that gets the text generated since the last prompt or appended token,
                and returns False if no valid text can start with it. Or an object with two methods:
                ``prefix`` is such a function, and ``complete`` says whether the text may end. Each draw
                puts all tokens in an order and takes the first allowed one, so a constraint that allows
                everything does not change the text. If no token is allowed, the text ends. Drafts are
                accepted by the rule "seeded".

        Raises:
            ConfigError, UnsupportedError, VocabularyMismatchError: nothing has begun.
            BranchStateError: another generation of this branch has not ended.
            CacheFullError: no cell is left; the branch has all tokens that were yielded. Before this or
                any other error, text that was held back is yielded with ``is_stop`` and the token id
                -1.
        """
        output, n = OutputBuffer(max_tokens, stop), whole("top_logprobs", top_logprobs, 0)
        drafting = Drafting(self.ctx, drafter, config)
        state = None
        if constraint is not None:
            state = ConstraintState(ConstraintCalls(constraint), self.ctx.model, stop_strings(stop))
        return Generation(drafting, self.sequence, output, n, constraint=state, owner=self)

    def hidden_state(self, layer: int = -1) -> npt.NDArray[np.float32]:
        """Return a copy of the last token's hidden state, float32 (n_embd,); see ``hidden_states``."""
        return self.hidden_states(layer, max(0, self.position - 1)).ravel()

    def hidden_states(self, layer: int = -1, start: int = 0) -> npt.NDArray[np.float32]:
        """Return a copy of the hidden states of the tokens from ``start`` on, float32 (n, n_embd).

        After the first call for an inner layer, the context keeps that layer's states of every token
        that it decodes, 4 x n_embd bytes per token. Tokens decoded earlier are decoded again in a
        separate sequence. For the last layer, this happens in every call.

        Args:
            layer: how many layers the states have passed through, as in Hugging Face's
                transformers: 0 = the embeddings, n_layer or -1 = after all layers and the output
                norm, -2 = before the last layer.
            start: the first position, 0 to ``position`` - 1.

        Raises:
            BranchStateError: the branch is empty or pruned. ConfigError: no such layer or position.
            UnsupportedError: llama.cpp does not provide the layer, or a head reads other layers.
            CapacityError: no sequence or no cells are free to decode tokens again.
        """
        with self._lock:
            self.sequence.check_usable()
            self.sequence.settle()
            self.sequence.check_not_empty("hidden states")
            start = whole("start", start, 0, self.position - 1)
            return layer_states(self.ctx, self.seq_id, self.tokens, layer, start)

    def generate_text(self, max_tokens: int | None = None, stop: str | Sequence[str] = ()) -> str:
        """Generate as ``generate`` does, with its errors, and return the text."""
        return self.generate(max_tokens, stop).finish().text

    def extend(self, tokens: TokenIds, logits: str = "last") -> list[npt.NDArray[np.float32]]:
        """Append several tokens as if they had been generated, in one decode.

        Args:
            tokens: ids, at least one; a grammar must allow them.
            logits: which rows to return, "last" or "all". A row takes 4 V bytes, where V is the size of
                the vocabulary.

        Returns:
            copies of the logits after the last token or, with "all", after each token, float32 (V,).

        Raises:
            TokenizeError, GrammarError, CacheFullError, DecodeError: the branch is as before.
        """
        with self._lock:
            choice("logits", logits, ("all", "last"))
            return self.sequence.extend(token_list(tokens), keeps_all=logits == "all")

    # -- branching ---------------------------------------------------------------------------------

    def fork(self) -> Branch:
        """Return a child that continues from the same state.

        It shares the K/V of the prefix, and draws the same tokens as its parent until you reseed
        it. If no sequence is free, this raises SequencesExhaustedError.
        """
        with self._lock:
            self.sequence.check_usable()
            with suppress(CapacityError):  # if it fails, both decode the last token when needed
                self.sequence.settle()
            sampler = self.sequence.sampler
            if sampler.constraint is not None:  # it belongs to a generation
                sampler = sampler.constrained(None)
            return Branch(self.ctx, sampler.clone(), self.seed, parent=self)

    def fork_many(self, n: int) -> list[Branch]:
        """Return ``n`` children; the i-th has a seed derived from this branch's seed and i.

        A second call at the same position returns the same children again, unless you call ``reseed()``
        in between. If there are too few sequences, it raises SequencesExhaustedError and creates no
        child.
        """
        n = whole("n", n, 0)
        children: list[Branch] = []
        try:
            for i in range(n):
                children.append(self.fork())
                children[-1].sequence.seed = derive_seed(self.seed, i + 1)
            return children
        except BaseException as error:
            for child in children:
                child.prune()
            if not isinstance(error, SequencesExhaustedError):
                raise
            n_free, n_all = len(children), self.ctx.n_seq_max
            raise SequencesExhaustedError.of_forks(n, n_free, n_all) from None

    def reseed(self, seed: int | None = None) -> None:
        """Use another seed for the tokens that follow; without ``seed``, or with -1, a random one."""
        seed = SamplingParams(seed=seed).drawn_seed()
        with self._lock:
            self.sequence.check_usable()
            self.sequence.drop_held()
            self.sequence.seed = seed

    def steer(self, bias: Mapping[int, float]) -> None:
        """Add ``bias`` to the logits of the tokens that follow. Forks inherit it; {} removes it."""
        self.resample(self.sampling.replace(logit_bias=bias))

    def resample(self, sampling: SamplingParams) -> None:
        """Use other settings for the tokens that follow; if they have no seed, the seed stays."""
        self.sequence.resample(sampling)

    def rewind(self, position: int) -> None:
        """Drop all tokens from ``position`` to the end, as if they had never been decoded.

        If this memory cannot be cut, the branch goes back to its own or its parent's last checkpoint
        before ``position``, and decodes the tokens after it again. Without a checkpoint, it decodes all
        remaining tokens again.
        """
        with self._lock:
            self.sequence.check_usable()
            self.sequence.keep(whole("position", position, 0, self.position))

    def prune(self) -> None:
        """Free the sequence; a second call does nothing. With children it raises BranchStateError."""
        with self._lock:
            if self.sequence.is_pruned:
                return
            if self.children:
                raise BranchStateError(
                    f"the branch has {len(self.children)} children",
                    hint="detach() makes a child a root, prune_subtree() frees them all",
                )
            self.sequence.release()

    def prune_subtree(self) -> None:
        """Free the sequences of this branch and all its descendants."""
        with self._lock:
            for branch in reversed(self.subtree()):
                branch.prune()

    def promote(self) -> None:
        """Prune the parent and the siblings, and take the parent's place.

        A root raises BranchStateError.
        """
        with self._lock:
            self.sequence.check_usable()
            parent = self.parent
            if parent is None:
                raise BranchStateError("a root has no parent to replace")
            for sibling in parent.children:
                if sibling is not self:
                    sibling.prune_subtree()
            self.hang(parent.parent, parent.sequence.at)
            parent.prune()

    def detach(self) -> None:
        """Become a root. The parent stays, but no longer has this branch as a child."""
        with self._lock:
            self.sequence.check_usable()
            self.hang(None)

    def hang(self, parent: Branch | None, at: int = 0) -> None:
        """Move this branch below another that begins with the same ``at`` tokens; not for users."""
        super().hang(parent)
        self.sequence.hang(None if parent is None else parent.sequence)
        self.sequence.at = at

    def snapshot(self) -> Snapshot:
        """Return a copy of the complete state, without children; see ``restore``.

        UnsupportedError: this memory cannot be saved.
        """
        with self._lock:
            return capture(self.sequence, self.sampling)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``snapshot`` to a file; raises the errors of `snapshot` and of `Snapshot.write`."""
        self.snapshot().write(path)

    @classmethod
    def restore(cls, ctx: Context, snapshot: Snapshot, *, trusted: bool = False) -> Branch:
        """Return a root that continues from the snapshot, in the same or another context.

        In exact contexts it generates bit for bit what the saved branch would.

        Raises:
            SnapshotError: it is from another model, K/V type or RoPE setting, or is inconsistent.
            SequencesExhaustedError, CacheFullError: too few free sequences or cells; ``ctx`` is as
                before.
        """
        instance("snapshot", snapshot, Snapshot)
        return cls._restored(ctx, lambda: snapshot, trusted)

    @classmethod
    def load(cls, ctx: Context, path: str | os.PathLike[str], *, trusted: bool = False) -> Branch:
        """Return the branch that ``save`` wrote, as a root. It also raises the errors of ``restore``.

        The file may come from an untrusted source: everything in it is checked before use.

        Args:
            trusted: accept K/V that cannot be checked because this llama.cpp writes it in an unknown
                layout. Use this only for files that you know were not tampered with.

        Raises:
            SnapshotError: the file does not exist, is damaged, or failed a check.
            UnsupportedError: the K/V cannot be checked, and ``trusted`` is False.
        """
        return cls._restored(ctx, lambda: Snapshot.read(path, ctx), trusted)

    @classmethod
    def _restored(cls, ctx: Context, get: Callable[[], Snapshot], trusted: bool) -> Branch:
        text_context("ctx", ctx)
        with ctx.lock:
            branch = cls.create(ctx, SamplingParams(temperature=0.0))
            try:
                fill(branch.sequence, get(), trusted=trusted)
            except BaseException:
                branch.prune()
                raise
            return branch
