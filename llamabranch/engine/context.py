"""The context that users open. It adds `complete` and `chat`, which generate texts in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, overload

from typing_extensions import TypeVar, Unpack

from ..context import Context as CacheContext
from ..model import Prompt
from ..run.records import records_of

if TYPE_CHECKING:
    from ..request.record import Record
    from ..request.request import AnyRequest
    from ..request.result import Result
    from ..run.job import Job
    from ..speculative import Drafter
    from .completion import (
        ChatCallOptions,
        Conversations,
        Events,
        Messages,
        Prompts,
        TextCallOptions,
    )

T = TypeVar("T", default=object)


class Context(CacheContext):
    """Many sequences of one model over one K/V cache.

    Args:
        model: a :class:`Model`; several contexts may share it.
        params: a :class:`ContextParams`; you may pass its fields by name instead: ``n_ctx=8192``.
        owns_model: close the model with the context.
        target: only for a head, which drafts from the hidden states of another context: that other
            context. Closing it closes this one first. ``model`` is then an EAGLE-3 head, or a model
            with MTP layers: the target's own model, or a file with only such layers. By
            default the context has the target's threads and, for each layer that drafts, the
            target's size and sequences.

    Attributes:
        model: the model that it computes.
        target: the context that it drafts for as a head; None for all other contexts.
        params: the parameters with all defaults resolved. n_ctx, n_batch, n_seq_max, n_outputs_max,
            n_threads, n_threads_batch, kv_type: the values in effect.
        n_ctx_seq: how many tokens a sequence can hold: n_ctx, or one sequence's part of n_ctx
            with ``kv_unified=False``.
        n_vocab: size of the vocabulary.
        capabilities: what this context's memory can do.
        prefix_cache: the cache of texts whose K/V is kept. Without ``prefix_cache=True`` this
            attribute is None until the first call of ``complete`` or ``chat``.

    Raises:
        ConfigError: a bad option, or llama.cpp cannot create the context (the message has the reason).
        UnsupportedError: the model cannot generate, ``exact=True`` or ``kv_unified=False``
            is not possible, or the model is not a head for ``target``.
        BranchStateError: a head shares the memory of ``target``, which is not empty.

    Warns:
        ContextLengthWarning: a text gets longer than the model was trained for; once in a context,
            and not with rope settings or recurrent memory. All texts share ``n_ctx``, so a large one
            is no reason for it.

    ``complete`` and ``chat`` generate texts in one call; branches and engines use a context too.
    Low-level calls such as ``decode`` may use each of the sequences 0 to n_seq_max - 1 that no
    branch holds; branches take the highest free ids. Many threads may use the context: one lock
    lets only one call run at a time.
    """

    @overload
    def complete(
        self,
        prompt: Prompts,
        *,
        stream: Literal[False] = False,
        **options: Unpack[TextCallOptions[T]],
    ) -> list[Result[T]]: ...
    @overload
    def complete(
        self,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        **options: Unpack[TextCallOptions[T]],
    ) -> Result[T]: ...
    @overload
    def complete(
        self, prompt: Prompt | Prompts, *, stream: Literal[True], **options: Unpack[TextCallOptions]
    ) -> Events: ...
    @overload
    def complete(
        self, prompt: Prompt | Prompts, *, stream: bool, **options: Unpack[TextCallOptions]
    ) -> Result | list[Result] | Events: ...
    def complete(
        self, prompt: Prompt | Prompts, *, stream: bool = False, **options: Unpack[TextCallOptions]
    ) -> Result | Sequence[Result] | Events:
        """Continue a prompt, or each of a list: ``ctx.complete("Once upon a time").text``.

        The texts share decodes, as in an `Engine`, and use all free sequences. With a seed, or at
        temperature 0, ``Branch.generate`` gives the same text.

        Args:
            prompt: text, token ids, or messages; or a list of prompts.
            stream: return an iterator of `Event`: ``event.text`` of each token, and at the end of each
                text ``event.result``. ``event.id`` is the index of the prompt, as text.
            options: keyword arguments:

                - ``drafter``: "auto" = drafts from MTP layers, from copies of the text so far and from
                  text that a grammar forces, if measurements show that this is faster; None = plain
                  decoding; or a `Drafter`.
                - ``max_tokens``: the token limit (128); None = until the text or the cache
                  ends. ``stop``, ``stop_tokens``: strings and tokens that end the text;
                  ``min_tokens``, ``priority``: as for `Request`.
                - ``n``: how many texts to generate for each prompt (1). The result is the first
                  text; ``result.choices`` has all of them.
                - one of ``json_schema`` (a schema, or a type), ``regex``, ``choices`` (a list of texts)
                  and ``grammar`` (a `Grammar` or GBNF); ``result.parsed`` is the value.
                - ``top_logprobs``: how many alternatives each token has in ``result.logprobs`` (0);
                  ``prompt_logprobs``, ``parse_special``: as for `Request`.
                - ``thinking``: whether the model thinks before it answers: None = as its chat
                  template does; True; False; or a number, the token limit of the thought. A schema
                  and stop strings apply to the answer, not to the thought.
                - ``thinking_end``: text that is added to end a thought that has used up its tokens.
                - ``share``: "thought" = the ``n`` texts of a prompt share one thought.
                - ``on_prompt_progress``: called with a `PromptProgress` while a prompt is read:
                  ``n_read`` of ``n_total`` tokens. ``prompt_progress``: True = a stream also has
                  events with this progress (False).
                - ``sampling``, or settings of `SamplingParams`: ``temperature=0.8, top_p=0.9, seed=1``.

        Returns:
            the result, or for a list of prompts a list of results. Pass ``seed=result.seed`` to get
            the same text again, in an exact context; this also works if you passed no seed at first.
            If the cache is full, a text ends with the ``finish_reason`` "capacity".

        Raises:
            ConfigError, GrammarError, TokenizeError, CacheFullError: an argument is invalid, or a prompt
                is too long; nothing has happened.
            LlamaBranchError: no text has a token; for example `SequencesExhaustedError` because branches
                hold all sequences.
        """
        return self._run(prompt, options, chats=False, stream=stream)

    @overload
    def chat(
        self,
        messages: Conversations,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatCallOptions[T]],
    ) -> list[Result[T]]: ...
    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatCallOptions[T]],
    ) -> Result[T]: ...
    @overload
    def chat(
        self,
        messages: Messages | Conversations,
        *,
        stream: Literal[True],
        **options: Unpack[ChatCallOptions],
    ) -> Events: ...
    @overload
    def chat(
        self,
        messages: Messages | Conversations,
        *,
        stream: bool,
        **options: Unpack[ChatCallOptions],
    ) -> Result | list[Result] | Events: ...
    def chat(
        self,
        messages: Messages | Conversations,
        *,
        stream: bool = False,
        **options: Unpack[ChatCallOptions],
    ) -> Result | Sequence[Result] | Events:
        """Answer a conversation, or each of a list, in the format of the model's chat template.

        Args:
            messages: mappings with ``role`` and ``content``, or pairs (role, content). If the last
                message is the assistant's, it is continued.
            stream: as for ``complete``.
            options: the options of ``complete``, and

                - ``tools``: functions that the model may call, as OpenAI describes them, or Python
                  functions; ``result.tool_calls`` are its calls.
                - ``tool_choice``: "auto" = the model decides; "none" = no calls; "required", or
                  OpenAI's object with the name of a function = the answer is a call, and follows
                  the schema of the function.
                - ``parallel_tool_calls``: False = at most one call.
                - ``show_schema``: whether the prompt describes a JSON schema, at the end of the
                  user's last message (True). ``result.prompt`` stays as it is.
                - ``chat_template_kwargs``: other variables of the template, such as
                  ``{"enable_thinking": False}``.

        Returns:
            as ``complete``.

        Raises:
            UnsupportedError: there is no chat template.
            LlamaBranchError: as for ``complete``.
        """
        return self._run(messages, options, chats=True, stream=stream)

    def _run(
        self, prompt: object, options: Mapping[str, object], *, chats: bool, stream: bool
    ) -> Result | list[Result] | Events:
        from .completion import Call, run  # imported late: this module imports the engine

        call = Call(self, prompt, None, options, chats=chats)
        return run(self, call, self._drafters, stream=stream)

    def submit(self, request: AnyRequest) -> Job:
        """Ask for the texts of a request; iterate over the job for its events, or read ``results``.

        The texts of all jobs, calls and engines of the context share decodes, so every step continues
        them, no matter which caller runs it. The drafter and the limit are the same as for ``complete``.

        Raises:
            ConfigError, UnsupportedError, GrammarError, TokenizeError: the request is invalid.
        """
        from .completion import submit

        return submit(self, request, self._drafters)

    @property
    def requests(self) -> list[Record]:
        """The cost of each of the last 500 requests, oldest first, and why tokens were read."""
        return records_of(self).all()

    @cached_property
    def _drafters(self) -> dict[bool, Drafter]:
        return {}  # the "auto" drafters, which remember what paid off
