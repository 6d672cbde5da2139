"""What ``--draft`` means: a draft model, a head, a drafter that copies, a chain, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from llamabranch import (
    ChainDrafter,
    ConfigError,
    Context,
    Drafter,
    EagleDrafter,
    GrammarDrafter,
    LlamaBranchError,
    Model,
    ModelDrafter,
    MTPDrafter,
    NullDrafter,
    PromptLookupDrafter,
    SpeculativeConfig,
    SuffixDrafter,
    hub,
)

from .console import Console

__all__ = [
    "COPYING",
    "MTP",
    "drafting_models",
    "has_model",
    "is_model",
    "make_drafter",
    "note_translation",
    "parse_draft",
    "tree_sequences",
]

# Packages declare a drafter's class, or a function, by a name.
ENTRY_POINTS = "llamabranch.drafters"

# One request at a time: a shared index would let a repeated run copy its own text.
COPYING: dict[str, Callable[[], Drafter]] = {
    "lookup": PromptLookupDrafter,
    "suffix": lambda: SuffixDrafter(shared_tokens=0),
}

MTP = "mtp"  # the target's own MTP layers
# What the text's grammar forces, and what follows in the chain where it does not.
GRAMMAR = "grammar"


def parse_draft(given: str, find: Callable[[str], Path] = hub.resolve) -> tuple[str, ...]:
    """Return the drafters of a chain in order, () for "none".

    ``lookup``, ``suffix``, ``grammar``, ``mtp``, ``none`` and the names of installed drafters are never
    file names; a file may have a + in its name.
    ``find`` is called with the name of each model, and raises if there is no such model.

    Raises:
        ConfigError: a model that is not on this machine, or an invalid chain.
    """
    if given == "none":
        return ()
    whole = given in COPYING or "+" not in given or Path(given).expanduser().is_file()
    parts = (given,) if whole else tuple(given.split("+"))
    if GRAMMAR in parts[1:]:
        raise ConfigError("grammar comes first in a chain", hint="for example grammar+suffix")
    for part in parts:
        if part in ("", "none"):
            raise ConfigError(
                f"{given!r} is not a chain of drafters", hint="for example suffix+tale-draft"
            )
        if part.isdecimal() and not Path(part).exists():
            raise ConfigError(
                f"--draft names what drafts, not {part}",
                hint=f"--draft-length {part} drafts that many tokens",
            )
        if part != MTP and is_model(part):
            find(part)
    return parts


def is_model(part: str) -> bool:
    """Return whether a part of a chain is a model, or mtp: neither a copying drafter nor installed."""
    return part not in COPYING and part != GRAMMAR and part not in _installed()


def _installed() -> dict[str, EntryPoint]:
    """Return the drafters that installed packages declare, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _make_installed(name: str) -> Drafter:
    """Return the drafter that an installed package declares under a name.

    Raises:
        ConfigError: it cannot be imported, or is no drafter.
    """
    point = _installed()[name]
    package = "a package" if point.dist is None else point.dist.name
    try:
        drafter = point.load()()
    except LlamaBranchError:
        raise
    except Exception as error:  # whatever the package does wrong
        raise ConfigError(
            f"the drafter {name!r} of {package} failed: {type(error).__name__}: {error}",
            hint=f"it is declared as {point.value}",
        ) from error
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"the drafter {name!r} of {package} is no Drafter but {type(drafter).__name__}",
            hint=f"{point.value} must be a class or function that returns one",
        )
    return drafter


def has_model(parts: Sequence[str]) -> bool:
    """Return whether one of the drafters is a model."""
    return any(map(is_model, parts))


def make_drafter(parts: Sequence[str], open_model: Callable[[str], Context], width: int) -> Drafter:
    """Return the drafter that ``parts`` name, with its models opened.

    ``open_model`` gets the name of each model, or ``mtp``, and opens heads for the target.

    Raises:
        ConfigError: a drafter of an installed package that does not work.
    """

    if parts and parts[0] == GRAMMAR:
        values = make_drafter(parts[1:], open_model, width) if len(parts) > 1 else None
        return GrammarDrafter(values)

    def make(part: str) -> Drafter:
        if part in COPYING:
            return COPYING[part]()
        if is_model(part):
            return _drafter_over(open_model(part), width)
        return _make_installed(part)

    drafters = [make(part) for part in parts]
    if not drafters:
        return NullDrafter()
    return drafters[0] if len(drafters) == 1 else ChainDrafter(drafters)


def _drafter_over(ctx: Context, width: int) -> Drafter:
    if ctx.target is None:
        return ModelDrafter(ctx, width=width)
    if ctx.model.target_layers:
        return EagleDrafter(ctx, width=width)
    if width > 1:
        raise ConfigError("MTP layers draft one token at each position, no trees")
    return MTPDrafter(ctx)


def drafting_models(drafter: Drafter) -> list[Model]:
    """Return the models among the drafters, in order."""
    return [context.model for context in drafter.contexts]


def note_translation(drafter: Drafter, target: Model, console: Console) -> None:
    """Print to standard error which draft models have another vocabulary than the target."""
    for model in drafting_models(drafter):
        if target.compatibility(model).path == "text":
            console.note(f"{model.name} has another vocabulary: it drafts through the text")


def tree_sequences(config: SpeculativeConfig, width: int) -> tuple[int, int]:
    """Return how many sequences trees need at most: in the target's context, in the draft's.

    The target needs one for each leaf, the draft one for each node of a level, and one for the text.
    """
    levels = config.draft_k if isinstance(config.draft_k, int) else config.max_draft_tokens
    return min(256, 1 + levels * width), 1 + width
