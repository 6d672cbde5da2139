"""One call from prompts to texts, for `complete`, `chat` and their asynchronous forms.

A call is checked completely before anything is decoded. Then ``Context`` builds an engine for the
call, and ``AsyncEngine`` uses its own. The K/V of the texts stays in the context's prefix cache.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, cast

from typing_extensions import TypeVar, Unpack

from ..arguments import flag, placed, plain_int, shown
from ..context import Context
from ..context.context import text_context
from ..context.progress import OnPromptProgress
from ..errors import CacheFullError, ConfigError, DecodeInterruptedError, UnsupportedError
from ..model import Message, Model, chat_messages, is_chat
from ..model.thoughts import (
    Thinking,
    ThinkingChoice,
    plan_thinking,
    thinking_budget,
    thinking_variables,
)
from ..model.tools import Tool, Tools, begun_answer, conversation
from ..request.request import EngineStats, Event, Request, Result
from ..request.turns import TurnPieces, shown_pieces, written_piece
from ..run.client import Client
from ..run.drafting import Drafting
from ..sampling import SamplingParams, SamplingSettings
from ..sampling.constraint import ConstraintLike
from ..sampling.grammar import Grammar, turn_grammar
from ..sampling.noise import random_seed
from ..sampling.params import check_names, settings_of
from ..speculative import Drafter
from ..speculative.combined import DrafterChoice, auto_drafter
from .stream import RequestStream

__all__ = [
    "ChatOptions",
    "Completion",
    "Conversations",
    "Events",
    "Messages",
    "Prompts",
    "TextOptions",
    "plan_chat",
    "plan_texts",
    "run",
    "tool_grammar",
]


Messages = Sequence[Message]
Conversations = Sequence[Sequence[Message]]
_Prompt = str | Sequence[int] | Messages
Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Conversations
Events = Generator[Event, None, None]
_GRAMMARS = ("grammar", "json_schema", "regex", "choices")  # a text follows at most one of them
_MAX_TOKENS = 128  # for a call that sets no limit
T = TypeVar("T", default=object)  # the type of parsed values


class TextOptions(SamplingSettings, Generic[T], total=False):
    """The options of ``complete``: fields of `Request`, grammars, and sampling settings."""

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
    drafter: DrafterChoice  # not for an `AsyncEngine`, which has its own


_AS_GIVEN = (
    "stop", "stop_tokens", "min_tokens", "constraint", "n", "priority", "prompt_logprobs",
    "parse_special", "on_prompt_progress", "prompt_progress",
)  # fmt: skip
_NOT_SAMPLING = TextOptions.__annotations__.keys() - SamplingSettings.__annotations__.keys()


class ChatOptions(TextOptions[T], Generic[T], total=False):
    """The options of ``chat``: `TextOptions`, and the variables of the chat template."""

    tools: Sequence[Tool] | None
    tool_choice: str | Mapping[str, object] | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, object] | None
    show_schema: bool


@dataclass
class Completion:
    """A checked call, and its results so far.

    Attributes:
        requests: one for each prompt.
        prompts: the prompts, as the user passed them.
        is_list: whether the answer is a list.
        tools: the tools of a chat.
        drafter: the drafter that the user passed.
        scores: whether log-probabilities were requested; then ``Result.to_openai`` includes them.
        model: the model that generates.
        asked: the user's grammar; ``Result.parsed`` parses the text with it.
        found: for each prompt its results so far, sorted by ``sample``.
    """

    requests: list[Request]
    prompts: Sequence[_Prompt]
    is_list: bool
    tools: Tools | None = None
    drafter: DrafterChoice = "auto"
    scores: bool = False
    model: Model | None = None
    asked: Grammar | None = None
    found: list[list[Result]] = field(init=False)
    _pieces: dict[tuple[int, int], TurnPieces] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.found = [[] for _ in self.requests]

    def take(self, number: int, event: Event) -> list[Event]:
        """Return an event of prompt ``number`` as the caller gets it, and keep its result.

        Events with text that was held back may come before it.
        """
        result, name, before = event.result, str(number), list[Event]()
        event = event if event.id == name else replace(event, id=name)
        token, model = event.emitted, self.model
        tools = self.tools if self.tools is not None and self.tools.is_used else None
        if token is not None and tools is not None and model is not None:
            key = number, event.sample
            if key not in self._pieces:
                self._pieces[key] = TurnPieces(tools, "", begun_answer(self.prompts[number]))
            written = "" if token.is_thought else written_piece(model, token)
            told = self._pieces[key].feed(token.text if token.is_thought else "", written)
            *held, shown = shown_pieces(token, told)
            before = [Event(name, event.sample, each) for each in held]
            event = replace(event, emitted=shown)
        if result is not None:
            choices = self.found[number]
            choices.append(result)
            choices.sort(key=lambda each: each.sample)
            result.id, result.prompt = name, self.prompts[number]
            result.choices, result.tools, result.grammar = choices, self.tools, self.asked
            if tools is not None and model is not None:
                is_cut, turn = result.is_cut, result.separate_calls(model)
                pieces = self._pieces.pop((number, event.sample), None)
                told = [] if pieces is None else pieces.finish(turn, is_cut=is_cut)
                before = [Event(name, event.sample, each) for each in shown_pieces(None, told)]
            if not self.scores:
                result.pieces = {}
        return [*before, event]

    def events(self, events: Events) -> Events:
        """Yield the events as the caller gets them. Their ids must be the numbers of the prompts.

        Raises:
            LlamaBranchError: at the end, as ``check`` does.
        """
        for event in events:
            yield from self.take(int(event.id), event)
        self.check()

    def check(self) -> None:
        """Raise the error that ended the texts, if none of them has a token."""
        found = [result for results in self.found for result in results]
        if any(result.tokens for result in found):
            return
        for result in found:
            if result.error is not None:
                raise result.error

    def answer(self) -> Result | list[Result]:
        """Return the first result of each prompt; its ``choices`` are all results of that prompt.

        Raises:
            LlamaBranchError: the reason why no text has a token.
        """
        self.check()
        results = [results[0] for results in self.found]
        return results if self.is_list else results[0]


def plan_texts(
    ctx: Context,
    prompt: object,
    base: SamplingParams | None = None,
    **options: Unpack[TextOptions],
) -> Completion:
    """Check the arguments of ``complete``, and return the call that they describe.

    Args:
        ctx: the context that generates.
        prompt: a prompt, or a list of prompts.
        base: the settings if there is no option ``sampling``.
        options: the options of ``Context.complete``; the default of ``max_tokens`` is the engine's.

    Raises:
        ConfigError, GrammarError, TokenizeError, CacheFullError: an argument is invalid, or a
            prompt too long.
    """
    text_context("ctx", ctx)
    prompts, is_list = _prompts(prompt)
    asked, model = _Thinking.of(options), ctx.model

    def of(each: _Prompt) -> _Planned:
        if is_chat(each):
            variables = thinking_variables(model.turn_format, asked.choice)
            tokens = model.chat_tokens(each, **variables)  # type: ignore[arg-type]
        else:
            tokens = model.prompt_tokens(each, parse_special=options.get("parse_special", True))
            if asked.choice is None:
                return tokens, None
        return asked.plan(model, tokens)

    planned = []
    for index, each in enumerate(prompts):
        with placed(_place(index, prompts)):
            planned.append(of(each))
    plan = _planned(ctx, planned, base, options, _chosen_grammar(options))
    plan.prompts, plan.is_list = prompts, is_list
    return plan


_Planned = tuple[list[int], Thinking | None]


class _Thinking(NamedTuple):
    """The caller's options for thoughts."""

    choice: ThinkingChoice
    ending: str
    shares: bool

    @classmethod
    def of(cls, options: TextOptions) -> _Thinking:
        share = options.get("share")
        if share not in (None, "thought"):
            raise ConfigError(
                f"share must be 'thought' or None, not {shown(share)}",
                hint="share='thought': all texts of a prompt share one thought",
            )
        choice = options.get("thinking")
        thinking_budget(choice)
        return cls(choice, options.get("thinking_end", ""), share is not None)

    def plan(
        self, model: Model, tokens: list[int], *, begun: str = "", has_calls: bool = False
    ) -> _Planned:
        return plan_thinking(
            model, tokens, self.choice,
            begun=begun, ending=self.ending, shares=self.shares, has_calls=has_calls,
        )  # fmt: skip


