"""The house rules: floors, the one door to llama.cpp, public names, versions, documented code."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import typer
import typer.core

import llamabranch
from llamabranch.cli import app

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "llamabranch"

# Who may import whom: a module imports from earlier in its own row and from the rows above it.
FLOORS = (
    ("startup", "errors", "arguments", "distribution"),
    ("native",),
    (
        "vocabulary",
        "model",
        "gbnf",
        "characters",
        "pattern",
        "json_schema",
        "grammar",
        "sampling",
        "sampler",
    ),
    (
        "cells",
        "options",
        "machine_profile",
        "threads",
        "rows",
        "leases",
        "cell_order",
        "decoder",
        "capabilities",
        "shared_cache",
        "context",
        "hub",
    ),
    ("stopping", "line", "verification", "origin", "snapshot", "saving", "branch", "store"),
    ("speculative",),
    ("engine",),
    ("measurement",),
    ("cli",),
)
RANK = {name: rank for rank, name in enumerate(name for floor in FLOORS for name in floor)}


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _unit(path: Path) -> str:
    """Return the module or subpackage right below the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[str]:
    """Yield the absolute dotted name of everything a file imports."""
    parts = ("llamabranch", *path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            if module == "llamabranch" or not node.module:
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def _inner_imports(path: Path) -> set[str]:
    """Return the units of the package that a file imports; "" stands for the package itself."""
    found = set()
    for name in _imports(path):
        head, *rest = name.split(".")
        if head == "llamabranch":
            unit = rest[0] if rest else ""
            found.add(unit if unit in RANK else "")
    return found


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_file_imports_from_its_floor_or_below(path: Path) -> None:
    unit = _unit(path)
    if unit == "__init__":
        assert "cli" not in _inner_imports(path), "importing the package must not need the CLI"
        return
    assert unit in RANK, f"give {unit} its place in FLOORS"
    if unit == "cli":
        allowed = {"", "cli", "hub", "measurement", "startup"}  # the public API, and what else
        assert _inner_imports(path) <= allowed
        return
    above = {name for name in _inner_imports(path) if not name or RANK[name] > RANK[unit]}
    assert not above, f"{unit} imports from above: {sorted(above)}"


def test_every_module_of_the_floors_exists() -> None:
    assert set(RANK) == {_unit(path) for path in _sources()} - {"__init__"}


def _floors_of_the_documents() -> list[set[str]]:
    """Return the units that the rows of the table in docs/architecture.md name."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| \d+ \| ([^|]*) \|", text, re.MULTILINE)
    return [
        {name.rstrip("/").removesuffix(".py") for name in re.findall(r"`(.+?)`", row)}
        for row in rows
    ]


def test_floors_are_those_of_the_documents() -> None:
    assert _floors_of_the_documents() == [set(floor) for floor in FLOORS]


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_native_imports_llama_cpp(path: Path) -> None:
    if _unit(path) != "native":
        assert not [name for name in _imports(path) if name.split(".")[0] == "llama_cpp"]


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_programs_use_the_public_api(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.startswith("llamabranch.native") for name in names), path


# -- names -----------------------------------------------------------------------------------------


def _modules() -> list[str]:
    found = [module.name for module in pkgutil.walk_packages([str(PACKAGE)], "llamabranch.")]
    return ["llamabranch", *(name for name in found if not name.endswith("__main__"))]


def _sort_key(name: str) -> tuple[int, str]:
    """Order constants, then classes, then functions, each by name, as ruff's RUF022 does."""
    if name.isupper():
        return 0, name
    return (1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("name", _modules())
def test_public_names_are_sorted_and_exist(name: str) -> None:
    module = importlib.import_module(name)
    names = list(getattr(module, "__all__", []))
    assert names == sorted(set(names), key=_sort_key)
    assert not [public for public in names if not hasattr(module, public)]


@pytest.mark.parametrize("name", sorted(llamabranch.__all__))
def test_public_name_is_documented(name: str) -> None:
    value = getattr(llamabranch, name)
    if callable(value):
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


# -- versions --------------------------------------------------------------------------------------


def _declared_version() -> str:
    found = re.search(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE
    )
    assert found
    return found[1]


def test_changelog_names_the_version() -> None:
    found = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert found
    assert found[1] == _declared_version()


def test_installed_version_is_the_declared_one() -> None:
    assert metadata.version("llamabranch") == _declared_version()
    assert getattr(llamabranch, "__version__", _declared_version()) == _declared_version()


# -- documents -------------------------------------------------------------------------------------


def _code_blocks() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text[: found.start()].count("\n") + 1
            yield f"{path.relative_to(ROOT)}:{line}", found[1]


@pytest.mark.parametrize(("where", "code"), [pytest.param(*b, id=b[0]) for b in _code_blocks()])
def test_documented_code_runs(
    where: str,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, where, "exec"), {"__name__": "__main__"})
    assert "Traceback" not in capsys.readouterr().err


# -- the command line and its page -----------------------------------------------------------------


def _commands() -> dict[str, typer.core.TyperCommand]:
    group = typer.main.get_command(app)
    return dict(group.commands)  # type: ignore[attr-defined]


def _sections() -> dict[str, str]:
    """Return the section of docs/cli.md for each command."""
    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    named = ((re.match(r"`llamabranch ([a-z]+)", part), part) for part in parts)
    return {found[1]: part for found, part in named if found}


def test_the_page_of_the_command_line_has_a_section_for_each_command_and_no_other() -> None:
    assert set(_sections()) == set(_commands())


@pytest.mark.parametrize("name", sorted(_commands()))
def test_options_of_a_command_are_those_of_its_section(name: str) -> None:
    section = _sections()[name]
    options = {
        option
        for param in _commands()[name].params
        for option in (*param.opts, *param.secondary_opts)
        if option.startswith("-")
    }
    named = set(re.findall(r"`(--?[a-z][a-z-]*)", section))
    assert options - {"--help", "-h"} <= named, "options that docs/cli.md does not name"
    # What the text says of options of other commands is said of them by name.
    known = {
        option for command in _commands().values() for p in command.params for option in p.opts
    }
    assert named <= known | {"--help"}, "docs/cli.md names options that do not exist"


@pytest.mark.parametrize("name", sorted(_commands()))
def test_option_tables_name_only_options_of_the_command(name: str) -> None:
    options = {option for param in _commands()[name].params for option in param.opts}
    for row in re.findall(r"^\| (`-.*?) \|", _sections()[name], re.MULTILINE):
        assert set(re.findall(r"`(-.+?)`", row)) <= options, f"{name} has no {row}"


def test_links_between_documents_lead_somewhere() -> None:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for found in re.finditer(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / found[1]).exists(), f"{path.name} links to {found[1]}"
