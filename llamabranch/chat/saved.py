"""A saved chat: a folder with the conversation as JSON, and the K/V of its current branch.

The JSON is written last and names the K/V's file, which has a new name each time. So the folder always
has either the old chat or the new one. It may come from an untrusted source.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import msgspec
from msgspec import Struct

from ..arguments import path_text
from ..branch import Branch
from ..engine.context import Context
from ..errors import CapacityError, SnapshotError, UnsupportedError
from ..files import atomic_write, path_of
from ..model import Model
from ..sampling import SamplingParams
from .conversation import Exchange, Line, exchanges_of

__all__ = ["SavedChat", "read_chat", "saved_model", "write_chat"]

_FILE = "chat.json"
_VERSION = 1
_BRANCH = re.compile(r"[0-9a-f]{32}\.branch")


class _Function(Struct):
    name: str
    arguments: str


class _Call(Struct):
    id: str
    function: _Function
    type: str = "function"


class _Exchange(Struct, omit_defaults=True):
    parent: int | None
    user: str
    answer: str
    seed: int
    finish_reason: str | None
    n_tokens: int
    n_cut: int
    thought: str = ""
    calls: list[_Call] = []
    results: list[str] = []
    tokens: list[int] = []


class _Line(Struct):
    number: int
    head: int | None
    system: str | None


class _File(Struct):
    file: str


class _Model(Struct):
    name: str
    path: str
    fingerprint: str


class _About(Struct):
    version: int
    id: str
    model: _Model
    sampling: dict[str, object]
    max_tokens: int | None
    stop: list[str]
    exchanges: list[_Exchange]
    lines: list[_Line]
    current: int
    branches: list[_File]


@dataclass(frozen=True)
class SavedChat:
    """The saved data of a chat; after reading also its model and the files of its K/V."""

    id: str  # stays the same at each save
    lines: Sequence[Line]
    current: int
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    model: _Model | None = None
    branches: Sequence[Path] = ()


def write_chat(folder: str | os.PathLike[str], ctx: Context, chat: SavedChat) -> None:
    """Save the chat, replacing an earlier save of it in this folder.

    Raises:
        SnapshotError: it cannot be written, or the folder has another chat or other files.
    """
    place, exchanges, model = path_of(folder), exchanges_of(chat.lines), ctx.model
    number: Mapping[Exchange | None, int] = {exchange: i for i, exchange in enumerate(exchanges)}
    head = next(line.head for line in chat.lines if line.number == chat.current)
    try:
        place.mkdir(parents=True, exist_ok=True)
        old = [path for path in place.iterdir() if _BRANCH.fullmatch(path.name)]
        if (place / _FILE).is_file():
            if read_chat(place).id != chat.id:
                hint = "name another folder, or load that chat to continue it"
                raise SnapshotError(f"{place} has another chat", hint=hint)
        elif any(path not in old for path in place.iterdir()):
            raise SnapshotError(f"{place} is not a saved chat", hint="name another folder")
        name, files = f"{uuid4().hex}.branch", list[_File]()
        # What cannot be saved is evaluated again later.
        with contextlib.suppress(UnsupportedError, CapacityError):
            if head is not None and head.tokens:
                with Branch.start(ctx, head.tokens) as branch:
                    branch.save(place / name)
                files.append(_File(name))
        about = _About(
            _VERSION, chat.id,
            _Model(
                path_text(model.path.name), path_text(os.path.abspath(model.path)), model.fingerprint
            ),
            chat.sampling.as_dict(), chat.max_tokens, list(chat.stop),
            [
                msgspec.convert({**vars(each), "parent": number.get(each.parent)}, _Exchange)
                for each in exchanges
            ],
            [_Line(line.number, number.get(line.head), line.system) for line in chat.lines],
            chat.current, files,
        )  # fmt: skip
        with atomic_write(place / _FILE) as file:
            file.write(msgspec.json.format(msgspec.json.encode(about), indent=1))
        for path in old:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise SnapshotError(f"the chat cannot be saved: {error}") from error


def saved_model(folder: str | os.PathLike[str]) -> Path:
    """Return the model's file of a saved chat.

    Raises:
        SnapshotError: the folder has no chat, or it is damaged, or the model's file has moved.
    """
    model = read_chat(folder).model
    path = Path(model.path if model is not None else "")
    if not (path.is_absolute() and path.is_file()):
        raise SnapshotError(
            f"the chat's model is missing: {path}", hint="name the file where it is now"
        )
    return path


def read_chat(folder: str | os.PathLike[str], ours: Model | None = None) -> SavedChat:
    """Return a saved chat.

    Raises:
        SnapshotError: the folder has no chat, or it is damaged, or of another model.
    """
    place = path_of(folder)
    try:
        about = msgspec.json.decode((place / _FILE).read_bytes(), type=_About)
        if about.version != _VERSION:
            raise ValueError(f"it has format {about.version}, not {_VERSION}")
        exchanges: list[Exchange] = []
        for entry in about.exchanges:
            fields = msgspec.to_builtins(entry) | {"parent": _at(exchanges, entry.parent)}
            exchanges.append(Exchange(**fields))
        lines = [Line(each.number, _at(exchanges, each.head), each.system) for each in about.lines]
        if about.current not in {line.number for line in lines}:
            raise ValueError("there is no current branch")
        if not all(_BRANCH.fullmatch(each.file) for each in about.branches):
            raise ValueError("the name of a branch is invalid")
        sampling = SamplingParams.from_dict(about.sampling)
    except (OSError, ValueError, msgspec.MsgspecError, IndexError, RecursionError) as error:
        raise SnapshotError(f"{place} has no chat that can be read: {error}") from error
    if ours is not None and not ours.is_of(about.model.fingerprint):
        raise SnapshotError(
            f"the chat is from another model: {about.model.name}, not {ours.path.name}",
            hint=f"it was saved with {about.model.path}",
        )
    files = [place / each.file for each in about.branches]
    return SavedChat(
        about.id, lines, about.current, sampling, about.max_tokens, tuple(about.stop), about.model, files
    )  # fmt: skip


def _at(exchanges: Sequence[Exchange], place: int | None) -> Exchange | None:
    """Return one of the exchanges that were read before, so that there are no cycles."""
    if place is not None and place < 0:
        raise ValueError(f"{place} is not an index of the list")
    return None if place is None else exchanges[place]
