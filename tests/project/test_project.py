"""Public names, versions, and documents that say what is: their code runs, their links lead somewhere."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import typer
import typer.core
from conftest import has_smollm2, listed

import llamabranch
from llamabranch.cli.app import COMMANDS, load_command

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "llamabranch"

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


def test_top_of_the_package_has_what_most_programs_need() -> None:
    """The rest is in its rooms: ``lb.speculative``, ``lb.hub``, ``lb.model`` and so on."""
    names = [n for n in llamabranch.__all__ if not inspect.ismodule(getattr(llamabranch, n))]
    assert len(names) <= 67  # ParseError: what to catch around ``Result.parsed``


@pytest.mark.parametrize("name", sorted(llamabranch.__all__))
def test_public_name_is_documented(name: str) -> None:
    value = getattr(llamabranch, name)
    if callable(value):
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"
    if inspect.isclass(value):
        for member, what in inspect.getmembers(value):
            if not member.startswith("_") and (callable(what) or isinstance(what, property)):
                assert inspect.getdoc(what), f"{name}.{member} has no docstring"


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("listing", ["slow.txt", "no_numbers.txt"])
def test_everything_that_is_listed_exists(listing: str) -> None:
    tests = ROOT / "tests"
    files = sorted(tests.rglob("test_*.py"))
    there = {f"{folder.name}/" for folder in tests.iterdir() if folder.is_dir()}
    there |= {path.name for path in files}
    for path in files:
        functions = re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
        there |= {*functions, *(f"{path.name}::{name}" for name in functions)}
    assert not set(listed(listing)) - there


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


DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "training" / "README.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
]


def test_reference_has_every_public_name_once() -> None:
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    text = "".join(page.read_text("utf-8") for page in pages)
    directives = re.findall(r"^::: llamabranch\.([\w.]+)$", text, re.MULTILINE)
    top = set(llamabranch.__all__)
    # A room has one directive for all of its names, or one for each that the top lacks.
    rooms = {name for name in top if inspect.ismodule(getattr(llamabranch, name))}
    rooms -= set(directives)
    expected = sorted(top - rooms)
    for room in rooms:
        if room != "model":  # most of its names are for other rooms
            expected += {
                f"{room}.{name}" for name in getattr(llamabranch, room).__all__ if name not in top
            }
    expected += ["model.TextDecoder", "model.ToolCall", "model.VocabularyReport"]
    assert sorted(directives) == sorted(expected)


def test_site_has_every_document() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    for path in (ROOT / "docs").rglob("*.md"):
        assert f": {path.relative_to(ROOT / 'docs')}\n" in nav


def _code_blocks() -> Iterator[tuple[str, str]]:
    for path in DOCUMENTS:
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
    if not has_smollm2():  # then the bundled model
        code = code.replace('"smollm2-135m:Q8_0"', 'chat_template="chatml"')
    exec(compile(code, where, "exec"), {"__name__": "__main__"})
    assert "Traceback" not in capsys.readouterr().err


# -- the command line and its page -----------------------------------------------------------------


def _commands() -> dict[str, typer.core.TyperCommand]:
    return {name: load_command(name) for name in COMMANDS}


def test_help_lists_each_command_with_the_first_sentence_of_its_own_help() -> None:
    for name, line in COMMANDS.items():
        assert (load_command(name).help or "").split("\n\n")[0].replace("\n", " ") == line
        assert load_command(name).name == name


def _sections() -> dict[str, str]:
    """Return the section of docs/cli.md for each command."""
    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    named = ((re.match(r"`llamabranch ([a-z]+)", part), part) for part in parts)
    return {found[1]: part for found, part in named if found}


def _other_names() -> dict[str, set[str]]:
    """Return the other names of each option in docs/cli.md."""
    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    (table,) = re.findall(
        r"^\| option \| other names \|\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL
    )
    rows = re.findall(r"^\| `(--.+?)` \| (.+) \|$", table, re.MULTILINE)
    return {option: set(re.findall(r"`(--.+?)`", names)) for option, names in rows}


def test_the_page_of_the_command_line_has_a_section_for_each_command_and_no_other() -> None:
    assert set(_sections()) == set(_commands())


def _groups(section: str) -> dict[str, str]:
    """Return the tables of options of several commands that a section links to, by their anchors."""
    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    found = {
        heading.lower().replace(" ", "-"): table
        for heading, table in re.findall(r"^### (\w+ options)\n(.*?)(?=^##)", text, re.M | re.S)
    }
    return {anchor: found[anchor] for anchor in re.findall(r"\(#([a-z]+-options)\)", section)}


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
    for anchor, table in _groups(section).items():
        listed = set(re.findall(r"`(--?[a-z][a-z-]*)", "".join(_first_cells(table))))
        if anchor in ("model-options", "prompt-options"):  # not every command drafts or chats
            listed &= options
        assert listed and listed <= options, f"{name} lacks some of the {anchor}"
        named |= listed
    for option, names in _other_names().items():
        if option in options:
            assert option in named and not names & named, "other names have a table of their own"
            assert names <= options
            named |= names
    assert options - {"--help", "-h"} <= named, "options that docs/cli.md does not name"
    # What the text says of options of other commands is said of them by name.
    known = {
        option
        for command in _commands().values()
        for p in command.params
        for option in (*p.opts, *p.secondary_opts)
    }
    assert named <= known | {"--help"}, "docs/cli.md names options that do not exist"


def _first_cells(section: str) -> list[str]:
    return re.findall(r"^\| (`-.*?) \|", section, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(_commands()))
def test_option_tables_name_only_options_of_the_command(name: str) -> None:
    params = _commands()[name].params
    options = {option for p in params for option in (*p.opts, *p.secondary_opts)}
    for row in _first_cells(_sections()[name]):
        assert set(re.findall(r"`(-.+?)`", row)) <= options, f"{name} has no {row}"


def test_readme_can_be_read_in_some_minutes() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 900


@pytest.mark.slow
def test_program_of_the_readme_has_types(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    program = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert "{person!r}" in program
    (tmp_path / "program.py").write_text(program.replace("{person!r}", "{person.name}"), "utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    found = subprocess.run(
        [*command, tmp_path / "program.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for found in re.finditer(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / found[1]).exists(), f"{path.name} links to {found[1]}"
