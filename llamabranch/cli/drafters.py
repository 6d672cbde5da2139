"""What ``--draft`` means: a draft model, a head, a drafter that copies, or a chain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import llamabranch as lb
from llamabranch import ConfigError, Context, Drafter, Model, hub

from .console import Console

# One request at a time: a shared index would let a repeated run copy its own text.
COPYING: dict[str, Callable[[], Drafter]] = {
    "lookup": lb.speculative.PromptLookupDrafter,
    "suffix": lambda: lb.SuffixDrafter(shared_tokens=0),
}
MTP = "mtp"  # the target's own MTP layers
GRAMMAR = "grammar"  # what the text's grammar forces, else what follows in the chain


def choose_drafters(
    target: str, given: str | None, console: Console, *, has_grammar: bool
) -> tuple[str, ...]:
    """Return the names of the drafters for a target, all found before any model is loaded.

    Where ``--draft`` was not ``given`` the grammar drafts if there is one, else what "auto" takes: the
    target's own MTP layers, the draft that models.txt lists, downloaded if it may be, or copies.
    """
    path = hub.resolve(target, download=None)
    if has_grammar and given is None:
        return parse_draft("grammar+suffix")
    if given in (None, "auto", MTP):
        if Model.head_kind(path) == MTP:
            if given != MTP:
                console.note("draft: mtp, the target's own MTP layers")
            return (MTP,)
        if given == MTP:
            raise lb.errors.UnsupportedError(
                f"{target} has no MTP layers that llama.cpp computes",
                hint="`llamabranch models show` lists what a file offers; --draft FILE takes MTP "
                "layers that are in a file of their own",
            )
    if given not in (None, "auto"):
        return parse_draft(given)
    listed = hub.draft_for(target)
    if listed is not None:
        with contextlib.suppress(ConfigError):  # it is not here, and may not be downloaded
            found = parse_draft(listed)
            if given is not None:
                console.note(f"draft: {listed}")
            return found
    console.note(f"no draft model is known for {target}: copying from the text (suffix)")
    return ("suffix",)


def parse_draft(given: str) -> tuple[str, ...]:
    """Return the drafters of a chain in order, () for "none"; ConfigError for an invalid chain.

    ``lookup``, ``suffix``, ``grammar``, ``mtp`` and ``none`` are never file names; a file may have a + in
    its name.
    """
    if given == "none":
        return ()
    whole = given in COPYING or "+" not in given or Path(given).expanduser().is_file()
    parts = (given,) if whole else tuple(given.split("+"))
    if GRAMMAR in parts[1:]:
        raise ConfigError("grammar comes first in a chain", hint="for example grammar+suffix")
    for part in parts:
        if part in ("", "none"):
            hint = "for example suffix+tale-draft"
            raise ConfigError(f"{given!r} is not a chain of drafters", hint=hint)
        if part.isdecimal() and not Path(part).exists():
            hint = f"--draft-max {part} drafts that many tokens"
            raise ConfigError(f"--draft names what drafts, not {part}", hint=hint)
        if part != MTP and is_model(part):
            hub.resolve(part, download=None)
    return parts


def is_model(part: str) -> bool:
    """Return whether a part of a chain is a model, or mtp."""
    return part not in COPYING and part != GRAMMAR


def has_model(parts: Sequence[str]) -> bool:
    """Return whether one of the drafters is a model."""
    return any(map(is_model, parts))


def make_drafter(parts: Sequence[str], open_model: Callable[[str], Context]) -> Drafter:
    """Return the drafter that ``parts`` name, with its models opened.

    ``open_model`` gets the name of each model, or ``mtp``, and opens heads for the target.
    """
    if parts and parts[0] == GRAMMAR:
        return lb.GrammarDrafter(make_drafter(parts[1:], open_model) if len(parts) > 1 else None)

    def make(part: str) -> Drafter:
        if part in COPYING:
            return COPYING[part]()
        ctx = open_model(part)
        if ctx.target is None:
            return lb.ModelDrafter(ctx)
        return lb.EagleDrafter(ctx) if ctx.model.target_layers else lb.MTPDrafter(ctx)

    drafters = [make(part) for part in parts]
    if not drafters:
        return lb.speculative.NullDrafter()
    return drafters[0] if len(drafters) == 1 else lb.ChainDrafter(drafters)


def note_translation(drafter: Drafter, target: Model, console: Console) -> None:
    """Print to standard error which draft models have another vocabulary than the target."""
    for context in drafter.contexts:
        if target.compatibility(context.model).path == "text":
            console.note(f"{context.model.name} has another vocabulary: it drafts through the text")
