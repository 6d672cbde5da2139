"""The file of a run: a head for each call of `Agent.run`, and a line for each of its steps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from ..errors import ConfigError, LlamaBranchWarning, ParseError, warn
from ..model import Model
from ..model.model import token_piece
from ..native import forkable_lock
from .report import Report, Step
from .tools import Settings, fork

__all__ = ["Journal", "Recorded", "begins_a_run", "head", "read"]

_FORMAT = "llamabranch-agent"
# The arguments of an agent that are JSON as they are.
_SETTINGS = (
    "messages", "name", "about", "tool_choice", "parallel_calls", "max_turns", "max_tokens",
    "max_seconds", "tool_seconds", "result_tokens", "think", "forks", "repeats",
)  # fmt: skip


class Journal:
    """Appends the lines of one run to a file.

    A line is written with one call of the system, so several runs may have the same file.

    Args:
        path: the file.
        run: the name of this run, which each of its lines has.
        model: the texts of its tokens are written with the first step that has them.

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
        """End the last line, if a process ended while it wrote it."""
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
            line["pieces"] = {token: token_piece(self._model, token) for token in new}
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


class Recorded:
    """A run as it was written.

    Attributes:
        head: its first line.
        steps: the steps of each path, in order.
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


def head(
    agent: Settings, tasks: Sequence[str], n: int, after: Report | None, seed: int
) -> dict[str, object]:
    """Return the first line of a run: the model, the arguments of the agent, and its tasks.

    Raises:
        UnsupportedError: a setting is a function, which cannot be written.
    """
    context, before = agent.context, None
    if after is not None:
        before = {
            "messages": after.messages, "tokens": after.tokens,
            "finish_reason": after.finish_reason,
        }  # fmt: skip
    return {
        "format": _FORMAT, "version": 1, "model": context.model.name,
        "fingerprint": context.model.fingerprint, "kv_type": context.kv_type,
        "exact": context.capabilities.batch_invariant, "seed": seed, "tasks": list(tasks), "n": n,
        "after": before, "agent": _arguments(agent),
    }  # fmt: skip


def _arguments(agent: Settings) -> dict[str, object]:
    tools = [
        {"function": tool.described} if tool.agent is None else {"agent": _arguments(tool.agent)}
        for tool in agent.tools.values()
        if tool.function is not fork
    ]
    grammar, settings = agent.grammar, {name: getattr(agent, name) for name in _SETTINGS}
    output = None if grammar is None else grammar.source
    return {**settings, "tools": tools, "output": output, "sampling": agent.sampling.as_dict()}
