"""What ``--draft`` means: a draft model, a head, a drafter that copies, a chain, or "auto"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llamabranch as lb
from llamabranch import ConfigError, Drafter, Model, hub

from .console import Console
from .options import FOLDER_OPTIONS, Given, load

Names = tuple[str, tuple[str, ...]]  # of a target and of its drafters
SUFFIX = "suffix"  # copies from the text
EAGER = "suffix:1"  # the same, but one token that occurred before is enough
MTP = "mtp"  # the target's own MTP layers
GRAMMAR = "grammar"  # drafts tokens that the grammar forces; others come from the rest of the chain


def resolve(
    given: Given, console: Console, *, has_grammar: bool = False, always: bool = False
) -> Names:
    """Return the names of a target and of its drafters, without loading weights.

    Without ``--draft`` and with "auto" the target's own MTP layers draft, or the model that models.txt
    lists for it. Otherwise tokens are copied from the text. A grammar drafts first. With ``always``,
    the choice of ``speculate``, the bundled pair replaces a default model that has no draft, and a
    single equal token is enough to copy.
    """
    named, draft = given.model, given.draft
    is_auto = draft in (None, "auto")
    is_free = always and is_auto and named is None
    target = hub.default_model() if is_free else given.announce(console)
    has_mtp = Model.head_kind(hub.resolve(target, download=None)) == MTP
    if draft == MTP and not has_mtp:
        message = f"{target} has no MTP layers that llama.cpp supports"
        hint = "for MTP layers in a file of their own use --draft FILE"
        raise lb.errors.UnsupportedError(message, hint=hint)
    if draft is not None and draft != "auto":
        return target, parse_draft(draft)
    found = MTP if has_mtp else hub.draft_for(target)
    if found not in (None, MTP):
        try:
            hub.resolve(found, download=None)
        except ConfigError:  # the download is not allowed
            found = None
    if always and found is None and named is None:
        target, found = hub.BUNDLED_TARGET, hub.BUNDLED_DRAFT
    if not always and draft == "auto":
        console.note(f"draft: {found or SUFFIX}")
    elif always and found is None:
        console.note(f"no draft is listed for {target}: drafts are copied from the text")
    elif always and named is None and not console.silent:
        console.note(f"model: {target}, drafts: {found} (-m and -md name others)")
    first = (GRAMMAR,) if has_grammar else ()
    return target, (*first, found or (EAGER if always else SUFFIX))


def parse_draft(given: str) -> tuple[str, ...]:
    """Return the drafters of a chain in order, () for "none"; ConfigError for an invalid chain.

    ``suffix``, ``grammar``, ``mtp`` and ``none`` are never file names; a file may have a + in
    its name.
    """
    if given == "none":
        return ()
    whole = given == SUFFIX or "+" not in given or Path(given).expanduser().is_file()
    parts = (given,) if whole else tuple(given.split("+"))
    if GRAMMAR in parts[1:]:
        raise ConfigError("grammar comes first in a chain", hint="for example grammar+suffix")
    for part in parts:
        if part in ("", "none"):
            hint = "for example suffix+tale-draft"
            raise ConfigError(f"{given!r} is not a chain of drafters", hint=hint)
        if part not in (MTP, SUFFIX, EAGER, GRAMMAR):
            hub.resolve(part, download=None)
    return parts


def open_pair(
    given: Given, names: Names, console: Console, **more: Any
) -> tuple[lb.Context, Drafter]:
    """Open a target and its drafters by their ``names`` from `resolve`; ``more`` is for `Given.open`."""
    target, parts = names
    context = given.open(target, console, load_mtp=MTP in parts, **more)
    drafters = [_open(part, given, context, console) for part in parts if part != GRAMMAR]
    if GRAMMAR in parts:
        return context, lb.GrammarDrafter(_chain(drafters) if drafters else None)
    return context, _chain(drafters)


def _chain(drafters: Sequence[Drafter]) -> Drafter:
    if not drafters:
        return lb.speculative.NullDrafter()
    return drafters[0] if len(drafters) == 1 else lb.ChainDrafter(drafters)


def _open(part: str, given: Given, target: lb.Context, console: Console) -> Drafter:
    """Open a drafter: one that copies, a draft model, or a head, in the target's file or its own."""
    if part in (SUFFIX, EAGER):
        return lb.SuffixDrafter(min_match=1 if part == EAGER else 2)
    if part == MTP:
        ctx = console.resources.enter_context(lb.Context(target.model, target=target))
    else:
        options = given.load_options() | {"n_ctx": target.n_ctx, "n_seq_max": target.n_seq_max}
        for name in ("chat_template", *FOLDER_OPTIONS.split()):
            options.pop(name, None)
        is_head = Model.is_head(hub.resolve(part, download=None))
        ctx = load(part, console, target=target if is_head else None, **options)
    if ctx.target is None:
        return lb.ModelDrafter(ctx)
    return lb.EagleDrafter(ctx) if ctx.model.target_layers else lb.MTPDrafter(ctx)
