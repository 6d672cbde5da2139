"""Which models could draft for a target: those on this machine with its vocabulary, and models.txt."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamabranch import ConfigError, Context, Model, ModelLoadError, UnsupportedError, hub, theory
from llamabranch.bench import verify_costs

__all__ = ["Candidate", "Gain", "candidates", "choose_draft", "measure"]

LARGEST_SHARE = 0.5  # of the target's bytes and of its parameters: a larger draft cannot pay
BEST_SHARE = 0.1
MOST = 6  # models whose vocabularies are compared; a large one takes a second
SIZES = (1, 2, 3, 5, 9)
ACCEPTANCES = (0.6, 0.8)


@dataclass(frozen=True)
class Candidate:
    """A model that could draft for a target.

    Attributes:
        name: what ``--draft`` takes.
        path: its file, None if it is not on this machine.
        size_bytes: of its file; rounded if it is not here.
        drafts_by: "tokens", or "text" where the vocabularies differ; "unknown" if it is not here.
        listed: models.txt lists it for this target.
    """

    name: str
    path: Path | None
    size_bytes: int
    drafts_by: str
    listed: bool


@dataclass(frozen=True)
class Gain:
    """What theory expects of a draft on this machine.

    Attributes:
        c: seconds of a draft step over those of a target step.
        v: seconds of a target decode of n tokens over those of one.
        best: for each of ``ACCEPTANCES`` the best draft length and its speedup.
    """

    c: float
    v: dict[int, float]
    best: tuple[tuple[int, float], ...]


def candidates(target: str) -> list[Candidate]:
    """Return the models that could draft for a target that is on this machine, the fittest first.

    First the draft that models.txt lists, then the models of the same vocabulary on this machine, from
    those of about a tenth of the target's size on, then those that could draft through the text. None has
    more than half of the target's parameters, as another quantization of the same model has. The bundled
    draft is left out of the last: it knows fairy tales only.
    """
    path, listed = hub.resolve(target), hub.draft_for(target)
    size = _size(path)
    found = []
    with Model(path, vocab_only=True) as model:
        if not model.has_text:
            return []
        nearby = sorted(
            (share_distance(_size(each) / size), name, each)
            for name, each in _present(listed).items()
            if not each.samefile(path) and _size(each) <= LARGEST_SHARE * size
        )
        for _, name, each in nearby[:MOST]:
            try:
                if Model.is_head(each) and name != listed:
                    continue  # it fits one model only
                with Model(each, vocab_only=True) as draft:
                    if draft.n_params > LARGEST_SHARE * model.n_params:
                        continue
                    way = model.compatibility(draft).path
            except ModelLoadError:
                continue
            if way == "tokens" or (way == "text" and name != hub.BUNDLED_DRAFT):
                found.append(Candidate(name, each, _size(each), way, name == listed))
    if listed is not None and not any(each.listed for each in found):
        (entry,) = (entry for entry in hub.catalogue() if entry.name == listed)
        if entry.path is None:
            found.append(Candidate(listed, None, entry.size_bytes, "unknown", True))
    return sorted(found, key=lambda each: (each.drafts_by == "text", not each.listed))


def choose_draft(target: str, obtain: Callable[[str], Path]) -> str | None:
    """Return the name of the fittest draft, or None.

    One that models.txt lists and that is not here is passed to ``obtain``, which may download it.
    """
    for each in candidates(target):
        if each.path is None:
            try:
                obtain(each.name)
            except ConfigError:  # it may not be downloaded
                continue
            return each.name
        if each.drafts_by == "tokens":
            return each.name
    return None


def measure(target: Context, draft: Context) -> Gain | None:
    """Measure c and v and return what theory makes of them.

    None where the memory cannot be truncated, or ``LLAMABRANCH_PROFILE=0`` forbids timing.
    """
    if os.environ.get("LLAMABRANCH_PROFILE") == "0":
        return None
    try:
        times = verify_costs(target, SIZES, n_prefix=64, repeats=3)
        step = verify_costs(draft, (1,), n_prefix=64, repeats=5)[1]
    except UnsupportedError:
        return None
    c, v = step / times[1], {n: seconds / times[1] for n, seconds in times.items()}

    def cost(n: int) -> float:
        # Times are noisy, but no draft makes a decode take less than without it.
        return max(1.0, float(np.interp(n, SIZES, [v[size] for size in SIZES])))

    best = []
    for a in ACCEPTANCES:
        length = theory.best_draft_length(a, c, cost, limit=SIZES[-1] - 1)
        best.append((length, theory.speedup(a, length, c, cost)))
    return Gain(c, v, tuple(best))


def share_distance(share: float) -> float:
    """Return how far a draft's share of the target's size is from the best one: a logarithm."""
    return abs(math.log(max(share, 1e-9) / BEST_SHARE))


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
