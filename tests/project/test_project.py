"""Public names, versions, what runs the tests; documents: their code runs, their links lead somewhere."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import has_smollm2, listed

import llamabranch
from llamabranch import errors
from llamabranch.engine.completion import Call
from llamabranch.pictures import visible

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "llamabranch"

# -- names -----------------------------------------------------------------------------------------


def _modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages([str(PACKAGE)], "llamabranch.")]
    return ["llamabranch", *(name for name in names if not name.endswith("__main__"))]


@pytest.mark.parametrize("name", _modules())
def test_public_names_exist(name: str) -> None:
    module = importlib.import_module(name)
    assert not [public for public in getattr(module, "__all__", []) if not hasattr(module, public)]


def test_top_of_the_package_has_what_most_programs_need() -> None:
    """All other names are in their modules: ``lb.errors``, ``lb.speculative``, ``lb.hub`` and so on."""
    assert len(llamabranch.__all__) <= 45
    assert dir(llamabranch) == llamabranch.__all__
    name = "nothing"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(llamabranch, name)


def test_characters_that_cannot_be_seen_are_codes() -> None:
    assert visible("caf\u00e9 \u202eabc\x00") == "caf\u00e9 \\u202eabc\\u0000"


# -- what runs the tests ---------------------------------------------------------------------------


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
    assert all(n == 0 or n > 1 for n in listed(listing).values())  # some of the cases stay


# -- documents -------------------------------------------------------------------------------------


def test_versions_are_the_declared_one() -> None:
    version = re.compile(r'^(?:version = "|## )([^\s"]+)', re.MULTILINE)
    versions = [
        version.search((ROOT / x).read_text("utf-8")) for x in ("pyproject.toml", "CHANGELOG.md")
    ]
    declared = metadata.version("llamabranch")
    assert [match and match[1] for match in versions] == [declared] * 2
    assert getattr(llamabranch, "__version__", declared) == declared
    assert (PACKAGE / "py.typed").is_file()


DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("training/*.md"),
     *ROOT.glob("benchmarks/*.md")]
)  # fmt: skip


def test_reference_has_every_public_name_once() -> None:
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    text = "".join(page.read_text("utf-8") for page in pages)
    directives = re.findall(r"^::: llamabranch\.([\w.]+)$", text, re.MULTILINE)
    top = set(llamabranch.__all__)
    # A module has one directive for all its names, or one for each name that the top does not have.
    modules = {"agents", "chat", "eval", "hub", "ray_data", "search", "serve", "speculative"}
    expected = sorted(top | (modules & set(directives)))
    for module in modules - set(directives):
        names = getattr(llamabranch, module).__all__
        expected += {f"{module}.{name}" for name in names if name not in top}
    errors = inspect.getmembers(
        llamabranch.errors, lambda it: inspect.isclass(it) and it.__module__ == "llamabranch.errors"
    )
    expected += [f"errors.{name}" for name, _ in errors if name not in top and name[0] != "_"]
    expected += ["context.Capabilities", "context.PromptProgress", "context.TokenScore"]
    expected += ["context.Usage", "engine.Cause", "engine.EngineStats", "engine.Job"]
    expected += ["engine.Record", "sampling.Sampler"]
    expected += ["model.TextDecoder", "model.ToolCall", "model.VocabularyReport", "model.Turn"]
    expected += ["model.TurnEvent", "model.TurnFormat", "model.TurnParts", "model.TurnReader"]
    assert sorted(directives) == sorted(expected)


def _code_blocks() -> Iterator[tuple[str, str]]:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            yield f"{path.relative_to(ROOT)}:{line}", match[1]


@pytest.mark.parametrize(("where", "code"), [pytest.param(*b, id=b[0]) for b in _code_blocks()])
def test_documented_code_runs(
    where: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code = code.replace('"qwen2.5-coder-1.5b"', '"smollm2-135m:Q8_0"')  # which is a large download
    if not has_smollm2():  # then the bundled model
        code = code.replace('"smollm2-135m:Q8_0"', 'chat_template="chatml"')
    try:
        exec(compile(code, where, "exec"), {"__name__": "__main__"})
    except (errors.LlamaBranchError, errors.LlamaBranchWarning) as error:
        # What the model writes may end a program: nothing, no answer, or text up to the limit.
        ends = "no token was generated|no text has an answer|it ended with 'length'"
        assert re.search(ends, str(error)), error
    assert "Traceback" not in capsys.readouterr().err


def test_documented_lines_of_files_are_requests() -> None:
    text = "".join(path.read_text("utf-8") for path in DOCUMENTS)
    lines = "".join(re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()
    requests = [llamabranch.Request.from_json(json.loads(line), "") for line in lines]
    assert [request.id for request in requests] == ["fox", "q1"]


def test_the_page_of_the_command_line_is_what_its_generator_prints() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "docs" / "hooks" / "cli_page.py", "--print"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    page = (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8")
    assert page == printed.stdout, "python docs/hooks/cli_page.py writes it"


@pytest.mark.slow
def test_program_of_the_readme_has_types(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    program = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert "temperature=0).parsed)" in program
    program = program.replace("temperature=0).parsed)", "temperature=0).parsed.rent)")
    (tmp_path / "program.py").write_text(program, "utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    done = subprocess.run(
        [*command, tmp_path / "program.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for match in re.finditer(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / match[1]).exists(), f"{path.name} links to {match[1]}"


# -- tables of options -------------------------------------------------------------------------------

TABLES = [
    (path.name, kind, owner, name, default)
    for path in sorted((ROOT / "docs").glob("*.md"))
    for kind, owner, rows in re.findall(
        r"^\| ((?:further )?option) of `lb\.([\w.]+)` \| default \|.*\n\|[-|]+\|\n((?:\|.*\n)+)",
        path.read_text("utf-8"), re.MULTILINE,
    )
    for names, default in re.findall(r"^\| (`.*?`) \| `(.*?)` \|", rows, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
]  # fmt: skip
GUIDE = {"batching.md", "branches.md", "chat.md", "serve.md", "service.md", "speculation.md",
         "structured.md"}  # fmt: skip


def defaults(owner: str) -> dict[str, object]:
    """Return the default of every option of a class or function, as a user meets it."""
    if owner == "Context.chat":
        with llamabranch.load(chat_template="chatml", n_threads=1) as ctx:
            call = Call(ctx, [("user", "x")], None, {}, chats=True)
            job = ctx.submit("x")
            job.cancel()
        (request,) = call.requests
        found: dict[str, object] = {
            name: getattr(request, name) for name in request.__struct_fields__
        }
        settings = dataclasses.asdict(llamabranch.SamplingParams())
        return settings | found | {"max_tokens": job.max_tokens, "drafter": call.drafter}
    of: Any = functools.reduce(getattr, owner.split("."), llamabranch)
    parts: list[Any] = (
        [of, llamabranch.Model, llamabranch.ContextParams] if of is llamabranch.load else [of]
    )
    signatures = [inspect.signature(part).parameters for part in parts]
    return {name: it.default for parameters in signatures for name, it in parameters.items()}


def test_tables_of_options_have_the_defaults_and_are_short() -> None:
    """A reader of a checkout sees no reference, so each guide has the options that people set."""
    assert {page for page, *_ in TABLES} == GUIDE
    known = {owner: defaults(owner) for owner in {owner for _, _, owner, *_ in TABLES}}
    for page, _, owner, name, default in TABLES:
        value = known[owner][name]
        shown = value.__name__ if isinstance(value, type) else repr(value)
        assert shown == default.replace('"', "'"), (page, owner, name)
    rows = Counter((page, kind, owner) for page, kind, owner, *_ in TABLES)
    assert max(rows.values()) <= 10, rows
