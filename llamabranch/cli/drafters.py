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
    target: str, given: str | None, console: Console, *, has_grammar: bool
) -> tuple[str, ...]:
    """Return the names of the drafters for a target, without loading weights.

    ``given`` is the value of ``--draft``. If it is None, a grammar drafts if there is one;
    otherwise "auto" chooses. The choice of "auto" is printed to standard error.
    """
    if has_grammar and given is None:
        return parse_draft("grammar+suffix")
    has_mtp = Model.head_kind(hub.resolve(target, download=None)) == MTP
    if given == MTP and not has_mtp:
        message = f"{target} has no MTP layers that llama.cpp supports"
        hint = "for MTP layers in a file of their own use --draft FILE"
        raise lb.errors.UnsupportedError(message, hint=hint)
    if given not in (None, "auto"):
        return parse_draft(given)
    found = MTP if has_mtp else _listed(target) or SUFFIX
    if given == "auto":
        console.note(f"draft: {found}")
    return (found,)


def always_drafting(
    target: str | None, console: Console, *, has_grammar: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the names of a target and of its drafters, which always draft; print the choice.

    The drafter is the target's own MTP layers, or the draft that is listed for it. If there is neither,
    the bundled pair is used. A ``target`` then gets copied drafts, after a single equal token, so that
    there is something to see. A grammar drafts first.
    """
    name = hub.default_model() if target is None else target
    has_mtp = Model.head_kind(hub.resolve(name, download=None)) == MTP
    found = MTP if has_mtp else _listed(name)
    if found is None and target is None:
        name, found = hub.BUNDLED_TARGET, hub.BUNDLED_DRAFT
    if found is None:
        console.note(f"no draft is listed for {name}: drafts are copied from the text")
    elif target is None and not console.silent:
        console.note(f"model: {name}, drafts: {found} (-m and -md name others)")
    drafters = (EAGER if found is None else found,)
    return name, (GRAMMAR, *drafters) if has_grammar else drafters


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
        if part != MTP and is_model(part):
            hub.resolve(part, download=None)
    return parts


def is_model(part: str) -> bool:
    """Return whether a part of a chain is a model, or mtp."""
    return part not in (SUFFIX, EAGER, GRAMMAR)


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


def _listed(target: str) -> str | None:
    """Return the draft that models.txt lists for a target; it is downloaded if needed and allowed."""
    listed = hub.draft_for(target)
    if listed is not None:
        try:
            hub.resolve(listed, download=None)
        except ConfigError:  # the download is not allowed
            return None
    return listed
