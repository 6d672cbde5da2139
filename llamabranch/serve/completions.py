"""OpenAI's completions and chat completions, and llama-server's ``/completion``."""

from __future__ import annotations

import codecs
from asyncio import to_thread
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import date

from ..branch import Produced
from ..context import TokenScore
from ..engine.completion import tool_grammar
from ..errors import LlamaBranchError
from ..model import Turn
from ..model.thoughts import Thinking, ThinkingChoice, plan_thinking, thinking_variables
from ..model.tools import Conversation, Tools, begun_answer, conversation, openai_deltas
from ..request.openai import called, chat_choice, completion_choice
from ..request.turns import TurnPieces
from ..sampling import Grammar, SamplingParams
from .errors import HttpError, http_error
from .fields import Limit, Prompt, TextFields, Top, engine_requests, limit_of, prompt_tokens
from .generation import Update, Writer, answer, timings
from .http_call import HttpCall
from .service import Service

__all__ = [
    "ChatFields", "CompletionFields", "chat", "completion", "completions", "input_tokens",
    "sampling_of",
]  # fmt: skip

_DEFAULT_TOKENS = 16
_DATES = {
    "date_string": "%d %b %Y",
    "datetime": "%b %d %Y",
}  # llama.cpp passes them to templates


# -- completions -----------------------------------------------------------------------------------


class CompletionFields(TextFields, kw_only=True):
    """The body of a request; the last two fields are for ``/completion``."""

    prompt: Prompt | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Top | None = None
    n_probs: Top | None = None
    prompt_logprobs: Top | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None

    @property
    def n_scored(self) -> int | None:
        """How many of the most probable tokens to report; None = no log-probabilities."""
        return self.n_probs if self.logprobs is None else self.logprobs

    async def tokens(self, service: Service, *, add_special: bool = True) -> list[list[int]]:
        """Return the token ids of the prompts."""
        if self.prompt is None:
            raise HttpError(400, "prompt is missing", param="prompt")
        add = add_special and self.add_special_tokens is not False
        parse = self.parse_special is not False
        return await prompt_tokens(service, self.prompt, add_special=add, parse_special=parse)


async def completions(call: HttpCall, service: Service) -> None:
    """Answer a request of OpenAI's."""
    fields = await call.json(CompletionFields)
    if fields.best_of not in (None, fields.n or 1):
        raise HttpError(400, "best_of is not supported, only n", param="best_of")
    top, scored = fields.n_scored, fields.prompt_logprobs
    prompts, n_added = await fields.tokens(service), [0]
    if fields.echo:
        bare = await fields.tokens(service, add_special=False)
        n_added = [len(all_) - len(own) for all_, own in zip(prompts, bare, strict=True)]
    if fields.echo and top is not None:
        if fields.stream:
            raise HttpError(400, "echo with logprobs cannot be streamed", param="stream")
        scored = max(top, scored or 0)
    limit = limit_of(fields.max_tokens, fields.n_predict, _DEFAULT_TOKENS)
    requests = await engine_requests(service, fields, prompts, limit, top, prompt_logprobs=scored)
    await answer(call, _CompletionWriter(service, fields, n_added), requests)


