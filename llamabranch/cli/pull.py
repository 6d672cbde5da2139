"""``llamabranch pull``: downloads a model and prints where it is."""

from __future__ import annotations

from typing import Annotated

import typer

from llamabranch import hub

from .bundles import with_bundles
from .console import print_json
from .options import MODELS, OutputOptions


@with_bundles
def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="user/repo[:tag] on the Hugging Face hub, or a name of `models`."
        ),
    ],
    *,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="Use no network: print the path if the model is here.",
            rich_help_panel=MODELS,
        ),
    ] = False,
    output: OutputOptions,
) -> None:
    """Download a model if it is not on this machine, and print the path of its file.

    Of user/repo it takes Q4_K_M, else Q8_0, else the first model, as llama.cpp does. It goes into the
    Hugging Face cache, which llama.cpp and transformers share. Of a model in several parts the first is
    printed. Nothing else goes to standard output.
    """
    with output.console() as console:
        path = hub.fetch(model, offline=True if offline else None)
        if output.as_json:
            print_json({"model": model, "path": str(path)})
        else:
            console.write(f"{path}\n")
