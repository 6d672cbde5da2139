"""Tools: a function, another agent or the fork; its schema, its arguments, and its result as text."""

from __future__ import annotations

import inspect
import json
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from ..model import Model
from ..model.functions import function_tool

__all__ = ["FORK", "Refused", "Tool", "agent", "fork", "function", "shortened", "text_of"]

FORK = "fork"
_MOST_FORKS = 16
_TOLD = 300  # characters of why arguments were refused


class Refused(Exception):
    """The arguments of a call do not fit the function."""


@dataclass(frozen=True)
class Tool:
    """What a model may call.

    Attributes:
        described: OpenAI's tool object.
        function: what is called; None for an agent, for the fork, and in a replay.
        agent: the plan of the agent that runs; else None.
        check: takes a call's arguments and returns those of the function; raises `Refused`.
    """

    described: Mapping[str, object]
    function: Callable[..., object] | None = None
    agent: object = None
    check: Callable[[object], dict[str, object]] = lambda given: _named(given)

    @property
    def name(self) -> str:
        """The name that the model calls it by."""
        return str(cast(Mapping[str, object], self.described["function"])["name"])


def function(given: Callable[..., object]) -> Tool:
    """Return a function, or a bound method, as a tool.

    Raises:
        ConfigError: its parameters cannot be described.
    """
    return Tool(function_tool(given), given, check=_checker(given))


def agent(plan: object, name: str, about: str) -> Tool:
    """Return another agent, by its plan, as a tool that takes a task."""
    about = about or f"Give a task to {name}, which does it and reports."
    described = _described(name, about, "task", {"type": "string"})
    return Tool(described, agent=plan, check=_with_task)


def fork() -> Tool:
    """Return the tool that forks the agent that calls it."""
    about = (
        "Do several tasks at once: each is done by a copy of you that knows all that you know. "
        "You get their answers."
    )
    tasks = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": _MOST_FORKS}
    return Tool(_described(FORK, about, "tasks", tasks), check=_with_tasks)


def _described(name: str, about: str, parameter: str, schema: object) -> dict[str, object]:
    parameters = {"type": "object", "properties": {parameter: schema}, "required": [parameter]}
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


# -- arguments -------------------------------------------------------------------------------------


def _named(
    given: object, known: Collection[str] | None = None, needed: Iterable[str] = ()
) -> dict[str, object]:
    """Return arguments by name: all that are needed, and no unknown ones (None = no arguments)."""
    if not isinstance(given, Mapping):
        raise Refused("the arguments must be a JSON object")
    for name in given:
        if known is not None and name not in known:
            raise Refused(f"{name}: there is no such parameter")
    for name in sorted(needed):
        if name not in given:
            raise Refused(f"{name}: it is missing")
    return dict(given)


def _with_task(given: object) -> dict[str, object]:
    arguments = _named(given, {"task"}, {"task"})
    if not isinstance(arguments["task"], str):
        raise Refused("task must be a text")
    return arguments


def _with_tasks(given: object) -> dict[str, object]:
    arguments = _named(given, {"tasks"}, {"tasks"})
    tasks = arguments["tasks"]
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise Refused("tasks must be a list of texts")
    if not 1 <= len(tasks) <= _MOST_FORKS:
        raise Refused(f"tasks must be from 1 to {_MOST_FORKS}, not {len(tasks)}")
    return arguments


def _checker(called: Callable[..., object]) -> Callable[[object], dict[str, object]]:
    """Return what takes a call's arguments for a function: by pydantic where it is installed."""
    parameters = inspect.signature(called).parameters
    hints = typing.get_type_hints(called, include_extras=True)
    needed = {key for key, one in parameters.items() if one.default is one.empty}

    try:
        from pydantic import TypeAdapter, ValidationError
    except ImportError:
        return lambda given: _named(given, parameters, needed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of annotations that pydantic would rather have otherwise
        adapters = {key: TypeAdapter(hints[key]) for key in parameters}

    def check(given: object) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in _named(given, parameters, needed).items():
            try:
                found[key] = adapters[key].validate_json(json.dumps(value))
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                place = ".".join([key, *map(str, first["loc"])])
                raise Refused(f"{place}: {first['msg']}"[:_TOLD]) from None
        return found

    return check


# -- results ---------------------------------------------------------------------------------------


def text_of(value: object) -> str:
    """Return what a function has returned as text: a text as it is, everything else as JSON.

    Raises:
        TypeError: it has no JSON.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
    try:
        try:
            from pydantic_core import to_json
        except ImportError:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return to_json(value).decode()
    except Exception as error:  # whatever an object's own methods raise
        raise TypeError(
            f"a result of type {type(value).__name__} cannot be written as JSON ({error}): return text, "
            "numbers, lists, dictionaries, dataclasses or pydantic models"
        ) from error


def shortened(model: Model, text: str, most: int) -> str:
    """Return a text of at most about ``most`` tokens: what is left out of a longer one is told."""
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
