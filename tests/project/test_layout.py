"""The layout: layers, no cycles inside a folder, one door to llama.cpp, private names stay private."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "llamabranch"

# A room imports from the rows above its own, never from its own row or from below.
FLOORS = (
    ("errors", "lazy", "startup"),
    ("arguments", "extras", "files", "pictures"),
    ("native",),
    ("hub", "model"),
    ("sampling",),
    ("context",),
    ("generation",),
    ("request",),
    ("run",),
    ("branch",),
    ("speculative",),
    ("engine",),
    ("loading",),
    ("search", "bench", "agents"),
    ("eval", "serve", "ray_data", "chat"),
    ("loom",),
    ("cli",),
)
RANK = {room: rank for rank, floor in enumerate(FLOORS) for room in floor}
PUBLIC_ROOMS = {
    "", "agents", "arguments", "bench", "chat", "cli", "errors", "eval", "extras", "files", "hub",
    "loading", "loom", "model", "pictures", "ray_data", "search", "serve", "speculative",
    "startup",
}  # fmt: skip
# Methods of named tuples, functions of the standard library without a public twin, llama_cpp's library.
PUBLIC_NAMES = {
    "_replace", "_asdict", "_fields", "_make", "_is_owned", "_at_fork_reinit", "_release_save",
    "_acquire_restore", "_lib", "_exit", "_getframe",
}  # fmt: skip
SOURCES = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")])
PROGRAMS = [
    p for folder in ("examples", "benchmarks") for p in sorted((ROOT / folder).glob("*.py"))
]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].partition(".")[0]


def _is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _imports(path: Path) -> Iterator[str]:
    """Yield the dotted name of every module that a file imports, anywhere in it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield inner if _is_module(inner) else module


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_room_imports_from_floors_below_only(path: Path) -> None:
    room, modules = _room(path), [*_imports(path)]
    imported = {
        name.split(".")[1] if "." in name else ""
        for name in modules
        if f"{name}.".startswith("llamabranch.")
    }
    if room == "__init__":
        assert not imported & {"cli", "bench"}, "importing the package must not need these"
    elif room == "cli":
        assert imported <= PUBLIC_ROOMS, "the command line uses the public API"
    else:
        wrong = {other for other in imported - {room} if not other or RANK[other] >= RANK[room]}
        assert not wrong, f"{room} must not import from {sorted(wrong)}"


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in SOURCES if path.parent != PACKAGE}), ids=_name
)
def test_no_cycles_inside_a_folder(folder: Path) -> None:
    inside = [p for p in SOURCES if p.is_relative_to(folder) and p.name != "__init__.py"]
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in inside}
    graph = {name: {i for i in _imports(path) if i in names} for name, path in names.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", [*SOURCES, *PROGRAMS], ids=_name)
def test_only_native_uses_llama_cpp_and_private_names_stay_in_their_file(path: Path) -> None:
    """``x._name`` is allowed for names that the same file defines; ``from a import _b`` never is.

    ``decoder.handle`` is only for ``context/``. ``Any`` is only for classes without types: llama.cpp's,
    Click's.
    """
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    foreign: list[str] = []
    own = set(PUBLIC_NAMES)
    for node in nodes:
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                own.add(name)
            case ast.Name(name, ast.Store()) | ast.Attribute(ast.Name("self"), name, ast.Store()):
                own.add(name)
            case ast.Constant(str(name)):  # __slots__
                own.add(name)
            case ast.ImportFrom():
                foreign += [alias.name for alias in node.names if _is_private(alias.name)]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    room = _room(path) if path.is_relative_to(PACKAGE) else "program"
    for node in attributes:
        is_handle = node.attr == "handle" and ast.unparse(node.value).endswith("decoder")
        if (_is_private(node.attr) and node.attr not in own) or (
            is_handle and room not in ("native", "context", "program")
        ):
            foreign.append(f"line {node.lineno}: {ast.unparse(node)}")
    if room == "program":
        foreign += [name for name in _imports(path) if name.startswith("llamabranch.native")]
    elif room != "native":
        foreign += [name for name in _imports(path) if name.split(".")[0] == "llama_cpp"]
        if room != "cli":
            foreign += [n.id for n in nodes if isinstance(n, ast.Name) and n.id == "Any"]
    assert not foreign


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
