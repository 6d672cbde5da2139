"""What ``--draft`` means: a draft model, a head, a drafter that copies, a chain, or "auto"."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import llamabranch as lb
from llamabranch import ConfigError, Drafter, Model, hub

from .console import Console

SUFFIX = "suffix"  # copies from the text
EAGER = "suffix:1"  # the same, after a single token that occurred before
MTP = "mtp"  # the target's own MTP layers
GRAMMAR = "grammar"  # drafts tokens that the grammar forces; others come from the rest of the chain

LARGEST_SHARE = 0.5  # share of the target's bytes and parameters; a larger draft model cannot pay
BEST_SHARE = 0.1
MOST = 6  # the most models whose vocabularies are compared; a large vocabulary takes a second


def choose_drafters(
    target: str, given: str | None, console: Console, *, has_grammar: bool
) -> tuple[str, ...]:
    """Return the names of the drafters for a target, without loading weights.

    ``given`` is the value of ``--draft``. If it is None, a grammar drafts if there is one;
    otherwise "auto" chooses. The choice of "auto" is printed to standard error.
    """
    path = hub.resolve(target, download=None)
    if has_grammar and given is None:
        return parse_draft("grammar+suffix")
    if given in (None, "auto", MTP) and Model.head_kind(path) == MTP:
        if given != MTP:
            console.note("draft: mtp, the target's own MTP layers")
        return (MTP,)
    if given == MTP:
        message = f"{target} has no MTP layers that llama.cpp supports"
        hint = "for MTP layers in a file of their own use --draft FILE"
        raise lb.errors.UnsupportedError(message, hint=hint)
    listed = hub.draft_for(target)
    entry = None if listed is None else hub.find_entry(listed)
    if given is None and entry is not None and entry.path is not None:
        given = listed
    if given not in (None, "auto"):
        return parse_draft(given)
    fittest = _fittest(target)
    if fittest is None:
        console.note(
            f"there is no smaller model here to draft for {target}: copying from the text (suffix)"
        )
        return ("suffix",)
    # A draft model that models.txt does not list for this target may not pay. So copying comes
    # first; it costs next to nothing.
    first = () if fittest == listed else ("suffix",)
    console.note(f"draft: {'+'.join((*first, fittest))}")
    return (*first, *parse_draft(fittest))


def always_drafting(
    target: str | None, console: Console, *, has_grammar: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the names of a target and of its drafters, which always draft; print the choice.

    The drafter is the target's own MTP layers, or the best draft model. If there is neither, the
    bundled pair is used. A ``target`` then gets copied drafts, after a single equal token, so that
    there is something to see. A grammar drafts first.
    """
    name = hub.default_model() if target is None else target
    has_mtp = Model.head_kind(hub.resolve(name, download=None)) == MTP
    found = MTP if has_mtp else _fittest(name)
    if found is None and target is None:
        name, found = hub.BUNDLED_TARGET, hub.BUNDLED_DRAFT
    if found is None:
        console.note(
            f"there is no smaller model here to draft for {name}: drafts are copied from the text"
        )
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


# -- models that could draft ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PossibleDraft:
    """A model that could draft for a target.

    Attributes:
        name: its name for ``--draft``.
        path: its file, None if it is not on this machine.
        size_bytes: the size of its file; rounded if it is not on this machine.
        listed: whether models.txt lists it for this target.
    """

    name: str
    path: Path | None
    size_bytes: int
    listed: bool


def possible_drafts(target: str) -> list[PossibleDraft]:
    """Return the models that could draft for a target that is on this machine, the best first.

    First comes the draft that models.txt lists. Then come the models on this machine with the same
    vocabulary, beginning with those of about a tenth of the target's size. Models with more than half of
    the target's parameters, such as another quantization of the target, are left out.
    """
    path, listed = hub.resolve(target), hub.draft_for(target)
    size, drafts = _size(path), list[PossibleDraft]()
    with Model(path, vocab_only=True) as model:
        if not model.has_text:
            return []
        nearby = sorted(
            (abs(math.log(max(_size(file) / size, 1e-9) / BEST_SHARE)), name, file)
            for name, file in _present(listed).items()
            if not file.samefile(path) and _size(file) <= LARGEST_SHARE * size
        )
        for _, name, file in nearby[:MOST]:
            with (
                contextlib.suppress(lb.errors.ModelLoadError),
                Model(file, vocab_only=True) as draft,
            ):
                if name != listed and Model.is_head(file):
                    continue  # a head fits only one model
                if model.compatibility(draft) and draft.n_params <= LARGEST_SHARE * model.n_params:
                    drafts.append(PossibleDraft(name, file, _size(file), name == listed))
    entry = None if listed is None else hub.find_entry(listed)
    if entry is not None and entry.path is None and not any(possible.listed for possible in drafts):
        drafts.append(PossibleDraft(entry.name, None, entry.size_bytes, True))
    return sorted(drafts, key=lambda possible: not possible.listed)


def _fittest(target: str) -> str | None:
    """Return the name of the best draft model, or None. It is downloaded if needed and allowed."""
    for possible in possible_drafts(target):
        with contextlib.suppress(ConfigError):  # the download is not allowed
            if possible.path is None:
                hub.resolve(possible.name, download=None)
            return possible.name
    return None


def _present(listed: str | None) -> dict[str, Path]:
    """Return the models on this machine by name: one name for each file."""
    named: dict[str, Path] = {}
    for entry in hub.catalogue():
        path = entry.path
        if path is not None and (entry.name == listed or entry.role == "draft"):
            named[entry.name] = path
    known = {path.resolve() for path in named.values()}
    for model in hub.local_models():
        if model.path.resolve() not in known:
            known.add(model.path.resolve())
            named[str(model.path) if model.cache == "llamabranch" else model.name] = model.path
    return named


def _size(path: Path) -> int:
    """Return the size of a model in bytes, all shards together."""
    return sum(part.stat().st_size for part in hub.parts(path))
