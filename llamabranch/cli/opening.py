"""Opens a target and what drafts for it, for the commands that generate."""

from __future__ import annotations

from contextlib import ExitStack

from llamabranch import Context, Drafter

from ..loading import LoadOptions
from .console import Console
from .drafters import MTP, make_drafter, note_translation
from .options import RuntimeOptions

__all__ = ["open_pair"]


def open_pair(
    runtime: RuntimeOptions,
    names: tuple[str, tuple[str, ...]],
    console: Console,
    stack: ExitStack,
    of_target: LoadOptions,
    of_drafts: LoadOptions,
    *,
    width: int = 1,
) -> tuple[Context, Drafter]:
    """Open a target and what drafts for it.

    Args:
        runtime: the options of all contexts.
        names: the target's, and those of its drafters, from `parse_draft`.
        console: shows progress, and a note where a draft passes through the text.
        stack: closes the contexts.
        of_target, of_drafts: options that take precedence over ``runtime``.
        width: as for `make_drafter`.
    """
    target, drafters = names
    of_target = LoadOptions(**of_target, load_mtp=MTP in drafters)
    context = runtime.open(target, console, stack, **of_target)

    def open_draft(name: str) -> Context:
        return runtime.open_draft(name, context, console, stack, **of_drafts)

    drafter = make_drafter(drafters, open_draft, width)
    note_translation(drafter, context.model, console)
    return context, drafter
