"""The form of a template's turns as JSON, for the profile, so that it is found only once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

from .call_form import ArgumentTags, Around, CallForm, Slot, Values
from .turn_finding import TurnParts

__all__ = ["code_digest", "kept", "restored"]

_TYPES: dict[str, Callable[..., object]] = {
    kind.__name__: kind for kind in (TurnParts, CallForm, ArgumentTags, Around, Values)
}
_FILES = ("turn_finding.py", "call_form.py", "turn_keeping.py")


@cache
def code_digest() -> str:
    """Return a digest of the code that finds forms; results of another version are not used."""
    digest = hashlib.sha256()
    for name in _FILES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


def kept(parts: TurnParts) -> dict[str, object]:
    """Return an entry of the profile."""
    plain = _plain(parts)
    return {"parts": plain, "digest": _digest(plain)}


def restored(entry: Mapping[str, object] | None) -> TurnParts | None:
    """Return the parts of an entry; None if it is missing or damaged."""
    if entry is None or entry.get("digest") != _digest(entry.get("parts")):
        return None
    parts = _object(entry["parts"])
    return parts if isinstance(parts, TurnParts) else None


def _digest(plain: object) -> str:
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def _plain(value: object) -> object:
    """Return a value as JSON: an object becomes its type and its fields, in order."""
    if isinstance(value, Slot):
        return {"Slot": value.value}
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if isinstance(value, Mapping):
        return {"map": {key: _plain(item) for key, item in value.items()}}
    if is_dataclass(value):
        return {type(value).__name__: [_plain(getattr(value, f.name)) for f in fields(value)]}
    if isinstance(value, Around):
        return {"Around": list(map(_plain, value))}
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _object(plain: object) -> object:
    """Undo ``_plain``: return the value of its result."""
    if isinstance(plain, list):
        return tuple(map(_object, plain))
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "map":
        return {key: _object(item) for key, item in inner.items()}
    if kind == "Slot":
        return Slot(inner)
    return frozenset(inner) if kind == "set" else _TYPES[kind](*map(_object, inner))
