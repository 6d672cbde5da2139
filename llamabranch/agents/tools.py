"""Tools: a function, another agent or the fork; its schema, its arguments, and its result as text."""

from __future__ import annotations

import inspect
import json
import typing
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

from ..context import Context
from ..errors import said, told
from ..model import Model
from ..model.functions import function_tool
from ..model.thoughts import ThinkingChoice
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from .turns import Turns

MOST_FORKS = 16
_TOLD = 300  # characters of the reason for which arguments were refused


class Refused(Exception):
    """A call has failed; the model reads why."""


@dataclass(frozen=True)
class Tool:
    """A function, an agent or the fork, as the model sees it.

    Attributes:
        described: the tool in OpenAI's format.
        function: the function to call.
        check: turns a call's arguments into the function's; raises `Refused`.
        agent: the agent that runs instead, or None.
    """

    described: Mapping[str, object]
    function: Callable[..., object]
    check: Callable[[object], dict[str, object]]
    agent: Settings | None = None

    @property
    def name(self) -> str:
        """The name that the model calls it by."""
        return str(cast(Mapping[str, object], self.described["function"])["name"])


class Settings:
    """The arguments of an agent, checked; see `Agent`."""

    context: Context
    messages: list[dict[str, object]]
    tools: Mapping[str, Tool]
    grammar: Grammar | None  # of answers in JSON
    name: str
    about: str
    max_turns: int
    max_tokens: int
    max_seconds: float | None
    tool_seconds: float
    result_tokens: int
    thinking: ThinkingChoice
    forks: bool
    tell: tuple[type[BaseException], ...]
    repeats: int
    sampling: SamplingParams
    turns: Turns


def tool_of(function: Callable[..., object]) -> Tool:
    """Return a function, or a bound method, as a tool.

    Raises:
        ConfigError: its parameters cannot be described.
    """
    return Tool(function_tool(function), function, _checker(function))


def agent_tool(agent: Settings) -> Tool:
    """Return another agent as a tool that takes a task."""

    def run(task: str) -> None:
        """Stand for the agent."""

    run.__name__ = agent.name
    tool = replace(tool_of(run), agent=agent)
    about = agent.about or f"Give a task to {agent.name}, which does it and reports."
    cast("dict[str, object]", tool.described["function"])["description"] = about
    return tool


def fork(tasks: list[str]) -> None:
    """Do several tasks at once: each is done by a copy of you that knows all that you know.

    You get their answers.
    """


def fork_tool() -> Tool:
    """Return the tool that forks the agent that calls it."""
    tool = tool_of(fork)
    function = cast("dict[str, dict[str, dict[str, dict[str, int]]]]", tool.described["function"])
    function["parameters"]["properties"]["tasks"].update(minItems=1, maxItems=MOST_FORKS)
    return tool


def _checker(function: Callable[..., object]) -> Callable[[object], dict[str, object]]:
    """Return a function that checks the arguments of a call, with pydantic if it is installed."""
    parameters = inspect.signature(function).parameters
    hints = typing.get_type_hints(function, include_extras=True)

    def named(arguments: object) -> dict[str, object]:
        if not isinstance(arguments, Mapping):
            raise Refused("the arguments must be a JSON object")
        for key in arguments:
            if key not in parameters:
                raise Refused(f"{key}: there is no such parameter")
        for key, parameter in parameters.items():
            if parameter.default is parameter.empty and key not in arguments:
                raise Refused(f"{key}: it is missing")
        return dict(arguments)

    try:
        from pydantic import TypeAdapter, ValidationError
    except ImportError:
        return named
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic warns about some annotations
        adapters = {key: TypeAdapter(hints[key]) for key in parameters}

    def reason(key: str, error: BaseException) -> str:
        if isinstance(error, ValidationError):
            with suppress(Exception):  # it calls methods of the user's own exceptions
                first = error.errors(include_url=False, include_input=False)[0]
                return f"{'.'.join([key, *map(str, first['loc'])])}: {first['msg']}"
        return f"{key}: {told(error)}"

    def check(arguments: object) -> dict[str, object]:
        checked: dict[str, object] = {}
        for key, value in named(arguments).items():
            try:
                checked[key] = adapters[key].validate_json(json.dumps(value))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a validator may raise anything
                raise Refused(reason(key, error)[:_TOLD]) from None
        return checked

    return check


# -- results ---------------------------------------------------------------------------------------


def text_of(value: object) -> str:
    """Return a function's result as text: text as it is, everything else as JSON.

    Half a surrogate pair, which is not text, becomes a question mark.

    Raises:
        TypeError: it has no JSON.
    """
    try:
        if inspect.isgenerator(value):  # pydantic would run it
            raise TypeError("it is a generator")
        return (
            (value if isinstance(value, str) else _json(value)).encode("utf-8", "replace").decode()
        )
    except Exception as error:  # whatever an object's own methods raise
        raise TypeError(
            f"a result of type {type(value).__name__} cannot be written as JSON ({said(error)}): return "
            "text, numbers, lists, dictionaries, dataclasses or pydantic models"
        ) from error


def _json(value: object) -> str:
    try:
        from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python
    except ImportError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return to_json(value).decode()
    except PydanticSerializationError:  # half a surrogate pair, for instance
        default = to_jsonable_python
        return json.dumps(value, default=default, ensure_ascii=False, separators=(",", ":"))


def shortened(model: Model, text: str, most: int) -> str:
    """Shorten a text to about ``most`` tokens; a line in its middle says how many are left out."""
    if len(text) <= most:  # a token has a byte or more
        return text
    tokens = model.tokenize(text, add_special=False)
    if len(tokens) <= most:
        return text
    n_last = most // 4
    n_first = most - n_last
    first = model.detokenize(tokens[:n_first])
    last = model.detokenize(tokens[len(tokens) - n_last :])
    left_out = f"[{len(tokens) - most} of {len(tokens)} tokens left out]"
    return f"{first}\n{left_out}\n{last}"