def _planned(
    ctx: Context,
    planned: Sequence[_Planned],
    base: SamplingParams | None,
    options: TextOptions,
    asked: Grammar | None,
    tools: Tools | None = None,
) -> Completion:
    """Return the call for tokenized prompts.

    ``asked`` is the user's grammar; ``tools`` are the functions that the answers may call.
    """
    settings = {name: value for name, value in options.items() if name not in _NOT_SAMPLING}
    check_names(settings, ChatOptions.__annotations__)
    given = options.get("sampling")
    params = settings_of(base if given is None else given, **settings)
    max_tokens = options.get("max_tokens")
    if max_tokens is None and "max_tokens" in options:
        max_tokens = ctx.n_ctx_seq
    top_logprobs = options.get("top_logprobs")
    scores = top_logprobs is not None or bool(options.get("logprobs"))
    if top_logprobs is None and params.logprobs:
        top_logprobs = 0
    given_as_is = {name: value for name, value in options.items() if name in _AS_GIVEN}
    grammar = asked
    if tools is not None and tools.is_used:
        grammar = tool_grammar(ctx.model, tools, asked)
    common = Request(
        "",
        max_tokens=max_tokens,
        sampling=params,
        grammar=grammar,
        top_logprobs=top_logprobs,
        **given_as_is,  # type: ignore[arg-type]
    )
    if options.get("json_schema") is not None and (common.stop or common.stop_tokens):
        raise ConfigError(
            "stop cannot be combined with json_schema: a text cut there is not a complete value",
            hint="leave stop and stop_tokens out; the text ends with the value",
        )
    ctx.model.check_tokens(common.stop_tokens)
    requests = []
    for index, (tokens, thinking) in enumerate(planned):
        with placed(_place(index, planned)):
            if len(tokens) > ctx.n_ctx_seq:
                raise CacheFullError.of_prompt(len(tokens), ctx.n_ctx_seq)
            requests.append(common.of_prompt(tokens, thinking))
    return Completion(
        requests, [], is_list=False, tools=tools, drafter=options.get("drafter", "auto"),
        scores=scores, model=ctx.model, asked=asked,
    )  # fmt: skip


