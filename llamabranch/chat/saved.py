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
from .conversation import Exchange, Line, exchanges_of

__all__ = ["SavedChat", "read_chat", "saved_model", "write_chat"]

_VERSION = 2


class _Line(Struct):
    number: int
    head: int | None  # its last exchange
    system: str | None


class _Model(Struct):
    name: str
    path: str
    fingerprint: str


class SavedChat(Struct):
    """A chat as its file has it."""

    id: str  # stays the same at each save
    model: _Model
    sampling: dict[str, object]
    max_tokens: int | None
    stop: list[str]
    exchanges: list[Exchange]  # parents first; ``parents`` links them
    parents: list[int | None]
    lines: list[_Line]
    current: int
    version: int = 0

    def tree(self) -> dict[int, Line]:
        """Return its branches.

        Raises:
            ValueError, IndexError: an index is not that of an earlier exchange, or of a branch.
        """
        linked: list[Exchange] = []

        def at(place: int | None) -> Exchange | None:
            if place is not None and place < 0:
                raise ValueError(f"{place} is not an index of the list")
            return None if place is None else linked[place]

        for exchange, parent in zip(self.exchanges, self.parents, strict=True):
            linked.append(replace(exchange, parent=at(parent)))
        lines = {each.number: Line(each.number, at(each.head), each.system) for each in self.lines}
        if self.current not in lines:
            raise ValueError("there is no current branch")
        return lines


def write_chat(
    file: str | os.PathLike[str],
    model: Model,
    name: str,
    lines: dict[int, Line],
    current: int,
    sampling: SamplingParams,
    max_tokens: int | None,
    stop: Sequence[str],
) -> None:
    """Save a chat, replacing an earlier save of it; ``name`` distinguishes it from others.

    Raises:
        SnapshotError: it cannot be written, or the file is something else than this chat.
    """
    path, exchanges = path_of(file), exchanges_of(lines.values())
    place: dict[Exchange | None, int] = {exchange: i for i, exchange in enumerate(exchanges)}
    about = SavedChat(
        name,
        _Model(path_text(model.path.name), path_text(os.path.abspath(model.path)), model.fingerprint),
        sampling.as_dict(), max_tokens, list(stop),
        [replace(exchange, parent=None) for exchange in exchanges],
        [place.get(exchange.parent) for exchange in exchanges],
        [_Line(line.number, place.get(line.head), line.system) for line in lines.values()],
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
        about.tree()
        SamplingParams.from_dict(about.sampling)
    except (OSError, ValueError, msgspec.MsgspecError, IndexError, RecursionError) as error:
        raise SnapshotError(f"{path} has no chat that can be read: {error}") from error
    if ours is not None and not ours.is_of(about.model.fingerprint):
        raise SnapshotError(
            f"the chat is from another model: {about.model.name}, not {ours.path.name}",
            hint=f"it was saved with {about.model.path}",
        )
    return about
