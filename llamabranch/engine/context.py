"""The context that users have: it generates texts in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, overload

from typing_extensions import TypeVar, Unpack

from ..context import Context as CacheContext
from ..model import Prompt

if TYPE_CHECKING:
    from ..speculative import Drafter
    from .completion import (
        ChatOptions,
        Completion,
        Conversations,
        Events,
        Messages,
        Prompts,
        TextOptions,
    )
    from .request import Result

__all__ = ["Context"]

T = TypeVar("T", default=object)


class Context(CacheContext):
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

    ``complete`` and ``chat`` generate texts in one call; branches and engines use a context too. The raw
    calls may use the sequences 0 to n_seq_max - 1 unless a branch holds them; branches take the highest
    free ids. One lock serialises all calls from many threads.
    """

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

        The texts share decodes, as in an `Engine`, and use all free sequences. With a seed, or at
        temperature 0, the text equals that of ``Branch.generate``.

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
        from .completion import plan_texts  # not before it is needed: it imports the engine

        return self._run(plan_texts(self, prompt, **options), stream=stream)

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
        from .completion import plan_chat

        return self._run(plan_chat(self, messages, **options), stream=stream)

    def _run(self, plan: Completion, *, stream: bool) -> Result | list[Result] | Events:
        from .completion import run

        return run(self, plan, self._drafters, stream=stream)

    @cached_property
    def _drafters(self) -> dict[bool, Drafter]:
        return {}  # "auto", with what they learn
