"""A request: everything that can be asked of a model, and what it means for one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Generic, NamedTuple, cast

import msgspec
import numpy as np
from msgspec.structs import force_setattr
from typing_extensions import Self, TypeVar, Unpack

from ..arguments import bounded, flag, function, instance, items, shown, whole
from ..context.progress import OnPromptProgress
from ..errors import ConfigError, UnsupportedError
from ..generation.verify import RoundTrace
from ..model import Message, Model, chat_messages, is_chat, token_list
from ..model.thoughts import (
    Thinking,
    ThinkingChoice,
    plan_thinking,
    thinking_budget,
    thinking_variables,
)
from ..model.tools import Tool, Tools, conversation
from ..sampling import SamplingParams, SamplingSettings
from ..sampling.constraint import ConstraintCalls, ConstraintLike
from ..sampling.grammar import Grammar, turn_grammar
from ..sampling.params import check_names, settings_of
from .fields import DEFAULT_TTL_S, line_of

T = TypeVar("T", default=object)  # the type of parsed values

_MOST_TEXTS = 100_000  # texts of one request; each takes a few kilobytes as soon as it is queued
_LONGEST_NAME = 200  # characters of a session's name
_GRAMMARS = ("grammar", "json_schema", "regex", "choices")  # a text follows at most one of them
_COUNTS = {  # and whether they may be None
    "max_tokens": True, "top_logprobs": True, "prompt_logprobs": True,
    "logprobs_from": False, "continues": False, "min_tokens": False,
}  # fmt: skip


class TextOptions(SamplingSettings, Generic[T], total=False):
    """The options of ``complete``: fields of `Request`, and sampling settings."""

    max_tokens: int | None
    stop: str | Sequence[str]
    stop_tokens: Sequence[int]
    min_tokens: int
    n: int
    priority: int
    sampling: SamplingParams | None
    grammar: Grammar | str | None
    constraint: ConstraintLike | None
    json_schema: type[T] | str | Mapping[str, object] | None
    regex: str | None
    choices: Sequence[str] | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    parse_special: bool
    on_prompt_progress: OnPromptProgress | None
    prompt_progress: bool
    thinking: ThinkingChoice
    thinking_end: str
    share: str | None
    session_id: str | None
    parent_session_id: str | None
    ttl: float


class ChatOptions(TextOptions[T], Generic[T], total=False):
    """The options of ``chat``: `TextOptions`, tools, and the variables of the chat template."""

    tools: Sequence[Tool] | None
    tool_choice: str | Mapping[str, object] | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, object] | None
    show_schema: bool


class Plan(NamedTuple):
    """What a request means for a model.

    Attributes:
        tokens: the token ids of its prompt.
        thinking: how its texts think before they answer; None = they do not.
        grammar: the grammar of its texts: the request's, or one that also allows calls.
        tools: for messages: the functions that the texts may call.
    """

    tokens: list[int]
    thinking: Thinking | None
    grammar: Grammar | None
    tools: Tools | None = None


class Request(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """Everything that can be asked of a model: one prompt to continue, and how.

    Calls of ``complete`` and ``chat``, lines of a file, rows of a table, HTTP requests, the page and
    the command line all become requests.

    Args:
        prompt: text, token ids, or messages for the model's chat template; an empty text is the model's
            BOS token.
        id: a unique name; None = its index in the list of requests, as text.
        max_tokens: the maximum number of tokens to generate; None = the engine's limit.
        sampling: settings; None = the engine's. Without a seed the request gets one derived from the
            engine's seed and its id, so that its text does not depend on the order of the requests or on
            the rest of the batch.
        stop: a string, or several, that end the text. They are compared with the generated text,
            where control tokens do not appear. You need no stop string for a token that ends a
            turn: it ends the text by itself. The ``text`` of the result ends before the stop
            string; the ``tokens`` of the result include the stop string.
        grammar: the grammar that the text must follow, or GBNF.
        n: how many texts to generate after processing the prompt once. The first text has the
            request's seed. The seeds of the others are derived from that seed.
        priority: a request with a smaller number is admitted earlier, and preempted later.
        top_logprobs: None = no log-probabilities in the result; k = the result's ``logprobs`` has
            every token with its log-probability, its source and the k most probable tokens.
        prompt_logprobs: None = no scores of the prompt; k = the result's ``prompt_logprobs`` scores
            every token of the prompt, with the k most probable tokens. With ``max_tokens=0`` the
            request only scores its prompt. Such a prompt is always processed completely, without
            the prefix cache.
        parse_special: whether control tokens written in a text prompt, such as ``<|im_start|>``, are
            parsed; False for untrusted text. Control tokens in messages are never parsed.
        logprobs_from: tokens of the prompt before this index are not scored, and may come from the prefix
            cache; ``prompt_logprobs`` has None for them.
        continues: how many tokens at the end of the prompt were generated before. The grammar must
            accept these tokens. If they end in the middle of a character, the text completes it.
            With the same ``seed`` the text continues as if it had not been interrupted. Only for a
            prompt of token ids.
        stop_tokens: ids of tokens that end the text, besides the model's EOG tokens. Unlike EOG tokens
            they are part of ``tokens`` and of the text.
        min_tokens: the smallest number of tokens in the text. Before that, EOG tokens and
            ``stop_tokens`` are not drawn, and stop strings are ignored. You cannot combine it with
            ``continues``, nor with a grammar or a constraint, which decide themselves where a text
            may end.
        on_round: called after each round with a draft, with a `RoundTrace`: the drafted, accepted and
            rejected tokens. The thread that runs the step calls it.
        constraint: a function that decides which texts are allowed, as for ``Branch.generate``. You
            can combine it with a grammar.
        on_prompt_progress: called with a `PromptProgress`, before the prompt is processed and after each
            decode that processed a part of it, by the thread that runs the step. An exception in it
            ends the step.
        prompt_progress: whether this progress is also reported as events, see ``Event.progress``.
        thinking: whether the model thinks before it answers: None = as its chat template does; True;
            False; or a number, the token limit of the thought. A grammar, a constraint, stop strings and
            stop tokens apply to the answer, not to the thought. For a prompt that is text or token ids,
            None = no thought.
        thinking_end: text that is added to end a thought that has used up its tokens.
        share: "thought" = the ``n`` texts share one thought.
        json_schema, regex, choices: other ways to give a grammar: a JSON schema (or a type), a regular
            expression, a list of texts. Use at most one of the four.
        tools: for messages: functions that the model may call, as OpenAI describes them, or Python
            functions; the ``tool_calls`` of the result are its calls.
        tool_choice, parallel_tool_calls: OpenAI's, for ``tools``.
        chat_template_kwargs: for messages: other variables of the template.
        show_schema: for messages: whether the prompt describes the JSON schema of the answer, at the end
            of the user's last message.
        continue_final_message: for messages: whether the answer continues a last message of the
            assistant; None = yes, if an answer begins (for ``chat``).
        add_generation_prompt: for messages: whether an answer begins after them; None = yes.
        session_id: the session that the request belongs to, such as one conversation of an agent. The
            K/V of the longest text of a session is kept longer than the K/V of other texts.
        parent_session_id: the session from which this one was started; for a sub-agent, the session of
            the agent that called it. Requests of this session never evict the text of the parent while
            they run.
        ttl: seconds after its last request until a session counts as ended: its K/V is then evicted
            first. 0 = as soon as it has no running request.

    Raises:
        ConfigError: a value is out of range. GrammarError: the grammar is invalid.
    """

    prompt: str | Sequence[int] | Sequence[Message]
    id: str | None = None
    max_tokens: int | None = None
    sampling: SamplingParams | None = None
    stop: str | Sequence[str] = ()
    grammar: Grammar | str | None = None
    n: int = 1
    priority: int = 0
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    parse_special: bool = True
    logprobs_from: int = 0
    continues: int = 0
    stop_tokens: Sequence[int] = ()
    min_tokens: int = 0
    on_round: Callable[[RoundTrace], None] | None = None
    constraint: ConstraintLike | None = None
    on_prompt_progress: OnPromptProgress | None = None
    prompt_progress: bool = False
    thinking: ThinkingChoice | Thinking = None
    thinking_end: str = ""
    share: str | None = None
    json_schema: type | str | Mapping[str, object] | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    tools: Sequence[Tool] | None = None
    tool_choice: str | Mapping[str, object] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Mapping[str, object] | None = None
    show_schema: bool = False
    continue_final_message: bool | None = False
    add_generation_prompt: bool | None = None
    session_id: str | None = None
    parent_session_id: str | None = None
    ttl: float = DEFAULT_TTL_S

    def __post_init__(self) -> None:
        self._set(prompt=_checked_prompt(self.prompt))
        stop = [self.stop] if isinstance(self.stop, str) else items("stop", self.stop)
        self._set(stop=tuple(instance("a stop string", s, str) for s in stop))
        self._set(stop_tokens=tuple(token_list(self.stop_tokens)))
        self._set(n=whole("n", self.n, 1, _MOST_TEXTS), priority=whole("priority", self.priority))
        for name, may_be_none in _COUNTS.items():
            if (value := getattr(self, name)) is not None or not may_be_none:
                force_setattr(self, name, whole(name, value, 0))
        settings_of(self.sampling)
        if self.id is not None:
            instance("id", self.id, str)
        for name in ("on_round", "on_prompt_progress"):
            if (called := getattr(self, name)) is not None:
                function(name, called)
        for name in ("parse_special", "prompt_progress", "show_schema"):
            value = getattr(self, name)
            flag(name, bool(value) if isinstance(value, np.bool_) else value)
        if self.parallel_tool_calls is not None:
            flag("parallel_tool_calls", self.parallel_tool_calls)
        if self.constraint is not None:
            ConstraintCalls(self.constraint)
        self._set_grammar()
        for name in ("session_id", "parent_session_id"):
            if (value := getattr(self, name)) is not None:
                session_name(name, value)
        self._set(ttl=bounded("ttl", self.ttl, 0, 1e9))
        if self.share not in (None, "thought"):
            raise ConfigError(
                f"share must be 'thought' or None, not {shown(self.share)}",
                hint="share='thought': all texts of a prompt share one thought",
            )
        if not isinstance(self.thinking, Thinking):
            thinking_budget(self.thinking)
        if self.thinking is not None and self.continues:
            raise ConfigError("thinking cannot be combined with continues")
        is_ids = not isinstance(self.prompt, str) and not is_chat(self.prompt)
        if self.continues and not (is_ids and self.continues < len(self.prompt)):
            raise ConfigError(
                f"continues={self.continues} needs a prompt of more token ids than that",
                hint="pass the prompt and the generated tokens as one list of token ids",
            )
        is_free = self.grammar is None and self.constraint is None
        if self.min_tokens and (self.continues or not is_free):
            raise ConfigError(
                "min_tokens cannot be combined with a grammar, a constraint or continues",
                hint="make the grammar require a longer text (minLength, minItems)",
            )

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            force_setattr(self, name, value)

    def _set_grammar(self) -> None:
        """Set ``grammar`` from the one field that describes it."""
        if sum(getattr(self, name) is not None for name in _GRAMMARS) > 1:
            raise ConfigError(f"use only one of {', '.join(_GRAMMARS)}")
        grammar = self.grammar
        if self.json_schema is not None:
            if self.stop or self.stop_tokens:
                raise ConfigError(
                    "stop cannot be combined with json_schema: a text cut there is not a complete value",
                    hint="leave stop and stop_tokens out; the text ends with the value",
                )
            grammar = Grammar.from_json_schema(self.json_schema)
        elif self.regex is not None:
            grammar = Grammar.from_regex(self.regex)
        elif self.choices is not None:
            grammar = Grammar.from_choices(self.choices)
        elif isinstance(grammar, str):
            grammar = Grammar(grammar)
        elif grammar is not None and not isinstance(grammar, Grammar):
            raise ConfigError(f"grammar must be a Grammar or GBNF, not {grammar!r:.40}")
        self._set(grammar=grammar, json_schema=None, regex=None, choices=None)

    # -- how requests are made -----------------------------------------------------------------------

    @classmethod
    def of(
        cls, prompt: object, base: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Self:
        """Return the request for options of ``complete`` and ``chat``.

        Args:
            prompt: as for `Request`.
            base: the settings if there is no option ``sampling``.
            options: fields of `Request`, and sampling settings.

        Raises:
            ConfigError, GrammarError: an option is unknown or invalid.
        """
        fields = {name: value for name, value in options.items() if name in cls.__struct_fields__}
        settings = {name: value for name, value in options.items() if name not in fields}
        check_names(settings, ChatOptions.__annotations__)
        given = options.get("sampling")
        fields["sampling"] = settings_of(base if given is None else given, **settings)
        return cls(prompt, **fields)  # type: ignore[arg-type]

    def of_prompt(self, prompt: object) -> Self:
        """Return the request with another prompt; nothing else is checked again."""
        request = copy(self)
        force_setattr(request, "prompt", _checked_prompt(prompt))
        return request

    def replace(self, **fields: object) -> Self:
        """Return the request with some fields changed.

        Raises:
            ConfigError, GrammarError: a value is invalid.
        """
        return msgspec.structs.replace(self, **fields)

    @classmethod
    def from_json(
        cls,
        data: Mapping[str, object],
        name: str,
        sampling: SamplingParams | None = None,
    ) -> Self:
        """Return the request that a JSON object describes, such as a line of a file of requests.

        The object has ``prompt`` (text or token ids) or ``messages``. It may have ``id`` or
        ``custom_id``, ``max_tokens``, ``min_tokens``, ``stop``, ``stop_tokens``, one of ``grammar``
        (GBNF), ``json_schema``, ``regex``, ``choices`` (a list of texts) and OpenAI's
        ``response_format``, and ``n``, ``priority``, ``session_id``,
        ``parent_session_id``, ``ttl``, ``logprobs``, ``top_logprobs``, ``prompt_logprobs``,
        ``parse_special``, and the settings of `SamplingParams`. A value of None
        counts as left out.

        Args:
            data: the object.
            name: the id if the object has none.
            sampling: the settings for everything that the object leaves out.

        Raises:
            ConfigError: a field is unknown, missing, of the wrong type or out of range.
            GrammarError: the grammar is invalid.
        """
        line = line_of(data)
        base = SamplingParams() if sampling is None else sampling
        fields = line.arguments(base)
        if sampling is None and fields["sampling"] == base:
            fields["sampling"] = None  # the engine's
        return cls(
            line.asked(),
            line.name(name),
            max_tokens=line.limit(),
            top_logprobs=line.n_alternatives(),
            grammar=line.text_grammar(),
            prompt_logprobs=line.prompt_logprobs,
            parse_special=line.parse_special is not False,
            **fields,
        )

    # -- what it means -------------------------------------------------------------------------------

    def plan(self, model: Model) -> Plan:
        """Return what the request means for a model.

        Raises:
            ConfigError, TokenizeError: the prompt is invalid, or an option does not fit it.
            UnsupportedError: the model has no chat template, or does not think.
            GrammarError: the schema of a tool is invalid.
        """
        model.check_tokens(self.stop_tokens)
        grammar, choice = cast("Grammar | None", self.grammar), self.thinking
        if is_chat(self.prompt):
            return self._chat_plan(model, grammar)
        tokens = model.prompt_tokens(self.prompt, parse_special=self.parse_special)
        if choice is None or isinstance(choice, Thinking):
            return Plan(tokens, choice, grammar)
        return Plan(*self._thinking(model, tokens), grammar)

    def _chat_plan(self, model: Model, grammar: Grammar | None) -> Plan:
        form, choice = model.turn_format, self.thinking
        if isinstance(choice, Thinking):
            raise ConfigError("thinking must be True, False, None or a number for messages")
        tools = Tools(self.tools or (), self.tool_choice, form, parallel=self.parallel_tool_calls)
        if tools.forced and grammar is not None:
            raise ConfigError(
                "tool_choice forces a call, which has its own grammar: leave the other one out"
            )
        variables = {**thinking_variables(form, choice), **(self.chat_template_kwargs or {})}
        shows = self.show_schema and grammar is not None and grammar.kind == "json_schema"
        talk = conversation(
            model, cast(Sequence[Message], self.prompt), tools, variables,
            continues=self.continue_final_message, generates=self.add_generation_prompt,
            schema=grammar.source if shows and grammar is not None else "",
        )  # fmt: skip
        tokens, thinking = talk.tokens(model), None
        if self.add_generation_prompt is not False or talk.begun:
            tokens, thinking = self._thinking(
                model, tokens, begun=talk.begun, has_calls=tools.is_used
            )
        if tools.is_used:
            grammar = _tool_grammar(model, tools, grammar)
        return Plan(tokens, thinking, grammar, tools)

    def _thinking(
        self, model: Model, tokens: list[int], *, begun: str = "", has_calls: bool = False
    ) -> tuple[list[int], Thinking | None]:
        return plan_thinking(
            model, tokens, cast(ThinkingChoice, self.thinking), begun=begun,
            ending=self.thinking_end, shares=self.share is not None, has_calls=has_calls,
        )  # fmt: skip


def session_name(name: str, value: object) -> str:
    """Return ``value`` if it can name a session; ``name`` is the argument's.

    Raises:
        ConfigError: it is not a text of 1 to 200 printable characters.
    """
    if not (0 < len(text := instance(name, value, str)) <= _LONGEST_NAME and text.isprintable()):
        found = repr(text) if len(text) <= _LONGEST_NAME else f"{len(text):,}"
        raise ConfigError(f"{name} must be 1 to {_LONGEST_NAME} printable characters, not {found}")
    return text


def _checked_prompt(prompt: object) -> str | Sequence[int] | Sequence[Message]:
    is_bytes = isinstance(prompt, (bytes, bytearray, memoryview))
    if is_bytes or not isinstance(prompt, (Sequence, np.ndarray)):
        raise ConfigError(
            f"a prompt must be text, a list of token ids or messages, not {prompt!r:.40}",
            hint="decode bytes first: prompt.decode()" if is_bytes else None,
        )
    if is_chat(prompt):
        return chat_messages(prompt)
    if not isinstance(prompt, str) and any(type(t) is not int for t in prompt):
        return token_list(cast(Sequence[int], prompt))
    return cast("str | Sequence[int]", prompt)


def _tool_grammar(model: Model, tools: Tools, asked: Grammar | None) -> Grammar | None:
    """Return the grammar of an answer that may call functions, or None if there cannot be one.

    Raises:
        UnsupportedError: ``asked``, the grammar of an answer without a call, cannot be combined with
            calls.
    """
    try:
        return turn_grammar(model, tools, asked)
    except UnsupportedError:
        if asked is not None:
            raise
        return None  # `Tools.read` finds the calls even without a grammar


AnyRequest = Request | str | Sequence[Message]
# One conversation is an iterable of messages; one text is an iterable of str.
Requests = Iterable[AnyRequest | Message] | Request


def identity(request: AnyRequest, number: int) -> str:
    """Return the id of a request."""
    if isinstance(request, str) or is_chat(request):
        return str(number)
    if not isinstance(request, Request):
        raise ConfigError(
            f"a request is a Request or text, or messages, not {request!r:.40}",
            hint="pass token ids as Request([1, 2, 3]), bytes as text: prompt.decode()",
        )
    return str(number) if request.id is None else request.id


def as_request(request: AnyRequest) -> Request:
    """Return a prompt as a request."""
    return request if isinstance(request, Request) else Request(request)
