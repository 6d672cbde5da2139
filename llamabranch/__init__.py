"""Fork a local model's mind: a branch/fork runtime for llama.cpp.

The public names are listed once, in ``__init__.pyi``, which type checkers read as it is. A room is
imported when one of its names is first used: NumPy and llama.cpp take half a second.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

from . import startup  # noqa: F401  (first: Ctrl-C while the rest is imported)

__version__ = "0.2.0"


def _rooms() -> dict[str, str]:
    """Return the module that has each public name, in the stub's ``from MODULE import NAME as NAME``."""
    stub = ast.parse(Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8"))
    return {
        alias.name: f".{node.module or ''}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


_ROOMS = _rooms()

__all__ = sorted((*_ROOMS, "__version__"), key=lambda name: (not name[0].isupper(), name))


def __getattr__(name: str) -> object:
    """Import a public name, or a room, when it is first used (PEP 562)."""
    room = _ROOMS.get(name)
    if room is not None and room != ".":
        value: object = getattr(import_module(room, __name__), name)
    elif room == "." or f".{name}" in _ROOMS.values():
        value = import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__.copy()
