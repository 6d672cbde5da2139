"""The file of a run: a head for each call of `Agent.run`, and a line for each of its steps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from ..context import Context
from ..errors import ConfigError, LlamaBranchError, LlamaBranchWarning, ParseError, warn
from ..model import Model, chat_messages
from ..model.tools import Tools
from ..native import forkable_lock
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from .report import Report, Step
from .tools import FORK, Tool, agent, fork
from .turns import Plan

__all__ = ["Journal", "Recorded", "begins_a_run", "head", "planned", "read"]

_FORMAT = "llamabranch-agent"


class Journal:
    """Appends the lines of one run to a file.

    A line is written with one call of the system, so several runs may have the same file.

    Args:
        path: the file.
        run: what tells the lines of this run from those of others.
        model: has the texts of tokens, which are written with the first step that has them.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path, run: str, model: Model) -> None:
        self._path, self._run, self._model = path, run, model
        self._known: set[int] = set()
        self._lock = forkable_lock()
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            if os.path.getsize(path):
                self._end_line(path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None

    def _end_line(self, path: Path) -> None:
        """End a line that the end of its process has cut."""
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                os.write(self._file, b"\n")

    def add(self, record: Step | Mapping[str, object]) -> None:
        """Write a step, or the head; if the disk refuses, one warning says so and the run continues."""
        line = record.as_dict() if isinstance(record, Step) else dict(record)
        line["run"] = self._run
        before = None if isinstance(record, Step) else record.get("after")
        tokens = before["tokens"] if isinstance(before, dict) else line.get("tokens", ())
        if new := sorted(set(cast("Sequence[int]", tokens)) - self._known):
            line["pieces"] = {token: _piece(self._model, token) for token in new}
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with self._lock:
            if self._file < 0:
                return
            try:
                if os.write(self._file, data) != len(data):
                    raise OSError("the disk is full")
                self._known.update(new)
            except OSError as error:
                os.close(self._file)
                self._file = -1
                why = error.strerror or error
                warn(f"the journal {self._path} ends here: {why}", LlamaBranchWarning)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1


def _piece(model: Model, token: int) -> str | list[int] | dict[str, str]:
    """Return a token's text, its bytes where they are no text, or the name of a control token."""
    piece = model.piece(token)
    if not piece:
        return {"c": model.detokenize([token], special=True) or f"[{token}]"}
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


class Recorded:
    """A run as it was written.

    Attributes:
        head: its first line.
        steps: of each path, in order.
        pieces: the texts of tokens, by their ids as text.
    """

    def __init__(self, head: Mapping[str, object]) -> None:
        self.head = head
        self.steps: dict[str, list[Step]] = {}
        self.pieces: dict[str, object] = {}


def read(data: bytes, name: object = "the journal") -> list[Recorded]:
    """Return the runs of a journal.

    A last line that was cut is left out; so are lines whose head is missing.

    Raises:
        ParseError: another line cannot be read, or there is no head.
    """
    runs: dict[object, Recorded] = {}
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("it is no JSON object")
            run = record.get("run")
            if record.get("format") == _FORMAT:
                runs[run] = Recorded(record)
            elif run in runs:
                step = Step.from_dict(record)
                runs[run].steps.setdefault(step.path, []).append(step)
            if run in runs and isinstance(pieces := record.get("pieces"), dict):
                runs[run].pieces.update(pieces)
        except (ValueError, TypeError, RecursionError) as error:
            if number >= len(lines) - 1 or begins_a_run(lines[number]):
                continue  # the process has ended while it wrote this line
            raise ParseError(f"line {number} of {name} is damaged: {error}") from None
    if not runs:
        raise ParseError(
            f"{name} is no journal of an agent: it has no head",
            hint="Agent(..., journal=FILE) writes one",
        )
    return list(runs.values())


def begins_a_run(data: bytes) -> bool:
    """Return whether data begins with the head of a run."""
    return data.startswith(f'{{"format": "{_FORMAT}"'.encode())


# -- the head --------------------------------------------------------------------------------------

_LIMITS = (
    "max_turns", "max_tokens", "max_seconds", "tool_seconds", "result_tokens", "think", "repeats", "name",
    "about", "forks",
)  # fmt: skip


def head(
    plan: Plan, tasks: Sequence[str], n: int, after: Report | None, seed: int
) -> dict[str, object]:
    """Return the first line of a run: the model, all that the agent was given, and its tasks.

    Raises:
        UnsupportedError: a setting is a function, which cannot be written.
    """
    context = plan.context
    before = None
    if after is not None:
        before = {
            "messages": after.messages, "tokens": after.tokens,
            "finish_reason": after.finish_reason,
        }  # fmt: skip
    return {
        "format": _FORMAT, "version": 1, "model": context.model.name,
        "fingerprint": context.model.fingerprint, "kv_type": context.kv_type,
        "exact": context.capabilities.batch_invariant, "seed": seed, "tasks": list(tasks), "n": n,
        "after": before, "agent": _described(plan),
    }  # fmt: skip


def _described(plan: Plan) -> dict[str, object]:
    tools: list[dict[str, object]] = []
    for tool in plan.tools.values():
        if tool.agent is not None:
            tools.append({"agent": _described(cast(Plan, tool.agent))})
        else:
            tools.append({"function": tool.described})
    return {
        **{name: getattr(plan, name) for name in _LIMITS},
        "messages": list(plan.messages),
        "tools": tools,
        "tool_choice": plan.choice,
        "parallel_calls": plan.known.parallel,
        "grammar": None if plan.grammar is None else plan.grammar.as_dict(),
        "sampling": plan.sampling.as_dict(),
    }


def planned(context: Context, given: object) -> Plan:
    """Return the plan of an agent as a head describes it: its functions are known, but not there.

    Raises:
        ParseError: it describes none.
    """
    try:
        return _planned(context, cast("dict[str, object]", given))
    except (KeyError, TypeError, ValueError, AttributeError, LlamaBranchError) as error:
        raise ParseError(f"the head of the journal is damaged: {error}") from None


def _planned(context: Context, given: Mapping[str, object]) -> Plan:
    tools: dict[str, Tool] = {}
    for one in cast("list[dict[str, object]]", given["tools"]):
        if "agent" in one:
            inner = _planned(context, cast("dict[str, object]", one["agent"]))
            tool = agent(inner, inner.name, inner.about)
        else:
            tool = Tool(cast("dict[str, object]", one["function"]))
            if tool.name == FORK and given["forks"]:
                tool = fork()
        tools[tool.name] = tool
    described = [tool.described for tool in tools.values()]
    written = cast("str | dict[str, object] | None", given["grammar"])
    grammar = None if written is None else Grammar.from_dict(written)
    messages = cast("list[dict[str, object]]", given["messages"])
    return Plan(
        context=context,
        messages=chat_messages(messages) if messages else [],
        tools=tools,
        known=Tools(
            described,
            given["tool_choice"],
            context.model.turn_format,
            parallel=bool(given["parallel_calls"]),
        ),
        choice=given["tool_choice"],
        grammar=grammar,
        tell=(),
        journal=None,
        sampling=SamplingParams.from_dict(cast("dict[str, object]", given["sampling"])),
        **{name: given[name] for name in _LIMITS if name != "max_seconds"},  # type: ignore[arg-type]
        max_seconds=None,  # a path that a clock has ended ends where it did
    )
