"""``llamabranch agent``: functions of a file as tools, steps as they happen, Ctrl-C."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import scripts
import stages
from commands import COMMAND, answer, on_terminal, run, said_by
from self_signal import signalled

from llamabranch.cli import options

TOOLS = '''
from __future__ import annotations
from math import sqrt  # of another module
from textwrap import dedent

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

async def name() -> str:
    """Tell a name."""
    return "Ida"

def _hidden(x):
    pass
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "scripts.gguf"
    return scripts.write_script(path, stages.SCRIPTS)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS, encoding="utf-8")
    return path


def test_the_answer_goes_to_standard_output_and_the_steps_to_standard_error(
    model: Path, tools: Path
) -> None:
    arguments = ("agent", "-m", model, "--tools", tools, "-t", "1")
    result = run(*arguments, "two: go")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Both are here.\n"
    for step in ('add {"a": 1, "b": 2}', "name {}", "  3\n", "  Ida\n"):
        assert step in result.stderr
    for more in ((), ("-",)):
        assert run(*arguments, *more, stdin="one: go\n").stdout == "It is three.\n"
    report = answer(*arguments, "-s", "3", "-sys", "Help.", "one:", "go")
    assert report["text"] == "It is three." and report["finish_reason"] == "stop"
    assert report["seed"] == 3 and report["generated"] == 2
    assert report["calls"] == [{"name": "add", "arguments": {"a": 1, "b": 2}}]
    assert report["messages"][:2] == [
        {"role": "system", "content": "Help."}, {"role": "user", "content": "one: go"},
    ]  # fmt: skip


def test_limits_a_schema_and_the_other_settings_of_an_agent(model: Path, tools: Path) -> None:
    arguments = ("agent", "-m", model, "--tools", tools, "-t", "1")
    for limit, reason, told in (
        (("-n", "1"), "length", "the limit of tokens: -n"),
        (("--max-turns", "1", "-S", "parallel_tool_calls=false"), "turns", "--max-turns"),
    ):
        result = run(*arguments, *limit, "again: go")
        assert result.exit_code == 1 and told in result.stderr, (reason, result.output)
        report = json.loads(run(*arguments, *limit, "again: go", "--json").stdout)
        assert report["finish_reason"] == reason
    done = run(*arguments, "-n", "-1", "-j", '{"type": "integer"}', "typed: go")
    assert done.exit_code == 0 and done.stdout == "3\n"
    pattern = r"0 calls; \d+ tokens read, \d+ cached, \d+ generated in \d+\.\d s"
    assert re.search(pattern, done.stderr)
    assert "no setting 'tool_seconde'" in said_by(*arguments, "-S", "tool_seconde=3", "one: go")
    assert "tool_choice" in said_by(*arguments, "-S", "tool_choice=nope", "one: go")
    shown = run("agent", "-h").stdout
    for name in options._AGENT:
        assert name in shown


def test_what_a_function_prints_is_no_answer(model: Path, tools: Path) -> None:
    noisy = TOOLS.replace("def add", "print('noise 1')\n\ndef add")
    tools.write_text(noisy.replace("    return a", "    print('noise 2')\n    return a"))
    arguments = ["agent", "-m", model, "--tools", tools, "-t", "1", "one: go"]
    result = run(*arguments)
    assert result.stdout == "It is three.\n"
    assert "noise 1" in result.stderr and "noise 2" in result.stderr
    assert answer(*arguments)["text"] == "It is three."


def test_on_a_terminal_texts_are_shown_as_they_are_written(model: Path, tools: Path) -> None:
    command = [*COMMAND, "agent", "-m", str(model), "--tools", str(tools), "-t", "1", "two: go"]
    shown, _ = on_terminal(command, 80)
    assert (
        shown.index("Let me see.")
        < shown.index('add {"a": 1, "b": 2}')
        < shown.index("Both are here.")
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "defines no function"),
        ("def f(:", "cannot be run: SyntaxError: invalid syntax (bad.py, line 1)"),
        ("def f(a): pass", "the parameter a has no annotation"),
        ("raise SystemExit(3)", "cannot be run"),
        (None, "cannot read"),
    ],
)
def test_files_of_functions_that_are_refused(
    model: Path, tmp_path: Path, source: str | None, message: str
) -> None:
    path = tmp_path / "bad.py"
    if source is not None:
        path.write_text(source, encoding="utf-8")
    result = run("agent", "-m", model, "--tools", path, "one: go")
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_no_task_no_template_and_a_function_that_raises(model: Path, tools: Path) -> None:
    refused = run("agent", "-m", model, "-n", "0", "one: go")  # before, it was the default limit
    assert refused.exit_code == 2 and "max_tokens must be at least 1, not 0" in refused.stderr
    tools.write_text('def add(a: int, b: int) -> int:\n    "Add."\n    return a / 0\n')
    for arguments, code, message in (
        (("-m", model), 2, "no task was given"),
        (("-m", "tale-target", "Tell a tale."), 1, "no chat template"),
        (("-m", model, "--tools", tools, "one: go", "--json"), 1, "add raised ZeroDivisionError"),
    ):
        result = run("agent", *arguments, stdin="")
        assert (result.exit_code, result.stdout) == (code, "") and message in result.stderr


def test_ctrl_c_ends_cleanly(model: Path, tmp_path: Path) -> None:
    path, tools = tmp_path / "called.txt", tmp_path / "tools.py"
    tools.write_text(
        "def add(a: int, b: int) -> int:\n    'Add.'\n"
        f"    open({str(path)!r}, 'w').write('1\\n2\\n')\n    return 0\n",
        encoding="utf-8",
    )
    command = [
        *signalled(2, path), "agent", "-m", str(model), "--tools", str(tools), "-t",
        "1", "one: go",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr and "Traceback" not in done.stderr