def plan_chat(
    ctx: Context,
    messages: object,
    base: SamplingParams | None = None,
    *,
    tools: Sequence[Tool] | None = None,
    tool_choice: str | Mapping[str, object] | None = None,
    parallel_tool_calls: bool | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    show_schema: bool = True,
    continues: bool | None = None,
    generates: bool | None = None,
    **options: Unpack[TextOptions],
) -> Completion:
    """Check the arguments of ``chat``, and return the call; see ``plan_texts``.

    ``continues`` and ``generates``: as for ``conversation``.

    Raises:
        ConfigError, UnsupportedError, GrammarError, TokenizeError, CacheFullError: an argument is
            invalid, or a conversation too long.
    """
    text_context("ctx", ctx)
    flag("show_schema", show_schema)
    model, grammar = ctx.model, _chosen_grammar(options)
    is_shown = show_schema and grammar is not None and grammar.kind == "json_schema"
    schema = grammar.source if is_shown and grammar is not None else ""
    form, asked = model.turn_format, _Thinking.of(options)
    known = Tools(tools or (), tool_choice, form, parallel=parallel_tool_calls)
    variables = {**thinking_variables(form, asked.choice), **(chat_template_kwargs or {})}
    first = messages[0] if isinstance(messages, (list, tuple)) and messages else None
    is_list = isinstance(first, list) or is_chat(first)
    given = cast(Sequence[Sequence[Message]], messages if is_list else [messages])
    chats, planned = [], []
    for index, each in enumerate(given):
        with placed(_place(index, given)):
            chats.append(chat_messages(each))
            talk = conversation(
                model, chats[-1], known, variables,
                continues=continues, generates=generates, schema=schema,
            )  # fmt: skip
            tokens, ends = talk.tokens(model), generates is False and not talk.begun
            planned.append(
                (tokens, None)
                if ends
                else asked.plan(model, tokens, begun=talk.begun, has_calls=known.is_used)
            )
    if known.forced and any(options.get(name) is not None for name in _GRAMMARS):
        raise ConfigError("tool_choice forces a call, which has a grammar of its own; use no other")
    plan = _planned(ctx, planned, base, options, grammar, known)
    plan.prompts, plan.is_list = chats, is_list
    return plan


