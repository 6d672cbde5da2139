"""Chat templates run in another process, so no template can block, fill or outlive this one."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from programs import run_code, run_python

from llamabranch import ConfigError
from llamabranch.errors import UnsupportedError
from llamabranch.model.templates import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hello"}]


def render(
    source: str,
    messages: Sequence[Mapping[str, object]] = MESSAGES,
    limit_s: float = 60.0,
    **variables: object,
) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, limit_s=limit_s)
    return template.render(messages, add_generation_prompt=True, variables=variables)


DOUBLED = (
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = DOUBLE %}{% endfor %}"
)


RUNAWAYS = [
    *(
        DOUBLED.replace("DOUBLE", twice) + "{{ n.s }}"
        for twice in (
            "n.s ~ n.s", "n.s + n.s", "n.s * 2", "[n.s, n.s] | join", "n.s | replace('a', 'aa')",
            "'%s%s' % (n.s, n.s)",
        )
    ),
    "{{ '%999999999999d' % 1 }}",
    "{{ '%9999999999.9999999999f' | format(1) }}",
    "{{ 'a' | center(999999999999) }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ ('a\n' * 999999) | indent(9999999) }}",
    "{{ [1] | slice(9999999999) | list }}",
    "{{ [1] | batch(9999999999, 0) | list }}",
    "{{ lipsum(n=99999999) }}",
    "{{ 'x' * 999999999999 }}",
    "{{ [1] * 999999999999 }}",
    "{{ 9 ** 999999999 }}",
    "{% for i in range(999999999) %}{% endfor %}",
    "{% set n = namespace(i=7) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ range(99999) | map('string') | map('center', 99999) | list }}",
    "{{ messages[0].content * 20000000 }}",  # more characters than any context has tokens
]  # fmt: skip


@pytest.mark.parametrize("source", RUNAWAYS)
def test_a_template_that_would_run_on_is_stopped(source: str) -> None:
    with pytest.raises(UnsupportedError, match="chat template"):
        render(source, limit_s=0.5)
    assert render("{{ messages[0].content }}") == "Hello"  # the next one is not affected


def test_an_answer_at_the_limit_is_taken_or_its_process_is_not_asked_again() -> None:
    source = "{% for a in range(30000) %}{% endfor %}"
    render(source)
    start = time.monotonic()
    render(source)
    taken_s = time.monotonic() - start
    for i in range(40):
        with suppress(UnsupportedError):
            render(source, limit_s=taken_s * (0.6 + i / 50))
        assert render("{{ messages[0].content }}") == "Hello"


def test_mappings_and_sequences_of_any_type_are_given_as_json() -> None:
    message = MappingProxyType({"role": "user", "content": "é\ud800"})
    assert render("{{ messages[0].content }}{{ x[1] }}", (message,), x=(1, 2)) == "é\ud8002"
    with pytest.raises(ConfigError, match="bytes"):
        render("", x=b"")
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(ConfigError, match="JSON"):
        render("", x=circle)


def test_threads_get_their_own_texts() -> None:
    by_thread: dict[int, list[str]] = {}

    def work(number: int) -> None:
        by_thread[number] = [render("{{ n }} {{ bos_token }}", n=number) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert by_thread == {i: [f"{i} <s>"] * 20 for i in range(4)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_a_child_of_fork_renders_for_itself() -> None:
    program = """
        import os, sys
        from llamabranch.model.templates import ChatTemplate
        template = ChatTemplate("{{ n }}", {})
        def render(n):
            return template.render([], add_generation_prompt=True, variables={"n": n})
        assert render(1) == "1"
        child = os.fork()
        found = [render(n) for n in range(50)]
        assert found == [str(n) for n in range(50)], found
        if child:
            assert os.waitpid(child, 0)[1] == 0
            assert render(2) == "2"
    """
    run_code(program, PYTHONWARNINGS="error::ResourceWarning")


def test_an_interrupted_rendering_leaves_no_answer_behind() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert render("a") == "a"  # the process runs
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        render(endless)
        timer.join()
    assert [render("{{ n }}", n=n) for n in range(3)] == ["0", "1", "2"]


PROGRAM = """
import json, os, sys
from llamabranch.model.templates import ChatTemplate
from llamabranch.errors import LlamaBranchError
{before}
template = ChatTemplate("{{{{ 1 + 1 }}}}", {{}})
try:
    print(json.dumps(template.render([], add_generation_prompt=True, variables={{}})))
except LlamaBranchError as error:
    print(json.dumps([type(error).__name__, str(error.message), error.hint]))
{after}
"""


def run(before: str, folder: str = "") -> Any:
    # From standard input: __main__ has no file that could be imported.
    program = PROGRAM.format(before=before, after="")
    done = run_python("-W", "error::ResourceWarning", "-", stdin=program, FOLDER=folder)
    assert "subprocess" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def test_it_needs_neither_a_main_module_nor_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "signal.py").write_text("raise ImportError")
    before = "os.chdir(os.environ['FOLDER']); os.environ['PYTHONPATH'] = os.environ['FOLDER']"
    assert run(before, str(tmp_path)) == "2"


def test_without_jinja_it_names_what_to_install() -> None:
    kind, message, hint = run("sys.modules['jinja2'] = None")
    assert kind == "UnsupportedError" and "Jinja" in message and hint == "pip install jinja2"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts processes in /proc")
def test_the_process_ends_with_the_one_that_started_it() -> None:
    children = "open('/proc/self/task/%d/children' % os.getpid()).read().split()"
    for end in ("", "\nsys.stdout.flush()\nos.kill(os.getpid(), 9)"):
        program = PROGRAM.format(before="", after=f"print(json.dumps({children})){end}")
        done = run_python("-c", program, code=None)
        (pid,) = json.loads(done.stdout.splitlines()[1])
        for _ in range(600):  # it ends when its input ends
            if not os.path.exists(f"/proc/{pid}/exe"):
                break
            threading.Event().wait(0.05)
        assert not os.path.exists(f"/proc/{pid}/exe") or "template" not in _command(pid)


def _command(pid: str) -> str:
    with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
        return file.read()
