"""A saved chat: a folder with the conversation as JSON and the branches as snapshots.

The JSON is written last and names the snapshots, which have new names each time. So the folder always has
either the old chat or the new one, even if the writing is interrupted. It may come from an untrusted
source.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from ..errors import SnapshotError, UnsupportedError
from ..files import atomic_write, path_of
from ..model import Model
from ..sampling import SamplingParams
from .conversation import Exchange, Line, exchanges_of

__all__ = ["SavedChat", "read_chat", "saved_model", "write_chat"]

_FILE = "chat.json"
_VERSION = 1
_BRANCH = re.compile(r"[0-9a-f]{32}\.branch")
_EXCHANGE = ("user", "answer", "seed", "finish_reason", "n_tokens", "n_cut")
_LATER = ("thought", "calls", "results")  # since 0.4; left out if they are empty
_KINDS: dict[str, type | tuple[type, ...]] = {  # the types of the values in the file
    **dict.fromkeys(
        ("id", "user", "answer", "thought", "file", "name", "path", "fingerprint"), str
    ),
    **dict.fromkeys(("current", "number", "exchange", "seed", "n_tokens", "n_cut"), int),
    **dict.fromkeys(("system", "finish_reason"), (str, type(None))),
    **dict.fromkeys(("parent", "head", "max_tokens"), (int, type(None))),
    **dict.fromkeys(("model", "sampling"), dict),
    **dict.fromkeys(("lines", "exchanges", "branches", "stop", "calls", "results"), list),
}


@dataclass(frozen=True)
class SavedChat:
    """The saved data of a chat; after reading also its model and the K/V of its branches."""

    id: str  # stays the same at each save
    lines: Sequence[Line]
    current: int
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    model: Mapping[str, str] = field(default_factory=dict)  # its name, path and fingerprint
    branches: Sequence[tuple[Path, Exchange]] = ()  # each file with the last exchange in it


def write_chat(
    folder: str | os.PathLike[str], model: Model, chat: SavedChat, ends: Iterable[Exchange]
) -> None:
    """Save the chat, replacing an earlier save in this folder. Only the branches in ``ends`` are saved.

    Raises:
        SnapshotError: it cannot be written, or the folder has another chat or other files.
    """
    place, exchanges = path_of(folder), exchanges_of(chat.lines)
    number = {exchange: i if exchange else None for i, exchange in enumerate([*exchanges, None])}
    try:
        place.mkdir(parents=True, exist_ok=True)
        old = [path for path in place.iterdir() if _BRANCH.fullmatch(path.name)]
        if (place / _FILE).is_file():
            if read_chat(place).id != chat.id:
                raise SnapshotError(
                    f"{place} has another chat",
                    hint="name another folder, or load that chat to continue it",
                )
        elif any(path not in old for path in place.iterdir()):
            raise SnapshotError(f"{place} is not a saved chat", hint="name another folder")
        files: list[dict[str, object]] = []
        for exchange in ends:
            name = f"{uuid4().hex}.branch"
            # If it cannot be saved, it is evaluated again later.
            with contextlib.suppress(UnsupportedError):
                if exchange.branch is not None:
                    exchange.branch.save(place / name)
                    files.append({"file": name, "exchange": number[exchange]})
        where = os.path.abspath(model.path)
        about = {
            "version": _VERSION,
            "id": chat.id,
            "model": {"name": model.path.name, "path": where, "fingerprint": model.fingerprint},
            "sampling": chat.sampling.as_dict(),
            "max_tokens": chat.max_tokens,
            "stop": list(chat.stop),
            "exchanges": [
                {
                    "parent": number[exchange.parent],
                    **{name: vars(exchange)[name] for name in _EXCHANGE},
                    **{name: value for name in _LATER if (value := vars(exchange)[name])},
                }
                for exchange in exchanges
            ],
            "lines": [{**vars(line), "head": number[line.head]} for line in chat.lines],
            "current": chat.current,
            "branches": files,
        }
        with atomic_write(place / _FILE) as file:
            file.write(json.dumps(about, indent=1).encode())
        for path in old:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise SnapshotError(f"the chat cannot be saved: {error}") from error


def saved_model(folder: str | os.PathLike[str]) -> Path | None:
    """Return the model's file of a saved chat; None if an earlier version saved it.

    Raises:
        SnapshotError: the folder has no chat, or it is damaged, or the model's file has moved.
    """
    model = read_chat(folder).model
    path = Path(model["path"]) if model else None
    if path is not None and not (path.is_absolute() and path.is_file()):
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
        text = (place / _FILE).read_text("utf-8")
        about = json.loads(text, object_hook=_checked)
        if about["version"] != _VERSION:
            raise ValueError(f"it has format {about['version']!r:.40}, not {_VERSION}")
        exchanges: list[Exchange] = []
        for entry in about["exchanges"]:
            fields = {name: entry[name] for name in _EXCHANGE}
            fields |= {name: entry[name] for name in _LATER if name in entry}
            if not all(isinstance(result, str) for result in fields.get("results", ())):
                raise ValueError("a result of a function is not text")
            if not all(map(_is_call, fields.get("calls", ()))):
                raise ValueError("a call of a function does not have OpenAI's format")
            exchanges.append(Exchange(_at(exchanges, entry["parent"]), **fields))
        lines = [
            Line(line["number"], _at(exchanges, line["head"]), line["system"])
            for line in about["lines"]
        ]
        model = about.get("model", {})
        chat = SavedChat(
            about.get("id") or hashlib.sha256(text.encode()).hexdigest(),  # older files have no id
            lines,
            about["current"],
            SamplingParams.from_dict(about["sampling"]),
            about["max_tokens"],
            tuple(about["stop"]),
            model and {name: model[name] for name in ("name", "path", "fingerprint")},
            [
                (place / branch["file"], exchanges[branch["exchange"]])
                for branch in about["branches"]
            ],
        )
        if chat.current not in {line.number for line in lines}:
            raise ValueError("there is no current branch")
        if not all(_BRANCH.fullmatch(branch["file"]) for branch in about["branches"]):
            raise ValueError("the name of a branch is invalid")
        if not all(isinstance(text, str) for text in chat.stop):
            raise ValueError("a stop string is not text")
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise SnapshotError(f"{place} has no chat that can be read: {error}") from error
    if ours is not None and chat.model and not ours.is_of(chat.model["fingerprint"]):
        raise SnapshotError(
            f"the chat is from another model: {chat.model['name']}, not {ours.path.name}",
            hint=f"it was saved with {chat.model['path']}",
        )
    return chat


def _checked(entry: dict[str, object]) -> dict[str, object]:
    """Return an object of the file after checking the types of its values."""
    for name in entry.keys() & _KINDS.keys():
        if not isinstance(entry[name], _KINDS[name]) or isinstance(entry[name], bool):
            raise ValueError(f"{name} is {entry[name]!r:.40}")
    return entry


def _is_call(value: object) -> bool:
    """Return whether this is a call of a function in the format of messages."""
    call = value if isinstance(value, dict) else {}
    function = call.get("function")
    named = function if isinstance(function, dict) else {}
    texts = call.get("id"), named.get("name"), named.get("arguments")
    return all(isinstance(text, str) for text in texts)


def _at(exchanges: Sequence[Exchange], place: int | None) -> Exchange | None:
    """Return one of the exchanges that were read before, so that there are no cycles."""
    if place is not None and place < 0:
        raise ValueError(f"{place} is not an index of the list")
    return None if place is None else exchanges[place]
