"""``llamabranch agent``: a task for a model that may call the functions of a Python file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path

import typer

import llamabranch as lb
from llamabranch.agents import Report, Step

from . import options as opt
from .console import Console, plural, shortened
from .files import load_functions, piped_or_read
from .interrupts import EXIT_FAILURE
from .options import TEXT, Given, argument, option, with_options

_SHOWN = 200  # characters of a call's result that are shown
# Notes on an incomplete answer, by its ``finish_reason``.
_ENDS = {
    "length": "the answer has reached the limit of tokens: -n",
    "capacity": "the context is full: -c sets a larger one",
    "turns": "the limit of turns is reached: --max-turns",
    "time": "the limit of seconds is reached: -S max_seconds=S",
    "repeats": "it only repeated calls",
}


@with_options(
    f"model system max_tokens schema {opt.SAMPLING_OPTIONS} {opt.MEMORY_OPTIONS} "
    f"{opt.FOLDER_OPTIONS} as_json verbose",
    kind="agent", max_tokens=2048,
)  # fmt: skip
def agent(
    given: Given,
    console: Console,
    words: list[str] | None = argument("TASK", "What to do; - is standard input."),
    tools: list[Path] | None = option(TEXT, "--tools FILE.py", "Functions to call; it is run."),
    max_turns: int = option(TEXT, "--max-turns N", "The last turn has no calls.", 8, min=1),
) -> None:
    """Do a task with a model that calls your Python functions.

    llamabranch agent -m qwen.gguf --tools tools.py "Do I need a coat in Oslo?"
    cat task.txt | llamabranch agent --tools tools.py -n 500 --max-turns 4

    -n counts the tokens of all turns. -S also sets tool_choice, thinking,
    parallel_tool_calls, max_seconds, tool_seconds, result_tokens, repeats, forks.
    """
    text = " ".join(piped_or_read(words or []))
    if not text.strip():
        hint = 'llamabranch agent --tools tools.py "What is the weather in Oslo?"'
        raise lb.ConfigError("no task was given", hint=hint)
    functions = [f for path in tools or () for f in load_functions(path)]
    context = given.open(given.announce(console), console)
    run = lb.Agent(
        context, given.system or (), functions, given.schema_text, max_turns=max_turns,
        max_tokens=context.n_ctx if given.max_tokens is None else given.max_tokens,
        sampling=given.params(given.seed), **given.set("agent"),
    )  # fmt: skip
    console.out.file = sys.stdout
    # Functions may print too; only the answer goes to standard output.
    with contextlib.redirect_stdout(sys.stderr):
        report = _show(console, run.stream(text))
    names = (
        "text", "finish_reason", "limit", "messages", "seed",
        "evaluated", "cached", "reread", "generated", "seconds", "tokens_per_second",
    )  # fmt: skip
    calls = [{"name": call.name, "arguments": call.arguments} for call in report.calls]
    answer = {name: getattr(report, name) for name in names}
    console.answer({**answer, "calls": calls})
    if not console.silent:
        read = f"{plural(report.evaluated, 'token')} read, {report.cached:,} cached"
        wrote = f"{report.generated:,} generated in {report.seconds:.1f} s"
        console.note(f"{plural(len(calls), 'call')}; {read}, {wrote}")
    if report.finish_reason in _ENDS:
        console.note(_ENDS[report.finish_reason])
        raise typer.Exit(EXIT_FAILURE)


def _show(console: Console, steps: Iterable[Step]) -> Report:
    """Print steps as they happen, and the answer's text; return the report.

    Raises:
        LlamaBranchError: the error that ended the run.
    """
    is_live, line_ends = console.out.is_terminal and not console.silent, True
    for step in steps:
        if step.kind in ("text", "thought"):
            if is_live:
                console.write(step.text, "dim" if step.kind == "thought" else "")
                line_ends = step.text.endswith("\n")
            continue
        if step.kind in ("call", "end") and not line_ends:
            console.write("\n")
            line_ends = True
        if step.kind == "call":
            console.note(f"{step.name} {step.text}")
        elif step.kind == "result":
            console.note(f"  {shortened(step.text, _SHOWN)}")
        elif step.report is not None:
            if step.report.error is not None:
                raise step.report.error
            if not is_live:
                console.write(step.report.text + "\n")
            return step.report
    raise lb.LlamaBranchError("the run ended without a report")
