"""A saved chat: a folder with the conversation as JSON and the branches as snapshots.

The JSON is written last and names the snapshots, which have new names each time: a folder has the old
chat or the new one, whenever the writing ends. It may come from an untrusted source.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

from ..branch import Branch
from ..context import Context
from ..errors import BranchStateError, CapacityError, SnapshotError, UnsupportedError
from ..files import atomic_write, path_of
from ..sampling import SamplingParams
from .conversation import Exchange, Line, exchanges_of

__all__ = ["SavedChat", "read_chat", "write_chat"]

_FILE = "chat.json"
_VERSION = 1
_BRANCH = re.compile(r"[0-9a-f]{32}\.branch")

T = TypeVar("T")


@dataclass(frozen=True)
class SavedChat:
    """What is saved of a chat besides the K/V of its branches."""

    lines: Sequence[Line]
    current: int
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]


def write_chat(folder: str | os.PathLike[str], chat: SavedChat, ends: Sequence[Exchange]) -> None:
    """Write a chat, in place of one that is there; of the branches those of ``ends``.

    Raises:
        SnapshotError: it cannot be written, or the folder has other files and no chat.
    """
    place, exchanges = path_of(folder), exchanges_of(chat.lines)
    number = {exchange: i for i, exchange in enumerate(exchanges)}
    try:
        place.mkdir(parents=True, exist_ok=True)
        old = [path for path in place.iterdir() if _BRANCH.fullmatch(path.name)]
        if not (place / _FILE).is_file() and any(path not in old for path in place.iterdir()):
            raise SnapshotError(f"{place} is not a saved chat", hint="name another folder")
        files: list[dict[str, object]] = []
        for exchange in ends:
            name = f"{uuid4().hex}.branch"
            # It is evaluated again where it cannot be saved, or another thread has needed its sequence.
            with contextlib.suppress(UnsupportedError, BranchStateError):
                if exchange.branch is not None:
                    exchange.branch.save(place / name)
                    files.append({"file": name, "exchange": number[exchange]})
        about = {
            "version": _VERSION,
            "sampling": chat.sampling.as_dict(),
            "max_tokens": chat.max_tokens,
            "stop": list(chat.stop),
            "exchanges": [
                {
                    "parent": None if each.parent is None else number[each.parent],
                    "user": each.user,
                    "answer": each.answer,
                    "seed": each.seed,
                    "finish_reason": each.finish_reason,
                    "n_tokens": each.n_tokens,
                    "n_cut": each.n_cut,
                }
                for each in exchanges
            ],
            "lines": [
                {
                    "number": line.number,
                    "head": None if line.head is None else number[line.head],
                    "system": line.system,
                }
                for line in chat.lines
            ],
            "current": chat.current,
            "branches": files,
        }
        with atomic_write(place / _FILE) as file:
            file.write(json.dumps(about, indent=1).encode())
        for path in old:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise SnapshotError(f"the chat cannot be saved: {error}") from error


def read_chat(
    ctx: Context, folder: str | os.PathLike[str], *, trusted: bool
) -> tuple[SavedChat, list[Branch]]:
    """Return a saved chat and its branches as far as there is room for them, the last one used last.

    Raises:
        SnapshotError: no chat is there, it is damaged, or not of this model.
        UnsupportedError: K/V that cannot be checked, and is not ``trusted``.
    """
    place = path_of(folder)
    try:
        about = json.loads((place / _FILE).read_text("utf-8"))
        if about["version"] != _VERSION:
            raise SnapshotError(f"the chat has format {about['version']!r}, not {_VERSION}")
        exchanges: list[Exchange] = []
        for each in about["exchanges"]:
            exchanges.append(
                Exchange(
                    _at(exchanges, each["parent"]),
                    _a(str, each["user"]),
                    _a(str, each["answer"]),
                    _a(int, each["seed"]),
                    _maybe(str, each["finish_reason"]),
                    _a(int, each["n_tokens"]),
                    _a(int, each["n_cut"]),
                )
            )
        lines = [
            Line(
                _a(int, each["number"]),
                _at(exchanges, each["head"]),
                _maybe(str, each["system"]),
            )
            for each in about["lines"]
        ]
        chat = SavedChat(
            lines,
            _a(int, about["current"]),
            SamplingParams.from_dict(_a(dict, about["sampling"])),
            _maybe(int, about["max_tokens"]),
            tuple(_a(str, text) for text in about["stop"]),
        )
        files = [
            (_a(str, each["file"]), exchanges[_a(int, each["exchange"])])
            for each in about["branches"]
        ]
        if chat.current not in {line.number for line in lines}:
            raise ValueError("no branch is the current one")
        if not all(_BRANCH.fullmatch(name) for name, _ in files):
            raise ValueError("a branch has no name of a branch")
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise SnapshotError(f"{place} has no chat that can be read: {error}") from error
    found: list[Branch] = []
    try:
        for name, exchange in reversed(files):
            branch = Branch.load(ctx, place / name, trusted=trusted)
            found.append(branch)
            exchange.branch = branch
    except CapacityError:  # the others are evaluated again
        pass
    except BaseException:
        for branch in found:
            branch.prune()
        raise
    return chat, found[::-1]


def _at(exchanges: Sequence[Exchange], place: object) -> Exchange | None:
    """Return one of the exchanges that are read already, so that none comes before itself."""
    if place is None:
        return None
    if _a(int, place) < 0:
        raise ValueError(f"{place} is no place in a list")
    return exchanges[_a(int, place)]


def _a(kind: type[T], value: object) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{value!r:.40} is no {kind.__name__}")
    return value


def _maybe(kind: type[T], value: object) -> T | None:
    return None if value is None else _a(kind, value)
