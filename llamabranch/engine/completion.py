"""One call from prompts to texts: what `complete`, `chat` and their asynchronous forms share.

A call is checked as a whole before anything is decoded. The engine that runs it stays with the context,
with its drafter and what that has learned, and K/V stays in the context's prefix cache.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, cast

from typing_extensions import TypeVar, Unpack

from ..arguments import placed, plain_int
from ..context import Context
from ..context.context import text_context
from ..context.progress import OnPromptProgress
from ..errors import CacheFullError, ConfigError, DecodeInterruptedError
from ..model import Message, chat_messages, is_chat
from ..model.tools import Tools, conversation
from ..sampling import SamplingParams, SamplingSettings
from ..sampling.constraint import ConstraintLike
from ..sampling.grammar import Grammar, turn_grammar
from ..sampling.params import check_names, settings_of
from ..speculative.combined import DrafterChoice, auto_drafter
from .engine import Engine
from .request import Event, Request, Result

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
]


Messages = Sequence[Message]
Conversations = Sequence[Sequence[Message]]
_Prompt = str | Sequence[int] | Messages
Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Conversations
Events = Generator[Event, None, None]
T = TypeVar("T", default=object)  # of what the texts mean


class TextOptions(SamplingSettings, Generic[T], total=False):
    """How texts are generated: fields of `Request`, grammars, and sampling settings by name."""

    max_tokens: int | None
    stop: str | Sequence[str]
    stop_tokens: Sequence[int]
    n: int
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
    drafter: DrafterChoice  # not of an `AsyncEngine`, which has its own


_AS_GIVEN = (
    "stop", "stop_tokens", "constraint", "n", "prompt_logprobs", "parse_special",
    "on_prompt_progress", "prompt_progress",
)  # fmt: skip
_NOT_SAMPLING = TextOptions.__annotations__.keys() - SamplingSettings.__annotations__.keys()


class ChatOptions(TextOptions[T], Generic[T], total=False):
    """`TextOptions`, and what the chat template is given."""

    tools: Sequence[Mapping[str, object]] | None
    tool_choice: str | Mapping[str, object] | None
    chat_template_kwargs: Mapping[str, object] | None


@dataclass
class Completion:
    """A call that was checked, and the results it has so far.

    Attributes:
        requests: one for each prompt.
        prompts: as they were given.
        is_list: whether the answer is a list.
        tools: those of a chat.
        drafter: the one that was given.
        scores: whether log-probabilities were asked for, so that OpenAI's shapes have them.
        found: the results of each prompt, by the number of the sample.
    """

    requests: list[Request]
    prompts: Sequence[_Prompt]
    is_list: bool
    tools: Tools | None = None
    drafter: DrafterChoice = "auto"
    scores: bool = False
    found: list[list[Result]] = field(init=False)

    def __post_init__(self) -> None:
        self.found = [[] for _ in self.requests]

    def take(self, number: int, event: Event) -> Event:
        """Return an event of a prompt as the caller gets it, and keep its result."""
        result, name = event.result, str(number)
        if result is not None:
            choices = self.found[number]
            choices.append(result)
            choices.sort(key=lambda each: each.sample)
            result.id, result.prompt = name, self.prompts[number]
            result.choices, result.tools = choices, self.tools
            if not self.scores:
                result.pieces = {}
        return event if event.id == name else replace(event, id=name)

    def take_all(self, results: Iterable[Result]) -> None:
        """Keep results of an engine, whose ids are the numbers of the prompts."""
        for result in results:
            self.take(int(result.id), Event(result.id, result.sample, result=result))

    def check(self) -> None:
        """Raise what has ended the texts, if none of them has a token."""
        found = [result for results in self.found for result in results]
        if any(result.tokens for result in found):
            return
        for result in found:
            if result.error is not None:
                raise result.error

    def answer(self) -> Result | list[Result]:
        """Return the first text of each prompt, with the others as its ``choices``.

        Raises:
            LlamaBranchError: no text has a token, and this is why.
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
    """Return a call of ``complete``, checked.

    Args:
        ctx: generates.
        prompt: one, or a list of them.
        base: the settings where ``sampling`` is not given.
        options: those of ``Context.complete``; without ``max_tokens`` the engine's holds.

    Raises:
        ConfigError, GrammarError, TokenizeError, CacheFullError: something is invalid, or too long.
    """
    text_context("ctx", ctx)
    settings = {name: value for name, value in options.items() if name not in _NOT_SAMPLING}
    check_names(settings, ChatOptions.__annotations__)
    prompts, is_list = _prompts(prompt)
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
    common = Request(
        "",
        max_tokens=max_tokens,
        sampling=params,
        grammar=_grammar(options),
        top_logprobs=top_logprobs,
        **given_as_is,  # type: ignore[arg-type]
    )
    if options.get("json_schema") is not None and (common.stop or common.stop_tokens):
        raise ConfigError(
            "stop and json_schema: what ends at a stop string or token is no complete value",
            hint="leave stop and stop_tokens out: the text ends with the value",
        )
    ctx.model.check_tokens(common.stop_tokens)
    requests = []
    for index, each in enumerate(prompts):
        with placed(_place(index, prompts)):
            request = replace(common, prompt=each)
            tokens = ctx.model.prompt_tokens(request.prompt, parse_special=common.parse_special)
            if len(tokens) > ctx.n_ctx_seq:
                raise CacheFullError.of_prompt(len(tokens), ctx.n_ctx_seq)
            requests.append(replace(request, prompt=tokens))
    return Completion(
        requests, prompts, is_list, drafter=options.get("drafter", "auto"), scores=scores
    )


