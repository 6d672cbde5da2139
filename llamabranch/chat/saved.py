"""A saved chat: one JSON file with its exchanges and branches. It may come from an untrusted source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import Struct

from ..arguments import path_text
from ..errors import SnapshotError
from ..files import atomic_write, path_of
from ..model import Model
from ..sampling import SamplingParams
from .conversation import Branches, Exchange, exchanges_of

_VERSION = 2


class _Model(Struct):
    name: str
    path: str
    fingerprint: str


class SavedChat(Struct):
    """The contents of a saved chat's file."""

    id: str  # stays the same at each save
    model: _Model
    system: str | None
    sampling: dict[str, object]
    max_tokens: int | None
    stop: list[str]
    exchanges: list[Exchange]  # parents first; ``parents`` links them
    parents: list[int | None]
    branches: dict[int, int | None]  # the last exchange of each
    current: int
    version: int = 0

    def linked(self) -> dict[int, Exchange]:
        """Return the last exchange of each branch.

        Raises:
            ValueError, KeyError: an index does not belong to an earlier exchange, or to a branch.
        """
        linked: dict[int | None, Exchange] = {None: Exchange(None, "")}
        for exchange, parent in zip(self.exchanges, self.parents, strict=True):
            linked[len(linked) - 1] = replace(exchange, parent=linked[parent])
        if self.current not in self.branches:
            raise ValueError("there is no current branch")
        return {number: linked[head] for number, head in self.branches.items()}


def write_chat(
    file: str | os.PathLike[str],
    name: str,
    model: Model,
    system: str | None,
    branches: Branches,
    current: int,
    sampling: SamplingParams,
    max_tokens: int | None,
    stop: Sequence[str],
) -> None:
    """Save a chat, replacing an earlier save of it; ``name`` distinguishes it from others.

    Raises:
        SnapshotError: it cannot be written, or the file exists and is not a save of this chat.
    """
    path, (_, *exchanges) = path_of(file), exchanges_of(branches)
    place: dict[Exchange | None, int] = {exchange: i for i, exchange in enumerate(exchanges)}
    about = SavedChat(
        name,
        _Model(path_text(model.path.name), path_text(os.path.abspath(model.path)), model.fingerprint),
        system, sampling.as_dict(), max_tokens, list(stop),
        [replace(exchange, parent=None) for exchange in exchanges],
        [place.get(exchange.parent) for exchange in exchanges],
        {number: place.get(head) for number, head in branches.items()},
        current, _VERSION,
    )  # fmt: skip
    try:
        if path.exists() and read_chat(path).id != name:
            hint = "name another file, or load that chat to continue it"
            raise SnapshotError(f"{path} has another chat", hint=hint)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as opened:
            opened.write(msgspec.json.format(msgspec.json.encode(about), indent=1))
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise SnapshotError(f"the chat cannot be saved: {error}") from error


def saved_model(file: str | os.PathLike[str]) -> Path:
    """Return the model's file of a saved chat.

    Raises:
        SnapshotError: it is not a saved chat, is damaged, or the model's file has moved.
    """
    path = Path(read_chat(file).model.path)
    if not (path.is_absolute() and path.is_file()):
        raise SnapshotError(
            f"the chat's model is missing: {path}", hint="name the file where it is now"
        )
    return path


def read_chat(file: str | os.PathLike[str], ours: Model | None = None) -> SavedChat:
    """Return a saved chat.

    Raises:
        SnapshotError: it is not a saved chat, is damaged, or is from another model.
    """
    path = path_of(file)
    try:
        about = msgspec.json.decode(path.read_bytes(), type=SavedChat)
        if about.version != _VERSION:
            raise ValueError(f"it has format {about.version}, not {_VERSION}")
        about.linked()
        SamplingParams.from_dict(about.sampling)
    except (OSError, ValueError, LookupError, msgspec.MsgspecError, RecursionError) as error:
        raise SnapshotError(f"{path} has no chat that can be read: {error}") from error
    if ours is not None and not ours.is_of(about.model.fingerprint):
        raise SnapshotError(
            f"the chat is from another model: {about.model.name}, not {ours.path.name}",
            hint=f"it was saved with {about.model.path}",
        )
    return about
