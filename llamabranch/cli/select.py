"""``llamabranch select``: which of several texts the model prefers after a prompt."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from llamabranch import Branch, ConfigError, hub
from llamabranch.search import select as choose

from ..loading import LoadOptions
from .bundles import with_bundles
from .console import print_json
from .options import OUTPUT, REQUESTS, RUNTIME, HubOptions, LoadingOptions, OutputOptions
from .prompts import read_standard_input
from .search_report import drawn_tree, stats_text

_SEQUENCES = 33


@with_bundles
def select(
    prompt: Annotated[str, typer.Argument(help="What comes before; - reads standard input.")],
    *,
    choices: Annotated[
        list[str],
        typer.Option(
            "--choice",
            "-c",
            help="A text that may follow; repeat it. Begin it with a space where the text needs one.",
            rich_help_panel=REQUESTS,
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            metavar="mean|greedy|contrast|sum|bytes",
            help="How a choice is scored from the log-probabilities of its tokens.",
            rich_help_panel=REQUESTS,
        ),
    ] = "mean",
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--target-model",
            "-t",
            "-m",
            "-hf",
            help="A GGUF path, a name from `llamabranch models`, or user/repo[:tag]. "
            "Default: the bundled target.",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    n_ctx: Annotated[
        int | None, typer.Option("--n-ctx", help="Context size in tokens.", rich_help_panel=RUNTIME)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads.", rich_help_panel=RUNTIME)
    ] = None,
    finding: HubOptions,
    loading: LoadingOptions,
    tree: Annotated[
        bool,
        typer.Option("--tree", help="Draw the choices as a tree.", rich_help_panel=OUTPUT),
    ] = False,
    output: OutputOptions,
) -> None:
    """Score several texts as the continuation of a prompt and print the best.

    All choices are decoded together, beginnings that they have in common once.
    """
    with output.console() as console, ExitStack() as stack:
        if any(not choice for choice in choices):
            raise ConfigError("a choice must not be empty")
        if prompt == "-":
            prompt = read_standard_input()
        name = hub.BUNDLED_TARGET if target is None else target
        finding.find(name)
        options = LoadOptions(n_seq_max=_SEQUENCES)
        if n_ctx is not None:
            options["n_ctx"] = n_ctx
        if threads is not None:
            options["n_threads"] = options["n_threads_batch"] = threads
        context = loading.open(name, console, stack, **options)
        found = choose(Branch.start(context, prompt), choices, method=method)
        if output.as_json:
            print_json({"prompt": prompt, "method": method, **found.as_dict()})
            return
        if tree:
            console.render(drawn_tree(found.tree, prompt))
            console.line()
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