class _Offsets:
    """The offsets of tokens in a growing text; a character of several tokens counts with the last.

    Args:
        start: the offset of the first token.
    """

    def __init__(self, start: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = start

    def of(self, pieces: Iterable[bytes]) -> list[int]:
        """Return the offsets of the next tokens, whose bytes are ``pieces``."""
        offsets = []
        for piece in pieces:
            offsets.append(self._end)
            self._end += len(self._decoder.decode(piece))
        return offsets


class _CompletionWriter(Writer[CompletionFields]):
    """Writes texts as OpenAI's choices.

    Args:
        service, fields: the model, and the request.
        n_added: how many tokens at the beginning of each prompt were added by the server; an echo leaves
            out the names of control tokens among them.
    """

    def __init__(self, service: Service, fields: CompletionFields, n_added: Sequence[int]) -> None:
        super().__init__(service, fields, "cmpl", "text_completion")
        self._n_added = n_added
        self._offsets: dict[int, _Offsets] = {}  # of each text

    def part(self, update: Update) -> dict[str, object]:
        """Return the new part of a text, or all of it, with the prompt if the client asked for it."""
        fields, index, prompt = self.fields, update.index, update.prompt
        piece, ids = self.service.model.piece, [token.token for token in update.tokens]
        echoed: list[bytes] = []
        if update.is_first and fields.echo:
            n = self._n_added[index // (fields.n or 1)]
            echoed = [*map(piece, prompt[:n]), *(self.words.entry(t)[0] for t in prompt[n:])]
        echo = b"".join(echoed).decode("utf-8", "replace")
        if update.is_first:
            self._offsets[index] = _Offsets(len(echo))
        choice = completion_choice(index, echo + update.text, update.end, None)
        scores = None if update.ended is None else update.ended.prompt_logprobs
        if fields.n_scored is not None:
            scored: list[tuple[int, Produced | TokenScore | None]]
            scored = [(token.token, token) for token in update.tokens]
            offsets = self._offsets[index].of(map(piece, ids))
            if fields.echo and scores is not None:
                scored = [*zip(prompt, scores, strict=True), *scored]
                offsets = [*_Offsets().of(echoed), *offsets]
            choice["logprobs"] = self.words.completion_logprobs(
                scored, offsets, fields.n_scored, as_ids=bool(fields.return_tokens_as_token_ids),
                more=bool(fields.token_details),
            )  # fmt: skip
        if fields.return_token_ids:
            choice |= {
                "token_ids": ids,
                **({"prompt_token_ids": prompt} if update.is_first else {}),
            }
        if fields.prompt_logprobs is not None and scores is not None:
            choice["prompt_logprobs"] = self.words.prompt_logprobs(scores)
        return choice


# -- llama-server's own ----------------------------------------------------------------------------


async def completion(call: HttpCall, service: Service) -> None:
    """Answer a request in llama-server's format: an object, or a list for several prompts."""
    fields = await call.json(CompletionFields)
    prompts = await fields.tokens(service)
    limit = limit_of(fields.n_predict, fields.max_tokens, service.settings.max_tokens)
    requests = await engine_requests(service, fields, prompts, limit, fields.n_probs or None)
    await answer(call, _NativeWriter(service, fields, -1 if limit is None else limit), requests)


class _NativeWriter(Writer[CompletionFields]):
    """Writes texts in llama-server's format; ``limit`` is their token limit."""

    def __init__(self, service: Service, fields: CompletionFields, limit: int) -> None:
        super().__init__(service, fields, "cmpl", "text_completion")
        self._limit = limit

    def body(self, texts: Sequence[Update]) -> object:
        """Return one text, or all of several."""
        bodies, paths = [self._end(text) for text in texts], self.fields.response_fields
        if paths:
            bodies = [_chosen(body, paths) for body in bodies]
        return bodies[0] if len(bodies) == 1 else bodies

    def reading(self, update: Update) -> dict[str, object]:
        """Return an event without text."""
        return self.part(update)

    def events(self, update: Update) -> list[dict[str, object]]:
        """Return the events for new text: with ``n_probs`` one per token, and one for the end."""
        events, rest = [], update.text
        for token in update.tokens[:-1] if self.fields.n_probs else ():
            n = len(token.text)
            events.append(self.part(replace(update, text=rest[:n], tokens=[token])))
            rest = rest[n:]
        if update.tokens:
            events.append(
                self.part(replace(update, text=rest, tokens=update.tokens[len(events) :]))
            )
        if update.ended is not None:
            text = "" if update.tokens else update.text
            events.append(self._end(replace(update, text=text, tokens=[])))
        return events

    def last_events(self, texts: Sequence[Update]) -> list[dict[str, object]]:
        """Return nothing more."""
        return []

    def part(self, update: Update) -> dict[str, object]:
        """Return the new part of a text."""
        part: dict[str, object] = {
            "index": update.index,
            "content": update.text,
            "tokens": [token.token for token in update.tokens],
            "stop": False,
            "id_slot": -1,
        }
        if self.fields.n_probs:
            part["completion_probabilities"] = self.words.chat_logprobs(update.tokens)
        return part

    def _end(self, update: Update) -> dict[str, object]:
        result, params = update.result, update.request.sampling
        word = result.stop_reason if isinstance(result.stop_reason, str) else ""
        ended = "limit" if update.end["finish_reason"] == "length" else "word" if word else "eos"
        settings = sampling_of(params or self.service.settings.sampling)
        own = {"seed": result.seed, "n_predict": self._limit, "max_tokens": self._limit}
        return {
            **self.part(update),
            **({} if self.fields.return_tokens else {"tokens": []}),
            "stop": True,
            "model": self.service.names[0],
            "tokens_predicted": len(result.tokens),
            "tokens_evaluated": result.num_prompt_tokens,
            "tokens_cached": result.num_cached_tokens,
            "generation_settings": {**settings, **own, "stop": self.fields.stops},
            "prompt": self.words.joined(update.prompt),
            "has_new_line": "\n" in result.text,
            "truncated": False,
            "stop_type": ended,
            "stopping_word": word,
            "timings": timings(result),
        }


def _chosen(body: dict[str, object], paths: Iterable[str]) -> dict[str, object]:
    """Return the fields of ``paths`` that the body has; ``a/b`` is a field ``b`` inside ``a``."""
    chosen: dict[str, object] = {}
    for path in paths:
        *above, last = path.split("/")
        inner: object = body
        for name in above:
            inner = inner.get(name) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and last in inner:
            chosen[path] = inner[last]
    return chosen


def sampling_of(params: SamplingParams) -> dict[str, object]:
    """Return sampling settings by llama-server's names."""
    settings = asdict(params)
    settings["repeat_last_n"] = settings.pop("penalty_last_n")
    bias = params.logit_bias.items()
    settings["logit_bias"] = [{"id": token, "bias": max(added, -1e9)} for token, added in bias]
    return settings


# -- conversations ---------------------------------------------------------------------------------


class ChatFields(TextFields, kw_only=True):
    """The body of a request."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    show_schema: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Limit | None = None
    thinking_budget_tokens: Limit | None = None
    reasoning_budget: Limit | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    modalities: list[str] | None = None

    @property
    def thinking(self) -> ThinkingChoice:
        """Whether to think: None = as the template does, False = no, a number = the most tokens."""
        budgets = self.thinking_token_budget, self.thinking_budget_tokens, self.reasoning_budget
        variables = self.chat_template_kwargs or {}
        if self.reasoning_effort == "none" or variables.get("enable_thinking") is False:
            return False
        return limit_of(*budgets)

    def prompt(
        self, service: Service, tools: Tools, grammar: Grammar | None
    ) -> tuple[list[int], Thinking | None]:
        """Return the tokens of the prompt, and how the answer to it begins.

        A last message of the assistant is continued. A template that asks for the date gets today's,
        unless the request sets one.
        """
        model, choice = service.model, self.thinking
        talk = self.conversation(service, tools, grammar)
        if model.turn_format.thought_end is None:  # like llama-server and vLLM
            choice = None
        tokens = talk.tokens(model)
        if self.add_generation_prompt is False and not talk.begun:
            return tokens, None
        return plan_thinking(model, tokens, choice, begun=talk.begun, has_calls=tools.is_used)

    def conversation(self, service: Service, tools: Tools, grammar: Grammar | None) -> Conversation:
        """Return the input of the template; it has the JSON schema unless ``show_schema`` is false."""
        is_shown = grammar is not None and grammar.kind == "json_schema"
        model, today = service.model, date.today()
        template = model.chat_template or ""
        variables: dict[str, object] = {
            name: today.strftime(form) for name, form in _DATES.items() if name in template
        }
        variables |= thinking_variables(model.turn_format, self.thinking)
        if self.reasoning_effort and "reasoning_effort" in template:
            variables["reasoning_effort"] = self.reasoning_effort
        return conversation(
            model, self.messages, tools, {**variables, **(self.chat_template_kwargs or {})},
            continues=self.continue_final_message, generates=self.add_generation_prompt,
            schema=grammar.source if grammar and is_shown and self.show_schema is not False else "",
        )  # fmt: skip

    def known_tools(self, service: Service) -> Tools:
        """Return the functions that may be called."""
        form, parallel = service.model.turn_format, self.parallel_tool_calls
        return Tools(self.tools or (), self.tool_choice, form, parallel=parallel)


async def chat(call: HttpCall, service: Service) -> None:
    """Answer a request."""
    fields = await call.json(ChatFields)
    if fields.top_logprobs and not fields.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs", param="top_logprobs")
    if fields.modalities not in (None, [], ["text"]):
        raise HttpError(400, "modalities other than text are not supported", param="modalities")
    tools = await to_thread(fields.known_tools, service)
    grammar, text_grammar = None, await fields.text_grammar()
    tokens, thinking = await to_thread(fields.prompt, service, tools, text_grammar)
    if tools.is_used:
        if text_grammar is not None and tools.forced:
            message = "a forced tool call has its own grammar, so no other grammar is possible"
            raise HttpError(400, message, param="tool_choice")
        try:
            grammar = await to_thread(tool_grammar, service.model, tools, text_grammar)
        except LlamaBranchError as error:
            raise http_error(error, param="tools") from None
    limits = fields.max_completion_tokens, fields.max_tokens, fields.n_predict
    requests = await engine_requests(
        service, fields, [tokens], limit_of(*limits, service.settings.max_tokens),
        (fields.top_logprobs or 0) if fields.logprobs else None,
        grammar=grammar, thinking=thinking,
    )  # fmt: skip
    await answer(call, _ChatWriter(service, fields, tools, is_strict=grammar is not None), requests)


async def input_tokens(call: HttpCall, service: Service) -> None:
    """Count the tokens of a conversation, and write it as a prompt (``/apply-template``)."""
    fields = await call.json(ChatFields)
    tools, grammar = await to_thread(fields.known_tools, service), await fields.text_grammar()

    def written() -> tuple[list[int], str]:
        dialogue = fields.conversation(service, tools, grammar)
        return dialogue.tokens(service.model), dialogue.text(service.model)

    tokens, text = await to_thread(written)
    await call.reply({"input_tokens": len(tokens), "prompt": text, "tokens": tokens})


class _ChatWriter(Writer[ChatFields]):
    """Writes texts as OpenAI's messages.

    Args:
        service, fields, tools: the model, the request, its functions.
        is_strict: a call that has begun is always valid, so its arguments are sent as they are generated.
    """

    def __init__(
        self, service: Service, fields: ChatFields, tools: Tools, *, is_strict: bool
    ) -> None:
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        super().__init__(service, fields, "chatcmpl", kind)
        self._tools, self._is_strict = tools, is_strict
        self._pieces: dict[int, TurnPieces] = {}

    def body(self, texts: Sequence[Update]) -> object:
        """Return all messages."""
        if self.fields.verbose:
            self.head["__verbose"] = {"prompt": self.words.joined(texts[0].prompt)}
        return super().body(texts)

    def part(self, update: Update) -> dict[str, object]:
        """Return a complete message."""
        choice = chat_choice(update.index, self._turn(update), update.end, self._scored(update))
        return choice | self._ids(update, prompt_token_ids=update.prompt)

    def _turn(self, update: Update) -> Turn:
        """Return a complete turn."""
        result = update.result
        result.prompt, result.tools = self.fields.messages, self._tools
        result.note_written(self.service.model)
        return result.turn

    def reading(self, update: Update) -> dict[str, object]:
        """Return an event with only the role."""
        return {**self.head, "choices": [_begin(update)]}

    def parts(self, update: Update) -> list[dict[str, object]]:
        """Return deltas: the role first, then content or calls, then the finish reason."""
        pieces = self._pieces.get(update.index)
        if pieces is None:
            # An answer that is continued may begin with half a call.
            begun = begun_answer(self.fields.messages) if self._tools.is_used else ""
            salt = str(len(self.fields.messages))
            pieces = TurnPieces(self._tools, salt, begun, eager=self._is_strict)
            self._pieces[update.index] = pieces
        events, calls = pieces.feed(update.thought, update.written), False
        if update.ended is not None:
            turn = self._turn(update)
            calls = bool(turn.calls)
            events += pieces.finish(turn, is_cut=update.ended.is_cut)
        scored = self._scored(update) if update.tokens else None
        deltas = openai_deltas(events)
        if scored is not None and not deltas:
            deltas.append({"content": ""})
        common: dict[str, object] = {"index": update.index, "logprobs": None}
        chunks = [{**common, "delta": delta, "finish_reason": None} for delta in deltas]
        if chunks:
            chunks[0] |= self._ids(update)
            chunks[0]["logprobs"] = None if scored is None else {"content": scored}
        if update.is_first:
            chunks.insert(0, _begin(update))
        if update.ended is not None:
            end = called(update.end) if calls else update.end
            chunks.append({**common, "delta": {}, **end})
        return chunks

    def _ids(self, update: Update, **more: object) -> dict[str, object]:
        ids = [token.token for token in (*update.thoughts, *update.tokens)]
        return {"token_ids": ids, **more} if self.fields.return_token_ids else {}

    def _scored(self, update: Update) -> list[dict[str, object]] | None:
        if not self.fields.logprobs:
            return None
        return self.words.chat_logprobs(update.tokens, more=bool(self.fields.token_details))


def _begin(update: Update) -> dict[str, object]:
    """Return the delta that begins a message."""
    first = {"role": "assistant", "content": None}
    return {"index": update.index, "logprobs": None, "delta": first, "finish_reason": None}
