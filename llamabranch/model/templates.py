"""Chat templates: rendered in a separate process, with limits on time and memory.

A template is a Jinja program from the GGUF, which anyone may have written. A single expression can run
forever or fill the memory inside one Python operator, where no thread can stop it. So a worker process
(`template_worker`) renders the templates of all models. It starts with the first template and stops
with this process. If a template exceeds a limit, the worker is killed, and the next template starts a
new one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import weakref
from ast import literal_eval
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import cast

from ..errors import ConfigError, UnsupportedError
from ..native.handle import forkable_lock
from ..native.interrupts import call_in_thread

_LIMIT_S = 10.0  # an ordinary conversation takes some milliseconds
_MEMORY_BYTES = 1 << 30
_START_S = 60.0  # on a busy machine
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")


class ChatTemplate:
    """A chat template.

    Args:
        source: its Jinja source.
        special: texts of special tokens by the names that templates use: ``bos_token``, ...
        limit_s: the time limit of a rendering in seconds.
    """

    def __init__(
        self, source: str, special: Mapping[str, str], *, limit_s: float = _LIMIT_S
    ) -> None:
        self._source = source
        self._special = dict(special)
        self._limit_s = limit_s

    def with_variables(self, variables: Mapping[str, str]) -> ChatTemplate:
        """Return the same template with other preset variables."""
        special = {**self._special, **variables}
        return ChatTemplate(self._source, special, limit_s=self._limit_s)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChatTemplate) and (
            (self._source, self._special) == (other._source, other._special)
        )

    def __hash__(self) -> int:
        return hash(self._source)

    @cached_property
    def strings(self) -> frozenset[str]:
        """The string literals in its source, where it may cut or join texts."""
        strings = set()
        for literal in _STRING.findall(self._source):
            try:
                strings.add(str(literal_eval(literal)))
            except (ValueError, SyntaxError):
                strings.add(literal[1:-1])
        return frozenset(strings - {""})

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """Return the text of a conversation.

        Raises:
            ConfigError: the template refuses the messages (with its reason), or a message or variable is
                not a JSON type.
            UnsupportedError: Jinja is not installed, or the template is invalid, failed, did something
                that the sandbox forbids, or took too much time or memory.
        """
        arguments = {
            **self._special,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        _, (reply,) = self._ask([arguments])
        if "refused" in reply:
            raise ConfigError(f"the model's chat template refuses the messages: {reply['refused']}")
        if "missing" in reply:
            raise UnsupportedError("chat templates need Jinja", hint="pip install jinja2")
        if "invalid" in reply:
            raise UnsupportedError(
                f"the model's chat template is not valid Jinja: {reply['invalid']}"
            )
        if "text" not in reply:
            raise UnsupportedError(f"the model's chat template failed: {reply['failed']}")
        return reply["text"]

    def render_many(
        self, batch: Sequence[Mapping[str, object]]
    ) -> tuple[list[str], list[dict[str, str]]]:
        """Return the names of the template's variables, and a reply for each set of variables.

        A reply has the ``text``, or the reason why it is missing: ``refused``, ``failed``, ``invalid`` or
        ``missing``. All are rendered in one exchange with the worker, under one time limit.

        Raises:
            UnsupportedError: the template took too much time or memory.
        """
        arguments = [
            {"add_generation_prompt": False, **self._special, **variables} for variables in batch
        ]
        return self._ask(arguments)

    def _ask(self, batch: Sequence[Mapping[str, object]]) -> tuple[list[str], list[dict[str, str]]]:
        try:
            text = json.dumps({"source": self._source, "batch": batch}, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"messages and variables must be JSON types: {error}") from None
        reply = _ask(text.encode("ascii"), self._limit_s)
        return cast(list[str], reply["names"]), cast(list[dict[str, str]], reply["replies"])


def _plain(value: object) -> object:
    """Convert any mapping or sequence to a JSON type."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not one")


# -- the worker ------------------------------------------------------------------------------------


class _Worker:
    """A running worker process; it is stopped when it is no longer used, and at exit."""

    def __init__(self) -> None:
        specs = [find_spec(name) for name in ("jinja2", "markupsafe")]
        origins = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
        # Jinja needs MarkupSafe.
        folders = [str(Path(origin).parents[1]) for origin in origins] if len(origins) == 2 else []
        program = Path(__file__).with_name("template_worker.py")
        self.pid = os.getpid()
        self._process = subprocess.Popen(
            # -I -S: ignore the environment, the working folder and .pth files.
            [sys.executable, "-I", "-S", str(program), str(_MEMORY_BYTES), "60", *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._stop = weakref.finalize(self, _stop, self._process, self.pid)
        if self.ask(b'{"source": "", "batch": [{}]}', _START_S) is None:  # it also imports Jinja
            raise UnsupportedError(
                "the process that renders chat templates cannot be started",
                hint=f"{sys.executable} must be a Python interpreter",
            )

    @property
    def is_running(self) -> bool:
        """False if it has ended, and in a child of fork(), because it belongs to the parent."""
        return self.pid == os.getpid() and self._stop.alive and self._process.poll() is None

    def ask(self, request: bytes, limit_s: float) -> dict[str, object] | None:
        """Return the reply; None if a limit or an error ended the worker."""
        process, end = self._process, monotonic() + limit_s
        stdin, stdout = process.stdin, process.stdout
        if stdin is None or stdout is None:  # both are pipes
            return None

        def exchange() -> bytes:
            with suppress(OSError):  # it has ended, so there is no reply
                stdin.write(request + b"\n")
                stdin.flush()
            return stdout.readline()

        def is_to_stop() -> bool:
            left = end - monotonic()  # an ordinary reply comes before the first check of the memory
            return left < 0 or (
                left < limit_s - 0.2 and _resident_bytes(process.pid) > _MEMORY_BYTES
            )

        line = b""
        try:
            line = call_in_thread(exchange, stop=process.kill, is_to_stop=is_to_stop)
        finally:
            # Stop it after Ctrl-C or a timeout too: its late reply must not answer the next request.
            if not line.endswith(b"\n") or monotonic() > end:
                self._stop()
        reply: dict[str, object] | None = json.loads(line) if line.endswith(b"\n") else None
        return reply


def _stop(process: subprocess.Popen[bytes], pid: int) -> None:
    if pid == os.getpid():
        process.kill()
    else:  # in a child of fork() it belongs to the parent
        process.returncode = 0
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # it still had data to write
                pipe.close()
    process.wait()


def _resident_bytes(pid: int) -> int:
    """Return a process's memory on systems that cannot limit it, such as macOS; elsewhere 0."""
    if platform.system() in ("Linux", "Windows"):
        return 0
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=False)
    return 1024 * int(done.stdout or 0)


_lock = forkable_lock()
_worker: _Worker | None = None


def _ask(request: bytes, limit_s: float) -> dict[str, object]:
    global _worker
    with _lock:
        if _worker is None or not _worker.is_running:
            _worker = None
            if getattr(sys, "frozen", False) or not sys.executable:
                raise UnsupportedError(
                    "chat templates need a Python interpreter that can be started",
                    hint="in a frozen application, write the conversation as text",
                )
            try:
                _worker = _Worker()
            except OSError as error:
                raise UnsupportedError(
                    f"the process that renders chat templates cannot be started: {error}"
                ) from error
        reply = _worker.ask(request, limit_s)
    if reply is None:
        raise UnsupportedError(
            f"the model's chat template was stopped: it took more than {limit_s:g} s or "
            f"{_MEMORY_BYTES >> 20} MiB"
        )
    return reply
