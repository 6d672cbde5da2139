"""What ``--draft`` means: a draft model, a head, a drafter that copies, a chain, or "auto"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import llamabranch as lb
from llamabranch import ConfigError, Drafter, Model, hub

from .console import Console

SUFFIX = "suffix"  # copies from the text
EAGER = "suffix:1"  # the same, after a single token that occurred before
MTP = "mtp"  # the target's own MTP layers
GRAMMAR = "grammar"  # drafts tokens that the grammar forces; others come from the rest of the chain


def choose_drafters(
    named: str | None, draft: str | None, console: Console, *, has_grammar: bool, always: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the names of a target and of its drafters, without loading weights.

    ``named`` and ``draft`` are the values of ``--model`` and ``--draft``. Without ``--draft`` a grammar
    drafts, if there is one. Otherwise "auto" takes the target's own MTP layers, the draft that
    models.txt lists for it, or copies from the text. With ``always``, the choice of ``speculate``, a
    grammar drafts first, the bundled pair replaces a default model that has no draft, and a single
    equal token is enough to copy.
    """
    target = hub.default_model() if named is None else named
    has_mtp = Model.head_kind(hub.resolve(target, download=None)) == MTP
    if draft == MTP and not has_mtp:
        message = f"{target} has no MTP layers that llama.cpp supports"
        hint = "for MTP layers in a file of their own use --draft FILE"
        raise lb.errors.UnsupportedError(message, hint=hint)
    if draft not in (None, "auto"):
        return target, parse_draft(draft)
    if has_grammar and draft is None and not always:
        return target, (GRAMMAR, SUFFIX)
    found = MTP if has_mtp else hub.draft_for(target)
    if found not in (None, MTP):
        try:
            hub.resolve(found, download=None)
        except ConfigError:  # the download is not allowed
            found = None
    if not always:
        if draft == "auto":
            console.note(f"draft: {found or SUFFIX}")
        return target, (found or SUFFIX,)
    if found is None and named is None:
        target, found = hub.BUNDLED_TARGET, hub.BUNDLED_DRAFT
    if found is None:
        console.note(f"no draft is listed for {target}: drafts are copied from the text")
    elif named is None and not console.silent:
        console.note(f"model: {target}, drafts: {found} (-m and -md name others)")
    drafters = (found or EAGER,)
    return target, (GRAMMAR, *drafters) if has_grammar else drafters


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


def make_drafter(parts: Sequence[str], open_model: Callable[[str], lb.context.Context]) -> Drafter:
    """Open the models that ``parts`` name, and return the drafter.

    ``open_model`` opens a model by its name, or ``mtp``. It opens heads for the target.
    """
    if parts and parts[0] == GRAMMAR:
        return lb.GrammarDrafter(make_drafter(parts[1:], open_model) if len(parts) > 1 else None)

    def make(part: str) -> Drafter:
        if part in (SUFFIX, EAGER):
            return lb.SuffixDrafter(min_match=1 if part == EAGER else 2)
        ctx = open_model(part)
        if ctx.target is None:
            return lb.ModelDrafter(ctx)
        return lb.EagleDrafter(ctx) if ctx.model.target_layers else lb.MTPDrafter(ctx)

    drafters = [make(part) for part in parts]
    if not drafters:
        return lb.speculative.NullDrafter()
    return drafters[0] if len(drafters) == 1 else lb.ChainDrafter(drafters)
