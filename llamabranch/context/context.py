"""A context: one K/V cache shared by many sequences, and all operations on it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, TypeVar, Unpack

from ..arguments import choice, instance, plain_int, real, shown, whole
from ..errors import BranchStateError, ConfigError, ExactnessWarning, UnsupportedError, warn
from ..model import Model, Prompt, TokenIds, token_list
from ..native import ContextHandle, HeadOf, NativeContextParams, StateLayout, heads, max_sequences
from ..sampling import Sampler, SamplingParams
from ..sampling.distribution import log_base, number_array
from ..sampling.params import settings_of
from .batch import decode_run
from .capabilities import Capabilities, Trial, of_sharing_head, probe
from .cell_ledger import Usage
from .compaction import rewrite_in_order
from .decoder import Decoder
from .kv_cache import KVCache
from .kv_type import faster_kv_type
from .logits import LogitsRow
from .params import MOST_WITH_PREFIXES, ContextOptions, ContextParams, warn_of_length
from .prefix_cache import LeasedSequences, PrefixCache
from .saved_prefixes import SavedPrefixes
from .sequence_ids import SequenceIds
from .thread_watch import ThreadWatch
from .threads import ThreadTuner
from .timing import stopped_after

if TYPE_CHECKING:
    from ..engine import Result
    from ..engine.completion import (
        ChatOptions,
        Conversations,
        Events,
        Messages,
        Prompts,
        TextOptions,
    )

__all__ = ["Context", "text_context"]

Logits = npt.NDArray[np.float32]
T = TypeVar("T", default=object)

_RECLAIMED_PART = 8  # of the cache: what the prefix cache evicts, at least, when cells are needed


class _Resident(Protocol):
    """What lives as long as a context."""

    def close(self) -> object: ...


class Context:
    """Many sequences of one model over one K/V cache.

    Args:
        model: a :class:`Model`; several contexts may share it.
        params: a :class:`ContextParams`; its fields may be given by name instead: ``n_ctx=8192``.
        owns_model: close the model with the context.
        target: for a head, the context whose hidden states it reads; it is closed after this one.
            ``model`` is then an EAGLE-3 head, or a model whose MTP layers are computed: the target's
            own, or that of a file with such layers only. By default the context has the target's
            threads and, for each layer that drafts, its size and sequences.

    Attributes:
        model: the model that it computes.
        target: the context that it drafts for as a head; None for all other contexts.
        params: the parameters with every default resolved. n_ctx, n_batch, n_seq_max, n_outputs_max,
            n_threads, n_threads_batch, kv_type: the values in effect.
        n_ctx_seq: how many tokens a sequence can hold: n_ctx, or with ``kv_unified=False`` its part.
        n_vocab: size of the vocabulary.
        capabilities: what this context's memory can do.
        prefix_cache: the texts whose K/V is kept; None without ``prefix_cache=True``, until the first
            call of ``complete`` or ``chat``.

    Raises:
        ConfigError: a bad option, or llama.cpp cannot create the context (the reason is given).
        UnsupportedError: the model cannot generate, ``batch_invariant=True`` or ``kv_unified=False``
            cannot hold, or the model is no head for ``target``.
        BranchStateError: a head that shares the memory of ``target``, which is not empty.

    Warns:
        ExactnessWarning: once, if of texts with a seed, or at temperature 0, more tokens are decoded
            together than ``capabilities.exact_rows``, and logits were measured to differ then.
        ContextLengthWarning: a text may get longer than the model was trained for. At once if ``n_ctx``
            is larger and not meant for several sequences (``n_seq_max`` is not given, or 1), else when
            a sequence does. Not where rope settings are given, nor with recurrent memory.
        PerformanceWarning: once, if decoding becomes far slower because other programs use the cores.

    Sequences 0 to n_seq_max - 1 are open to the raw calls of this class unless a branch holds
    them; branches take them from the top. One lock serialises all calls from many threads.
    """

    model: Model
    target: Context | None
    capabilities: Capabilities

    def __init__(
        self,
        model: Model,
        params: ContextParams | None = None,
        *,
        owns_model: bool = False,
        target: Context | None = None,
        **options: Unpack[ContextOptions],
    ) -> None:
        given = _given_params(model, target, params, options)
        resolved = given.resolve(model)
        trained = _trained_length(model, given)
        resolved, handle, tuner, trial = _open(model, resolved, given, target)
        native = resolved.native()
        self.model, self.target = model, target
        self.kv_type = resolved.kv_type
        self.n_ctx = handle.n_ctx
        self.n_ctx_seq = handle.n_ctx_seq
        self.n_batch = handle.n_batch
        self.n_seq_max = n_seq_max = native.n_seq_max
        self.n_outputs_max = handle.n_outputs_max
        self.n_vocab = model.n_vocab
        self._owns_model = owns_model
        self._lock = handle.lock
        try:
            self.capabilities, layout = trial
            encoder = None if target is None else _open_head(handle, model, target)
        except BaseException:
            handle.close()
            raise
        self.n_threads, self.n_threads_batch = tuner.n_threads, tuner.n_threads_batch
        self.params = tuner.filled(resolved)
        self._cache = KVCache(
            handle,
            n_seq_max,
            can_truncate=self.capabilities.can_truncate,
            keeps_order=self.capabilities.batch_invariant and target is None,
            window=self.capabilities.sliding_window if self.capabilities.can_truncate else 0,
            state_layout=layout,
        )
        self._decoder = Decoder(
            handle,
            self._cache,
            self._reclaim,
            n_trained=trained,
            watch=ThreadWatch.of(handle, model, tuner),
            eog_tokens=sorted(model.eog_tokens),
            encoder=encoder,
        )
        self.sequences = SequenceIds(self._cache, self._lock, self._check_raw, lambda: self.closed)
        # Kept by packages above while it is open; not for users.
        self.residents: dict[str, _Resident] = {}
        self.prefix_cache = None
        if resolved.prefix_cache:
            self.prefix_cache = self._open_prefix_cache(resolved.cache_ram)
        self._last_rows: list[LogitsRow] = []
        self._last_end = 0  # where their sequence goes on after the last of them
        self._is_warned = False
        self.release_threads()

    def _open_prefix_cache(self, cache_ram: int) -> PrefixCache:
        if cache_ram and not self._cache.can_copy:
            self._decoder.handle.close()
            raise UnsupportedError(
                f"cache_ram is not possible with {self.model.memory_type} memory, which cannot be copied",
                hint="leave cache_ram out; prefix_cache works without it",
            )
        leased = None
        if self.capabilities.recurrent or not self.capabilities.can_share:
            leased = LeasedSequences(self._cache, self.sequences)
        saved = SavedPrefixes(cache_ram) if cache_ram else None
        prefixes = PrefixCache(self._cache, leased, saved, self._decoder)
        self.sequences.evict = prefixes.evict_text
        self.sequences.hand_over = prefixes.hand_over
        return prefixes

    # -- life --------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after ``close()`` of the context or its model."""
        return self._decoder.handle.closed

    def close(self) -> None:
        """Free the context; branches on it raise ClosedError from now on. Idempotent."""
        residents = list(self.residents.values())
        self.residents.clear()
        for resident in residents:
            resident.close()
        self._decoder.handle.close_children()  # heads: not under this lock, they have their own
        with self._lock:
            self._decoder.close()
        if self._owns_model:
            if not self.model.closed:
                self.model.handle.name = "context"  # what was closed, for ClosedError
            self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<Context closed>"
        return f"<Context of {self.model.name!r}: {self.n_ctx} cells, {self.n_seq_max} sequences>"

    def _check_open(self) -> None:
        self._decoder.check_open()

    def _check_own_memory(self) -> None:
        if self.model.shares_memory:
            raise UnsupportedError(
                f"{self.model.name} has no memory of its own: it reads that of its target",
                hint="it is for drafting only: MTPDrafter(ctx)",
            )

    def warn_if_inexact(self, n_rows: int) -> None:
        """Warn, once, if logits of ``n_rows`` tokens in one decode differ from those of each alone."""
        found = self.capabilities.total_variation
        if self._is_warned or not found or n_rows <= max(1, self.capabilities.exact_rows):
            return
        self._is_warned = True
        warn(
            f"{n_rows} tokens are decoded together, which rounds logits otherwise than one by one: the "
            f"next token's distribution was measured to change by a total variation of {found:.2g}. So a "
            "text with a seed, or at temperature 0, may differ from the one without drafts, or alone. If "
            "equal texts matter, take weights that are exact, such as Q8_0, or batch_invariant=True",
            ExactnessWarning,
        )

    # -- interruption ------------------------------------------------------------------------------

    def release_threads(self) -> None:
        """Let another thread of this program decode next at full speed.

        Each thread that decodes keeps helpers waiting for its next decode. If another one decodes
        meanwhile, there are more of them than cores, and all wait for each other: a small decode takes
        ten times as long, until the first thread calls this or ends. A new context and an ``AsyncEngine``
        do it in the thread that creates them.
        """
        self._decoder.handle.release_threads()

    def interrupt(self) -> None:
        """Stop the decode running in another thread; if none is running, the next one stops at once.

        The call that is decoding raises DecodeInterruptedError and leaves its sequences as they were.
        Callable from any thread and from a signal handler; returns without waiting. llama.cpp checks
        between the operations of its graph; with recurrent memory, or layers on a GPU, the decode
        stops between micro-batches (``n_ubatch`` tokens).
        """
        self._decoder.handle.stop()

    def resume(self) -> None:
        """Undo an ``interrupt`` that has stopped no decode yet: the next one runs."""
        self._decoder.handle.resume()

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Interrupt what the ``with`` block decodes on this context after ``seconds``.

        The call that decodes then raises DecodeInterruptedError, as after ``interrupt``. The block
        is entered from one thread; what other threads decode here counts too.

        Raises:
            ConfigError: ``seconds`` is not a positive number.
        """
        seconds = real("a time limit", seconds)
        if not seconds > 0:
            raise ConfigError(f"a time limit is a positive number of seconds, not {seconds!r}")
        with stopped_after(self._decoder.handle, seconds):
            yield

    # -- for the layers above: the lock is held --------------------------------------------------------

    @property
    def lock(self) -> threading.RLock:
        """Held by every call on this context or a branch of it, but for counts such as `n_seq_free`."""
        return self._lock

    @property
    def decoder(self) -> Decoder:
        """Tokens in, rows of logits out; for branches, not for users."""
        return self._decoder

    @property
    def kv_cache(self) -> KVCache:
        """The cells; for branches, not for users."""
        return self._cache

    @property
    def n_seq_free(self) -> int:
        """How many sequences are free now. Does not wait while another thread decodes."""
        return self.sequences.count_free()

    def compact(self) -> bool:
        """Write all branches again, in order and without holes; False if raw sequences hold cells.

        Nothing needs to be done where sequences have cells of their own.
        """
        if not self.capabilities.can_share:
            return True
        return rewrite_in_order(
            self._cache, self._decoder, self.sequences.holders(), self.prefix_cache
        )

    def keep_prefixes(self) -> None:
        """Open the prefix cache, unless ``prefix_cache`` was given or it would take sequences."""
        with self._lock:
            can = self.capabilities.can_share and self.capabilities.can_truncate
            if can and self.params.prefix_cache is None and self.n_seq_max <= MOST_WITH_PREFIXES:
                self.prefix_cache = self.prefix_cache or self._open_prefix_cache(0)

    def _reclaim(self, n: int) -> bool:
        """Free cells for ``n`` tokens, if any can be freed; True if some were.

        First those that only the prefix cache uses, then reserved ones: by compaction, or, where that
        is impossible, out of order.
        """
        cache, freed = self._cache, 0
        if self.prefix_cache is not None:
            # More than is needed now, so that compactions are rare.
            wanted = max(n - cache.n_vacant, self.n_ctx // _RECLAIMED_PART)
            freed = self.prefix_cache.evict(wanted - cache.n_reserved)
        if freed and cache.n_vacant >= n:
            return True
        if not cache.n_reserved:
            return freed > 0
        if not self.compact():
            cache.release_reserved()
        return True

    def _check_seq(self, seq_id: int) -> int:
        seq_id = whole("a sequence id", seq_id)
        if not 0 <= seq_id < self.n_seq_max:
            raise ConfigError(
                f"sequence id {shown(seq_id)} is out of range 0 to {self.n_seq_max - 1}",
                hint="create the context with a larger n_seq_max",
            )
        return seq_id

    # -- accounting --------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Return how full the cache is."""
        with self._lock:
            self._check_open()
            self.sequences.collect()
            return self._cache.usage()

    def audit(self) -> None:
        """Compare the accounting with llama.cpp's own positions.

        Raises:
            DecodeError: they differ; the message names the sequence. That is a bug in this library.
        """
        if self.target is not None and self.model.shares_memory:
            self.target.audit()  # its lock comes before this context's
            return
        with self._lock:
            self._check_open()
            self.sequences.collect()
            self._cache.audit(ends_only=not self.capabilities.can_truncate)

    def _check_raw(self, *seq_ids: int) -> list[int]:
        self._check_open()
        self._check_own_memory()
        self.sequences.collect()
        checked = [self._check_seq(seq_id) for seq_id in seq_ids]
        for seq_id in checked:
            if seq_id in self.sequences:
                raise BranchStateError(
                    f"sequence {seq_id} is held by {self.sequences.holder(seq_id)!r}"
                )
        return checked

    # -- raw calls ---------------------------------------------------------------------------------

    def decode(
        self, tokens: TokenIds, position: int, seq_id: int = 0, logits: str = "last"
    ) -> None:
        """Decode ``tokens`` at ``position``, ``position`` + 1, ... of a sequence, in chunks.

        Args:
            tokens: ids, at least one.
            position: must be the end of the sequence: its number of tokens.
            seq_id: 0 to n_seq_max - 1, not held by a branch.
            logits: which rows to keep for ``logits()``: "last", "all" or "none".

        Raises:
            ConfigError: a bad argument.
            TokenizeError: a bad id.
            CacheFullError, DecodeError: the sequence is as it was before the call, or empty if some of
                the tokens were decoded and this memory cannot drop them
                (``capabilities.can_truncate``); the same holds after Ctrl-C.
        """
        with self._lock:
            (seq_id,) = self._check_raw(seq_id)
            choice("logits", logits, ("last", "all", "none"))
            tokens = token_list(tokens)
            if not tokens:
                raise ConfigError("nothing to decode: no tokens")
            self.model.check_tokens(tokens)
            end = self._cache.next_position(seq_id)
            if plain_int(position) != end:
                raise ConfigError(
                    f"sequence {seq_id} ends at position {end}, so tokens cannot go to {shown(position)}",
                    hint=f"decode at position {end}, or remove positions with kv_cache_remove first",
                )
            self._keep_last_rows(decode_run(self._decoder, tokens, seq_id, logits))
            self._last_end = end + len(tokens)

    def _keep_last_rows(self, rows: list[LogitsRow]) -> None:
        for row in self._last_rows:
            row.users -= 1
        self._last_rows = rows
        for row in rows:
            row.users += 1

    def _row(self, row: int) -> LogitsRow:
        self._check_open()
        n = len(self._last_rows)
        number = plain_int(row)
        if number is None or not -n <= number < n:
            raise ConfigError(
                f"no logits row {shown(row)}: the last decode kept {n}",
                hint="decode with logits='last' or 'all' first",
            )
        return self._last_rows[number]

    def logits(self, row: int = -1) -> Logits:
        """Return a row of the last raw ``decode``, float32 (V,), a copy; -1 is the last one.

        Raises:
            ConfigError: that decode kept no such row.
        """
        with self._lock:
            return np.array(self._row(row).array)

    def sample(self, params: SamplingParams | None = None, row: int = -1) -> int:
        """Return the token drawn from a row of the last raw ``decode``; changes nothing.

        The noise comes from ``params.seed`` (None counts as 0) and the position of the drawn token, so
        calling it twice gives the same token, and a :class:`Branch` of these tokens draws it too.
        Penalties and DRY need a history and a grammar a state: those belong to a branch.

        Raises:
            UnsupportedError: settings that need the tokens so far.
        """
        with self._lock:
            params = settings_of(params)
            if params.uses_history or params.logits_processor is not None:
                raise UnsupportedError(
                    "penalties, DRY and a logits processor look at the tokens so far: use a Branch"
                )
            found, n_rows = self._row(row), len(self._last_rows)
            seed, position = params.seed or 0, self._last_end - (n_rows - 1 - int(row) % n_rows)
            sampler = Sampler(self.model, params)
            return sampler.distribution(found.array, position, seed).draw(seed, position)

    def model_entropy(self, base: str = "nats", logits: Logits | None = None) -> float:
        """Return the entropy of softmax(logits) in "nats" or "bits"; default: the last row."""
        with self._lock:
            row = self._row(-1) if logits is None else LogitsRow(self._check_logits(logits))
            return row.entropy() / log_base(base)

    def model_surprisal(
        self, token: SupportsIndex, base: str = "nats", logits: Logits | None = None
    ) -> float:
        """Return -log p(token) under softmax(logits) in "nats" or "bits"; default: the last row."""
        with self._lock:
            token = self.model.token_id(token)
            row = self._row(-1) if logits is None else LogitsRow(self._check_logits(logits))
            return -row.logprob(token) / log_base(base)

    def _check_logits(self, logits: Logits) -> Logits:
        array = number_array("logits", logits, np.float32)
        if array.shape != (self.n_vocab,):
            raise ConfigError(f"logits must have shape ({self.n_vocab},), not {array.shape}")
        return array

    def kv_seq_copy(self, src: int, dst: int) -> None:
        """Make sequence ``dst`` a copy of ``src``. In a unified cache they share cells, no K/V is copied.

        The previous content of ``dst`` is dropped.
        """
        with self._lock:
            src, dst = self._check_raw(src, dst)
            if src != dst:
                self._cache.share(src, dst)

    def kv_cache_remove(self, seq_id: int, start: int = 0, end: int = -1) -> None:
        """Drop the positions [start, end) of a sequence; end -1 = to the end.

        Raises:
            UnsupportedError: this memory cannot drop a part of a sequence; nothing has changed.
        """
        with self._lock:
            (seq_id,) = self._check_raw(seq_id)
            start, end = whole("start", start), whole("end", end)
            if start < 0 or end < -1 or (end != -1 and end < start):
                raise ConfigError(f"no such range of positions: [{shown(start)}, {shown(end)})")
            stop = (1 << 31) if end == -1 else end
            length = self._cache.next_position(seq_id)
            if start >= min(stop, length):
                return
            partial = start > 0 or stop < length
            # A partial sliding window would accept the removal and then compute from missing cells.
            if (partial and not self._cache.can_cut(seq_id, start)) or not self._cache.drop(
                seq_id, start, 1 << 31 if stop >= length else stop
            ):
                raise UnsupportedError(
                    "this model's memory cannot drop a part of a sequence",
                    hint="remove the whole sequence and decode again, or fork first and drop the fork",
                )

    def kv_seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence that no branch holds."""
        with self._lock:
            (seq_id,) = self._check_raw(seq_id)
            for other in range(self.n_seq_max):
                if other != seq_id and other not in self.sequences:
                    self._cache.drop(other, 0)

    def kv_cache_clear(self) -> None:
        """Empty the whole cache.

        Raises:
            BranchStateError: a branch still uses it.
        """
        with self._lock:
            self._check_open()
            self._check_own_memory()
            self.sequences.collect()
            n_branches = self.sequences.n_held
            if n_branches:
                raise BranchStateError(
                    f"{n_branches} branches still use the cache",
                    hint="prune them first",
                )
            if self.prefix_cache is not None:
                self.prefix_cache.clear()
            self._cache.clear()

    def kv_cache_size(self, seq_id: int) -> int:
        """Return how many tokens a sequence holds."""
        with self._lock:
            self._check_open()
            return self._cache.ledger.length(self._check_seq(seq_id))

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return ``model.tokenize(...)``."""
        return self.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: TokenIds, *, special: bool = False) -> str:
        """Return ``model.detokenize(...)``."""
        return self.model.detokenize(tokens, special=special)

    # -- texts in one call: the door to the engine, which is on a higher layer -------------------------

    @overload
    def complete(
        self, prompt: Prompts, *, stream: Literal[False] = False, **options: Unpack[TextOptions[T]]
    ) -> list[Result[T]]: ...
    @overload
    def complete(
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[TextOptions[T]]
    ) -> Result[T]: ...
    @overload
    def complete(
        self, prompt: Prompt | Prompts, *, stream: Literal[True], **options: Unpack[TextOptions]
    ) -> Events: ...
    @overload
    def complete(
        self, prompt: Prompt | Prompts, *, stream: bool, **options: Unpack[TextOptions]
    ) -> Result | list[Result] | Events: ...
    def complete(
        self, prompt: Prompt | Prompts, *, stream: bool = False, **options: Unpack[TextOptions]
    ) -> Result | Sequence[Result] | Events:
        """Continue a prompt, or each of a list: ``ctx.complete("Once upon a time").text``.

        An `Engine` that stays with the context generates: it takes as many of its sequences at a time as
        are free. With a seed, or at temperature 0, the text is the one of ``Branch.generate``.

        Args:
            prompt: text, token ids, or messages; or a list of prompts.
            stream: return an iterator of `Event`: ``event.text`` of each token, and at the end of each
                text ``event.result``. ``event.id`` is the index of the prompt, as text.
            options: all by name:

                - ``drafter``: None = what the model and the text offer, where it was measured to be
                  faster: MTP layers, copies from the text so far, what a grammar forces.
                  ``NullDrafter()`` = none.
                - ``max_tokens``: the most tokens to generate (128); None = until the text or the cache
                  ends. ``stop``, ``stop_tokens``: strings and tokens that end the text.
                - ``n``: texts of each prompt (1), in ``result.choices``; the result is the first.
                - one of ``json_schema`` (a schema, or a type), ``regex``, ``choices`` (a list of texts)
                  and ``grammar`` (a `Grammar` or GBNF); ``result.parsed`` is the value.
                - ``top_logprobs``: alternatives of each token in ``result.logprobs`` (0);
                  ``prompt_logprobs``, ``parse_special``: as for `Request`.
                - ``sampling``, or settings of `SamplingParams`: ``temperature=0.8, top_p=0.9, seed=1``.

        Returns:
            the result; for a list of prompts a list. Without a seed ``result.seed`` gives the same text
            again. A text for which the cache has no more room has the ``finish_reason`` "capacity".

        Raises:
            ConfigError, GrammarError, TokenizeError, CacheFullError: something is invalid, or a prompt is
                too long; nothing has happened.
            LlamaBranchError: no text has a token, and this is why: `SequencesExhaustedError` where
                branches hold all sequences.
        """
        from ..engine import completion

        return completion.run(self, completion.plan_texts(self, prompt, **options), stream=stream)

    @overload
    def chat(
        self,
        messages: Conversations,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions[T]],
    ) -> list[Result[T]]: ...
    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions[T]],
    ) -> Result[T]: ...
    @overload
    def chat(
        self,
        messages: Messages | Conversations,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Events: ...
    @overload
    def chat(
        self, messages: Messages | Conversations, *, stream: bool, **options: Unpack[ChatOptions]
    ) -> Result | list[Result] | Events: ...
    def chat(
        self,
        messages: Messages | Conversations,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Result | Sequence[Result] | Events:
        """Answer a conversation in the format of the model's chat template, or each of a list of them.

        Args:
            messages: mappings with ``role`` and ``content``, or pairs of both. A last message of the
                assistant is continued.
            stream: as for ``complete``.
            options: those of ``complete``, and

                - ``tools``: functions that the model may call, as OpenAI describes them;
                  ``result.tool_calls`` are its calls.
                - ``tool_choice``: "auto"; "none"; "required", or the description of a function with its
                  name, forces a call that follows its schema.
                - ``chat_template_kwargs``: what else the template is given, such as
                  ``{"enable_thinking": False}``.

        Returns:
            as ``complete``.

        Raises:
            UnsupportedError: there is no chat template, or it ignores ``tools``.
            LlamaBranchError: as for ``complete``.
        """
        from ..engine import completion

        return completion.run(self, completion.plan_chat(self, messages, **options), stream=stream)


def text_context(name: str, value: object) -> Context:
    """Return ``value`` if it is a context that texts are generated with.

    Raises:
        ConfigError: it is no context; names the argument.
        UnsupportedError: it is that of a head, which computes nothing of its own.
    """
    hint = 'lb.load("model.gguf") returns one, and so does Context(model)'
    context = instance(name, value, Context, hint)
    if context.target is not None:
        raise UnsupportedError(
            f"{context.model.name} is open as a head of {context.target.model.name}: it drafts for that "
            "context, and generates no text of its own",
            hint="EagleDrafter(head) or MTPDrafter(head) drafts with it; generate with the target",
        )
    return context


def _given_params(
    model: Model, target: Context | None, params: ContextParams | None, options: ContextOptions
) -> ContextParams:
    """Return the parameters that were given; for a head the target's where none are."""
    instance("model", model, Model, "load a file with Model(path), or both with lb.load(path)")
    if target is not None:
        meant = "give the context that generates, for example lb.load(), not its model or name"
        instance("target", target, Context, meant)
    given = ContextParams(**options) if params is None else replace(params, **options)
    if target is not None:
        return _head_params(model, target, given)
    _check_generates(model)
    return given


def _check_generates(model: Model) -> None:
    """Raise UnsupportedError, with the reason, unless ``model`` generates text by itself."""
    if model.architecture == "eagle3" and not model.vocab_only:
        raise UnsupportedError(
            f"{model.name} is an EAGLE-3 head: it computes only beside its target",
            hint="give the target's context: Context(head, target=ctx), or load(name, target=ctx)",
        )
    if model.vocab_only or not model.can_generate:
        kind = "only its vocabulary is loaded" if model.vocab_only else "it predicts no tokens"
        hint = None
        if model.n_mtp_layers and not model.vocab_only:
            kind += ", its MTP layers compute only beside their target"
            hint = "give the target's context: Context(head, target=ctx), or load(name, target=ctx)"
        raise UnsupportedError(f"cannot create a context for {model.name}: {kind}", hint=hint)


def _trained_length(model: Model, given: ContextParams) -> int | None:
    """Return the length beyond which a text warns, None if none does; warn now of ``n_ctx`` itself."""
    trained = given.trained_length(model)
    # Many cells for several sequences are usually meant for many texts, otherwise for a long one.
    n_ctx = given.n_ctx if given.n_seq_max in (None, 1) else None
    if trained is None or n_ctx is None or n_ctx <= trained:
        return trained
    warn_of_length(f"n_ctx={n_ctx} is", trained, n_ctx)
    return None  # warn only once


def _open(
    model: Model, resolved: ContextParams, given: ContextParams, target: Context | None
) -> tuple[ContextParams, ContextHandle, ThreadTuner, Trial]:
    """Create the native context and try out what it can do; twice where that changes its parameters.

    Batches that are not exact get the K/V type that is faster, and with ``batch_invariant=True`` no more
    rows at once than are exact.
    """
    first = resolved
    reason = ""
    variation: float | None = None
    while True:
        changes_logits = model.memory_type != "recurrent" and resolved.threads_change_logits
        threads = given.n_threads, given.n_threads_batch
        tuner = ThreadTuner(model, *threads, changes_logits=changes_logits)
        params = tuner.filled(resolved)
        handle = _create(model, params.native(), target)
        try:
            if target is not None and model.shares_memory:  # trials need memory
                _check_copies(handle, None)
                return resolved, handle, tuner, (of_sharing_head(target.capabilities), None)
            trial = probe(handle, model, params, is_head=target is not None)
            found = trial[0]
            if not found.batch_invariant and resolved is first and target is None:
                again = _adapted(model, resolved, given, found)
                if again is not None:
                    handle.close()
                    reason, variation = found.batch_invariant_reason, found.total_variation
                    if found.exact_rows and again.kv_type != resolved.kv_type:
                        reason += f" (with {resolved.kv_type} K/V)"
                    resolved = again
                    continue
            if target is not None and not found.can_truncate:
                raise UnsupportedError(
                    "a head must be able to drop what it has drafted", hint="leave swa_full out"
                )
            _check_copies(handle, trial[1])
            tuner.tune(handle)
        except BaseException as error:
            handle.close()
            if given.kv_unified == "auto" and isinstance(error, UnsupportedError):
                unified = replace(given, kv_unified=True)
                return _open(model, unified.resolve(model), unified, target)
            raise
        if reason:
            if found.batch_invariant:
                at_once = f"decodes, and prompts, of {resolved.n_ubatch} tokens at a time"
                more = "; extra_buffers=False may allow more" if model.extra_buffers else ""
                reason = f"by {at_once}{more}: {reason}"
                variation = 0.0
            more_found = replace(found, batch_invariant_reason=reason, total_variation=variation)
            trial = (more_found, *trial[1:])
        return resolved, handle, tuner, trial


def _check_copies(handle: ContextHandle, layout: StateLayout | None) -> None:
    """Raise UnsupportedError where sequences have cells of their own, and these cannot be copied."""
    if not handle.kv_unified and (layout is None or not layout.is_cells_only):
        raise UnsupportedError(
            "kv_unified=False: llama.cpp writes K/V in an unknown form, so forks cannot copy it"
        )


def _adapted(
    model: Model, resolved: ContextParams, given: ContextParams, found: Capabilities
) -> ContextParams | None:
    """Return the parameters for a model whose batches are not exact as they are; None = these.

    Raises:
        UnsupportedError: ``batch_invariant=True`` is not possible.
    """
    if resolved.batch_invariant is True:
        rows = found.exact_rows
        exact = model.memory_type == "attention" and rows > 1
        if exact and (resolved.kv_unified or rows >= (resolved.n_seq_max or 1)):
            return replace(resolved, n_ubatch=rows)
        hint = (
            "it takes weights on the CPU of a type that llama.cpp computes alike in all batches, "
            "such as Q8_0 or Q4_0, kv_type bf16 or q8_0, and flash attention"
        )
        raise UnsupportedError(
            f"this context cannot be batch-invariant: {found.batch_invariant_reason}",
            hint=hint + ("; extra_buffers=False may allow some" if model.extra_buffers else ""),
        )
    if (given.kv_type, resolved.kv_type) == ("auto", "bf16") and model.memory_type == "attention":
        faster = faster_kv_type(model)
        return None if faster == "bf16" else replace(resolved, kv_type=faster)
    return None


def _create(model: Model, native: NativeContextParams, target: Context | None) -> ContextHandle:
    """Return the native context; ``target`` for that of a head."""
    if target is None:
        handle = ContextHandle(model.handle, native)
        if not handle.has_memory:
            handle.close()
            raise UnsupportedError(f"{model.name} has no memory: it cannot generate")
        return handle
    with target.lock:
        if model.shares_memory and target.usage().cells_used:
            raise BranchStateError(
                f"{model.name} shares the memory of its target, and opening it would empty that",
                hint="open it before anything is decoded, or prune all branches first",
            )
        head = HeadOf(target.decoder.handle, not model.target_layers, model.shares_memory)
        return ContextHandle(model.handle, native, head)


def _open_head(handle: ContextHandle, model: Model, target: Context) -> heads.Encoder | None:
    """Let the target keep its hidden states; return the head's encoder, if it has one."""
    layers = model.target_layers or (target.model.n_layer,)
    reader = weakref.ref(handle)

    def is_read() -> bool:
        found = reader()
        return found is not None and not found.closed

    with target.lock:
        width = target.decoder.watch_hidden(layers, is_read).width
    if not model.target_layers:
        return None
    return heads.Encoder(handle, width, min(handle.n_outputs_max, handle.n_chunk))


def _head_params(model: Model, target: Context, given: ContextParams) -> ContextParams:
    """Return the parameters of a head's context, the target's where none are given.

    Raises:
        UnsupportedError: ``model`` is no head for the target, with the reason.
    """
    target.decoder.check_open()
    reason = target.model.head_fault(model)
    if reason:
        raise UnsupportedError(
            f"{model.name} cannot draft for {target.model.name} as a head: {reason}",
            hint="`llamabranch models show TARGET HEAD` shows whether one can draft for the other",
        )
    if model.shares_memory:
        if given.prefix_cache:
            raise UnsupportedError("a head that reads the memory of its target caches no prefixes")
        theirs = target.params
        return replace(
            given,
            n_ctx=target.n_ctx,
            n_seq_max=target.n_seq_max,
            kv_type=target.kv_type,
            flash_attention=theirs.flash_attention,
            swa_full=theirs.swa_full,
            kv_unified=theirs.kv_unified,
            batch_invariant=False,
            n_threads=given.n_threads or target.n_threads,
            n_threads_batch=given.n_threads_batch or target.n_threads_batch,
        )
    # Each of several MTP layers has sequences of its own, with the K/V of the same texts.
    n_layers = max(1, model.n_mtp_layers)
    return replace(
        given,
        n_ctx=given.n_ctx or target.n_ctx * n_layers,
        n_seq_max=given.n_seq_max or min(target.n_seq_max * n_layers, max_sequences()),
        n_threads=given.n_threads or target.n_threads,
        n_threads_batch=given.n_threads_batch or target.n_threads_batch,
    )
