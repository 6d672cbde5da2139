"""``llamabranch select``: which of several texts the model prefers after a prompt."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from llamabranch import Branch, ConfigError
from llamabranch.search import select as choose

from .bundles import option, with_bundles
from .console import print_json
from .options import (
    REQUESTS,
    ChatOptions,
    OutputOptions,
    ParseSpecial,
    RuntimeOptions,
    TargetOptions,
    one_prompt,
)
from .search_report import print_tree, stats_text

_SEQUENCES = 33


@dataclass(frozen=True)
class ChoiceArguments:
    """The prompt and the texts that may follow it."""

    panel: ClassVar[str] = REQUESTS

    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT CHOICE",
            help="What comes before, - for standard input, and the texts that may follow. Begin them "
            "with a space where the text needs one.",
            rich_help_panel="Arguments",
        ),
    ] = None
    prompt_option: str | None = option(
        None, "The prompt: all arguments are choices then.", "--prompt", "-p"
    )
    file: Path | None = option(
        None, "A file whose text is the prompt, without its last newline.", "--file", "-f"
    )
    more_choices: list[str] | None = option(None, "A text that may follow.", "--choice")
    method: str = option(
        "mean",
        "How a choice is scored from the log-probabilities of its tokens.",
        metavar="mean|greedy|contrast|sum|bytes",
    )
    parse_special: ParseSpecial = True


@dataclass(frozen=True)
class TreeOutput(OutputOptions):
    """How the choices are shown."""

    tree: bool = option(False, "Draw the choices as a tree.", "--tree")


@with_bundles
def select(
    *,
    given: ChoiceArguments,
    models: TargetOptions,
    runtime: RuntimeOptions,
    output: TreeOutput,
) -> None:
    """Score several texts as the continuation of a prompt and print the best.

    All choices are decoded together, beginnings that they have in common once.
    """
    with output.console() as console, ExitStack() as stack:
        arguments = list(given.texts or ())
        first = (
            arguments.pop(0)
            if arguments and given.prompt_option is None and given.file is None
            else None
        )
        prompt = one_prompt(first, given.prompt_option, given.file)
        choices = [*arguments, *(given.more_choices or ())]
        if prompt is None or not choices:
            raise ConfigError(
                "select needs a prompt and a choice", hint='select "The king was" " old" " ill"'
            )
        if any(not choice for choice in choices):
            raise ConfigError("a choice must not be empty")
        name = models.announce(console)
        models.find(name)
        special = ChatOptions(parse_special=given.parse_special)
        runtime = runtime.with_room(name, "".join((prompt, *choices)), 0, special)
        context = runtime.open(name, console, stack, n_seq_max=_SEQUENCES)
        found = choose(
            Branch.start(context, prompt, parse_special=given.parse_special),
            choices,
            method=given.method,
        )
        if output.as_json:
            print_json({"prompt": prompt, "method": given.method, **found.as_dict()})
            return
        if output.tree:
            print_tree(console, found.tree, prompt)
        order = sorted(range(len(choices)), key=lambda i: (i != found.index, -found.scores[i]))
        console.table(
            ("choice", "score", "log p, nats", "tokens"),
            [
                (
                    choices[i],
                    f"{found.scores[i]:.4f}",
                    f"{sum(found.logprobs[i]):.3f}",
                    str(len(found.tokens[i])),
                )
                for i in order
            ],
        )
        console.line(stats_text(found.stats), "dim")
