"""Packages that import a name when it is first used. Their ``__init__.pyi`` is the only list of names.

Type checkers read that stub as it is; see PEP 562 and SPEC 1 of Scientific Python.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def attach(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: its ``__name__``.
        file: its ``__file__``. The stub in the same folder has lines ``from .module import name as name``
            (or ``from ..package.module``) and, for names that the package itself defines, ``name:
            type``. ``from . import module as module`` makes a module an attribute that is not listed.
    """
    stub = ast.parse(Path(file).with_name("__init__.pyi").read_text(encoding="utf-8"))
    own: list[str] = []
    modules: dict[str, str] = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            modules |= {alias.name: f"{dots}{node.module or alias.name}" for alias in node.names}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.append(node.target.id)
    packages = {module.removeprefix(".") for module in modules.values()}
    listed = {*own, *(name for name, module in modules.items() if module != f".{name}")}
    names = sorted(listed - {"__all__"}, key=lambda name: (not name[0].isupper(), name))

    def get(name: str) -> object:
        module = modules.get(name)
        if module is None and name not in packages:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = import_module(module or f".{name}", package)
        if module is not None and module != f".{name}":
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    return get, names.copy, names
