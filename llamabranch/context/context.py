"""A context: one K/V cache shared by many sequences, and all operations on it."""

from __future__ import annotations

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
from ..native import release_threads
from ..sampling import Sampler, SamplingParams
from ..sampling.distribution import log_base, number_array
from ..sampling.params import settings_of
from .cell_table import Usage
from .compaction import rewrite_in_order
from .logits import LogitsRow
from .memory import END
from .opening import Capabilities, open_native
from .params import MOST_WITH_PREFIXES, ContextOptions, ContextParams
from .prefix_cache import PrefixCache
from .runner import decode_run
from .sequence_ids import SequenceIds
from .threads import stopped_after

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


class _Attached(Protocol):
    """An object that is closed with its context."""

    def close(self) -> object: ...


class Context:
    """Many sequences of one model over one K/V cache.

    Args:
        model: a :class:`Model`; several contexts may share it.
        params: a :class:`ContextParams`; you may pass its fields by name instead: ``n_ctx=8192``.
        owns_model: close the model with the context.
        target: only for a head: the context whose hidden states it reads; it is closed after this one.
            ``model`` is then an EAGLE-3 head, or a model with MTP layers: the target's own model, or a
            file with only such layers. By default the context has the target's threads and, for each
            layer that drafts, the target's size and sequences.

    Attributes:
        model: the model that it computes.
        target: the context that it drafts for as a head; None for all other contexts.
        params: the parameters with all defaults resolved. n_ctx, n_batch, n_seq_max, n_outputs_max,
            n_threads, n_threads_batch, kv_type: the values in effect.
        n_ctx_seq: the most tokens of a sequence: n_ctx, or with ``kv_unified=False`` its part of it.
        n_vocab: size of the vocabulary.
        capabilities: what this context's memory can do.
        prefix_cache: the texts whose K/V is kept. Without ``prefix_cache=True`` it is None until the
            first call of ``complete`` or ``chat``.

    Raises:
        ConfigError: a bad option, or llama.cpp cannot create the context (the message has the reason).
        UnsupportedError: the model cannot generate, ``batch_invariant=True`` or ``kv_unified=False``
            is not possible, or the model is not a head for ``target``.
        BranchStateError: a head shares the memory of ``target``, which is not empty.

    Warns:
        ExactnessWarning: once, if texts under the rule "seeded" decode more tokens together than
            ``capabilities.exact_rows``, and logits were measured to differ then.
        ContextLengthWarning: a text may get longer than the model was trained for. It comes at once if
            ``n_ctx`` is larger than that and meant for one sequence (``n_seq_max`` is not set, or 1);
            otherwise when a sequence gets too long. There is no warning with rope settings or with
            recurrent memory.

    The raw calls of this class may use the sequences 0 to n_seq_max - 1 unless a branch holds them;
    branches take the highest free ids. One lock serialises all calls from many threads.
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
        instance("model", model, Model, "load a file with Model(path), or both with lb.load(path)")
        if target is not None:
            meant = "pass the context that generates, for example lb.load(), not its model or name"
            instance("target", target, Context, meant)
        given = ContextParams(**options) if params is None else replace(params, **options)
        # The decoder turns tokens into rows of logits; for branches, not for users. So is the K/V cache:
        # which sequence holds which cells, and what can be done with it.
        resolved, self.capabilities, self.decoder = open_native(model, given, target)
        self.kv_cache = self.decoder.memory
        handle, native = self.decoder.handle, resolved.native()
        self.model, self.target = model, target
        self.kv_type = resolved.kv_type
        self.n_ctx, self.n_ctx_seq = handle.n_ctx, handle.n_ctx_seq
        self.n_batch, self.n_outputs_max = handle.n_batch, handle.n_outputs_max
        self.n_vocab = model.n_vocab
        self._owns_model = owns_model
        # Every call on this context or its branches holds it, except for counts such as `n_seq_free`.
        self.lock = handle.lock
        self.n_seq_max = handle.n_seq_max
        self.n_threads: int = native["n_threads"]
        self.n_threads_batch: int = native["n_threads_batch"]
        self.params = resolved
        self.kv_cache.compact = lambda: self.compact()  # looked up at each call
        self.sequences = SequenceIds(self.kv_cache, self._check_raw)
        # For the packages above, while it is open; not for users.
        self.attached: dict[str, _Attached] = {}
        self.prefix_cache = None
        if resolved.prefix_cache:
            self.prefix_cache = self._open_prefix_cache(resolved.cache_ram)
        self._last_rows: list[LogitsRow] = []
        self._last_end = 0  # where their sequence continues after the last of them
        self._is_warned = False
        self.release_threads()

    def _open_prefix_cache(self, cache_ram: int) -> PrefixCache:
        return PrefixCache(self.decoder, self.sequences, cache_ram)

    # -- life --------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after ``close()`` of the context or its model."""
        return self.decoder.handle.closed

    def close(self) -> None:
        """Free the context; branches on it raise ClosedError from now on. Idempotent."""
        attached = list(self.attached.values())
        self.attached.clear()
        for each in attached:
            each.close()
        self.decoder.handle.close_children()  # heads; not under this lock, because they have their own
        with self.lock:
            self.decoder.close()
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

    def warn_if_inexact(self, n_rows: int) -> None:
        """Warn, once, if logits of ``n_rows`` tokens in one decode differ from those of each alone."""
        found = self.capabilities.total_variation
        if self._is_warned or not found or n_rows <= max(1, self.capabilities.exact_rows):
            return
        self._is_warned = True
        warn(
            "drafted or batched texts can differ from plain ones by rounding. "
            f"With {self.model.name} tokens that are decoded together change the next token's "
            f"distribution by a total variation of {found:.2g}, as measured here. If equal texts matter, "
            "use weights that are exact, such as Q8_0, or batch_invariant=True",
            ExactnessWarning,
        )

    # -- interruption ------------------------------------------------------------------------------

    def release_threads(self) -> None:
        """Let another thread of this program decode next at full speed.

        Each thread that decodes has helper threads, which wait for its next decode. If another thread
        decodes meanwhile, there are more helpers than cores, and all wait for each other. A small decode
        then takes ten times as long, until the first thread calls this method or ends. A new context and
        an ``AsyncEngine`` call it in the thread that creates them.
        """
        release_threads()

    def interrupt(self) -> None:
        """Stop the decode running in another thread; if none is running, the next one stops at once.

        The call that is decoding raises DecodeInterruptedError and leaves its sequences as they were.
        You may call it from any thread and from a signal handler; it does not wait. llama.cpp stops
        between two operations of its graph; with recurrent memory, or layers on a GPU, it stops between
        micro-batches (``n_ubatch`` tokens).
        """
        self.decoder.handle.stop()

    def resume(self) -> None:
        """Undo an ``interrupt`` that has not stopped a decode yet, so that the next one runs."""
        self.decoder.handle.resume()

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Interrupt what the ``with`` block decodes on this context after ``seconds``.

        The call that decodes then raises DecodeInterruptedError, as after ``interrupt``; its ``results``
        are the texts of ``complete`` and ``chat`` so far. Only one thread may enter the block; decodes of
        other threads on this context are interrupted too.

        Raises:
            ConfigError: ``seconds`` is not a positive number.
        """
        seconds = real("a time limit", seconds)
        if not seconds > 0:
            raise ConfigError(f"a time limit is a positive number of seconds, not {seconds!r}")
        with stopped_after(self.decoder.handle, seconds):
            yield

    # -- for the layers above, which hold the lock -------------------------------------------------

    @property
    def n_seq_free(self) -> int:
        """How many sequences are free now. Does not wait while another thread decodes."""
        return self.sequences.count_free()

    def compact(self) -> bool:
        """Move the cells of all branches into order, without holes; False if raw sequences hold cells.

        With non-unified KV there is nothing to do.
        """
        if self.kv_cache.forks_copy:
            return True
        return rewrite_in_order(self.decoder, self.sequences.holders(), self.prefix_cache)

    def fits(self, seq_id: int, n: int) -> int:
        """Return how many of ``n`` drafted tokens of a sequence can be verified in one decode."""
        n = min(n, self.n_outputs_max - 1)
        return self.kv_cache.fits(n, lambda: self.sequences.count_free(used=(seq_id,)))

    def keep_prefixes(self) -> None:
        """Open the prefix cache, unless ``prefix_cache`` was set or it would take sequences."""
        with self.lock:
            can = self.kv_cache.can_draft and not self.kv_cache.forks_copy
            if can and self.params.prefix_cache is None and self.n_seq_max <= MOST_WITH_PREFIXES:
                self.prefix_cache = self.prefix_cache or self._open_prefix_cache(0)

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
        with self.lock:
            self.decoder.check_open()
            self.sequences.collect()
            return self.kv_cache.usage()

    def audit(self) -> None:
        """Compare the accounting with llama.cpp's own positions.

        Raises:
            DecodeError: they differ, which is a bug in this library. The message names the sequence.
        """
        if self.target is not None and self.model.shares_memory:
            self.target.audit()  # the target's lock is taken before this context's
            return
        with self.lock:
            self.decoder.check_open()
            self.sequences.collect()
            self.kv_cache.audit()

    def _check_raw(self, *seq_ids: int) -> list[int]:
        self.decoder.check_open()
        if self.model.shares_memory:
            raise UnsupportedError(
                f"{self.model.name} has no memory of its own: it reads that of its target",
                hint="it can only draft: MTPDrafter(ctx)",
            )
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
            tokens: token ids, at least one.
            position: must be the end of the sequence: its number of tokens.
            seq_id: 0 to n_seq_max - 1, not held by a branch.
            logits: which rows to keep for ``logits()``: "last", "all" or "none".

        Raises:
            ConfigError: a bad argument.
            TokenizeError: a bad id.
            CacheFullError, DecodeError: the sequence is as it was before the call. If some of the tokens
                were decoded and this memory cannot drop them (``capabilities.can_truncate``), the
                sequence returns to its last checkpoint before the call, or is empty. The same holds after
                Ctrl-C.
        """
        with self.lock:
            (seq_id,) = self._check_raw(seq_id)
            choice("logits", logits, ("last", "all", "none"))
            tokens = token_list(tokens)
            if not tokens:
                raise ConfigError("nothing to decode: no tokens")
            self.model.check_tokens(tokens)
            end = self.kv_cache.next_position(seq_id)
            if plain_int(position) != end:
                raise ConfigError(
                    f"sequence {seq_id} ends at position {end}, so tokens cannot go to {shown(position)}",
                    hint=f"decode at position {end}, or remove positions with kv_cache_remove first",
                )
            self._keep_last_rows(decode_run(self.decoder, tokens, seq_id, logits))
            self._last_end = end + len(tokens)

    def _keep_last_rows(self, rows: list[LogitsRow]) -> None:
        for row in self._last_rows:
            row.users -= 1
        self._last_rows = rows
        for row in rows:
            row.users += 1

    def _row(self, row: int) -> LogitsRow:
        self.decoder.check_open()
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
            ConfigError: that decode did not keep this row.
        """
        with self.lock:
            return np.array(self._row(row).array)

    def sample(self, params: SamplingParams | None = None, row: int = -1) -> int:
        """Return a token drawn from a row of the last raw ``decode``, without appending it.

        The noise depends on ``params.seed`` and the position of the drawn token, so a second call gives
        the same token, and a :class:`Branch` of these tokens draws it too.
        Penalties, DRY and grammars need a state; use a branch for them.

        Raises:
            ConfigError: a temperature above 0 and no seed.
            UnsupportedError: settings that need the tokens so far.
        """
        with self.lock:
            params = settings_of(params)
            if params.uses_history or params.logits_processor is not None:
                raise UnsupportedError(
                    "penalties, DRY and a logits processor look at the tokens so far: use a Branch"
                )
            found, n_rows = self._row(row), len(self._last_rows)
            if params.seed is None and params.temperature > 0:
                raise ConfigError(
                    "sampling above temperature 0 needs a seed: two calls give the same token",
                    hint="SamplingParams(seed=1); a Branch picks one itself",
                )
            seed, position = params.seed or 0, self._last_end - (n_rows - 1 - int(row) % n_rows)
            sampler = Sampler(self.model, params)
            return sampler.distribution(found.array, position, seed).draw(seed, position)

    def model_entropy(self, base: str = "nats", logits: Logits | None = None) -> float:
        """Return the entropy of softmax(logits) in "nats" or "bits"; default: the last row."""
        with self.lock:
            return self._row_or(logits).entropy() / log_base(base)

    def model_surprisal(
        self, token: SupportsIndex, base: str = "nats", logits: Logits | None = None
    ) -> float:
        """Return -log p(token) under softmax(logits) in "nats" or "bits"; default: the last row."""
        with self.lock:
            token = self.model.token_id(token)
            return -self._row_or(logits).logprob(token) / log_base(base)

    def _row_or(self, logits: Logits | None) -> LogitsRow:
        if logits is None:
            return self._row(-1)
        array = number_array("logits", logits, np.float32)
        if array.shape != (self.n_vocab,):
            raise ConfigError(f"logits must have shape ({self.n_vocab},), not {array.shape}")
        return LogitsRow(array)

    def kv_seq_copy(self, src: int, dst: int) -> None:
        """Make sequence ``dst`` a copy of ``src``. In a unified cache they share cells; no K/V is copied.

        The previous content of ``dst`` is dropped.
        """
        with self.lock:
            src, dst = self._check_raw(src, dst)
            if src != dst:
                self.kv_cache.fork(src, dst)

    def kv_cache_remove(self, seq_id: int, start: int = 0, end: int = -1) -> None:
        """Drop the positions [start, end) of a sequence; end -1 = to the end.

        Raises:
            UnsupportedError: this memory cannot drop a part of a sequence; nothing has changed.
        """
        with self.lock:
            (seq_id,) = self._check_raw(seq_id)
            start, end = whole("start", start), whole("end", end)
            if start < 0 or end < -1 or (end != -1 and end < start):
                raise ConfigError(f"invalid range of positions: [{shown(start)}, {shown(end)})")
            stop = END if end == -1 else end
            length = self.kv_cache.next_position(seq_id)
            if start >= min(stop, length):
                return
            partial = start > 0 or stop < length
            # With a partial sliding window llama.cpp would remove them, and then compute from missing
            # cells.
            if (partial and not self.kv_cache.can_cut(seq_id, start)) or not self.kv_cache.drop(
                seq_id, start, END if stop >= length else stop
            ):
                raise UnsupportedError(
                    "this model's memory cannot drop a part of a sequence",
                    hint="remove the whole sequence and decode again, or fork first and drop the fork",
                )

    def kv_seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence that no branch holds."""
        with self.lock:
            (seq_id,) = self._check_raw(seq_id)
            for other in range(self.n_seq_max):
                if other != seq_id and other not in self.sequences:
                    self.kv_cache.drop(other, 0)

    def kv_cache_clear(self) -> None:
        """Empty the whole cache.

        Raises:
            BranchStateError: a branch still uses it.
        """
        with self.lock:
            self._check_raw()
            n_branches = self.sequences.n_held
            if n_branches:
                raise BranchStateError(
                    f"{n_branches} branches still use the cache",
                    hint="prune them first",
                )
            if self.prefix_cache is not None:
                self.prefix_cache.clear()
            self.kv_cache.clear()

    def kv_cache_size(self, seq_id: int) -> int:
        """Return how many tokens a sequence holds."""
        with self.lock:
            self.decoder.check_open()
            return self.kv_cache.cells.length(self._check_seq(seq_id))

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return ``model.tokenize(...)``."""
        return self.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: TokenIds, *, special: bool = False) -> str:
        """Return ``model.detokenize(...)``."""
        return self.model.detokenize(tokens, special=special)

    # -- texts in one call, by the engine, which is on a higher layer ------------------------------

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

        The context keeps an `Engine` for this, which uses all free sequences. With a seed, or at
        temperature 0, the text is that of ``Branch.generate``.

        Args:
            prompt: text, token ids, or messages; or a list of prompts.
            stream: return an iterator of `Event`: ``event.text`` of each token, and at the end of each
                text ``event.result``. ``event.id`` is the index of the prompt, as text.
            options: all of them by name:

                - ``drafter``: "auto" = drafts from MTP layers, from copies of the text so far and from
                  text that a grammar forces, if it measures that this is faster; None = plain decoding;
                  or a `Drafter`.
                - ``max_tokens``: the most tokens to generate (128); None = until the text or the cache
                  ends. ``stop``, ``stop_tokens``: strings and tokens that end the text.
                - ``n``: texts of each prompt (1), in ``result.choices``; the result is the first.
                - one of ``json_schema`` (a schema, or a type), ``regex``, ``choices`` (a list of texts)
                  and ``grammar`` (a `Grammar` or GBNF); ``result.parsed`` is the value.
                - ``top_logprobs``: alternatives of each token in ``result.logprobs`` (0);
                  ``prompt_logprobs``, ``parse_special``: as for `Request`.
                - ``thinking``: whether the model thinks before it answers: None = as its chat template
                  does, True, False, or the most tokens of the thought. A schema and stop strings apply
                  to the answer, not to the thought.
                - ``thinking_end``: last words of a thought that has used up its tokens.
                - ``share``: "thought" = the ``n`` texts of a prompt share one thought.
                - ``on_prompt_progress``: called with a `PromptProgress` while a prompt is read:
                  ``n_read`` of ``n_total`` tokens. ``prompt_progress``: events for that, in a stream
                  (False).
                - ``sampling``, or settings of `SamplingParams`: ``temperature=0.8, top_p=0.9, seed=1``.

        Returns:
            the result; for a list of prompts a list. ``result.seed`` gives the same text again, also if
            you passed no seed. If the cache is full, a text ends with the ``finish_reason`` "capacity".

        Raises:
            ConfigError, GrammarError, TokenizeError, CacheFullError: an argument is invalid, or a prompt
                is too long; nothing has happened.
            LlamaBranchError: no text has a token; for example `SequencesExhaustedError` because branches
                hold all sequences.
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

                - ``tools``: functions that the model may call, as OpenAI describes them, or Python
                  functions; ``result.tool_calls`` are its calls.
                - ``tool_choice``: "auto"; "none"; "required", or the description of a function with its
                  name, forces a call that follows its schema.
                - ``parallel_tool_calls``: False = at most one call.
                - ``chat_template_kwargs``: other variables of the template, such as
                  ``{"enable_thinking": False}``.

        Returns:
            as ``complete``.

        Raises:
            UnsupportedError: there is no chat template.
            LlamaBranchError: as for ``complete``.
        """
        from ..engine import completion

        return completion.run(self, completion.plan_chat(self, messages, **options), stream=stream)


def text_context(name: str, value: object) -> Context:
    """Return ``value`` if it is a context that can generate text.

    Raises:
        ConfigError: it is not a context; the message names the argument.
        UnsupportedError: it is the context of a head, which cannot generate by itself.
    """
    hint = 'lb.load("model.gguf") returns one, and so does Context(model)'
    context = instance(name, value, Context, hint)
    if context.target is not None:
        raise UnsupportedError(
            f"{context.model.name} is open as a head of {context.target.model.name}: it drafts for that "
            "context, and cannot generate text by itself",
            hint="EagleDrafter(head) or MTPDrafter(head) drafts with it; generate with the target",
        )
    return context
