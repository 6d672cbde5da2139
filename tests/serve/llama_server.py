"""Takes the options of ``llama-server`` and runs ``llamabranch serve``, for llama.cpp's own tests.

The model is the bundled one, whatever is asked for. `Process` stands in for ``subprocess.Popen``: the
server is a thread of the process that asks for it, which starts in tenths of a second.
"""

from __future__ import annotations

import subprocess
import threading

from llamabranch.cli import app
from llamabranch.serve.server import Server

__all__ = ["Process", "mapped"]

# What each option is called here, with {} for its value; all others are dropped.
OPTIONS = {
    **{
        name: (name, "{}")
        for name in (
            "--port", "--temp", "--seed", "--alias", "--ctx-size", "--parallel", "--n-predict",
            "--api-key", "--chat-template", "--chat-template-file", "--host",
        )
    },
    "--batch-size": ("-S", "n_batch={}"),
    "--ubatch-size": ("-S", "n_ubatch={}"),
    "--cors-origins": ("--allow-origin", "{}"),
    "--metrics": ("--limit", "metrics=true"),
    "--slots": ("--limit", "slots=true"),
    "--no-slots": ("--limit", "slots=false"),
    "--kv-unified": ("-S", "kv_unified=true"),
}  # fmt: skip
WITHOUT_VALUE = {
    "--offline", "--cont-batching", "--embedding", "--reranking", "--swa-full", "--verbose",
    "--context-shift", "--no-ui", "--no-models-autoload", "--jinja", "--no-jinja", "--no-mmproj",
    "--no-cache-idle-slots", "--ui-mcp-proxy", "--backend_sampling", "--metrics", "--slots", "--no-slots",
    "--kv-unified",
}  # fmt: skip


def mapped(arguments: list[str]) -> list[str]:
    """Return the arguments of ``llamabranch`` for those of ``llama-server``."""
    found = ["serve", "--threads", "1", "--draft", "none", "--limit", "shutdown_timeout_s=0"]
    left = list(arguments)
    while left:
        name = left.pop(0)
        value = "" if name in WITHOUT_VALUE else left.pop(0)
        if name == "--host":
            value = value.split(",")[0]
        found += [part.format(value) for part in OPTIONS.get(name, ())]
    # What llama-server does unless it is told otherwise.
    for given, default in (
        ("metrics=", ["--limit", "metrics=false"]),
        ("--allow-origin", ["--allow-origin", "*"]),
        ("--chat-template", ["--chat-template", "chatml"]),
    ):
        if not any(each.startswith(given) for each in found):
            found += default
    return found


class Process:
    """A server on a thread, with the methods of ``subprocess.Popen`` that llama.cpp's tests call."""

    pid = 0

    def __init__(self, command: list[str], **_: object) -> None:
        self._server: Server | None = None
        self._thread = threading.Thread(target=self._run, args=(mapped(command[1:]),))
        self._thread.start()

    def _run(self, arguments: list[str]) -> None:
        run = Server.run

        def noted(server: Server) -> None:
            self._server = server
            run(server)

        Server.run = noted  # type: ignore[method-assign, assignment]
        try:
            app(arguments, standalone_mode=False)
        finally:
            Server.run = run  # type: ignore[method-assign]

    def poll(self) -> int | None:
        """Return None while it runs."""
        return None if self._thread.is_alive() else 0

    def terminate(self) -> None:
        """Let it end."""
        if self._server is not None:
            self._server.stop()

    kill = terminate

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("llama-server", timeout or 0.0)
        return 0
