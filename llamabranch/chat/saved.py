"""A saved chat: one JSON file with its exchanges and branches. It may come from an untrusted source."""

from __future__ import annotations

import os
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
    head: int | None
    system: str | None


class _Model(Struct):
    name: str
    path: str
    fingerprint: str


class _File(Struct):
    version: int
    id: str
    model: _Model
    sampling: dict[str, object]
    max_tokens: int | None
    stop: list[str]
    exchanges: list[Exchange]  # parents first
    parents: list[int | None]
    lines: list[_Line]
    current: int


class SavedChat(Struct):
    """A chat as it is saved; ``model`` is the file that it was saved with, None = the chat's own."""

    id: str  # stays the same at each save
    lines: dict[int, Line]
    current: int
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    model: _Model | None = None


def write_chat(file: str | os.PathLike[str], model: Model, chat: SavedChat) -> None:
    """Save the chat, replacing an earlier save of it.

    Raises:
        SnapshotError: it cannot be written, or the file is something else than this chat.
    """
    path, exchanges = path_of(file), exchanges_of(chat.lines.values())
    place: dict[Exchange | None, int] = {exchange: i for i, exchange in enumerate(exchanges)}
    about = _File(
        _VERSION, chat.id,
        _Model(path_text(model.path.name), path_text(os.path.abspath(model.path)), model.fingerprint),
        chat.sampling.as_dict(), chat.max_tokens, list(chat.stop),
        [replace(exchange, parent=None) for exchange in exchanges],
        [place.get(exchange.parent) for exchange in exchanges],
        [_Line(line.number, place.get(line.head), line.system) for line in chat.lines.values()],
        chat.current,
    )  # fmt: skip
    try:
        if path.exists() and read_chat(path).id != chat.id:
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
        SnapshotError: it is no saved chat, or damaged, or the model's file has moved.
    """
    model = read_chat(file).model
    path = Path(model.path if model is not None else "")
    if not (path.is_absolute() and path.is_file()):
        raise SnapshotError(
            f"the chat's model is missing: {path}", hint="name the file where it is now"
        )
    return path


def read_chat(file: str | os.PathLike[str], ours: Model | None = None) -> SavedChat:
    """Return a saved chat.

    Raises:
        SnapshotError: it is no saved chat, or damaged, or of another model.
    """
    path = path_of(file)
    try:
        about = msgspec.json.decode(path.read_bytes(), type=_File)
        if about.version != _VERSION:
            raise ValueError(f"it has format {about.version}, not {_VERSION}")
        exchanges: list[Exchange] = []
        for exchange, parent in zip(about.exchanges, about.parents, strict=True):
            exchanges.append(replace(exchange, parent=_at(exchanges, parent)))
        lines = {n.number: Line(n.number, _at(exchanges, n.head), n.system) for n in about.lines}
        if about.current not in lines:
            raise ValueError("there is no current branch")
        sampling = SamplingParams.from_dict(about.sampling)
    except (OSError, ValueError, msgspec.MsgspecError, IndexError, RecursionError) as error:
        raise SnapshotError(f"{path} has no chat that can be read: {error}") from error
    if ours is not None and not ours.is_of(about.model.fingerprint):
        raise SnapshotError(
            f"the chat is from another model: {about.model.name}, not {ours.path.name}",
            hint=f"it was saved with {about.model.path}",
        )
    return SavedChat(
        about.id, lines, about.current, sampling, about.max_tokens, tuple(about.stop), about.model
    )


def _at(exchanges: list[Exchange], place: int | None) -> Exchange | None:
    """Return one of the exchanges that were read before, so that there are no cycles."""
    if place is not None and place < 0:
        raise ValueError(f"{place} is not an index of the list")
    return None if place is None else exchanges[place]