def plan_chat(
    ctx: Context,
    messages: object,
    base: SamplingParams | None = None,
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    tool_choice: str | Mapping[str, object] | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    **options: Unpack[TextOptions],
) -> Completion:
    """Return a call of ``chat``, checked; see ``plan_texts``.

    Raises:
        ConfigError, UnsupportedError, GrammarError, TokenizeError, CacheFullError: something is invalid.
    """
    text_context("ctx", ctx)
    known = Tools(tools or (), tool_choice, ctx.model.turn_format)
    first = messages[0] if isinstance(messages, (list, tuple)) and messages else None
    is_list = isinstance(first, list) or is_chat(first)
    given = cast(Sequence[Sequence[Message]], messages if is_list else [messages])
    chats, prompts = [], []
    for index, each in enumerate(given):
        with placed(_place(index, given)):
            chats.append(chat_messages(each))
            talk = conversation(ctx.model, chats[-1], known, chat_template_kwargs)
            prompts.append(talk.tokens(ctx.model))
    if known.forced:
        if any(options.get(name) is not None for name in _GRAMMARS):
            raise ConfigError("a forced tool call has a grammar of its own: give no other one")
        options["grammar"] = turn_grammar(ctx.model, known)
    found = plan_texts(ctx, prompts, base, **options)
    found.prompts, found.is_list, found.tools = chats, is_list, known
    return found


def _prompts(prompt: object) -> tuple[list[_Prompt], bool]:
    """Return the prompts, and whether they were given as a list."""
    is_list = isinstance(prompt, (list, tuple)) and not is_chat(prompt)
    several = cast(Sequence[_Prompt], prompt) if is_list else ()
    if not is_list or (several and plain_int(several[0]) is not None):
        return [cast(_Prompt, prompt)], False
    for each in several:
        is_nested = isinstance(each, (list, tuple)) and each and not is_chat(each)
        if is_nested and isinstance(each[0], (str, list, tuple)):
            raise ConfigError(
                f"a prompt must be text, a list of token ids or messages, not {each!r:.40}",
                hint="give texts, conversations or lists of ids in one list",
            )
    return list(several), True


def _place(index: int, prompts: Sequence[object]) -> str:
    """Return which of several prompts one is, for messages of errors."""
    return f"prompts[{index}]" if len(prompts) > 1 else ""


_GRAMMARS = ("grammar", "json_schema", "regex", "choices")


def _grammar(options: TextOptions) -> Grammar | None:
    if sum(options.get(name) is not None for name in _GRAMMARS) > 1:
        raise ConfigError(f"give one of {', '.join(_GRAMMARS)}")
    if (schema := options.get("json_schema")) is not None:
        return Grammar.from_json_schema(schema)
    if (regex := options.get("regex")) is not None:
        return Grammar.from_regex(regex)
    if (choices := options.get("choices")) is not None:
        return Grammar.from_choices(choices)
    grammar = options.get("grammar")
    return Grammar(grammar) if isinstance(grammar, str) else grammar


# -- with the engine that stays with a context -----------------------------------------------------


def run(ctx: Context, plan: Completion, *, stream: bool) -> Result | list[Result] | Events:
    """Generate the texts of a call; ``stream``: return an iterator of events.

    Raises:
        LlamaBranchError: no text has a token, and this is why; with ``stream`` after the last event.
    """
    structured = any(request.grammar is not None for request in plan.requests)
    engine = _engine(ctx, plan.drafter, structured)
    if stream:
        return _events(engine, plan)
    try:
        results = engine.generate(plan.requests)
    except DecodeInterruptedError as error:
        plan.take_all(cast("Sequence[Result]", error.results))
        error.results = [found[0] for found in plan.found if found]
        raise
    plan.take_all(results)
    return plan.answer()


def _events(engine: Engine, plan: Completion) -> Events:
    yield from (plan.take(int(event.id), event) for event in engine.stream(plan.requests))
    plan.check()


def _engine(ctx: Context, drafter: DrafterChoice, structured: bool) -> Engine:
    """Return the engine that stays with a context: of a given drafter, or of a kind of texts."""
    name = "plain" if drafter is None else "drafter"
    if drafter == "auto":
        name = "structured" if structured else "text"
    with ctx.lock:
        ctx.decoder.check_open()
        engine = ctx.attached.get(name)
        if not isinstance(engine, Engine) or (name == "drafter" and drafter is not engine.drafter):
            ctx.keep_prefixes()
            if drafter == "auto":
                drafter = auto_drafter(ctx, structured=structured)
            engine = Engine(ctx, drafter, wait_s=0.5)
            ctx.attached[name] = engine
        return engine
