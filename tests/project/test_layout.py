"""The layout: floors, no cycles inside a folder, one door to llama.cpp, private names stay private."""

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
    ("arguments", "files", "pictures"),
    ("native",),
    ("hub", "model", "profile"),
    ("sampling",),
    ("context", "theory"),
    ("generation",),
    ("branch", "loading"),
    ("speculative",),
    ("engine",),
    ("search", "bench"),
    ("eval", "serve", "scale", "chat"),
    ("loom",),
    ("cli",),
)
RANK = {room: rank for rank, floor in enumerate(FLOORS) for room in floor}
PUBLIC_ROOMS = {
    "", "arguments", "bench", "chat", "cli", "errors", "eval", "files", "hub", "loading", "loom",
    "model", "pictures", "profile", "scale", "search", "serve", "speculative", "startup", "theory",
}  # fmt: skip
# A file that imports from a higher floor, inside the methods that need it, and why.
DOORS = {
    "llamabranch/context/context.py": (
        {"engine"},
        "Context.complete and chat are the engine's: users look for them where they have the model",
    ),
}
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


def _rooms_imported(path: Path) -> set[str]:
    """Return the rooms that a file imports from; "" stands for the package itself."""
    found = set()
    for name in _imports(path):
        head, *rest = name.split(".")
        if head == "llamabranch":
            found.add(rest[0] if rest else "")
    return found


def test_every_room_has_a_floor_and_every_floor_its_rooms() -> None:
    assert {_room(path) for path in SOURCES} - {"__init__"} == set(RANK)


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_room_imports_from_floors_below_only(path: Path) -> None:
    room, imported = _room(path), _rooms_imported(path)
    if room == "__init__":
        assert not imported & {"cli", "bench"}, "importing the package must not need these"
    elif room == "cli":
        assert imported <= PUBLIC_ROOMS, "the command line uses the public API"
    else:
        door, _ = DOORS.get(_name(path), (set(), ""))
        wrong = {r for r in imported - door if r != room and (not r or RANK[r] >= RANK[room])}
        assert not wrong, f"{room} must not import from {sorted(wrong)}"


FOLDERS = sorted({path.parent for path in SOURCES if path.parent != PACKAGE})


@pytest.mark.parametrize("folder", FOLDERS, ids=_name)
def test_no_cycles_inside_a_folder(folder: Path) -> None:
    inside = {
        path for path in SOURCES if path.is_relative_to(folder) and path.name != "__init__.py"
    }
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in inside}
    graph = {name: {i for i in _imports(path) if i in names} for name, path in names.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_only_native_imports_llama_cpp(path: Path) -> None:
    if _room(path) != "native":
        assert not [name for name in _imports(path) if name.split(".")[0] == "llama_cpp"]


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_native_handles_of_contexts_stay_in_two_rooms(path: Path) -> None:
    """``decoder.handle`` is for ``context/``; the rooms above ask the decoder."""
    if _room(path) not in ("native", "context"):
        found = [
            f"line {node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and node.attr == "handle"
            and ast.unparse(node.value).endswith("decoder")
        ]
        assert not found


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_any_is_for_native(path: Path) -> None:
    """And for Click's classes in the command line, whose names differ from version to version."""
    if _room(path) not in ("native", "cli"):
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert not [node for node in tree if isinstance(node, ast.Name) and node.id == "Any"]


@pytest.mark.parametrize("path", PROGRAMS, ids=_name)
def test_programs_do_not_import_the_native_room(path: Path) -> None:
    assert not [name for name in _imports(path) if name.startswith("llamabranch.native")]


@pytest.mark.parametrize("path", [*SOURCES, *PROGRAMS], ids=_name)
def test_private_names_stay_in_their_file(path: Path) -> None:
    """``x._name`` is for names that this file defines itself; ``from a import _b`` is for nobody."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                own.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            own.add(node.value)  # __slots__
    foreign = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            foreign += [a.name for a in node.names if _is_private(a.name)]
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    foreign += [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in attributes
        if _is_private(node.attr) and node.attr not in own | PUBLIC_NAMES
    ]
    assert not foreign


# Of named tuples; of the standard library, where nothing public does the same; llama_cpp's library.
PUBLIC_NAMES = {
    "_replace", "_asdict", "_fields", "_make", "_is_owned", "_at_fork_reinit", "_lib", "_exit",
    "_getframe",
}  # fmt: skip


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