def _chosen_grammar(options: Mapping[str, object]) -> Grammar | None:
    """Return the one grammar among options, or None; see `_GRAMMARS`.

    Raises:
        ConfigError: there are several. GrammarError: it is invalid.
    """
    grammar, schema, regex, choices = given = [options.get(name) for name in _GRAMMARS]
    if sum(value is not None for value in given) > 1:
        raise ConfigError(f"use only one of {', '.join(_GRAMMARS)}")
    if schema is not None:
        return Grammar.from_json_schema(cast(type, schema))  # or text, or an object
    if regex is not None:
        return Grammar.from_regex(cast(str, regex))
    if choices is not None:
        return Grammar.from_choices(cast(Sequence[str], choices))
    return Grammar(grammar) if isinstance(grammar, str) else cast("Grammar | None", grammar)


def tool_grammar(model: Model, tools: Tools, asked: Grammar | None) -> Grammar | None:
    """Return the grammar of an answer that may call functions, or None if there cannot be one.

    Args:
        model, tools: as for ``turn_grammar``.
        asked: the grammar of an answer without a call.

    Raises:
        UnsupportedError: ``asked`` cannot be combined with calls.
    """
    try:
        return turn_grammar(model, tools, asked)
    except UnsupportedError:
        if asked is not None:
            raise
        return None  # `Tools.read` finds the calls even without a grammar


def _prompts(prompt: object) -> tuple[list[_Prompt], bool]:
    """Return the prompts, and whether the argument was a list."""
    is_list = isinstance(prompt, (list, tuple)) and not is_chat(prompt)
    several = cast(Sequence[_Prompt], prompt) if is_list else ()
    if not is_list or (several and plain_int(several[0]) is not None):
        return [cast(_Prompt, prompt)], False
    for each in several:
        is_nested = isinstance(each, (list, tuple)) and each and not is_chat(each)
        if is_nested and isinstance(each[0], (str, list, tuple)):
            raise ConfigError(
                f"a prompt must be text, a list of token ids or messages, not {each!r:.40}",
                hint="pass texts, conversations or lists of ids in one list",
            )
    return list(several), True


def _place(index: int, prompts: Sequence[object]) -> str:
    """Return the place of a prompt among several, for error messages."""
    return f"prompts[{index}]" if len(prompts) > 1 else ""


def run(
    ctx: Context, plan: Completion, drafters: dict[bool, Drafter], *, stream: bool
) -> Result | list[Result] | Events:
    """Generate the texts of a call.

    Args:
        ctx: the context that generates.
        plan: the checked call.
        drafters: keeps the "auto" drafters: one for texts without a grammar (key False), and one
            for texts with a grammar (key True).
        stream: return an iterator of events.

    Raises:
        LlamaBranchError: the reason why no text has a token; with ``stream`` after the last event.
    """
    drafter = plan.drafter
    with ctx.lock:
        ctx.decoder.check_open()
        ctx.keep_prefixes()
        if drafter == "auto":
            structured = any(request.grammar is not None for request in plan.requests)
            if structured not in drafters:
                drafters[structured] = auto_drafter(ctx, structured=structured)
            drafter = drafters[structured]
    drafting = Drafting(ctx, drafter, batched=True)
    client = Client(drafting, EngineStats(), wait_s=0.5, max_tokens=_MAX_TOKENS)
    running = RequestStream(client, plan.requests, random_seed(), reports_tokens=stream)
    events = plan.events(running.events())
    if stream:
        return events
    try:
        for _ in events:
            pass
    except DecodeInterruptedError as error:
        error.results = [results[0] for results in plan.found if results]
        raise
    return plan.answer()
