"""``llamabranch agent``: a task for a model that may call the functions of a Python file."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import typer

import llamabranch as lb
from llamabranch.agents import Report, Step

from ..loading import LoadOptions
from .bundles import argument, option, with_bundles
from .console import Console, shortened
from .files import load_functions, read_piped_text, read_standard_input
from .interrupts import EXIT_FAILURE
from .options import DEFAULTS, TEXT, DrawFlags, ModelFlags, OutputFlags, trained_length

_CELLS = 8192  # cells of the cache, unless -c is given or the model was trained for less
_SHOWN = 200  # characters of a call's result that are shown
# Notes on an incomplete answer, by its ``finish_reason``.
_ENDS = {
    "length": "the answer has reached the limit of tokens",
    "capacity": "the context is full: -c sets a larger one",
    "turns": "the limit of turns is reached",
}


@dataclass(frozen=True)
class AgentFlags:
    """The task, and the functions that the model may call."""

    panel: ClassVar[str] = TEXT
    first: ClassVar[str] = "tools system"

    words: list[str] | None = argument("What to do; - reads standard input.", metavar="TASK")
    tools: list[Path] | None = option(
        None,
        "A Python file whose functions may be called; they need annotations and docstrings. The file is "
        "run. May be repeated.",
        "--tools",
        metavar="FILE.py",
    )
    system: str | None = option(None, "The system message before the task.", "--system-prompt -sys")

    def task(self) -> str:
        """Return the task, or the text that is piped in; ConfigError if there is neither."""
        words = self.words or []
        text = read_standard_input() if words == ["-"] else " ".join(words)
        text = text or read_piped_text() or ""
        if not text.strip():
            hint = 'llamabranch agent --tools tools.py "What is the weather in Oslo?"'
            raise lb.ConfigError("no task was given", hint=hint)
        return text


@with_bundles
def agent(
    *, task: AgentFlags, sampling: DrawFlags, models: ModelFlags, output: OutputFlags
) -> None:
    """Do a task with a model that may call the functions of a Python file.

    Steps are shown as they happen; if the output is a pipe they go to standard error. Ctrl-C ends
    the run.
    """
    with output.console() as console:
        text = task.task()
        functions = [f for path in task.tools or () for f in load_functions(path)]
        params = DEFAULTS.replace(
            **{"temperature": sampling.temperature, "seed": sampling.seed, **models.set("sampling")}
        )
        name = models.announce(console)
        more = LoadOptions()
        if models.n_ctx is None:
            more = LoadOptions(n_ctx=min(_CELLS, trained_length(name) or _CELLS))
        context = models.open(name, console, **more)
        run = lb.Agent(context, task.system or (), functions, sampling=params)
        console.out.file = sys.stdout
        # Functions may print too; only the answer goes to standard output.
        with contextlib.redirect_stdout(sys.stderr):
            report = show(console, run.stream(text))
        console.answer(_as_json(report))
        if report.finish_reason in _ENDS:
            console.note(_ENDS[report.finish_reason])
            raise typer.Exit(EXIT_FAILURE)


def show(console: Console, steps: Iterable[Step]) -> Report:
    """Print steps as they happen, and the answer's text; return the report.

    Raises:
        LlamaBranchError: the error that ended the run.
    """
    report: Report | None = None
    is_live = console.out.is_terminal and not console.silent
    line = ""  # the text of the running turn so far
    for step in steps:
        if step.kind in ("text", "thought"):
            if is_live:
                console.write(step.text, "dim" if step.kind == "thought" else "")
            line += step.text
            continue
        if step.kind in ("call", "end") and line and not line.endswith("\n") and is_live:
            console.write("\n")
        line = "" if step.kind != "prompt" else line
        if step.kind == "call":
            console.note(f"{step.name}({_arguments(step.text)})")
        elif step.kind == "result":
            console.note(f"  {shortened(step.text, _SHOWN)}")
        elif step.kind == "reread":
            console.note(
                f"({step.n} tokens are processed again: the template now writes them differently)"
            )
        elif step.report is not None:
            report = step.report
    if report is None:
        raise lb.LlamaBranchError("the run ended without a report")
    if report.error is not None:
        raise report.error
    if not is_live:
        console.write(report.text + "\n")
    return report


def _arguments(text: str) -> str:
    """Return the arguments of a call in the form ``name="text", n=1``."""
    arguments: Any = json.loads(text)
    if not isinstance(arguments, dict):
        return text
    return ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())


def _as_json(report: Report) -> dict[str, object]:
    return {
        "text": report.text,
        "finish_reason": report.finish_reason,
        "limit": report.limit,
        "calls": [{"name": call.name, "arguments": call.arguments} for call in report.calls],
        "messages": report.messages,
        "seed": report.seed,
        "stats": vars(report.stats),
    }
